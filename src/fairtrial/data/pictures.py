"""Recognise pictures by their bytes, whatever a media type or a file name says."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

_NO_SIZE = frozenset((*range(0xD0, 0xD9), 0x01))  # JPEG markers without a segment.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # Those that begin a frame and have its size.
_MOST_SEGMENTS = 5_000


class Picture(NamedTuple):
    """What the bytes of a picture are. It is not `complete` if its end is missing."""

    media_type: str
    width: int
    height: int
    complete: bool


def read_picture(content: bytes) -> Picture | None:
    """Return the kind and size of a picture of one of the `PICTURES`; None for any other bytes."""
    for media_type, read in _READERS.items():
        try:
            found = read(content)
        except (struct.error, IndexError):  # The head is cut off.
            return None
        if found is not None:
            return Picture(media_type, *found) if found[0] and found[1] else None
    return None


def _png(content: bytes) -> tuple[int, int, bool] | None:
    if not content.startswith(b"\x89PNG\r\n\x1a\n") or content[12:16] != b"IHDR":
        return None
    return *struct.unpack_from(">II", content, 16), b"IEND\xae\x42\x60\x82" in content[-64:]


def _jpeg(content: bytes) -> tuple[int, int, bool] | None:
    if not content.startswith(b"\xff\xd8\xff"):
        return None
    at = 2
    for _ in range(_MOST_SEGMENTS):
        if content[at] != 0xFF:
            break
        marker = content[at + 1]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", content, at + 5)
            return width, height, b"\xff\xd9" in content[-64:]
        at += 1 if marker == 0xFF else 2 if marker in _NO_SIZE else 2 + struct.unpack_from(">H", content, at + 2)[0]
    return None


def _gif(content: bytes) -> tuple[int, int, bool] | None:
    if not content.startswith((b"GIF87a", b"GIF89a")):
        return None
    return *struct.unpack_from("<HH", content, 6), b"\x3b" in content[-64:]


def _webp(content: bytes) -> tuple[int, int, bool] | None:
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP":
        return None
    complete = len(content) >= 8 + struct.unpack_from("<I", content, 4)[0]
    match content[12:16]:
        case b"VP8 " if content[23:26] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", content, 26)
            return width & 0x3FFF, height & 0x3FFF, complete
        case b"VP8L" if content[20:21] == b"\x2f":
            bits = struct.unpack_from("<I", content, 21)[0]
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, complete
        case b"VP8X":
            width, height = (int.from_bytes(content[at : at + 3], "little") + 1 for at in (24, 27))
            return (width, height, complete) if len(content) >= 30 else None
    return None


_READERS: dict[str, Callable[[bytes], tuple[int, int, bool] | None]] = {
    "image/png": _png,
    "image/jpeg": _jpeg,
    "image/gif": _gif,
    "image/webp": _webp,
}
PICTURES = tuple(_READERS)
"""The media types that pages show. SVG is none of them: it can contain scripts."""
