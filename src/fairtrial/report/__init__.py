"""What came of a run, for people and for programs."""

from fairtrial.report.report import EvalReport, ExperimentReport
from fairtrial.report.results import Results
from fairtrial.report.slices import by_input, by_metric, group_by, summarize

__all__ = ["EvalReport", "ExperimentReport", "Results", "by_input", "by_metric", "group_by", "summarize"]
