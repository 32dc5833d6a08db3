"""`fairtrial export`: a run for other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fairtrial.cli import options

# What is typed -> (what the report calls it, the ending of the file).
FORMATS = {
    "csv": ("csv", "csv"),
    "jsonl": ("jsonl", "jsonl"),
    "parquet": ("parquet", "parquet"),
    "html": ("html", "html"),
    "junit": ("xml", "xml"),
    "markdown": ("md", "md"),
    "json": ("json", "json"),
    "run": ("run", "fairtrial.db"),
}
_ALIASES = {"md": "markdown", "xml": "junit", "db": "run"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("export")(export)


def export(
    run: options.Run,
    format: Annotated[
        str | None,
        typer.Option("--format", "-f", metavar="FORMAT", help=f"{', '.join(FORMATS)}; else by the file's ending."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="suite-number.ending unless given; - prints it."),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Write a run to a file: its results, its report, or all of it.

    csv, jsonl and parquet have one row per trial; html, markdown, json and junit are the report; run is everything,
    in one file that `EvalReport.load` and `--store` read anywhere.

    \b
    Examples:
      fairtrial export support --format csv
      fairtrial export support@3 -o report.html
      fairtrial export support --format junit -o results.xml
      fairtrial export support --format jsonl -o - | head
    """
    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.names import find_run, name_of
    from fairtrial.cli.screen import note, print_json
    from fairtrial.report import EvalReport

    opened = options.open_existing(store)
    named = find_run(opened, run)
    if named.experiment is not None:
        raise Mistake(
            f"{run} names one experiment, and runs are exported whole", f"as in: fairtrial export {name_of(named.run)}"
        )
    kind, ending = _format(format, output)
    target = output or Path(f"{named.run.suite}-{named.run.number}.{ending}")
    report = EvalReport(opened, named.run)
    if str(target) == "-":
        _print(report, kind)
        return 0
    if not target.parent.is_dir():
        raise Mistake(f"there is no folder {target.parent}", "make it first, or name another file with --output")
    if kind == "run":
        report.save(target)
    else:
        report.export(target, kind)
    size = target.stat().st_size
    if json:
        print_json({"format": "fairtrial.export/1", "run_id": report.run_id, "file": str(target), "bytes": size})
    else:
        note(f"wrote {target}, {size:,} bytes")
    return 0


def _format(format: str | None, output: Path | None) -> tuple[Any, str]:
    import difflib

    from fairtrial.cli.faults import Mistake

    ending = output.suffix.lstrip(".") if output is not None else ""
    chosen = format or ending
    chosen = _ALIASES.get(chosen, chosen)
    if chosen in FORMATS:
        return FORMATS[chosen]
    if not chosen:
        raise Mistake("what format is it to be?", f"--format takes {', '.join(FORMATS)}")
    near = difflib.get_close_matches(chosen, FORMATS, 1)
    raise Mistake(
        f"a run is not exported as {chosen!r}",
        f"did you mean {near[0]}?" if near else f"--format takes {', '.join(FORMATS)}",
    )


def _print(report: Any, kind: str) -> None:
    """Write to standard output what is text, and bytes too where someone takes them."""
    from fairtrial.cli.encoding import make_exact
    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.screen import print_json
    from fairtrial.store.export import export_results

    make_exact(sys.stdout)
    if kind in ("csv", "jsonl"):
        export_results(report.store, report.run_id, sys.stdout, kind)  # type: ignore[arg-type]  # one of the two
    elif kind == "parquet" and not sys.stdout.isatty():
        export_results(report.store, report.run_id, sys.stdout.buffer, "parquet")
    elif kind in ("parquet", "run"):
        raise Mistake(f"{kind} is not text to look at", "name a file with --output")
    elif kind == "json":
        print_json(report.to_json())
    else:
        made = {"html": "to_html", "md": "to_markdown", "xml": "to_junit"}[kind]
        sys.stdout.write(getattr(report, made)())
