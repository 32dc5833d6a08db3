"""The figures of a report that earlier runs of its samples made more precise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fairtrial.base import formatting
from fairtrial.reports.figures.figures import Figures
from fairtrial.reports.render.document import Block, Column, Table
from fairtrial.reports.render.estimate_text import span, title_of, value
from fairtrial.reports.render.safe_text import plain


def history_table(figures: Mapping[str, Figures], names: Sequence[str]) -> list[Block]:
    """Return the table of figures that a history made more precise, if there are any."""
    several, rows, about = len(figures) > 1, [], ""
    for name in names:
        for experiment, figure in figures.items():
            one = figure.get(name)
            if one is not None and (past := one.history) is not None and past.note is None:
                adjusted = replace(one, value=past.value, low=past.low, high=past.high)
                label = f"{title_of(name)}, {experiment}" if several else title_of(name)
                rows.append((label, value(one, past.value), span(adjusted), f"{past.plain_samples:,} plain samples"))
                about = f"{formatting.count(past.samples, 'sample')} in {formatting.count(past.runs, 'run')}"
    columns = (Column("", "left", name=True), Column("estimate"), Column("interval"), Column("as precise as"))
    return [Table(f"By the history of {about}", columns, tuple(rows))] if rows else []


def history_remarks(figure: Figures) -> Iterator[str]:
    """Yield why a declared history is not used, or not for which figures."""
    yield from map(plain, figure.history_notes)
    reasons: dict[str, list[str]] = {}
    for one in figure.estimates:
        if one.history is not None and one.history.note is not None:
            reasons.setdefault(one.history.note, []).append(title_of(one.name))
    for reason, names in reasons.items():
        every = len(names) == sum(one.history is not None for one in figure.estimates)
        yield f"The history is not used{'' if every else ' for ' + ', '.join(names)}. {reason}"
