"""Reports, comparisons, gates and leaderboards of runs."""

from fairtrial.analysis.slices import by_input, by_metric
from fairtrial.analysis.summaries import group_by, summarize
from fairtrial.report.report import EvalReport, ExperimentReport
from fairtrial.report.results import Results
from fairtrial.report.tool_calls import ToolCallFigures, tool_call_figures
from fairtrial.report.trials import TrialTable

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
