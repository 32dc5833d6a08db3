"""The document of an alarm: the answer for the system and for the judge, what changed, and the last days."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fairtrial.base.formatting import count, listed, mean_text, rate
from fairtrial.reports.figures.metrics import is_verdict
from fairtrial.reports.render.document import Block, Column, Conclusion, Document, Remarks, Table, Tone

if TYPE_CHECKING:
    from fairtrial.reports.watch.watched import AlarmStatus, WatchAlarm, WatchedChange, WatchedFigure

_TONES: dict[AlarmStatus, Tone] = {"quiet": "good", "alarm": "bad", "too little data": "unsure"}
_LAST_DAYS = 7


def alarm_document(alarm: WatchAlarm) -> Document:
    """Return the document of an alarm."""
    system, judge = alarm.system, alarm.judge
    blocks: list[Block] = [Conclusion(system.status, system.sentence, _TONES[system.status])]
    if judge is not None:
        blocks.append(Conclusion(f"judge: {judge.status}", judge.sentence, _TONES[judge.status]))
    if system.status == "alarm":
        lines = _changes(alarm.changes, str(system.earliest), str(system.latest))
        blocks.append(Remarks(tuple(lines)))
    if system.days:
        blocks.append(_days(alarm))
    blocks.append(Remarks(tuple(_remarks(alarm))))
    return Document(f"watch {alarm.suite}", tuple(_about(alarm)), tuple(blocks))


def _about(alarm: WatchAlarm) -> Iterator[str]:
    system = alarm.system
    what = f"{alarm.metric} of {alarm.experiment}"
    if system.reference is None:
        yield f"{what}, {count(system.scores, 'score')}"
        return
    period, percent = system.reference, is_verdict(alarm.metric)
    yield (
        f"{what}; reference {period.first} to {period.last}: {count(period.scores, 'score')}, "
        f"{mean_text(period.mean, percent=percent)} (at 95%, {mean_text(period.bound, percent=percent)} or better)"
    )


def _changes(changes: Sequence[WatchedChange], earliest: str, latest: str) -> Iterator[str]:
    """Put the changes of the days of an alarm into words."""
    span = f"on {earliest}" if earliest == latest else f"between {earliest} and {latest}"
    if not changes:
        yield f"Nothing that runs record changed {span}: model, code, parameters, evaluator, packages."
        return
    yield f"Changed {span}:"
    for one in changes:
        before, after = one.before or "none", one.after or "none"
        yield f"{one.day}: {one.what}: {before} -> {after}"


def _days(alarm: WatchAlarm) -> Table:
    percent = is_verdict(alarm.metric)
    days = alarm.system.days[-_LAST_DAYS:]
    columns = (Column("day", "left", name=True), Column("scores"), Column(alarm.metric), Column("evidence"))
    rows = tuple(
        (one.day, f"{one.scores:,}", mean_text(one.mean, percent=percent), _evidence(one.evidence)) for one in days
    )
    return Table("The last days, with the evidence as a share of what an alarm takes", columns, rows)


def _evidence(share: float) -> str:
    return rate(share) if share < 1 else "alarm"


def _remarks(alarm: WatchAlarm) -> Iterator[str]:
    system, judge = alarm.system, alarm.judge
    if system.status == "alarm":
        yield _whose(judge)
    elif judge is None:
        yield "There are no anchor trials: a judge that drifts would look like a system that does."
    if judge is not None and judge.status == "alarm" and system.status != "alarm":
        yield "The judge has changed: its scores before and after that day do not mean the same."
    yield from _delays(alarm)
    if system.watched_slices:
        yield (
            f"{count(len(system.watched_slices), 'slice')} watched: half of the false alarms are those of all scores, "
            "slices share the rest."
        )
    yield from alarm.remarks
    if alarm.status == "alarm":
        yield "At an alarm, the size of a drop is likely overstated."
        yield "The alarm stays until a new watch begins, with a new reference: --since DAY."


def _whose(judge: WatchedFigure | None) -> str:
    """Return whether the change may be that of the judge."""
    if judge is None:
        return "There are no anchor trials: the drop may be one of the judge instead of the system."
    if judge.status == "alarm":
        return "The judge agrees less with people on the anchors than before: the drop may be that of the judge."
    if judge.status == "quiet":
        return "On the anchor trials the judge shows no such drop, which points to the system."
    return "The anchor trials are too few to tell a drop of the system from one of the judge."


def _delays(alarm: WatchAlarm) -> Iterator[str]:
    found = alarm.system.detectable
    if alarm.system.status == "alarm" or not found:
        return
    share = [f"{100 * one.drop:g}% of the range" for one in found]
    sizes = [f"{100 * one.drop:g} points" for one in found] if is_verdict(alarm.metric) else share
    seen = [
        f"one of {size} in about {count(one.days, 'day')}" for one, size in zip(found, sizes, strict=True) if one.days
    ]
    if seen:
        yield f"With such days, a lasting drop is found: {listed(seen)}."
    missed = [size for one, size in zip(found, sizes, strict=True) if not one.days]
    if missed:
        yield f"A drop of {listed(missed)} would not be found: the reference is too small (--reference)."
