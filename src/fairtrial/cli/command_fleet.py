"""`fairtrial fleet`: queues, workers and dead letters."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from fairtrial.cli import dlq, options
from fairtrial.cli.dlq import check_suite, is_file, suite_names, with_mailboxes
from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


_WATCH_SECONDS = 2.0


class _Fleet(TyperGroup):
    """A group whose default command is `status`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command if the first word is none."""
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["status", *args])


app = typer.Typer(
    cls=_Fleet,
    rich_markup_mode=None,
    help="Show the queues, workers and dead letters of a fleet.",
    epilog="Without a command: status. Examples: fairtrial fleet support --watch; fairtrial fleet dlq list support",
)
app.add_typer(dlq.app, name="dlq")


@app.command("status")
def status(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SUITE]...", help="Names or files of suites (default: all that have a queue, or are known here)."
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every 2 seconds until Ctrl-C.")] = False,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove queued requests of runs that are finished or not in the store.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --purge: only show what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --purge: do not ask for confirmation.")] = False,
    mailbox: options.MailboxUrl = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Show the queues and workers of a fleet.

    For each suite: requests waiting and in flight, the age of the oldest one, the live workers, and the dead letters.

    A worker announces itself every 5 seconds. After 15 seconds without an announcement it is shown as lost, for 10
    minutes and for as long as it holds requests. These are delivered again when their leases expire.

    \b
    Examples:
      fairtrial fleet --mailbox redis://queue:6379
      fairtrial fleet support --json
      fairtrial fleet support --watch
      fairtrial fleet support --purge --dry-run
    """
    from fairtrial.cli.screen import note, out, print_json

    url = options.mailbox_url(mailbox)
    for suite in suites or ():
        if not is_file(suite):
            check_suite(url, suite, store)
    # What is removed belongs to suites that are given or known here; others may share the server.
    names = suite_names(suites or (), None if purge else url, store)
    if purge:
        return _purge(url, names, store, dry_run=dry_run, yes=yes, json=json)
    if watch and not json:
        return _watch(url, names)
    facts = with_mailboxes(url, names, _look)
    if json:
        print_json({"format": "fairtrial.fleet/1", "suites": facts})
    elif facts:
        _print(out(), facts)
    else:
        note("no suite has a queue here yet: it gets one from the first worker or run that uses this address")
    return 0


def _watch(url: str, names: list[str]) -> int:
    """Refresh the output until Ctrl-C; in a terminal, on one screen."""
    from fairtrial.cli.screen import out

    try:
        while True:
            facts = with_mailboxes(url, names, _look)
            console = out()
            if console.is_terminal:
                console.clear()
                _print(console, facts, most=max(console.height - len(facts) - 8, 5))
            else:
                _print(console, facts)
                console.print()
            console.file.flush()
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        return 0


def _print(console: Console, facts: list[dict[str, Any]], most: int | None = None) -> None:
    """Print the queues and at most `most` of their workers."""
    from fairtrial.base.formatting import count, duration
    from fairtrial.cli.screen import add_row, make_table, print_table

    numbers = ("waiting", "delayed", "in flight", "oldest", "dead letters", "workers")
    table = make_table("suite", *numbers, right=numbers, cut=("suite",))
    for one in facts:
        oldest = one["oldest_in_flight_seconds"]
        add_row(
            table,
            one["suite"],
            *(f"{one[name]:,}" for name in ("waiting", "delayed", "in_flight")),
            "-" if oldest is None else duration(oldest * 1000),
            f"{one['dead_letters']:,}",
            f"{sum(worker['state'] == 'alive' for worker in one['workers']):,}",
        )
    print_table(console, table)
    rows = [(one["suite"], worker) for one in facts for worker in one["workers"]]
    if rows:
        table = make_table("worker", "suite", "state", "in flight", "last heard of",
                           right=("in flight", "last heard of"), cut=("worker", "suite"))  # fmt: skip
        for suite, worker in rows[:most]:
            add_row(
                table,
                worker["name"],
                suite,
                worker["state"],
                f"{worker['in_flight']:,}",
                f"{duration(worker['idle_seconds'] * 1000)} ago",
            )
        console.print()
        print_table(console, table)
        if most is not None and len(rows) > most:
            console.print(f"and {len(rows) - most:,} more")
    for one in facts:
        if len(one["versions"]) > 1:
            parts = ", ".join(f"{count(found['workers'], 'worker')} with {found['code'] or 'any'}"
                              for found in one["versions"])  # fmt: skip
            console.print(f"\n{one['suite']} has workers of several versions of its code: {parts}", soft_wrap=True)


def _purge(url: str, names: list[str], store: str | None, *, dry_run: bool, yes: bool, json: bool) -> int:
    """Remove the queued requests whose run is finished or unknown, after asking."""
    from fairtrial.base.formatting import count
    from fairtrial.cli.screen import add_row, confirm, make_table, note, out, print_json, print_table
    from fairtrial.fleet.queues import results_name
    from fairtrial.reports.render.safe_text import plain

    opened = options.open_existing(store)
    status = {results_name(run.suite, run.run_id): run for name in names for run in opened.runs(suite=name)}

    async def look(name: str, requests: Any) -> dict[str, int]:
        if not hasattr(requests, "reply_addresses"):
            raise UserError("the requests of single runs cannot be removed from a queue on SQS", "workers drop them")
        asked: dict[str, int] = await requests.reply_addresses()
        return {to: n for to, n in asked.items() if to not in status or status[to].status == "finished"}

    async def remove(name: str, requests: Any) -> int:
        return int(await requests.purge_replies(list(found[name])))

    found = dict(zip(names, with_mailboxes(url, names, look), strict=True))
    rows = [
        {
            "suite": name,
            "run": status[to].name if to in status else to.rpartition(".")[2],
            "status": "finished" if to in status else "unknown",
            "requests": number,
        }
        for name, asked in found.items()
        for to, number in sorted(asked.items())
    ]
    total = sum(sum(asked.values()) for asked in found.values())
    if rows and not json:
        table = make_table("suite", "run", "status", "requests", right=("requests",), cut=("suite", "run"))
        for row in rows:
            add_row(table, *(f"{one:,}" if isinstance(one, int) else plain(str(one)) for one in row.values()))
        print_table(out(), table)
    removed = 0
    if rows and not dry_run:
        if not yes and (json or not confirm(f"remove {count(total, 'request')} from the queue?")):
            raise UserError("nothing was removed", "confirm with --yes, or look first with --dry-run")
        removed = sum(with_mailboxes(url, [name for name in names if found[name]], remove))
    if json:
        print_json({"format": "fairtrial.fleet_purge/1", "runs": rows, "removed": removed})
    elif not rows:
        note("no queued request of a finished or unknown run")
    else:
        note(f"would remove {count(total, 'request')}" if dry_run else f"removed {count(removed, 'request')}")
    return 0


async def _look(name: str, mailbox: Any) -> dict[str, Any]:
    depth = await mailbox.depth()
    from fairtrial.mailbox import server as bulk

    readers = await mailbox.readers() if hasattr(mailbox, "readers") else None
    workers = await bulk.workers(mailbox)
    announced = await bulk.announced(mailbox)
    versions = Counter(code[:8] for code in announced or ())
    return {
        "suite": name,
        "waiting": depth.waiting,
        "delayed": depth.delayed,
        "in_flight": depth.in_flight,
        "dead_letters": depth.dead,
        "oldest_in_flight_seconds": None if readers is None else readers.oldest_seconds,
        "workers": [
            {
                "name": worker.name,
                "state": "alive" if worker.alive else "lost",
                "in_flight": worker.in_flight,
                "idle_seconds": worker.silent_seconds,
            }
            for worker in workers
        ],
        "versions": [{"code": code, "workers": workers} for code, workers in sorted(versions.items())],
    }
