"""The document of a calibration: agreement of judge and people, and the corrected pass rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fairtrial.base import formatting
from fairtrial.reports.render.document import Block, Column, Document, Remarks, Table

if TYPE_CHECKING:
    from fairtrial.reports.calibrate.calibrate import Calibration, Figure, JudgeConfusion

type _Row = tuple[str, Figure, bool]


def calibration_document(calibration: Calibration) -> Document:
    """Return the document of a calibration."""
    judges = f", judged by {', '.join(calibration.judge_models)}" if calibration.judge_models else ""
    people = len(calibration.annotators)
    by = f" by {people} annotators" if people > 1 else ""
    judged = formatting.count(calibration.judged, "judged trial")
    rows = _rows(calibration)
    blocks: list[Block] = [] if calibration.confusion is None else [_confusion(calibration.confusion)]
    remarks = (
        *(f"warning: {line}" for line in calibration.warnings),
        *calibration.notes,
        *_undefined(calibration, rows),
    )
    return Document(
        f"judge against labels  run {calibration.run_id}, {calibration.experiment}, {calibration.metric}{judges}",
        (*_sentence(calibration), f"{calibration.labelled:,} of {judged} labelled{by}"),
        (*blocks, _figures(calibration, rows), Remarks(remarks)),
    )


def _sentence(calibration: Calibration) -> Iterator[str]:
    """Yield the sentence to report: the rate people would give, with its interval, and the judge's."""
    if not calibration.labelled:
        return
    share, corrected = calibration.confusion is not None, calibration.corrected
    text = formatting.rate if share else formatting.number
    judge = f"the judge {'says' if share else 'gives'} {text(calibration.judge_rate.value)}"
    if corrected.value is None:
        yield f"These labels do not show what people would say; {judge}."
        return
    yield f"{_people(calibration, text)}; {judge}."


def judge_sentence(calibration: Calibration) -> str:
    """Return in one sentence what people would say, and how far the judge is off."""
    if not calibration.labelled:
        return "No trial of this experiment has a label yet."
    share, corrected, judged = calibration.confusion is not None, calibration.corrected, calibration.judge_rate.value
    if corrected.value is None or judged is None:
        return next(_sentence(calibration))
    text = formatting.rate if share else formatting.number
    people = _people(calibration, text)
    judge = f"the judge {'passes' if share else 'gives'} {text(judged)}"
    if corrected.low is None or corrected.high is None or corrected.low <= judged <= corrected.high:
        return f"{people}; {judge}, which these labels do not contradict."
    off = abs(judged - corrected.value)
    by = f"{100 * off:.1f} points" if share else text(off)
    return f"{people}; {judge}, {by} too {'much' if judged > corrected.value else 'little'}."


def _people(calibration: Calibration, text: Callable[[float | None], str]) -> str:
    """Return what people would say of all trials; unless the labels are known to be drawn at random, with that if."""
    corrected = calibration.corrected
    ends = "" if corrected.low is None else f" ({text(corrected.low)} to {text(corrected.high)})"
    who = "People" if calibration.drawn else "If the labels were drawn at random, people"
    say = "pass" if calibration.confusion is not None else "give"
    return f"{who} would {say} {text(corrected.value)}{ends}"


def _confusion(confusion: JudgeConfusion) -> Table:
    columns = (Column("", "left", name=True), Column("people: pass"), Column("people: fail"))
    rows = (
        ("judge: pass", f"{confusion.true_passes:,}", f"{confusion.false_passes:,}"),
        ("judge: fail", f"{confusion.false_fails:,}", f"{confusion.true_fails:,}"),
    )
    return Table("", columns, rows)


def _rows(calibration: Calibration) -> list[_Row]:
    """Yield name, figure, and whether it is a share."""
    share = calibration.confusion is not None
    rows: list[_Row] = [
        ("judge's rate" if share else "judge's mean", calibration.judge_rate, share),
        ("labels alone", calibration.label_rate, share),
        ("corrected", calibration.corrected, share),
    ]
    if share:
        rows += [
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


def _undefined(calibration: Calibration, rows: list[_Row]) -> list[str]:
    """Yield why figures are undefined or have a caveat, each reason once."""
    names: dict[str, list[str]] = {}
    for name, figure, _ in rows:
        if figure.note and figure.note not in calibration.warnings:
            names.setdefault(figure.note, []).append(name)
    return [f"{', '.join(of)}: {note}" for note, of in names.items()]


def _figures(calibration: Calibration, rows: list[_Row]) -> Table:
    columns = (
        Column("", "left", name=True),
        Column("value"),
        Column(f"{formatting.level(calibration.level)} interval"),
        Column("n"),
    )
    rests_on = f"{formatting.count(calibration.labelled, 'label')}, {calibration.judged:,} judged"
    return Table(
        "",
        columns,
        tuple(
            (name, *figure_cells(figure, share), rests_on if figure is calibration.corrected else f"{figure.n:,}")
            for name, figure, share in rows
        ),
    )


def figure_cells(figure: Figure, share: bool) -> tuple[str, str]:
    """Return a figure and its interval as text."""
    text = formatting.rate if share else formatting.coefficient
    return text(
        figure.value
    ), formatting.UNDEFINED if figure.low is None else f"{text(figure.low)} to {text(figure.high)}"
