"""Test utilities: fakes, checks for your own mailboxes, and suites as pytest tests."""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
