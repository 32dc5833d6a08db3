"""What people said about trials, joined with the trials they said it of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import fsum, isfinite
from typing import Any

import numpy as np

from fairtrial.analysis.columns import Columns
from fairtrial.analysis.metrics import BUILT_IN, PASSED, SCORED
from fairtrial.analysis.source import ExperimentSource
from fairtrial.errors import ConfigurationError, DataError
from fairtrial.judging.judge import PASSING_RATINGS, RATING_VALUES
from fairtrial.store.protocol import Label
from fairtrial.trials.keys import TrialKey

type Labels = Mapping[str, Any] | Mapping[TrialKey, Any] | Iterable[Label]

_WORDS = {"pass": True, "passed": True, "fail": False, "failed": False}


@dataclass(slots=True)
class CollectedLabels:
    """Labels by trial (its row and repeat) and annotator, and what was odd about them."""

    name: str = ""
    by_trial: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    unknown: int = 0
    unjudged: int = 0
    rounded: int = 0
    tied: int = 0

    @property
    def annotators(self) -> tuple[str, ...]:
        """Who labelled."""
        return tuple(sorted({who for votes in self.by_trial.values() for who in votes}))

    def majority_labels(self, graded: bool) -> dict[tuple[int, int], float]:
        """One label per trial: the majority's verdict, or the mean of graded labels. Ties are left out."""
        labels = {}
        for trial, votes in self.by_trial.items():
            mean = fsum(votes.values()) / len(votes)
            if graded or mean != 0.5:
                labels[trial] = mean if graded else float(mean > 0.5)
        self.tied = len(self.by_trial) - len(labels)
        return labels


def collect(
    source: ExperimentSource, columns: Columns, labels: Labels | None, metric: str, name: str | None
) -> CollectedLabels:
    """The labels of an experiment, by trial. Those of the run whose outputs it scored again count: they are its own."""
    rows = {sample_id: row for row, sample_id in enumerate(columns.ids)}
    found = CollectedLabels()
    names: Counter[str] = Counter()
    runs = {source.run.run_id, source.run.parent_run}
    judged = (columns.outcomes == SCORED) & np.isfinite(columns.values[metric])
    for label in _labels(source, columns, labels, name):
        if label.key.experiment != source.name:
            continue
        names[label.name] += 1
        row = rows.get(label.key.sample_id)
        if row is None or label.key.run_id not in runs or not 0 <= label.key.repeat < columns.repeats:
            found.unknown += 1
        elif not judged[row, label.key.repeat]:
            found.unjudged += 1
        else:
            value = _read(label, metric)
            if metric == PASSED and value not in (0.0, 1.0):
                found.rounded += 1
                value = float(value >= 0.5)
            # Labels come oldest first: what an annotator said last counts.
            found.by_trial.setdefault((row, label.key.repeat), {})[label.annotator] = value
    if len(names) > 1:
        listed = ", ".join(f"{key!r} ({count:,})" for key, count in sorted(names.items()))
        raise ConfigurationError(f"the labels have several names, {listed}: choose one with name=")
    found.name = next(iter(names), name or "")
    return found


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
        f"the label {value!r} of trial {label.key} cannot be held against {metric!r}: "
        "say True or False, a number from 0 to 1, 'pass' or 'fail', or a rating"
    )
