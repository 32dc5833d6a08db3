"""The numbers of results and the facts of samples as plain tuples, for column files.

Rows come straight from the database's cursor: a million of them would cost more as objects than as numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from sqlalchemy import Connection, Select, and_, bindparam, func, select

from fairtrial.store.protocol import RunRecord, Totals
from fairtrial.store.rows import SCORED
from fairtrial.store.schema import results, samples

NUMBERS = (
    "ordinal", "outcome", "passed", "value", "timed", "latency_ms", "input_tokens", "output_tokens", "cost_usd",
    "attempt", "started_at", "reward", "metrics", "verdicts",
)  # fmt: skip
"""The columns of `NumberStore.result_numbers`, in this order."""

_STATE = select(func.count(), func.count().filter(results.c.outcome == SCORED), func.sum(results.c.attempt))
_STORED = tuple(results.c[name] for name in NUMBERS)


class BlockState(NamedTuple):
    """The state of the results in one block of ordinals; two equal states mean equal results.

    A scored result is final, so the number of scored results only grows. All other replacements raise an attempt.
    """

    stored: int
    scored: int
    attempts: int


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

    def highest_ordinal(self, run_id: str) -> int:
        """Return the highest ordinal with a stored result; -1 if there is none."""
        ...

    def block_states(self, run_id: str, size: int, *, first: int = 0) -> tuple[dict[int, BlockState], int]:
        """Return (block number -> its state, the highest stored ordinal or -1) of the blocks from `first` on."""
        ...

    def result_numbers(self, run_id: str, first: int, end: int) -> Sequence[tuple[Any, ...]]:
        """Return the `NUMBERS` of the stored results with these ordinals, ascending."""
        ...

    def sample_state(self, run_id: str) -> SampleState:
        """Return how many samples of a run are known, and how many of them completely."""
        ...

    def sample_numbers(self, run_id: str, *, after: int = -1) -> Iterator[Sequence[tuple[Any, ...]]]:
        """Yield pages of (ordinal, stored id, metadata JSON, hash of the input, whether the input is known)."""
        ...


def highest_ordinal(connection: Connection, number: int) -> int:
    """Return the highest ordinal with a stored result; -1 if there is none."""
    found = connection.execute(select(func.max(results.c.ordinal)).where(results.c.run == number)).scalar()
    return -1 if found is None else int(found)


def block_states(connection: Connection, number: int, size: int, first: int) -> tuple[dict[int, BlockState], int]:
    """Return the state of each block of `size` ordinals from block `first` on, and the highest stored ordinal."""
    here, highest = results.c.run == number, highest_ordinal(connection, number)
    states: dict[int, BlockState] = {}
    # A query for each block: to group by blocks, SQLite would sort all results.
    for place in range(first, highest // size + 1):
        start, end = bindparam("start", place * size), bindparam("end", (place + 1) * size)
        query = _STATE.where(here, results.c.ordinal >= start, results.c.ordinal < end)
        stored, scored, attempts = connection.execute(query).one()
        if stored:
            states[place] = BlockState(stored, scored, int(attempts))
    return states, highest


def result_numbers(connection: Connection, number: int, first: int, end: int) -> Sequence[tuple[Any, ...]]:
    """Return the numbers of the results with these ordinals."""
    here = and_(results.c.run == number, results.c.ordinal >= first, results.c.ordinal < end)
    return fetch(connection, select(*_STORED).where(here).order_by(results.c.ordinal))


def sample_state(connection: Connection, dataset: Any) -> SampleState:
    """Return how much of a dataset is stored."""
    query = select(func.count(), func.count(samples.c.input)).where(samples.c.dataset == dataset)
    known, with_input = connection.execute(query).one()
    return SampleState(known, with_input)


def sample_numbers(connection: Connection, dataset: Any, after: int, limit: int) -> Sequence[tuple[Any, ...]]:
    """Return a page of the facts of samples."""
    query = select(
        samples.c.ordinal, samples.c.id, samples.c.metadata, samples.c.input_hash, samples.c.input.is_not(None)
    ).where(samples.c.dataset == dataset, samples.c.ordinal > after)
    return fetch(connection, query.order_by(samples.c.ordinal).limit(limit))


def fetch(connection: Connection, query: Select[Any]) -> Sequence[tuple[Any, ...]]:
    """Return the rows of a query as the driver returns them, which takes half the time of SQLAlchemy's rows."""
    cursor: Any = connection.execute(query).cursor
    found: Sequence[tuple[Any, ...]] = cursor.fetchall()
    return found
