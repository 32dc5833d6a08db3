"""`fairtrial run`: run suites, or a prompt against models."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options

if TYPE_CHECKING:
    from fairtrial.cli.adhoc import Asked
    from fairtrial.cli.faults import ExitCode
    from fairtrial.cli.running import Orders, Ran
    from fairtrial.cli.settings import Settings
    from fairtrial.report import EvalReport
    from fairtrial.suites import EvalSuite


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(run)


def run(
    ctx: typer.Context,
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SUITE]...", help="file.py, file.py:name, module or module:name; else the project's."),
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option("--max-samples", metavar="N", min=1, help="Only the first N samples.")
    ] = None,
    sample: Annotated[
        list[str] | None, typer.Option("--sample", metavar="ID", help="Only this sample; may be repeated.")
    ] = None,
    filter: Annotated[
        list[str] | None,
        typer.Option("--filter", metavar="KEY=VALUE", help="Only samples with this metadata; all must hold."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", metavar="N", min=1, help="Try every sample N times.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", min=1, help="Trials in flight at once.")
    ] = None,
    experiment: Annotated[
        list[str] | None, typer.Option("--experiment", metavar="NAME", help="Only this experiment; may be repeated.")
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A parameter of every experiment; JSON, or else text."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, help="What trials' seeds come from.")
    ] = None,
    max_cost: options.MaxCost = None,
    strict_cost: options.StrictCost = False,
    store: options.Store = None,
    mailbox: Annotated[
        str | None, typer.Option("--mailbox", metavar="URL", help="Let a fleet's workers do it: redis://...")
    ] = None,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="The same, by the queue of FAIRTRIAL_MAILBOX or pyproject.toml.")
    ] = False,
    cache: Annotated[
        str | None,
        typer.Option("--cache", metavar="POLICY", help="Keep models' answers: off, read, read-write or refresh."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew even if a run is unfinished.")] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Try trials of the latest run again that ended in an error.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Resume this run; refused if it differs from the suite."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Resume even if the code has changed.")] = False,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="KEY=VALUE", help="A label for the run.")] = None,
    fail_under: Annotated[
        float | None,
        typer.Option("--fail-under", metavar="RATE", min=0, max=1, help="Exit 1 if fewer pass; errors are failures."),
    ] = None,
    max_error_share: Annotated[
        float | None,
        typer.Option("--max-error-share", metavar="SHARE", min=0, max=1, help="Exit 4 above this; 0.1 unless set."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="FILE[:NAME]", help="Without a suite: a template in file.py:name or a .md."),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", metavar="FILE", help="With --prompt: .jsonl, .json, .csv or .parquet.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="With --prompt: openai:NAME or anthropic:NAME; several compare."),
    ] = None,
    evaluator: Annotated[
        list[str] | None,
        typer.Option("--evaluator", metavar="NAME", help="With --prompt: exact_match, contains, ... or file.py:name."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, and no report beyond its figures.")
    ] = False,
    health_port: options.HealthPort = None,
    health_host: options.HealthHost = "127.0.0.1",
    log_format: options.LogFormat = None,
    json: options.Json = False,
) -> int:
    """Run suites: every sample in every experiment. An unfinished run goes on where it stopped.

    Options that choose samples (--max-samples, --sample, --filter) make a run of that part, listed as `suite+part`,
    so that it never stands in for the whole.

    \b
    Examples:
      fairtrial run                                      what pyproject.toml names
      fairtrial run evals.py --max-samples 5             a quick look
      fairtrial run evals.py:support --repeats 3 --experiment terse
      fairtrial run evals.py --sample t07 --set style=terse
      fairtrial run evals.py --fail-under 0.8            for CI: exit 1 below
      fairtrial run --prompt prompts.py:ask --dataset q.jsonl \\
          --model openai:gpt-5 --model anthropic:claude-sonnet-4-5 \\
          --evaluator exact_match                        models side by side
    """
    from fairtrial.cli import adhoc
    from fairtrial.cli.faults import ExitCode, Mistake
    from fairtrial.cli.names import find_run
    from fairtrial.cli.pairs import parse_pairs
    from fairtrial.cli.running import Orders, stdout_for_facts
    from fairtrial.cli.screen import print_json
    from fairtrial.cli.selection import Selection, selected

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
    )
    if fleet:  # Never by a setting alone: nobody should send a run to a fleet without knowing.
        mailbox = options.mailbox_url(mailbox)
    if mailbox:
        selection.check_for_fleet()
    tags = tuple(parse_pairs("--tag", tag or (), as_text=True))
    asked = adhoc.Asked(prompt, dataset, tuple(model or ()), tuple(evaluator or ()))
    with (
        stdout_for_facts(json),
        _cached(cache or settings["cache"], settings),
        settings.prices(),
        _probed(health_host, health_port) as probes,
    ):
        planned = [(selected(suite, selection), words) for suite, words in _planned(suites or (), asked, settings)]
        if resume is not None and (fresh or len(planned) > 1):
            raise Mistake("--resume names one run of one suite", "name one suite, and leave --fresh out")
        opened = options.open_named(url)
        orders = Orders(
            store=opened,
            words=ctx.obj or ("run",),
            mailbox=mailbox,
            fresh=fresh,
            retry_errors=retry_errors,
            force=force,
            run_id=None if resume is None else find_run(opened, resume).run.run_id,
            quiet=quiet,
            json=json,
            compares=len(asked.models) > 1,
            tags=tags,
            probes=probes,
        )
        code, facts = _run_all(
            [(suite, replace(orders, base=words)) for suite, words in planned],
            fail_under=fail_under,
            max_error_share=settings["max-error-share"] if max_error_share is None else max_error_share,
        )
    if json and code != ExitCode.INTERRUPTED:
        print_json({"format": "fairtrial.run/1", "exit_code": int(code), "runs": facts})
    return int(code)


def _planned(suites: Sequence[str], asked: Asked, settings: Settings) -> list[tuple[EvalSuite, Sequence[str]]]:
    """The suites to run, each with the words that name it."""
    from fairtrial.cli import adhoc
    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.loading import load

    if not asked:
        return [(load(where), (where,)) for where in _chosen(suites, settings)]
    if suites:
        raise Mistake("--prompt, --dataset, --model and --evaluator make a suite of their own", "leave SUITE out")
    return [(adhoc.suite_of(asked), asked.words)]


def _chosen(suites: Sequence[str], settings: Settings) -> Sequence[str]:
    from fairtrial.cli.faults import Mistake

    chosen: Sequence[str] = suites or settings["suites"]
    if not chosen:
        raise Mistake(
            "no suite was named, and no pyproject.toml here or above names any",
            'name one, as in: fairtrial run evals.py; or set suites = ["evals.py"] under [tool.fairtrial]',
        )
    return chosen


@contextmanager
def _cached(policy: Any, settings: Settings) -> Iterator[None]:
    """Let adapters that have no cache of their own use the project's."""
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
    """Answer probes while runs go on, if there is a port for that; yields the observers that need."""
    if port is None:
        yield ()
        return
    from fairtrial.cli.screen import note
    from fairtrial.fleet.probe import ClientProbe

    probe = ClientProbe(host, port)
    with probe.serving():
        if port == 0 and probe.address is not None:
            note("probes are answered on http://{}:{}/health".format(*probe.address))
        yield (probe,)


def _run_all(
    chosen: Sequence[tuple[EvalSuite, Orders]], *, fail_under: float | None, max_error_share: float
) -> tuple[ExitCode, list[dict[str, Any]]]:
    """Run one suite after the other; the code that matters most, and facts if they were asked for."""
    from fairtrial.cli.faults import ExitCode
    from fairtrial.cli.names import RunName, name_of
    from fairtrial.cli.reporting import compared, record_of, report_facts
    from fairtrial.cli.running import Interrupted, carry_out, verdict
    from fairtrial.cli.screen import out

    codes: list[ExitCode] = []
    facts: list[dict[str, Any]] = []
    as_json = chosen[0][1].json
    for position, (suite, orders) in enumerate(chosen):
        try:
            ran = carry_out(suite, orders)
        except Interrupted:
            return ExitCode.INTERRUPTED, facts
        code, reason = verdict(ran.report, fail_under=fail_under, max_error_share=max_error_share)
        codes.append(code)
        if as_json:
            facts.append(
                {
                    "name": name_of(ran.report.run),
                    "resumed": ran.resumed,
                    "exit_code": int(code),
                    "reason": reason or None,
                    "report": report_facts(orders.store, RunName(ran.report.run)),
                    "comparison": record_of(compared(ran.report)) if orders.compares else None,
                }
            )
        else:
            if position and not orders.quiet:
                out().print()
            _show(ran, orders, code, reason)
    return min(codes, key=_ORDER.index), facts


_ORDER = (4, 1, 3, 0)
"""Codes, the one that matters most first: figures full of errors say nothing about a floor."""


def _show(ran: Ran, orders: Orders, code: int, reason: str) -> None:
    from fairtrial.cli.names import RunName, name_of
    from fairtrial.cli.reporting import compared, rate, show_report
    from fairtrial.cli.running import common_errors
    from fairtrial.cli.screen import count, err, out, sentence
    from fairtrial.render.safe_text import plain

    report = ran.report
    if orders.quiet:
        for name in report.experiments:
            part = report[name]
            errors = count(sum(part.errors.values()), "error")
            figures = f"{rate(part.pass_rate)} of {part.successful:,} scored passed, {errors}"
            out().print(f"{name_of(report.run)}:{plain(name)}  {figures}", soft_wrap=True)
    else:
        show_report(orders.store, RunName(report.run), json=False, next_commands=not orders.compares)
    if orders.compares:
        out().print()
        out().print(compared(report))
    if code:
        sentence(err(), f"exit {int(code)}: {reason}", style="bold red")
    if code == 4:
        for text, times in common_errors(report):
            sentence(err(), f"  {times:,} x {plain(text, limit=300)}")
        sentence(err(), f"  {_error_remedy(report, orders)}")


def _error_remedy(report: EvalReport, orders: Orders) -> str:
    """Return what to do about the errors of a run: outputs that only lack a score need no trial executed again."""
    if any(kind != "scorer_error" and count for kind, count in report.errors.items()):
        return "once that is fixed, retry them with --retry-errors"
    again = shlex.join(["fairtrial", "rescore", report.run_id, *orders.base])
    return f"the outputs are stored: the same command scores them; if you change the evaluator, use: {again}"
