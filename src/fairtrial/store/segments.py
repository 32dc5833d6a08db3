"""Transcripts in segments: one object with those of a batch, to whose parts the rows of the trials refer.

A segment is written before the rows that refer to it are committed. A process that dies between the two leaves an
object that no row names, and that is deleted when it is old. The hour is a part of a segment, and so of the hash that
is its name: what is written now is never an object that is old enough to be deleted. The name is a hash of the hour and
of the hashes of the parts, so that each byte is hashed once.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from fairtrial.base.backoff import SYSTEM_CLOCK, Clock
from fairtrial.base.codec import dumps
from fairtrial.errors import StoreError
from fairtrial.store.compress import REFERENCE
from fairtrial.store.objects import UNFINISHED, ObjectMissingError, Objects, StoredObject

PRUNED_SECONDS = 86_400.0
"""How old objects must be that are deleted because no row names them."""
COMMIT_SECONDS = PRUNED_SECONDS / 2
"""How long after a segment was written rows that refer to it may be committed."""
_FORM = struct.Struct(">4s32sQQ8s")
_HOUR = struct.Struct(">Q")
_CHECK = 8  # Bytes of the hash of a part in a reference to it.
_FEWEST_BYTES = 200
"""Smaller transcripts stay in their rows: a reference has 60 bytes."""
_GAP = 64 << 10
"""Parts that are closer than this are read with one request."""
_LARGEST_READ = 32 << 20
_PLAIN_NAME = re.compile("[A-Za-z0-9_-]{1,80}")
_SEGMENT = re.compile("([0-9a-f]{64})[.]segment")


class SegmentPart(NamedTuple):
    """A reference to a part of a segment: the segment's hash, the place of the part, and the start of its hash."""

    segment: bytes
    offset: int
    length: int
    check: bytes

    @property
    def end(self) -> int:
        """The end of the part."""
        return self.offset + self.length

    def pack(self) -> bytes:
        """Return the reference as it is stored in place of the transcript."""
        return _FORM.pack(REFERENCE, *self)


def reference(column: bytes) -> SegmentPart | None:
    """Return the reference in a transcript's column; None if the transcript itself is there."""
    if column[:4] != REFERENCE:
        return None
    if len(column) != _FORM.size:
        raise StoreError("the store is damaged: a reference to a transcript is cut off")
    return SegmentPart(*_FORM.unpack(column)[1:])


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one run.

    Args:
        objects: Where they are.
        address: That place, for messages.
        run_id: The run.
        shared: Whether they are those of another store too, of which this one is a backup: none is deleted here.
        clock: The time.
    """

    objects: Objects
    address: str
    run_id: str
    shared: bool = False
    clock: Clock = SYSTEM_CLOCK

    @property
    def folder(self) -> str:
        """The folder of the run's segments: its id, or a hash of an id that is no name of a file."""
        if _PLAIN_NAME.fullmatch(self.run_id):
            return self.run_id
        return f"run.{hashlib.sha256(self.run_id.encode('utf-8', 'surrogatepass')).hexdigest()}"

    def _name(self, segment: bytes) -> str:
        return f"{self.folder}/{segment.hex()}.segment"

    def begin(self, suite: str) -> None:
        """Say in the folder of a new run whose it is; so a place that cannot be written to shows before any trial.

        Raises:
            StoreError: there are transcripts already, which that store would delete with its run.
        """
        text = {"format": "fairtrial.transcripts/1", "run": self.run_id, "suite": suite}
        self.objects.put(f"{self.folder}/run.json", dumps(text).encode("utf-8", "surrogatepass"))
        if next(self.stored(), None) is not None:
            raise StoreError(
                f"{self.address}/{self.folder} has transcripts already, of a run with this id in another store\n"
                "choose another place for those of this store: --transcripts, or the setting `transcripts`"
            )

    def write(self, columns: Sequence[bytes | None]) -> list[bytes | None]:
        """Write the transcripts of a batch as one segment; returns what their columns refer to them with."""
        large = [at for at, column in enumerate(columns) if column is not None and len(column) > _FEWEST_BYTES]
        if not large:
            return list(columns)
        frames = [columns[at] or b"" for at in large]
        hour = _HOUR.pack(int(self.clock.time()) // 3_600)
        hashes = [hashlib.sha256(frame).digest() for frame in frames]
        segment = hashlib.sha256(b"".join((hour, *hashes))).digest()
        self.objects.put(self._name(segment), b"".join((hour, *frames)))
        written, offset = list(columns), _HOUR.size
        for at, frame, digest in zip(large, frames, hashes, strict=True):
            written[at] = SegmentPart(segment, offset, len(frame), digest[:_CHECK]).pack()
            offset += len(frame)
        return written

    def read(self, columns: Sequence[bytes | None]) -> list[bytes | None]:
        """Return the columns with the transcripts that they refer to; parts of one segment are read together.

        Raises:
            StoreError: a segment is missing, cut off or has other bytes than those that were written.
        """
        found = list(columns)
        parts = [(part, at) for at, one in enumerate(columns) if one is not None and (part := reference(one))]
        parts.sort()
        for segment, some in groupby(parts, key=lambda one: one[0].segment):
            for near in _near(list(some)):
                start, end = near[0][0].offset, max(part.end for part, _ in near)
                data = self._read(segment, start, end)
                for part, at in near:
                    frame = data[part.offset - start : part.end - start]
                    if len(frame) != part.length or not _is_intact(frame, part.check):
                        raise StoreError(
                            f"a transcript of run {self.run_id} is damaged: {self._where(segment)} has other bytes, or "
                            "fewer, than were written\nrestore this object from a backup"
                        )
                    found[at] = frame
        return found

    def _read(self, segment: bytes, start: int, end: int) -> bytes:
        try:
            return self.objects.read(self._name(segment), start, end - start)
        except ObjectMissingError:
            raise StoreError(
                f"a transcript of run {self.run_id} is missing: there is no {self._where(segment)}\n"
                "restore this object from a backup; fairtrial store check lists all that are missing"
            ) from None

    def _where(self, segment: bytes) -> str:
        return f"{self.address}/{self._name(segment)}"

    def stored(self) -> Iterator[tuple[bytes, StoredObject]]:
        """Yield the segments that exist: the hash in the name, and the object."""
        for found in self.objects.list(self.folder):
            if segment := _segment(found):
                yield segment, found

    def written_before(self, time: float) -> list[tuple[bytes | None, StoredObject]]:
        """Return the segments that were written before a time, and unfinished files, which are none."""
        old = [found for found in self.objects.list(self.folder) if found.written_at < time]
        names = [(_segment(found), found) for found in old]
        return [(segment, found) for segment, found in names if segment or found.name.endswith(UNFINISHED)]

    def write_columns(self, files: Iterable[bytes]) -> None:
        """Write the Parquet files of the run's results beside its segments, in place of earlier ones."""
        start = f"{self.folder}/columns-"
        self.objects.delete([found.name for found in self.objects.list(self.folder) if found.name.startswith(start)])
        for at, data in enumerate(files):
            self.objects.put(f"{start}{at:05}.parquet", data)

    def delete(self) -> None:
        """Delete everything of the run, unless it is shared."""
        if not self.shared:
            self.objects.delete([found.name for found in self.objects.list(self.folder)])


def _segment(found: StoredObject) -> bytes | None:
    match = _SEGMENT.fullmatch(found.name.rpartition("/")[2])
    return match and bytes.fromhex(match[1])


def _is_intact(frame: bytes, check: bytes) -> bool:
    """Return whether a part has the bytes that were written; the first segments have another hash of each part."""
    if hashlib.sha256(frame).digest()[:_CHECK] == check:
        return True
    return hashlib.blake2b(frame, digest_size=_CHECK).digest() == check


def _near(parts: Sequence[tuple[SegmentPart, int]]) -> Iterator[list[tuple[SegmentPart, int]]]:
    """Split parts of one segment, in their order, into those that one request reads."""
    chunk: list[tuple[SegmentPart, int]] = []
    for part, at in parts:
        if chunk and (part.offset > chunk[-1][0].end + _GAP or part.end - chunk[0][0].offset > _LARGEST_READ):
            yield chunk
            chunk = []
        chunk.append((part, at))
    if chunk:
        yield chunk
