"""The numbers of results and the facts of samples in bulk, for column files.

The database joins a column of many rows to one text where it can, and other rows come straight from its cursor: a
million rows cost more as objects than as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import sqlalchemy as sa

from fairtrial.data.fingerprint import UNKNOWN
from fairtrial.store.protocol import RunRecord, Totals
from fairtrial.store.rows import SCORED, restored_text
from fairtrial.store.schema import results, runs, samples
from fairtrial.trials.result import AMOUNTS, COUNTS

DETAILS = ("ordinal", "value", *AMOUNTS, "reward", "metrics", "verdicts")
"""The columns of `NumberStore.result_details`, in this order."""

_TIMED = sa.case((results.c.timed == 1, results.c.latency_ms), else_=-1)  # -1: a warm-up.
_SMALL = {
    "ordinal": results.c.ordinal,
    "outcome": results.c.outcome,
    "passed": sa.func.coalesce(results.c.passed, -1),  # -1: no verdict.
    **{name: _TIMED if name == "latency_ms" else results.c[name] for name in COUNTS},
    "attempt": results.c.attempt,
    "value": sa.cast(sa.func.coalesce(results.c.value, -1.0), sa.Integer),  # -1: no score. Cut off at the point.
    "started_at": sa.cast(results.c.started_at * 1000, sa.BigInteger),  # To the millisecond: digits take time.
}
_TEXTS = tuple(sa.func.aggregate_strings(sa.cast(column, sa.Text), ",") for column in _SMALL.values())
_DETAILED = sa.or_(
    results.c.value != sa.cast(results.c.value, sa.Integer),
    *(results.c[name].is_not(None) for name in AMOUNTS),
    results.c.reward.is_not(None),
    results.c.metrics.is_not(None),
)
_SAMPLE_TEXTS = sa.select(
    sa.func.count(),
    sa.func.count(samples.c.input),
    sa.func.count().filter(samples.c.metadata != "{}"),
    sa.func.aggregate_strings(sa.cast(samples.c.ordinal, sa.Text), ","),
    sa.func.aggregate_strings(samples.c.id, ""),
    sa.func.aggregate_strings(sa.cast(sa.func.length(samples.c.id), sa.Text), ","),
    sa.func.aggregate_strings(
        sa.cast(sa.func.coalesce(samples.c.input_hash, sa.literal(UNKNOWN, sa.BigInteger)), sa.Text), ","
    ),
)
_STATE = sa.select(sa.func.count(), sa.func.count().filter(results.c.outcome == SCORED), sa.func.sum(results.c.attempt))

_PROGRESS = sa.select(
    sa.func.count(),
    sa.func.count().filter(results.c.outcome == SCORED),
    sa.func.sum(results.c.input_tokens + results.c.output_tokens),
)


class NumberTexts(NamedTuple):
    """The small numbers of some results, each column as one text with commas: a text costs less than its numbers.

    `columns` has ordinals, outcomes, verdicts, counts, attempts, values and times, by the name of the column, with the
    results in the same order. If any `detailed` result is among them (with a score between 0 and 1, costs, an own
    reward or metrics), these are in `NumberStore.result_details`. Times are in whole milliseconds.
    """

    detailed: int
    columns: Mapping[str, str]


class SampleTexts(NamedTuple):
    """The facts of some samples, each column as one text; the order of the samples is the same in all of them."""

    known: int
    with_input: int
    with_metadata: int
    ordinals: str
    ids: str  # As stored, without anything between them.
    lengths: str
    hashes: str


class BlockState(NamedTuple):
    """The state of the results in one block of ordinals; two equal states mean equal results.

    A scored result is final, so the number of scored results only grows. All other replacements raise an attempt.
    """

    stored: int
    scored: int
    attempts: int


class StoredProgress(NamedTuple):
    """How far a run is: its stored results, those of them without a score, and the tokens they took."""

    stored: int
    errors: int
    tokens: int


class VerdictRow(NamedTuple):
    """What a page that shows many runs needs of a result; columns of the store."""

    run: int
    ordinal: int
    experiment: int
    outcome: int
    passed: int | None
    cost_usd: float | None
    unpriced_calls: int  # Of the task.


class RunVerdicts(NamedTuple):
    """The results of a run, as rows of `VerdictRow`, and the number of its dataset in the store."""

    dataset: int
    rows: Sequence[tuple[Any, ...]]


class SampleState(NamedTuple):
    """How much of the samples of a run is stored."""

    known: int
    with_input: int


@runtime_checkable
class NumberStore(Protocol):
    """A store that can hand out numbers in bulk. All stores in a database can."""

    @property
    def identity(self) -> str:
        """The address of the store, without a password."""
        ...

    def get_run(self, run_id: str) -> RunRecord:
        """Return a run. Raises `UnknownRunError`."""
        ...

    def totals(self, run_id: str) -> list[Totals]:
        """Return the sums per experiment."""
        ...

    def progress(self, run_id: str) -> StoredProgress:
        """Return how far a run is, in a fraction of the time that `totals` takes."""
        ...

    def highest_ordinal(self, run_id: str) -> int:
        """Return the highest ordinal with a stored result; -1 if there is none."""
        ...

    def block_states(self, run_id: str, size: int, first: int) -> tuple[dict[int, BlockState], int]:
        """Return (block number -> its state, the highest stored ordinal or -1) of the blocks from `first` on."""
        ...

    def result_numbers(self, run_id: str, first: int, end: int) -> NumberTexts | None:
        """Return the numbers of the stored results with these ordinals; None if there are none."""
        ...

    def result_details(self, run_id: str, first: int, end: int) -> Sequence[tuple[Any, ...]]:
        """Return the `DETAILS` of the stored results with these ordinals, ascending."""
        ...

    def verdicts(self, run_ids: Sequence[str]) -> Mapping[str, RunVerdicts]:
        """Return the verdicts and costs of some runs, in the order of their plans: two queries for all of them."""
        ...

    def facts_of_datasets(self, datasets: Sequence[int]) -> Mapping[int, Sequence[tuple[Any, ...]]]:
        """Return the known samples of some datasets as (ordinal, stored id, metadata JSON, hash of the input)."""
        ...

    def first_snapshots(self, run_ids: Sequence[str], trials: int) -> Mapping[str, Sequence[tuple[int, bytes]]]:
        """Return (experiment, snapshot) of the scored ones among the first trials of some runs.

        The transcripts of these runs must be in the database.
        """
        ...

    def sample_state(self, run_id: str) -> SampleState:
        """Return how many samples of a run are known, and how many of them completely."""
        ...

    def highest_sample(self, run_id: str) -> int:
        """Return the highest ordinal of a known sample; -1 if there is none."""
        ...

    def sample_texts(self, run_id: str, first: int, end: int) -> SampleTexts | None:
        """Return facts of the known samples with these ordinals; None if there are none."""
        ...

    def sample_rows(self, run_id: str, first: int, end: int) -> Sequence[tuple[Any, ...]]:
        """Return (ordinal, stored id, metadata JSON, hash of the input, whether the input is known), ascending."""
        ...


def progress(connection: sa.Connection, number: int) -> StoredProgress:
    """Return how far a run is: one scan, without groups."""
    stored, scored, tokens = connection.execute(_PROGRESS.where(results.c.run == number)).one()
    return StoredProgress(stored, stored - scored, int(tokens or 0))


def highest_ordinal(connection: sa.Connection, number: int) -> int:
    """Return the highest ordinal with a stored result; -1 if there is none."""
    found = connection.execute(sa.select(sa.func.max(results.c.ordinal)).where(results.c.run == number)).scalar()
    return -1 if found is None else int(found)


def block_states(connection: sa.Connection, number: int, size: int, first: int) -> tuple[dict[int, BlockState], int]:
    """Return the state of each block of `size` ordinals from block `first` on, and the highest stored ordinal."""
    highest = highest_ordinal(connection, number)
    states: dict[int, BlockState] = {}
    # A query for each block: to group by blocks, SQLite would sort all results.
    for place in range(first, highest // size + 1):
        query = _STATE.where(_between(number, place * size, (place + 1) * size))
        stored, scored, attempts = connection.execute(query).one()
        if stored:
            states[place] = BlockState(stored, scored, int(attempts))
    return states, highest


def _between(number: int, first: int, end: int) -> sa.ColumnElement[bool]:
    return sa.and_(results.c.run == number, results.c.ordinal >= first, results.c.ordinal < end)


def result_numbers(connection: sa.Connection, number: int, first: int, end: int) -> NumberTexts | None:
    """Return the numbers of the results with these ordinals; None if there are none."""
    query = sa.select(sa.func.count().filter(_DETAILED), *_TEXTS).where(_between(number, first, end))
    detailed, *texts = connection.execute(query).one()
    return None if texts[0] is None else NumberTexts(detailed, dict(zip(_SMALL, texts, strict=True)))


def result_details(connection: sa.Connection, number: int, first: int, end: int) -> Sequence[tuple[Any, ...]]:
    """Return the details of the results with these ordinals."""
    columns = (results.c[name] for name in DETAILS)
    return fetch(connection, sa.select(*columns).where(_between(number, first, end)).order_by(results.c.ordinal))


def verdicts(connection: sa.Connection, run_ids: Sequence[str]) -> dict[str, RunVerdicts]:
    """Return the verdicts and costs of some runs."""
    found = connection.execute(sa.select(runs.c.id, runs.c.run_id, runs.c.dataset).where(runs.c.run_id.in_(run_ids)))
    known = {number: (restored_text(run_id), dataset) for number, run_id, dataset in found}
    query = sa.select(*(results.c[name] for name in VerdictRow._fields)).where(results.c.run.in_(known))
    rows: dict[int, list[tuple[Any, ...]]] = {number: [] for number in known}
    for row in fetch(connection, query.order_by(results.c.run, results.c.ordinal)):
        rows[row[0]].append(row)
    return {run_id: RunVerdicts(dataset, rows[number]) for number, (run_id, dataset) in known.items()}


def facts_of_datasets(connection: sa.Connection, datasets: Sequence[int]) -> dict[int, list[tuple[Any, ...]]]:
    """Return the known samples of some datasets."""
    columns = (samples.c.dataset, samples.c.ordinal, samples.c.id, samples.c.metadata, samples.c.input_hash)
    query = sa.select(*columns).where(samples.c.dataset.in_(datasets))
    rows: dict[int, list[tuple[Any, ...]]] = {dataset: [] for dataset in datasets}
    for dataset, *facts in fetch(connection, query.order_by(samples.c.dataset, samples.c.ordinal)):
        rows[dataset].append(tuple(facts))
    return rows


def sample_state(connection: sa.Connection, dataset: Any) -> SampleState:
    """Return how much of a dataset is stored."""
    query = sa.select(sa.func.count(), sa.func.count(samples.c.input)).where(samples.c.dataset == dataset)
    known, with_input = connection.execute(query).one()
    return SampleState(known, with_input)


def highest_sample(connection: sa.Connection, dataset: Any) -> int:
    """Return the highest ordinal of a known sample; -1 if there is none."""
    found = connection.execute(sa.select(sa.func.max(samples.c.ordinal)).where(samples.c.dataset == dataset)).scalar()
    return -1 if found is None else int(found)


def _samples(dataset: Any, first: int, end: int) -> sa.ColumnElement[bool]:
    return sa.and_(samples.c.dataset == dataset, samples.c.ordinal >= first, samples.c.ordinal < end)


def sample_texts(connection: sa.Connection, dataset: Any, first: int, end: int) -> SampleTexts | None:
    """Return facts of the known samples with these ordinals; None if there are none."""
    found = connection.execute(_SAMPLE_TEXTS.where(_samples(dataset, first, end))).one()
    return SampleTexts(*found) if found[0] else None


def sample_rows(connection: sa.Connection, dataset: Any, first: int, end: int) -> Sequence[tuple[Any, ...]]:
    """Return the facts of the known samples with these ordinals."""
    query = sa.select(
        samples.c.ordinal, samples.c.id, samples.c.metadata, samples.c.input_hash, samples.c.input.is_not(None)
    )
    return fetch(connection, query.where(_samples(dataset, first, end)).order_by(samples.c.ordinal))


def fetch(connection: sa.Connection, query: sa.Select[Any]) -> Sequence[tuple[Any, ...]]:
    """Return the rows of a query as the driver returns them, which takes half the time of SQLAlchemy's rows."""
    cursor: Any = connection.execute(query).cursor
    found: Sequence[tuple[Any, ...]] = cursor.fetchall()
    return found
