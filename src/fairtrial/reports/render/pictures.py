"""Attachments of a trial, and those of them that pages show as pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fairtrial.base.codec import to_json
from fairtrial.data.pictures import PICTURES, Picture, read_picture
from fairtrial.errors import FairtrialError
from fairtrial.reports.render.safe_text import envelopes, sample_of
from fairtrial.store.protocol import RunStore
from fairtrial.trials.result import EvalResult

MAX_BYTES = 16 << 20
MAX_PIXELS = 50_000_000
"""A browser needs four bytes for each pixel, whatever the size of the file."""
_SHA256 = re.compile("[0-9a-f]{64}")
_PAGE_BYTES = 200 << 20
_PAGE_PICTURES = 500


class AttachmentShown(NamedTuple):
    """An attachment that an event or a sample refers to."""

    sha256: str
    media_type: str
    size: int
    name: str


class PictureState(NamedTuple):
    """A picture, or why there is none; neither for other attachments."""

    picture: Picture | None = None
    problem: str = ""


def attachments_in(data: Any) -> Iterable[AttachmentShown]:
    """Yield the attachments that a JSON value refers to."""
    if isinstance(data, Mapping):
        sha256 = data.get("sha256")
        if isinstance(sha256, str) and _SHA256.fullmatch(sha256) and "media_type" in data:
            size = data.get("size")
            yield AttachmentShown(
                sha256, str(data["media_type"]), size if isinstance(size, int) else 0, str(data.get("name") or "")
            )
        else:
            for value in data.values():
                yield from attachments_in(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from attachments_in(value)


def attachments_of(result: EvalResult) -> list[AttachmentShown]:
    """Return what the sample, the output and the session of a trial refer to, each once."""
    sample = sample_of(result)
    trees = [to_json(sample.input), to_json(sample.expected), to_json(result.output)]
    return list(dict.fromkeys(attachments_in(trees + [to_json(event.data) for event in envelopes(result)])))


def load_picture(store: RunStore, file: AttachmentShown) -> tuple[PictureState, bytes]:
    """Read an attachment that says to be a picture. Only its bytes decide whether it is one, and of which type."""
    if file.media_type not in PICTURES:
        return PictureState(), b""
    if file.size > MAX_BYTES:
        return PictureState(problem="too large to show here"), b""
    try:
        content = store.get_blob(file.sha256)
    except FairtrialError:
        return PictureState(problem="not in the store"), b""
    return picture_state(content), content


def picture_state(content: bytes) -> PictureState:
    """Return what a page can show of these bytes."""
    found = read_picture(content)
    if found is None:
        return PictureState(problem="not a picture: its bytes are of another type, or damaged")
    if len(content) > MAX_BYTES or found.width * found.height > MAX_PIXELS:
        return PictureState(problem=f"too large to show here: {found.width:,} x {found.height:,} pixels")
    return PictureState(found, "" if found.complete else "cut off: the end of the picture is missing")


def pictures_of_page(
    store: RunStore, files: Iterable[AttachmentShown]
) -> Iterator[tuple[AttachmentShown, PictureState, bytes]]:
    """Yield (attachment, state, bytes) of each picture that a page has room for."""
    room, seen = _PAGE_BYTES, set[AttachmentShown]()
    for file in files:
        if file in seen or file.media_type not in PICTURES:
            continue
        seen.add(file)
        if len(seen) > _PAGE_PICTURES or room <= 0:
            yield file, PictureState(problem="not shown: the page has too many pictures"), b""
            continue
        state, content = load_picture(store, file)
        room -= len(content)
        yield file, state, content
