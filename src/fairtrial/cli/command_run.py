"""`fairtrial run`: run suites."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from fairtrial.base.formatting import count, rate
from fairtrial.cli import options
from fairtrial.cli.adhoc import load
from fairtrial.cli.running import (
    RunInterruptedError,
    RunOptions,
    RunOutcome,
    Selection,
    cache_file,
    exit_status,
    reported,
    run_suite,
    selected,
    stdout_for_json,
)
from fairtrial.cli.screen import err, note, out, print_json, sentence
from fairtrial.cli.user_errors import ExitCode, UserError
from fairtrial.reports.figures.error_groups import read_error_groups
from fairtrial.reports.render.safe_text import plain
from fairtrial.reports.run_names import RunName, name_of
from fairtrial.runs.plan import AUTO, parse_resume
from fairtrial.runs.writer import call_store

if TYPE_CHECKING:
    from fairtrial.cli.command_view import LiveViewer
    from fairtrial.cli.settings import Settings
    from fairtrial.reports import EvalReport
    from fairtrial.reports.figures.analysis_plan import AnalysisPlan
    from fairtrial.runs.plan import Resume
    from fairtrial.store.protocol import RunStore
    from fairtrial.suites import EvalSuite


class Command(TyperCommand):
    """A command whose option `--mailbox` needs no address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give `--mailbox` an empty value if the next word is no address, but a suite, say."""
        pairs = pairwise([*args, ""])
        alone = [word == "--mailbox" and not _ADDRESS.search(after) for word, after in pairs]
        return super().parse_args(ctx, [f"{word}=" if bare else word for word, bare in zip(args, alone, strict=True)])


_ADDRESS = re.compile(r"://|:\d+$")

type Suites = list[tuple[EvalSuite, Sequence[str]]]
"""Suites to run, each with the words of the command line that name it."""


def run(
    ctx: typer.Context,
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SUITE]...", help="file.py, file.py:name, module or module:name (default: from pyproject.toml)."
        ),
    ] = None,
    max_samples: options.MaxSamples = None,
    sample: options.Samples = None,
    filter: options.Filters = None,
    repeats: options.Repeats = None,
    concurrency: options.Concurrency = None,
    processes: options.Processes = None,
    experiment: options.Experiments = None,
    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Set a parameter of every experiment; VALUE is JSON or text (repeatable)."
        ),
    ] = None,
    seed: options.TrialSeed = None,
    max_cost: options.MaxCost = None,
    store: options.Store = None,
    mailbox: Annotated[
        str | None,
        typer.Option(
            metavar="[URL]",
            help="Submit to a queue, for a fleet of workers: redis://host:port, postgresql://host/database or "
            "sqs://region/prefix; without URL, to the queue in FAIRTRIAL_MAILBOX or pyproject.toml.",
        ),
    ] = None,
    batch: Annotated[
        bool,
        typer.Option(
            "--batch", help="Send model calls in batches of OpenAI and Anthropic: half price, within a day per turn."
        ),
    ] = False,
    transcripts: options.Transcripts = None,
    cache: options.Cache = None,
    resume: options.Resume = "auto",
    allow_changed_code: options.AllowChangedCode = False,
    once: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Execute the run of this key once: the same key resumes it, and only reports it when it is finished.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Analysis plan to store before the first trial (default: [tool.fairtrial.plan])."
        ),
    ] = None,
    tag: options.Tags = None,
    fail_under: options.FailUnder = None,
    max_error_share: options.MaxErrorShare = None,
    trace: options.Trace = None,
    health_port: options.HealthPort = None,
    view: Annotated[
        bool, typer.Option("--view", help="Show the run in a browser while it goes on; see `fairtrial view`.")
    ] = False,
    quiet: options.Quiet = False,
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
      fairtrial run evals.py --processes 4               on four processors
      fairtrial run evals.py --view                      watch it in a browser
      fairtrial run evals.py --fail-under 0.8            for CI: exit 1 if lower
      fairtrial run evals.py --once nightly-7            for schedulers: only once
      fairtrial run evals.py --plan plan.toml            as planned beforehand
      fairtrial run evals.py --batch                     at half price, in a day
      fairtrial run evals.py --mailbox                   by a fleet of workers
    """
    selection = Selection(
        max_samples=max_samples,
        samples=sample or (),
        filters=filter or (),
        repeats=repeats,
        concurrency=concurrency,
        processes=processes,
        experiments=experiment or (),
        params=set or (),
        seed=seed,
        max_cost=max_cost,
    )
    return execute(
        ctx,
        partial(_named_suites, suites or ()),
        selection,
        store=store,
        mailbox=mailbox,
        batch=batch,
        transcripts=transcripts,
        cache=cache,
        resume=resume,
        allow_changed_code=allow_changed_code,
        once=once,
        plan=plan,
        tags=tag or (),
        fail_under=fail_under,
        max_error_share=max_error_share,
        trace=trace,
        health_port=health_port,
        view=view,
        quiet=quiet,
        json=json,
    )


def execute(
    ctx: typer.Context,
    load: Callable[[Settings], Suites],
    selection: Selection,
    *,
    store: str | None,
    mailbox: str | None = None,
    batch: bool = False,
    transcripts: str | None = None,
    cache: str | None,
    resume: str,
    allow_changed_code: bool,
    once: str | None = None,
    plan: Path | None = None,
    tags: Sequence[str],
    fail_under: float | None,
    max_error_share: float | None,
    trace: str | None,
    health_port: int | None = None,
    view: bool = False,
    quiet: bool,
    json: bool,
    compares: bool = False,
) -> int:
    """Execute the selected part of suites with the options of `run` or `try`; returns the exit code."""
    options.start_logging(quiet=quiet)
    settings, url = options.settings_with(store)
    selection = replace(
        selection,
        concurrency=selection.concurrency or settings["concurrency"],
        processes=selection.processes or (settings["processes"] if mailbox is None else None),
        strict_cost=settings["strict-cost"],
        max_same_errors=settings["max-same-errors"],
    )
    if mailbox is not None:  # A setting alone never sends a run to a fleet: that must be explicit.
        mailbox = options.mailbox_url(mailbox)
        if batch:
            raise UserError(
                "--batch cannot be used with a fleet: its workers would wait for hours and lose their leases",
                "omit --mailbox to run here, where 20,000 trials can wait at once",
            )
        selection.check_for_fleet()
    tag_pairs = tuple(options.parse_pairs("--tag", tags, as_text=True))
    with (
        ExitStack() as viewing,
        stdout_for_json(json),
        _cached(cache or settings["cache"], settings),
        _batched(batch),
        settings.prices(),
        _probed(settings["health-host"], health_port) as probes,
        _traced(trace, settings) as tracers,
    ):
        planned = [(selected(suite, selection), words) for suite, words in load(settings)]
        _receive(planned, settings, mailbox)
        if batch:
            _check_batches(planned)
        wanted = parse_resume(resume)
        if wanted.run_id is not None and len(planned) > 1:
            raise UserError("--resume RUN needs exactly one suite", "give one suite")
        if once is not None and (not once or wanted != AUTO):
            raise UserError("--once needs a key, and cannot be combined with --resume", "omit --resume")
        plans = _plans(plan, settings, [suite.name for suite, _ in planned])
        opened = options.open_when_available(url, transcripts)
        viewer = viewing.enter_context(_viewer(url, json=json)) if view else None
        run_options = RunOptions(
            store=opened,
            words=ctx.obj or (str(ctx.info_name),),
            mailbox=mailbox,
            resume=resume if wanted.run_id is None else _with_id(opened, wanted),
            allow_changed_code=allow_changed_code,
            once=once,
            quiet=quiet,
            json=json,
            compares=compares,
            tags=tag_pairs,
            observers=(*probes, *tracers, *([viewer] if viewer else ())),
        )
        code, facts = _run_all(
            [
                (suite, replace(run_options, base=words, plan=chosen))
                for (suite, words), chosen in zip(planned, plans, strict=True)
            ],
            fail_under=fail_under,
            max_error_share=settings["max-error-share"] if max_error_share is None else max_error_share,
        )
        if viewer is not None and not json and code != ExitCode.INTERRUPTED:
            viewing.callback(viewer.wait)  # When everything else has ended.
    if json and code != ExitCode.INTERRUPTED:
        print_json({"format": "fairtrial.run/1", "exit_code": int(code), "runs": facts})
    return int(code)


def _with_id(store: RunStore, wanted: Resume) -> str:
    """Return what to resume with the id of the run that was named in any way."""
    run_id = call_store(lambda: options.find_run(store, str(wanted.run_id)), "finding the run").run.run_id
    return f"errors:{run_id}" if wanted.retry_errors else run_id


def _named_suites(names: Sequence[str], settings: Settings) -> Suites:
    return [(load(where), (where,)) for where in _suites_to_run(names, settings)]


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
def _batched(batch: bool) -> Iterator[None]:
    """Let adapters without batches of their own send their calls in batches."""
    if not batch:
        yield
        return
    from fairtrial.models.batches.batching import Batching, share_batching

    before = share_batching(Batching())
    try:
        yield
    finally:
        share_batching(before)


def _check_batches(planned: Suites) -> None:
    """Reject suites whose trials wait in other processes, which cannot share a batch."""
    from fairtrial.trials.task import resolve_task

    for suite, _ in planned:
        if suite.config.processes > 1:
            raise UserError(
                f"--batch cannot be used with several processes (suite {suite.name!r} has {suite.config.processes})",
                "add --processes 1: 20,000 trials can wait in one",
            )
        tasks = [suite.task, *(experiment.task for experiment in suite.experiments)]
        if any(task is not None and resolve_task(task).isolate for task in tasks):
            raise UserError(
                f"--batch cannot be used with isolated tasks, which run in other processes (suite {suite.name!r})",
                "make the task one that needs no isolation, or omit --batch",
            )


@contextmanager
def _probed(host: str, port: int | None) -> Iterator[Sequence[Any]]:
    """Serve health probes during the runs if a port is given; yields the observers they need."""
    if port is None:
        yield ()
        return
    from fairtrial.fleet.ops.health import ClientProbe

    probe = ClientProbe(host, port)
    with probe.serving():
        if port == 0 and probe.address is not None:
            note("serving probes on http://{}:{}/health".format(*probe.address))
        yield (probe,)


def _viewer(url: str, *, json: bool) -> AbstractContextManager[LiveViewer]:
    """Serve the viewer; a browser is opened only for somebody at a terminal."""
    from fairtrial.cli.command_view import LiveViewer

    return LiveViewer(url, opens=sys.stdout.isatty() and not json).serving()


def _receive(planned: Suites, settings: Settings, mailbox: str | None) -> None:
    """Give suites without a receiver of traces one, if the settings name a port."""
    without = [suite for suite, _ in planned if suite.traces is None]
    if settings["tracing.receive"] is None or not without:
        return
    if mailbox:
        raise UserError(
            "the setting tracing.receive cannot be combined with a fleet, whose workers receive traces themselves",
            "give the suite its receiver: EvalSuite(..., traces=TraceReceiver(port=4318))",
        )
    from fairtrial.integrations.tracing.receiver import TraceReceiver

    receiver = TraceReceiver(port=settings["tracing.receive"], trace_wait_seconds=settings["tracing.wait"])
    for suite in without:
        suite.traces = receiver


@contextmanager
def _traced(url: str | None, settings: Settings) -> Iterator[Sequence[Any]]:
    """Export the runs as traces if an address is given; yields the observers for that."""
    if url is None:
        yield ()
        return
    from fairtrial.integrations.tracing.exporter import TraceExporter

    sample, content, profile = (settings[f"tracing.{name}"] for name in ("sample", "content", "profile"))
    exporter = TraceExporter(url, sample=sample, content=content, profile=profile)
    try:
        yield (exporter,)
    finally:
        note(str(exporter.close()))


def _run_all(
    chosen: Sequence[tuple[EvalSuite, RunOptions]], *, fail_under: float | None, max_error_share: float
) -> tuple[ExitCode, list[dict[str, Any]]]:
    """Run suites one after the other; returns the most severe exit code, and what to print as JSON if requested."""
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
    return {
        "name": name_of(outcome.report.run),
        "resumed": outcome.resumed,
        "exit_code": int(code),
        "reason": reason or None,
        "report": options.report_record(run_options.store, RunName(outcome.report.run)),
        "comparison": options.record_of(options.compared(outcome.report)) if run_options.compares else None,
    }


_ORDER = (4, 1, 3, 0)
"""Codes, the one that matters most first: figures full of errors say nothing about a floor."""


def _show(outcome: RunOutcome, run_options: RunOptions, code: int, reason: str) -> None:
    report = outcome.report
    if run_options.quiet:
        for name in report.experiments:
            part = report[name]
            errors = count(sum(part.errors.values()), "error")
            figures = f"pass rate {rate(part.pass_rate)}, {part.successful:,} scored, {errors}"
            out().print(f"{name_of(report.run)}:{plain(name)}  {figures}", soft_wrap=True)
    else:
        options.show_report(run_options.store, RunName(report.run), json=False, next_commands=not run_options.compares)
    if run_options.compares:
        out().print()
        out().print(options.compared(report))
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
    stored = "the outputs are stored: the same command scores them"
    if run_options.base[0] == "try":
        return stored
    again = shlex.join(["fairtrial", "rescore", report.run_id, *run_options.base])
    return f"{stored}; if you change the evaluator, use: {again}"
