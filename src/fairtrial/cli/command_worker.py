"""`fairtrial worker`: run the trials of a suite from a queue."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import ExitCode


def worker(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="file.py, file.py:name, module or module:name.")],
    mailbox: options.MailboxUrl = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", metavar="N", min=1, help="Maximum number of trials at once (default: set by the suite)."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="URL", help="Write results directly to this store instead of sending them to the client."
        ),
    ] = None,
    claim_check: Annotated[
        Path | None, typer.Option("--claim-check", metavar="DIR", help="Shared folder for message bodies over 64 KB.")
    ] = None,
    lease: Annotated[
        float,
        typer.Option(
            "--lease", metavar="SECONDS", min=1, help="Lease time of a request, renewed while it is processed."
        ),
    ] = 60.0,
    drain: Annotated[
        float,
        typer.Option(
            "--drain", metavar="SECONDS", min=0, help="Time to finish running trials after Ctrl-C or SIGTERM."
        ),
    ] = 30.0,
    isolated_processes: Annotated[
        int,
        typer.Option("--isolated-processes", metavar="N", min=1, help="Child processes for suspected poison messages."),
    ] = 4,
    allow_drift: Annotated[
        bool,
        typer.Option("--allow-drift", help="Also run requests that were created by a different version of the code."),
    ] = False,
    until_empty: Annotated[
        bool,
        typer.Option(
            "--until-empty", help="Exit when the queue is empty, with nothing in flight on any worker or to be retried."
        ),
    ] = False,
    empty_seconds: Annotated[
        float,
        typer.Option(
            "--empty-seconds", metavar="SECONDS", min=0, help="How long it must have been empty for --until-empty."
        ),
    ] = 5.0,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of this worker in results.")] = None,
    health_port: options.HealthPort = None,
    health_host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Interface to serve on; 0.0.0.0 for probes from other machines."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings only.")] = False,
    json: options.Json = False,
) -> int:
    """Run the trials of a suite from a queue until stopped. Start any number of workers, on any number of
    machines.

    The first Ctrl-C or SIGTERM lets running trials finish; the second returns them to the queue.

    \b
    Examples:
      fairtrial worker evals.py --mailbox redis://queue:6379
      fairtrial worker evals.py --mailbox redis://queue:6379 --concurrency 64
      fairtrial worker evals.py --mailbox postgresql://db/evals
      fairtrial worker evals.py --until-empty --json
    """
    import asyncio

    from fairtrial.cli.adhoc import load
    from fairtrial.cli.running import stdout_for_json
    from fairtrial.cli.screen import note, print_json
    from fairtrial.cli.settings import load_settings
    from fairtrial.fleet.worker.config import EvalLoopConfig
    from fairtrial.mailbox.body import ClaimCheck
    from fairtrial.suites.worker import run_worker

    url = options.mailbox_url(mailbox)
    options.start_logging(quiet=quiet, text=True)
    settings = load_settings()
    with stdout_for_json(json), settings.prices():
        loaded = load(suite)
        config = EvalLoopConfig(
            concurrency=concurrency or loaded.config.max_concurrent,
            lease_seconds=lease,
            empty_seconds=empty_seconds,
            drain_seconds=drain,
            allow_drift=allow_drift,
            isolated_processes=isolated_processes,
        )
        try:
            loop = asyncio.run(
                run_worker(
                    suite,
                    url,
                    config=config,
                    store=store,
                    claim_check=ClaimCheck(claim_check) if claim_check else None,
                    name=name,
                    until_empty=until_empty,
                    signals=True,
                    health_port=health_port,
                    health_host=health_host or settings["health-host"],
                )
            )
        except (asyncio.CancelledError, KeyboardInterrupt):
            note("stopped immediately: running trials were returned to the queue")
            return int(ExitCode.INTERRUPTED)
    facts = _facts(loop.counters)
    if json:
        print_json({"format": "fairtrial.worker/1", "worker": loop.name, "suite": loaded.name, **facts})
    else:
        outcomes = ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in facts["outcomes"].items())
        note(f"worker {loop.name} ended: {facts['received']:,} received, {outcomes or 'none executed'}")
    return 0


def _facts(counters: Any) -> dict[str, Any]:
    facts = {field.name: getattr(counters, field.name) for field in fields(counters)}
    return {**facts, "outcomes": dict(facts["outcomes"])}
