"""Checks before the first trial of a run: prices of models, the event loop, and inputs of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fairtrial.base.offload import on_trio
from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError
from fairtrial.runs.events import log
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.run_trial import TrialRules
from fairtrial.trials.task import CHECK_INPUT

_CHECKED_INPUTS = 5  # One odd sample is a task error; if none of the first works, the run is refused.
GIVE_PRICES = (
    "Give the adapter prices=Prices(input=..., output=...), or list the model under [tool.fairtrial.prices] "
    "in pyproject.toml"
)


def check_prices(config: EvalConfig, rules: TrialRules) -> None:
    """Warn if a cost cap cannot count the calls of a model; with `strict_cost`, refuse the run.

    Only adapters that can be found are checked: those of judges, of `prompt_task` and `agent_task`, and the suite's.
    """
    if config.max_cost_usd is None and not config.strict_cost:
        return
    adapters = [adapter for adapter in known_adapters(rules) if hasattr(adapter, "has_price")]
    models = sorted({str(adapter.model) for adapter in adapters if adapter.has_price is False})
    if not models:
        return
    names = ", ".join(repr(model) for model in models)
    if config.strict_cost:
        raise ConfigurationError(f"strict_cost: the price of {names} is unknown\n{GIVE_PRICES}")
    log.warning(
        "the price of %s is unknown: its calls do not count against max_cost_usd. %s; strict_cost=True "
        "(--strict-cost) refuses such runs",
        names,
        GIVE_PRICES,
    )


def check_event_loop(rules: TrialRules) -> None:
    """Raise `ConfigurationError` under trio if one of the models requires asyncio."""
    if on_trio():
        for adapter in known_adapters(rules):
            if getattr(adapter, "asyncio_only", False):
                raise ConfigurationError(
                    f"{adapter!r} must be run under asyncio (got trio): its HTTP library supports no other event loop\n"
                    "start the run with asyncio.run or run_sync, or give it an adapter of your own"
                )


def check_inputs(rules: TrialRules, dataset: Dataset[Any, Any]) -> None:
    """Raise `ConfigurationError` if a prompt cannot be filled from any of the first inputs.

    Only tasks that offer such a check are checked, as those of `prompt_task` do.
    """
    for task, experiment in zip(rules.tasks, rules.experiments, strict=True):
        check = getattr(task.fn, CHECK_INPUT, None)
        if check is None:
            continue
        first: ConfigurationError | None = None
        for sample in dataset.head(_CHECKED_INPUTS):
            try:
                check(sample.input, experiment.params)
            except ConfigurationError as error:
                first = first or ConfigurationError(f"sample {sample.id!r}: {error}")
            else:
                break
        else:
            if first is not None:
                raise first


def known_adapters(rules: TrialRules) -> Iterator[Any]:
    """Yield the adapters of a run that can be found: those of judges, of built-in tasks, and the suite's."""
    scorers: list[Any] = [rules.scorer]
    found = [rules.adapter, *(getattr(task.fn, "adapter", None) for task in rules.tasks)]
    while scorers:
        scorer = scorers.pop()
        scorers.extend(getattr(scorer, "members", ()))
        found.append(getattr(scorer, "adapter", None))
    return (adapter for adapter in found if adapter is not None)
