"""Systems ranked by preferences between pairs of answers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.metrics import FAILED, SCORED, VALUE, ExperimentSource
from fairtrial.reports.report import EvalReport, ExperimentReport, sources_of
from fairtrial.stats import Preference

_OURS_FIRST, _OURS_SECOND = "ours_first", "ours_second"


def read_preferences(source: ExperimentSource, opponent: str) -> list[Preference]:
    """Return the comparisons of one experiment with its opponent, in both orders."""
    if source.name == opponent:
        raise ConfigurationError(
            f"the opponent must not have the name of the experiment (got {opponent!r} for both)\n"
            "name what the outputs were compared with: preferences(report, opponent=...)"
        )
    key = source.cluster_key
    columns = read_columns(source, metrics=(VALUE, _OURS_FIRST, _OURS_SECOND), keys=(key,) if key else ())
    if not {_OURS_FIRST, _OURS_SECOND} <= columns.values.keys():
        raise ConfigurationError(
            f"no result of {source.name!r} was scored by a pairwise judge\n"
            "use pairwise_judge as the evaluator, or create comparisons yourself: Preference(first, second, winner)"
        )
    return list(_preferences(columns, source.name, opponent, _clusters(columns, key)))


def _clusters(columns: Columns, key: str) -> list[Hashable]:
    """The cluster of each sample, by names that other runs of these samples give it too.

    It is the declared one, or the first of the samples that have its input.
    """
    labels = columns.groups.get(key, [None] * len(columns.ids))
    if columns.clusters is None:
        codes: Sequence[int] = range(len(columns.ids))
    else:
        codes = columns.clusters.tolist()
    first: dict[int, str] = {}
    return [
        first.setdefault(code, name) if label is None else (key, label)
        for name, label, code in zip(columns.ids, labels, codes, strict=True)
    ]


def _preferences(columns: Columns, name: str, opponent: str, clusters: Sequence[Hashable]) -> Iterator[Preference]:
    orders = ((_OURS_FIRST, name, opponent), (_OURS_SECOND, opponent, name))
    for metric, first, second in orders:
        values = np.where(
            np.isfinite(columns.values[metric]) | ~np.isin(columns.outcomes, (SCORED, FAILED)),
            columns.values[metric],
            0.0,  # The judge is not asked about an empty output, nor after an error: both are losses.
        )
        for row, column in np.argwhere(np.isfinite(values)).tolist():
            value = float(values[row, column])
            winner = None if value == 0.5 else name if value > 0.5 else opponent
            yield Preference(first, second, winner, clusters[row])


def preferences(*reports: EvalReport | ExperimentReport, opponent: str = "expected") -> list[Preference]:
    """Return the answers of a pairwise judge as comparisons, one for each order, for `stats.bradley_terry`.

    A system is an experiment; `opponent` is the name of what its outputs were compared with. Comparisons about one
    sample, one cluster or one input belong together, also those of other reports. An empty output, a task error and a
    timeout lose in both orders; what could not be scored is left out.

    Args:
        *reports: Runs scored by `pairwise_judge`, or experiments of them. A run stands for all its experiments.
        opponent: The name of the other side: "expected" unless the judge was given another output.
    """
    return [
        preference
        for report in reports
        for source in sources_of(report)
        for preference in read_preferences(source, opponent)
    ]
