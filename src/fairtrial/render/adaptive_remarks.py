"""What a report says about a run that was allowed to stop by itself."""

from __future__ import annotations

from fairtrial.analysis.source import adaptive_note
from fairtrial.formatting import change_text, range_text
from fairtrial.store.protocol import RunRecord


def adaptive_remarks(run: RunRecord) -> list[str]:
    """The sentences a reader needs: how far the run looked, what it then knew, and what is not in those figures."""
    note = adaptive_note(run)
    if note is None:
        return []
    how = "the run stopped by its own rule" if note["stopped"] else "the run could have stopped earlier by its own rule"
    lines = [
        f"stopping was adaptive: {how}; these intervals, over the first {note['samples']:,} of {note['planned']:,} "
        "samples, are valid at any stopping time, ordinary ones are not"
    ]
    for name, part in note["experiments"].items():
        label = f"{name}: " if len(note["experiments"]) > 1 else ""
        estimate = "-" if part["estimate"] is None else f"{part['estimate']:.1%}"
        missing = f", {part['missing']:,} not scored and taken at their worst" if part["missing"] else ""
        lines.append(f"{label}pass rate {estimate} ({part['low']:.1%} to {part['high']:.1%}{missing})")
    pair = note["pair"]
    if pair is not None:
        difference = change_text(pair["estimate"], percent=True)
        verdict = f"is {pair['verdict']} than" if pair["verdict"] else "cannot be told from"
        lines.append(
            f"{pair['candidate']} {verdict} {pair['baseline']}: {difference} "
            f"({range_text(pair['low'], pair['high'], percent=True)}), {pair['wins']:,} wins, "
            f"{pair['losses']:,} losses, e-value {pair['e_value']:.3g}, "
            f"p = {pair['p_value']:.3g} at any time"
        )
    if note["beyond"]:
        lines.append(f"{note['beyond']:,} results after those samples are stored and are not in these figures")
    return lines
