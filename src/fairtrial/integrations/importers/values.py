"""Read fields of foreign JSON, whatever their type is."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from fairtrial.base.codec import parse_foreign_json
from fairtrial.base.foreign import inside, read_whole
from fairtrial.data.sample import NOT_GIVEN
from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import CodecError, DataError

_LONGEST_NAME = 60
_MAX_TOKENS = (1 << 31) - 1
_LONGEST_MS = 1 << 53  # Beyond it, floats are not exact.


def as_text(value: Any) -> str:
    """Return a text, or "" for anything else."""
    return value if isinstance(value, str) else ""


def is_id(value: Any) -> bool:
    """Return whether a value can be the id of a sample."""
    return isinstance(value, int) or bool(as_text(value))


def reference(value: Any) -> Any:
    """Return the expected value of a sample: to other tools, null means that there is none."""
    return NOT_GIVEN if value is None else value


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return an object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; none for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def as_number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_milliseconds(value: Any, unit: float = 1.0) -> int | None:
    """Return a duration in units of `unit` milliseconds, or None if it is not a possible one."""
    number = as_number(value)
    return round(number * unit) if number is not None and abs(number) <= _LONGEST_MS / unit else None


def as_time(value: Any) -> float:
    """Return an ISO 8601 time in seconds since the epoch; 0 if it is none."""
    try:
        return datetime.fromisoformat(as_text(value)).timestamp()
    except ValueError:
        return 0.0


def usage_of(input_tokens: Any, output_tokens: Any, cached_tokens: Any = 0, cost_usd: Any = None) -> TokenUsage:
    """Return token counts, without those that are no possible count."""
    cost = as_number(cost_usd)
    known_cost = cost if cost is not None and cost >= 0 else None
    return TokenUsage(_tokens(input_tokens), _tokens(output_tokens), _tokens(cached_tokens), known_cost)


def _tokens(count: Any) -> int:
    return min(max(int(as_number(count) or 0), 0), _MAX_TOKENS)


def suite_name(name: str) -> str:
    """Return a name that is valid for a suite and a file."""
    return re.sub(r"[^\w.]+", "-", name).strip("-._").lower()[:_LONGEST_NAME] or "imported"


def experiment_name(name: str) -> str:
    """Return a name that is valid for an experiment."""
    return re.sub(r"[:@/\s]+", "-", name).strip("-")[:_LONGEST_NAME] or "imported"


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the files of a folder. Raises `DataError` for a link to a file elsewhere."""
    return [inside(folder, file.relative_to(folder)) for file in folder.glob(pattern) if file.is_file()]


def file_hash(path: Path) -> str:
    """Return a hash of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_start(path: Path, suffix: str, size: int = 4096) -> bytes:
    """Return the first bytes of a file with a suffix; none if there is no such file."""
    if path.suffix.lower() != suffix or not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(size)


def load_object(path: Path) -> dict[str, Any]:
    """Load a file that contains one JSON object. Raises `DataError` if it does not."""
    with path.open("rb") as file:
        return as_document(read_whole(file, str(path)), str(path))


def as_document(content: bytes, source: str) -> dict[str, Any]:
    """Return a JSON object. Raises `DataError` if the content is something else."""
    try:
        document = parse_foreign_json(content)
    except CodecError as error:
        raise DataError(f"{source} must be JSON ({error})") from None
    if not isinstance(document, dict):
        raise DataError(f"{source} must contain a JSON object (got {type(document).__name__})")
    return document
