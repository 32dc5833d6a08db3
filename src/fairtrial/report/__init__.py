"""What came of a run, for people and for programs."""

from fairtrial.analysis.slices import by_input, by_metric
from fairtrial.analysis.summaries import group_by, summarize
from fairtrial.report.report import EvalReport, ExperimentReport
from fairtrial.report.results import Results

__all__ = ["EvalReport", "ExperimentReport", "Results", "by_input", "by_metric", "group_by", "summarize"]
