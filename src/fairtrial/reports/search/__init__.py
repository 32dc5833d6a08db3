"""Searches for better prompts, as they are stored."""
