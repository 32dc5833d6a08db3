"""Evaluators: plain functions that turn an output, and the session behind it, into a score."""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
