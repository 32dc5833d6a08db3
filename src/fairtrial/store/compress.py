"""Transcripts as they rest: compressed where that is smaller."""

from __future__ import annotations

import threading

import zstandard

from fairtrial.errors import CodecError, StoreError

_MAGIC = b"\x28\xb5\x2f\xfd"
# Below this, entropy coding costs more time than the bytes are worth.
_WORTH_IT = 200
# Level 1: transcripts this small compress no better at 3, and no faster at negative levels than they grow.
_LEVEL = 1
# A frame says how large its content is: a small file from elsewhere can ask for all of our memory.
MAX_BYTES = 256 << 20


class _Local(threading.local):
    """A compressor is reused for speed and must not be shared between threads."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_local = _Local()


def compress(data: bytes) -> bytes:
    """`data`, as a zstd frame where that is smaller. A frame tells itself by its first four bytes.

    Raises:
        CodecError: it is larger than `decompress` takes.
    """
    if len(data) > MAX_BYTES:
        raise CodecError(f"a transcript must be at most {MAX_BYTES >> 20} MiB (got {len(data) >> 20} MiB)")
    if len(data) < _WORTH_IT and data[:4] != _MAGIC:
        return data
    packed = _local.compress(data)
    return packed if len(packed) < len(data) or data[:4] == _MAGIC else data


def decompress(data: bytes) -> bytes:
    """What `compress` was given. Raises `StoreError` for anything it did not make."""
    if data[:4] != _MAGIC:
        return data
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_BYTES:
            raise StoreError(
                f"a stored transcript must be at most {MAX_BYTES >> 20} MiB (its header says {size:,} bytes)"
            )
        return _local.decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise StoreError(f"a stored transcript is damaged: {error}") from None
