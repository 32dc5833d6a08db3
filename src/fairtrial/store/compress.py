"""Compression of stored transcripts."""

from __future__ import annotations

import threading
from functools import partial

from fairtrial.base.foreign import SETTING, ExpansionBudget, expand, limit_factor, zstd
from fairtrial.errors import CodecError, DataError, StoreError

_MAGIC = b"\x28\xb5\x2f\xfd"
REFERENCE = b"\x00FTS"
"""How a reference to a transcript begins that is stored elsewhere; no data that `compress` returns begins with it."""
_RESERVED = (_MAGIC, REFERENCE)
# Smaller data is not worth the time of compression.
_WORTH_IT = 200
# Level 1: small transcripts compress no better at level 3, and negative levels are hardly faster.
_LEVEL = 1
MAX_BYTES = 256 << 20


class _Local(threading.local):
    """Compressors are reused for speed, and must not be shared between threads."""

    def __init__(self) -> None:
        compressor = zstd().ZstdCompressor(level=_LEVEL)
        self.compress = partial(compressor.compress, mode=compressor.FLUSH_FRAME)


_local = _Local()


def compress(data: bytes) -> bytes:
    """Return `data`, as a zstd frame if that is smaller. A frame is recognized by its first four bytes.

    Raises:
        CodecError: the data exceeds the limit of `decompress`.
    """
    if len(data) > MAX_BYTES and len(data) > MAX_BYTES * limit_factor():
        raise CodecError(f"a transcript must have at most {MAX_BYTES:,} bytes (got {len(data):,}): see {SETTING}")
    reserved = data[:4] in _RESERVED
    if len(data) < _WORTH_IT and not reserved:
        return data
    packed = _local.compress(data)
    return packed if len(packed) < len(data) or reserved else data


def decompress(data: bytes) -> bytes:
    """Return the original data. Raises `StoreError` for anything that `compress` did not produce."""
    if data[:4] == REFERENCE:
        raise StoreError("the transcript is not in this store: it was stored in a bucket or a folder of its own")
    if data[:4] != _MAGIC:
        return data
    try:
        return expand(data, "zstd", ExpansionBudget("a stored transcript", int(MAX_BYTES * limit_factor())))
    except DataError as error:
        raise StoreError(str(error)) from None
