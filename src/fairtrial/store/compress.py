"""Transcripts as they rest: compressed where that is smaller."""

from __future__ import annotations

import threading

import zstandard

_MAGIC = b"\x28\xb5\x2f\xfd"
# Below this, entropy coding costs more time than the bytes are worth.
_WORTH_IT = 200
# Level 1: transcripts this small compress no better at 3, and no faster at negative levels than they grow.
_LEVEL = 1


class _Local(threading.local):
    """A compressor is reused for speed and must not be shared between threads."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_local = _Local()


def compress(data: bytes) -> bytes:
    """`data`, as a zstd frame where that is smaller. A frame tells itself by its first four bytes."""
    if len(data) < _WORTH_IT and data[:4] != _MAGIC:
        return data
    packed = _local.compress(data)
    return packed if len(packed) < len(data) or data[:4] == _MAGIC else data


def decompress(data: bytes) -> bytes:
    """What `compress` was given."""
    return _local.decompress(data) if data[:4] == _MAGIC else data
