"""The document of a leaderboard: which systems may be the best, then each with its rank interval."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fairtrial.base import formatting
from fairtrial.reports.compare.document import SHORT, TONES, mean_of, span
from fairtrial.reports.figures.metrics import is_verdict
from fairtrial.reports.render.document import Cell, Column, Conclusion, Content, Document, Remarks, Table, Tone

if TYPE_CHECKING:
    from fairtrial.reports.leaderboard.table import Leaderboard, LeaderboardEntry


def leaderboard_document(leaderboard: Leaderboard) -> Document:
    """Return the document of a leaderboard."""
    sentence = leaderboard.sentence.removeprefix(f"{leaderboard.metric}: ")
    tone: Tone = "good" if len(leaderboard.may_be_best) == 1 else ""
    remarks = [*leaderboard.warnings]
    if len(leaderboard.suites) > 1:
        parts = ", ".join(f"{suite.name} {formatting.rate(suite.weight)}" for suite in leaderboard.suites)
        remarks.insert(0, f"Means are over {len(leaderboard.suites)} datasets, weighted: {parts}.")
    remarks += _probably_best(leaderboard) if _some_are_not_best(leaderboard) else ()
    return Document(
        f"{len(leaderboard.systems)} systems by {leaderboard.metric}",
        (_about(leaderboard),),
        (Conclusion(leaderboard.metric, sentence, tone), _table(leaderboard), Remarks(tuple(remarks))),
    )


def _some_are_not_best(leaderboard: Leaderboard) -> bool:
    """Return whether to show P(best): where any system may be the best, it looks like a ranking that is none."""
    return len(leaderboard.may_be_best) < len(leaderboard.systems)


def _probably_best(leaderboard: Leaderboard) -> Iterator[str]:
    """Explain a P(best) that says more than the rank interval in the same row."""
    for entry in leaderboard.systems:
        if entry.best is not None and entry.best > 1 - leaderboard.alpha and entry.rank_high > 1:
            yield (
                f"P(best) of {entry.name} is {formatting.rate(entry.best)}, although its rank may be {entry.rank_low} "
                f"to {entry.rank_high}: it is a share of resamples, not adjusted for "
                f"{len(leaderboard.systems)} systems. The ranks hold for all systems together: quote those."
            )


def _about(leaderboard: Leaderboard) -> str:
    samples = formatting.count(leaderboard.n, "sample")
    clusters = "" if leaderboard.clusters is None else f" in {formatting.count(leaderboard.clusters, 'cluster')}"
    better = "; lower is better" if leaderboard.lower_is_better else ""
    return f"{samples}{clusters} that every system has{better}"


def _table(leaderboard: Leaderboard) -> Table:
    level = formatting.level(1 - leaderboard.alpha)
    columns = [
        Column("rank"),
        Column(f"{level}\nranks"),
        Column("system", "left", name=True),
        Column(leaderboard.metric),
    ]
    chance = [Column("P(best)")] if _some_are_not_best(leaderboard) else []
    if leaderboard.baseline is None:
        columns += [Column(f"{level} interval"), *chance]
    else:
        columns += [*chance, Column("change"), Column(f"{level} interval"), Column("verdict", "left")]
    rows = tuple(_row(entry, leaderboard) for entry in leaderboard.systems)
    against = "" if leaderboard.baseline is None else f" and changes against {leaderboard.baseline}"
    caption = f"Ranks{against}, with simultaneous intervals"
    return Table(caption, tuple(columns), rows)


def _row(entry: LeaderboardEntry, leaderboard: Leaderboard) -> tuple[Content, ...]:
    metric = leaderboard.metric
    row: tuple[Content, ...] = (
        f"{entry.rank}",
        f"{entry.rank_low} to {entry.rank_high}",
        entry.name,
        mean_of(metric, entry.mean),
    )
    best = (formatting.rate(entry.best),) if _some_are_not_best(leaderboard) else ()
    if leaderboard.baseline is None:
        ends = entry.low is not None and f"{mean_of(metric, entry.low)} to {mean_of(metric, entry.high)}"
        return (*row, ends or formatting.UNDEFINED, *best)
    difference = entry.against_baseline
    if difference is None:
        return (*row, *best, formatting.UNDEFINED, formatting.UNDEFINED, "baseline")
    tone = TONES[difference.verdict]
    change = formatting.signed(difference.difference, percent=is_verdict(metric))
    return (
        *row,
        *best,
        Cell(change, tone),
        span(metric, difference.low, difference.high),
        Cell(SHORT[difference.verdict], tone),
    )
