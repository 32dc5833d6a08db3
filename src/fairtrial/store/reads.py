"""The reading operations of SQL stores. Long reads are paged, so that no transaction stays open for long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import batched
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from fairtrial.base.backoff import Clock
from fairtrial.base.codec.escape import escape_text
from fairtrial.base.frozen import EMPTY, JSON
from fairtrial.data.fingerprint import sample_hashes
from fairtrial.data.sample import Sample
from fairtrial.data.session.session import restore_session
from fairtrial.data.session.views import RecordedView, SessionView
from fairtrial.errors import StoreError, StoreUnavailableError, UnknownRunError
from fairtrial.store import numbers, protocol, records
from fairtrial.store import rows as row_codec
from fairtrial.store import totals as aggregates
from fairtrial.store.compress import decompress
from fairtrial.store.engine import translated
from fairtrial.store.looks import read_looks
from fairtrial.store.numbers import BlockState, NumberTexts, RunVerdicts, SampleState, SampleTexts, StoredProgress
from fairtrial.store.objects import Objects, open_objects
from fairtrial.store.schema import blobs, details, labels, results, runs, samples
from fairtrial.store.segments import Segments, reference
from fairtrial.store.totals import MetricSums, dataset_of
from fairtrial.trials.result import EvalResult, Outcome

_PAGE = 256  # Results with their outputs, which may be large.
_READ_TOGETHER = 64  # Trials whose transcripts are held in memory at once.
_SLIM_PAGE = 5_000  # Rows of a few numbers.
_BLOCK = 1 << 16  # Ordinals looked at together when the done ones are collected; a multiple of 8.
_WIDTH = len(row_codec.READ_RESULT)
_TOO_LONG = "[]"  # Instead of metadata that is too long for a preview.

_EXPORTED: Mapping[str, sa.ColumnElement[Any]] = {
    "ordinal": results.c.ordinal,
    "experiment": results.c.experiment,
    "sample_id": samples.c.id,
    "repeat": results.c.repeat,
    "outcome": results.c.outcome,
    "passed": results.c.passed,
    "value": results.c.value,
    "reward": sa.func.coalesce(results.c.reward, results.c.value),
    "reason": details.c.reason,
    "metrics": results.c.metrics,
    "verdicts": results.c.verdicts,
    "score": details.c.score,
    "latency_ms": results.c.latency_ms,
    "untimed": sa.case((results.c.timed == 0, details.c.metadata)),
    "tokens": sa.cast(results.c.input_tokens, sa.BigInteger) + results.c.output_tokens,
    "cost": results.c.cost_usd,
    "judge_cost": results.c.judge_cost_usd,
    "cache_hits": results.c.cache_hits,
    "unpriced_calls": sa.cast(results.c.unpriced_calls, sa.BigInteger) + results.c.unpriced_judge_calls,
    "error": details.c.error,
    "stage": results.c.stage,
    "output": details.c.output,
    "expected": sa.case((samples.c.input.is_not(None), samples.c.expected)),
    "input": samples.c.input,
    "metadata": sa.case((samples.c.input.is_not(None), samples.c.metadata)),
}
"""What an export reads of each result."""


class SqlReads(protocol.RunStore):
    """The reading operations of an SQL store."""

    def __init__(self, engine: sa.Engine, address: str, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._address = address
        self._closed = False
        self._ended: tuple[protocol.RunRecord, int, list[protocol.Totals]] | None = None  # The last one asked for.
        self._objects: dict[str, Objects] = {}  # By their address.

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address}>"

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        if self._closed:
            raise StoreError(f"the store {self._address} is closed")
        with translated(), self._engine.begin() as connection:
            yield connection

    def _find(self, connection: sa.Connection, run_id: str) -> tuple[int, protocol.RunRecord]:
        found = connection.execute(sa.select(runs).where(runs.c.run_id == escape_text(run_id))).mappings().first()
        if found is None:
            raise UnknownRunError(f"the store {self._address} has no run {run_id!r}")
        return found["id"], records.read_run(dict(found))

    def _run(self, run_id: str) -> tuple[int, protocol.RunRecord]:
        with self._read() as connection:
            return self._find(connection, run_id)

    def get_run(self, run_id: str) -> protocol.RunRecord:
        """Return a run. Raises `UnknownRunError`."""
        return self._run(run_id)[1]

    def runs(
        self, *, suite: str | None = None, status: protocol.RunStatus | None = None, limit: int | None = None
    ) -> list[protocol.RunRecord]:
        """Return the runs, newest first."""
        query = sa.select(runs).order_by(runs.c.id.desc()).limit(limit)
        if suite is not None:
            query = query.where(runs.c.suite == escape_text(suite))
        if status is not None:
            query = query.where(runs.c.status == status)
        with self._read() as connection:
            return [records.read_run(dict(found)) for found in connection.execute(query).mappings()]

    def live_runs(self, suite: str, days: Sequence[str]) -> list[protocol.RunRecord]:
        """Return the runs of live traces of these days, newest first; rescored ones are left out, however many."""
        query = sa.select(runs).where(
            runs.c.suite == escape_text(suite), runs.c.dataset_version.in_(days), runs.c.parent_run.is_(None)
        )
        with self._read() as connection:
            rows = connection.execute(query.order_by(runs.c.id.desc())).mappings()
            found = [records.read_run(dict(row)) for row in rows]
        return [run for run in found if run.noted.sampling is not None and run.noted.sampling.day in days]

    def looks(self, split: str) -> list[str]:
        """Return the pairs that were compared on the test split with this fingerprint; the first look comes first."""
        with self._read() as connection:
            return read_looks(connection, split)

    def codes(self, run_id: str) -> Sequence[int]:
        """Return the indexes of the code versions that the stored results come from, ascending."""
        number, _run = self._run(run_id)
        ours = sa.and_(results.c.run == number, results.c.outcome != row_codec.NOT_RUN)
        with self._read() as connection:
            return sorted(connection.execute(sa.select(results.c.code).where(ours).distinct()).scalars())

    def done(self, run_id: str) -> bytearray:
        """Return the bitmap of ordinals with a stored result other than not_run: bit i of byte i//8."""
        number, run = self._run(run_id)
        bits = bytearray((run.planned + 7) // 8)
        with self._read() as connection:
            for start in range(0, run.planned, _BLOCK):
                end = min(start + _BLOCK, run.planned)
                ours = sa.and_(
                    results.c.run == number,
                    results.c.ordinal >= start,
                    results.c.ordinal < end,
                    results.c.outcome != row_codec.NOT_RUN,
                )
                count = connection.execute(sa.select(sa.func.count()).select_from(results).where(ours)).scalar_one()
                # Nearly all blocks are complete, which a count shows.
                if count == end - start and end % 8 == 0:
                    bits[start // 8 : end // 8] = b"\xff" * ((end - start) // 8)
                elif count:
                    for (ordinal,) in connection.execute(sa.select(results.c.ordinal).where(ours)):
                        bits[ordinal >> 3] |= 1 << (ordinal & 7)
        return bits

    def ordinals(self, run_id: str, outcomes: Sequence[Outcome]) -> Iterator[int]:
        """Yield the ordinals stored with one of these outcomes, ascending."""
        number, _run = self._run(run_id)
        query = sa.select(results.c.ordinal).where(
            results.c.run == number, results.c.outcome.in_([row_codec.OUTCOMES[outcome] for outcome in outcomes])
        )
        return (ordinal for (ordinal,) in self._pages(query, results.c.ordinal, _SLIM_PAGE))

    def _pages(
        self,
        query: sa.Select[Any],
        ordinal: sa.ColumnElement[int],
        size: int,
        *,
        after: int = -1,
        limit: int | None = None,
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query by ordinal, its first column; each page is a separate query."""
        while limit is None or limit > 0:
            wanted = size if limit is None else min(size, limit)
            with self._read() as connection:
                page = connection.execute(query.where(ordinal > after).order_by(ordinal).limit(wanted)).all()
            yield from page
            if len(page) < wanted:
                return
            after = page[-1][0]
            limit = None if limit is None else limit - len(page)

    def results(
        self,
        run_id: str,
        *,
        experiment: str | None = None,
        outcomes: Sequence[Outcome] | None = None,
        passed: bool | None = None,
        sample_ids: Iterable[str] | None = None,
        ordinals: Sequence[int] | None = None,
        after: int = -1,
        limit: int | None = None,
        outputs: bool = True,
        snapshots: bool = False,
    ) -> Iterator[EvalResult]:
        """Yield results in plan order; `after` is an ordinal, for paging. `ordinals` selects a few trials."""
        number, run = self._run(run_id)
        query = _result_query(number, outputs=outputs, snapshots=snapshots)
        chosen = None if experiment is None else records.experiment_index(run, experiment)
        if chosen is not None:
            query = query.where(results.c.experiment == chosen)
        if outcomes is not None:
            query = query.where(results.c.outcome.in_([row_codec.OUTCOMES[outcome] for outcome in outcomes]))
        if passed is not None:
            query = query.where(results.c.passed == int(passed))
        if ordinals is not None:
            query = query.where(results.c.ordinal.in_(ordinals))
        if sample_ids is None:
            rows = self._pages(query, results.c.ordinal, _PAGE, after=after, limit=limit)
        else:
            rows = self._rows_of_samples(query, run, self._places(number, sample_ids), chosen, after, limit)
        source = records.StoreSource(self, run)
        if snapshots:
            rows = self._with_transcripts(number, run, rows)
        return (
            row_codec.read_result(
                run,
                source,
                row[:_WIDTH],
                row[_WIDTH],
                row[_WIDTH + 1 : _WIDTH + 5],
                row[_WIDTH + 5] if outputs else None,
                decompress(row[-1]) if snapshots and row[-1] is not None else None,
            )
            for row in rows
        )

    def segments(self, run: protocol.RunRecord) -> Segments | None:
        """Return where a run's transcripts are, if they are not in the database."""
        address = run.noted.transcripts
        if address is None:
            return None
        objects = self._objects.get(address)
        if objects is None:
            objects = self._objects[address] = open_objects(address)
        return Segments(objects, address, run.run_id, run.noted.transcripts_shared, self._clock)

    def _with_transcripts(
        self, number: int, run: protocol.RunRecord, rows: Iterable[tuple[Any, ...]]
    ) -> Iterator[tuple[Any, ...]]:
        """Read what the last column of rows refers to, a few requests for many rows."""
        for some in batched(rows, _READ_TOGETHER):
            transcripts = self._transcripts(number, run, [(row[0], row[-1]) for row in some])
            for row, transcript in zip(some, transcripts, strict=True):
                yield (*row[:-1], transcript)

    def _transcripts(
        self, number: int, run: protocol.RunRecord, found: Sequence[tuple[int, bytes | None]]
    ) -> Sequence[bytes | None]:
        """Return what the column of some ordinals has or refers to; it is read again if it was moved meanwhile."""
        columns = [column for _ordinal, column in found]
        segments, problem = self.segments(run), None
        if segments is None:
            if not any(one is not None and reference(one) for one in columns):
                return columns
        else:
            try:
                return segments.read(columns)
            except StoreUnavailableError:
                raise
            except StoreError as error:
                problem = error
        query = sa.select(results.c.ordinal, details.c.transcript).select_from(_with_details())
        query = query.where(results.c.run == number, results.c.ordinal.in_([ordinal for ordinal, _column in found]))
        with self._read() as connection:
            now = self._find(connection, run.run_id)[1]
            stored = {row[0]: row[1] for row in connection.execute(query)}
        again = [(ordinal, stored.get(ordinal)) for ordinal, _column in found]
        if again != list(found) or now.noted.transcripts != run.noted.transcripts:
            return self._transcripts(number, now, again)
        if problem is not None:
            raise problem
        return columns  # Those that refer to nothing are refused when they are decompressed.

    def _places(self, number: int, sample_ids: Iterable[str]) -> list[int]:
        places: list[int] = []
        for some in batched(sample_ids, 500):
            wanted = [row_codec.stored_id(sample_id) for sample_id in some]
            query = sa.select(samples.c.ordinal).where(
                samples.c.dataset == dataset_of(number), samples.c.id.in_(wanted)
            )
            with self._read() as connection:
                places.extend(connection.execute(query).scalars())
        return sorted(set(places))

    def _rows_of_samples(
        self,
        query: sa.Select[Any],
        run: protocol.RunRecord,
        places: list[int],
        experiment: int | None,
        after: int,
        limit: int | None,
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a few samples by their ordinals."""
        columns = range(len(run.experiments)) if experiment is None else (experiment,)
        ordinals = (
            ordinal
            for place in places
            for column in columns
            for repeat in range(run.repeats)
            if (ordinal := run.ordinal(place, column, repeat)) > after
        )
        for some in batched(ordinals, _PAGE):
            found = list(self._pages(query.where(results.c.ordinal.in_(some)), results.c.ordinal, _PAGE, limit=limit))
            yield from found
            if limit is not None:
                limit -= len(found)

    def previews(self, run_id: str, ordinals: Sequence[int], *, size: int = 300) -> list[protocol.TrialPreview]:
        """Return previews of the stored trials with these ordinals, in this order."""
        found: dict[int, protocol.TrialPreview] = {}
        with self._read() as connection:
            number, _run = self._find(connection, run_id)
            for some in batched(ordinals, _PAGE):
                query = _preview_query(number, size).where(results.c.ordinal.in_(some))
                found |= {row[0]: records.read_preview(row, size) for row in connection.execute(query)}
        return [found[ordinal] for ordinal in ordinals if ordinal in found]

    def scores(self, run_id: str, *, experiment: str) -> Iterator[protocol.ScoreRow]:
        """Yield the numbers of an experiment's results in plan order."""
        number, run = self._run(run_id)
        query = sa.select(*(results.c[name] for name in row_codec.READ_SCORES)).where(
            results.c.run == number, results.c.experiment == records.experiment_index(run, experiment)
        )
        pages = batched(self._pages(query, results.c.ordinal, _SLIM_PAGE), _SLIM_PAGE)
        return (row for page in pages for row in row_codec.read_scores(page))

    def totals(self, run_id: str) -> list[protocol.Totals]:
        """Return the sums per experiment, in the order of the run's experiments; one for each, even without results."""
        with self._read() as connection:
            number, run = self._find(connection, run_id)
            known = self._ended
            if known is not None and known[:2] == (run, run.revision):  # A report asks, and its column file again.
                return list(known[2])
            found = aggregates.totals(connection, number, run)
        if run.finished_at is not None:  # From then on, its revision changes with its results.
            self._ended = run, run.revision, found
        return list(found)

    def metric_totals(self, run_id: str) -> Mapping[str, Mapping[str, protocol.MetricTotals]]:
        """Return experiment -> metric -> its totals over scored trials, in the order of first occurrence."""
        number, run = self._run(run_id)
        query = sa.select(results.c.ordinal, results.c.experiment, results.c.metrics, results.c.verdicts).where(
            results.c.run == number, results.c.outcome == row_codec.SCORED, results.c.metrics.is_not(None)
        )
        sums = MetricSums()
        for _ordinal, experiment, metrics, verdicts in self._pages(query, results.c.ordinal, _SLIM_PAGE):
            sums.add(run.experiments[experiment], row_codec.read_metrics(metrics), verdicts)
        return sums.totals()

    def group_totals(self, run_id: str, key: str) -> list[tuple[JSON, protocol.Totals]]:
        """Return totals per experiment and per value of a metadata key of the samples."""
        with self._read() as connection:
            number, run = self._find(connection, run_id)
            return aggregates.group_totals(connection, number, run, key)

    def sample(self, run_id: str, sample_ordinal: int) -> Sample[Any, Any]:
        """Return a stored sample, as plain JSON values."""
        query = sa.select(samples.c.id, samples.c.input, samples.c.expected, samples.c.metadata)
        with self._read() as connection:
            number, _run = self._find(connection, run_id)
            found = connection.execute(
                query.where(samples.c.dataset == dataset_of(number), samples.c.ordinal == sample_ordinal)
            ).first()
        if found is None:
            raise StoreError(f"run {run_id} has no stored sample {sample_ordinal}")
        return row_codec.read_sample(*found)

    def samples(self, run_id: str, *, after: int = -1) -> Iterator[tuple[int, Sample[Any, Any]]]:
        """Yield the stored samples with their ordinals, ascending."""
        number, _run = self._run(run_id)
        query = sa.select(
            samples.c.ordinal, samples.c.id, samples.c.input, samples.c.expected, samples.c.metadata
        ).where(samples.c.dataset == dataset_of(number), samples.c.input.is_not(None))
        return (
            (row[0], row_codec.read_sample(*row[1:]))
            for row in self._pages(query, samples.c.ordinal, _PAGE, after=after)
        )

    def metadata_texts(self, run_id: str) -> Iterator[str]:
        """Yield the metadata of the stored samples as JSON, in their order; samples without metadata are left out."""
        number, _run = self._run(run_id)
        whole = sa.and_(samples.c.input.is_not(None), samples.c.metadata.is_not(None))
        query = sa.select(samples.c.ordinal, samples.c.metadata)
        query = query.where(samples.c.dataset == dataset_of(number), whole)
        return (text for _ordinal, text in self._pages(query, samples.c.ordinal, _PAGE))  # Each may be large.

    def export_pages(self, run_id: str, size: int) -> Iterator[Mapping[str, Sequence[Any]]]:
        """Yield what an export needs of the results in plan order, as columns by name, of `size` results at a time."""
        number, _run = self._run(run_id)
        query = sa.select(*_EXPORTED.values()).select_from(_with_samples(number)).where(results.c.run == number)
        for rows in batched(self._pages(query, results.c.ordinal, size), size):
            yield dict(zip(_EXPORTED, zip(*rows, strict=True), strict=True))

    def sample_facts(self, run_id: str, keys: Sequence[str] = ()) -> Iterator[tuple[int, str, tuple[JSON, ...]]]:
        """Yield (ordinal, id, values of these metadata keys) of the known samples, ascending."""
        number, _run = self._run(run_id)
        query = sa.select(samples.c.ordinal, samples.c.id, samples.c.metadata).where(
            samples.c.dataset == dataset_of(number)
        )
        facts = row_codec.facts_reader(keys)
        return (
            (ordinal, row_codec.restored_text(sample_id), facts(metadata))
            for ordinal, sample_id, metadata in self._pages(query, samples.c.ordinal, _SLIM_PAGE)
        )

    def repeated_inputs(self, run_id: str) -> Sequence[tuple[int, int]]:
        """Yield (ordinal, hash of the input) of the known samples whose input is not unique, ascending."""
        number, _run = self._run(run_id)
        here = sa.and_(samples.c.dataset == dataset_of(number), samples.c.input_hash.is_not(None))
        repeated = (
            sa.select(samples.c.input_hash).where(here).group_by(samples.c.input_hash).having(sa.func.count() > 1)
        )
        query = sa.select(samples.c.ordinal, samples.c.input_hash).where(here, samples.c.input_hash.in_(repeated))
        with self._read() as connection:
            if connection.execute(repeated.limit(1)).first() is None:  # The usual case, at half the cost.
                return []
            return [(row[0], row[1]) for row in connection.execute(query.order_by(samples.c.ordinal))]

    def sample_hashes(self, run_id: str) -> Iterator[tuple[int, int, int]]:
        """Yield (ordinal, hash of the input, hash of the expected value) of the known samples, ascending."""
        number, _run = self._run(run_id)
        content = sa.case((samples.c.input_hash.is_(None), samples.c.input))  # Long inputs are not read.
        query = sa.select(samples.c.ordinal, samples.c.input_hash, content, samples.c.expected)
        query = query.where(samples.c.dataset == dataset_of(number))
        return (
            (ordinal, *sample_hashes(*texts)) for ordinal, *texts in self._pages(query, samples.c.ordinal, _SLIM_PAGE)
        )

    @property
    def identity(self) -> str:
        """The address of the store, without a password."""
        return self._address

    def progress(self, run_id: str) -> StoredProgress:
        """Return how far a run is, in a fraction of the time that `totals` takes."""
        with self._read() as connection:
            return numbers.progress(connection, self._find(connection, run_id)[0])

    def highest_ordinal(self, run_id: str) -> int:
        """Return the highest ordinal with a stored result; -1 if there is none."""
        with self._read() as connection:
            return numbers.highest_ordinal(connection, self._find(connection, run_id)[0])

    def block_states(self, run_id: str, size: int, first: int) -> tuple[dict[int, BlockState], int]:
        """Return (block number -> its state, the highest stored ordinal or -1) of the blocks from `first` on."""
        with self._read() as connection:
            number, _run = self._find(connection, run_id)
            return numbers.block_states(connection, number, size, first)

    def result_numbers(self, run_id: str, first: int, end: int) -> NumberTexts | None:
        """Return the numbers of the stored results with these ordinals; None if there are none."""
        with self._read() as connection:
            return numbers.result_numbers(connection, self._find(connection, run_id)[0], first, end)

    def result_details(self, run_id: str, first: int, end: int) -> Sequence[tuple[Any, ...]]:
        """Return the `DETAILS` of the stored results with these ordinals, ascending."""
        with self._read() as connection:
            return numbers.result_details(connection, self._find(connection, run_id)[0], first, end)

    def verdicts(self, run_ids: Sequence[str]) -> Mapping[str, RunVerdicts]:
        """Return the verdicts and costs of some runs, in the order of their plans: two queries for all of them."""
        with self._read() as connection:
            return numbers.verdicts(connection, [escape_text(run_id) for run_id in run_ids])

    def facts_of_datasets(self, datasets: Sequence[int]) -> Mapping[int, Sequence[tuple[Any, ...]]]:
        """Return the known samples of some datasets as (ordinal, stored id, metadata JSON, hash of the input)."""
        with self._read() as connection:
            return numbers.facts_of_datasets(connection, datasets)

    def first_snapshots(self, run_ids: Sequence[str], trials: int) -> Mapping[str, Sequence[tuple[int, bytes]]]:
        """Return (experiment, snapshot) of the scored ones among the first trials of some runs."""
        query = (
            sa.select(runs.c.run_id, results.c.experiment, details.c.transcript)
            .select_from(_with_details().join(runs, runs.c.id == results.c.run))
            .where(
                runs.c.run_id.in_([escape_text(run_id) for run_id in run_ids]),
                results.c.ordinal < trials,
                results.c.outcome == row_codec.SCORED,
                details.c.transcript.is_not(None),
            )
            .order_by(results.c.run, results.c.ordinal)
        )
        found: dict[str, list[tuple[int, bytes]]] = {}
        with self._read() as connection:
            for run_id, experiment, transcript in connection.execute(query):
                found.setdefault(row_codec.restored_text(run_id), []).append((experiment, decompress(transcript)))
        return found

    def sample_state(self, run_id: str) -> SampleState:
        """Return how many samples of a run are known, and how many of them completely."""
        with self._read() as connection:
            number, _run = self._find(connection, run_id)
            return numbers.sample_state(connection, dataset_of(number))

    def highest_sample(self, run_id: str) -> int:
        """Return the highest ordinal of a known sample; -1 if there is none."""
        with self._read() as connection:
            return numbers.highest_sample(connection, dataset_of(self._find(connection, run_id)[0]))

    def sample_texts(self, run_id: str, first: int, end: int) -> SampleTexts | None:
        """Return facts of the known samples with these ordinals; None if there are none."""
        with self._read() as connection:
            return numbers.sample_texts(connection, dataset_of(self._find(connection, run_id)[0]), first, end)

    def sample_rows(self, run_id: str, first: int, end: int) -> Sequence[tuple[Any, ...]]:
        """Return (ordinal, stored id, metadata JSON, hash of the input, whether the input is known), ascending."""
        with self._read() as connection:
            return numbers.sample_rows(connection, dataset_of(self._find(connection, run_id)[0]), first, end)

    def session(self, run_id: str, ordinal: int) -> SessionView:
        """Return the session of a stored result (empty if none was stored)."""
        data = self.snapshot(run_id, ordinal)
        return RecordedView(UUID(int=0), EMPTY, ()) if data is None else restore_session(data)

    def snapshot(self, run_id: str, ordinal: int) -> bytes | None:
        """Return the session of a stored result as snapshot bytes."""
        with self._read() as connection:
            number, run = self._find(connection, run_id)
            found = connection.execute(
                sa.select(details.c.transcript)
                .select_from(_with_details())
                .where(results.c.run == number, results.c.ordinal == ordinal)
            ).first()
        if found is None:
            raise StoreError(f"run {run_id} has no stored result {ordinal}")
        transcript = self._transcripts(number, run, [(ordinal, found[0])])[0]
        return None if transcript is None else decompress(transcript)

    def get_blob(self, sha256: str) -> bytes:
        """Return bytes by hash. Raises `StoreError` if absent."""
        with self._read() as connection:
            data = connection.execute(sa.select(blobs.c.data).where(blobs.c.sha256 == sha256)).scalar()
        if data is None:
            raise StoreError(f"the store {self._address} has no blob {sha256}")
        return decompress(data)

    def labels(self, run_id: str, *, name: str | None = None) -> Iterator[protocol.Label]:
        """Return the labels of a run, oldest first."""
        number, _run = self._run(run_id)
        query = sa.select(labels.c.id, labels).where(labels.c.run == number)
        if name is not None:
            query = query.where(labels.c.name == escape_text(name))
        names = ("id", *labels.c.keys())
        return (
            records.read_label(run_id, dict(zip(names, row, strict=True)))
            for row in self._pages(query, labels.c.id, _PAGE, after=0)
        )


def _with_details() -> Any:
    return results.outerjoin(
        details,
        sa.and_(
            details.c.run == results.c.run,
            details.c.ordinal == results.c.ordinal,
            details.c.execution == results.c.execution,
        ),
    )


def _with_samples(number: int) -> Any:
    return _with_details().outerjoin(
        samples, sa.and_(samples.c.dataset == dataset_of(number), samples.c.ordinal == results.c.sample)
    )


def _preview_query(number: int, size: int) -> sa.Select[Any]:
    texts = (samples.c.input, samples.c.expected, details.c.output, details.c.error, details.c.reason)
    short_metadata = sa.case(
        (sa.func.length(samples.c.metadata) <= records.MAX_METADATA, samples.c.metadata), else_=_TOO_LONG
    )
    return (
        sa.select(
            *(results.c[name] for name in records.READ_PREVIEW),
            samples.c.id,
            # A character may take six in JSON.
            *(sa.func.substr(text, 1, 6 * size + 2) for text in texts),
            sa.case((samples.c.metadata.is_(None), None), else_=short_metadata),
        )
        .select_from(_with_samples(number))
        .where(results.c.run == number)
    )


def _result_query(number: int, *, outputs: bool, snapshots: bool) -> sa.Select[Any]:
    columns = [
        *(results.c[name] for name in row_codec.READ_RESULT),
        samples.c.id,
        *(details.c[name] for name in row_codec.READ_DETAIL),
    ]
    if outputs:
        columns.append(details.c.output)
    if snapshots:
        columns.append(details.c.transcript)
    return sa.select(*columns).select_from(_with_samples(number)).where(results.c.run == number)
