"""Fairtrial: evaluate prompts, agents and models; get numbers you can defend."""

from fairtrial._version import __version__

__all__ = ["__version__"]
