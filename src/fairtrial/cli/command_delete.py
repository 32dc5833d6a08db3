"""`fairtrial delete`: forget runs."""

from __future__ import annotations

from typing import Annotated

import typer

from fairtrial.cli import options


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("delete")(delete)


def delete(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs to forget.", autocompletion=options.complete_run),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Delete runs with their results, transcripts and labels. Asks first.

    \b
    Examples:
      fairtrial delete support@3
      fairtrial delete support@1 support@2 --yes
    """
    from fairtrial.cli.faults import ExitCode, Mistake
    from fairtrial.cli.names import find_run, name_of
    from fairtrial.cli.screen import confirm, count, note, print_json
    from fairtrial.runs.run_lease import active_owner

    opened = options.open_existing(store)
    found = {}
    for text in runs:
        named = find_run(opened, text)
        if named.experiment is not None:
            raise Mistake(
                f"{text} names one experiment, and runs are deleted whole",
                f"as in: fairtrial delete {name_of(named.run)}",
            )
        owner = active_owner(opened, named.run.run_id)
        if owner is not None:
            raise Mistake(
                f"{text} is being executed by {owner}, which would go on to pay for trials that nobody can store",
                "stop that process first (Ctrl-C), then delete the run",
            )
        found[named.run.run_id] = named.run
    names = ", ".join(f"{name_of(run)} ({run.run_id}, {run.status})" for run in found.values())
    if not yes and not confirm(f"delete {names} for good?"):
        note(f"nothing was deleted: {names} stays (say --yes where nobody can be asked)")
        return int(ExitCode.USAGE)
    for run_id in found:
        opened.delete_run(run_id)
    if json:
        print_json({"format": "fairtrial.deleted/1", "deleted": list(found)})
    else:
        note(f"deleted {count(len(found), 'run')}: {names}")
    return 0
