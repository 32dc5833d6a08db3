"""Failed and disputed trials as samples of a dataset, kept apart from those that measure a pass rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from fairtrial.base.codec import digest, dumps, to_json
from fairtrial.base.frozen import JSON
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.similar import TextIndex, comparable_text
from fairtrial.data.splits import FAILURES, SIMILAR, TEST
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.column_reader import read_columns, sample_ordinals
from fairtrial.reports.figures.labels import people_verdicts
from fairtrial.reports.figures.metrics import PASSED, SCORED, ExperimentSource
from fairtrial.store.export import opened

type Reason = Literal["failed", "disputed"]


@dataclass(frozen=True, slots=True)
class CuratedSamples:
    """What a curation did: how many samples of the file are new, and why others are not in it.

    Attributes:
        file: The file.
        samples: Number of samples in it now.
        added: The ids of the new ones.
        known: Number of chosen samples that the file had.
        similar: The ids of those that were dropped, each with that of the sample that nearly has its input.
        fingerprint: The fingerprint of the file.
        parent: That of the file before; None for a new file.
    """

    json_format: ClassVar[str] = "fairtrial.curated/1"

    file: str
    samples: int
    added: tuple[str, ...]
    known: int
    similar: tuple[tuple[str, str], ...]
    fingerprint: str
    parent: str | None

    def to_json(self) -> dict[str, JSON]:
        """Return all facts as JSON values."""
        similar = [{"id": name, "like": other} for name, other in self.similar]
        facts = {name: getattr(self, name) for name in ("file", "samples", "known", "fingerprint", "parent")}
        return {"format": self.json_format, **facts, "added": list(self.added), "similar": similar}


@dataclass(frozen=True, slots=True)
class _Chosen:
    ordinal: int
    reason: Reason
    repeat: int
    votes: dict[str, bool]
    passed: bool


def curate(sources: Sequence[ExperimentSource], file: Path, *, failed: bool, disputed: bool) -> CuratedSamples:
    """Add failed or disputed trials of a run to a file of samples, once each, and none that is nearly one of them.

    A trial is disputed if a person's verdict differs from the evaluator's or from another person's. The metadata of a
    sample gets `split` ("failures"), `origin` (run, experiment, repeat, why), and who confirmed or disputed that the
    trial failed by the expected value.

    Raises:
        ConfigurationError: the run is on a test split, or the file has samples that were not chosen in this way.
    """
    run = sources[0].run
    split = run.noted.split
    if split is not None and split.name == TEST:
        raise ConfigurationError(
            f"run {run.name} is on a test split: samples that are worked on are no test any more\n"
            "curate a run of other samples"
        )
    before = _read(file)
    samples = {sample.id: sample for sample in before}
    parent = Dataset(before).fingerprint if before else None
    texts = TextIndex(SIMILAR)
    names: list[str] = []
    for sample in before:
        texts.add(comparable_text(sample.input))
        names.append(sample.id)
    known, added = 0, []
    for source in sources:
        for chosen in _choose(source, failed=failed, disputed=disputed):
            sample = _with_own_id(source.store.sample(run.run_id, chosen.ordinal), samples)
            if sample.id in samples:
                known += sample.id not in added
                continue
            samples[sample.id] = _marked(sample, source, chosen)
            texts.add(comparable_text(sample.input))
            names.append(sample.id)
            added.append(sample.id)
    similar = []
    for group in texts.groups():
        for place in group[1:]:
            if place >= len(before):
                similar.append((names[place], names[group[0]]))
                del samples[names[place]]
    dropped = {name for name, _ in similar}
    added = [name for name in added if name not in dropped]
    made = Dataset(samples.values())
    if added:
        _write(file, made)
    return CuratedSamples(str(file), len(made), tuple(added), known, tuple(similar), made.fingerprint, parent)


def _choose(source: ExperimentSource, *, failed: bool, disputed: bool) -> Iterator[_Chosen]:
    """Yield the first trial of each sample that failed or is disputed."""
    columns = read_columns(source, metrics=(PASSED,))
    verdicts = people_verdicts(source.store, source.run, source.name)
    scored = columns.outcomes == SCORED
    values = columns.values.get(PASSED, np.full(scored.shape, np.nan))
    for row, (ordinal, sample_id) in enumerate(zip(sample_ordinals(source).tolist(), columns.ids, strict=True)):
        for repeat in np.flatnonzero(scored[row] & np.isfinite(values[row])).tolist():
            passed = bool(values[row, repeat])
            votes = verdicts.get((sample_id, repeat), {})
            contested = any(vote != passed for vote in votes.values())
            if (disputed and contested) or (failed and not passed):
                yield _Chosen(ordinal, "disputed" if contested else "failed", repeat, votes, passed)
                break


def _with_own_id(sample: Sample[Any, Any], samples: Mapping[str, Sample[Any, Any]]) -> Sample[Any, Any]:
    """Return a sample, with its input in the id if the file has another sample with its id."""
    known, content = samples.get(sample.id), digest(to_json(sample.input))
    if known is None or digest(to_json(known.input)) == content:
        return sample
    own = f"{sample.id}-{content[:8]}"
    return Sample(own, sample.input, sample.expected, sample.metadata, has_expected=sample.has_expected)


def _marked(sample: Sample[Any, Any], source: ExperimentSource, chosen: _Chosen) -> Sample[Any, Any]:
    """Return a sample with its origin; one of an earlier curation keeps that."""
    if sample.metadata.get("split") == FAILURES:
        return sample
    run = source.run
    origin: dict[str, JSON] = {
        "run": run.name, "run_id": run.run_id, "experiment": source.name, "repeat": chosen.repeat, "why": chosen.reason,
    }  # fmt: skip
    people: dict[str, JSON] = {}
    for key, agrees in (("confirmed_by", True), ("disputed_by", False)):
        named = [who for who, vote in sorted(chosen.votes.items()) if (vote == chosen.passed) is agrees]
        if named:
            people[key] = list(named)
    metadata = {**sample.metadata, "split": FAILURES, "origin": origin, **people}
    return Sample(sample.id, sample.input, sample.expected, metadata, has_expected=sample.has_expected)


def _read(file: Path) -> list[Sample[Any, Any]]:
    if not file.exists():
        return []
    samples = list(Dataset.load(file))
    other = next((sample for sample in samples if sample.metadata.get("split") != FAILURES), None)
    if other is not None:
        raise ConfigurationError(
            f"{file} has samples that are not failures, such as {other.id!r}: a pass rate over both means nothing\n"
            "name a file of its own"
        )
    return samples


def _write(file: Path, samples: Dataset[Any, Any]) -> None:
    with opened(file, binary=False) as page:
        for sample in samples:
            row = {"id": sample.id, "input": to_json(sample.input)}
            if sample.has_expected:
                row["expected"] = to_json(sample.expected)
            page.write(dumps({**row, "metadata": to_json(sample.metadata)}) + "\n")
