"""A store in memory, for quick evaluations and tests, and as the reference implementation."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from fairtrial.base.backoff import SYSTEM_CLOCK, Clock
from fairtrial.base.codec import canonical, decode, dumps
from fairtrial.base.codec.escape import escape_text
from fairtrial.base.frozen import EMPTY, JSON
from fairtrial.data.fingerprint import sample_hashes
from fairtrial.data.sample import Sample
from fairtrial.data.session.session import restore_session
from fairtrial.data.session.views import RecordedView, SessionView
from fairtrial.errors import CodecError, SecretInDataError, StoreError, UnknownRunError
from fairtrial.store import protocol
from fairtrial.store import rows as row_codec
from fairtrial.store.attachments import store_attachments
from fairtrial.store.batches import MemoryBatches
from fairtrial.store.looks import new_looks
from fairtrial.store.notes import SAMPLING_WEIGHT
from fairtrial.store.records import (
    READ_PREVIEW,
    StoreSource,
    check_epoch,
    check_latest,
    check_plan,
    experiment_index,
    label_values,
    mapping_json,
    new_revision,
    read_label,
    read_preview,
    read_run,
    run_values,
)
from fairtrial.store.redact import current, refuse_secret
from fairtrial.store.totals import MetricSums, SampleSums, TotalsBuilder, analysed_samples, unequal
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult, Outcome

_COLUMN = {name: place for place, name in enumerate(row_codec.RESULT_COLUMNS)}
_READ = tuple(_COLUMN[name] for name in row_codec.READ_RESULT)
_SCORES = tuple(_COLUMN[name] for name in row_codec.READ_SCORES)
_NO_OWNER = protocol.RunOwner(None, 0, None, None)


@dataclass(slots=True)
class _StoredRun:
    values: dict[str, Any]
    record: protocol.RunRecord
    entries: dict[int, row_codec.Entry] = field(default_factory=dict)
    samples: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    labels: list[dict[str, Any]] = field(default_factory=list)
    owner: protocol.RunOwner = _NO_OWNER

    def ordered(self) -> list[row_codec.Entry]:
        return [self.entries[ordinal] for ordinal in sorted(self.entries)]

    def weight(self, sample: int) -> float:
        """Return how many samples a sample stands for."""
        facts: Any = None if self.samples[sample][4] is None else decode(object, self.samples[sample][4])
        return float(facts.get(SAMPLING_WEIGHT, 1.0)) if isinstance(facts, dict) else 1.0

    def sample_id(self, ordinal: int) -> str:
        return row_codec.restored_text(self.samples[self.record.split(ordinal)[0]][1])


class MemoryStore(protocol.RunStore):
    """A store that lasts as long as the process. It keeps the same rows as a database, redacted in the same way."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._runs: dict[str, _StoredRun] = {}
        self._blobs: dict[str, bytes] = {}
        self._looks: dict[str, list[str]] = {}
        self.batches = MemoryBatches(self._attempts)
        self._closed = False

    def __repr__(self) -> str:
        return f"<MemoryStore: {len(self._runs)} runs>"

    def close(self) -> None:
        """Delete everything; a closed store raises `StoreError` when it is used."""
        with self._lock:
            self._closed = True
            self._runs.clear()
            self._blobs.clear()
            self._looks.clear()

    def _open(self) -> None:
        if self._closed:
            raise StoreError("the store in memory is closed")

    def _run(self, run_id: str) -> _StoredRun:
        self._open()
        try:
            return self._runs[run_id]
        except KeyError:
            raise UnknownRunError(f"the store in memory has no run {run_id!r}") from None

    def create_run(self, run: protocol.RunRecord, *, latest: int | None = None) -> protocol.RunRecord:
        """Keep a new run; gives it its number. A run_id that exists already is an error."""
        check_plan(run)
        with self._lock:
            self._open()
            if run.run_id in self._runs:
                raise StoreError(f"the store in memory already has a run {run.run_id}")
            taken = (known.record.number for known in self._runs.values() if known.record.suite == run.suite)
            last = max(taken, default=0)
            check_latest(run, last, latest)
            number = max(last + 1, run.number)
            kept = replace(run, number=number, created_at=run.created_at or self._clock.time())
            values = run_values(kept, current())
            self._runs[run.run_id] = _StoredRun(values, read_run(values))
        return kept

    def get_run(self, run_id: str) -> protocol.RunRecord:
        """One run. Raises `UnknownRunError`."""
        return self._run(run_id).record

    def runs(
        self, *, suite: str | None = None, status: protocol.RunStatus | None = None, limit: int | None = None
    ) -> list[protocol.RunRecord]:
        """Runs, newest first."""
        with self._lock:
            self._open()
            records = [run.record for run in reversed(self._runs.values())]
        found = [
            record
            for record in records
            if (suite is None or record.suite == suite) and (status is None or record.status == status)
        ]
        return found[:limit]

    def update_run(
        self,
        run_id: str,
        *,
        status: protocol.RunStatus | None = None,
        finished_at: float | None = None,
        notes: Mapping[str, JSON] | None = None,
        identity: Mapping[str, JSON] | None = None,
        epoch: int | None = None,
    ) -> None:
        """Change what may change about a run: its end, and notes (merged into those it has)."""
        with self._lock:
            run = self._run(run_id)
            check_epoch(run_id, run.owner.epoch, epoch)
            if status is not None:
                run.values["status"] = status
                if status == "running":
                    run.values |= {"finished_at": None, "revision": new_revision()}
            if finished_at is not None:
                run.values["finished_at"] = finished_at
            if notes is not None:
                run.values["notes"] = mapping_json(dict(run.record.notes) | dict(notes), current())
            if identity is not None:
                run.values["identity"] = dumps(identity)
            run.record = read_run(run.values)

    def run_owner(self, run_id: str) -> protocol.RunOwner:
        """Return which process executes a run."""
        found = self._run(run_id).owner
        at = found.heartbeat_at
        return found if at is None else found._replace(age_seconds=self._clock.monotonic() - at)

    def acquire_run(self, run_id: str, owner: str, seen: protocol.RunOwner) -> int | None:
        """Make `owner` the owner of a run, if nothing has changed since `seen` was read (compare-and-swap)."""
        with self._lock:
            run = self._run(run_id)
            if (run.owner.epoch, run.owner.heartbeat_at) != (seen.epoch, seen.heartbeat_at):
                return None
            run.owner = protocol.RunOwner(owner, seen.epoch + 1, self._clock.monotonic(), None)
            return run.owner.epoch

    def renew_run(self, run_id: str, epoch: int) -> None:
        """Record a heartbeat. Raises `RunBusyError` if the run has been taken over since `epoch`."""
        with self._lock:
            run = self._run(run_id)
            check_epoch(run_id, run.owner.epoch, epoch)
            run.owner = run.owner._replace(heartbeat_at=self._clock.monotonic())

    def release_run(self, run_id: str, epoch: int) -> None:
        """Give up ownership; does nothing if the run has been taken over since `epoch`."""
        with self._lock:
            run = self._run(run_id)
            if run.owner.epoch == epoch:
                run.owner = protocol.RunOwner(None, epoch, None, None)

    def delete_run(self, run_id: str) -> None:
        """Forget a run with its results, transcripts, labels and samples."""
        with self._lock:
            self._run(run_id)
            del self._runs[run_id]
        self.batches.delete(run_id)

    def _attempts(self, run_id: str) -> dict[int, int]:
        with self._lock:
            entries = self._run(run_id).entries
            return {ordinal: row_codec.state(entry.row)[1] for ordinal, entry in entries.items()}

    def commit(
        self,
        run_id: str,
        results: Sequence[EvalResult],
        samples: Mapping[int, Sample[Any, Any]] = protocol.NO_SAMPLES,
        *,
        epoch: int | None = None,
    ) -> protocol.Committed:
        """Keep results, with the samples they belong to."""
        store_attachments(self, results, samples)
        redactor = current()
        refused: list[tuple[TrialKey, str]] = []
        unstorable: list[tuple[TrialKey, str]] = []
        bare: dict[int, str] = {}  # Samples of which only the id can be stored, with the reason.
        new = duplicate = 0
        revised = False
        with self._lock:
            run = self._run(run_id)
            check_epoch(run_id, run.owner.epoch, epoch)
            ended = run.record.finished_at is not None
            encoder = row_codec.Encoder(run.record, 0, redactor, bytes)
            for place, sample in samples.items():
                known = run.samples.get(place)
                if 0 <= place < run.record.dataset_size and (known is None or known[2] is None):
                    try:
                        row = row_codec.sample_row(place, sample, redactor)
                    except (CodecError, SecretInDataError) as error:
                        bare[place] = f"its sample cannot be stored: {error}"
                        continue
                    if known is None or known[1] == row[1]:
                        run.samples[place] = row
                        revised |= known is not None
            for result in results:
                try:
                    entry = _storable(encoder, result)
                    if entry.sample in bare:
                        entry = encoder.error_entry(result, bare[entry.sample])
                    self._check_sample(run, entry, row_codec.stored_id(entry.key.sample_id))
                    if entry.problem is not None:
                        unstorable.append((entry.key, entry.problem))
                    stored = run.entries.get(entry.ordinal)
                    if stored is not None and not row_codec.replaces(
                        *row_codec.state(entry.row), *row_codec.state(stored.row)
                    ):
                        duplicate += 1
                        continue
                    run.entries[entry.ordinal] = entry
                    revised |= ended or stored is not None
                    new += 1
                except row_codec.RefusedEntryError as problem:
                    refused.append((result.key, str(problem)))
            if revised:
                run.values["revision"] = new_revision()
                run.record = replace(run.record, revision=run.values["revision"])
        return protocol.Committed(new, duplicate, tuple(refused), tuple(unstorable))

    def _check_sample(self, run: _StoredRun, entry: row_codec.Entry, sample_id: str) -> None:
        known = run.samples.setdefault(entry.sample, (entry.sample, sample_id, None, None, None, None))
        if known[1] != sample_id:
            raise row_codec.RefusedEntryError(
                f"the run's sample {entry.sample} was {known[1]!r} before; its dataset has changed"
            )

    def codes(self, run_id: str) -> Sequence[int]:
        """Return the indexes of the code versions that the stored results come from, ascending."""
        with self._lock:
            rows = [entry.row for entry in self._run(run_id).entries.values()]
        return sorted({row[_COLUMN["code"]] for row in rows if row[_COLUMN["outcome"]] != row_codec.NOT_RUN})

    def done(self, run_id: str) -> bytearray:
        """A bitmap of the ordinals that have a stored result other than not_run: bit i of byte i//8."""
        with self._lock:
            run = self._run(run_id)
            bits = bytearray((run.record.planned + 7) // 8)
            for ordinal, entry in run.entries.items():
                if entry.row[_COLUMN["outcome"]] != row_codec.NOT_RUN:
                    bits[ordinal >> 3] |= 1 << (ordinal & 7)
        return bits

    def ordinals(self, run_id: str, outcomes: Sequence[Outcome]) -> Iterator[int]:
        """The ordinals stored with one of these outcomes, ascending."""
        wanted = {row_codec.OUTCOMES[outcome] for outcome in outcomes}
        with self._lock:
            entries = self._run(run_id).ordered()
        return (entry.ordinal for entry in entries if entry.row[_COLUMN["outcome"]] in wanted)

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
        """Results in plan order; `after` is an ordinal, for paging."""
        with self._lock:
            run = self._run(run_id)
            entries = run.ordered()
        column = None if experiment is None else experiment_index(run.record, experiment)
        codes = None if outcomes is None else {row_codec.OUTCOMES[outcome] for outcome in outcomes}
        ids = None if sample_ids is None else {row_codec.stored_id(sample_id) for sample_id in sample_ids}
        places = None if ordinals is None else frozenset(ordinals)
        source = StoreSource(self, run.record)

        def wanted(entry: row_codec.Entry) -> bool:
            row = entry.row
            return (
                entry.ordinal > after
                and (places is None or entry.ordinal in places)
                and (column is None or row[_COLUMN["experiment"]] == column)
                and (codes is None or row[_COLUMN["outcome"]] in codes)
                and (passed is None or row[_COLUMN["passed"]] == int(passed))
                and (ids is None or run.samples[entry.sample][1] in ids)
            )

        return (
            row_codec.read_result(
                run.record,
                source,
                tuple(entry.row[place] for place in _READ),
                run.samples[entry.sample][1],
                (None,) * 4 if entry.detail is None else entry.detail[3:7],
                entry.detail[7] if outputs and entry.detail is not None else None,
                entry.detail[8] if snapshots and entry.detail is not None else None,
            )
            for entry in [entry for entry in entries if wanted(entry)][:limit]
        )

    def previews(self, run_id: str, ordinals: Sequence[int], *, size: int = 300) -> list[protocol.TrialPreview]:
        """Previews of the stored trials with these ordinals, in this order."""
        with self._lock:
            run = self._run(run_id)
            entries = [run.entries[ordinal] for ordinal in ordinals if ordinal in run.entries]
        return [_preview(entry, run.samples[entry.sample], size) for entry in entries]

    def scores(self, run_id: str, *, experiment: str) -> Iterator[protocol.ScoreRow]:
        """The numbers of an experiment's results in plan order."""
        with self._lock:
            run = self._run(run_id)
            entries = run.ordered()
        column = experiment_index(run.record, experiment)
        wanted = [entry.row for entry in entries if entry.row[_COLUMN["experiment"]] == column]
        return row_codec.read_scores([[row[place] for place in _SCORES] for row in wanted])

    def totals(self, run_id: str) -> list[protocol.Totals]:
        """Sums per experiment, in the order of the run's experiments; one row for each, even if nothing is stored."""
        with self._lock:
            run = self._run(run_id)
            entries = run.ordered()
        tallies = [TotalsBuilder() for _ in run.record.experiments]
        for entry in entries:
            tallies[entry.row[_COLUMN["experiment"]]].add_row(entry.row)
        if unequal(run.record, tallies):
            places = ((tallies[entry.row[_COLUMN["experiment"]]], entry) for entry in entries)
            _add_samples(run, places)
        return [tally.totals(name, run.sample_id) for name, tally in zip(run.record.experiments, tallies, strict=True)]

    def metric_totals(self, run_id: str) -> Mapping[str, Mapping[str, protocol.MetricTotals]]:
        """Experiment -> metric -> its figures over scored trials, in the order in which metrics first occur."""
        with self._lock:
            run = self._run(run_id)
            entries = run.ordered()
        sums = MetricSums()
        for entry in entries:
            metrics = entry.row[_COLUMN["metrics"]]
            if metrics is not None and entry.row[_COLUMN["outcome"]] == row_codec.SCORED:
                sums.add(entry.key.experiment, row_codec.read_metrics(metrics), entry.row[_COLUMN["verdicts"]])
        return sums.totals()

    def group_totals(self, run_id: str, key: str) -> list[tuple[JSON, protocol.Totals]]:
        """Totals per experiment and per value of a metadata key of the samples."""
        with self._lock:
            run = self._run(run_id)
            entries = run.ordered()
            metadata = {place: row[4] for place, row in run.samples.items()}
        groups: dict[tuple[int, bytes], tuple[JSON, TotalsBuilder]] = {}
        places: list[tuple[TotalsBuilder, row_codec.Entry]] = []
        for entry in entries:
            facts: Any = None if metadata[entry.sample] is None else decode(object, metadata[entry.sample])
            value = facts.get(key) if isinstance(facts, dict) else None
            group = (entry.row[_COLUMN["experiment"]], canonical(value))
            tally = groups.setdefault(group, (value, TotalsBuilder()))[1]
            tally.add_row(entry.row)
            places.append((tally, entry))
        if unequal(run.record, (tally for _, tally in groups.values())):
            _add_samples(run, places)
        return [
            (value, tally.totals(run.record.experiments[experiment], run.sample_id))
            for (experiment, _text), (value, tally) in sorted(groups.items(), key=lambda item: item[0])
        ]

    def sample(self, run_id: str, sample_ordinal: int) -> Sample[Any, Any]:
        """A stored sample, as plain JSON values."""
        row = self._run(run_id).samples.get(sample_ordinal)
        if row is None:
            raise StoreError(f"run {run_id} has no stored sample {sample_ordinal}")
        return row_codec.read_sample(*row[1:5])

    def samples(self, run_id: str, *, after: int = -1) -> Iterator[tuple[int, Sample[Any, Any]]]:
        """The stored samples with their ordinals, ascending."""
        with self._lock:
            rows = dict(self._run(run_id).samples)
        return (
            (place, row_codec.read_sample(*rows[place][1:5]))
            for place in sorted(rows)
            if place > after and rows[place][2] is not None
        )

    def sample_facts(self, run_id: str, keys: Sequence[str] = ()) -> Iterator[tuple[int, str, tuple[JSON, ...]]]:
        """(ordinal, id, values of these metadata keys) of the known samples, ascending."""
        with self._lock:
            rows = dict(self._run(run_id).samples)
        facts = row_codec.facts_reader(keys)
        return ((place, row_codec.restored_text(rows[place][1]), facts(rows[place][4])) for place in sorted(rows))

    def repeated_inputs(self, run_id: str) -> Sequence[tuple[int, int]]:
        """(ordinal, hash of the input) of the known samples whose input another sample has too, ascending."""
        with self._lock:
            hashes = {place: row[5] for place, row in self._run(run_id).samples.items() if row[5] is not None}
        counts = Counter(hashes.values())
        return [(place, hashes[place]) for place in sorted(hashes) if counts[hashes[place]] > 1]

    def sample_hashes(self, run_id: str) -> Iterator[tuple[int, int, int]]:
        """(ordinal, hash of the input, hash of the expected value) of the known samples, ascending."""
        with self._lock:
            rows = dict(self._run(run_id).samples)
        return ((place, *sample_hashes(rows[place][5], rows[place][2], rows[place][3])) for place in sorted(rows))

    def session(self, run_id: str, ordinal: int) -> SessionView:
        """The session of a stored result (an empty one if none was kept)."""
        data = self.snapshot(run_id, ordinal)
        return RecordedView(UUID(int=0), EMPTY, ()) if data is None else restore_session(data)

    def snapshot(self, run_id: str, ordinal: int) -> bytes | None:
        """The session of a stored result as snapshot bytes."""
        entry = self._run(run_id).entries.get(ordinal)
        if entry is None:
            raise StoreError(f"run {run_id} has no stored result {ordinal}")
        return None if entry.detail is None else entry.detail[8]

    def put_blob(self, data: bytes) -> str:
        """Keep bytes under their SHA-256 (hex), once. Raises `SecretInDataError` if they hold a known secret."""
        self._open()
        refuse_secret(current(), "an attachment", data)
        name = hashlib.sha256(data).hexdigest()
        self._blobs[name] = data
        return name

    def get_blob(self, sha256: str) -> bytes:
        """Bytes by hash. Raises `StoreError` if absent."""
        self._open()
        try:
            return self._blobs[sha256]
        except KeyError:
            raise StoreError(f"the store in memory has no blob {sha256}") from None

    def looks(self, split: str) -> list[str]:
        """Pairs that were compared on the test split with this fingerprint, the first look first."""
        with self._lock:
            self._open()
            return list(self._looks.get(split, ()))

    def record_looks(self, split: str, pairs: Sequence[str]) -> list[str]:
        """Keep that pairs are compared on a test split; all pairs as `looks` has them."""
        with self._lock:
            self._open()
            known = self._looks.setdefault(split, [])
            known += new_looks(known, pairs)
            return list(known)

    def label(self, label: protocol.Label) -> None:
        """Add what a person said about a trial; a label without a time gets the present one."""
        values = label_values(label, self._clock.time(), current())
        with self._lock:
            run = self._run(label.key.run_id)
            experiment_index(run.record, label.key.experiment)
            run.labels.append(values)

    def labels(self, run_id: str, *, name: str | None = None) -> Iterator[protocol.Label]:
        """Labels of a run, oldest first."""
        wanted = None if name is None else escape_text(name)
        with self._lock:
            kept = list(self._run(run_id).labels)
        return (read_label(run_id, values) for values in kept if wanted is None or values["name"] == wanted)


def _add_samples(run: _StoredRun, places: Iterable[tuple[TotalsBuilder, row_codec.Entry]]) -> None:
    """Add what the trials of each sample have together to the tallies in which they are."""
    sums: dict[TotalsBuilder, SampleSums] = {}
    within = analysed_samples(run.record)
    for tally, entry in places:
        row = entry.row
        if row[_COLUMN["outcome"]] != row_codec.NOT_RUN and entry.sample < within:
            value, reward = row[_COLUMN["value"]], row[_COLUMN["reward"]]
            own = value if reward is None else reward
            latency = row[_COLUMN["latency_ms"]] if row[_COLUMN["timed"]] else None
            sums.setdefault(tally, SampleSums()).add(entry.sample, row[_COLUMN["passed"]], value, own, latency)
    for tally, found in sums.items():
        tally.add_samples(*(found.shares() if run.record.noted.sampling is None else found.shares(run.weight)))


def _preview(entry: row_codec.Entry, sample: tuple[Any, ...], size: int) -> protocol.TrialPreview:
    error, reason, _score, _metadata, output = (None,) * 5 if entry.detail is None else entry.detail[3:8]
    numbers = [entry.row[_COLUMN[name]] for name in READ_PREVIEW]
    return read_preview((*numbers, *sample[1:4], output, error, reason, sample[4]), size)


def _storable(encoder: row_codec.Encoder, result: EvalResult) -> row_codec.Entry:
    """The entry of a result; what a database would refuse is refused here too."""
    entry = encoder.entry(result)
    for value in (*entry.row, *(entry.detail or ())):
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                return encoder.error_entry(result, f"it cannot be stored: {error}")
    return entry
