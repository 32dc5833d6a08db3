"""Stored outputs, scored anew."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fairtrial.codec import from_json, to_json
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError
from fairtrial.runs.adaptive import scored_again
from fairtrial.runs.costs import check_prices
from fairtrial.runs.events import Observers
from fairtrial.runs.plan import PlannedTrial
from fairtrial.runs.runner import score_stored
from fairtrial.runs.scheduler import Limits, Stop, run_trials
from fairtrial.runs.writer import Writer
from fairtrial.scoring.evaluator import Evaluator, Scorer, resolve
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.experiment import Experiment
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import EvalResult
from fairtrial.trials.run_trial import TrialRules


async def rescore_run(
    store: RunStore,
    run_id: str,
    evaluator: Evaluator | Scorer,
    *,
    config: EvalConfig | None = None,
    types: tuple[Any, Any] = (object, object),
    output_types: Sequence[Any] = (),
) -> RunRecord:
    """A new run from another's outputs and sessions. Trials that have no output keep their error.

    Args:
        store: Where the run is.
        run_id: The run whose outputs are scored.
        evaluator: Scores them.
        config: Concurrency and timeout of the scoring.
        types: What inputs and expected values are read back as.
        output_types: What outputs are read back as, one per experiment.
    """
    settings = config or EvalConfig()
    scorer = resolve(evaluator)
    parent = store.get_run(run_id)
    run = store.create_run(
        replace(
            parent,
            run_id=uuid4().hex[:12],
            number=0,
            status="running",
            evaluator=scorer.name,
            parent_run=parent.run_id,
            created_at=time.time(),
            finished_at=None,
            notes={"order": parent.notes.get("order")},
        )
    )
    rules = TrialRules(
        tasks=(),
        experiments=tuple(Experiment(name) for name in run.experiments),
        scorer=scorer,
        timeout_seconds=settings.timeout_seconds,
    )
    check_prices(settings, rules)
    kinds = tuple(output_types) or (object,) * len(run.experiments)
    reader = _Reader(store, parent, run, types)
    writer = Writer(store, run.run_id)

    async def execute(trial: PlannedTrial) -> EvalResult:
        stored = reader.stored.pop(trial.ordinal)
        if stored.outcome not in ("scored", "scorer_error"):
            return replace(stored, key=trial.key, snapshot=store.snapshot(parent.run_id, stored.ordinal), source=None)
        return await score_stored(store, rules, trial, stored, kinds[trial.experiment])

    status: Any = "interrupted"
    stop = Stop()
    try:
        await run_trials(
            reader.trials(),
            execute,
            writer,
            workers=settings.max_concurrent,
            stop=stop,
            limits=Limits(max_cost_usd=settings.max_cost_usd, strict_cost=settings.strict_cost, only_judges=True),
            observers=Observers(()),
            grace_seconds=settings.grace_seconds,
        )
        status = "finished" if stop.reason is None else "stopped"
    finally:
        await writer.close()
        rules.threads.close()
        adaptive = scored_again(parent, run, store)
        notes: dict[str, Any] = {} if adaptive is None else {"adaptive": adaptive}
        if stop.reason is not None:
            notes |= {"stopped": stop.reason}
        store.update_run(
            run.run_id,
            status=status,
            finished_at=None if status == "interrupted" else time.time(),
            notes=notes or None,
        )
    return store.get_run(run.run_id)


class _Reader:
    """The stored results of the parent run as trials of the new one."""

    def __init__(self, store: RunStore, parent: RunRecord, run: RunRecord, types: tuple[Any, Any]) -> None:
        self._store = store
        self._parent = parent
        self._run = run
        self._types = types
        self.stored: dict[int, EvalResult] = {}

    def trials(self) -> Iterator[PlannedTrial]:
        """One trial per stored result."""
        last: tuple[int, Sample[Any, Any]] | None = None
        for stored in self._store.results(self._parent.run_id):
            sample_ordinal, experiment, repeat = self._run.split(stored.ordinal)
            if last is None or last[0] != sample_ordinal:
                last = sample_ordinal, self._typed(self._store.sample(self._parent.run_id, sample_ordinal))
            self.stored[stored.ordinal] = stored
            key = TrialKey(self._run.run_id, self._run.experiments[experiment], stored.sample_id, repeat)
            yield PlannedTrial(key, stored.ordinal, sample_ordinal, experiment, last[1])

    def _typed(self, sample: Sample[Any, Any]) -> Sample[Any, Any]:
        input_type, expected_type = self._types
        try:
            return replace(
                sample,
                input=from_json(input_type, to_json(sample.input)),
                expected=None if sample.expected is None else from_json(expected_type, to_json(sample.expected)),
            )
        except CodecError as error:
            raise CodecError(f"stored sample {sample.id!r} is no longer what the dataset says: {error}") from None
