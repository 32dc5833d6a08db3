"""Which request meets which fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fairtrial.testing.model_server.draw import draw
from fairtrial.testing.model_server.faults import Fault
from fairtrial.testing.model_server.record import Record
from fairtrial.testing.model_server.request import ParsedRequest
from fairtrial.testing.model_server.rules import Predicate, Where, check_pattern, matches


@dataclass(frozen=True, slots=True)
class FaultRule(Record):
    """A fault for the requests that meet every condition given; without conditions, for all.

    - `numbers`: these requests, counted from 1 as they arrive. `every`: each n-th request.
    - `attempts`: these attempts of the same request body, counted from 1: `attempts=(1,)` fails each request once.
    - `when`: a regular expression looked for in the text that `where` names, or a predicate. `model`: this model.
    - `probability`: of the requests left, this share, drawn from the seed and the request's number, or, with
      `by="content"`, from the seed, the request's body and its attempt: the same whatever order requests arrive in.
    """

    fault: Fault
    probability: float = 1.0
    by: Literal["number", "content"] = field(default="number", kw_only=True)
    numbers: tuple[int, ...] | None = field(default=None, kw_only=True)
    every: int | None = field(default=None, kw_only=True)
    attempts: tuple[int, ...] | None = field(default=None, kw_only=True)
    when: str | Predicate | None = field(default=None, kw_only=True)
    where: Where = field(default="last_user", kw_only=True)
    model: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"a probability is between 0 and 1, not {self.probability!r}")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be 1 or more, not {self.every}")
        if isinstance(self.when, str):
            check_pattern(self.when)


class FaultPlan:
    """The faults of a server: a pure function from (seed, request) to a fault."""

    def __init__(self, rules: Sequence[FaultRule], *, seed: int = 0) -> None:
        self._seed = seed
        # Schedules may name thousands of requests, and each request asks.
        self._rules = [(rule, None if rule.numbers is None else frozenset(rule.numbers)) for rule in rules]
        self.counts_attempts = any(rule.attempts is not None or rule.by == "content" for rule in rules)

    def fault(self, request: ParsedRequest) -> Fault | None:
        """The fault of the first rule that holds for this request."""
        for index, (rule, numbers) in enumerate(self._rules):
            if self._holds(index, rule, numbers, request):
                return rule.fault
        return None

    def _holds(self, index: int, rule: FaultRule, numbers: frozenset[int] | None, request: ParsedRequest) -> bool:
        if numbers is not None and request.number not in numbers:
            return False
        if rule.every is not None and request.number % rule.every:
            return False
        if rule.attempts is not None and request.attempt not in rule.attempts:
            return False
        if rule.model is not None and request.model != rule.model:
            return False
        if rule.when is not None and not matches(rule.when, rule.where, request):
            return False
        if rule.probability >= 1:
            return True
        key = (request.number,) if rule.by == "number" else (request.digest, request.attempt)
        return draw(self._seed, "fault", index, *key) < rule.probability
