"""Type names that several packages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

type JSON = bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None
"""What JSON can say, and nothing else."""
