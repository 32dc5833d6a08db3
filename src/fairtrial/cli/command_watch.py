"""`fairtrial watch`: alarms on daily runs, and runs of live traces."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict
from typing import Annotated

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError

app = typer.Typer(no_args_is_help=True)


@app.callback()
def watch() -> None:
    """Watch daily runs: an alarm when quality has dropped.

    \b
    Examples:
      fairtrial watch start live.py --sample 0.01 --max-cost 5/day
      fairtrial watch alarm support
      fairtrial watch alarm support --every 365d --json
    """


@app.command(short_help="Receive live traces and score a sample of them, in a run a day.")
def start(
    ctx: typer.Context,
    suite: Annotated[
        str,
        typer.Argument(metavar="SUITE", help="Suite with the evaluator to use: file.py[:name].", show_default=False),
    ],
    sample: Annotated[
        float, typer.Option("--sample", metavar="SHARE", help="Share of the traces to score, such as 0.01.")
    ],
    stratum: Annotated[
        list[str] | None,
        typer.Option(
            "--stratum",
            metavar="KEY=VALUE:SHARE",
            help="Share of traces with this attribute, as in user.feedback=down:0.5; error=true for failed ones.",
        ),
    ] = None,
    max_cost: Annotated[
        str | None,
        typer.Option("--max-cost", metavar="USD/day", help="Budget for judges; the shares are lowered to keep it."),
    ] = None,
    receive: Annotated[int, typer.Option("--receive", metavar="PORT", help="Port for OTLP over HTTP.")] = 4318,
    host: Annotated[
        str,
        typer.Option("--host", metavar="HOST", help="Interface to listen on; the default is for this machine only."),
    ] = "127.0.0.1",
    settle: Annotated[
        float, typer.Option("--settle", metavar="SECONDS", help="A trace is complete after this time without a span.")
    ] = 10.0,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Receive live traces and score a sample of them, in a run for each day (UTC).

    A trace belongs to the sample by a hash of its id. Spans are acknowledged when they are stored: after a crash, the
    same command scores what is left, once. Ctrl-C or SIGTERM ends it; what waits is scored by the next start.

    \b
    Examples:
      fairtrial watch start live.py --sample 0.01
      fairtrial watch start live.py --sample 0.01 --stratum error=true:0.2
    """
    from fairtrial.base.sync_bridge import StopSignals, blocking_portal
    from fairtrial.base.system import result_of
    from fairtrial.cli.adhoc import load
    from fairtrial.cli.screen import note, print_json
    from fairtrial.integrations.tracing.live import LiveWatch
    from fairtrial.integrations.tracing.live_traces import Sampling, Stratum, checked_share
    from fairtrial.runs.runner import Interrupt

    options.start_logging()
    if not 0 < settle < float("inf"):
        raise UserError(f"--settle must be above 0 seconds (got {settle:g})", "as in: --settle 10")
    strata = tuple(Stratum.parse(text) for text in stratum or ())
    sampling = Sampling(checked_share(sample), strata, None if max_cost is None else _daily_budget(max_cost))
    settings, address = options.settings_with(store)
    for name in ("mailbox", "processes"):
        if settings[name] not in (None, 1):
            note(f"the setting {name} is not used: live traces are scored in this process")
    with settings.prices():
        loaded = load(suite)
        opened = options.open_named(address)
        watching = LiveWatch(
            loaded, opened, sampling, host=host, port=receive, settle_seconds=settle, words=ctx.obj or ()
        )
        interrupt = Interrupt()
        started: list[Future[None]] = []

        def cancel() -> None:
            for future in started:
                future.cancel()

        with StopSignals(interrupt, cancel).handled(), watching.receiver.running():
            note(f"{loaded.name}: receiving traces at {watching.receiver.endpoint}")
            started.append(blocking_portal().start_task_soon(watching.run, interrupt))
            result_of(started[0])
    counts, waiting = watching.traces.counts, len(watching.traces)
    note(f"ended: {counts.received:,} traces received; {waiting:,} wait to be scored by the next start")
    if json:
        print_json({"format": "fairtrial.live/1", "suite": loaded.name, **asdict(counts), "waiting": waiting})
    return 0


def _daily_budget(text: str) -> float:
    try:
        budget = float(text.removesuffix("/day"))
    except ValueError:
        budget = 0.0
    if not 0 < budget < float("inf"):
        raise UserError(f"--max-cost must be US dollars a day (got {text!r})", "as in: --max-cost 5/day")
    return budget


@app.command(short_help="Say whether quality has dropped: exit 0, 1 or 3.")
def alarm(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE",
            help="A suite with runs on several days, or suite:experiment.",
            autocompletion=options.complete_run,
            show_default=False,
        ),
    ],
    every: Annotated[
        str, typer.Option("--every", metavar="DAYS", help="At most one false alarm in this time, on average.")
    ] = "1000d",
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="passed, value, or a metric with a range.")
    ] = "passed",
    reference: Annotated[
        int,
        typer.Option("--reference", metavar="N", help="Scores of the first days that later ones are compared with."),
    ] = 1000,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="KEY", help="Metadata key whose slices are watched too; they share the rate."),
    ] = None,
    anchors: Annotated[
        str | None,
        typer.Option(
            "--anchors",
            metavar="SUITE",
            help="Suite whose samples have metadata `anchor`: people's verdict on a recorded output (default: SUITE).",
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="DAY", help="First day that counts, such as 2026-11-17.")
    ] = None,
    bounds: options.Bounds = None,
    notify: Annotated[
        str | None,
        typer.Option("--notify", metavar="URL", help="Post the answer to this webhook (Slack or any other)."),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Say whether quality has dropped for good: exit 0, 1 or 3.

    The finished runs of a suite are taken together by day (UTC). The first days are the reference. Without a change,
    an alarm comes at most once in --every days on average, whatever the number of trials and slices. An alarm names
    the likely first day, and what changed then: model, code, parameters, evaluator, packages.

    Exit codes: 0 if it is quiet, 1 for an alarm, 3 for too little data. --notify posts the answer to a webhook as
    JSON, or as plain text for Slack. If the webhook cannot be reached, a note is printed and the exit code stays the
    same.

    \b
    Examples:
      fairtrial watch alarm support
      fairtrial watch alarm support:careful --by language --every 365d
      fairtrial watch alarm support --anchors support-anchors --json
    """
    from fairtrial.cli.command_gate import check_address, post_decision
    from fairtrial.reports.watch.alarm import watch_alarm

    if notify is not None:
        check_address(notify)
    days = _days(every)
    opened = options.open_existing(store)
    named = options.find_run(opened, suite)
    if "@" in suite:
        raise UserError(f"a watch needs a suite (got {suite})", f"as in: fairtrial watch alarm {named.run.suite}")
    if anchors is not None:
        anchors = options.find_run(opened, anchors).run.suite
    found = watch_alarm(
        opened,
        named.run.suite,
        experiment=named.experiment,
        metric=metric,
        every=days,
        reference=reference,
        by=by,
        anchors=anchors,
        since=since or "",
        bounds=options.parse_ranges("--bounds", bounds or ()),
    )
    options.show(found, json=json)
    if notify is not None:
        post_decision(notify, f"fairtrial watch: {named.run.suite}: {found.text}", {"alarm": options.record_of(found)})
    return found.exit_code


def _days(text: str) -> float:
    try:
        return float(text.removesuffix("d"))
    except ValueError:
        raise UserError(f"--every must be a number of days (got {text!r})", "as in: --every 1000d") from None
