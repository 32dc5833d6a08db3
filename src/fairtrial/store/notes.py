"""What a run's record keeps beside its plan: one record for each fact.

They are stored as one JSON object. Writers change some of its keys with `write_notes`; the store merges them into those
it has, and keys that this version does not know stay as they are. Readers use `RunRecord.noted`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Self, TypedDict, Unpack

from fairtrial.base.frozen import EMPTY, JSON
from fairtrial.data.splits import SplitOrigin
from fairtrial.errors import ConfigurationError, StoreError
from fairtrial.trials.config import StopWhen


@dataclass(frozen=True, slots=True)
class AdaptiveRate:
    """The pass rate of one experiment of a run that may stop by itself, with an interval valid at any stopping time.

    Attributes:
        n: Samples.
        passed: How many trials passed.
        errors: Trials that ended in an error, counted as failures.
        missing: Trials without a score; the interval holds whatever it would have been.
        estimate: The share of passes among trials that are not missing; None if there are none.
        low: Lower end of the interval.
        high: Upper end of the interval.
        level: Its confidence.
        method: How it was made.
    """

    n: int
    passed: int
    errors: int
    missing: int
    estimate: float | None
    low: float
    high: float
    level: float
    method: str

    def to_json(self) -> dict[str, Any]:
        """Return the figures as they are stored."""
        return _fields(self)


@dataclass(frozen=True, slots=True)
class AdaptivePair:
    """Two experiments of a run that stops once it can tell them apart.

    The interval leaves out 0 if and only if there is a verdict: both come from one betting martingale.

    Attributes:
        baseline: The experiment to compare with.
        candidate: The experiment that is compared.
        wins: Pairs in which the candidate's score is higher.
        losses: Pairs in which the baseline's score is higher.
        ties: Pairs with equal scores.
        missing: Pairs of which a side has no score.
        estimate: Mean score of the candidate less that of the baseline; None if there are no pairs.
        low: Lower end of the interval.
        high: Upper end of the interval.
        level: Its confidence.
        method: How it was made.
        e_value: At the last look.
        p_value: 1/e_value, at most 1; valid at any time.
        verdict: What the candidate is; None while undecided.
        graded: Whether a score other than 0 and 1 was compared.
    """

    baseline: str
    candidate: str
    wins: int
    losses: int
    ties: int
    missing: int
    estimate: float | None
    low: float
    high: float
    level: float
    method: str
    e_value: float
    p_value: float
    verdict: Literal["better", "worse"] | None
    graded: bool = False


@dataclass(frozen=True, slots=True)
class AdaptiveNote:
    """What a run that may stop by itself has found.

    Attributes:
        stopped: Whether the rule ended the run early.
        reason: What the rule decided, in a sentence, or None. It may come to its decision only with the last sample.
        rule: The rule.
        samples: How many samples, from the start of the plan, are in the figures.
        planned: Of how many.
        beyond: Stored results after that prefix. They are kept and are in no figure here.
        experiments: The figures of each experiment, by name.
        pair: The figures of the two experiments that `rule.decides` names.
    """

    stopped: bool
    reason: str | None
    rule: StopWhen
    samples: int
    planned: int
    beyond: int
    experiments: Mapping[str, AdaptiveRate]
    pair: AdaptivePair | None

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self:
        """Read the note; what a newer version has added to it is left out."""
        rates = {name: AdaptiveRate(**_known(AdaptiveRate, part)) for name, part in stored["experiments"].items()}
        rule, pair = StopWhen(**_known(StopWhen, stored["rule"])), stored["pair"]
        made = {
            "rule": rule,
            "experiments": rates,
            "pair": None if pair is None else AdaptivePair(**_known(AdaptivePair, pair)),
        }
        return cls(**_known(cls, stored) | made)

    def to_json(self) -> dict[str, Any]:
        """Return the note as it is stored."""
        return _fields(self)


@dataclass(frozen=True, slots=True)
class FleetNote:
    """How far the plan has been sent to a fleet, and the fingerprint of the requests."""

    cursor: int
    fingerprint: str

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self:
        """Read the note; without a fingerprint, it matches no code."""
        cursor, fingerprint = stored.get("cursor"), stored.get("fingerprint")
        if not isinstance(cursor, int):
            return cls(0, "")
        return cls(cursor, fingerprint if isinstance(fingerprint, str) else "")


@dataclass(frozen=True, slots=True)
class MissingNote:
    """Results that did not arrive in time: their number, and the first of them."""

    count: int
    first: tuple[str, ...]

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self:
        """Read the note."""
        count = stored.get("count")
        return cls(count if isinstance(count, int) else 0, _texts(stored.get("first")) or ())


@dataclass(frozen=True, slots=True)
class CrashNote:
    """The crashes of a run's processes.

    Attributes:
        count: Number of consecutive processes that crashed while executing the run.
        started: The last ordinal that may have started; -1 if unknown.
        alone: The suspected trial that is being executed alone in this process; -1 if none.
        alone_deaths: Number of crashes while that trial was executed alone.
    """

    count: int = 0
    started: int = -1
    alone: int = -1
    alone_deaths: int = 0

    @classmethod
    def read(cls, stored: object) -> Self:
        """Read the note; without one, there were no crashes."""
        if not isinstance(stored, list | tuple) or len(stored) != 4 or not all(type(part) is int for part in stored):
            return cls()
        return cls(*stored)

    def to_json(self) -> JSON:
        """Return the note as it is stored; None without a crash."""
        return [self.count, self.started, self.alone, self.alone_deaths] if self.count else None


@dataclass(frozen=True, slots=True)
class ImportNote:
    """The origin of a run that another tool executed.

    Attributes:
        format: The format of the source.
        source: The id in the source.
        content: A digest of the imported data.
        imported_at: Time of the import, in seconds since the epoch.
        remarks: Differences from the figures of the source.
        origin: Further data of the source.
    """

    format: str
    source: str
    content: str
    imported_at: float
    remarks: tuple[str, ...] = ()
    origin: Mapping[str, JSON] = EMPTY

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self:
        """Read the note."""
        at = stored.get("imported_at")
        named = {entry.name for entry in fields(cls)}
        return cls(
            str(stored.get("format")),
            str(stored.get("source")),
            str(stored.get("content")),
            float(at) if isinstance(at, int | float) else 0.0,
            _texts(stored.get("remarks")) or (),
            {name: value for name, value in stored.items() if name not in named},
        )

    def to_json(self) -> JSON:
        """Return the note as it is stored."""
        return {
            **self.origin,
            "format": self.format,
            "source": self.source,
            "content": self.content,
            "imported_at": self.imported_at,
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True, slots=True)
class GateNote:
    """A gate for which the run was the baseline.

    Attributes:
        baseline: The experiment of this run that was the baseline.
        run: The id of the run that was gated.
        experiment: Its experiment.
        code: The hash of its code; empty if unknown.
        data: The fingerprint of its dataset.
        trials: Number of its trials with a score.
        margins: How much worse than the baseline each metric was allowed to be; None if it was not recorded.
    """

    baseline: str
    run: str
    experiment: str
    code: str
    data: str
    trials: int
    margins: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class PlanNote:
    """An analysis plan that was given to the run.

    Attributes:
        digest: The hash of the plan.
        content: The plan, by key.
        given_at: When it was given, in seconds since the epoch.
        results: Number of results that the run had by then.
        earlier: Names of runs of the same code on the same samples that had results by then.
    """

    digest: str
    content: Mapping[str, JSON]
    given_at: float
    results: int = 0
    earlier: tuple[str, ...] = ()

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self | None:
        """Read the note; None if it is damaged."""
        content, results = stored.get("content"), stored.get("results")
        given_at = stored.get("given_at")
        if not isinstance(content, Mapping) or not isinstance(results, int) or not isinstance(given_at, int | float):
            return None
        return cls(str(stored.get("digest")), content, given_at, results, _texts(stored.get("earlier")) or ())


SKIP = "~skip:"
"""What the name of a skip begins with, before the name of the review."""
PICKED = "~picked:"
"""What the name of a verdict on a trial that somebody picked begins with."""
MANY_SKIPS = 0.05
"""Above this share of skipped trials, the answers of a review are no random sample."""

type ReviewedOutcome = Literal["scored", "user_error"]
"""Which trials a review draws."""

type ReviewScale = Literal["pass_fail", "ratings"]
"""What reviewers say of a trial: pass or fail, or one of the five ratings of a judge."""


@dataclass(frozen=True, slots=True)
class ReviewNote:
    """A review of the run by people: what they are asked, what they are shown, and the seed that draws the trials.

    Attributes:
        name: The name of its labels.
        question: What reviewers are asked.
        guidelines: What they should know beforehand, in Markdown.
        experiments: The experiments whose trials are drawn.
        scale: What they can answer.
        seed: The key of the draw, 16 hexadecimal digits.
        size: Number of trials of each experiment.
        votes: Number of reviewers wanted for each trial.
        shows: What else they are shown: "expected", "experiment", and metadata as "m.KEY". Never the judge's verdict.
        created_at: When it was made, in seconds since the epoch.
        created_by: Who made it.
        outcome: Which trials are drawn: those that were scored, or those whose simulated user was at fault.
    """

    name: str
    question: str
    guidelines: str
    experiments: tuple[str, ...]
    scale: ReviewScale
    seed: str
    size: int
    votes: int = 1
    shows: tuple[str, ...] = ()
    created_at: float = 0.0
    created_by: str = ""
    outcome: ReviewedOutcome = "scored"

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self | None:
        """Read the note; None if it is damaged or of a later version, with a scale that this one does not know."""
        try:
            made = cls(
                **_known(cls, stored)
                | {name: _texts(stored.get(name)) or () for name in ("experiments", "shows")}
                | {"size": int(stored["size"]), "votes": int(stored.get("votes", 1))}
            )
            int(made.seed, 16)
        except (KeyError, TypeError, ValueError):
            return None
        known = made.scale in ("pass_fail", "ratings") and made.outcome in ("scored", "user_error")
        return made if known and made.size > 0 else None


@dataclass(frozen=True, slots=True)
class JudgeNote:
    """What a judge of the run asks of every output. With a trial, its whole prompt can be rebuilt from it.

    Attributes:
        name: The name of the judge.
        question: The text that follows what is judged.
        include_input: Whether the judge sees the input.
        pairs: Whether it compares the output with the expected one.
    """

    name: str
    question: str
    include_input: bool = True
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class BatchesNote:
    """What the batches of a run came to.

    Attributes:
        requests: Model calls that were sent in batches.
        replies: Answers that were paid, at half price.
        cost_usd: What they cost; None if no price is known.
        unused: Answers that no trial used: it had given up waiting, or made other calls when it was executed again.
        unused_cost_usd: What those cost.
        open_batches: Batches that the provider may still have, for which no trial waits.
    """

    requests: int
    replies: int
    cost_usd: float | None = None
    unused: int = 0
    unused_cost_usd: float | None = None
    open_batches: int = 0

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self:
        """Read the note; without its numbers, there were no batches."""
        known = _known(cls, stored)
        return cls(**{"requests": 0, "replies": 0} | known)


@dataclass(frozen=True, slots=True)
class SearchNote:
    """How a search for a better prompt ended, kept with its first run, that of the baseline on the validation split.

    Attributes:
        best: The id of the candidate that the validation split chose; that of the baseline if none was better.
        ended: Why the search ended.
    """

    best: str
    ended: str

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self:
        """Read the note."""
        return cls(str(stored.get("best")), str(stored.get("ended")))


@dataclass(frozen=True, slots=True)
class UserNote:
    """The user that an experiment talks to.

    Attributes:
        experiment: The name of the experiment.
        model: The model that plays the user; "" for a user without one.
        digest: A digest of the model, the prompt and the code of the user.
    """

    experiment: str
    model: str
    digest: str


SAMPLING_WEIGHT, SAMPLING_STRATUM = "sampling_weight", "sampling_stratum"
"""The metadata keys of a live trace: how many traces it stands for, and the stratum whose share was its own."""


@dataclass(frozen=True, slots=True)
class SamplingNote:
    """How the live traces of a run were sampled.

    Attributes:
        day: The day (UTC) on which they were received.
        sample: The share of traces that are taken.
        strata: Strata with a share of their own, as they were given.
        max_cost_usd: The budget of the day for judges; None without one.
        rates: When the rates were lowered (seconds since the epoch), and the factor of all shares from then on.
        received: Traces whose outermost span was received, since the service was last started.
        incomplete: Sampled traces that were left out because spans of them were missing.
        too_large: Sampled traces that were left out because of their size.
        unstorable: Sampled traces that were left out because their result cannot be stored.
    """

    day: str
    sample: float
    strata: tuple[str, ...] = ()
    max_cost_usd: float | None = None
    rates: tuple[tuple[float, float], ...] = ()
    received: int = 0
    incomplete: int = 0
    too_large: int = 0
    unstorable: int = 0

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self:
        """Read the note."""
        made: dict[str, Any] = {"day": "", "sample": 1.0, **_known(cls, stored)}
        made["strata"] = _texts(stored.get("strata")) or ()
        made["rates"] = tuple((float(at), float(factor)) for at, factor in stored.get("rates", ()))
        return cls(**made)


class NoteChanges(TypedDict, total=False):
    """Notes to write; None removes one. Keys are the stored names and the properties of `RunNotes`."""

    order: str | None
    once: str | None
    stopped: str | None
    cost_cap_usd: float | None
    executed_seconds: float | None
    redacted: int | None
    adaptive: AdaptiveNote | None
    imported: ImportNote | None
    fleet: FleetNote | None
    batches: BatchesNote | None
    missing: MissingNote | None
    crashes: CrashNote | None
    code_changed: bool
    collected: bool
    command_line: Sequence[str]
    resume_words: Sequence[str]
    sample_types: tuple[JSON, JSON]
    gates: Sequence[GateNote]
    plans: Sequence[PlanNote]
    reviews: Sequence[ReviewNote]
    judges: Sequence[JudgeNote]
    split: SplitOrigin | None
    search: SearchNote | None
    transcripts: str | None
    transcripts_shared: bool | None
    transcripts_returning: bool
    users: Sequence[UserNote]
    sampling: SamplingNote | None
    kept: bool


def write_notes(**changes: Unpack[NoteChanges]) -> dict[str, JSON]:
    """Return notes as they are stored."""
    return {name: _written(value) for name, value in changes.items()}


def _written(value: Any) -> Any:
    """Return a note as JSON. Text is escaped by the store when it is encoded."""
    if isinstance(value, CrashNote | ImportNote):
        return value.to_json()
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {name: _written(part) for name, part in value.items()}
    return [_written(part) for part in value] if isinstance(value, tuple | list) else value


@dataclass(frozen=True, slots=True)
class RunNotes:
    """The notes of one run, decoded on access; `stored` has all of them, including those of newer versions."""

    stored: Mapping[str, JSON]

    @property
    def order(self) -> str | None:
        """A digest of the order of the samples."""
        return self._text("order")

    @property
    def once(self) -> str | None:
        """A digest of the key under which the run is executed once; None without one."""
        return self._text("once")

    @property
    def transcripts(self) -> str | None:
        """The address under which the run's transcripts are; None if they are in the store."""
        return self._text("transcripts")

    @property
    def transcripts_shared(self) -> bool:
        """Whether the store is a backup, so that the transcripts are those of another store too."""
        return bool(self.stored.get("transcripts_shared"))

    @property
    def transcripts_returning(self) -> bool:
        """Whether those are being moved into the store, where new ones are then stored."""
        return self.stored.get("transcripts_returning") is True

    @property
    def stopped(self) -> str | None:
        """Why the run ended before the end of its plan."""
        return self._text("stopped")

    @property
    def cost_cap_usd(self) -> float | None:
        """The cost cap that ended the run."""
        found = self.stored.get("cost_cap_usd")
        return found if isinstance(found, int | float) else None

    @property
    def executed_seconds(self) -> float | None:
        """How long processes have executed the run, without the time between them; None if that was never resumed.

        The time of processes that were killed is missing.
        """
        found = self.stored.get("executed_seconds")
        return found if isinstance(found, int | float) else None

    @property
    def redacted(self) -> int:
        """The number of trials that were not rescored because secrets had been redacted."""
        found = self.stored.get("redacted")
        return found if isinstance(found, int) else 0

    @property
    def code_changed(self) -> bool:
        """Whether the code changed while the run was unfinished. Later versions count in `RunRecord.identity`."""
        return bool(self.stored.get("code_changed"))

    @property
    def kept(self) -> bool:
        """Whether somebody said that the run is to be kept when old runs are deleted."""
        return bool(self.stored.get("kept"))

    @property
    def collected(self) -> bool:
        """Whether the run was collected from a mailbox."""
        return bool(self.stored.get("collected"))

    @property
    def sample_types(self) -> tuple[Any, Any]:
        """The names of the types of inputs and expected values; `...` where samples differ, empty for plain JSON."""
        found = self.stored.get("sample_types")
        return (found[0], found[1]) if isinstance(found, Sequence) and len(found) == 2 else ("", "")

    def _parts(self, name: str) -> list[Mapping[str, Any]]:
        found = self.stored.get(name)
        return [part for part in found if isinstance(part, Mapping)] if isinstance(found, Sequence) else []

    @property
    def users(self) -> Mapping[str, UserNote]:
        """The user that each experiment talks to, by experiment; empty if there are no conversations."""
        wanted = {entry.name for entry in fields(UserNote)}
        notes = [UserNote(**_known(UserNote, part)) for part in self._parts("users") if wanted <= part.keys()]
        return {note.experiment: note for note in notes}

    @property
    def gates(self) -> tuple[GateNote, ...]:
        """The gates for which the run was the baseline, the oldest first."""
        wanted = {entry.name for entry in fields(GateNote)} - {"margins"}
        return tuple(GateNote(**_known(GateNote, part)) for part in self._parts("gates") if wanted <= part.keys())

    @property
    def plans(self) -> tuple[PlanNote, ...]:
        """The analysis plans that were given to the run, the oldest first."""
        return tuple(note for part in self._parts("plans") if (note := PlanNote.read(part)) is not None)

    @property
    def reviews(self) -> tuple[ReviewNote, ...]:
        """The reviews of the run by people, the oldest first."""
        return tuple(review for part in self._parts("reviews") if (review := ReviewNote.read(part)) is not None)

    @property
    def judges(self) -> tuple[JudgeNote, ...]:
        """What the judges of the run ask; those with a prompt template of their own are missing."""
        parts = self._parts("judges")
        return tuple(JudgeNote(**_known(JudgeNote, part)) for part in parts if {"name", "question"} <= part.keys())

    @property
    def split(self) -> SplitOrigin | None:
        """The split of a dataset that the samples of the run are, or are a part of."""
        found = self.stored.get("split")
        if not isinstance(found, Mapping) or not {one.name for one in fields(SplitOrigin)} <= found.keys():
            return None
        return SplitOrigin(**_known(SplitOrigin, found))

    @property
    def search(self) -> SearchNote | None:
        """How the search ended whose first run this is."""
        found = self.stored.get("search")
        return SearchNote.read(found) if isinstance(found, Mapping) else None

    @property
    def sampling(self) -> SamplingNote | None:
        """How the live traces of the run were sampled; None for other runs."""
        found = self.stored.get("sampling")
        return SamplingNote.read(found) if isinstance(found, Mapping) else None

    @property
    def had_owner(self) -> bool:
        """Whether a process of an earlier version executed the run."""
        return "at_work" in self.stored

    @property
    def command_line(self) -> tuple[str, ...] | None:
        """The arguments of `fairtrial run` that name what to run."""
        return _texts(self.stored.get("command_line"))

    @property
    def resume_words(self) -> tuple[str, ...] | None:
        """The arguments of `fairtrial` that resume the run, without passwords."""
        return _texts(self.stored.get("resume_words"))

    @property
    def is_adaptive(self) -> bool:
        """Whether the run had adaptive stopping."""
        return isinstance(self.stored.get("adaptive"), Mapping)

    @property
    def adaptive(self) -> AdaptiveNote | None:
        """The state of adaptive stopping; None without it."""
        found = self.stored.get("adaptive")
        if not isinstance(found, Mapping):
            return None
        try:
            return AdaptiveNote.read(found)
        except (ConfigurationError, KeyError, AttributeError, TypeError) as error:
            raise StoreError(
                f"the note about adaptive stopping is damaged or was stored by another version: {error}"
            ) from error

    @property
    def fleet(self) -> FleetNote | None:
        """How far the plan was sent to a fleet."""
        found = self.stored.get("fleet")
        return FleetNote.read(found) if isinstance(found, Mapping) and found else None

    @property
    def batches(self) -> BatchesNote | None:
        """What the run's batches at providers of models came to; None without any."""
        found = self.stored.get("batches")
        return BatchesNote.read(found) if isinstance(found, Mapping) else None

    @property
    def missing(self) -> MissingNote | None:
        """The results that did not arrive in time."""
        found = self.stored.get("missing")
        return MissingNote.read(found) if isinstance(found, Mapping) else None

    @property
    def crashes(self) -> CrashNote:
        """The crashes of the run's processes."""
        return CrashNote.read(self.stored.get("crashes"))

    @property
    def is_imported(self) -> bool:
        """Whether another tool executed the run."""
        return "imported" in self.stored

    @property
    def imported(self) -> ImportNote | None:
        """The origin of the run, if another tool executed it."""
        found = self.stored.get("imported")
        return ImportNote.read(found) if isinstance(found, Mapping) else None

    def _text(self, name: str) -> str | None:
        found = self.stored.get(name)
        return None if found is None else str(found)


def _fields(record: Any) -> dict[str, Any]:
    return {entry.name: _written(getattr(record, entry.name)) for entry in fields(record)}


def _known(kind: type[Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are fields of a record."""
    return {entry.name: stored[entry.name] for entry in fields(kind) if entry.name in stored}


def _texts(stored: object) -> tuple[str, ...] | None:
    if isinstance(stored, Sequence) and not isinstance(stored, str):
        return tuple(str(part) for part in stored)
    return None
