"""Commits the results of a fleet run to the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fairtrial.base.offload import finish
from fairtrial.fleet.client.batches import commit
from fairtrial.fleet.client.fleet_run import FleetRun
from fairtrial.fleet.client.ledger import Ledger
from fairtrial.fleet.messages import EvalReply
from fairtrial.runs.events import SampleEvaluated
from fairtrial.runs.plan import PlannedTrial
from fairtrial.runs.retries import RetrySet
from fairtrial.runs.scheduler import Limits
from fairtrial.runs.writer import Item
from fairtrial.trials.result import EvalResult, failed_result


class ResultCommitter:
    """Commits results, records them in the ledger and checks the limits of the run.

    Attributes:
        refused: Trials whose results the store refuses.
    """

    def __init__(self, fleet: FleetRun, ledger: Ledger, retries: RetrySet, limits: Limits) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._retries = retries
        self._limits = limits
        self.refused: set[int] = set()

    async def commit(self, replies: Sequence[EvalReply]) -> list[EvalResult]:
        """Commit replies; returns the new results. A cancellation does not interrupt a commit that has begun."""
        fleet, ledger = self._fleet, self._ledger
        fresh: list[EvalResult] = []
        items: list[Item] = []
        seen: set[int] = set()
        for reply in replies:
            result = self._complete(reply.result)
            if ledger.is_fresh(reply) and result.ordinal not in seen:
                seen.add(result.ordinal)
                fresh.append(result)
            # Samples of late duplicates are stored too: a failover may have lost result and sample.
            items.append((result, reply.sample_ordinal, ledger.sample(reply)))
        with ledger.committing(seen):
            if fleet.observers:
                for result in fresh:
                    fleet.observers.publish(SampleEvaluated(fleet.run_id, result))
            committed = await finish(commit(fleet.store, fleet.run_id, items, fleet.note_store_failure))
            if committed.refused:
                refused = {key for key, _problem in committed.refused}
                self.refused.update(result.ordinal for result in fresh if result.key in refused)
            for result in fresh:
                ledger.mark_done(result.ordinal)
                self._limits.check(result, fleet.stop)
        return fresh

    async def give_up(self, trials: Sequence[PlannedTrial], reason: str) -> None:
        """Store error results for trials that could not be delivered to a worker."""
        await self.commit([_undelivered(trial, reason) for trial in trials])

    def is_stopped(self, trial: PlannedTrial) -> bool:
        """Whether the experiment of a trial was stopped."""
        return self._limits.is_stopped(trial.key.experiment)

    def end_stopped(self) -> None:
        """End the run as incomplete because experiments were stopped."""
        self._limits.end_stopped(self._fleet.stop)

    @property
    def has_listeners(self) -> bool:
        """Whether anything needs every result: observers, limits, adaptive stopping, a stream."""
        fleet = self._fleet
        return bool(fleet.observers or fleet.work.on_result is not None or self._limits.matter or fleet.stop.adaptive)

    async def publish_stored(self, result: EvalResult) -> None:
        """Publish a result that another process has stored, as if it had been committed here."""
        fleet = self._fleet
        if fleet.work.progress is not None:
            fleet.work.progress.cost_usd += result.total_cost_usd
        fleet.observers.publish(SampleEvaluated(fleet.run_id, result))
        self._limits.check(result, fleet.stop)
        if fleet.work.on_result is not None:
            await fleet.work.on_result(result)

    def _complete(self, result: EvalResult) -> EvalResult:
        """Add what only the client knows: the costs of earlier attempts, and the code version."""
        code = self._fleet.work.code
        return self._retries.with_earlier_cost(replace(result, code=code) if code else result)


def _undelivered(trial: PlannedTrial, reason: str) -> EvalReply:
    """Build the error result of a trial that no worker answered."""
    result = failed_result(trial.key, trial.ordinal, trial.attempt, "dead_letter", "delivery", reason)
    return EvalReply(result, trial.sample_ordinal, trial.sample)
