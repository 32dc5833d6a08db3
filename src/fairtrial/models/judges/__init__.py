"""Judges: models that score outputs, with prompts protected against injection."""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
