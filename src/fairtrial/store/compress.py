"""Compression of stored transcripts."""

from __future__ import annotations

import threading

import zstandard

from fairtrial.errors import CodecError, StoreError

_MAGIC = b"\x28\xb5\x2f\xfd"
# Smaller data is not worth the time of compression.
_WORTH_IT = 200
# Level 1: small transcripts compress no better at level 3, and negative levels are hardly faster.
_LEVEL = 1
# A frame declares the size of its content: a small malicious file could request all memory.
MAX_BYTES = 256 << 20


class _Local(threading.local):
    """Compressors are reused for speed, and must not be shared between threads."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_local = _Local()


def compress(data: bytes) -> bytes:
    """Return `data`, as a zstd frame if that is smaller. A frame is recognized by its first four bytes.

    Raises:
        CodecError: the data exceeds the limit of `decompress`.
    """
    if len(data) > MAX_BYTES:
        raise CodecError(f"a transcript must be at most {MAX_BYTES >> 20} MiB (got {len(data) >> 20} MiB)")
    if len(data) < _WORTH_IT and data[:4] != _MAGIC:
        return data
    packed = _local.compress(data)
    return packed if len(packed) < len(data) or data[:4] == _MAGIC else data


def decompress(data: bytes) -> bytes:
    """Return the original data. Raises `StoreError` for anything that `compress` did not produce."""
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
