"""The state of a review: the answers, the next trial of each person, and where people disagree.

Nothing here reads a store: a state is made of the drawn trials and the labels.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fairtrial.base.frozen import JSON
from fairtrial.errors import ConfigurationError
from fairtrial.scoring.score import PASSING_RATINGS, RATING_VALUES
from fairtrial.store.notes import PICKED as PICKED
from fairtrial.store.notes import SKIP, ReviewedOutcome, ReviewNote, ReviewScale
from fairtrial.store.protocol import Label, RunRecord
from fairtrial.trials.context import TrialKey

COMMENT, LOOKED = "~comment:", "~looked:"
"""Names of what is no verdict on a drawn trial, as `SKIP` and `PICKED`, each before the name of a review."""
SKIP_REASONS = ("cannot tell", "broken or cut off", "not my subject")
ANSWERS: Mapping[ReviewScale, Mapping[str, JSON]] = {
    "pass_fail": {"pass": True, "fail": False},
    "ratings": {rating: rating for rating in RATING_VALUES},
}
"""What reviewers can answer, and how it is stored; `fairtrial calibrate` reads both."""
KEYS: Mapping[str, str] = {
    "pass": "p", "fail": "f", "excellent": "5", "good": "4", "fair": "3", "poor": "2", "wrong": "1",
}  # fmt: skip
MAX_SIZE = 10_000
MAX_TEXT = 20_000
RESERVED_SECONDS = 600.0
_MAX_NAME = 60


def new_review(
    run: RunRecord,
    *,
    name: str,
    question: str,
    guidelines: str = "",
    experiments: Sequence[str] = (),
    scale: ReviewScale = "pass_fail",
    size: int = 100,
    votes: int = 1,
    shows: Sequence[str] = (),
    created_by: str = "",
    outcome: ReviewedOutcome = "scored",
) -> ReviewNote:
    """Make a review with a seed of its own. Raises `ConfigurationError` if something is not as it must be.

    Args:
        run: The run whose trials are reviewed.
        name: The name of its labels.
        question: What reviewers are asked.
        guidelines: What they should know beforehand, in Markdown.
        experiments: The experiments whose trials are drawn; all of them by default.
        scale: "pass_fail" or "ratings".
        size: Number of trials of each experiment.
        votes: Number of reviewers for each trial.
        shows: What else they are shown; see `ReviewNote`.
        created_by: Who makes it.
        outcome: Which trials are drawn, "scored" or "user_error".
    """
    name, question = name.strip(), question.strip()
    if not name or name.startswith("~") or len(name) > _MAX_NAME or not name.isprintable():
        raise ConfigurationError(
            f"the name of a review must have 1 to {_MAX_NAME} characters and not begin with '~' (got {name!r})"
        )
    if any(review.name == name for review in run.noted.reviews):
        raise ConfigurationError(f"run {run.name} already has a review {name!r}: choose another name")
    if not question or len(question) > MAX_TEXT or len(guidelines) > MAX_TEXT:
        raise ConfigurationError(f"a review must have a question, of at most {MAX_TEXT:,} characters")
    unknown = [one for one in experiments if one not in run.experiments]
    if unknown:
        raise ConfigurationError(f"run {run.name} has no experiment {unknown[0]!r}")
    if scale not in ANSWERS:
        raise ConfigurationError(f"the scale must be one of {', '.join(ANSWERS)} (got {scale!r})")
    if not 1 <= size <= MAX_SIZE or not 1 <= votes <= 20:
        raise ConfigurationError(
            f"a review must be of 1 to {MAX_SIZE:,} trials, with 1 to 20 reviewers each (got {size:,} and {votes:,})"
        )
    chosen = tuple(one for one in run.experiments if not experiments or one in experiments)
    return ReviewNote(
        name, question, guidelines.strip(), chosen, scale, secrets.token_hex(8), size, votes, tuple(shows),
        time.time(), created_by, outcome if outcome == "user_error" else "scored",
    )  # fmt: skip


def passes(value: JSON) -> bool:
    """Return whether an answer is a pass."""
    return value in PASSING_RATINGS if isinstance(value, str) else bool(value)


def review_code(run_id: str, review: ReviewNote) -> str:
    """Return the name of a review in addresses, which says nothing about its run."""
    return _digest(review, f"review\0{run_id}\0{review.name}")


def _digest(review: ReviewNote, text: str) -> str:
    key = review.seed.encode()
    return hashlib.blake2b(text.encode("utf-8", "replace"), key=key, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class ReviewMember:
    """A drawn trial. `code` is its name in addresses: an ordinal would tell the experiment."""

    code: str
    ordinal: int
    key: TrialKey


def make_members(
    run: RunRecord, review: ReviewNote, ordinals: Sequence[int], sample_ids: Sequence[str]
) -> list[ReviewMember]:
    """Return the drawn trials with their codes and keys."""
    made = []
    for ordinal, sample_id in zip(ordinals, sample_ids, strict=True):
        _, experiment, repeat = run.split(ordinal)
        key = TrialKey(run.run_id, run.experiments[experiment], sample_id, repeat)
        made.append(ReviewMember(_digest(review, f"trial\0{ordinal}"), ordinal, key))
    return made


@dataclass(frozen=True, slots=True)
class ReviewerProgress:
    """How far one reviewer is: trials answered, skipped, and still to be answered."""

    name: str
    answered: int
    skipped: int
    open: int


@dataclass(slots=True)
class ReviewState:
    """A review and everything that was said in it.

    Attributes:
        review: The review.
        members: The drawn trials.
        answers: What each annotator says of a trial: the last word.
        skips: Why an annotator skipped a trial, unless it was answered later.
        comments: What annotators wrote about a trial.
        looked: Who has looked at the expected answer of a trial before answering.
        last: The trial that each annotator answered or skipped last.
        outside: Number of labels with this review's name of trials that were not drawn.
    """

    review: ReviewNote
    members: Sequence[ReviewMember]
    answers: dict[int, dict[str, JSON]] = field(default_factory=dict)
    skips: dict[int, dict[str, str]] = field(default_factory=dict)
    comments: dict[int, dict[str, str]] = field(default_factory=dict)
    looked: dict[int, set[str]] = field(default_factory=dict)
    last: dict[str, ReviewMember] = field(default_factory=dict)
    outside: int = 0
    _last_at: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, review: ReviewNote, members: Sequence[ReviewMember], labels: Iterable[Label]) -> ReviewState:
        """Make the state from the labels of the run, those of each name oldest first."""
        state = cls(review, members)
        by_key = {member.key: member for member in members}
        for label in labels:
            member = by_key.get(label.key)
            if member is None:
                state.outside += label.name == review.name
                continue
            state._add(member, label)
        return state

    def _add(self, member: ReviewMember, label: Label) -> None:
        at, who, value = member.ordinal, label.annotator, label.value
        if label.name == self.review.name:
            _put(self.answers, at, who, value)
        elif label.name == SKIP + self.review.name:
            _put(self.skips, at, who, None if value is None else str(value))
        elif label.name == COMMENT + self.review.name:
            _put(self.comments, at, who, None if value is None else str(value))
        elif label.name == LOOKED + self.review.name:
            self.looked.setdefault(at, set()).add(who)
            return
        else:
            return
        if value is not None and not label.name.startswith(COMMENT) and label.at >= self._last_at.get(who, 0.0):
            self.last[who], self._last_at[who] = member, label.at

    @property
    def annotators(self) -> list[str]:
        """The names of everybody who answered or skipped a trial."""
        answered = {who for votes in self.answers.values() for who in votes}
        return sorted(answered.union(*self._skipped().values()))

    def member(self, code: str) -> ReviewMember | None:
        """Return the drawn trial with this code."""
        return next((member for member in self.members if member.code == code), None)

    def is_tied(self, member: ReviewMember) -> bool:
        """Return whether as many annotators passed a trial as failed it."""
        votes = [passes(value) for value in self.answers.get(member.ordinal, {}).values()]
        return bool(votes) and 2 * sum(votes) == len(votes)

    def is_disputed(self, member: ReviewMember) -> bool:
        """Return whether annotators disagree about a trial."""
        return len({passes(value) for value in self.answers.get(member.ordinal, {}).values()}) > 1

    def majority(self, member: ReviewMember) -> bool | None:
        """Return what most annotators say of a trial; None without an answer, or if it is tied."""
        votes = [passes(value) for value in self.answers.get(member.ordinal, {}).values()]
        return None if not votes or self.is_tied(member) else 2 * sum(votes) > len(votes)

    def order(self, annotator: str) -> list[ReviewMember]:
        """Return the trials in the order of one annotator: random, and another one for each."""
        return sorted(self.members, key=lambda member: _digest(self.review, f"order\0{annotator}\0{member.ordinal}"))

    def is_open(self, member: ReviewMember, annotator: str, reserved: int = 0) -> bool:
        """Return whether an annotator is to answer a trial.

        Trials with too few answers are open, and tied ones: one more answer settles them, unknown to who gives it.
        """
        votes = self.answers.get(member.ordinal, {})
        if annotator in votes or annotator in self.skips.get(member.ordinal, {}):
            return False
        wanted = len(votes) + 1 if len(votes) >= self.review.votes and self.is_tied(member) else self.review.votes
        return len(votes) + reserved < wanted

    def progress(self, annotator: str) -> ReviewerProgress:
        """Return how far an annotator is."""
        skips = self._skipped()
        answered = sum(annotator in self.answers.get(member.ordinal, {}) for member in self.members)
        skipped = sum(annotator in skips.get(member.ordinal, {}) for member in self.members)
        still_open = sum(self.is_open(member, annotator) for member in self.members)
        return ReviewerProgress(annotator, answered, skipped, still_open)

    def _skipped(self) -> dict[int, dict[str, str]]:
        return {
            at: {who: why for who, why in votes.items() if who not in self.answers.get(at, {})}
            for at, votes in self.skips.items()
        }

    @property
    def answered(self) -> int:
        """Number of trials with an answer."""
        return sum(bool(self.answers.get(member.ordinal)) for member in self.members)

    @property
    def skipped(self) -> list[ReviewMember]:
        """The trials that somebody skipped and nobody answered: they are missing from the random sample."""
        return [m for m in self.members if not self.answers.get(m.ordinal) and self.skips.get(m.ordinal)]

    @property
    def tied(self) -> list[ReviewMember]:
        """The trials on which annotators are evenly split."""
        return [member for member in self.members if self.is_disputed(member) and self.is_tied(member)]

    @property
    def disputed(self) -> list[ReviewMember]:
        """The trials on which annotators disagree, evenly split ones first."""
        found = [member for member in self.members if self.is_disputed(member)]
        return sorted(found, key=lambda member: not self.is_tied(member))

    @property
    def is_complete(self) -> bool:
        """Whether every trial was answered or skipped as often as wanted."""
        skipped = self._skipped()
        return all(
            len(self.answers.get(m.ordinal, {})) + len(skipped.get(m.ordinal, {})) >= self.review.votes
            for m in self.members
        )


def _put[T](votes: dict[int, dict[str, T]], at: int, who: str, value: T | None) -> None:
    """Keep the last word of an annotator; None withdraws it."""
    if value is not None:
        votes.setdefault(at, {})[who] = value
    elif who in votes.get(at, {}):
        del votes[at][who]


class Reservations:
    """Trials that are on a reviewer's screen, so that no more reviewers are shown a trial than are wanted."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], tuple[str, float]] = {}

    def reserve(self, review: str, annotator: str, member: str, now: float) -> None:
        """Note what a reviewer is looking at; an earlier trial of the same reviewer becomes free."""
        self._until[review, annotator] = (member, now + RESERVED_SECONDS)

    def holders(self, review: str, member: str, now: float) -> set[str]:
        """Return who is looking at a trial."""
        return {
            who for (of, who), (code, until) in self._until.items() if of == review and code == member and until > now
        }


def next_member(
    state: ReviewState, code: str, annotator: str, reservations: Reservations, now: float
) -> ReviewMember | None:
    """Return the next trial for an annotator, and reserve it; None if nothing is open."""
    for member in state.order(annotator):
        done = {annotator, *state.answers.get(member.ordinal, ()), *state.skips.get(member.ordinal, ())}
        if state.is_open(member, annotator, len(reservations.holders(code, member.code, now) - done)):
            reservations.reserve(code, annotator, member.code, now)
            return member
    return None


def answer_labels(
    state: ReviewState,
    member: ReviewMember,
    annotator: str,
    *,
    say: str = "",
    skip: str = "",
    comment: str | None = None,
    looked: bool = False,
) -> list[Label]:
    """Return the labels that store an answer or a skip, in the order in which they must be stored.

    Raises `ConfigurationError` for anything that is not on the scale.

    Args:
        state: The review.
        member: The trial.
        annotator: Who answers.
        say: The answer.
        skip: Why the trial is skipped instead.
        comment: What the annotator wrote; None leaves an earlier comment as it is.
        looked: Whether the expected answer was shown.
    """
    name, answers = state.review.name, ANSWERS[state.review.scale]
    labels = []
    before = state.comments.get(member.ordinal, {}).get(annotator, "")
    if comment is not None and comment.strip() != before:
        labels.append(Label(member.key, COMMENT + name, comment.strip()[:MAX_TEXT] or None, annotator))
    if looked and annotator not in state.looked.get(member.ordinal, ()):
        labels.append(Label(member.key, LOOKED + name, "expected", annotator))
    if say in answers:
        labels.append(Label(member.key, name, answers[say], annotator))
        if annotator in state.skips.get(member.ordinal, {}):
            labels.append(Label(member.key, SKIP + name, None, annotator))
    elif skip in SKIP_REASONS:
        if annotator in state.answers.get(member.ordinal, {}):
            labels.append(Label(member.key, name, None, annotator))
        labels.append(Label(member.key, SKIP + name, skip, annotator))
    else:
        raise ConfigurationError(f"the answer must be one of {', '.join(answers)} (got {say or skip!r})")
    return labels
