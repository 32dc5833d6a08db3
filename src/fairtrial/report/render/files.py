"""A report written to a file, in the format that the file's name asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from fairtrial.errors import ConfigurationError
from fairtrial.report.render.html import write_page
from fairtrial.report.render.junit import write_junit
from fairtrial.store.export import ExportFormat, export_results, opened

if TYPE_CHECKING:
    from fairtrial.report.report import EvalReport, ReportFormat

_TABLES: tuple[str, ...] = get_args(ExportFormat.__value__)
_CASES = 200


def write_report(report: EvalReport, path: Path, format: ReportFormat | None = None) -> None:
    """Write a report or its results; a file is whole or it is not there."""
    chosen = format or path.suffix.lstrip(".").lower()
    if chosen in _TABLES:
        export_results(report.store, report.run_id, path, cast("ExportFormat", chosen))
        return
    if chosen not in ("html", "md", "json", "xml"):
        raise ConfigurationError(
            f"a report is exported as csv, jsonl, parquet, html, md, json or xml, not {chosen!r}; name the format"
        )
    with opened(path, binary=False) as file:
        match chosen:
            case "html":
                write_page(report._document(_CASES), file)
            case "xml":
                write_junit(report.store, report.run, [report[name] for name in report.experiments], file)
            case "md":
                file.write(report.to_markdown())
            case _:
                file.write(report.to_json())
