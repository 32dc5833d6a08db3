"""Runs that stop when they have found enough, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fairtrial.base.codec import dumps
from fairtrial.base.offload import on_trio
from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError
from fairtrial.runs.events import log
from fairtrial.store.notes import AdaptiveNote, AdaptivePair, AdaptiveRate
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig, StopWhen
from fairtrial.trials.result import EvalResult, Outcome
from fairtrial.trials.run_trial import TrialRules
from fairtrial.trials.task import CHECK_INPUT, USER_OF

if TYPE_CHECKING:
    from fairtrial.stats import Interval


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
        "(strict-cost = true in [tool.fairtrial]) refuses such runs",
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
    users = [getattr(task.fn, USER_OF, None) for task in rules.tasks]
    found = [rules.adapter, *(getattr(task.fn, "adapter", None) for task in rules.tasks)]
    found += [getattr(user, "adapter", None) for user in users]
    while scorers:
        scorer = scorers.pop()
        scorers.extend(getattr(scorer, "members", ()))
        found.append(getattr(scorer, "adapter", None))
    return (adapter for adapter in found if adapter is not None)


PASSED, FAILED, ERROR, MISSING = range(4)

_FAILURES: frozenset[Outcome] = frozenset({"task_error", "timeout"})
_PAGE = 1_000
_ROUNDS = 32  # Number of rounds of trials that may run ahead of a slow one.


class _Outcome(NamedTuple):
    """The outcome of one trial, and the score by which it is compared."""

    code: int
    value: float


type _Ends = tuple[float, float]


class Adaptive:
    """The statistics of the plan's prefix. They do not depend on the order in which results arrive."""

    def __init__(
        self,
        rule: StopWhen,
        run: RunRecord,
        *,
        stored: Iterator[EvalResult] | None = None,
        window: int = 1_000,
        until: int | None = None,
    ) -> None:
        """Start adaptive stopping for a run.

        Args:
            rule: When to stop.
            run: Its plan.
            stored: Stored results in plan order; read only when the prefix reaches them.
            window: How far trials may run ahead of the prefix: the maximum number of waiting results.
            until: Evaluate once, for the prefix of this many samples, which was decided by another run.
        """
        from fairtrial.stats import sequential  # Imported late: numpy and scipy are slow to load.

        self._stats = sequential
        self.rule = rule
        self.run = run
        self.reason: str | None = None  # Why the run should stop; None while it should continue.
        self.samples = 0  # The length of the evaluated prefix, in samples.
        self._window = window
        self._until = until
        self._end = run.planned if until is None else until * len(run.experiments) * run.repeats
        self._stored = iter(()) if stored is None else stored
        self._head: EvalResult | None = None
        self._next = 0
        self._early: dict[int, _Outcome] = {}
        self._row: list[_Outcome] = []
        self._counts = [[0, 0, 0, 0] for _ in run.experiments]
        self._pair = tuple(run.experiments.index(name) for name in rule.decides or ())
        # The least and the largest value that samples may have, and how often these occur.
        self._rates: list[Counter[_Ends]] = [Counter() for _ in run.experiments]
        self._differences: Counter[_Ends] = Counter()
        self._capital = sequential.RunningCapital()
        self._wins = self._losses = self._unpaired = 0
        self._gain = 0.0
        self._graded = False

    @property
    def horizon(self) -> int:
        """The ordinal from which on no trial may be started yet."""
        return self._next + self._window

    @property
    def complete(self) -> bool:
        """True if the prefix is the whole plan: there is nothing left to stop."""
        return self.samples == self.run.dataset_size

    @property
    def waiting(self) -> int:
        """The number of results that wait for earlier ones."""
        return len(self._early)

    def see(self, result: EvalResult) -> None:
        """Record a result, in any order.

        Raises:
            ConfigurationError: the result has a graded score, and the rule is about pass rates.
        """
        self._take(result.ordinal, self._outcome(result))

    def take(self, ordinal: int, code: int) -> None:
        """Record a pass/fail outcome of one trial: PASSED, FAILED, ERROR or MISSING."""
        self._take(ordinal, _Outcome(code, float(code == PASSED)))

    def _take(self, ordinal: int, outcome: _Outcome) -> None:
        if self.reason is None and ordinal >= self._next:
            self._early[ordinal] = outcome
            self.advance()

    def advance(self) -> None:
        """Extend the prefix with waiting and stored results."""
        while self.reason is None and self._next < self._end:
            outcome = self._early.pop(self._next, None)
            if outcome is None:
                outcome = self._recall(self._next)
                if outcome is None:
                    return
            self._next += 1
            self._row.append(outcome)
            if len(self._row) == len(self._counts) * self.run.repeats:
                self._count(self._row)
                self._row.clear()

    def _recall(self, ordinal: int) -> _Outcome | None:
        while self._head is None or self._head.ordinal < ordinal:
            self._head = next(self._stored, None)
            if self._head is None:
                return None
        return self._outcome(self._head) if self._head.ordinal == ordinal else None

    def _outcome(self, result: EvalResult) -> _Outcome:
        score = result.score
        if score is None:
            return _Outcome(ERROR if result.outcome in _FAILURES else MISSING, 0.0)
        code = PASSED if score.passed else FAILED
        if self.rule.verdicts:
            return _Outcome(code, float(score.passed))
        if self.rule.narrower_than is not None and score.value != score.passed:
            verdict = "passed" if score.passed else "failed"
            raise ConfigurationError(
                f"narrower_than is for scores that pass with 1 or fail with 0, and trial {result.key} "
                f"{verdict} with {score.value:g}: look at verdicts alone with StopWhen(..., verdicts=True), or start a "
                "run without stop_when"
            )
        return _Outcome(code, score.value)

    def _count(self, row: list[_Outcome]) -> None:
        repeats = self.run.repeats
        samples = [row[first : first + repeats] for first in range(0, len(row), repeats)]
        for counts, rates, outcomes in zip(self._counts, self._rates, samples, strict=True):
            for outcome in outcomes:
                counts[outcome.code] += 1
            rates[_ends([_Outcome(one.code, float(one.code == PASSED)) for one in outcomes])] += 1
        if self._pair:
            self._count_pair(*(samples[index] for index in self._pair))
        self.samples += 1
        last = self.samples == (self.run.dataset_size if self._until is None else self._until)
        if last or (self._until is None and self.samples % self.rule.every == 0):
            self._look()

    def _count_pair(self, baseline: list[_Outcome], candidate: list[_Outcome]) -> None:
        (low_b, high_b), (low_a, high_a) = _ends(baseline), _ends(candidate)
        least, most = low_a - high_b, high_a - low_b
        self._differences[least, most] += 1
        self._capital.add(least, most)
        self._graded |= any(one.value not in (0.0, 1.0) for one in (*baseline, *candidate))
        means = [_known_mean(side) for side in (candidate, baseline)]
        if means[0] is None or means[1] is None:
            self._unpaired += 1
            return
        self._wins += means[0] > means[1]
        self._losses += means[0] < means[1]
        self._gain += means[0] - means[1]

    def _look(self) -> None:
        seen = f"adaptive stopping after {self.samples:,} of {self.run.dataset_size:,} samples"
        if self.rule.narrower_than is not None:
            if all(self._rate(counts).width <= self.rule.narrower_than for counts in self._counts):
                what = "the pass rate" if len(self._counts) == 1 else "every pass rate"
                width = f"{100 * self.rule.narrower_than:g} points wide or less"
                self.reason = f"{seen}: the interval of {what} is {width}"
            return
        if self._stats.refutes(self._capital.e_value, self.rule.level):
            baseline, candidate = (self.run.experiments[index] for index in self._pair)
            self.reason = f"{seen}: {candidate} is {self._direction()} than {baseline}"

    def _direction(self) -> Literal["better", "worse"]:
        return "better" if self._gain > 0 else "worse"

    def _rate(self, counts: list[int]) -> Interval:
        return self._stats.stopped_by_width(
            counts[PASSED], self.samples, missing=counts[MISSING], level=self.rule.level
        )

    def _at_any_time(self, values: Counter[_Ends], least: float) -> Interval:
        low, high = ([ends[side] for ends in values.elements()] for side in (0, 1))
        return self._stats.BettingMartingale(low, high, bounds=(least, 1.0)).interval(self.rule.level)

    def note(self, stored: int) -> AdaptiveNote:
        """Return the note to store with the run, given the number of stored results."""
        return AdaptiveNote(
            stopped=(self.reason is not None or self._until is not None) and not self.complete,
            reason=self.reason,
            rule=self.rule,
            samples=self.samples,
            planned=self.run.dataset_size,
            beyond=max(0, stored - self.samples * len(self._counts) * self.run.repeats),
            experiments={name: self._rate_note(place) for place, name in enumerate(self.run.experiments)},
            pair=self._pair_note() if self._pair else None,
        )

    def _rate_note(self, place: int) -> AdaptiveRate:
        counts = self._counts[place]
        by_width = self.rule.narrower_than is not None
        interval = self._rate(counts) if by_width else self._at_any_time(self._rates[place], 0.0)
        known = sum(counts) - counts[MISSING]
        return AdaptiveRate(
            n=self.samples,
            passed=counts[PASSED],
            errors=counts[ERROR],
            missing=counts[MISSING],
            estimate=counts[PASSED] / known if known else None,
            low=interval.low,
            high=interval.high,
            level=interval.level,
            method=interval.method,
        )

    def _pair_note(self) -> AdaptivePair:
        baseline, candidate = (self.run.experiments[index] for index in self._pair)
        paired = self.samples - self._unpaired
        interval = self._at_any_time(self._differences, -1.0)
        return AdaptivePair(
            baseline=baseline,
            candidate=candidate,
            wins=self._wins,
            losses=self._losses,
            ties=paired - self._wins - self._losses,
            missing=self._unpaired,
            estimate=self._gain / paired if paired else None,
            low=interval.low,
            high=interval.high,
            level=interval.level,
            method=interval.method,
            e_value=self._capital.e_value,
            p_value=min(1.0, 1 / self._capital.e_value),
            verdict=None if self.reason is None else self._direction(),
            graded=self._graded,
        )


def _ends(outcomes: list[_Outcome]) -> _Ends:
    """Return the least and the largest mean of a sample's repeats, whatever the missing ones would have been."""
    total = sum(one.value for one in outcomes if one.code != MISSING)
    missing = sum(one.code == MISSING for one in outcomes)
    return total / len(outcomes), min(1.0, (total + missing) / len(outcomes))


def _known_mean(outcomes: list[_Outcome]) -> float | None:
    known = [one.value for one in outcomes if one.code != MISSING]
    return sum(known) / len(known) if known else None


def check_rule(config: EvalConfig, experiments: list[str]) -> None:
    """Raise `ConfigurationError` if a rule names experiments that the run does not have."""
    rule = config.stop_when
    for name in (rule and rule.decides) or ():
        if name not in experiments:
            raise ConfigurationError(
                f"stop_when must name experiments of the run (got {name!r}); it has {', '.join(experiments)}"
            )


def refuse_clusters(config: EvalConfig, dataset: Dataset[Any, Any]) -> None:
    """Raise `ConfigurationError` if the dataset has clusters and there is a rule."""
    if config.stop_when is None or not config.cluster:
        return
    seen: set[str] = set()
    for sample in dataset:
        label = sample.metadata.get(config.cluster)
        if label is None:
            continue
        text = dumps(label)
        if text in seen:
            raise ConfigurationError(
                f"stop_when requires independent samples, but sample {sample.id!r} is not the first of "
                f"{config.cluster} {label!r}: remove stop_when; the report then accounts for clusters"
            )
        seen.add(text)


def follow(
    config: EvalConfig, run: RunRecord, store: RunStore, redo: Set[int], window: int | None = None
) -> Adaptive | None:
    """Start or continue adaptive stopping: stored results count, except those of trials that will be repeated."""
    if config.stop_when is None:
        return None
    window = window or _ROUNDS * config.max_concurrent
    adaptive = Adaptive(config.stop_when, run, stored=_stored(store, run.run_id, redo), window=window)
    adaptive.advance()
    return adaptive


def scored_again(parent: RunRecord, run: RunRecord, store: RunStore) -> AdaptiveNote | None:
    """Return the adaptive-stopping note for a rescored run; None if the parent run has none.

    The number of samples was decided by the parent's scores, so figures for a fixed sample size would be invalid for
    both.
    """
    note = parent.noted.adaptive
    if note is None:
        return None
    rule = note.rule if note.rule.narrower_than is None else replace(note.rule, verdicts=True)
    stored = _stored(store, run.run_id, frozenset())
    adaptive = Adaptive(rule, run, stored=stored, until=note.samples)
    adaptive.advance()
    return adaptive.note(sum(byte.bit_count() for byte in store.done(run.run_id)))


def _stored(store: RunStore, run_id: str, redo: Set[int]) -> Iterator[EvalResult]:
    after = -1
    while True:
        # In pages: the run writes to the same store, and a long read would keep the write-ahead log from being
        # truncated.
        page = list(store.results(run_id, after=after, limit=_PAGE, outputs=False))
        for result in page:
            if result.outcome != "not_run" and result.ordinal not in redo:
                yield result
        if len(page) < _PAGE:
            return
        after = page[-1].ordinal
