"""How the trials with labels were chosen: drawn by a review, declared to be drawn, all of them, or nobody knows.

Labels of trials that somebody chose say nothing about the others, and no test can tell: among complaints, for example,
there are too many wrong answers that the judge passed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fairtrial.errors import UnknownRunError
from fairtrial.reports.calibrate.review_sample import smallest
from fairtrial.reports.figures.column_reader import read_columns, sample_ordinals
from fairtrial.reports.figures.columns import Columns, LabelColumn
from fairtrial.reports.figures.metrics import PASSED, SCORED
from fairtrial.reports.figures.source import ExperimentSource
from fairtrial.store.notes import MANY_SKIPS, SKIP, ReviewNote

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
