"""Results out of a mailbox and into a store: committed first, then acknowledged, and each trial counted once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import anyio

from fairtrial.backoff import retry_while_unavailable
from fairtrial.codec import to_json
from fairtrial.errors import ConfigurationError, StoreError, UnknownRunError
from fairtrial.fleet.batches import acknowledge, commit, given_back, in_thread, take
from fairtrial.fleet.log import log
from fairtrial.fleet.wire import EvalReply
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.portal import call_sync
from fairtrial.report.report import EvalReport
from fairtrial.runs.plan import missing_ordinals
from fairtrial.store import open_store
from fairtrial.store.protocol import RunRecord, RunStatus, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.result import EvalResult
from fairtrial.types import JSON

_BATCH = 500
_LEASE_SECONDS = 60.0
_WAIT_SECONDS = 20.0
_NAMED = 20


async def collect_results(
    results: Mailbox[EvalReply],
    expected_count: int,
    *,
    timeout_seconds: float = 300,
    store: RunStore | None = None,
    run_id: str | None = None,
    experiments: Sequence[str] = (),
    repeats: int = 1,
) -> EvalReport:
    """Collect the results of a run and report them.

    A result is committed before it is acknowledged, so a collector that dies loses nothing: with a durable store the
    next one goes on where it was. A result that comes twice counts once. When time is up the report covers what has
    come; its run is "interrupted", a warning names what is missing, and so does `report.run.notes["missing"]`.

    Args:
        results: The mailbox that was given as `reply_to`.
        expected_count: How many trials there are.
        timeout_seconds: How long to collect, in all.
        store: Where to keep the results; in memory unless given.
        run_id: The run to collect, where replies of several may come; that of the first reply unless given.
        experiments: The experiments of the run, where it has more than one: as many `submit_dataset` calls with one
            `run_id`. Not needed when the run is in the store.
        repeats: How often every sample was submitted; not needed when the run is in the store.

    Raises:
        ConfigurationError: replies do not fit the plan that these arguments describe. Nothing is lost: they go back.
    """
    if expected_count < 1 or repeats < 1:
        raise ConfigurationError("expected_count and repeats are at least 1")
    kept = open_store("memory:") if store is None else store
    collector = _Collector(kept, expected_count, tuple(experiments), repeats, run_id)
    end = anyio.current_time() + timeout_seconds
    await collector.resume()
    while not collector.complete and (left := end - anyio.current_time()) > 0:
        wait = min(_WAIT_SECONDS, left)

        async def receive(wait: float = wait) -> Sequence[Message[EvalReply]]:
            return await take(results, _BATCH, lease_seconds=_LEASE_SECONDS, wait_seconds=wait)

        messages = await retry_while_unavailable(receive, f"collecting from {results.name}", log, seconds=left)
        if messages:
            async with given_back(messages):
                await collector.keep(results, messages)
    return await collector.report()


def collect_results_sync(
    results: Mailbox[EvalReply],
    expected_count: int,
    *,
    timeout_seconds: float = 300,
    store: RunStore | None = None,
    run_id: str | None = None,
    experiments: Sequence[str] = (),
    repeats: int = 1,
) -> EvalReport:
    """`collect_results`, from ordinary code."""
    return call_sync(
        lambda: collect_results(
            results,
            expected_count,
            timeout_seconds=timeout_seconds,
            store=store,
            run_id=run_id,
            experiments=experiments,
            repeats=repeats,
        )
    )


class _Collector:
    """One run being collected: a bit for every trial."""

    def __init__(
        self, store: RunStore, expected: int, experiments: tuple[str, ...], repeats: int, run_id: str | None
    ) -> None:
        self._store = store
        self._expected = expected
        self._experiments = experiments
        self._repeats = repeats
        self._run_id = run_id
        self._run: RunRecord | None = None
        self._done = bytearray()
        self._count = 0

    @property
    def complete(self) -> bool:
        """Whether as many trials as expected have a result."""
        return self._count >= self._expected

    async def resume(self) -> None:
        """Go on with a run the store knows."""
        if self._run_id is not None:
            await self._open(self._run_id)

    async def _open(self, run_id: str, first: EvalReply | None = None) -> RunRecord | None:
        def find() -> tuple[RunRecord, bytearray] | None:
            try:
                run = self._store.get_run(run_id)
            except UnknownRunError:
                if first is None:
                    return None
                run = self._store.create_run(self._planned(run_id, first))
            return run, self._store.done(run_id)

        found = await in_thread(find)
        if found is not None:
            self._run, self._done = found
            self._run_id = run_id
            self._done.extend(bytes((self._run.planned + 7) // 8 - len(self._done)))
            self._count = sum(byte.bit_count() for byte in self._done)
        return self._run

    def _planned(self, run_id: str, first: EvalReply) -> RunRecord:
        experiments = self._experiments or (first.result.key.experiment,)
        per_sample = len(experiments) * self._repeats
        if self._expected % per_sample:
            raise ConfigurationError(
                f"{self._expected} trials cannot be {len(experiments)} experiments x {self._repeats} repeats of "
                "every sample: check expected_count, experiments and repeats"
            )
        return RunRecord(
            run_id=run_id,
            suite="collected",
            dataset_name="collected",
            dataset_version="1.0",
            dataset_fingerprint=f"collected:{run_id}",
            dataset_size=self._expected // per_sample,
            experiments=experiments,
            repeats=self._repeats,
            params={name: {} for name in experiments},
            config=to_json(EvalConfig(repeats=self._repeats)),
            created_at=time.time(),
            notes={"order": None, "collected": True},
        )

    async def keep(self, results: Mailbox[EvalReply], messages: Sequence[Message[EvalReply]]) -> None:
        """Commit a batch, then acknowledge it, then count what was new in it."""
        run = self._run or await self._open(self._run_id or messages[0].body.result.key.run_id, messages[0].body)
        assert run is not None  # noqa: S101 - a first reply always opens one
        replies = [message.body for message in messages]
        rows = [self._placed(run, reply) for reply in replies]
        items = [(row, reply.sample_ordinal, reply.sample) for row, reply in zip(rows, replies, strict=True)]
        committed = await commit(self._store, run.run_id, items)
        if committed.refused:
            key, problem = committed.refused[0]
            raise StoreError(f"{len(committed.refused)} results cannot be stored, the first of trial {key}: {problem}")
        await acknowledge(results, messages)
        for row in rows:
            bit = 1 << (row.ordinal & 7)
            if row.outcome != "not_run" and not self._done[row.ordinal >> 3] & bit:
                self._done[row.ordinal >> 3] |= bit
                self._count += 1

    def _placed(self, run: RunRecord, reply: EvalReply) -> EvalResult:
        """The result at its place in the plan: every submission counts its own trials from 0."""
        key = reply.result.key
        if key.run_id != run.run_id:
            raise ConfigurationError(
                f"replies of runs {run.run_id} and {key.run_id} come to one mailbox: give each run its own, or collect "
                "with run_id=... from a mailbox where no other's results arrive"
            )
        if key.experiment not in run.experiments:
            raise ConfigurationError(
                f"a reply is of experiment {key.experiment!r}, the run has {', '.join(run.experiments)}: collect with "
                "experiments=[...], all of them"
            )
        if key.repeat >= run.repeats or reply.sample_ordinal >= run.dataset_size:
            raise ConfigurationError(
                f"trial {key} (sample {reply.sample_ordinal}) lies outside a plan of {run.dataset_size} samples x "
                f"{len(run.experiments)} experiments x {run.repeats} repeats: check expected_count and repeats"
            )
        ordinal = run.ordinal(reply.sample_ordinal, run.experiments.index(key.experiment), key.repeat)
        return reply.result if ordinal == reply.result.ordinal else replace(reply.result, ordinal=ordinal)

    async def report(self) -> EvalReport:
        """The report of what has come, with a warning if that is not all."""
        run = self._run
        if run is None:
            raise TimeoutError(
                f"none of {self._expected} results came: are there workers, and was this mailbox their reply_to?"
            )
        notes: dict[str, JSON] = {"missing": None}
        if not self.complete:
            names = await in_thread(lambda: self._names(run))
            count = self._expected - self._count
            notes["missing"] = {"count": count, "first": list(names)}
            more = ", ..." if count > len(names) else ""
            warnings.warn(
                f"{count} of {self._expected} results of run {run.run_id} did not come in time: "
                f"{', '.join(names)}{more}",
                stacklevel=2,
            )

        def end() -> RunRecord:
            status: RunStatus = "interrupted"
            if self.complete:
                stored = sum(byte.bit_count() for byte in self._store.done(run.run_id))
                status = "finished" if stored >= self._expected else "incomplete"
            ended = time.time() if status == "finished" else None
            self._store.update_run(run.run_id, status=status, finished_at=ended, notes=notes)
            return self._store.get_run(run.run_id)

        return EvalReport(self._store, await in_thread(end))

    def _names(self, run: RunRecord) -> list[str]:
        names = []
        for ordinal in islice(missing_ordinals(run.planned, self._done), _NAMED):
            place, experiment, repeat = run.split(ordinal)
            try:
                sample = self._store.sample(run.run_id, place).id
            except StoreError:
                sample = f"sample {place}"  # Never seen: only `submit_dataset(store=...)` would have told its id.
            names.append(f"{run.experiments[experiment]}/{sample}#{repeat}")
        return names
