"""Budgets per trial and per run."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from fairtrial.base.lru import LruCache
from fairtrial.data.session.events import PromptExecuted, TokenUsage
from fairtrial.data.session.session import Session
from fairtrial.data.session.views import kind_of
from fairtrial.errors import BudgetExceededError, ConfigurationError

_PROMPT_EXECUTED = kind_of(PromptExecuted)
_MAX_RUNS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit of usage. It is checked before each call, so calls in progress may exceed it.

    Attributes:
        tokens: Input and output tokens together.
        requests: Model calls that were sent, also those that were lost on the way or timed out.
        cost_usd: Dollars, if prices are known. Calls with unknown cost do not count: this is logged once as a warning,
            and reports show the number of such calls.
        strict: Refuse further calls after one whose cost is not known, if `cost_usd` is set.
    """

    tokens: int | None = None
    requests: int | None = None
    cost_usd: float | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "requests", "cost_usd"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"the {name} of a budget must be more than 0 (got {value!r})")

    def check(self, used: TokenUsage, requests: int, whose: str) -> None:
        """Raise `BudgetExceededError` if the budget is used up."""
        spent = (
            ("requests", requests, self.requests),
            ("tokens", used.total_tokens, self.tokens),
            ("dollars", used.cost_usd or 0.0, self.cost_usd),
        )
        for name, amount, limit in spent:
            if limit is not None and amount >= limit:
                raise BudgetExceededError(f"the {whose} budget of {limit:,} {name} is used up ({amount:,} so far)")


class SpendingLog(Protocol):
    """The usage of runs: of this process (`Spending`), or of a fleet (`fairtrial.fleet.FleetSpending`)."""

    async def refresh(self, run_id: str) -> None:
        """Read the usage of other processes."""
        ...

    def of(self, run_id: str) -> tuple[TokenUsage, int]:
        """Return the known usage of a run and its number of requests."""
        ...

    def add(self, run_id: str, usage: TokenUsage | None) -> None:
        """Count one more request of a run."""
        ...


class Spending:
    """The usage of the runs of this process. Only the latest runs are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: LruCache[str, tuple[TokenUsage, int]] = LruCache(_MAX_RUNS)

    async def refresh(self, run_id: str) -> None:
        """Do nothing: there are no other processes."""

    def of(self, run_id: str) -> tuple[TokenUsage, int]:
        """Return the usage of a run and its number of requests."""
        with self._lock:
            return self._runs.get(run_id) or (TokenUsage(), 0)

    def add(self, run_id: str, usage: TokenUsage | None) -> None:
        """Count one more request of a run."""
        with self._lock:
            used, requests = self._runs.get(run_id) or (TokenUsage(), 0)
            self._runs.put(run_id, (used + (usage or TokenUsage()), requests + 1))


def spent_in(session: Session, actor: str) -> tuple[TokenUsage, int]:
    """Return the usage of one actor of a trial over all attempts, and its number of requests."""
    used, requests = TokenUsage(), 0
    for envelope in session.everything().envelopes:
        if envelope.kind == _PROMPT_EXECUTED and envelope.actor == actor:
            requests += 1
            if envelope.data["usage"]:
                used += TokenUsage(**envelope.data["usage"])
    return used, requests
