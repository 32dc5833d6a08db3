"""Rules for what others send: where the paths in their files may lead, how far their content may expand, and how long
their requests may take."""

from __future__ import annotations

import importlib
import os
import sys
import time
import tomllib
import zlib
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from fairtrial.errors import ConfigurationError, DataError, LimitExceededError

SETTING = "FAIRTRIAL_FILE_LIMITS"
HEAD_SECONDS = 10.0  # For the head of a request, and BODY_SECONDS for its body, however slowly they drip.
BODY_SECONDS = 30.0
_CHUNK = 1 << 16  # Of compressed data.
_MAX_STREAMS = 100  # Compressed one after another, in one piece of data.
_MAX_SECONDS = 120
_FILE_BYTES = 256 << 20  # Of JSON that is read at once: what it becomes takes up to twenty times as much.
_LINE_BYTES = 1 << 30
_MAX_WINDOW_LOG = 27  # Of Zstandard: memory that a frame may ask for.
_REMEDY = "if you trust it, raise the limit: {}"
_WINDOW_BITS = {"gzip": 31, "zlib": 15, "deflate": -15}

type Method = Literal["stored", "gzip", "zlib", "deflate", "zstd"]


def limit_factor() -> float:
    """Return what all limits of foreign files are multiplied by: FAIRTRIAL_FILE_LIMITS, 1 by default."""
    return _factor(os.environ.get(SETTING) or "1")


@lru_cache(8)
def _factor(value: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not 0.0 < factor < 1e9:
        raise ConfigurationError(f"{SETTING} must be a number above 0 (got {value!r})")
    return factor


def inside(folder: Path, name: str | Path) -> Path:
    """Return the path of a file that foreign data names. It must be in the folder, also after following links.

    Raises:
        DataError: the path leads out of the folder, or cannot be a path.
    """
    path = folder / name
    root = target = folder
    try:
        root, target = folder.resolve(), path.resolve()
        target.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # Where it would be is known; the reader says what is wrong with it.
    except (OSError, ValueError, RuntimeError):  # Too long, with a null character, or a circle of links.
        target = root
    if root == target or not target.is_relative_to(root):
        raise DataError(f"{str(name)[:200]!r} must be a file in {folder} (it leads elsewhere)")
    return path


def load_toml(path: Path) -> dict[str, Any]:
    """Load a TOML file. Raises OSError, or ValueError with what is wrong with its content."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_limit(source: str, what: str, count: int, limit: int) -> None:
    """Raise `LimitExceededError` if a source has more of something than `limit` times `FAIRTRIAL_FILE_LIMITS`."""
    allowed = int(limit * limit_factor())
    if count > allowed:
        raise LimitExceededError(
            f"{source} must have at most {allowed:,} {what} (got {count:,})\n{_REMEDY.format(SETTING)}"
        )


def read_whole(file: BinaryIO, source: str) -> bytes:
    """Return the content of a file that is read at once, unless it is too large for that."""
    allowed = int(_FILE_BYTES * limit_factor())
    content = file.read(allowed + 1)
    if len(content) > allowed:
        raise LimitExceededError(f"{source} must have at most {allowed:,} bytes\n{_REMEDY.format(SETTING)}")
    return content


def lines_of[Text: (str, bytes)](file: IO[Text], source: str) -> Iterator[Text]:
    """Yield the lines of a file. One that is too long is refused before it has been read."""
    allowed = int(_LINE_BYTES * limit_factor())
    if os.fstat(file.fileno()).st_size <= allowed:
        yield from file
        return
    while line := file.readline(allowed + 1):
        if len(line) > allowed:
            raise LimitExceededError(
                f"{source} must have lines of at most {allowed:,} bytes\n{_REMEDY.format(SETTING)}"
            )
        yield line


class ExpansionBudget:
    """How far one source may expand: bytes, compressed streams and seconds.

    Args:
        source: What errors call it.
        max_bytes: The most bytes that may come out.
        setting: What raises the limit.
    """

    def __init__(self, source: str, max_bytes: int, setting: str = SETTING) -> None:
        self.source = source
        self.max_bytes = max_bytes
        self.left = max_bytes
        self._setting = setting
        self._streams = 0
        self._end = time.monotonic() + _MAX_SECONDS

    def check(self, count: int) -> None:
        """Refuse data that says itself that it is too large."""
        if count > self.left:
            self._refuse(f"at most {self.max_bytes:,} bytes when it is expanded")

    def take(self, count: int) -> None:
        """Count bytes that came out."""
        self.check(count)
        self.left -= count
        if time.monotonic() > self._end:
            self._refuse(f"content that is expanded within {_MAX_SECONDS} seconds")

    def add_stream(self) -> None:
        """Count a compressed stream."""
        self._streams += 1
        if self._streams > _MAX_STREAMS:
            self._refuse(f"at most {_MAX_STREAMS} compressed streams, one after another")

    def _refuse(self, limit: str) -> None:
        raise LimitExceededError(f"{self.source} must have {limit}\n{_REMEDY.format(self._setting)}")


def expand(data: bytes, method: Method, budget: ExpansionBudget) -> bytes:
    """Return decompressed data. Never holds more than the budget in memory, whatever the data would become.

    Raises:
        LimitExceededError: it exceeds the budget.
        DataError: it is damaged or incomplete.
    """
    if method == "stored":
        budget.take(len(data))
        return data
    if method == "zstd":
        return _expand_zstd(data, budget)
    bits = _WINDOW_BITS[method]
    try:
        return _expand_streams(data, budget, lambda: zlib.decompressobj(bits), single=method == "deflate")
    except zlib.error as error:
        raise _unreadable(budget, method, error) from None


def _expand_streams(data: bytes, budget: ExpansionBudget, start: Callable[[], Any], *, single: bool = False) -> bytes:
    """Decompress one stream after another, piece by piece. With an offset: copying the rest would be quadratic."""
    view, at, parts = memoryview(data), 0, []
    while True:
        budget.add_stream()
        stream = start()
        while not stream.eof:
            if at == len(view):
                raise DataError(f"{budget.source} cannot be read: it ends early")
            piece = view[at : at + _CHUNK]
            part = stream.decompress(piece, budget.left + 1)
            budget.take(len(part))
            parts.append(part)
            at += len(piece) - len(stream.unused_data)
        if single or at == len(view):
            return b"".join(parts)


@cache
def zstd() -> Any:
    """Return the module of the standard library for Zstandard, or its backport. Loaded when it is needed."""
    return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def _expand_zstd(data: bytes, budget: ExpansionBudget) -> bytes:
    module = zstd()
    options = {module.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
    try:
        size = module.get_frame_info(data).decompressed_size
        if size is not None:
            budget.check(size)
        return _expand_streams(data, budget, lambda: module.ZstdDecompressor(options=options))
    except module.ZstdError as error:
        raise _unreadable(budget, "zstd", error) from None


def _unreadable(budget: ExpansionBudget, method: str, error: Exception) -> DataError:
    return DataError(f"{budget.source} cannot be read as {method}: {error}")
