"""`fairtrial trials`: list trials with input and output."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from fairtrial.cli import options


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("trials")(trials)


def trials(
    run: options.Run,
    failed: Annotated[bool, typer.Option("--failed", help="Only trials that were scored and did not pass.")] = False,
    errors: Annotated[bool, typer.Option("--errors", help="Only trials that ended in an error.")] = False,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where", metavar="KEY=VALUE", help="Only trials with this metadata or column value (repeatable)."
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="NAMES", help="Columns to show, separated by commas.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Number of trials to list.")] = 100,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """List trials, with input and output side by side.

    \b
    Examples:
      fairtrial trials support --failed
      fairtrial trials support:terse --where kind=refund
      fairtrial trials support --columns sample_id,output,value,latency_ms
    """
    from fairtrial.cli.options import find_run, parse_pairs
    from fairtrial.cli.screen import out, print_json
    from fairtrial.cli.user_errors import UserError
    from fairtrial.errors import ConfigurationError
    from fairtrial.reports.render.terminal import RichDocument
    from fairtrial.reports.report.results import TrialTable, overview
    from fairtrial.reports.report.trials import trials_document

    opened = options.open_existing(store)
    named = find_run(opened, run)
    table = TrialTable(opened, named.run, experiment=named.experiment)
    table = table.failed() if failed else table
    table = table.errors() if errors else table
    texts = dict(parse_pairs("--where", where or (), as_text=True))
    try:
        for key, value in parse_pairs("--where", where or ()):
            table = table.where({key: _either(value, texts[key])})
        table = table.select(*(columns.split(",") if columns else overview(named.run)))
    except ConfigurationError as error:
        what, _, hint = str(error).partition("\n")
        raise UserError(what, hint) from None
    rows = table.rows(limit)
    if json:
        facts = {"run_id": named.run.run_id, "columns": list(rows.columns), "truncated": rows.more}
        print_json({"format": "fairtrial.trial_table/1", **facts, "trials": _plain(rows.rows)})
        return 0
    console = out()
    document = RichDocument(trials_document(rows))
    if console.is_terminal and len(console.render_lines(document)) > console.height - 2:
        os.environ.setdefault("LESS", "-RFX")  # Colours, and no pager for what fits on the screen.
        with console.pager(styles=True):
            console.print(document)
    else:
        console.print(document)
    return 0


def _either(value: Any, text: str) -> Any:
    """Match a value as a number and as text: `level=3` matches both 3 and "3"."""
    if value is None:
        return None
    return lambda found: found == text or (found == value and isinstance(found, bool) == isinstance(value, bool))


def _plain(rows: Any) -> list[dict[str, Any]]:
    from fairtrial.base.codec import to_json

    return [{name: to_json(value) for name, value in row.items()} for row in rows]
