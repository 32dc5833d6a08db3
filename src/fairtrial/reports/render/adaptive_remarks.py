"""Remarks on runs that could stop early."""

from __future__ import annotations

from fairtrial.base.formatting import change_text, count, range_text, rate
from fairtrial.reports.figures.metrics import OVERSTATED
from fairtrial.store.protocol import RunRecord


def adaptive_remarks(run: RunRecord) -> list[str]:
    """Return the remarks: how many samples were analysed, the resulting figures, and what they leave out."""
    note = run.noted.adaptive
    if note is None:
        return []
    how = "The run stopped by its own rule" if note.stopped else "The run could have stopped by its own rule"
    first = f"{how}: the figures are those of the first {note.samples:,} of {note.planned:,} samples."
    if note.rule.decides is not None:
        first += " Because the run watched its own results, these wider intervals replace the usual ones:"
    lines = [first]
    for name, part in note.experiments.items():
        label = f"{name}: " if len(note.experiments) > 1 else ""
        estimate = "-" if part.estimate is None else rate(part.estimate)
        worst = "its" if part.missing == 1 else "their"
        missing = f", {part.missing:,} not scored and taken at {worst} worst" if part.missing else ""
        lines.append(f"{label}pass rate {estimate} ({rate(part.low)} to {rate(part.high)}{missing})")
    pair = note.pair
    if pair is not None:
        percent = not pair.graded
        difference = change_text(pair.estimate, percent=percent)
        verdict = f"is {pair.verdict} than" if pair.verdict else "cannot be told from"
        chance = f"chance alone does this in at most 1 run of {1 / pair.p_value:,.0f}" if pair.verdict else ""
        lines.append(
            f"{pair.candidate} {verdict} {pair.baseline}: {difference} "
            f"({range_text(pair.low, pair.high, percent=percent)}), {count(pair.wins, 'win')}, "
            f"{count(pair.losses, 'loss', 'losses')}{'; ' if chance else ''}{chance}."
        )
        if pair.verdict and note.stopped:
            lines.append(OVERSTATED)
    if note.beyond:
        beyond = count(note.beyond, "result")
        are = "is" if note.beyond == 1 else "are"
        lines.append(f"{beyond} after those samples {are} stored, but not in these figures.")
    return lines
