"""`fairtrial run`: run suites, or a prompt with several models."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import ExitCode, UserError

if TYPE_CHECKING:
    from fairtrial.cli.adhoc import AdHocOptions
    from fairtrial.cli.running import RunOptions, RunOutcome
    from fairtrial.cli.settings import Settings
    from fairtrial.cli.user_errors import ExitCode
    from fairtrial.reports import EvalReport
    from fairtrial.reports.figures.analysis_plan import AnalysisPlan
    from fairtrial.runs.request import Resume
    from fairtrial.store.protocol import RunStore
    from fairtrial.suites import EvalSuite


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(run)


def run(
    ctx: typer.Context,
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SUITE]...", help="file.py, file.py:name, module or module:name (default: from pyproject.toml)."
        ),
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option("--max-samples", metavar="N", min=1, help="Run only the first N samples.")
    ] = None,
    sample: Annotated[
        list[str] | None, typer.Option("--sample", metavar="ID", help="Run only this sample (repeatable).")
    ] = None,
    filter: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", metavar="KEY=VALUE", help="Run only samples with this metadata (repeatable: all must match)."
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", metavar="N", min=1, help="Run every sample N times.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", min=1, help="Maximum number of trials in flight.")
    ] = None,
    experiment: Annotated[
        list[str] | None, typer.Option("--experiment", metavar="NAME", help="Run only this experiment (repeatable).")
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a parameter of every experiment; VALUE is JSON or text (repeatable).",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, help="Seed from which the seeds of trials are derived.")
    ] = None,
    max_cost: options.MaxCost = None,
    strict_cost: options.StrictCost = False,
    max_same_errors: options.MaxSameErrors = None,
    strict_packages: options.StrictPackages = False,
    store: options.Store = None,
    mailbox: Annotated[
        str | None,
        typer.Option(
            "--mailbox",
            metavar="URL",
            help="Submit to this queue, for a fleet of workers: redis://host:port, postgresql://host/database or "
            "sqs://region/prefix.",
        ),
    ] = None,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Submit to the queue configured in FAIRTRIAL_MAILBOX or pyproject.toml.")
    ] = False,
    cache: Annotated[
        str | None,
        typer.Option("--cache", metavar="POLICY", help="Cache of model responses: off, read, read-write or refresh."),
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|never|errors|RUN",
            help="auto: the latest run if it is unfinished. never: start a new run. errors: retry the trials of the "
            "latest run that ended in an error. RUN: this run, rejected if it does not match the suite; errors:RUN to "
            "retry its errors.",
        ),
    ] = "auto",
    allow_changed_code: Annotated[
        bool, typer.Option("--allow-changed-code", help="Resume even if the code has changed.")
    ] = False,
    once: Annotated[
        str | None,
        typer.Option(
            "--once",
            metavar="KEY",
            help="Execute the run of this key once: the same key resumes it, and only reports it when it is finished.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Analysis plan to store before the first trial (default: [tool.fairtrial.plan]).",
        ),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", metavar="KEY=VALUE", help="Tag the run (repeatable).")
    ] = None,
    fail_under: Annotated[
        float | None,
        typer.Option(
            "--fail-under",
            metavar="RATE",
            min=0,
            max=1,
            help="Exit 1 if the pass rate is lower (errors count as failures).",
        ),
    ] = None,
    max_error_share: Annotated[
        float | None,
        typer.Option(
            "--max-error-share",
            metavar="SHARE",
            min=0,
            max=1,
            help="Exit 4 if more trials end in an error (default: 0.1).",
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", metavar="FILE[:NAME]", help="Run a prompt without a suite: file.py:name or a .md file."
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", metavar="FILE", help="With --prompt: a .jsonl, .json, .csv or .parquet file."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column", metavar="FIELD=COLUMN", help="With --dataset: map a column, as in input=question or input=a,b."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="With --prompt: PROVIDER:NAME (repeatable: models are compared). Providers: openai, anthropic, "
            "azure, google, gemini, vertex, bedrock, bedrock-runtime, mistral, openrouter, ollama, vllm.",
        ),
    ] = None,
    evaluator: Annotated[
        list[str] | None,
        typer.Option("--evaluator", metavar="NAME", help="With --prompt: exact_match, contains, ... or file.py:name."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the figures: no progress, no report.")
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="URL",
            help="Send trials as OpenTelemetry traces to this OTLP/HTTP address; env for OTEL_EXPORTER_OTLP_ENDPOINT.",
        ),
    ] = None,
    trace_sample: Annotated[
        float | None,
        typer.Option(
            "--trace-sample",
            metavar="SHARE",
            min=0,
            max=1,
            help="With --trace: send this share of passed trials (default: 1); failed ones are always sent.",
        ),
    ] = None,
    trace_content: options.TraceContent = False,
    trace_profile: options.TraceProfile = None,
    receive_traces: Annotated[
        int | None,
        typer.Option(
            "--receive-traces",
            metavar="PORT",
            min=0,
            max=65535,
            help="Receive the spans of the application on this port (OTLP/HTTP, this machine only; 0: any free port).",
        ),
    ] = None,
    trace_wait: Annotated[
        float | None,
        typer.Option(
            "--trace-wait",
            metavar="SECONDS",
            min=0.05,
            max=3000,
            help="With --receive-traces: how long a trial waits for its spans (default: 6).",
        ),
    ] = None,
    health_port: options.HealthPort = None,
    health_host: options.HealthHost = "127.0.0.1",
    log_format: options.LogFormat = None,
    json: options.Json = False,
) -> int:
    """Run suites: every sample in every experiment. Resumes an unfinished run.

    Options that select samples (--max-samples, --sample, --filter) start a separate run, listed as `suite+part`, so
    that it is never mistaken for a run of the whole dataset.

    \b
    Examples:
      fairtrial run                                      the project's suites
      fairtrial run evals.py --max-samples 5             a quick test
      fairtrial run evals.py:support --repeats 3 --experiment terse
      fairtrial run evals.py --sample t07 --set style=terse
      fairtrial run evals.py --fail-under 0.8            for CI: exit 1 if lower
      fairtrial run evals.py --once nightly-7            for schedulers: only once
      fairtrial run evals.py --plan plan.toml            as planned beforehand
      fairtrial run --prompt prompts.py:ask --dataset q.jsonl \\
          --model openai:gpt-6.1-sol --model anthropic:claude-opus-5 \\
          --evaluator exact_match                        compare two models
    """
    from fairtrial.cli import adhoc
    from fairtrial.cli.options import parse_pairs
    from fairtrial.cli.running import RunOptions, Selection, selected, stdout_for_json
    from fairtrial.cli.screen import print_json
    from fairtrial.runs.request import AUTO, parse_resume

    options.start_logging(log_format, quiet=quiet)
    settings, url = options.settings_with(store)
    selection = Selection(
        max_samples=max_samples,
        samples=sample or (),
        filters=filter or (),
        repeats=repeats,
        concurrency=concurrency or settings["concurrency"],
        experiments=experiment or (),
        params=set or (),
        seed=seed,
        max_cost=max_cost,
        strict_cost=strict_cost,
        max_same_errors=settings["max-same-errors"] if max_same_errors is None else max_same_errors,
        strict_packages=strict_packages,
    )
    if fleet:  # A setting alone never sends a run to a fleet: that must be explicit.
        mailbox = options.mailbox_url(mailbox)
    if mailbox:
        selection.check_for_fleet()
    tags = tuple(parse_pairs("--tag", tag or (), as_text=True))
    adhoc_options = adhoc.AdHocOptions(prompt, dataset, tuple(model or ()), tuple(evaluator or ()), tuple(column or ()))
    with (
        stdout_for_json(json),
        _cached(cache or settings["cache"], settings),
        settings.prices(),
        _probed(health_host, health_port) as probes,
        _traced(trace, trace_sample, trace_content, trace_profile) as tracers,
    ):
        planned = [
            (selected(suite, selection), words) for suite, words in _planned(suites or (), adhoc_options, settings)
        ]
        _receive(planned, receive_traces, trace_wait, mailbox)
        wanted = parse_resume(resume)
        if wanted.run_id is not None and len(planned) > 1:
            raise UserError("--resume RUN needs exactly one suite", "give one suite")
        if once is not None and (not once or wanted != AUTO):
            raise UserError("--once needs a key, and cannot be combined with --resume", "omit --resume")
        plans = _plans(plan, settings, [suite.name for suite, _ in planned])
        opened = options.open_when_available(url)
        run_options = RunOptions(
            store=opened,
            words=ctx.obj or ("run",),
            mailbox=mailbox,
            resume=resume if wanted.run_id is None else _with_id(opened, wanted),
            allow_changed_code=allow_changed_code,
            once=once,
            quiet=quiet,
            json=json,
            compares=len(adhoc_options.models) > 1,
            tags=tags,
            observers=(*probes, *tracers),
        )
        code, facts = _run_all(
            [
                (suite, replace(run_options, base=words, plan=chosen))
                for (suite, words), chosen in zip(planned, plans, strict=True)
            ],
            fail_under=fail_under,
            max_error_share=settings["max-error-share"] if max_error_share is None else max_error_share,
        )
    if json and code != ExitCode.INTERRUPTED:
        print_json({"format": "fairtrial.run/1", "exit_code": int(code), "runs": facts})
    return int(code)


def _with_id(store: RunStore, wanted: Resume) -> str:
    """Return what to resume with the id of the run that was named in any way."""
    from fairtrial.cli.options import find_run
    from fairtrial.runs.writer import call_store

    run_id = call_store(lambda: find_run(store, str(wanted.run_id)), "finding the run").run.run_id
    return f"errors:{run_id}" if wanted.retry_errors else run_id


def _planned(
    suites: Sequence[str], adhoc_options: AdHocOptions, settings: Settings
) -> list[tuple[EvalSuite, Sequence[str]]]:
    """Return the suites to run, each with the command-line words that name it."""
    from fairtrial.cli import adhoc
    from fairtrial.cli.adhoc import load

    if not adhoc_options:
        return [(load(where), (where,)) for where in _suites_to_run(suites, settings)]
    if suites:
        raise UserError("--prompt, --dataset, --model and --evaluator cannot be combined with SUITE", "omit SUITE")
    return [(adhoc.suite_of(adhoc_options), adhoc_options.words)]


def _suites_to_run(suites: Sequence[str], settings: Settings) -> Sequence[str]:
    chosen: Sequence[str] = suites or settings["suites"]
    if not chosen:
        raise UserError(
            "no suite is given, and no pyproject.toml here or in a parent folder lists any",
            'give one, as in: fairtrial run evals.py; or set suites = ["evals.py"] under [tool.fairtrial]',
        )
    return chosen


def _plans(file: Path | None, settings: Settings, suites: Sequence[str]) -> list[AnalysisPlan | None]:
    """Return the analysis plan of each suite: that of the file, or that of pyproject.toml if it is for the suite."""
    from fairtrial.reports.figures.analysis_plan import AnalysisPlan

    if file is not None:
        plan = AnalysisPlan.load(file)
        if other := next((name for name in suites if not plan.is_for(name)), None):
            raise UserError(f"the plan in {file} is for suite {plan.suite!r} (got {other!r})", "run that suite alone")
    elif settings.plan and settings.root is not None:
        plan = AnalysisPlan.load(settings.root / "pyproject.toml", "tool.fairtrial.plan")
    else:
        return [None] * len(suites)
    return [plan if plan.is_for(name) else None for name in suites]


@contextmanager
def _cached(policy: Any, settings: Settings) -> Iterator[None]:
    """Let adapters without a cache use the project's response cache."""
    from fairtrial.cli.running import cache_file
    from fairtrial.models.cache import ResponseCache, share_cache

    if policy == "off":
        yield
        return
    cache = ResponseCache(cache_file(settings.root), policy)
    before = share_cache(cache)
    try:
        yield
    finally:
        share_cache(before)
        cache.close()


@contextmanager
def _probed(host: str, port: int | None) -> Iterator[Sequence[Any]]:
    """Serve health probes during the runs if a port is given; yields the observers they need."""
    if port is None:
        yield ()
        return
    from fairtrial.cli.screen import note
    from fairtrial.fleet.ops.health import ClientProbe

    probe = ClientProbe(host, port)
    with probe.serving():
        if port == 0 and probe.address is not None:
            note("serving probes on http://{}:{}/health".format(*probe.address))
        yield (probe,)


def _receive(
    planned: Sequence[tuple[EvalSuite, Any]], port: int | None, wait_seconds: float | None, mailbox: str | None
) -> None:
    """Give the suites a receiver of traces, if a port is given."""
    if port is None:
        if wait_seconds is not None:
            raise UserError("--trace-wait needs --receive-traces PORT", "add --receive-traces 4318")
        return
    if mailbox:
        raise UserError(
            "--receive-traces cannot be combined with a fleet, whose workers receive traces themselves",
            "give the suite its receiver: EvalSuite(..., traces=TraceReceiver(port=4318))",
        )
    from fairtrial.integrations.tracing.receiver import TraceReceiver

    receiver = TraceReceiver(port=port, trace_wait_seconds=6.0 if wait_seconds is None else wait_seconds)
    for suite, _ in planned:
        suite.traces = receiver


@contextmanager
def _traced(url: str | None, sample: float | None, content: bool, profile: str | None) -> Iterator[Sequence[Any]]:
    """Export the runs as traces if an address is given; yields the observers for that."""
    if url is None:
        if sample is not None or content or profile is not None:
            raise UserError("--trace-sample, --trace-content and --trace-profile need --trace URL", "add --trace URL")
        yield ()
        return
    from fairtrial.cli.screen import note
    from fairtrial.integrations.tracing.exporter import TraceExporter

    exporter = TraceExporter(url, sample=1.0 if sample is None else sample, content=content, profile=profile)
    try:
        yield (exporter,)
    finally:
        note(str(exporter.close()))


def _run_all(
    chosen: Sequence[tuple[EvalSuite, RunOptions]], *, fail_under: float | None, max_error_share: float
) -> tuple[ExitCode, list[dict[str, Any]]]:
    """Run suites one after the other; returns the most severe exit code, and what to print as JSON if requested."""
    from fairtrial.cli.running import RunInterruptedError, exit_status, reported, run_suite
    from fairtrial.cli.screen import out

    codes: list[ExitCode] = []
    facts: list[dict[str, Any]] = []

    def show(outcome: RunOutcome, run_options: RunOptions) -> tuple[ExitCode, list[dict[str, Any]]]:
        code, reason = exit_status(outcome.report, fail_under=fail_under, max_error_share=max_error_share)
        if run_options.json:
            return code, [_facts(outcome, run_options, code, reason)]
        if codes and not run_options.quiet:
            out().print()
        _show(outcome, run_options, code, reason)
        return code, []

    for suite, run_options in chosen:
        try:
            outcome = run_suite(suite, run_options)
            code, more = reported(run_options, outcome.report, partial(show, outcome, run_options))
        except RunInterruptedError:
            return ExitCode.INTERRUPTED, facts
        codes.append(code)
        facts += more
    return min(codes, key=_ORDER.index), facts


def _facts(outcome: RunOutcome, run_options: RunOptions, code: ExitCode, reason: str) -> dict[str, Any]:
    from fairtrial.cli.options import compared, record_of, report_record
    from fairtrial.reports.run_names import RunName, name_of

    return {
        "name": name_of(outcome.report.run),
        "resumed": outcome.resumed,
        "exit_code": int(code),
        "reason": reason or None,
        "report": report_record(run_options.store, RunName(outcome.report.run)),
        "comparison": record_of(compared(outcome.report)) if run_options.compares else None,
    }


_ORDER = (4, 1, 3, 0)
"""Codes, the one that matters most first: figures full of errors say nothing about a floor."""


def _show(outcome: RunOutcome, run_options: RunOptions, code: int, reason: str) -> None:
    from fairtrial.base.formatting import count, rate
    from fairtrial.cli.options import compared, show_report
    from fairtrial.cli.screen import err, out, sentence
    from fairtrial.reports.figures.error_groups import read_error_groups
    from fairtrial.reports.render.safe_text import plain
    from fairtrial.reports.run_names import RunName, name_of

    report = outcome.report
    if run_options.quiet:
        for name in report.experiments:
            part = report[name]
            errors = count(sum(part.errors.values()), "error")
            figures = f"pass rate {rate(part.pass_rate)}, {part.successful:,} scored, {errors}"
            out().print(f"{name_of(report.run)}:{plain(name)}  {figures}", soft_wrap=True)
    else:
        show_report(run_options.store, RunName(report.run), json=False, next_commands=not run_options.compares)
    if run_options.compares:
        out().print()
        out().print(compared(report))
    if code:
        sentence(err(), f"exit {int(code)}: {reason}", style="bold red")
    if code == 4:
        for group in read_error_groups(report.store, report.run_id)[:3]:
            sentence(err(), f"  {plain(str(group))}")
        if any(report.errors.values()):
            sentence(err(), f"  {_error_remedy(report, run_options)}")


def _error_remedy(report: EvalReport, run_options: RunOptions) -> str:
    """Return what to do about the errors of a run: outputs that only lack a score need no trial executed again."""
    if any(outcome != "scorer_error" and count for outcome, count in report.errors.items()):
        return "once that is fixed, retry them with --resume errors"
    again = shlex.join(["fairtrial", "rescore", report.run_id, *run_options.base])
    return f"the outputs are stored: the same command scores them; if you change the evaluator, use: {again}"
