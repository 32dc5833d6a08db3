"""Rows of trials to be shown as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairtrial.store.protocol import RunRecord


@dataclass(frozen=True, slots=True)
class TrialRows:
    """Rows of trials with their columns; `more` is true if there are others."""

    run: RunRecord
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    more: bool
