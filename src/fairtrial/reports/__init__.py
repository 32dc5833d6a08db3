"""Everything that a finished run shows: reports, comparisons, gates, leaderboards, plans and calibrations."""

from fairtrial.reports.figures.slicing import by_input, by_metric
from fairtrial.reports.figures.summaries import group_by, summarize
from fairtrial.reports.report import EvalReport, ExperimentReport
from fairtrial.reports.results import Results, TrialTable
from fairtrial.reports.tool_calls import ToolCallFigures, tool_call_figures

__all__ = [
    "EvalReport",
    "ExperimentReport",
    "Results",
    "ToolCallFigures",
    "TrialTable",
    "by_input",
    "by_metric",
    "group_by",
    "summarize",
    "tool_call_figures",
]
