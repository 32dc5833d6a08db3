"""The answer of a watch over daily runs, and what it consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fairtrial.base.frozen import first_is
from fairtrial.reports.render.renderable import Renderable

if TYPE_CHECKING:
    from fairtrial.reports.render.document import Document

type AlarmStatus = Literal["quiet", "alarm", "too little data"]


@dataclass(frozen=True, slots=True)
class ReferencePeriod:
    """The first days, which the later ones are compared with. `bound` is the lower bound of the mean that is used."""

    first: str
    last: str
    days: int
    scores: int
    mean: float
    bound: float


@dataclass(frozen=True, slots=True)
class WatchedDay:
    """A day after the reference. `evidence` is the share of what an alarm takes: an alarm from 1 on."""

    day: str
    scores: int
    mean: float
    evidence: float


@dataclass(frozen=True, slots=True)
class DetectableDrop:
    """After about how many days such as those so far a lasting drop is found; None if it is not."""

    drop: float
    days: int | None


@dataclass(frozen=True, slots=True)
class WatchedFigure:
    """A figure that is watched: the metric, or the agreement of the judge with people on anchors.

    Attributes:
        name: What is watched.
        status: quiet, alarm or too little data.
        sentence: The status in words.
        scores: The number of scores so far, those of the reference included.
        reference: The first days; None until there are enough scores.
        days: The days after the reference, until an alarm.
        evidence: The evidence of the last of them.
        detectable: How soon drops are found.
        alarm_on: The day of the alarm.
        slice: The slice whose evidence was the largest; None if it was that of all scores.
        likely: The likeliest first day of the change.
        earliest: The first day of the range that contains it at 95%.
        latest: The last day of that range.
        since: The mean from the likeliest day to the alarm.
        since_scores: The number of its scores.
        watched_slices: The slices that share the false alarms.
        small_slices: Those with too few scores in the reference to be watched.
    """

    name: str
    status: AlarmStatus
    sentence: str
    scores: int
    reference: ReferencePeriod | None = None
    days: tuple[WatchedDay, ...] = ()
    evidence: float = 0.0
    detectable: tuple[DetectableDrop, ...] = ()
    alarm_on: str | None = None
    slice: str | None = None
    likely: str | None = None
    earliest: str | None = None
    latest: str | None = None
    since: float | None = None
    since_scores: int = 0
    watched_slices: tuple[str, ...] = ()
    small_slices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WatchedChange:
    """What runs record that changed on a day: a model, the code, a parameter, the evaluator or a package."""

    day: str
    what: str
    before: str
    after: str


@first_is(str)
@dataclass(frozen=True, slots=True, repr=False)
class WatchAlarm(Renderable):
    """The answer of a watch: print it, or read `status`. `judge` is None without anchor trials.

    `changes` are those of the days on which the change may have begun.
    """

    json_format: ClassVar[str] = "fairtrial.alarm/1"

    suite: str
    experiment: str
    metric: str
    status: AlarmStatus
    every: float
    system: WatchedFigure
    judge: WatchedFigure | None
    changes: tuple[WatchedChange, ...]
    remarks: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 if it is quiet, 1 for an alarm, 3 for too little data."""
        return {"quiet": 0, "alarm": 1, "too little data": 3}[self.status]

    @property
    def text(self) -> str:
        """The answer in one line, as for a message."""
        judge = "" if self.judge is None or self.judge.status != "alarm" else f"; judge: {self.judge.sentence}"
        return f"{self.system.status}: {self.system.sentence}{judge}"

    def document(self, cases: int) -> Document:
        """Return what is shown; an alarm has no single trials, whatever `cases` is."""
        from fairtrial.reports.watch.document import alarm_document

        return alarm_document(self)

    def __repr__(self) -> str:
        return f"<WatchAlarm of {self.suite}: {self.status}>"
