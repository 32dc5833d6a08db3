"""A named variant of the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairtrial.base.frozen import EMPTY, FrozenDict, first_is, freeze
from fairtrial.errors import ConfigurationError
from fairtrial.trials.task import Task


@first_is(str)
@dataclass(frozen=True, slots=True)
class Experiment:
    """A named variant: parameters that the task reads from `ctx.experiment`, or a separate task."""

    name: str = "baseline"
    params: Mapping[str, Any] = EMPTY
    task: Task | None = None

    def __post_init__(self) -> None:
        if not self.name or any(mark in self.name for mark in ":@/\n"):
            raise ConfigurationError(f"invalid experiment name {self.name!r}: it must be text without ':', '@' or '/'")
        if type(self.params) is not FrozenDict:
            object.__setattr__(self, "params", freeze(dict(self.params)))
