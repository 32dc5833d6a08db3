"""Sandboxes: run code that a model wrote, isolated from this machine and with limits."""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
