"""Options that commands share, the names that they take, and how results are printed."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli.user_errors import NOTHING_EXECUTED, EndedEarlyError, UserError
from fairtrial.reports.render.safe_text import is_hash, plain
from fairtrial.reports.run_names import RunName, UnknownNameError, name_of
from fairtrial.reports.run_names import find_run as find_stored_run
from fairtrial.runs.run_lease import with_current_status
from fairtrial.store.protocol import RunRecord, RunStore

if TYPE_CHECKING:
    from fairtrial.cli.settings import Settings
    from fairtrial.reports import EvalReport, ExperimentReport
    from fairtrial.reports.compare.compare import Comparison
    from fairtrial.reports.render.renderable import Renderable
    from fairtrial.store.protocol import RunRecord, RunStore


_SHORTEST_START = 4  # Characters of a hash.


def find_run(store: RunStore, text: str) -> RunName:
    """Find the run with a name, with its current status.

    Raises:
        UnknownNameError: with the names that are near.
    """
    named = find_stored_run(store, text)
    return replace(named, run=with_current_status(store, named.run))


def find_baseline(store: RunStore, text: str, run: RunRecord) -> RunName:
    """Find the baseline for a run by name; an experiment of the same run may be named without the run."""
    try:
        return find_run(store, text)
    except UnknownNameError:
        if text not in run.experiments:
            raise
        return RunName(run, text)


def other_experiment(store: RunStore, run: RunRecord, experiment: str) -> str | None:
    """Return the name of a stored experiment to compare with this one: of the same run, else of another run."""
    for name in run.experiments:
        if name != experiment:
            return shlex.quote(f"{name_of(run)}:{name}")
    for other in store.runs(suite=run.suite):
        if other.run_id != run.run_id:
            same = experiment if experiment in other.experiments else other.experiments[0]
            return shlex.quote(name_of(other) + (f":{same}" if len(other.experiments) > 1 else ""))
    return None


def find_sample(text: str, sample_ids: Iterable[str]) -> str | None:
    """Return the id of a sample: as it is, as a table shows it if it is cut, or the start of a hash.

    Raises:
        UserError: several ids match.
    """
    sample_ids = list(sample_ids)
    if text in sample_ids:
        return text
    start, cut, end = text.partition("…")
    if not start or (not cut and len(start) < _SHORTEST_START):
        return None
    matching = [
        sample_id
        for sample_id in dict.fromkeys(sample_ids)
        if (cut or is_hash(sample_id)) and sample_id.startswith(start) and sample_id.endswith(end)
    ]
    if len(matching) > 1:
        shown = ", ".join(map(plain, matching[:4]))
        raise UserError(f"{plain(text)!r} matches {len(matching)} sample ids", f"give more characters: {shown}")
    return matching[0] if matching else None


_EXAMPLES = {
    "--floor": "value=0.7",
    "--ceiling": "latency_ms=2000",
    "--tag": "branch=main",
    "--set": "style=terse",
    "--weight": "questions=2",
    "--bounds": "f1=0:1",
}


def parse_pairs(option: str, pairs: Iterable[str], *, as_text: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each pair; values are parsed as JSON if possible, else kept as text."""
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise UserError(
                f"{option} must be KEY=VALUE (got {pair!r})", f"as in: {option} {_EXAMPLES.get(option, 'level=hard')}"
            )
        yield key.strip(), value if as_text else parse_value(value)


def parse_ranges(option: str, pairs: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Return the range (low, high) of each metric in pairs such as `f1=0:1`."""
    ranges = {}
    for name, text in parse_pairs(option, pairs, as_text=True):
        try:
            low, high = map(float, text.split(":"))
        except ValueError:
            low = high = math.nan
        if not -math.inf < low < high < math.inf:
            raise UserError(
                f"{option} must be METRIC=LOW:HIGH (got {name}={text})", f"as in: {option} {_EXAMPLES[option]}"
            )
        ranges[name] = (low, high)
    return ranges


def parse_value(text: str) -> Any:
    """Parse JSON (`3`, `true`, `[1, 2]`); anything else is text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def one_experiment(store: RunStore, named: RunName, text: str) -> ExperimentReport:
    """Return the report of the one experiment that a name stands for."""
    from fairtrial.reports import EvalReport

    if len(named.experiments) > 1:
        choices = " or ".join(f"{name_of(named.run)}:{name}" for name in named.experiments)
        raise UserError(f"{text} has {len(named.experiments)} experiments", f"choose one: {choices}")
    return EvalReport(store, named.run)[named.experiments[0]]


def report_record(store: RunStore, named: RunName) -> dict[str, Any]:
    """Return the JSON of a report; docs/reference/json.md describes it."""
    return record_of(_report(store, named))


def record_of(rendered: Renderable) -> dict[str, Any]:
    """Return the JSON of a report, a comparison or a gate decision."""
    return dict(rendered.to_json())


def show(rendered: Renderable, *, json: bool) -> int:
    """Print a comparison, a ranking, a plan or a calibration; returns the exit code."""
    from fairtrial.cli.screen import out, print_json

    if json:
        print_json(record_of(rendered))
    else:
        out().print(rendered)
    return 0


def _report(store: RunStore, named: RunName) -> EvalReport | ExperimentReport:
    from fairtrial.reports import EvalReport

    report = EvalReport(store, named.run)
    return report if named.experiment is None else report[named.experiment]


def compared(report: EvalReport) -> Comparison:
    """Compare the experiments of a report with its first."""
    from fairtrial.reports.compare.compare import compare

    first, *others = (report[name] for name in report.experiments)
    return compare(first, *others)


def show_report(store: RunStore, named: RunName, *, json: bool, next_commands: bool, full: bool = False) -> None:
    """Print a report."""
    from fairtrial.cli.screen import commands, out, print_json
    from fairtrial.reports.render.terminal import RichDocument
    from fairtrial.reports.report.document import report_document

    if json:
        print_json(report_record(store, named))
        return
    console = out()
    report = _report(store, named)
    answer = report.answer()
    console.print(RichDocument(report_document(report, 0, full=full, answer=answer)))
    if next_commands and not full:
        console.print()
        commands(console, "", answer.commands)


def complete_run(incomplete: str) -> list[str]:
    """Return names of runs with this prefix, for shell completion."""
    try:
        store = open_existing(None)
        names = {name for run in store.runs(limit=200) for name in (run.suite, run.name)}
    except Exception:
        return []  # Completion must not print errors into the shell.
    return sorted(name for name in names if name.startswith(incomplete))


Texts = list[str] | None

# Options that several commands have.
Store = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Store of runs: a .db file or postgresql://... (default: .fairtrial/runs.db)."),
]
Transcripts = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Where the transcripts of new runs are stored: s3://, gs:// or az://bucket/prefix, or a folder "
        "(default: the store).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the figures: no progress, no report.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
RUN = typer.Argument(
    metavar="RUN",
    help="suite, suite:experiment, suite@3, suite@latest, or the start of a run id.",
    autocompletion=complete_run,
    show_default=False,
)
Run = Annotated[str, RUN]
MailboxUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Queue of the fleet: redis://host:port, postgresql://host/database or sqs://region/prefix (default: "
        "FAIRTRIAL_MAILBOX).",
    ),
]
HealthPort = Annotated[
    int | None, typer.Option(metavar="PORT", min=0, max=65535, help="Serve /health and /metrics on this port.")
]
TraceContent = Annotated[
    bool,
    typer.Option("--trace-content", help="Include inputs, outputs, messages and errors in traces (without secrets)."),
]

# Of commands that execute suites.
MaxSamples = Annotated[int | None, typer.Option(metavar="N", min=1, help="Run only the first N samples.")]
Samples = Annotated[Texts, typer.Option(metavar="ID", help="Run only this sample (repeatable).")]
Filters = Annotated[
    Texts, typer.Option(metavar="KEY=VALUE", help="Run only samples with this metadata (repeatable: all must match).")
]
Repeats = Annotated[int | None, typer.Option(metavar="N", min=1, help="Run every sample N times.")]
Concurrency = Annotated[int | None, typer.Option(metavar="N", min=1, help="Maximum number of trials in flight.")]
Processes = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Processes of this machine that share the trials (default: set by the suite)."
    ),
]
Experiments = Annotated[Texts, typer.Option(metavar="NAME", help="Run only this experiment (repeatable).")]
TrialSeed = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Seed from which the seeds of trials are derived.")
]
MaxCost = Annotated[
    float | None,
    typer.Option(metavar="USD", min=0, help="Stop at this cost, judges included; the run can be resumed."),
]
Cache = Annotated[
    str | None, typer.Option(metavar="POLICY", help="Cache of model responses: off, read, read-write or refresh.")
]
Resume = Annotated[
    str,
    typer.Option(
        metavar="auto|never|errors|RUN",
        help="auto: the latest run if it is unfinished. never: start a new run. errors: retry the trials of the "
        "latest run that ended in an error. RUN: this run, rejected if it does not match the suite; errors:RUN to "
        "retry its errors.",
    ),
]
AllowChangedCode = Annotated[bool, typer.Option("--allow-changed-code", help="Resume even if the code has changed.")]
Tags = Annotated[Texts, typer.Option(metavar="KEY=VALUE", help="Tag the run (repeatable).")]
FailUnder = Annotated[
    float | None,
    typer.Option(metavar="RATE", min=0, max=1, help="Exit 1 if the pass rate is lower (errors count as failures)."),
]
MaxErrorShare = Annotated[
    float | None,
    typer.Option(metavar="SHARE", min=0, max=1, help="Exit 4 if more trials end in an error (default: 0.1)."),
]
Trace = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send trials as OpenTelemetry traces to this OTLP/HTTP address; env for OTEL_EXPORTER_OTLP_ENDPOINT.",
    ),
]

# Of commands that compare.
METRIC = typer.Option(metavar="NAME", help="passed, value, latency_ms, tokens, cost_usd, or a metric's name.")
Cluster = Annotated[
    str | None, typer.Option(metavar="KEY", help="Metadata key: samples with the same value form a cluster.")
]
Bounds = Annotated[
    Texts, typer.Option(metavar="METRIC=LOW:HIGH", help="Range of a metric that declares none, such as f1=0:1.")
]
RandomSeed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the random number generator.")]
LabelFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Correct the judge with people's labels: a .csv or .jsonl with id, label and experiment, or `store`.",
    ),
]
ByVerdict = Annotated[
    bool,
    typer.Option(
        "--labels-by-verdict", help="The labelled trials were sampled at random within each verdict of the judge."
    ),
]
LabelsDrawn = Annotated[
    bool,
    typer.Option(
        "--labels-drawn", help="The labelled trials were drawn at random (known of labels of a review in the viewer)."
    ),
]
LABEL_NAME = typer.Option(metavar="NAME", help="The set of labels to use, if the store has several.")
OtherUsers = Annotated[bool, typer.Option("--other-users", help="Compare runs even if their simulated users differ.")]


def start_logging(*, quiet: bool = False, text: bool = False) -> None:
    """Log to standard error until the command ends: as JSON if the settings say so, or as text if `text` is set."""
    import logging

    from fairtrial.cli import screen
    from fairtrial.cli.settings import load_settings

    log_format = load_settings()["log-format"]
    if text or log_format == "json":
        screen.start_logging(log_format, logging.WARNING if quiet else logging.INFO)


def settings_with(store: str | None) -> tuple[Settings, str]:
    """Return the settings and the address of the store: from the option, or else from the settings."""
    from fairtrial.cli.settings import load_settings

    settings = load_settings()
    return settings, store or settings.store


def open_existing(store: str | None) -> RunStore:
    """Open an existing store. A missing one is not created: an empty store would hide a wrong path."""
    _, url = settings_with(store)
    path = url.removeprefix("sqlite:///") if url.startswith("sqlite:///") or "://" not in url else None
    if path is not None and path != "memory:" and not Path(path).exists():
        origin = "" if store else "; `fairtrial doctor --settings` shows where this path comes from"
        raise UserError(
            f"there is no store at {path}",
            f"create one with: fairtrial run SUITE, or choose another with --store{origin}",
        )
    return open_named(url)


def open_named(url: str, transcripts: str | None = None) -> RunStore:
    """Open a store; create it if it does not exist. `transcripts` is the place for those of new runs."""
    from fairtrial.cli.settings import load_settings
    from fairtrial.store import open_store

    place = transcripts or (None if url.startswith("memory:") else load_settings()["transcripts"])
    return translate_open_errors(url, lambda url: open_store(url, transcripts=place))


_REFUSALS = ("authentication failed", "does not exist", "no pg_hba.conf entry", "Name or service not known")
"""What a database says to an address that is wrong: waiting would not help."""


def open_when_available(url: str, transcripts: str | None = None) -> RunStore:
    """Open a store; one that is unavailable is waited for, as during a run.

    Raises:
        EndedEarlyError: it was unavailable for too long.
    """
    from fairtrial.errors import StoreUnavailableError
    from fairtrial.runs.writer import call_store

    def attempt() -> RunStore | StoreUnavailableError:
        try:
            return open_named(url, transcripts)
        except StoreUnavailableError as error:
            if any(words in str(error) for words in _REFUSALS):
                return error
            raise

    try:
        opened = call_store(attempt, "opening the store")
    except StoreUnavailableError as error:
        raise EndedEarlyError(str(error), NOTHING_EXECUTED) from None
    if isinstance(opened, StoreUnavailableError):
        raise opened
    return opened


def translate_open_errors[T](url: str, open: Callable[[str], T]) -> T:
    """Call `open(url)`; a file that is not a database raises a `UserError`."""
    from fairtrial.errors import StoreError

    try:
        return open(url)
    except StoreError as error:
        if "is not a database" not in str(error):
            raise
        path = url.removeprefix("sqlite:///")
        raise UserError(
            f"{path} exists but is not a Fairtrial database",
            "move it, or choose another with --store or FAIRTRIAL_STORE",
        ) from None


def mailbox_url(option: str | None) -> str:
    """Return the address of the fleet's queue: from the option, or else from the settings."""
    from fairtrial.cli.settings import load_settings

    url: str | None = option or load_settings()["mailbox"]
    if not url:
        raise UserError(
            "no queue is configured",
            'set --mailbox redis://host:6379, FAIRTRIAL_MAILBOX, or mailbox = "..." under [tool.fairtrial]',
        )
    return url
