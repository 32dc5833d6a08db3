"""`fairtrial fleet`: how the workers and their queues stand."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from fairtrial.cli import options


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("fleet")(fleet)


def fleet(
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SUITE]...", help="Names or files of suites; all that are known else."),
    ] = None,
    mailbox: options.MailboxUrl = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Show the queues of a fleet, its workers and dead letters.

    For each suite: what waits, what is in flight and since when, who works on it, and what was set aside.

    \b
    Examples:
      fairtrial fleet --mailbox redis://queue:6379
      fairtrial fleet support --json
      watch fairtrial fleet support
    """
    from fairtrial.cli.post import suite_names, with_mailboxes
    from fairtrial.cli.screen import add_row, count, make_table, out, print_json, print_table
    from fairtrial.formatting import duration

    url = options.mailbox_url(mailbox)
    facts = with_mailboxes(url, suite_names(suites or (), store), _look)
    if json:
        print_json({"format": "fairtrial.fleet/1", "suites": facts})
        return 0
    console = out()
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
            f"{len(one['workers']):,}",
        )
    print_table(console, table)
    rows = [(one["suite"], worker) for one in facts for worker in one["workers"]]
    if rows:
        table = make_table("worker", "suite", "in flight", "last heard of", right=("in flight", "last heard of"),
                           cut=("worker", "suite"))  # fmt: skip
        for suite, worker in rows:
            add_row(
                table,
                worker["name"],
                suite,
                f"{worker['in_flight']:,}",
                f"{duration(worker['idle_seconds'] * 1000)} ago",
            )
        console.print()
        print_table(console, table)
    for one in facts:
        if len(one["versions"]) > 1:
            parts = ", ".join(f"{count(found['workers'], 'worker')} with {found['code'] or 'any'}"
                              for found in one["versions"])  # fmt: skip
            console.print(f"\n{one['suite']} has workers of several versions of its code: {parts}", soft_wrap=True)
    return 0


async def _look(name: str, mailbox: Any) -> dict[str, Any]:
    depth = await mailbox.depth()
    readers = await mailbox.readers()
    versions = Counter(code[:8] for code in await mailbox.announced())
    return {
        "suite": name,
        "waiting": depth.waiting,
        "delayed": depth.delayed,
        "in_flight": depth.in_flight,
        "dead_letters": depth.dead,
        "oldest_in_flight_seconds": readers.oldest_seconds,
        "workers": [
            {"name": reader.name, "in_flight": reader.in_flight, "idle_seconds": reader.idle_seconds}
            for reader in readers.readers
        ],
        "versions": [{"code": code, "workers": workers} for code, workers in sorted(versions.items())],
    }
