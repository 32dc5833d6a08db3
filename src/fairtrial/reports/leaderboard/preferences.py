"""Read the answers of a pairwise judge."""

from __future__ import annotations

from fairtrial.reports.leaderboard.preference_numbers import read_preferences
from fairtrial.reports.report import EvalReport, ExperimentReport, sources_of
from fairtrial.stats import Preference

__all__ = ["preferences"]


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
