"""Reports, comparisons, gates and leaderboards of runs."""

from fairtrial.reports.figures.slices import by_input, by_metric
from fairtrial.reports.figures.summaries import group_by, summarize
from fairtrial.reports.report import EvalReport, ExperimentReport
from fairtrial.reports.results import Results
from fairtrial.reports.tool_calls import ToolCallFigures, tool_call_figures
from fairtrial.reports.trials import TrialTable

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
