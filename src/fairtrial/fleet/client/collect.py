"""Submit a dataset and collect its results, for programs that manage their own workers."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any, cast
from uuid import uuid4

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.base.codec import to_json
from fairtrial.base.frozen import EMPTY
from fairtrial.base.offload import in_thread, require_asyncio
from fairtrial.base.sync_bridge import make_sync
from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError, MailboxConnectionError, StoreError, UnknownRunError
from fairtrial.fleet.client.fleet_run import log
from fairtrial.fleet.client.submission import acknowledge, commit, handed_back_on_error, send_all, take
from fairtrial.fleet.messages import EvalReply, EvalRequest, current_implicit_run, end_implicit_run, is_implicit_run
from fairtrial.mailbox.body import bind_body_type
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.reports.report import EvalReport
from fairtrial.runs.opening import write_column_file
from fairtrial.runs.plan import missing_ordinals
from fairtrial.store import open_store
from fairtrial.store.notes import MissingNote, write_notes
from fairtrial.store.protocol import RunRecord, RunStatus, RunStore
from fairtrial.trials.config import EvalConfig, Experiment
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult
from fairtrial.trials.sample_types import PLAIN, sample_type_names

_BATCH = 500
_REMEMBERED = 1000

submitted: dict[str, bool] = {}
"""The runs that this process has submitted, oldest first, and whether they have been collected.

A collector without a `run_id` takes one of these, and so ignores late results of an earlier run.
"""


def remember(run_id: str, *, collected: bool) -> None:
    """Record that this process has submitted or collected a run."""
    submitted[run_id] = collected
    if len(submitted) > _REMEMBERED:
        del submitted[next(iter(submitted))]


async def submit_dataset(
    dataset: Dataset[Any, Any],
    experiment: Experiment | Mailbox[EvalRequest] | None = None,
    requests: Mailbox[EvalRequest] | None = None,
    *,
    run_id: str | None = None,
    repeats: int = 1,
    reply_to: str | Mailbox[Any] | None = None,
    store: RunStore | None = None,
    suite: str = "",
    fingerprint: str = "",
) -> str:
    """Send a request for every trial of a dataset to a mailbox; returns the id of the run.

        await submit_dataset(dataset, requests)
        await submit_dataset(dataset, Experiment("terse", {"style": "terse"}), requests)

    Without `reply_to`, workers deliver results to their own destination: `EvalLoop(results=...)`. If neither is given,
    the worker does not execute the request, because the result could not be delivered: it logs an error and makes the
    request a dead letter.

    Args:
        dataset: The samples.
        experiment: The experiment, by name and parameters; workers have its task. "baseline" by default.
        requests: The mailbox of the requests; the second argument if no experiment is given.
        run_id: The id of the run; a new one by default. Sending the same run again is harmless: the result of a trial
            counts once.
        repeats: How often every sample is executed.
        reply_to: The mailbox for the results, or its name; see `collect_results`. A mailbox in memory is passed by
            reference, so workers in this process need no resolver.
        store: The store in which the run and its samples are recorded before anything is sent, so that
            `collect_results` with the same store can name missing trials. Workers that deliver directly into a store
            need this record.
        suite: The suite name of the run in the store; the name of the dataset by default.
        fingerprint: The fingerprint of the suite's code; workers with other code refuse. Empty matches any.

    Raises:
        ConfigurationError: a sample is too large for the mailbox; the message names the first one.
    """
    require_asyncio("a fleet", "submit from a program that runs under it")
    if repeats < 1:
        raise ConfigurationError(f"repeats must be at least 1 (got {repeats})")
    variant, mailbox = _experiment_and_mailbox(experiment, requests)
    bind_body_type(mailbox, EvalRequest)
    chosen = run_id or uuid4().hex[:12]
    if store is not None:
        await in_thread(lambda: _record(store, chosen, dataset, variant, repeats, suite or dataset.name))
    opening = getattr(reply_to, "open", None)
    if opening is not None:
        await opening()  # A reply never creates a mailbox, so it must exist before the first reply is sent.
    bodies = _bodies(dataset, variant, chosen, repeats, suite, fingerprint)
    refused = []
    sent = 0
    while batch := list(islice(bodies, _BATCH)):
        sent += len(batch)
        refused += await send_all(mailbox, batch, reply_to=reply_to)
    if refused:
        body, problem = refused[0]
        raise ConfigurationError(
            f"{len(refused)} requests cannot be sent; the first is for trial {body.key}: {problem}"
        )
    remember(chosen, collected=not sent)  # Of an empty dataset there is nothing to collect.
    return chosen


submit_dataset_sync = make_sync(submit_dataset)


def _experiment_and_mailbox(
    experiment: Experiment | Mailbox[EvalRequest] | None, requests: Mailbox[EvalRequest] | None
) -> tuple[Experiment, Mailbox[EvalRequest]]:
    """Return both; the mailbox may have been given in place of the experiment."""
    if requests is None and isinstance(experiment, Mailbox):
        return Experiment(), experiment
    if requests is None:
        raise ConfigurationError(
            "submit_dataset must be given a mailbox: submit_dataset(dataset, requests), or "
            "submit_dataset(dataset, experiment, requests)"
        )
    if experiment is None:
        return Experiment(), requests
    if not isinstance(experiment, Experiment):
        raise ConfigurationError(f"experiment must be an Experiment (got {experiment!r})")
    return experiment, requests


def _bodies(
    dataset: Dataset[Any, Any], experiment: Experiment, run_id: str, repeats: int, suite: str, fingerprint: str
) -> Iterator[EvalRequest]:
    for place, sample in enumerate(dataset):
        for repeat in range(repeats):
            yield EvalRequest(
                TrialKey(run_id, experiment.name, sample.id, repeat),
                sample,
                place * repeats + repeat,
                place,
                params=experiment.params,
                suite=suite,
                fingerprint=fingerprint,
                echo=True,
            )


def _record(
    store: RunStore, run_id: str, dataset: Dataset[Any, Any], experiment: Experiment, repeats: int, suite: str
) -> None:
    try:
        known = store.get_run(run_id)
    except UnknownRunError:
        pass
    else:
        plan = (known.experiments, known.repeats, known.dataset_fingerprint)
        if plan != ((experiment.name,), repeats, dataset.fingerprint):
            raise ConfigurationError(f"run {run_id} is already in the store with a different plan: use another run_id")
        return
    types = sample_type_names(dataset)
    kept = write_notes(order=dataset.order)
    if dataset.split_origin is not None:
        kept |= write_notes(split=dataset.split_origin)
    store.create_run(
        RunRecord(
            run_id=run_id,
            suite=suite,
            dataset_name=dataset.name,
            dataset_version=dataset.version,
            dataset_fingerprint=dataset.fingerprint,
            dataset_size=len(dataset),
            experiments=(experiment.name,),
            repeats=repeats,
            params={experiment.name: experiment.params},
            config=to_json(EvalConfig(repeats=repeats)),
            created_at=time.time(),
            notes=kept if types == PLAIN else kept | write_notes(sample_types=types),
        )
    )
    samples = enumerate(dataset)
    while batch := dict(islice(samples, _BATCH)):
        store.commit(run_id, (), batch)


_BATCH_SECONDS = 60.0
_WAIT_SECONDS = 20.0
_NAMED = 20
_OFFERED = 5
_OFFER_SECONDS = 2.0
_LOST_SECONDS = 3.0
_LOST_AFTER = 2


async def collect_results(
    results: Mailbox[EvalReply] | Mailbox[EvalResult],
    expected_count: int,
    *,
    timeout_seconds: float = 300,
    store: RunStore | None = None,
    run_id: str | None = None,
    experiments: Sequence[str] = (),
    repeats: int = 1,
    requests: Mailbox[EvalRequest] | None = None,
) -> EvalReport:
    """Collect the results of a run and report them.

    A result is committed before it is acknowledged, so a collector that crashes loses nothing: with a durable store
    the next one continues. A result that arrives twice counts once. After the timeout, the report covers the results
    that have arrived, even if there are none; its run is "interrupted", and a warning and
    `report.run.notes["missing"]` name the missing trials.

    Late results of other runs are left to other collectors for some seconds, and then moved to the dead letters of the
    mailbox. If results are missing and those of another run were seen, the warning names that run: each call collects
    one run. A run of which nothing has arrived can be collected again without its `run_id`.

    Args:
        results: The mailbox that was given as `reply_to`. Its messages are `EvalReply`s, with results and samples.
        expected_count: The number of trials.
        timeout_seconds: The time limit for the whole collection.
        store: The store for the results; in memory by default.
        run_id: The run to collect, as returned by `submit_dataset`. By default a run that this process has submitted
            and not yet collected, else the run of the first reply.
        experiments: The experiments of the run if there are several (several `submit_dataset` calls with one `run_id`).
            Not needed if the run is in the store.
        repeats: How often every sample was submitted; not needed if the run is in the store.
        requests: The mailbox of the requests. Together with the `store` that was given to `submit_dataset`, trials that
            are neither stored nor in one of the two mailboxes are sent again, so messages that a queue has lost in a
            crash do not cost results.

    Raises:
        ConfigurationError: replies do not match the plan that these arguments describe. They are handed back.
    """
    require_asyncio("a fleet", "collect from a program that runs under it")
    if expected_count < 0 or repeats < 1:
        raise ConfigurationError(
            f"expected_count must be at least 0 and repeats at least 1 (got {expected_count} and {repeats})"
        )
    if requests is not None and (store is None or run_id is None):
        raise ConfigurationError("requests must be given with the run_id and the store of submit_dataset(store=...)")
    replies = cast("Mailbox[EvalReply]", results)
    bind_body_type(replies, EvalReply)
    kept = open_store("memory:") if store is None else store
    collector = _Collector(kept, expected_count, tuple(experiments), repeats, run_id)
    lost = None if requests is None else _LostRequests(collector, requests, replies)
    now = asyncio.get_running_loop().time
    end = now() + timeout_seconds
    await collector.resume()
    while not collector.complete and (left := end - now()) > 0:
        wait = min(_WAIT_SECONDS if lost is None else _LOST_SECONDS, left)

        async def receive(wait: float = wait) -> Sequence[Message[EvalReply]]:
            return await take(replies, _BATCH, lease_seconds=_BATCH_SECONDS, wait_seconds=wait)

        messages = await retry_while_unavailable(receive, f"collecting from {replies.name}", log, seconds=left)
        if messages:
            async with handed_back_on_error(messages):
                await collector.keep(replies, messages)
        if lost is not None:
            await lost.look(idle=not messages)
    return await collector.report()


collect_results_sync = make_sync(collect_results)


class _Collector:
    """The state of a collection: one bit per trial."""

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
        self._places: dict[str, int] = {}  # Positions of samples without a plan, in order of arrival.
        self._free_places: Iterator[int] = count()
        self._others: dict[TrialKey, bool] = {}  # Results of other runs, and whether they are still in the mailbox.

    @property
    def complete(self) -> bool:
        """Whether the expected number of trials have a result."""
        return self._count >= self._expected

    async def resume(self) -> None:
        """Resume a run that is in the store."""
        if self._run_id is not None:
            await self._open(self._run_id)

    async def _open(self, run_id: str, first: EvalReply | None = None) -> RunRecord | None:
        def find() -> tuple[RunRecord, bytearray] | None:
            try:
                run = self._store.get_run(run_id)
            except UnknownRunError:
                if first is None:
                    return None
                experiments = self._experiments or (first.result.key.experiment,)
                run = self._store.create_run(self._planned(run_id, experiments))
            if is_implicit_run(run_id):
                self._places = _stored_places(self._store, run)
                taken = set(self._places.values())
                self._free_places = (place for place in count() if place not in taken)
            return run, self._store.done(run_id)

        found = await in_thread(find)
        if found is not None:
            self._run, self._done = found
            self._run_id = run_id
            self._done.extend(bytes((self._run.planned + 7) // 8 - len(self._done)))
            self._count = sum(byte.bit_count() for byte in self._done)
        return self._run

    def _planned(self, run_id: str, experiments: tuple[str, ...]) -> RunRecord:
        per_sample = len(experiments) * self._repeats
        if self._expected % per_sample:
            raise ConfigurationError(
                f"expected_count must be a multiple of {len(experiments)} experiments x {self._repeats} repeats "
                f"(got {self._expected}): check expected_count, experiments and repeats"
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
            notes=write_notes(order=None, collected=True),
        )

    async def keep(self, results: Mailbox[EvalReply], messages: Sequence[Message[EvalReply]]) -> None:
        """Commit the replies of this run in a batch, acknowledge them, and count the new ones."""
        if self._run_id is None:
            self._run_id = _chosen_run(messages)
        others = [message for message in messages if message.body.result.key.run_id != self._run_id]
        left = await asyncio.gather(*map(_leave_to_others, others))
        for message, in_mailbox in zip(others, left, strict=True):
            self._others[message.body.result.key] = in_mailbox
        messages = [message for message in messages if message not in others] if others else messages
        if not messages or self._run_id is None:
            return
        run = self._run or await self._open(self._run_id, messages[0].body)
        assert run is not None  # noqa: S101 - the first reply always opens a run
        replies = [message.body for message in messages]
        places = [self._place(reply) for reply in replies]
        rows = [self._placed(run, reply, place) for reply, place in zip(replies, places, strict=True)]
        items = [(row, place, reply.sample) for row, place, reply in zip(rows, places, replies, strict=True)]
        committed = await commit(self._store, run.run_id, items)
        if committed.refused:
            key, problem = committed.refused[0]
            raise StoreError(
                f"{len(committed.refused)} results cannot be stored; the first is of trial {key}: {problem}"
            )
        await acknowledge(results, messages)
        for row in rows:
            bit = 1 << (row.ordinal & 7)
            if row.outcome != "not_run" and not self._done[row.ordinal >> 3] & bit:
                self._done[row.ordinal >> 3] |= bit
                self._count += 1

    def _place(self, reply: EvalReply) -> int:
        """Return the position of a sample; requests without a key have none."""
        key = reply.result.key
        if not is_implicit_run(key.run_id):
            return reply.sample_ordinal
        place = self._places.get(key.sample_id)
        if place is None:
            place = self._places[key.sample_id] = next(self._free_places)
        return place

    def _placed(self, run: RunRecord, reply: EvalReply, place: int) -> EvalResult:
        """Return the result with its ordinal in the whole plan: every submission numbers its own trials from 0."""
        key = reply.result.key
        if key.experiment not in run.experiments:
            raise ConfigurationError(
                f"a reply belongs to experiment {key.experiment!r}, but the run has {', '.join(run.experiments)}: "
                "name all of them with experiments=[...]"
            )
        if key.repeat >= run.repeats or place >= run.dataset_size:
            raise ConfigurationError(
                f"trial {key} (sample {place}) is outside the plan of {run.dataset_size} samples x "
                f"{len(run.experiments)} experiments x {run.repeats} repeats: check expected_count and repeats"
            )
        ordinal = run.ordinal(place, run.experiments.index(key.experiment), key.repeat)
        return reply.result if ordinal == reply.result.ordinal else replace(reply.result, ordinal=ordinal)

    async def report(self) -> EvalReport:
        """Report the results that have arrived; warn if some are missing."""
        run = self._run or await self._nothing_came()
        if self._count or self.complete:  # Else nothing would be mixed: the next call may collect it.
            if run.run_id in submitted or is_implicit_run(run.run_id):
                remember(run.run_id, collected=True)
            end_implicit_run(run.run_id)
        missing: MissingNote | None = None
        if not self.complete:
            names = await in_thread(lambda: self._names(run))
            lacking = self._expected - self._count
            missing = MissingNote(lacking, tuple(names))
            more = ", ..." if lacking > len(names) else ""
            warnings.warn(
                f"{lacking} of {self._expected} results of run {run.run_id} did not arrive in time: "
                f"{', '.join(names)}{more}{self._seen_of_others()}",
                stacklevel=2,
            )

        def end() -> RunRecord:
            status: RunStatus = "interrupted"
            if self.complete:
                stored = sum(byte.bit_count() for byte in self._store.done(run.run_id))
                status = "finished" if stored >= self._expected else "incomplete"
            ended = time.time() if status == "finished" else None
            self._store.update_run(run.run_id, status=status, finished_at=ended, notes=write_notes(missing=missing))
            ended_run = self._store.get_run(run.run_id)
            write_column_file(self._store, ended_run)
            return ended_run

        return EvalReport(self._store, await in_thread(end))

    async def _nothing_came(self) -> RunRecord:
        """Create a run without results, so that the missing trials are reported as usual."""
        if self._expected:
            advice = "check that workers are running and that this mailbox was the reply_to"
            log.warning("none of the %d results arrived%s", self._expected, self._seen_of_others() or f": {advice}")
        run_id = self._run_id or next(reversed(_uncollected()), None) or uuid4().hex[:12]
        stored = await self._open(run_id)  # By `submit_dataset(store=...)`.
        if stored is not None:
            return stored
        planned = self._planned(run_id, self._experiments or ("default",))
        self._run = await in_thread(lambda: self._store.create_run(planned))
        self._done = bytearray((planned.planned + 7) // 8)
        return self._run

    def _seen_of_others(self) -> str:
        """Say which other runs have results in the mailbox; empty if none was seen."""
        if not self._others:
            return ""
        runs = Counter(key.run_id for key in self._others)
        counts = ", ".join(f"{seen} of run {run_id}" for run_id, seen in islice(runs.items(), _NAMED))
        dead = sum(not in_mailbox for in_mailbox in self._others.values())
        letters = f" {dead} of them are dead letters by now: retry those first." if dead else ""
        return (
            f"; the mailbox has results of other runs: {counts}. Each call collects one run; for the first of these "
            f"pass run_id={next(iter(runs))!r}.{letters}"
        )

    async def lost_requests(self) -> list[EvalRequest]:
        """Build requests for the trials without a result from the record that `submit_dataset` stored."""
        run = self._run
        if run is None:
            return []

        def requests() -> list[EvalRequest]:
            made = []
            types = run.noted.sample_types
            for ordinal in missing_ordinals(run.planned, self._done):
                place, experiment, repeat = run.split(ordinal)
                name = run.experiments[experiment]
                sample = self._store.sample(run.run_id, place)
                key = TrialKey(run.run_id, name, sample.id, repeat)
                params: Any = run.params.get(name, EMPTY)
                made.append(
                    EvalRequest(key, sample, ordinal, place, params=params, suite=run.suite, echo=True, types=types)
                )
            return made

        return await in_thread(requests)

    def _names(self, run: RunRecord) -> list[str]:
        names = []
        for ordinal in islice(missing_ordinals(run.planned, self._done), _NAMED):
            place, experiment, repeat = run.split(ordinal)
            try:
                sample = self._store.sample(run.run_id, place).id
            except StoreError:
                sample = f"sample {place}"  # Its id is unknown without `submit_dataset(store=...)`.
            names.append(f"{run.experiments[experiment]}/{sample}#{repeat}")
        return names


def _stored_places(store: RunStore, run: RunRecord) -> dict[str, int]:
    """Return the positions of the stored samples of a run without a plan."""
    return {sample_id: place for place, sample_id, _ in store.sample_facts(run.run_id)}


class _LostRequests:
    """Resends requests that a queue has lost: trials without a result while both mailboxes are empty."""

    def __init__(self, collector: _Collector, requests: Mailbox[EvalRequest], results: Mailbox[EvalReply]) -> None:
        self._collector = collector
        self._requests = requests
        self._results = results
        self._idle = 0

    async def look(self, *, idle: bool) -> None:
        """Count receives that returned nothing while both mailboxes were empty; resend at the second."""
        try:
            self._idle = self._idle + 1 if idle and not await self._held() else 0
        except MailboxConnectionError:
            self._idle = 0
        if self._idle < _LOST_AFTER:
            return
        self._idle = 0
        lost = await self._collector.lost_requests()
        if lost:
            log.warning("%d requests of run %s were lost; sending them again", len(lost), lost[0].key.run_id)
            await send_all(self._requests, lost, reply_to=self._results)

    async def _held(self) -> int:
        return await self._requests.approximate_count() + await self._results.approximate_count()


def _chosen_run(messages: Sequence[Message[EvalReply]]) -> str | None:
    """Return the run to collect: one that this process has submitted, else the run of the first reply."""
    runs = [message.body.result.key.run_id for message in messages if not submitted.get(message.body.result.key.run_id)]
    own = _uncollected()
    return next((run_id for run_id in runs if run_id in own or not own), None)


def _uncollected() -> list[str]:
    """Return the runs of this process that have not been collected; requests without a key come last."""
    implicit = current_implicit_run()
    return [run_id for run_id, collected in submitted.items() if not collected] + ([implicit] if implicit else [])


async def _leave_to_others(message: Message[EvalReply]) -> bool:
    """Hand a reply of another run back to its own collector; after several attempts make it a dead letter.

    Returns whether it is still in the mailbox.
    """
    key = message.body.result.key
    if message.delivery_count < _OFFERED:
        await message.nack(_OFFER_SECONDS)
        return True
    log.warning("the result of trial %s belongs to run %s, which is not collected here", key, key.run_id)
    await message.dead_letter(f"a result of run {key.run_id}, which was not collected from this mailbox")
    return False
