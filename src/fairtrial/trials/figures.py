"""What every trial has beside its score: one table, from which stored columns, comparisons and screens follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TrialFigure:
    """A number that every trial has and of which less is better.

    Attributes:
        name: Its name as a metric.
        title: Its name on screens.
        unit: What it is counted in.
        columns: The columns of stored results whose sum it is.
        type: The type of its columns in column files. Whole numbers ("i4") are always known, amounts ("f8") may not be.
    """

    name: str
    title: str
    unit: Literal["ms", "tokens", "usd"]
    columns: tuple[str, ...]
    type: Literal["i4", "f8"]


TRIAL_FIGURES = {
    figure.name: figure
    for figure in (
        TrialFigure("latency_ms", "latency", "ms", ("latency_ms",), "i4"),
        TrialFigure("tokens", "tokens", "tokens", ("input_tokens", "output_tokens"), "i4"),
        TrialFigure("cost_usd", "cost", "usd", ("cost_usd",), "f8"),
    )
}
COUNTS = tuple(name for figure in TRIAL_FIGURES.values() if figure.type == "i4" for name in figure.columns)
"""The columns with whole numbers."""
AMOUNTS = tuple(name for figure in TRIAL_FIGURES.values() if figure.type == "f8" for name in figure.columns)
"""The columns with amounts, which are empty where they are not known."""
