"""A report, a comparison or a gate written to a file, in the format that the file's name asks for."""

from __future__ import annotations

from pathlib import Path
from typing import IO, cast, get_args

from fairtrial.errors import ConfigurationError
from fairtrial.report.gate import GateResult
from fairtrial.report.render import junit, of_gate
from fairtrial.report.render.html import write_page
from fairtrial.report.render.record import as_text
from fairtrial.report.rendered import IN_HTML, Rendered
from fairtrial.report.report import EvalReport, ExperimentReport
from fairtrial.store.export import ExportFormat, export_results, opened

_TABLES: tuple[str, ...] = get_args(ExportFormat.__value__)


def write(what: Rendered, path: Path, format: str | None = None) -> None:
    """Write it as asked; a file is whole or it is not there."""
    chosen = format or path.suffix.lstrip(".").lower()
    formats = ["html", "md", "json"]
    if isinstance(what, EvalReport | ExperimentReport | GateResult):
        formats.append("xml")
    if isinstance(what, EvalReport):
        formats += _TABLES
    if chosen not in formats:
        kinds = f"{', '.join(formats[:-1])} or {formats[-1]}"
        raise ConfigurationError(f"{type(what).__name__} can be exported as {kinds} (got {chosen!r}); name the format")
    if isinstance(what, EvalReport) and chosen in _TABLES:
        export_results(what.store, what.run_id, path, cast("ExportFormat", chosen))
        return
    with opened(path, binary=False) as file:
        match chosen:
            case "html":
                write_page(what._document(IN_HTML), file)
            case "xml":
                _write_junit(what, file)
            case "md":
                file.write(what.to_markdown())
            case _:
                file.write(as_text(what.to_json()))


def _write_junit(what: Rendered, file: IO[str]) -> None:
    if isinstance(what, GateResult):
        of_gate.write_junit(what, file)
    elif isinstance(what, EvalReport):
        junit.write_junit(what.store, what.run, what.parts, file)
    elif isinstance(what, ExperimentReport):
        junit.write_junit(what.store, what.run, [what], file)
