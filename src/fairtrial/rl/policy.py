"""The task of a suite with the model of a trainer instead of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.suites.suite import EvalSuite
from fairtrial.trials.task import WITH_ADAPTER


def with_adapter(suite: EvalSuite, adapter: ProviderAdapter) -> Any:
    """Return the task of a suite with another model.

    Raises:
        ConfigurationError: the task is no `agent_task` and no `prompt_task`.
    """
    make: Callable[[ProviderAdapter], Any] | None = getattr(suite.prepared().rules.tasks[0].fn, WITH_ADAPTER, None)
    if make is None:
        raise ConfigurationError(
            f"the task of suite {suite.name!r} must be an agent_task or a prompt_task, so that the model of the "
            "trainer can take the place of its own"
        )
    return make(adapter)
