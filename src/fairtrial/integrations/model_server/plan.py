"""Rules that choose the fault of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.draw import draw
from fairtrial.integrations.model_server.faults import Fault
from fairtrial.integrations.model_server.record import Record
from fairtrial.integrations.model_server.request import ParsedRequest
from fairtrial.integrations.model_server.rules import Predicate, Where, check_pattern, matches


@first_is(Record)
@dataclass(frozen=True, slots=True)
class FaultRule(Record):
    """A fault for requests that meet all given conditions; without conditions, for all requests.

    - `numbers`: these requests, counted from 1 in order of arrival. `every`: every n-th request.
    - `attempts`: these attempts of the same request body, counted from 1: `attempts=(1,)` fails each request once.
    - `when`: a regular expression that is searched in the text that `where` names, or a predicate. `model`: this model.
    - `probability`: a random share of the remaining requests, drawn from the seed and the number of the request, or,
      with `by="content"`, from the seed, the request's body and its attempt, whatever the order of arrival.
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
            raise ValueError(f"the probability of a FaultRule must be from 0 to 1 (got {self.probability!r})")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1 (got {self.every})")
        if isinstance(self.when, str):
            check_pattern(self.when)


class FaultPlan:
    """The faults of a server: a pure function from (seed, request) to a fault."""

    def __init__(
        self,
        rules: Sequence[FaultRule],
        *,
        seed: int = 0,
        applies: Callable[[Fault, ParsedRequest], bool] = lambda fault, request: True,
    ) -> None:
        self._seed = seed
        self._applies = applies
        # Sets, because a schedule may name thousands of requests and is searched for each request.
        self._rules = [(rule, None if rule.numbers is None else frozenset(rule.numbers)) for rule in rules]
        self.counts_attempts = any(rule.attempts is not None or rule.by == "content" for rule in rules)

    def fault(self, request: ParsedRequest) -> Fault | None:
        """Return the fault of the first rule that matches a request; None if no rule does."""
        for index, (rule, numbers) in enumerate(self._rules):
            if self._holds(index, rule, numbers, request) and self._applies(rule.fault, request):
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
