"""The document of a table of trials, with input and output side by side."""

from __future__ import annotations

from typing import Any

from fairtrial.reports.figures.trial_rows import TrialRows
from fairtrial.reports.render.document import Cell, Column, Content, Document, Remarks, Table, Tone
from fairtrial.store.export import text_of

_LONGEST = 400  # Of one text: no terminal shows more of it in a row.
_TEXTS, _LINES = ("input", "expected", "output", "error", "reason"), 4
_TITLES = {"sample_id": "sample", "outcome": "result"}
_FIGURES = ("value", "reward", "latency_ms", "tokens", "cost", "judge_cost", "repeat")


def trials_document(record: TrialRows, cases: int) -> Document:
    """Return a table of the rows; `outcome` and `passed` are combined into one column."""
    columns = [name for name in record.columns if name != "passed" or "outcome" not in record.columns]
    table = Table(
        "",
        tuple(_column(name, at == 0) for at, name in enumerate(columns)),
        tuple(tuple(_cell(name, row) for name in columns) for row in record.rows),
    )
    more = (Remarks((f"Only the first {len(record.rows):,} are shown.",)),) if record.more else ()
    title = f"Trials of {record.run.name}"
    return Document(title, () if record.rows else ("no trial matches",), (*((table,) if record.rows else ()), *more))


def _column(name: str, first: bool) -> Column:
    figure = name in _FIGURES or name.startswith("metrics.")
    title = _TITLES.get(name, name.removeprefix("metadata.").removeprefix("metrics."))
    return Column(
        title,
        "right" if figure else "left",
        name=not figure and name != "outcome",
        heading=first,
        shortest=8,
        lines=_LINES if name in _TEXTS else 1,
    )


def _cell(name: str, row: Any) -> Content:
    value = row[name]
    if name == "outcome" and "passed" in row:
        return _result(value, row["passed"])
    if value is None:
        return Cell("-", "dim")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join((text_of(value) or "")[:_LONGEST].split())


def _result(outcome: str, passed: bool | None) -> Cell:
    tone: Tone = "unsure" if passed is None else "good" if passed else "bad"
    return Cell(outcome.replace("_", " ") if passed is None else "passed" if passed else "failed", tone)
