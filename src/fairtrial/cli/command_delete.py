"""`fairtrial delete`: delete runs."""

from __future__ import annotations

from typing import Annotated

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import ExitCode, UserError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("delete")(delete)


def delete(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs to delete.", autocompletion=options.complete_run),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Delete runs with their results, transcripts and labels. Asks first.

    \b
    Examples:
      fairtrial delete support@3
      fairtrial delete support@1 support@2 --yes
    """
    from fairtrial.base.formatting import count
    from fairtrial.cli.options import find_run
    from fairtrial.cli.screen import confirm, note, print_json
    from fairtrial.reports.run_names import name_of
    from fairtrial.runs.run_lease import active_owner

    opened = options.open_existing(store)
    chosen = {}
    for text in runs:
        named = find_run(opened, text)
        if named.experiment is not None:
            raise UserError(
                f"{text} is one experiment, but only whole runs can be deleted",
                f"as in: fairtrial delete {name_of(named.run)}",
            )
        owner = active_owner(opened, named.run.run_id)
        if owner is not None:
            raise UserError(
                f"{text} is being executed by {owner}, whose results could no longer be stored",
                "stop that process first (Ctrl-C), then delete the run",
            )
        chosen[named.run.run_id] = named.run
    names = ", ".join(f"{name_of(run)} ({run.run_id}, {run.status})" for run in chosen.values())
    if not yes and not confirm(f"permanently delete {names}?"):
        note("nothing was deleted (use --yes in scripts)")
        return int(ExitCode.USAGE)
    for run_id in chosen:
        opened.delete_run(run_id)
    if json:
        print_json({"format": "fairtrial.deleted/1", "deleted": list(chosen)})
    else:
        note(f"deleted {count(len(chosen), 'run')}: {names}")
    return 0
