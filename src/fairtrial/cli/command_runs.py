"""`fairtrial runs`: list runs."""

from __future__ import annotations

import difflib
from functools import partial
from itertools import islice
from typing import Annotated, Any, get_args

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError


def runs(
    suite: Annotated[str | None, typer.Argument(metavar="[SUITE]", help="Only runs of this suite.")] = None,
    status: Annotated[
        str | None,
        typer.Option(metavar="STATUS", help="running, finished, interrupted, incomplete, unscored or stopped."),
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only runs with this tag.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Number of runs to list.")] = 20,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """List runs, newest first.

    \b
    Examples:
      fairtrial runs
      fairtrial runs support --status interrupted
      fairtrial runs --limit 100 --json
    """
    from fairtrial.cli.options import parse_pairs
    from fairtrial.cli.screen import note, out, print_json, print_table
    from fairtrial.reports.report.run_json import listed_run
    from fairtrial.reports.run_names import name_of, resume_command
    from fairtrial.runs.run_lease import with_current_status

    opened = options.open_existing(store)
    wanted = dict(parse_pairs("--tag", tag or (), as_text=True))
    asked = _status(status)
    matching = (
        run
        for run in map(partial(with_current_status, opened), opened.runs(suite=suite))
        if asked in (None, run.status) and all(run.tags.get(key) == value for key, value in wanted.items())
    )
    chosen = list(islice(matching, limit))
    if json:
        print_json(
            {"format": "fairtrial.runs/1", "runs": [listed_run(run, opened.totals(run.run_id)) for run in chosen]}
        )
        return 0
    if not chosen:
        note(f"no runs{' of ' + suite if suite else ''} here; start one with: fairtrial run SUITE")
        return 0
    print_table(out(), _table(opened, chosen))
    for run in chosen:
        if run.status == "interrupted" and opened.get_run(run.run_id).status == "running":
            note(f"{name_of(run)}: its process ended before the run did; resume it with: {resume_command(run)}")
    left = sum(1 for _ in matching)
    if left:
        note(f"{left:,} older: list them with --limit {limit + left}")
    return 0


def _status(text: str | None) -> Any:
    from fairtrial.store.protocol import RunStatus

    statuses = get_args(RunStatus.__value__)
    if text is None or text in statuses:
        return text
    near = difflib.get_close_matches(text, statuses, 1)
    raise UserError(
        f"unknown status {text!r}", f"did you mean {near[0]}?" if near else f"use one of {', '.join(statuses)}"
    )


def _table(store: Any, chosen: list[Any]) -> Any:
    from fairtrial.base.formatting import ago
    from fairtrial.cli.screen import add_row, make_table

    table = make_table(
        "run", "id", "status", "when", "trials", "passed", "experiments", right=("trials", "passed"),
        cut=("experiments",),
    )  # fmt: skip
    for run in chosen:
        totals = store.totals(run.run_id)
        stored = sum(sum(part.outcomes.values()) for part in totals)
        trials = f"{stored:,}" if stored == run.planned else f"{stored:,}/{run.planned:,}"
        add_row(
            table,
            short_name(run),
            run.run_id,
            run.status,
            ago(run.created_at),
            trials,
            pass_rates(totals),
            ", ".join(run.experiments),
        )
    return table


def short_name(run: Any) -> str:
    """Return the name of a run for a table; its number is never cut off."""
    from fairtrial.reports.render.safe_text import plain

    return f"{plain(run.suite, limit=18)}@{run.number}"


def pass_rates(totals: list[Any]) -> str:
    """Return the pass rate over scored trials, or its range over the experiments."""
    from fairtrial.reports.figures.summaries import TotalsAnalysis

    rates = [rate for part in totals if (rate := TotalsAnalysis(part).pass_rate) is not None]
    if not rates:
        return "-"
    low, high = f"{min(rates):.0%}", f"{max(rates):.0%}"
    return low if low == high else f"{low[:-1]}-{high}"
