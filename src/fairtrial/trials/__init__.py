"""One trial: its key, its context, its environment, its result."""

from fairtrial.trials.environment import Environment, EnvironmentRegistry, check_state

__all__ = ["Environment", "EnvironmentRegistry", "check_state"]
