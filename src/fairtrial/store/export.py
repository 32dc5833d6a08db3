"""Exports results to CSV, JSONL or Parquet, one row per trial, streamed in bounded memory."""

from __future__ import annotations

import csv
import errno
import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import batched, chain, islice
from pathlib import Path
from typing import IO, Any, Literal, get_args

from fairtrial.base.codec import dumps
from fairtrial.base.system import replace_file
from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError, MissingExtraError, StoreError
from fairtrial.store.export_columns import ColumnNames, cell_text, column_values, metadata_keys
from fairtrial.store.notes import SAMPLING_WEIGHT
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.result import EvalResult

type ExportFormat = Literal["csv", "jsonl", "parquet"]

_FORMATS: tuple[str, ...] = get_args(ExportFormat.__value__)
_LEFT = ("run", "suite", "experiment", "sample_id", "repeat", "outcome", "passed", "value", "reward", "reason")
_MIDDLE = (
    "latency_ms",
    "tokens",
    "cost",
    "judge_cost",
    "cache_hits",
    "unpriced_calls",
    "error",
    "stage",
    "output",
    "expected",
    "input",
)
_ROW_GROUP = 5_000
_FILE_GROUPS = 10  # The row groups of a Parquet file beside segments, which is sent as a whole.
_READ = 200  # Trials that are read at once by their ordinals.
# Characters that start a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
log = logging.getLogger("fairtrial.store")


def export_results(
    store: RunStore,
    run_id: str,
    target: Path | str | IO[Any],
    format: ExportFormat | None = None,
    *,
    ordinals: Iterable[int] | None = None,
) -> int:
    """Export the results of a run, one row per trial; returns the number of rows.

    Columns: run, suite, experiment, sample_id, repeat, outcome, passed, value, reward, reason, weight (if trials of
    live traffic were sampled: the number of traces that a row stands for), `metrics.<name>`...,
    `passed.<name>` and `reason.<name>` of each criterion, latency_ms, tokens, cost, judge_cost, cache_hits,
    unpriced_calls, error, stage, output, expected, input, and the sample's `metadata.<key>`...

    Args:
        store: The store of the run.
        run_id: The run.
        target: A path, or an open file: text for csv and jsonl, binary for parquet.
        format: Derived from the suffix of the path by default. In csv and parquet, values that are not text are
            written as JSON; in csv, text that a spreadsheet would run as a formula gets a leading apostrophe.
        ordinals: The trials to export, ascending; all by default.
    """
    chosen = format or (Path(target).suffix.lstrip(".").lower() if isinstance(target, str | Path) else None)
    if chosen not in _FORMATS:
        raise ConfigurationError(f"format must be csv, jsonl or parquet (got {chosen!r})")
    run = store.get_run(run_id)
    columns = ExportColumns(store, run)
    with opened(target, binary=chosen == "parquet") as file:
        if chosen == "parquet":
            return _write_parquet(file, columns, _column_groups(store, columns, ordinals))
        write = _write_csv if chosen == "csv" else _write_jsonl
        return write(file, columns, columns.rows(store, ordinals=ordinals))


def export_beside_segments(store: RunStore, run: RunRecord) -> None:
    """Write the results of a run as Parquet beside its transcripts, if they are in a bucket or a folder.

    Problems are logged: the run itself is complete.
    """
    from fairtrial.store.reads import SqlReads

    segments = store.segments(run) if isinstance(store, SqlReads) else None
    if segments is None or segments.shared:
        return
    try:
        segments.write_columns(_parquet_files(store, run))
    except MissingExtraError:
        log.info("run %s has no Parquet files beside its transcripts: they need fairtrial[data]", run.run_id)
    except (StoreError, OSError, ValueError) as error:
        log.warning("the Parquet files of run %s are not written beside its transcripts: %s", run.run_id, error)


def _parquet_files(store: RunStore, run: RunRecord) -> Iterator[bytes]:
    columns = ExportColumns(store, run)
    groups = _column_groups(store, columns, None)
    for first in groups:
        file = io.BytesIO()
        _write_parquet(file, columns, chain([first], islice(groups, _FILE_GROUPS - 1)))
        yield file.getvalue()


def _column_groups(
    store: RunStore, columns: ExportColumns, ordinals: Iterable[int] | None
) -> Iterator[Mapping[str, Sequence[Any]]]:
    """Yield the cells of `_ROW_GROUP` trials at a time by the names of their columns."""
    from fairtrial.store.reads import SqlReads

    if isinstance(store, SqlReads) and ordinals is None:  # In a quarter of the CPU time of the other way.
        names = ColumnNames(columns.metrics, columns.criteria, columns.metadata)
        for page in store.export_pages(columns.run.run_id, _ROW_GROUP):
            yield column_values(columns.run, names, bool(columns.weight), page)
        return
    numbers = columns.kinds
    for group in batched(columns.rows(store, ordinals=ordinals), _ROW_GROUP):
        yield {
            name: [row[name] if name in numbers else cell_text(row[name]) for row in group] for name in columns.names
        }


@contextmanager
def opened(target: Path | str | IO[Any], *, binary: bool) -> Iterator[IO[Any]]:
    """Open `target` for writing; a path is created only when it is completely written."""
    if not isinstance(target, str | Path):
        yield target
        return
    path = Path(target)
    aside = path.with_name(f".{path.name}.{os.getpid()}")  # Renamed when complete.
    with naming(path):
        try:
            with open(aside, "wb") if binary else open(aside, "w", encoding="utf-8", newline="") as file:
                yield file
            replace_file(aside, path)
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let the errors of writing a temporary file name the file that was asked for."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a folder; name a file in it", str(path))
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise


def _metadata_keys(store: RunStore, run: RunRecord) -> list[str]:
    from fairtrial.store.reads import SqlReads

    if isinstance(store, SqlReads):
        return metadata_keys(store.metadata_texts(run.run_id))
    # A dict for its order: keys appear as the samples first have them.
    return list(dict.fromkeys(key for _, sample in store.samples(run.run_id) for key in sample.metadata))


class ExportColumns:
    """The columns of a run, determined before its first row is written."""

    def __init__(self, store: RunStore, run: RunRecord) -> None:
        self.run = run
        self.weight = ("weight",) if run.noted.sampling is not None else ()
        found = store.metric_totals(run.run_id).values()
        self.metrics = list(dict.fromkeys(name for totals in found for name in totals))
        self.criteria = list(dict.fromkeys(name for totals in found for name, one in totals.items() if one.judged))
        self.metadata = _metadata_keys(store, run)

    @property
    def names(self) -> list[str]:
        """Return the names of all columns, in order."""
        return [
            *_LEFT,
            *self.weight,
            *(f"metrics.{name}" for name in self.metrics),
            *(f"{column}.{name}" for name in self.criteria for column in ("passed", "reason")),
            *_MIDDLE,
            *(f"metadata.{key}" for key in self.metadata),
        ]

    def rows(
        self, store: RunStore, *, ordinals: Iterable[int] | None = None, **filters: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield each result with its sample. Both are in plan order, so one pass over each suffices.

        `ordinals`, ascending, select some trials; `filters` are those of `RunStore.results`.
        """
        samples = store.samples(self.run.run_id)
        place, sample = -1, None
        for result in self._results(store, ordinals, filters):
            wanted = self.run.split(result.ordinal)[0]
            while place < wanted:
                place, sample = next(samples, (self.run.dataset_size, None))
            yield self._row(result, sample if place == wanted else None)

    def _results(
        self, store: RunStore, ordinals: Iterable[int] | None, filters: Mapping[str, Any]
    ) -> Iterator[EvalResult]:
        if ordinals is None:
            yield from store.results(self.run.run_id, **filters)
            return
        for some in batched(ordinals, _READ):
            yield from store.results(self.run.run_id, ordinals=some, **filters)

    def _row(self, result: EvalResult, sample: Sample[Any, Any] | None) -> dict[str, Any]:
        score = result.score
        values: Sequence[Any] = (
            self.run.run_id, self.run.suite, result.experiment, result.sample_id, result.repeat, result.outcome,
            *((None,) * 4 if score is None else (score.passed, score.value, score.reward, score.reason)),
        )  # fmt: skip
        row = dict(zip(_LEFT, values, strict=True))
        facts: Mapping[str, Any] = {} if sample is None else sample.metadata
        row.update((name, float(facts.get(SAMPLING_WEIGHT, 1.0))) for name in self.weight)
        found = {} if score is None else {metric.name: metric for metric in score.metrics}
        row.update((f"metrics.{name}", found[name].value if name in found else None) for name in self.metrics)
        for name in self.criteria:
            metric = found.get(name)
            row[f"passed.{name}"] = None if metric is None else metric.passed
            row[f"reason.{name}"] = None if metric is None else metric.reason
        values = (
            result.known_latency_ms, result.usage.total_tokens, result.usage.cost_usd, result.judge_cost_usd,
            result.cache_hits, result.unpriced_calls + result.unpriced_judge_calls, result.error, result.stage,
            result.output, None if sample is None else sample.expected, None if sample is None else sample.input,
        )  # fmt: skip
        row.update(zip(_MIDDLE, values, strict=True))
        row.update((f"metadata.{key}", facts.get(key)) for key in self.metadata)
        return row

    @property
    def kinds(self) -> dict[str, type]:
        """Return the type of every column with a single type; other columns have mixed values."""
        kinds: dict[str, type] = {
            **dict.fromkeys(("repeat", "latency_ms", "tokens", "cache_hits", "unpriced_calls"), int),
            **dict.fromkeys(("value", "reward", "cost", "judge_cost", *self.weight), float),
            "passed": bool,
        }
        kinds.update((f"metrics.{name}", float) for name in self.metrics)
        kinds.update((f"passed.{name}", bool) for name in self.criteria)
        return kinds


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return "" if value is None else value
    text = cell_text(value) or ""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _write_csv(file: IO[str], columns: ExportColumns, rows: Iterator[dict[str, Any]]) -> int:
    writer = csv.writer(file)
    writer.writerow([_cell(name) for name in columns.names])
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007 - the last number is the count
        writer.writerow([_cell(value) for value in row.values()])
    return count


def _write_jsonl(file: IO[str], columns: ExportColumns, rows: Iterator[dict[str, Any]]) -> int:
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007 - the last number is the count
        file.write(dumps(row) + "\n")
    return count


def _write_parquet(file: IO[bytes], columns: ExportColumns, groups: Iterable[Mapping[str, Sequence[Any]]]) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtraError("exporting to Parquet", "data") from None
    arrow: dict[type, pa.DataType] = {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    kinds = {name: arrow[kind] for name, kind in columns.kinds.items()}
    schema = pa.schema([(cell_text(name) or "", kinds.get(name, pa.string())) for name in columns.names])
    count = 0
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for group in groups:
            arrays = [pa.array(group[name], type=schema.field(at).type) for at, name in enumerate(columns.names)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            count += len(arrays[0])
    return count
