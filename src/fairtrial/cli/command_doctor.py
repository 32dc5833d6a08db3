"""`fairtrial doctor`: check what runs depend on."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from fairtrial.cli.checks import Check


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(store: options.Store = None, mailbox: options.MailboxUrl = None, json: options.Json = False) -> int:
    """Check installation, settings, store and queue.

    Nothing is changed: a store that does not exist is not created. Keys and passwords are never printed. The queue is
    checked if one is configured, by sending a message through a separate test queue. Exits with 1 if a check failed.

    \b
    Examples:
      fairtrial doctor
      fairtrial doctor --store postgresql://db/evals --mailbox redis://queue:6379
      fairtrial doctor --json
    """
    from fairtrial.cli.checks import run_checks
    from fairtrial.cli.screen import out, print_json

    checks = run_checks(store, mailbox)
    failed = any(check.status == "failed" for check in checks)
    if json:
        facts = [
            {"name": check.name, "status": check.status, "detail": check.detail, "remedy": check.remedy or None}
            for check in checks
        ]
        print_json({"format": "fairtrial.doctor/1", "ok": not failed, "checks": facts})
    else:
        _show(checks, out())
    return int(ExitCode.FAILED if failed else ExitCode.OK)


_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def _show(checks: list[Check], console: Console) -> None:
    """Print one line for each check, wrapped under its column in a terminal, with the remedy below."""
    from rich.text import Text

    from fairtrial.base.formatting import count
    from fairtrial.reports.render.safe_text import plain

    name_width = max(len(check.name) for check in checks) + 2
    indent = max(map(len, _STYLES)) + 2 + name_width
    # A pipe keeps lines whole, for grep.
    width = max(20, console.width - indent) if console.is_terminal else 10_000
    for check in checks:
        lines = textwrap.wrap(plain(check.detail), width) or [""]
        if check.remedy:
            lines += textwrap.wrap(f"fix: {plain(check.remedy)}", width, break_on_hyphens=False)
        status = (check.status.ljust(indent - name_width), _STYLES[check.status])
        console.print(Text.assemble(status, check.name.ljust(name_width), lines[0]), soft_wrap=True)
        for line in lines[1:]:
            console.print(Text(" " * indent + line), soft_wrap=True)
    counts = {status: sum(check.status == status for check in checks) for status in _STYLES}
    console.print()
    if counts["failed"] or counts["warning"]:
        summary = [count(counts["failed"], "check") + " failed"] if counts["failed"] else []
        summary += [count(counts["warning"], "warning")] if counts["warning"] else []
        console.print(", ".join(summary), soft_wrap=True)
    else:
        console.print(f"{count(len(checks), 'check')}, no problems", soft_wrap=True)
