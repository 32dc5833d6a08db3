"""What each kind of record says, as a document that every format can show."""

from __future__ import annotations

from functools import singledispatch

from fairtrial.analysis.calibration import CalibrationRecord
from fairtrial.analysis.comparison import ComparisonRecord
from fairtrial.analysis.experiment import RunAnalysis
from fairtrial.analysis.gate import GateRecord
from fairtrial.render.calibration_document import calibration_document
from fairtrial.render.comparison_document import comparison_document
from fairtrial.render.document import Document
from fairtrial.render.gate_document import gate_document
from fairtrial.render.report_document import report_document

IN_MARKDOWN, IN_HTML = 10, 200
"""How many trials of a kind are there to read."""


@singledispatch
def document_of(record: object, cases: int) -> Document:
    """What a record says, with at most `cases` single trials of a kind to read."""
    raise TypeError(f"a {type(record).__name__} cannot be shown as a document")


document_of.register(RunAnalysis, report_document)
document_of.register(ComparisonRecord, comparison_document)
document_of.register(GateRecord, gate_document)
document_of.register(CalibrationRecord, calibration_document)
