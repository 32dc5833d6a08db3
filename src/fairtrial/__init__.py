"""Fairtrial: evaluate prompts, agents and models; get numbers you can defend."""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
