"""Labels of people: how they were drawn, and what they correct."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import fsum, isfinite
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairtrial import stats
from fairtrial.errors import ConfigurationError, DataError, UnknownRunError
from fairtrial.reports.figures.column_reader import read_columns, sample_ordinals
from fairtrial.reports.figures.columns import Columns, LabelColumn
from fairtrial.reports.figures.metrics import BUILT_IN, PASSED, SCORED, ExperimentSource
from fairtrial.reports.figures.trial_columns import Condition, TrialColumns
from fairtrial.scoring.score import PASSING_RATINGS, RATING_VALUES
from fairtrial.store.notes import MANY_SKIPS, PICKED, SKIP, ReviewNote
from fairtrial.store.protocol import Label, RunRecord, RunStore
from fairtrial.trials.context import TrialKey


class DrawnTrials(NamedTuple):
    """The trials of a review: their ordinals, those of each experiment in the order in which they were drawn.

    `judged` counts the trials from which they were drawn.
    """

    ordinals: tuple[int, ...]
    judged: int


def draw_trials(columns: TrialColumns, review: ReviewNote) -> DrawnTrials:
    """Return the trials of a review: of each experiment those with its outcome and the smallest hashes of ordinals.

    A larger review contains all trials of a smaller one with the same seed.
    """
    drawn: list[int] = []
    judged = 0
    for name in review.experiments:
        found = columns.select(Condition("outcome", (review.outcome,)), Condition("experiment", (name,))).ordinals()
        judged += found.size
        drawn += smallest(found, review).tolist()
    return DrawnTrials(tuple(drawn), judged)


def smallest(ordinals: NDArray[np.int64], review: ReviewNote) -> NDArray[np.int64]:
    """Return the trials that a review draws among these, in the order in which they are drawn."""
    keys = keyed_hash(int(review.seed, 16), ordinals)
    if ordinals.size > review.size:
        some = np.argpartition(keys, review.size)[: review.size]
        keys, ordinals = keys[some], ordinals[some]
    return ordinals[np.lexsort((ordinals, keys))]


def keyed_hash(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return hashes of numbers that look random and independent without the seed.

    Two rounds of the finalizer of SplitMix64, which maps 64 bits one to one, so that no two numbers are equal.
    """
    hashes = numbers.astype(np.uint64)
    for key in (seed & (1 << 64) - 1, (seed * 0x9E3779B97F4A7C15 + 1) & (1 << 64) - 1):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes = hashes ^ (hashes >> np.uint64(31))
    return hashes


UNKNOWN_DRAW = (
    "How the trials with labels were chosen is not known. If it was not at random, their labels say nothing about the "
    "others. Draw them with a review, or declare that they were drawn at random ({option})."
)
"""What is said of labels that nobody drew or declared to be drawn; `option` is the name of the declaration."""


@dataclass(frozen=True, slots=True)
class LabelDraw:
    """Whether the labelled trials are a random sample, and a sentence on who says so, or why not."""

    drawn: bool
    remark: str


def label_draw(
    source: ExperimentSource,
    columns: Columns,
    labels: LabelColumn,
    name: str,
    *,
    declared: bool,
    stored: bool,
    option: str,
) -> LabelDraw:
    """Return how the labelled trials of an experiment were chosen.

    Args:
        source: The experiment.
        columns: Its numbers.
        labels: Its labels. Weights, and a draw within each verdict, declare how trials were drawn.
        name: The name of the labels.
        declared: Whether the caller says that trials were drawn at random.
        stored: Whether they are the labels of the store; others may be only some of them.
        option: The name of the declaration, for the remedy.
    """
    marked = np.isfinite(labels.values)
    judged = (columns.outcomes == SCORED) & np.isfinite(columns.values[labels.metric])
    if marked.any() and bool(np.all(marked[judged])):
        return LabelDraw(True, "Every trial is labelled.")
    if declared or labels.by_verdict or labels.weights is not None:
        return LabelDraw(True, "The trials with labels are declared to be drawn at random.")
    found = _review(source, name)
    if found is None:
        return LabelDraw(False, UNKNOWN_DRAW.format(option=option))
    reviewed, review = found
    drawn = _drawn(source, columns, reviewed, review)
    if bool(np.any(marked & ~drawn)):
        return LabelDraw(False, f"Some of the labels are of trials that the review {name!r} has not drawn.")
    lost = drawn & ~marked
    if stored:
        lost &= _skipped(reviewed, columns, name)
    if np.count_nonzero(lost) > MANY_SKIPS * np.count_nonzero(drawn):
        count, size = int(np.count_nonzero(lost)), int(np.count_nonzero(drawn))
        was, are = ("was", "is") if count == 1 else ("were", "are")
        lack = f"{was} skipped" if stored else f"{are} not among these labels"
        return LabelDraw(
            False,
            f"{count:,} of the {size:,} trials that the review {name!r} drew {lack}: the rest is no random sample.",
        )
    return LabelDraw(True, f"The review {name!r} drew the trials with labels at random.")


def _review(source: ExperimentSource, name: str) -> tuple[ExperimentSource, ReviewNote] | None:
    """Return the review to which labels of this name belong, and the experiment whose trials it drew."""
    for run_id in filter(None, (source.run.run_id, source.run.parent_run)):
        with suppress(UnknownRunError):  # The original run of a rescored one may have been deleted.
            run = source.store.get_run(run_id)
            for review in run.noted.reviews:
                if review.name == name and source.name in review.experiments:
                    return ExperimentSource(source.store, run, source.name), review
    return None


def _drawn(
    source: ExperimentSource, columns: Columns, reviewed: ExperimentSource, review: ReviewNote
) -> NDArray[np.bool_]:
    """Return the trials that a review has drawn, cell by cell."""
    run, places = reviewed.run, sample_ordinals(source)[: len(columns.ids)]
    own = run.run_id == source.run.run_id
    outcomes = (columns if own else read_columns(reviewed, metrics=[PASSED])).outcomes
    rows, repeats = np.nonzero(outcomes == SCORED)
    samples = places if own else sample_ordinals(reviewed)
    experiment = run.experiments.index(reviewed.name)
    ordinals = (samples[rows] * len(run.experiments) + experiment) * run.repeats + repeats
    kept = smallest(ordinals.astype(np.int64), review)
    chosen = np.zeros((run.dataset_size, max(run.repeats, columns.repeats)), dtype=np.bool_)
    chosen[kept // (len(run.experiments) * run.repeats), kept % run.repeats] = True
    return chosen[places, : columns.repeats]


def _skipped(reviewed: ExperimentSource, columns: Columns, name: str) -> NDArray[np.bool_]:
    """Return the trials that somebody skipped, cell by cell."""
    rows = {sample_id: row for row, sample_id in enumerate(columns.ids)}
    found = np.zeros(columns.outcomes.shape, dtype=np.bool_)
    last = {(one.key, one.annotator): one.value for one in reviewed.store.labels(reviewed.run.run_id, name=SKIP + name)}
    for (key, _who), why in last.items():
        row = rows.get(key.sample_id)
        if why is not None and row is not None and key.experiment == reviewed.name and key.repeat < columns.repeats:
            found[row, key.repeat] = True
    return found


type Labels = Mapping[str, Any] | Mapping[TrialKey, Any] | Iterable[Label]
"""Labels by sample id or trial key, or as records. Of several experiments, a mapping may have those of each under its
name."""


@dataclass(frozen=True, slots=True)
class LabelUse:
    """Which labels correct a comparison or a gate: `labels` (True for those of the store), of which name and metric.

    `by_verdict` says that trials were drawn at random within each verdict of the judge, `drawn` that they were drawn at
    random.
    """

    labels: Labels | Literal[True]
    metric: str = PASSED
    name: str | None = None
    by_verdict: bool = False
    drawn: bool = False


SURELY_PICKED = 0.001
"""Below this p-value, labels that look picked are not used."""

_WORDS = {"pass": True, "passed": True, "fail": False, "failed": False}


@dataclass(slots=True)
class CollectedLabels:
    """Labels by trial (row and repeat) and annotator, with counts of unusable ones."""

    name: str = ""
    by_trial: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    weights: dict[tuple[int, int], float] = field(default_factory=dict)
    unknown: int = 0
    unjudged: int = 0
    rounded: int = 0
    tied: int = field(init=False)  # Set by `majority_labels`.

    @property
    def annotators(self) -> tuple[str, ...]:
        """The names of the annotators."""
        return tuple(sorted({who for votes in self.by_trial.values() for who in votes}))

    def majority_labels(self, graded: bool) -> dict[tuple[int, int], float]:
        """Return one label per trial: the majority verdict, or the mean of graded labels; ties are left out."""
        labels = {}
        for trial, votes in self.by_trial.items():
            mean = fsum(votes.values()) / len(votes)
            if graded or mean != 0.5:
                labels[trial] = mean if graded else float(mean > 0.5)
        self.tied = len(self.by_trial) - len(labels)
        return labels

    def column(self, columns: Columns, metric: str, *, by_verdict: bool) -> tuple[LabelColumn, bool]:
        """Return one label per trial, cell by cell, and whether labels are graded."""
        values = columns.values[metric]
        judged = (columns.outcomes == SCORED) & np.isfinite(values)
        graded = metric != PASSED and not (
            bool(np.all(np.isin(values[judged], (0, 1))))
            and all(vote in (0.0, 1.0) for votes in self.by_trial.values() for vote in votes.values())
        )
        cells, weights = np.full(judged.shape, np.nan), np.ones(judged.shape)
        for trial, label in self.majority_labels(graded).items():
            cells[trial], weights[trial] = label, self.weights[trial]
        used = weights[np.isfinite(cells)]
        equal = not used.size or float(np.ptp(used)) == 0
        return LabelColumn(metric, cells, None if equal else weights, None, by_verdict), graded


def collect(
    source: ExperimentSource, columns: Columns, labels: Labels | None, metric: str, name: str | None
) -> CollectedLabels:
    """Collect the labels of an experiment by trial; a rescored run uses the labels of its original run."""
    rows = {sample_id: row for row, sample_id in enumerate(columns.ids)}
    found = CollectedLabels()
    names: Counter[str] = Counter()
    runs = {source.run.run_id, source.run.parent_run}
    judged = (columns.outcomes == SCORED) & np.isfinite(columns.values[metric])
    for label in _labels(source, columns, labels, name):
        if label.key.experiment != source.name:
            continue
        if label.name.startswith("~") and label.name != name:
            continue  # Comments, skips and labels of trials that somebody picked: no verdicts on a sample.
        names[label.name] += 1
        row = rows.get(label.key.sample_id)
        if row is None or label.key.run_id not in runs or not 0 <= label.key.repeat < columns.repeats:
            found.unknown += 1
        elif not judged[row, label.key.repeat]:
            found.unjudged += 1
        elif label.value is None and labels is None:
            _withdraw(found, (row, label.key.repeat), label.annotator)
        else:
            value = _read(label, metric)
            if metric == PASSED and value not in (0.0, 1.0):
                found.rounded += 1
                value = float(value >= 0.5)
            # Labels are sorted by time: the latest label of an annotator counts.
            found.by_trial.setdefault((row, label.key.repeat), {})[label.annotator] = value
            found.weights[row, label.key.repeat] = float(label.weight)
    if len(names) > 1:
        listed = ", ".join(f"{key!r} ({count:,})" for key, count in sorted(names.items()))
        raise ConfigurationError(
            f"the labels have several names, {listed}: choose one with name= (label_name= of a comparison or gate)"
        )
    found.name = next(iter(names), name or "")
    return found


def people_verdicts(store: RunStore, run: RunRecord, experiment: str) -> dict[tuple[str, int], dict[str, bool]]:
    """Return people's latest verdicts by trial (sample id and repeat) and person, also on trials that they picked.

    They say what people think of single trials. As samples they mean nothing: use `collect` for estimates.
    """
    found: dict[tuple[str, int], dict[str, bool]] = {}
    for run_id in filter(None, (run.parent_run, run.run_id)):
        for label in store.labels(run_id):
            if label.key.experiment != experiment or (label.name.startswith("~") and not label.name.startswith(PICKED)):
                continue
            votes = found.setdefault((label.key.sample_id, label.key.repeat), {})
            if label.value is None:
                votes.pop(label.annotator, None)
            else:
                votes[label.annotator] = _read(label, PASSED) >= 0.5
    return found


def _withdraw(collected: CollectedLabels, trial: tuple[int, int], annotator: str) -> None:
    """Remove the label of an annotator from a trial."""
    votes = collected.by_trial.get(trial, {})
    votes.pop(annotator, None)
    if not votes:
        collected.by_trial.pop(trial, None)
        collected.weights.pop(trial, None)


def _labels(source: ExperimentSource, columns: Columns, labels: Labels | None, name: str | None) -> Iterator[Label]:
    if labels is None:
        for run_id in filter(None, (source.run.parent_run, source.run.run_id)):
            yield from source.store.labels(run_id, name=name)
        return
    if not isinstance(labels, Mapping):
        yield from (label for label in labels if name is None or label.name == name)
        return
    for key, value in labels.items():
        if isinstance(key, str):
            if columns.repeats > 1:
                raise ConfigurationError(
                    f"run {source.run.run_id} has {columns.repeats} repeats of sample {key!r}, each with an output of "
                    "its own: give labels by TrialKey"
                )
            key = TrialKey(source.run.run_id, source.name, key)
        yield Label(key, "", value)


def label_use(
    labels: Labels | bool, metric: str, name: str | None, *, by_verdict: bool, drawn: bool
) -> LabelUse | None:
    """Return which labels to use; None if none."""
    return None if labels is False else LabelUse(labels, metric, name, by_verdict, drawn)


def attach_labels(
    sources: Sequence[ExperimentSource], columns: Sequence[Columns], use: LabelUse | None
) -> list[Columns]:
    """Attach labels to the columns. Every side needs its own labels, because a judge may favour one."""
    if use is None:
        return list(columns)
    for side in columns:
        if side.adaptive is not None:
            raise ConfigurationError(
                f"labels cannot correct {side.name}, whose run stopped by its own rule: run a planned number of "
                "samples without stop_when"
            )
        if use.metric not in side.values:
            raise ConfigurationError(f"no trial of {side.name} has a metric {use.metric!r}, which the labels are about")
    labels = use.labels
    if isinstance(labels, Iterable) and not isinstance(labels, Mapping):
        labels = list(labels)
    alone = len(sources) == 1
    made = [_attach(source, side, labels, use, alone=alone) for source, side in zip(sources, columns, strict=True)]
    counts = [0 if side.labels is None else side.labels.count for side in made]
    if not all(counts):
        found = " and ".join(f"{count:,} of {side.name}" for count, side in zip(counts, made, strict=True))
        none = " and ".join(side.name for count, side in zip(counts, made, strict=True) if not count)
        what = "both sides" if len(made) == 2 else "every side" if made[1:] else "a judged trial"
        raise ConfigurationError(
            f"labels must be of {what} (got {found}): a judge may make different errors on each. Label a random "
            f"sample of the trials of {none} too, or leave labels out"
        )
    return made


def own_labels(labels: Labels, source: ExperimentSource, *, name: str, alone: bool) -> Labels:
    """Return the labels of one experiment: records, by trial key, by sample id, or these under its name.

    `name` is what the experiment is called here; `alone` says that there is no other that ids could be about.
    """
    nested = isinstance(labels, Mapping) and all(isinstance(value, Mapping) for value in labels.values())
    if isinstance(labels, Mapping) and nested:
        found: Labels = next((labels[one] for one in (name, source.name) if one in labels), {})  # type: ignore[index]
        return found
    if alone:
        return labels
    runs = {source.run.run_id, source.run.parent_run}
    if not isinstance(labels, Mapping):
        return [one for one in labels if one.key.run_id in runs and one.key.experiment == source.name]
    if any(isinstance(key, str) for key in labels):
        raise ConfigurationError(
            "labels by sample id do not say whose output they are about: give them under the name of each experiment, "
            'as in {"plain": {"q1": True}, "terse": {"q1": False}}, or by TrialKey'
        )
    return {key: value for key, value in labels.items() if isinstance(key, TrialKey) and key.run_id in runs}


def _attach(
    source: ExperimentSource, side: Columns, labels: Labels | Literal[True], use: LabelUse, *, alone: bool
) -> Columns:
    own = None if labels is True else own_labels(labels, source, name=side.name, alone=alone)
    found = collect(source, side, own, use.metric, use.name)
    column, _ = found.column(side, use.metric, by_verdict=use.by_verdict)
    option = "labels_drawn=True, --labels-drawn"
    draw = label_draw(source, side, column, found.name, declared=use.drawn, stored=own is None, option=option)
    column = replace(column, undrawn=None if draw.drawn else draw.remark)
    made = replace(side, labels=column)
    clustered = side.repeats > 1 or side.clusters is not None
    trials = made.judged_trials("scored")
    picked = why_picked(trials, by_verdict=use.by_verdict, clustered=clustered, alpha=SURELY_PICKED)
    return made if picked is None else replace(made, labels=replace(column, refusal=f"{side.name}: {picked}"))


def why_picked(trials: stats.JudgedTrials, *, by_verdict: bool, clustered: bool, alpha: float) -> str | None:
    """Return why the labels are unusable: the judge scores labelled trials differently from the others.

    Trials drawn within each verdict are expected to differ in the share of verdicts. Weighted ones must not, once they
    are weighted. Of clusters no test is made: whole clusters may have been drawn.
    """
    picked, judged = trials.labelled, ~trials.known
    f, rest = trials.scores[picked], trials.scores[judged & ~picked]
    if by_verdict or clustered or not f.size or not rest.size:
        return None
    if trials.weights is None:
        found = stats.groups_differ(f, rest)
        apart = None if isinstance(found, stats.Undefined) else found
        seen = float(f.mean())
    else:
        apart = stats.weighted_groups_differ(trials)
        seen = float(np.average(f, weights=trials.weights[picked]))
    if apart is None or apart >= alpha:
        return None
    how = "" if trials.weights is None else ", weighted,"
    return (
        f"The labelled trials{how} do not look like a random sample: the judge's mean is {seen:.2f} on them "
        f"and {rest.mean():.2f} on the others (p = {apart:.2g}). Labels that were not chosen at random cannot correct "
        "the judge, unless each has a weight or they were drawn at random within each verdict of the judge."
    )


def _read(label: Label, metric: str) -> float:
    value = label.value
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _WORDS:
            return float(_WORDS[word])
        for rating, number in RATING_VALUES.items():
            if word == rating:
                return float(rating in PASSING_RATINGS) if metric == PASSED else number
    elif isinstance(value, bool | int | float) and (0 <= value <= 1 or (metric not in BUILT_IN and isfinite(value))):
        return float(value)
    raise DataError(
        f"the label {value!r} of trial {label.key} cannot be compared with {metric!r}: "
        "use True or False, a number from 0 to 1, 'pass' or 'fail', or a rating"
    )
