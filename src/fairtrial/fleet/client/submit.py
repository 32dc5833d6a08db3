"""Submits a whole dataset to a mailbox, for fleets assembled by hand.

There is no window: all requests are in the mailbox when this returns. `EvalSuite.run(mailbox=...)` uses a window.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any
from uuid import uuid4

from fairtrial.base.codec import to_json
from fairtrial.base.offload import in_thread, require_asyncio
from fairtrial.base.sync_bridge import make_sync
from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError, UnknownRunError
from fairtrial.fleet.client.batches import send_all
from fairtrial.fleet.messages import EvalRequest
from fairtrial.mailbox.body import bind_body_type
from fairtrial.mailbox.protocol import Mailbox
from fairtrial.store.notes import write_notes
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.experiment import Experiment
from fairtrial.trials.keys import TrialKey
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
