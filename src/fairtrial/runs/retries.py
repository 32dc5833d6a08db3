"""Stored trials that a resumed run repeats: failed scoring, and errors if requested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fairtrial.data.dataset import Dataset
from fairtrial.data.session.session import restore_session
from fairtrial.runs.plan import PlannedTrial, StoredTrials
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.result import EvalResult, Outcome
from fairtrial.trials.run_trial import TrialRules, score_again

STORED_PAGE = 64  # Stored results read at once, with their outputs and transcripts.
_RETRIED: tuple[Outcome, ...] = ("task_error", "timeout", "dead_letter", "user_error")


class RetrySet:
    """Stored trials to repeat: failed scoring is repeated, and errors are retried if requested."""

    def __init__(
        self, store: RunStore, dataset: Dataset[Any, Any], run: RunRecord, rules: TrialRules, *, retry_errors: bool
    ) -> None:
        self._store = store
        self._dataset = dataset
        self._run = run
        self._rules = rules
        self.to_score = frozenset(store.ordinals(run.run_id, ("scorer_error",)))
        self.to_run: tuple[int, ...] = ()
        if retry_errors:
            untraced = self._untraced()
            self.to_score -= untraced
            self.to_run = tuple(sorted(untraced.union(store.ordinals(run.run_id, _RETRIED))))
        self._retried = frozenset(self.to_run)
        outcomes: tuple[Outcome, ...] = ("scorer_error", *(_RETRIED if retry_errors else ()))
        replaced = store.results(run.run_id, outcomes=outcomes, outputs=False) if self.count else ()
        self._earlier = {
            stored.ordinal: replace(stored, source=None)
            for stored in replaced
            if stored.usage.total_tokens or stored.total_cost_usd or stored.unpriced_calls
        }

    def _untraced(self) -> frozenset[int]:
        """Return the trials that were not scored because their trace was incomplete: scoring again cannot help."""
        if not self.to_score:
            return frozenset()
        failed = self._store.results(self._run.run_id, outcomes=("scorer_error",), outputs=False)
        return frozenset(result.ordinal for result in failed if result.own_metadata.get("trace_incomplete") is True)

    @property
    def ordinals(self) -> frozenset[int]:
        """The ordinals of the trials."""
        return self.to_score.union(self.to_run)

    @property
    def count(self) -> int:
        """The number of trials."""
        return len(self.to_score) + len(self.to_run)

    def costs(self) -> dict[int, float]:
        """Return the costs of the stored results of these trials."""
        return {ordinal: stored.total_cost_usd for ordinal, stored in self._earlier.items()}

    def with_earlier_cost(self, result: EvalResult) -> EvalResult:
        """Add the usage of the result that this one replaces, which was paid for too."""
        stored = self._earlier.get(result.ordinal)
        if stored is None or result.ordinal in self.to_score:
            return result  # A rescored trial keeps its session with all its calls.
        return replace(
            result,
            usage=stored.usage + result.usage,
            judge_cost_usd=judge_costs(stored, result),
            cache_hits=stored.cache_hits + result.cache_hits,
            unpriced_calls=stored.unpriced_calls + result.unpriced_calls,
            unpriced_judge_calls=stored.unpriced_judge_calls + result.unpriced_judge_calls,
            cut_off_calls=stored.cut_off_calls + result.cut_off_calls,
            refused_calls=stored.refused_calls + result.refused_calls,
            unknown_endings=Counter(stored.unknown_endings) + Counter(result.unknown_endings),
        )

    def attempts(self) -> dict[int, int]:
        """Return the number of the next attempt for every trial to be executed again."""
        if not self.to_run:
            return {}
        stored = self._store.results(self._run.run_id, outcomes=("scorer_error", *_RETRIED), outputs=False)
        return {result.ordinal: result.attempt + 1 for result in stored if result.ordinal in self._retried}

    def trials(self, *, only_score: bool = False) -> StoredTrials:
        """Return the trials in plan order."""
        retried = frozenset[int]() if only_score else self._retried
        outcomes: tuple[Outcome, ...] = ("scorer_error", *(_RETRIED if retried else ()))
        store, run = self._store, self._run

        def load(after: int) -> Sequence[EvalResult]:
            return list(store.results(run.run_id, outcomes=outcomes, after=after, limit=STORED_PAGE, snapshots=True))

        def plan(stored: EvalResult) -> PlannedTrial | None:
            if stored.ordinal not in self.to_score and stored.ordinal not in retried:
                return None  # Changed to an error since this run was opened, or to be executed elsewhere.
            sample_ordinal, experiment, _repeat = run.split(stored.ordinal)
            sample = self._dataset[sample_ordinal]
            to_score = stored if stored.ordinal in self.to_score else None
            return PlannedTrial(
                stored.key, stored.ordinal, sample_ordinal, experiment, sample, stored.attempt + 1, to_score
            )

        return StoredTrials(load, plan)

    async def score(self, trial: PlannedTrial) -> EvalResult:
        """Score a stored output again."""
        return await score_stored(self._rules, trial)


async def score_stored(rules: TrialRules, trial: PlannedTrial) -> EvalResult:
    """Score the stored output of a trial, with the type it had.

    An output that was redacted or truncated is not scored, because the score may depend on the missing part.
    """
    stored = trial.stored
    if stored is None:
        raise ValueError(f"trial {trial.key} has no stored result")
    if (altered := altered_input(stored)) is not None:
        return replace(
            stored,
            key=trial.key,
            outcome="scorer_error",
            score=None,
            error=f"{altered}, so it cannot be rescored; execute the trial again",
            stage="score",
            attempt=trial.attempt,
            source=None,
        )
    return await score_again(
        rules,
        trial.key,
        trial.ordinal,
        trial.sample,
        stored,
        restore_session(stored.snapshot) if stored.snapshot is not None else None,
        attempt=trial.attempt,
    )


def judge_costs(*results: EvalResult) -> float | None:
    """Return what the judges of several executions cost together; None if no cost is known."""
    known = [result.judge_cost_usd for result in results if result.judge_cost_usd is not None]
    return sum(known) if known else None


def altered_input(stored: EvalResult) -> str | None:
    """Return which part of the evaluator's input was altered in the store; None if it is complete."""
    dropped = stored.own_metadata.get("dropped")
    for part in ("output", "transcript"):
        if part in stored.redacted_parts:
            return f"its stored {part} was redacted"
        if isinstance(dropped, Sequence) and part in dropped:
            return f"its {part} was too large for the queue and is not stored"
    return None
