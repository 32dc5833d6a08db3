"""Adaptive stopping: evaluates a run in plan order and decides when it has enough results.

Results finish in any order, and slow trials often fail: a rate computed from the results as they arrive is too high.
Therefore early results wait here, and only complete prefixes of the plan are evaluated. The scheduler or fleet that
executes the trials must pass every result to `see`, start no trial from `horizon` on, and stop once `reason` is set.

A task error or a timeout counts as a failure of the system under test. A trial that could not be scored or was lost is
missing, and the figures are valid whatever its outcome would have been.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any, Literal

from fairtrial.codec import dumps
from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError
from fairtrial.store.notes import AdaptiveNote, AdaptivePair, AdaptiveRate
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.result import EvalResult, Outcome
from fairtrial.trials.stopping import StopWhen

PASSED, FAILED, ERROR, MISSING = range(4)

_FAILURES: frozenset[Outcome] = frozenset({"task_error", "timeout"})
_PAGE = 1_000
_ROUNDS = 32  # Number of rounds of trials that may run ahead of a slow one.


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
        self._end = run.planned if until is None else until * len(run.experiments)
        self._stored = iter(()) if stored is None else stored
        self._head: EvalResult | None = None
        self._next = 0
        self._early: dict[int, int] = {}
        self._row: list[int] = []
        self._counts = [[0, 0, 0, 0] for _ in run.experiments]
        self._pair = tuple(run.experiments.index(name) for name in rule.decides or ())
        self._wins = self._losses = self._unpaired = 0
        self._e_peak = 1.0

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
            ConfigurationError: the result has a graded score.
        """
        self.take(result.ordinal, self._code(result))

    def take(self, ordinal: int, code: int) -> None:
        """Record the outcome of one trial: PASSED, FAILED, ERROR or MISSING."""
        if self.reason is None and ordinal >= self._next:
            self._early[ordinal] = code
            self.advance()

    def advance(self) -> None:
        """Extend the prefix with waiting and stored results."""
        while self.reason is None and self._next < self._end:
            code = self._early.pop(self._next, None)
            if code is None:
                code = self._recall(self._next)
                if code is None:
                    return
            self._next += 1
            self._row.append(code)
            if len(self._row) == len(self._counts):
                self._count(self._row)
                self._row.clear()

    def _recall(self, ordinal: int) -> int | None:
        while self._head is None or self._head.ordinal < ordinal:
            self._head = next(self._stored, None)
            if self._head is None:
                return None
        return self._code(self._head) if self._head.ordinal == ordinal else None

    def _code(self, result: EvalResult) -> int:
        score = result.score
        if score is None:
            return ERROR if result.outcome in _FAILURES else MISSING
        if not self.rule.verdicts and score.value != score.passed:
            verdict = "passed" if score.passed else "failed"
            raise ConfigurationError(
                f"stop_when is for scores that pass with 1 or fail with 0, and trial {result.key} "
                f"{verdict} with {score.value:g}: look at verdicts alone with StopWhen(..., verdicts=True), or start a "
                "run without stop_when"
            )
        return PASSED if score.passed else FAILED

    def _count(self, row: list[int]) -> None:
        for counts, code in zip(self._counts, row, strict=True):
            counts[code] += 1
        if self._pair:
            baseline, candidate = (row[index] for index in self._pair)
            if MISSING in (baseline, candidate):
                self._unpaired += 1
            else:
                self._wins += candidate == PASSED != baseline
                self._losses += baseline == PASSED != candidate
        self.samples += 1
        last = self.samples == (self.run.dataset_size if self._until is None else self._until)
        if last or (self._until is None and self.samples % self.rule.every == 0):
            self._look()

    def _look(self) -> None:
        seen = f"adaptive stopping after {self.samples:,} of {self.run.dataset_size:,} samples"
        if self.rule.narrower_than is not None:
            if all(self._rate(counts).width <= self.rule.narrower_than for counts in self._counts):
                what = "the pass rate" if len(self._counts) == 1 else "every pass rate"
                width = f"{100 * self.rule.narrower_than:g} points wide or less"
                self.reason = f"{seen}: the interval of {what} is {width}"
            return
        e_value = self._e_value()
        self._e_peak = max(self._e_peak, e_value)
        # Slightly below, because 1/(1 - .95) is not exactly 20 in floating point.
        if e_value >= (1 - 1e-12) / (1 - self.rule.level):
            baseline, candidate = (self.run.experiments[index] for index in self._pair)
            self.reason = f"{seen}: {candidate} is {self._direction()} than {baseline}"

    def _e_value(self) -> float:
        return self._stats.eprocess_pairs(self._wins, self._losses, missing=self._unpaired)

    def _direction(self) -> Literal["better", "worse"]:
        return "better" if self._wins > self._losses else "worse"

    def _rate(self, counts: list[int]) -> Any:
        by_width = self.rule.narrower_than is not None
        interval = self._stats.stopped_by_width if by_width else self._stats.betabinom_sequence
        return interval(counts[PASSED], self.samples, missing=counts[MISSING], level=self.rule.level)

    def note(self, stored: int) -> AdaptiveNote:
        """Return the note to store with the run, given the number of stored results."""
        return AdaptiveNote(
            stopped=(self.reason is not None or self._until is not None) and not self.complete,
            reason=self.reason,
            rule=self.rule,
            samples=self.samples,
            planned=self.run.dataset_size,
            beyond=max(0, stored - self.samples * len(self._counts)),
            experiments={
                name: self._rate_note(counts) for name, counts in zip(self.run.experiments, self._counts, strict=True)
            },
            pair=self._pair_note() if self._pair else None,
        )

    def _rate_note(self, counts: list[int]) -> AdaptiveRate:
        interval = self._rate(counts)
        known = self.samples - counts[MISSING]
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
        interval = self._stats.pairs_sequence(
            self._wins, self._losses, self.samples, missing=self._unpaired, level=self.rule.level
        )
        return AdaptivePair(
            baseline=baseline,
            candidate=candidate,
            wins=self._wins,
            losses=self._losses,
            ties=paired - self._wins - self._losses,
            missing=self._unpaired,
            estimate=(self._wins - self._losses) / paired if paired else None,
            low=interval.low,
            high=interval.high,
            level=interval.level,
            method=interval.method,
            e_value=self._e_value(),
            p_value=1 / self._e_peak,
            verdict=None if self.reason is None else self._direction(),
        )


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
    rule = replace(note.rule, verdicts=True)
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
