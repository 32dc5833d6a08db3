"""A calibration as a person reads it."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairtrial.report.calibration import Calibration, Confusion, Figure
from fairtrial.report.untrusted import plain

_WIDTH = 100


def as_renderable(calibration: Calibration) -> RenderableType:
    """The calibration for a rich console."""
    parts: list[RenderableType] = [_heading(calibration), ""]
    if calibration.confusion is not None:
        parts += [_confusion(calibration.confusion), ""]
    rows = _rows(calibration)
    parts += [_figures(calibration, rows), ""]
    lines = [f"warning: {line}" for line in calibration.warnings] + list(calibration.notes) + _undefined(rows)
    return Group(*parts, Text("\n".join(plain(line) for line in lines)))


def as_text(calibration: Calibration) -> str:
    """The calibration as plain text."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(as_renderable(calibration))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _heading(calibration: Calibration) -> Text:
    judges = f", judged by {', '.join(plain(name) for name in calibration.judge_models)}"
    people = len(calibration.annotators)
    return Text.assemble(
        ("judge against labels", "bold"),
        f"  run {calibration.run_id}, {plain(calibration.experiment)}, {plain(calibration.metric)}"
        f"{judges if calibration.judge_models else ''}\n",
        (
            f"{calibration.labelled:,} of {calibration.judged:,} judged trials labelled"
            + (f" by {people} annotators" if people > 1 else ""),
            "dim",
        ),
    )


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), collapse_padding=True)
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place == 0 else "right")
    return table


def _confusion(confusion: Confusion) -> Table:
    table = _table("", "people: pass", "people: fail")
    table.add_row("judge: pass", f"{confusion.true_passes:,}", f"{confusion.false_passes:,}")
    table.add_row("judge: fail", f"{confusion.false_fails:,}", f"{confusion.true_fails:,}")
    return table


type _Row = tuple[str, Figure, bool]


def _rows(calibration: Calibration) -> list[_Row]:
    """Name, figure, and whether it is a share."""
    share = calibration.confusion is not None
    rows: list[_Row] = [
        ("judge's rate" if share else "judge's mean", calibration.judge_rate, share),
        ("labels alone", calibration.label_rate, share),
        ("corrected", calibration.corrected, share),
    ]
    if share:
        rows += [
            ("Rogan-Gladen", calibration.rogan_gladen, True),
            ("agreement", calibration.agreement, True),
            ("sensitivity", calibration.sensitivity, True),
            ("specificity", calibration.specificity, True),
        ]
    rows += [
        ("Cohen's kappa" if share else "Krippendorff's alpha", calibration.kappa, False),
        ("score with length", calibration.length, False),
        ("error with length", calibration.length_error, False),
    ]
    if calibration.panel is not None:
        rows += [
            ("annotators: agreement", calibration.panel.pairs, True),
            ("annotators: Fleiss' kappa", calibration.panel.fleiss, False),
            ("annotators: Krippendorff", calibration.panel.krippendorff, False),
        ]
    return rows


def _undefined(rows: list[_Row]) -> list[str]:
    """Why figures have none or a caveat, each reason once."""
    names: dict[str, list[str]] = {}
    for name, figure, _ in rows:
        if figure.note:
            names.setdefault(figure.note, []).append(name)
    return [f"{', '.join(of)}: {note}" for note, of in names.items()]


def _figures(calibration: Calibration, rows: list[_Row]) -> Table:
    table = _table("", "value", f"{100 * calibration.level:g}% interval", "n")
    for name, figure, as_share in rows:
        form = "{:.1%}" if as_share else "{:.3f}"
        ends = "-" if figure.low is None else f"{form.format(figure.low)} to {form.format(figure.high)}"
        value = "-" if figure.value is None else form.format(figure.value)
        table.add_row(name, value, ends, f"{figure.n:,}")
    return table
