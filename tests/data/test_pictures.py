"""Pictures are known by their bytes alone."""

from __future__ import annotations

import random
import struct

import pytest

from fairtrial.data.pictures import PICTURES, Picture, read_picture

_HEAD = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
PNG = _HEAD + struct.pack(">II", 300, 20) + b"\x08\x06\0\0\0crc.\0\0\0\0IEND\xae\x42\x60\x82"
_SEGMENTS = b"\xff\xe0\x00\x10JFIF" + bytes(10) + b"\xff\xff\xd8\xff\xdb\x00\x03q"
JPEG = b"\xff\xd8" + _SEGMENTS + b"\xff\xc2\x00\x0b\x08" + struct.pack(">HH", 20, 300) + bytes(5) + b"\xff\xd9"
GIF = b"GIF89a" + struct.pack("<HH", 300, 20) + b"\x80\0\0;"


def webp(kind: bytes, data: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


WEBP = webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 300, 20 | 0x4000) + b"data")
LOSSLESS = webp(b"VP8L", b"\x2f" + struct.pack("<I", 299 | 19 << 14) + b"data")
EXTENDED = webp(b"VP8X", b"\x10\0\0\0" + (299).to_bytes(3, "little") + (19).to_bytes(3, "little") + b"data")
KINDS = {
    "png": (PNG, "image/png"), "jpeg": (JPEG, "image/jpeg"), "gif": (GIF, "image/gif"), "webp": (WEBP, "image/webp"),
    "webp without loss": (LOSSLESS, "image/webp"), "extended webp": (EXTENDED, "image/webp"),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_picture_has_its_type_and_size(name: str) -> None:
    content, media_type = KINDS[name]
    assert read_picture(content) == Picture(media_type, 300, 20, complete=True)
    assert media_type in PICTURES


@pytest.mark.parametrize("name", KINDS)
def test_every_beginning_of_a_picture_is_either_incomplete_or_none(name: str) -> None:
    content, _ = KINDS[name]
    found = [read_picture(content[:size]) for size in range(len(content))]
    assert not any(picture is not None and picture.complete for picture in found)
    assert any(picture is not None for picture in found)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"<html>", b"%PDF-1.7", webp(b"WAVE", b"data"),
        b"RIFF\x04\0\0\0WAVE", b"GIF8", b"GIF89a\0\0\0\0;", PNG.replace(b"IHDR", b"IDAT"), b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff" + b"\xff" * 1_000_000,
    ],
)  # fmt: skip
def test_other_bytes_are_no_picture(content: bytes) -> None:
    assert read_picture(content) is None


def test_damaged_pictures_raise_nothing() -> None:
    chance = random.Random(7)
    for content, _ in KINDS.values():
        for _ in range(300):
            damaged = bytearray(content)
            for _ in range(chance.randint(1, 4)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            found = read_picture(bytes(damaged))
            assert found is None or (found.media_type in PICTURES and found.width > 0 < found.height)
