"""Following a run in the order of its plan, to say when it has seen enough.

Results finish in any order, and slow trials are often the failing ones: a rate taken as results come in reads too
high. So results that are early wait here, and only whole prefixes of the plan are looked at. Whoever executes the
trials, a scheduler or a fleet, does three things: `see` every result, start no trial from `horizon` on, and stop once
`reason` is set.

What cannot be known is taken at its worst: a task error or a timeout is a failure of the system under test; a trial
that could not be scored, or was lost on its way, is missing, and the figures hold whatever its outcome would have been.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

from fairtrial.codec import dumps, from_json
from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.result import EvalResult, Outcome
from fairtrial.trials.stopping import StopWhen

PASSED, FAILED, ERROR, MISSING = range(4)

_FAILURES: frozenset[Outcome] = frozenset({"task_error", "timeout"})
_PAGE = 1_000
_ROUNDS = 32  # How many rounds of trials may run ahead of a slow one before they wait for it.


class Adaptive:
    """What the plan's prefix says so far. The same results give the same answer, in whatever order they come."""

    def __init__(
        self,
        rule: StopWhen,
        run: RunRecord,
        *,
        stored: Iterator[EvalResult] | None = None,
        window: int = 1_000,
        until: int | None = None,
    ) -> None:
        """Follow a run.

        Args:
            rule: When to stop.
            run: Its plan.
            stored: Results from before, in plan order; read only as the prefix reaches them.
            window: How far trials may run ahead of the prefix: the number of results that can wait here.
            until: Look once, at the prefix of this many samples, which was settled elsewhere.
        """
        from fairtrial.stats import sequential  # Only now: numbers are slow to load.

        self._stats = sequential
        self.rule = rule
        self.run = run
        self.reason: str | None = None  # Why the run should stop; None while it should go on.
        self.samples = 0  # The prefix that was counted, in samples.
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
        """The ordinal from which on no trial should be started yet."""
        return self._next + self._window

    @property
    def complete(self) -> bool:
        """True if the prefix is the whole plan: there is nothing left to stop."""
        return self.samples == self.run.dataset_size

    @property
    def waiting(self) -> int:
        """How many results wait for earlier ones."""
        return len(self._early)

    def see(self, result: EvalResult) -> None:
        """Take a result, in any order.

        Raises:
            ConfigurationError: it has a graded score.
        """
        self.take(result.ordinal, self._code(result))

    def take(self, ordinal: int, code: int) -> None:
        """Take the outcome of one trial: PASSED, FAILED, ERROR or MISSING."""
        if self.reason is None and ordinal >= self._next:
            self._early[ordinal] = code
            self.advance()

    def advance(self) -> None:
        """Count what has become a prefix, from what waits here and what was stored before."""
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
                f"{verdict} with {score.value:g}: leave stop_when out and the run goes on from here, or look at "
                "verdicts alone with StopWhen(..., verdicts=True)"
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
                what = "the pass rate is" if len(self._counts) == 1 else "every pass rate is"
                self.reason = f"{seen}: {what} known to within {self.rule.narrower_than:g}"
            return
        e_value = self._e_value()
        self._e_peak = max(self._e_peak, e_value)
        # A hair below: 1/(1 - .95) is not exactly 20.
        if e_value >= (1 - 1e-12) / (1 - self.rule.level):
            baseline, candidate = (self.run.experiments[index] for index in self._pair)
            self.reason = f"{seen}: {candidate} is {self._direction()} than {baseline}"

    def _e_value(self) -> float:
        return self._stats.eprocess_pairs(self._wins, self._losses, missing=self._unpaired)

    def _direction(self) -> str:
        return "better" if self._wins > self._losses else "worse"

    def _rate(self, counts: list[int]) -> Any:
        return self._stats.betabinom_sequence(
            counts[PASSED], self.samples, missing=counts[MISSING], level=self.rule.level
        )

    def note(self, stored: int) -> dict[str, Any]:
        """What the run's record keeps under `notes["adaptive"]`, given how many trials have a stored result.

        - `stopped`: whether the rule ended the run early; `reason`: what it decided, in a sentence, or None. It may
          come to its decision only with the last sample.
        - `rule`: the `StopWhen`, field by field.
        - `samples`: how many samples, from the start of the plan, are in the figures; `planned`: of how many.
        - `beyond`: stored results after that prefix. They are kept and are in no figure here.
        - `experiments`: by name, `n` (samples), `passed`, `errors` (counted as failures), `missing` (no score; the
          interval holds whatever it would have been), `estimate` (the share of passes among trials that are not
          missing, None if there are none), `low`, `high`, `level`, `method`: valid at any stopping time.
        - `pair`: None, or for `decides`: `baseline`, `candidate`, `wins` (of the candidate), `losses`, `ties`,
          `missing` (pairs), `estimate` (candidate less baseline), `low`, `high`, `level`, `method`, `e_value` (at the
          last look), `p_value` (1/the largest e-value at any look; valid at any time), `verdict` ("better" or "worse"
          of the candidate, or None while undecided). The e-value decides; the interval is cautious and may touch 0.
        """
        return {
            "stopped": (self.reason is not None or self._until is not None) and not self.complete,
            "reason": self.reason,
            "rule": {
                "narrower_than": self.rule.narrower_than,
                "decides": None if self.rule.decides is None else list(self.rule.decides),
                "level": self.rule.level,
                "every": self.rule.every,
                "verdicts": self.rule.verdicts,
            },
            "samples": self.samples,
            "planned": self.run.dataset_size,
            "beyond": max(0, stored - self.samples * len(self._counts)),
            "experiments": {
                name: self._rate_note(counts) for name, counts in zip(self.run.experiments, self._counts, strict=True)
            },
            "pair": self._pair_note() if self._pair else None,
        }

    def _rate_note(self, counts: list[int]) -> dict[str, Any]:
        interval = self._rate(counts)
        known = self.samples - counts[MISSING]
        return {
            "n": self.samples,
            "passed": counts[PASSED],
            "errors": counts[ERROR],
            "missing": counts[MISSING],
            "estimate": counts[PASSED] / known if known else None,
            **_ends(interval),
        }

    def _pair_note(self) -> dict[str, Any]:
        baseline, candidate = (self.run.experiments[index] for index in self._pair)
        paired = self.samples - self._unpaired
        interval = self._stats.pairs_sequence(
            self._wins, self._losses, self.samples, missing=self._unpaired, level=self.rule.level
        )
        return {
            "baseline": baseline,
            "candidate": candidate,
            "wins": self._wins,
            "losses": self._losses,
            "ties": paired - self._wins - self._losses,
            "missing": self._unpaired,
            "estimate": (self._wins - self._losses) / paired if paired else None,
            **_ends(interval),
            "e_value": self._e_value(),
            "p_value": 1 / self._e_peak,
            "verdict": None if self.reason is None else self._direction(),
        }


def _ends(interval: Any) -> dict[str, Any]:
    return {"low": interval.low, "high": interval.high, "level": interval.level, "method": interval.method}


def check_rule(config: EvalConfig, experiments: list[str]) -> None:
    """Refuse a rule that names experiments the run does not have."""
    rule = config.stop_when
    for name in (rule and rule.decides) or ():
        if name not in experiments:
            raise ConfigurationError(
                f"stop_when decides between experiments of the run, and {name!r} is none of them: "
                f"{', '.join(experiments)}"
            )


def refuse_clusters(config: EvalConfig, dataset: Dataset[Any, Any]) -> None:
    """Refuse a dataset in which samples belong together. It is read through, so only if there is a rule."""
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
                f"stop_when needs independent samples, and sample {sample.id!r} is not the first of {config.cluster} "
                f"{label!r}: leave stop_when out; the report then allows for clusters"
            )
        seen.add(text)


def follow(
    config: EvalConfig, run: RunRecord, store: RunStore, redo: Set[int], window: int | None = None
) -> Adaptive | None:
    """Begin to follow a run, or go on: what is stored is counted, but for the trials that are to be done again."""
    if config.stop_when is None:
        return None
    window = window or _ROUNDS * config.max_concurrent
    adaptive = Adaptive(config.stop_when, run, stored=_stored(store, run.run_id, redo), window=window)
    adaptive.advance()
    return adaptive


def scored_again(parent: RunRecord, run: RunRecord, store: RunStore) -> dict[str, Any] | None:
    """What `notes["adaptive"]` says of a run that scored the outputs of another anew; None unless that one has it.

    How many samples there are was decided by the other's scores: figures that hold only for a fixed number would be
    as wrong here as there.
    """
    note: Any = parent.notes.get("adaptive")
    if not note:
        return None
    rule = replace(from_json(StopWhen, dict(note["rule"])), verdicts=True)
    stored = _stored(store, run.run_id, frozenset())
    adaptive = Adaptive(rule, run, stored=stored, until=note["samples"])
    adaptive.advance()
    return adaptive.note(sum(byte.bit_count() for byte in store.done(run.run_id)))


def _stored(store: RunStore, run_id: str, redo: Set[int]) -> Iterator[EvalResult]:
    after = -1
    while True:
        # Page by page: the run writes to the same store, and a long read would hold its log back.
        page = list(store.results(run_id, after=after, limit=_PAGE, outputs=False))
        for result in page:
            if result.outcome != "not_run" and result.ordinal not in redo:
                yield result
        if len(page) < _PAGE:
            return
        after = page[-1].ordinal
