"""The report of a run: its figures, its results, and how both are shown."""

from fairtrial.reports.figures.metrics import source_of
from fairtrial.reports.report.experiment import ExperimentReport, metadata_keys
from fairtrial.reports.report.report import EvalReport, sources_of

__all__ = ["EvalReport", "ExperimentReport", "metadata_keys", "source_of", "sources_of"]
