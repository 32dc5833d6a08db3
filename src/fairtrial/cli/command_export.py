"""The command export: results, trials, traces, training files."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from fairtrial.base.plugins import load_plugin, plugin_names
from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError
from fairtrial.errors import StoreError

if TYPE_CHECKING:
    from fairtrial.reports import EvalReport
    from fairtrial.reports.report.experiment import ComparedReport
    from fairtrial.store.protocol import RunRecord, RunStore


TRACE_FORMATS = ("otlp", "langsmith")


@dataclass(frozen=True, slots=True)
class TraceExportOptions:
    """The options of `export` that concern these formats."""

    to: str | None
    content: bool
    profile: str | None
    max_rows: int | None

    def check(self, format_name: str) -> None:
        """Refuse options that the format does not have."""
        if format_name not in TRACE_FORMATS and (self.to is not None or self.content):
            raise UserError(
                "--to and --trace-content need --format otlp or langsmith", "add --format otlp or --format langsmith"
            )
        if format_name != "otlp" and self.profile is not None:
            raise UserError("--trace-profile needs --format otlp", "add --format otlp")
        if format_name != "langsmith" and self.max_rows is not None:
            raise UserError("--max-rows needs --format langsmith", "add --format langsmith")

    def write(self, store: RunStore, run: RunRecord, target: Path | TextIO, format_name: str) -> None:
        """Write the run to a file."""
        if format_name == "otlp":
            from fairtrial.integrations.tracing.exporter import write_run

            write_run(store, run, target, content=self.content, profile=self.profile)
        else:
            from fairtrial.integrations.tracing.langsmith import write_experiments

            write_experiments(store, run, target, content=self.content, **self._rows())

    def send(self, store: RunStore, run: RunRecord, format_name: str, json: bool) -> int:
        """Send the run to a server and say what it took; returns the exit code."""
        from fairtrial.errors import TraceSendError
        from fairtrial.store.redact import current

        try:
            return self._send_spans(store, run, json) if format_name == "otlp" else self._upload(store, run, json)
        except TraceSendError as error:
            remedy = "check the address and OTEL_EXPORTER_OTLP_HEADERS"
            if format_name == "langsmith":
                remedy = "check the address and LANGSMITH_API_KEY; the same command continues the upload"
            raise UserError(current().text(str(error)), remedy) from None

    def _send_spans(self, store: RunStore, run: RunRecord, json: bool) -> int:
        from fairtrial.base.formatting import count
        from fairtrial.cli.screen import note, print_json
        from fairtrial.integrations.tracing.exporter import send_run

        totals = send_run(store, run, self.to or "", content=self.content, profile=self.profile)
        if json:
            facts = {"trials": totals.trials, "spans": totals.spans, "logs": totals.logs, "rejected": totals.rejected}
            print_json({"format": "fairtrial.traces/1", "run_id": run.run_id, "to": self._shown_address, **facts})
        else:
            rejected = f"; the server rejected {totals.rejected:,}: {totals.remark}" if totals.rejected else ""
            logs = count(totals.logs, "evaluation result")
            if not totals.takes_logs:
                logs = "scores in their attributes only, as the server takes no log records"
            trials, spans = count(totals.trials, "trial"), count(totals.spans, "span")
            note(f"sent {trials} to {self._shown_address}: {spans}, {logs}{rejected}")
        return 1 if totals.rejected else 0

    def _upload(self, store: RunStore, run: RunRecord, json: bool) -> int:
        from fairtrial.base.formatting import count
        from fairtrial.cli.screen import note, print_json
        from fairtrial.integrations.tracing.langsmith import upload_run

        totals = upload_run(store, run, self.to or "", content=self.content, **self._rows())
        if json:
            facts = {"created": totals.created, "existing": totals.existing, "unconfirmed": totals.unconfirmed}
            print_json(
                {"format": "fairtrial.upload/1", "run_id": run.run_id, "to": self._shown_address,
                 **facts, "trials": totals.trials}
            )  # fmt: skip
            return 0
        text = f"{count(totals.created, 'experiment')} with {count(totals.trials, 'trial')} created"
        if totals.existing:
            text += f", {totals.existing:,} existed already"
        note(f"uploaded to {self._shown_address}: {text}")
        if totals.unconfirmed:
            name = count(totals.unconfirmed, "experiment")
            note(f"{name} came to exist in an attempt that the server did not answer: compare the number of rows there")
        return 0

    @property
    def _shown_address(self) -> str:
        from fairtrial.store.redact import current

        return current().text(self.to or "")

    def _rows(self) -> dict[str, Any]:
        return {} if self.max_rows is None else {"max_rows": self.max_rows}


# Option value -> (format name of the report, file extension).
FORMATS = {
    "csv": ("csv", "csv"),
    "jsonl": ("jsonl", "jsonl"),
    "parquet": ("parquet", "parquet"),
    "html": ("html", "html"),
    "junit": ("xml", "xml"),
    "markdown": ("md", "md"),
    "json": ("json", "json"),
    "run": ("run", "fairtrial.db"),
    "trajectories": ("trajectories", "trajectories.jsonl"),
    "sft": ("sft", "sft.jsonl"),
    "dpo": ("dpo", "dpo.jsonl"),
    "kto": ("kto", "kto.jsonl"),
    "tokens": ("tokens", "tokens.jsonl"),
    "otlp": ("otlp", "otlp.jsonl"),
    "langsmith": ("langsmith", "langsmith.jsonl"),
    "site": ("site", "zip"),
    "bundle": ("bundle", "bundle.zip"),
}
_TRAINING = ("trajectories", "sft", "dpo", "kto", "tokens")
_ALIASES = {"md": "markdown", "xml": "junit", "db": "run", "zip": "site"}


def export(
    run: options.Run,
    format: Annotated[
        str | None,
        typer.Option(
            "--format", "-f", metavar="FORMAT", help=f"{', '.join(FORMATS)} (default: from the file extension)."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Output file (default: SUITE-NUMBER.EXT; - writes to standard output).",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="RUN",
            help="With html or markdown: compare with this run or experiment.",
            autocompletion=options.complete_run,
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URL",
            help="With otlp or langsmith: send to this address; env for that of the environment.",
        ),
    ] = None,
    trace_content: options.TraceContent = False,
    trace_profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Add attributes for langsmith or langfuse to traces.")
    ] = None,
    max_rows: Annotated[
        int | None,
        typer.Option("--max-rows", metavar="N", min=1, help="With langsmith: trials in one request (default: 1000)."),
    ] = None,
    without_content: Annotated[
        bool,
        typer.Option(
            "--without-content",
            help="With bundle: leave out inputs, expected values, outputs, transcripts and reasons.",
        ),
    ] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Write a run to a file: results, report, or everything.

    csv, jsonl and parquet have one row per trial. html, markdown, json and junit contain the report. run contains
    everything in one file, which `EvalReport.load` and `--store` can read. site is a zip file of static pages: the
    report and up to 2,000 trials, the failed ones first. bundle is a zip file with which others verify the figures
    when they import it. trajectories, sft, dpo, kto and tokens are training files of JSON lines. eval is a log of
    Inspect for `inspect view`, one file for each experiment. otlp contains OpenTelemetry traces, langsmith the
    requests that create the experiments of the run in LangSmith; neither has inputs, outputs and messages unless
    --trace-content is given.

    \b
    Examples:
      fairtrial export support --format csv
      fairtrial export support@3 -o report.html
      fairtrial export support@3 -o report.html --against support@2
      fairtrial export support --format junit -o results.xml
      fairtrial export support --format jsonl -o - | head
      fairtrial export support --format dpo -o pairs.jsonl
      fairtrial export support --format otlp --to http://127.0.0.1:4318
      fairtrial export support --format langsmith --to env
      fairtrial export support -o support.eval            then: inspect view
      fairtrial export support --format bundle            for a paper
    """
    from fairtrial.cli.screen import note, print_json
    from fairtrial.reports import EvalReport
    from fairtrial.reports.run_names import name_of

    opened = options.open_existing(store)
    named = options.find_run(opened, run)
    if named.experiment is not None:
        raise UserError(
            f"{run} is one experiment, but only whole runs can be exported",
            f"as in: fairtrial export {name_of(named.run)}",
        )
    format_name, ending = FORMATS["otlp"] if to is not None and format is None else _format(format, output)
    traces = TraceExportOptions(to, trace_content, trace_profile, max_rows)
    traces.check(format_name)
    if without_content and format_name != "bundle":
        raise UserError("--without-content needs --format bundle", "add --format bundle")
    if to is not None:
        if output is not None or against is not None:
            raise UserError("--to cannot be combined with --output or --against", "send first, then write a file")
        return traces.send(opened, named.run, format_name, json)
    target = output or Path(f"{named.run.suite}-{named.run.number}.{ending}")
    report: Any = EvalReport(opened, named.run)
    if against is not None:
        report = _with_comparisons(opened, report, against, format_name)
    if str(target) == "-":
        if format_name in TRACE_FORMATS:
            traces.write(opened, named.run, sys.stdout, format_name)
        else:
            _print(report, format_name)
        return 0
    counts, sha256, exporters = None, None, plugin_names("exporters")
    if not target.parent.is_dir():
        raise UserError(f"there is no folder {target.parent}", "make it first, or name another file with --output")
    with _naming(target):
        if format_name in TRACE_FORMATS:
            traces.write(opened, named.run, target, format_name)
        elif format_name == "site":
            from fairtrial.viewer.site import write_site

            write_site(opened, named.run, target)
        elif format_name == "bundle":
            from fairtrial.reports.bundle import write_bundle

            sha256 = write_bundle(opened, named.run, target, content=not without_content)
        elif format_name in exporters:
            write = load_plugin("exporters", format_name, "--format")
            return _say_written(write(opened, named.run, target), named.run.run_id, json)
        elif format_name == "run":
            report.save(target)
        elif format_name in _TRAINING:
            from fairtrial.rl.export import export as export_training

            counts = export_training(report, target, format_name)  # type: ignore[arg-type]  # one of them
        else:
            report.export(target, format_name)
    size = target.stat().st_size
    if json:
        written = {"format": "fairtrial.export/1", "run_id": named.run.run_id, "file": str(target), "bytes": size}
        if counts is not None:
            written |= {"rows": counts.rows, "left_out": dict(counts.left_out)}
        print_json(written if sha256 is None else written | {"sha256": sha256})
    else:
        note(f"wrote {target}, {size:,} bytes" + ("" if counts is None else f": {counts}"))
        if sha256 is not None:
            note(f"publish its SHA-256: {sha256}")
    return 0


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Give errors of writing, such as that of a full disk, the name of the file."""
    try:
        yield
    except (OSError, StoreError) as error:
        what = getattr(error, "strerror", None) or error
        named = error.filename is not None if isinstance(error, OSError) else "disk" not in str(error)
        if named:
            raise
        remedy = "make room, or name a file elsewhere with --output"
        raise UserError(f"{target} cannot be written: {what}", remedy) from None


def _say_written(files: list[Path], run_id: str, json: bool) -> int:
    """Name the files of a format that has one for each experiment."""
    from fairtrial.cli.screen import note, print_json

    sizes = {path: path.stat().st_size for path in files}
    if json:
        listed = [{"file": str(path), "bytes": size} for path, size in sizes.items()]
        print_json({"format": "fairtrial.export/1", "run_id": run_id, **listed[0], "files": listed})
    else:
        for path, size in sizes.items():
            note(f"wrote {path}, {size:,} bytes")
    return 0


def _with_comparisons(store: RunStore, report: EvalReport, against: str, kind: str) -> ComparedReport:
    """Return the report with comparisons: with the named experiment, or with the one of the same name in that run."""
    from fairtrial.cli.options import find_baseline
    from fairtrial.reports import EvalReport
    from fairtrial.reports.compare.compare import compare
    from fairtrial.reports.report.experiment import ComparedReport
    from fairtrial.reports.report.slices import slice_keys

    if kind not in ("html", "md"):
        raise UserError("--against needs --format html or markdown", "for figures: fairtrial compare --json")
    named = find_baseline(store, against, report.run)
    other = EvalReport(store, named.run)
    keys = slice_keys(store, report.run)
    groups: dict[str, list[Any]] = {}
    for part in report.parts:
        baseline = named.experiments[0] if len(named.experiments) == 1 else part.name
        if baseline in named.experiments and (named.run.run_id, baseline) != (report.run_id, part.name):
            groups.setdefault(baseline, []).append(part)
    if not groups:
        known = ", ".join(f"{named.run.name}:{name}" for name in named.experiments)
        raise UserError(f"no experiment of {report.run.name} can be compared with {against}", f"name one: {known}")
    return ComparedReport(report, tuple(compare(other[name], *parts, slice_by=keys) for name, parts in groups.items()))


def _format(format: str | None, output: Path | None) -> tuple[Any, str]:
    ending = output.suffix.lstrip(".") if output is not None else ""
    chosen = format or ending
    chosen = _ALIASES.get(chosen, chosen)
    if chosen in FORMATS:
        return FORMATS[chosen]
    if chosen in plugin_names("exporters"):
        return chosen, chosen
    if not chosen:
        raise UserError("no export format is given", f"--format takes {', '.join(FORMATS)}")
    near = difflib.get_close_matches(chosen, FORMATS, 1)
    raise UserError(
        f"unknown export format {chosen!r}",
        f"did you mean {near[0]}?" if near else f"--format takes {', '.join(FORMATS)}",
    )


def _print(report: Any, format_name: str) -> None:
    """Write to standard output; binary formats only if it is not a terminal."""
    from fairtrial.cli.screen import make_exact, print_json
    from fairtrial.store.export import export_results

    make_exact(sys.stdout)
    if format_name in ("csv", "jsonl"):
        export_results(report.store, report.run_id, sys.stdout, format_name)  # type: ignore[arg-type]  # one of the two
    elif format_name in _TRAINING:
        from fairtrial.rl.export import export as export_training

        export_training(report, sys.stdout, format_name)  # type: ignore[arg-type]  # one of them
    elif format_name == "parquet" and not sys.stdout.isatty():
        export_results(report.store, report.run_id, sys.stdout.buffer, "parquet")
    elif format_name in ("parquet", "run", "site", "bundle", *plugin_names("exporters")):
        raise UserError(f"{format_name} is a binary format and cannot be printed", "name a file with --output")
    elif format_name == "json":
        print_json(report.to_json())
    else:
        made = {"html": "to_html", "md": "to_markdown", "xml": "to_junit"}[format_name]
        sys.stdout.write(getattr(report, made)())
