"""Rescores the stored outputs of a run, as a new run with the usual lifecycle."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from fairtrial.base.codec import canonical, to_json
from fairtrial.data.dataset import Dataset
from fairtrial.data.fingerprint import sample_content
from fairtrial.data.sample import Sample
from fairtrial.errors import RunMismatchError
from fairtrial.runs.adaptive import check_prices
from fairtrial.runs.executor import OpenExecutor
from fairtrial.runs.identity import ResumedRun, RunIdentity, identify
from fairtrial.runs.opening import expected_results
from fairtrial.runs.plan import PlannedTrial, RunRequest, StoredTrials, TrialFeed
from fairtrial.runs.retries import STORED_PAGE, judge_costs
from fairtrial.runs.runner import (
    Interrupt,
    OpenRun,
    execute_trials,
    run_to_end,
)
from fairtrial.runs.scheduler import Execute
from fairtrial.runs.writer import ask_store
from fairtrial.store.notes import write_notes
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import Experiment
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult

_UNFINISHED = ("running", "interrupted", "incomplete", "unscored")


async def rescore_run(
    request: RunRequest,
    run_id: str,
    *,
    any_experiment: bool = False,
    open_executor: OpenExecutor | None = None,
    interrupt: Interrupt | None = None,
) -> RunRecord:
    """Score the outputs and sessions of a stored run with the request's evaluator; the task is not called.

    Trials without an output keep their error. The scores form a new run; repeating the call resumes it if it was
    interrupted, and repeats failed scoring. With `any_experiment`, for suites without named experiments, the
    experiments of the run may have any names.

    Raises:
        RunMismatchError: the run has samples or experiments that the suite does not have.
    """
    parent = await ask_store(lambda: request.store.get_run(run_id), "reading the run")
    matched = await ask_store(lambda: _match_suite(request, parent, any_experiment), "reading the run")
    return await run_to_end(
        matched,
        lambda work: execute_trials(work, _RescoredTrials, open_executor),
        opening=partial(_open_rescoring, parent=parent),
        interrupt=interrupt,
    )


def _match_suite(request: RunRequest, parent: RunRecord, any_experiment: bool) -> RunRequest:
    """Return the request with the experiments, parameters and seed of the stored outputs."""
    if parent.noted.sampling is not None:  # Live traces are the samples; the suite has none.
        samples = (sample for _, sample in request.store.samples(parent.run_id))
        request = replace(request, dataset=Dataset(samples, name=parent.dataset_name))
    own = {experiment.name: place for place, experiment in enumerate(request.experiments)}
    for name in () if any_experiment else parent.experiments:
        if name not in own:
            raise _mismatch(request, parent, f"it has experiment {name!r}, but the suite has {', '.join(own)}")
    if parent.dataset_fingerprint != request.dataset.fingerprint:
        difference = _different_sample(request.store, parent, request.dataset)
        if difference is not None:
            raise _mismatch(request, parent, difference)
    places = [own.get(name, 0) for name in parent.experiments]
    experiments = tuple(
        _as_stored(replace(request.experiments[place], name=name), parent.params)
        for place, name in zip(places, parent.experiments, strict=True)
    )
    seed = parent.config.get("seed")
    rules = replace(
        request.rules,
        tasks=tuple(request.rules.tasks[place] for place in places),
        experiments=experiments,
        seed=seed if isinstance(seed, int) else request.rules.seed,
    )
    # Only judges are called.
    check_prices(request.config, replace(rules, tasks=(), adapter=None))
    return replace(request, experiments=experiments, rules=rules)


def _as_stored(experiment: Experiment, params: Mapping[str, Any]) -> Experiment:
    """Return the experiment with the parameters of its stored outputs."""
    stored = params.get(experiment.name, experiment.params)
    return experiment if to_json(experiment.params) == to_json(stored) else replace(experiment, params=stored)


def _mismatch(request: RunRequest, parent: RunRecord, difference: str) -> RunMismatchError:
    return RunMismatchError(
        f"run {parent.run_id} of suite {parent.suite!r} cannot be scored with suite {request.suite!r}: {difference}. "
        "Use the suite that executed the run"
    )


def _different_sample(store: RunStore, parent: RunRecord, dataset: Dataset[Any, Any]) -> str | None:
    """Return how the samples of a run differ from the dataset; None if the dataset contains all of them unchanged."""
    stored = {sample.id: _content(sample) for _, sample in store.samples(parent.run_id)}
    count = len(stored)
    changed = []
    for sample in dataset:
        content = stored.pop(sample.id, None)
        if content is not None and content != _content(sample):
            changed.append(sample.id)
    if stored:
        return f"its sample {next(iter(stored))!r} is not in the suite's dataset ({len(stored):,} of {count:,} are not)"
    if changed:
        return f"its sample {changed[0]!r} differs in the suite's dataset ({len(changed):,} of {count:,} differ)"
    return None


def _content(sample: Sample[Any, Any]) -> bytes:
    return hashlib.sha256(canonical(sample_content(sample))).digest()


def _open_rescoring(request: RunRequest, *, parent: RunRecord) -> ResumedRun:
    """Resume the unfinished rescoring of this run with this evaluator, or create a new one."""
    store, wanted = request.store, identify(request)
    made_of = (request.scorer.name, wanted.code[-1])
    # The identity of the outputs stays; the evaluator and the code version are new.
    base = wanted if parent.identity is None else RunIdentity.read(parent.identity)
    identity = replace(base, evaluator=wanted.evaluator, code=wanted.code).to_json()
    if not request.resume.fresh:
        for run in store.runs(suite=parent.suite):
            resumable = run.parent_run == parent.run_id and run.status in _UNFINISHED
            same = (run.evaluator, run.code_hash) == made_of and run.identity in (None, identity)
            if resumable and same:
                return ResumedRun(run, resumed=True)
    run = replace(
        parent,
        run_id=uuid4().hex[:12],
        number=0,
        status="running",
        evaluator=made_of[0],
        code_hash=made_of[1],
        parent_run=parent.run_id,
        created_at=time.time(),
        finished_at=None,
        notes=write_notes(order=parent.noted.order)
        | (write_notes(plans=parent.noted.plans) if parent.noted.plans else {})
        | (write_notes(split=parent.noted.split) if parent.noted.split else {})
        | (write_notes(sampling=parent.noted.sampling) if parent.noted.sampling else {}),
        identity=identity,
    )
    return ResumedRun(store.create_run(run), resumed=False)


class _RescoredTrials:
    """The stored results of the parent run as trials of the new run."""

    def __init__(self, work: OpenRun, execute: Execute) -> None:
        self._request = work.request
        self._run = work.run
        self._parent = str(work.run.parent_run)
        self._execute = execute
        self._failed: Mapping[int, EvalResult] = {}  # Trials of the new run whose scoring failed, by ordinal.
        self._places: Mapping[str, int] | None = None  # Of samples by id, if the suite has them in another order.

    async def begin(self, done: bytearray) -> tuple[TrialFeed, int]:
        """Return the trials without a score in the new run."""
        self._failed = await ask_store(self._read_failed, "reading the run")
        expected = await ask_store(lambda: expected_results(self._request.store, self._run), "reading the run")
        return self._trials(done, self._failed), expected - sum(byte.bit_count() for byte in done) + len(self._failed)

    def missing(self, done: bytearray) -> TrialFeed:
        """Return the parent's results without a result in the new run."""
        return self._trials(done, {})

    def _trials(self, done: bytearray, failed: Mapping[int, EvalResult]) -> TrialFeed:
        def load(after: int) -> Sequence[EvalResult]:
            store = self._request.store
            return list(store.results(self._parent, after=after, limit=STORED_PAGE, snapshots=True))

        def plan(stored: EvalResult) -> PlannedTrial | None:
            ordinal = stored.ordinal
            earlier = failed.get(ordinal)
            if stored.outcome == "not_run" or (earlier is None and done[ordinal >> 3] >> (ordinal & 7) & 1):
                return None
            sample_ordinal, experiment, repeat = self._run.split(ordinal)
            key = TrialKey(self._run.run_id, self._run.experiments[experiment], stored.sample_id, repeat)
            sample = self._own_sample(sample_ordinal, stored.sample_id)
            attempt = 1 if earlier is None else earlier.attempt + 1
            return PlannedTrial(key, ordinal, sample_ordinal, experiment, sample, attempt, stored)

        return TrialFeed(StoredTrials(load, plan))

    async def execute(self, trial: PlannedTrial) -> EvalResult:
        """Score a stored output; a trial without one keeps its error."""
        stored = trial.stored
        scorable = stored is None or stored.outcome in ("scored", "scorer_error") or stored.stage == "score"
        if stored is not None and not scorable:
            return replace(stored, key=trial.key, source=None)
        result = await self._execute(trial)
        failed = self._failed.get(trial.ordinal)
        if failed is None:
            return result
        # The judge calls of the failed scoring were paid for too.
        return replace(
            result,
            judge_cost_usd=judge_costs(failed, result),
            unpriced_judge_calls=failed.unpriced_judge_calls + result.unpriced_judge_calls,
        )

    def replaced_costs(self) -> Mapping[int, float]:
        """Return the costs of the failed scorings that are repeated, by ordinal."""
        return {ordinal: failed.judge_cost_usd or 0.0 for ordinal, failed in self._failed.items()}

    def _read_failed(self) -> dict[int, EvalResult]:
        failed = self._request.store.results(self._run.run_id, outcomes=("scorer_error",), outputs=False)
        return {result.ordinal: replace(result, source=None) for result in failed}

    def _own_sample(self, ordinal: int, sample_id: str) -> Sample[Any, Any]:
        """Return the suite's own sample, which `_match_suite` found to be the stored one, with its types."""
        dataset = self._request.dataset
        if self._places is None:
            # In the same order, which is the rule, no index of the ids is needed.
            same_order = self._run.noted.order == dataset.order
            self._places = {} if same_order else {sample.id: place for place, sample in enumerate(dataset)}
        return dataset[self._places.get(sample_id, ordinal)]
