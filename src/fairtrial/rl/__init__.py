"""Reinforcement learning: any run is a batch of rollouts, any evaluator is a reward. No trainer is imported."""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
