"""Leaderboards and preferences of several systems."""
