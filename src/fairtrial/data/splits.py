"""Splits that stay: train, validation and test parts of a dataset that grows."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.base.codec import digest
from fairtrial.base.formatting import count, rate
from fairtrial.base.frozen import EMPTY
from fairtrial.base.system import replace_file
from fairtrial.data.index import parse_line, placed, read_lines
from fairtrial.data.similar import TextIndex, comparable_text
from fairtrial.errors import CodecError, ConfigurationError, DataError, DatasetError

if TYPE_CHECKING:
    from fairtrial.data.dataset import Dataset

TEST = "test"
"""The name of the split that choices are never made on."""
NAMES = ("train", "validation", TEST)
FAILURES = "failures"
"""The split of samples that were chosen because a run failed them: they have no pass rate of their own."""
SIMILAR = 0.8
"""Inputs that share this much of their text are nearly the same."""
SHARES: Mapping[str, float] = {"train": 0.5, "validation": 0.2, TEST: 0.3}
"""The shares of `Dataset.split` by default."""

_FORMAT = "fairtrial.splits/1"
_DIGITS = 16  # Of the digests in a file.
_UNEVEN = 0.1  # How far the share of a split may be from the planned one without a note.


@dataclass(frozen=True, slots=True)
class SplitOrigin:
    """Which split a dataset is, or is a part of.

    Attributes:
        name: train, validation or test.
        fingerprint: The fingerprint of the whole split.
        size: Number of samples in the whole split.
        test: The fingerprint of the test split beside it.
        test_size: Number of samples in the test split.
    """

    name: str
    fingerprint: str
    size: int
    test: str
    test_size: int


@dataclass(frozen=True, slots=True)
class Splits[I, E]:
    """The parts of a dataset.

    Attributes:
        train: The samples to search on.
        validation: The samples to choose candidates by.
        test: The samples that show what the chosen candidate gained.
        left_out: Why samples are in no split, by id: each is linked to two of them.
        notes: What a reader should know, such as a split that is much larger than planned.
    """

    train: Dataset[I, E]
    validation: Dataset[I, E]
    test: Dataset[I, E]
    _: KW_ONLY
    left_out: Mapping[str, str] = EMPTY
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {len(getattr(self, name)):,}" for name in NAMES)
        left_out = f", {len(self.left_out):,} left out" if self.left_out else ""
        return f"<Splits: {sizes}{left_out}>"


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """How to split: the shares by name, and what stays together. A file keeps these with its assignments."""

    shares: Mapping[str, float]
    seed: int = 0
    by: str | None = None
    similar: float | None = SIMILAR

    def __post_init__(self) -> None:
        for name, share in self.shares.items():
            if not 0 <= share <= 1:
                raise ConfigurationError(f"{name} must be a share from 0 to 1 (got {share!r})")
        if not math.isclose(total := sum(self.shares.values()), 1, abs_tol=1e-9):
            raise ConfigurationError(f"the shares of train, validation and test must add up to 1 (got {total:g})")
        if self.similar is not None and not 0.5 <= self.similar <= 1:
            raise ConfigurationError(f"similar must be a share from 0.5 to 1, or None (got {self.similar!r})")

    @property
    def header(self) -> dict[str, Any]:
        """The first line of a file."""
        shares = {name: float(share) for name, share in self.shares.items()}
        return {"format": _FORMAT, "seed": self.seed, "shares": shares, "by": self.by, "similar": self.similar}

    def draw(self, anchor: str) -> str:
        """Return the split that belongs to the hash of an anchor."""
        place = int.from_bytes(hashlib.sha256(f"{self.seed}:{anchor}".encode()).digest()[:8]) / 2**64
        reached = 0.0
        for name, share in self.shares.items():
            reached += share
            if place < reached:
                return name
        return [name for name, share in self.shares.items() if share > 0][-1]  # The sum was rounded.


@dataclass(frozen=True, slots=True)
class _Kept:
    """An assignment in a file: the split, and digests of the input and the cluster that the sample had."""

    split: str
    input: str
    cluster: str | None


class _Placed:
    """A sample on the way to its split.

    Attributes:
        kept: The split in which it was seen before; None for a new sample.
        split: Its split, once it is known.
        links: For each split, the sample of it that this one belongs to.
    """

    __slots__ = ("cluster", "id", "input", "kept", "links", "split")

    def __init__(self, id: str, input: str, cluster: str | None, kept: str | None, split: str | None = None) -> None:
        self.id, self.input, self.cluster = id, input, cluster
        self.kept, self.split = kept, split
        self.links: dict[str, str] = {}

    @property
    def anchor(self) -> str:
        """What decides over the split of a sample alone: its cluster, or its id."""
        return f"id:{self.id}" if self.cluster is None else f"cluster:{self.cluster}"


def read_request(file: Path) -> SplitRequest:
    """Return how a file of splits was made, so that its dataset can be split the same way again."""
    kept: Any = None
    for _number, _offset, line in read_lines(file):
        with suppress(CodecError):
            kept = parse_line(line)
        break
    try:
        return SplitRequest(kept["shares"], kept["seed"], kept["by"], kept["similar"])
    except (AttributeError, KeyError, TypeError, ConfigurationError):
        raise DatasetError("not a file of splits: its first line does not say how it was made", path=file) from None


def split_dataset(
    dataset: Dataset[Any, Any],
    request: SplitRequest,
    file: Path | None,
    check: Callable[[Splits[Any, Any]], None] | None = None,
) -> Splits[Any, Any]:
    """Assign every sample to a split; a file keeps the assignments, so that samples added later move none.

    What `check` raises leaves the file as it was.
    """
    kept = {} if file is None or not file.exists() else _read(file, request)
    texts = TextIndex(request.similar)
    present = {sample.id for sample in dataset}
    removed = {one.input: one.split for name, one in kept.items() if name not in present}
    samples: list[_Placed] = []
    for sample in dataset:
        texts.add(comparable_text(sample.input))
        content, cluster = digest(sample.input)[:_DIGITS], _cluster(sample, request.by)
        known = kept.get(sample.id)
        if known is None:  # The same input as that of a sample that was removed has been seen in its split.
            samples.append(_Placed(sample.id, content, cluster, removed.get(content)))
        else:
            same = (known.input, known.cluster) == (content, cluster)
            samples.append(_Placed(sample.id, content, cluster, known.split, known.split if same else None))
    groups = texts.groups(_cluster_links(samples))
    left_out: dict[str, str] = {}
    for group in groups:
        left_out |= _place(group, samples, texts, request)
    chosen = {name: [place for place, one in enumerate(samples) if one.split == name] for name in NAMES}
    taken = {name: dataset.take(places) for name, places in chosen.items()}
    test = taken[TEST]
    parts = {
        name: part.as_split(SplitOrigin(name, part.fingerprint, len(part), test.fingerprint, len(test)))
        for name, part in taken.items()
    }
    largest = max(map(len, groups), default=0)
    notes = tuple(_notes({name: len(part) for name, part in parts.items()}, request, largest, left_out))
    made: Splits[Any, Any] = Splits(**parts, left_out=left_out, notes=notes)
    if check is not None:
        check(made)
    if file is not None:
        _write(file, request, kept, samples)
    return made


def _cluster(sample: Any, by: str | None) -> str | None:
    value = None if by is None else sample.metadata.get(by)
    return None if value is None else digest(value)[:_DIGITS]


def _cluster_links(samples: list[_Placed]) -> Iterator[tuple[int, int]]:
    """Yield each sample with the first one of its cluster."""
    clusters: dict[str, int] = {}
    for place, sample in enumerate(samples):
        if sample.cluster is not None:
            yield clusters.setdefault(sample.cluster, place), place


def _place(group: list[int], samples: list[_Placed], texts: TextIndex, request: SplitRequest) -> dict[str, str]:
    """Assign the new samples of a group; returns why samples are left out."""
    waiting = [place for place in group if samples[place].split is None]
    # An edited sample was seen in its split before: it can stay there or be left out, but never move.
    known = {samples[place].kept for place in group} - {None}
    if len(known) <= 1:
        anchor = min((samples[place].anchor for place in group), key=lambda one: hashlib.sha256(one.encode()).digest())
        for place in waiting:
            samples[place].split = next(iter(known), None) or request.draw(anchor)
        return {}
    for place in group:
        if samples[place].split is not None:
            _link(place, waiting, samples, texts)
    left_out = {}
    while waiting:
        place = next((one for one in waiting if samples[one].links), waiting[0])
        waiting.remove(place)
        sample = samples[place]
        if sample.kept is not None:
            sample.links.setdefault(sample.kept, sample.id)
        if len(sample.links) > 1:
            links = (f"{other} of {name}" for name, other in sorted(sample.links.items()) if other != sample.id)
            was = f"was in {sample.kept}, " if sample.kept is not None else ""
            left_out[sample.id] = f"{was}belongs to {' and '.join(links)}"
            continue
        sample.split = next(iter(sample.links), None) or request.draw(sample.anchor)
        _link(place, waiting, samples, texts)
    return left_out


def _link(place: int, waiting: list[int], samples: list[_Placed], texts: TextIndex) -> None:
    """Link the waiting samples that belong to an assigned one to its split."""
    one = samples[place]
    for other, similar in zip(waiting, texts.are_similar(place, waiting), strict=True):
        if similar or (one.cluster is not None and samples[other].cluster == one.cluster):
            samples[other].links.setdefault(str(one.split), one.id)


def _notes(sizes: Mapping[str, int], request: SplitRequest, largest: int, left_out: Mapping[str, str]) -> Iterator[str]:
    total = sum(sizes.values())
    if left_out:
        first = "; ".join(f"{name} {why}" for name, why in list(left_out.items())[:3])
        more = f"; and {len(left_out) - 3:,} more" if len(left_out) > 3 else ""
        yield f"{count(len(left_out), 'sample')} left out, linked to two splits: {first}{more}."
    for name, planned in request.shares.items() if largest > _UNEVEN * total else ():
        if abs(sizes[name] / total - planned) > _UNEVEN:
            group = f"The largest group that stays together has {largest:,}."
            why = group if largest > 1 else "With so few samples, shares differ by chance."
            yield f"{name} has {sizes[name]:,} of {count(total, 'sample')}, planned were {rate(planned)}. {why}"


def _read(file: Path, request: SplitRequest) -> dict[str, _Kept]:
    lines = read_lines(file)
    kept: dict[str, _Kept] = {}
    header: dict[str, Any] | None = None
    for number, _offset, line in lines:
        try:
            row = parse_line(line)
            if header is None:
                header = row
                _check_header(header, request)
                continue
            sample_id, one = row["id"], _Kept(row["split"], row["input"], row.get("cluster"))
        except (CodecError, KeyError) as error:
            raise DatasetError(f"not a file of splits: {error}", path=file, line=number) from None
        except DataError as error:
            raise placed(error, file, number) from None
        texts = (sample_id, one.input, one.cluster or "")
        if not all(isinstance(text, str) for text in texts) or one.split not in NAMES or sample_id in kept:
            raise DatasetError("a line must name a new sample and its split", path=file, line=number)
        kept[sample_id] = one
    if header is None:
        raise DatasetError("not a file of splits: it is empty", path=file)
    return kept


def _check_header(header: Mapping[str, Any], request: SplitRequest) -> None:
    wanted = request.header
    if header.get("format") != _FORMAT:
        raise DatasetError(f"format must be {_FORMAT} (got {header.get('format')!r})")
    for name in wanted:
        if header.get(name) != wanted[name]:
            raise DatasetError(
                f"the splits were made with {name}={header.get(name)!r} (got {wanted[name]!r})\n"
                "split with the same values, or name another file for new splits: what was looked at is then unknown"
            )


def _write(file: Path, request: SplitRequest, kept: Mapping[str, _Kept], samples: Iterable[_Placed]) -> None:
    """Write the assignments if they have changed. Samples that were removed keep theirs."""
    now = dict(kept)
    for one in samples:
        if one.split is not None:
            now[one.id] = _Kept(one.split, one.input, one.cluster)
    if now == kept and file.exists():
        return
    # Written aside and renamed: a crash leaves the old file or the new one.
    aside = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with open(aside, "x", encoding="utf-8") as page:  # Readable by others, as any file that is shared.
            page.write(json.dumps(request.header, allow_nan=False) + "\n")
            for name, entry in now.items():
                row = {"id": name, "split": entry.split, "input": entry.input}
                page.write(json.dumps(row if entry.cluster is None else row | {"cluster": entry.cluster}) + "\n")
            page.flush()
            os.fsync(page.fileno())
        if file.exists():
            shutil.copymode(file, aside)
        replace_file(aside, file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
