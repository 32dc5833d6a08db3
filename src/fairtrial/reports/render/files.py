"""Write a record to a file, in the format of its extension."""

from __future__ import annotations

from pathlib import Path
from typing import cast, get_args

from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.experiment import RunAnalysis
from fairtrial.reports.gate.decision import GateRecord
from fairtrial.reports.render.documents import IN_HTML, IN_MARKDOWN, document_of
from fairtrial.reports.render.html import write_page
from fairtrial.reports.render.json_record import as_text, json_of
from fairtrial.reports.render.junit import write_junit
from fairtrial.reports.render.markdown import as_markdown
from fairtrial.store.export import ExportFormat, export_results, opened

_TABLES: tuple[str, ...] = get_args(ExportFormat.__value__)


def write(record: object, path: Path, format: str | None = None, *, name: str, tables: bool = False) -> None:
    """Write a record atomically.

    `name` is what an error calls it. With `tables`, the results of a whole run can be written one row per trial.
    """
    chosen = format or path.suffix.lstrip(".").lower()
    formats = ["html", "md", "json"]
    if isinstance(record, RunAnalysis | GateRecord):
        formats.append("xml")
    if tables:
        formats += _TABLES
    if chosen not in formats:
        kinds = f"{', '.join(formats[:-1])} or {formats[-1]}"
        raise ConfigurationError(f"{name} can be exported as {kinds} (got {chosen!r}); name the format")
    if isinstance(record, RunAnalysis) and chosen in _TABLES:
        export_results(record.store, record.run.run_id, path, cast("ExportFormat", chosen))
        return
    with opened(path, binary=False) as file:
        match chosen:
            case "html":
                write_page(document_of(record, IN_HTML), file)
            case "xml":
                write_junit(record, file)
            case "md":
                file.write(as_markdown(document_of(record, IN_MARKDOWN)))
            case _:
                file.write(as_text(json_of(record)))
