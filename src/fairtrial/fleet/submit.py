"""A whole dataset into a mailbox, for those who put their fleet together themselves.

Not windowed: everything is in the mailbox when this returns. `EvalSuite.run(mailbox=...)` keeps a window.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any
from uuid import uuid4

from fairtrial.codec import to_json
from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError, UnknownRunError
from fairtrial.fleet.batches import in_thread, send_all
from fairtrial.fleet.wire import EvalRequest
from fairtrial.mailbox.protocol import Mailbox
from fairtrial.portal import call_sync
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.experiment import Experiment
from fairtrial.trials.keys import TrialKey

_BATCH = 500


async def submit_dataset(
    dataset: Dataset[Any, Any],
    experiment: Experiment,
    requests: Mailbox[EvalRequest],
    *,
    run_id: str | None = None,
    repeats: int = 1,
    reply_to: str | Mailbox[Any] | None = None,
    store: RunStore | None = None,
    suite: str = "",
    fingerprint: str = "",
) -> str:
    """Put a request for every trial of a dataset into a mailbox; returns the id of the run they belong to.

    Without `reply_to`, results go where the workers were told to deliver them: `EvalLoop(results=...)`. A worker that
    was told nothing executes no request that has no reply address either: it sets it aside as a dead letter, and says
    so, rather than pay for a result that nobody gets.

    Args:
        dataset: The samples.
        experiment: The variant to try, by name and parameters; workers know its task.
        requests: Where workers take their work from.
        run_id: The run the trials belong to; a new one unless given. Sending the same run again is harmless:
            a trial's result is counted once.
        repeats: How often every sample is tried.
        reply_to: The mailbox for the results, or its name; see `collect_results`.
        store: Where to keep a record of the run and its samples before anything is sent: then `collect_results` with
            the same store can name what is missing. Workers that deliver straight into a store need the record.
        suite: What the run is listed under in the store; the dataset's name unless given.
        fingerprint: What the suite is made of; workers made of something else refuse. Empty matches any.

    Raises:
        ConfigurationError: a sample is too large for the mailbox; names the first of them.
    """
    if repeats < 1:
        raise ConfigurationError(f"repeats is at least 1, not {repeats}")
    chosen = run_id or uuid4().hex[:12]
    if store is not None:
        await in_thread(lambda: _record(store, chosen, dataset, experiment, repeats, suite or dataset.name))
    address = reply_to if isinstance(reply_to, str) or reply_to is None else reply_to.name
    opening = getattr(reply_to, "open", None)
    if opening is not None:
        await opening()  # A reply never creates a mailbox, so it has to be there before the first one comes.
    bodies = _bodies(dataset, experiment, chosen, repeats, suite, fingerprint)
    refused = []
    while batch := list(islice(bodies, _BATCH)):
        refused += await send_all(requests, batch, reply_to=address)
    if refused:
        body, problem = refused[0]
        raise ConfigurationError(
            f"{len(refused)} of the requests cannot be sent, the first for trial {body.key}: {problem}"
        )
    return chosen


def submit_dataset_sync(
    dataset: Dataset[Any, Any],
    experiment: Experiment,
    requests: Mailbox[EvalRequest],
    *,
    run_id: str | None = None,
    repeats: int = 1,
    reply_to: str | Mailbox[Any] | None = None,
    store: RunStore | None = None,
    suite: str = "",
    fingerprint: str = "",
) -> str:
    """`submit_dataset`, from ordinary code."""
    return call_sync(
        lambda: submit_dataset(
            dataset,
            experiment,
            requests,
            run_id=run_id,
            repeats=repeats,
            reply_to=reply_to,
            store=store,
            suite=suite,
            fingerprint=fingerprint,
        )
    )


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
            raise ConfigurationError(
                f"run {run_id} is in the store already, with another plan: give this one its own id"
            )
        return
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
            notes={"order": dataset.order},
        )
    )
    samples = enumerate(dataset)
    while batch := dict(islice(samples, _BATCH)):
        store.commit(run_id, (), batch)
