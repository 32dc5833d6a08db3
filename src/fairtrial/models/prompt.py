"""Prompts with typed parameters and typed outputs."""

from __future__ import annotations


class Prompt[O]:
    """A template bound to its parameters."""
