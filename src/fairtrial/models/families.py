"""Families of models, derived from their names."""

from __future__ import annotations

import re

_FAMILIES = {
    "gpt": ("gpt", "chatgpt", r"o[1-9]"),
    "claude": ("claude",),
    "gemini": ("gemini",),
    "llama": ("llama", "codellama"),
    "qwen": ("qwen", "qwq"),
    "mistral": ("mistral", "mixtral", "ministral", "magistral", "codestral", "devstral", "pixtral"),
    "deepseek": ("deepseek",),
    "command": ("command",),
    "grok": ("grok",),
    "phi": ("phi",),
    "gemma": ("gemma",),
}
# A whole word, which a version may follow: "phi3" and "Phi-4" belong to the family, "dolphin" does not.
_FAMILY_NAMES = {name: re.compile(rf"(?<![a-z0-9])(?:{'|'.join(words)})(?![a-z])") for name, words in _FAMILIES.items()}


def family(model: str) -> str:
    """Return the family of a model, such as "claude"; its name if the family is unknown."""
    lowered = model.lower()
    return next((name for name, pattern in _FAMILY_NAMES.items() if pattern.search(lowered)), lowered)
