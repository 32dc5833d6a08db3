"""What a calibration says: how judge and people agree, and the pass rate corrected by it."""

from __future__ import annotations

from fairtrial import formatting
from fairtrial.analysis.calibration import CalibrationRecord, Confusion, Figure
from fairtrial.render.document import Block, Column, Document, Remarks, Table

type _Row = tuple[str, Figure, bool]


def calibration_document(calibration: CalibrationRecord, cases: int) -> Document:
    """What there is to say; a calibration has no single trials to read, however many `cases` may be."""
    judges = f", judged by {', '.join(calibration.judge_models)}" if calibration.judge_models else ""
    people = len(calibration.annotators)
    by = f" by {people} annotators" if people > 1 else ""
    rows = _rows(calibration)
    blocks: list[Block] = [] if calibration.confusion is None else [_confusion(calibration.confusion)]
    remarks = (*(f"warning: {line}" for line in calibration.warnings), *calibration.notes, *_undefined(rows))
    return Document(
        f"judge against labels  run {calibration.run_id}, {calibration.experiment}, {calibration.metric}{judges}",
        (f"{calibration.labelled:,} of {calibration.judged:,} judged trials labelled{by}",),
        (*blocks, _figures(calibration, rows), Remarks(remarks)),
    )


def _confusion(confusion: Confusion) -> Table:
    columns = (Column("", "left", name=True), Column("people: pass"), Column("people: fail"))
    rows = (
        ("judge: pass", f"{confusion.true_passes:,}", f"{confusion.false_passes:,}"),
        ("judge: fail", f"{confusion.false_fails:,}", f"{confusion.true_fails:,}"),
    )
    return Table("", columns, rows)


def _rows(calibration: CalibrationRecord) -> list[_Row]:
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


def _figures(calibration: CalibrationRecord, rows: list[_Row]) -> Table:
    columns = (
        Column("", "left", name=True),
        Column("value"),
        Column(f"{formatting.level(calibration.level)} interval"),
        Column("n"),
    )
    return Table("", columns, tuple((name, *_cells(figure, share), f"{figure.n:,}") for name, figure, share in rows))


def _cells(figure: Figure, share: bool) -> tuple[str, str]:
    text = formatting.rate if share else formatting.coefficient
    return text(
        figure.value
    ), formatting.UNDEFINED if figure.low is None else f"{text(figure.low)} to {text(figure.high)}"
