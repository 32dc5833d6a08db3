"""Prompts, models and agents: the things people evaluate, and what judges are made of."""
