"""Limits on what may be spent, per trial and per run."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from fairtrial.errors import BudgetExceededError, ConfigurationError
from fairtrial.session.events import PromptExecuted, TokenUsage
from fairtrial.session.session import Session
from fairtrial.session.views import kind_of

_PROMPT_EXECUTED = kind_of(PromptExecuted)
_MAX_RUNS = 256


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be used. Checked before each call: calls already under way may go beyond it by what they use.

    Attributes:
        tokens: Input and output tokens together.
        requests: Answered model calls.
        cost_usd: Dollars, as far as prices are known. A call whose cost is not known counts as nothing: a warning says
            so once, and reports show how many such calls there were.
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
                raise ConfigurationError(f"a budget of {name} must be more than 0, not {value!r}")

    def check(self, used: TokenUsage, requests: int, whose: str) -> None:
        """Raise if it is used up."""
        spent = (
            ("requests", requests, self.requests),
            ("tokens", used.total_tokens, self.tokens),
            ("dollars", used.cost_usd or 0.0, self.cost_usd),
        )
        for name, amount, limit in spent:
            if limit is not None and amount >= limit:
                raise BudgetExceededError(f"the {whose} budget of {limit:,} {name} is used up ({amount:,} so far)")


class SpendingLog(Protocol):
    """What runs have used: of this process (`Spending`), or of a fleet (`fairtrial.fleet.spending.FleetSpending`)."""

    async def refresh(self, run_id: str) -> None:
        """Find out what others have used since."""
        ...

    def of(self, run_id: str) -> tuple[TokenUsage, int]:
        """What a run has used, in how many requests, as far as is known here."""
        ...

    def add(self, run_id: str, usage: TokenUsage | None) -> None:
        """Count one more request of a run."""
        ...


class Spending:
    """What the runs of this process have used, run by run. Only the latest runs are kept in mind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, tuple[TokenUsage, int]] = OrderedDict()

    async def refresh(self, run_id: str) -> None:
        """There are no others."""

    def of(self, run_id: str) -> tuple[TokenUsage, int]:
        """What a run has used, in how many requests."""
        with self._lock:
            return self._runs.get(run_id, (TokenUsage(), 0))

    def add(self, run_id: str, usage: TokenUsage | None) -> None:
        """Count one more request of a run."""
        with self._lock:
            used, requests = self._runs.pop(run_id, (TokenUsage(), 0))
            self._runs[run_id] = (used + (usage or TokenUsage()), requests + 1)
            while len(self._runs) > _MAX_RUNS:
                self._runs.popitem(last=False)


def spent_in(session: Session, actor: str) -> tuple[TokenUsage, int]:
    """What one side of a trial has used so far, over all attempts, and in how many requests."""
    used, requests = TokenUsage(), 0
    for envelope in session.everything().envelopes:
        if envelope.kind == _PROMPT_EXECUTED and envelope.actor == actor:
            requests += 1
            if envelope.data["usage"]:
                used += TokenUsage(**envelope.data["usage"])
    return used, requests
