"""Build the document of a record, by its type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

from fairtrial.reports.calibrate.document import calibration_document
from fairtrial.reports.calibrate.numbers import CalibrationRecord
from fairtrial.reports.compare.comparison import ComparisonRecord
from fairtrial.reports.compare.document import ComparisonInDetail, comparison_document
from fairtrial.reports.figures.experiment import RunAnalysis
from fairtrial.reports.figures.trial_columns import TrialRows
from fairtrial.reports.gate.decision import GateRecord
from fairtrial.reports.gate.document import gate_document
from fairtrial.reports.leaderboard.document import leaderboard_document
from fairtrial.reports.leaderboard.table import LeaderboardRecord
from fairtrial.reports.plan.document import plan_document
from fairtrial.reports.plan.planning import SamplePlanRecord
from fairtrial.reports.render.document import Block, Cases, Document, Heading
from fairtrial.reports.render.report_document import report_document
from fairtrial.reports.render.trials import trials_document

IN_MARKDOWN, IN_HTML = 10, 200
"""How many trials of a kind are there to read."""


@dataclass(frozen=True, slots=True)
class ReportAgainst:
    """The report of a run, with comparisons of its experiments with a baseline."""

    analysis: RunAnalysis
    comparisons: tuple[ComparisonRecord, ...]


@singledispatch
def document_of(record: object, cases: int) -> Document:
    """Return the document of a record, with at most `cases` trials of each kind."""
    raise TypeError(f"a {type(record).__name__} cannot be shown as a document")


document_of.register(RunAnalysis, report_document)
document_of.register(ComparisonRecord, comparison_document)
document_of.register(
    ComparisonInDetail, lambda record, cases: comparison_document(record.comparison, cases, detailed=True)
)


@document_of.register
def _report_against(record: ReportAgainst, cases: int) -> Document:
    """Return the document of a report, with the comparisons before the list of trials."""
    report = report_document(record.analysis, cases)
    trials = [block for block in report.blocks if isinstance(block, Cases)]
    blocks: list[Block] = [block for block in report.blocks if not isinstance(block, Cases)]
    for comparison in record.comparisons:
        found = comparison_document(comparison, cases)
        blocks += [Heading(found.title, found.about), *found.blocks]
    if cases and trials:
        blocks.append(Heading(record.analysis.run.name))
    return Document(report.title, report.about, (*blocks, *trials))


document_of.register(LeaderboardRecord, leaderboard_document)
document_of.register(GateRecord, gate_document)
document_of.register(CalibrationRecord, calibration_document)
document_of.register(SamplePlanRecord, plan_document)
document_of.register(TrialRows, trials_document)
