"""Check before a run whether the cost of its model calls can be known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.runs.events import log
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.run_trial import TrialRules

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
    models = sorted({str(adapter.model) for adapter in _adapters(rules) if adapter.has_price is False})
    if not models:
        return
    names = ", ".join(repr(model) for model in models)
    if config.strict_cost:
        raise ConfigurationError(f"strict_cost: the price of {names} is not known\n{GIVE_PRICES}")
    log.warning(
        "the price of %s is not known: its calls do not count against max_cost_usd. %s; strict_cost=True "
        "(--strict-cost) refuses such runs",
        names,
        GIVE_PRICES,
    )


def _adapters(rules: TrialRules) -> Iterator[Any]:
    """The adapters that a run is known to use and that say whether they have a price."""
    scorers: list[Any] = [rules.scorer]
    found = [rules.adapter, *(getattr(task.fn, "adapter", None) for task in rules.tasks)]
    while scorers:
        scorer = scorers.pop()
        scorers.extend(getattr(scorer, "members", ()))
        found.append(getattr(scorer, "adapter", None))
    return (adapter for adapter in found if hasattr(adapter, "has_price"))
