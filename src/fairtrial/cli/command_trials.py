"""`fairtrial trials`: list trials with input and output, or those that did not pass with reasons."""

from __future__ import annotations

import difflib
import os
import shlex
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from fairtrial.reports.run_names import RunName
    from fairtrial.store.protocol import RunStore
    from fairtrial.trials.result import EvalResult

_KINDS = ("task_error", "timeout", "scorer_error", "dead_letter", "user_error", "failed")


def trials(
    run: options.Run,
    failed: Annotated[bool, typer.Option("--failed", help="List the trials that did not pass, with reasons.")] = False,
    errors: Annotated[bool, typer.Option("--errors", help="Only trials that ended in an error.")] = False,
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Only failed, task_error, scorer_error, timeout, dead_letter or user_error."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only trials with this metadata or column value (repeatable)."),
    ] = None,
    columns: Annotated[str | None, typer.Option(metavar="NAMES", help="Columns to show, separated by commas.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of trials to list (default: 100; 50 with reasons)."),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """List trials, with input and output side by side.

    --failed lists the trials that did not pass, whether they were scored or ended in an error, and why; with --where or
    --columns, as a table with input and output.

    \b
    Examples:
      fairtrial trials support
      fairtrial trials support --failed                  what failed, and why
      fairtrial trials support:terse --failed --kind timeout
      fairtrial trials support:terse --where kind=refund
      fairtrial trials support --columns sample_id,output,value,latency_ms
    """
    opened = options.open_existing(store)
    named = options.find_run(opened, run)
    kinds = _kinds(kind) if kind else _KINDS if failed else ()
    if failed and not where and not columns:
        chosen = tuple(one for one in kinds if one != "failed") if errors else kinds
        return _list_failed(opened, named, chosen, limit or 50, json=json)
    from fairtrial.cli.screen import out, print_json
    from fairtrial.errors import ConfigurationError
    from fairtrial.reports.render.terminal import RichDocument
    from fairtrial.reports.report.results import TrialTable, overview
    from fairtrial.reports.report.trials import trials_document

    table = TrialTable(opened, named.run, experiment=named.experiment)
    table = table.errors() if errors else table
    if kinds == ("failed",):
        table = table.failed()
    elif kinds:
        table = table.where(lambda row: row["outcome"] in kinds or ("failed" in kinds and row["passed"] is False))
    texts = dict(options.parse_pairs("--where", where or (), as_text=True))
    try:
        for key, value in options.parse_pairs("--where", where or ()):
            table = table.where({key: _either(value, texts[key])})
        table = table.select(*(columns.split(",") if columns else overview(named.run)))
    except ConfigurationError as error:
        what, _, hint = str(error).partition("\n")
        raise UserError(what, hint) from None
    rows = table.rows(limit or 100)
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


def _kinds(kind: str) -> tuple[str, ...]:
    plain_kind = kind.replace(" ", "_").replace("-", "_")
    if plain_kind in _KINDS:
        return (plain_kind,)
    near = difflib.get_close_matches(plain_kind, _KINDS, 1)
    raise UserError(f"unknown kind {kind!r}", f"did you mean {near[0]}?" if near else f"one of {', '.join(_KINDS)}")


def _list_failed(store: RunStore, named: RunName, kinds: tuple[str, ...], limit: int, *, json: bool) -> int:
    """List the trials of these kinds by reason, the most frequent reason first."""
    from fairtrial.cli.screen import commands, note, out, print_json
    from fairtrial.reports.render.document import TrialGroups
    from fairtrial.reports.render.safe_text import plain
    from fairtrial.reports.render.terminal import RichDocument
    from fairtrial.reports.report.answer import group_trials
    from fairtrial.reports.report.trials import trial_record
    from fairtrial.reports.run_names import name_of

    where: dict[str, Any] = {"experiment": named.experiment}
    outcomes: list[Any] = [kind for kind in kinds if kind != "failed"]
    found = chain(
        store.results(named.run.run_id, outcomes=outcomes, **where) if outcomes else (),
        store.results(named.run.run_id, passed=False, **where) if "failed" in kinds else (),
    )
    trials: list[EvalResult] = list(islice(found, limit))
    more = next(found, None) is not None
    if json:
        facts = [trial_record(result) for result in trials]
        print_json({"format": "fairtrial.failures/1", "run_id": named.run.run_id, "truncated": more, "trials": facts})
        return 0
    if not trials:
        note(f"every trial of {named} passed" if kinds == _KINDS else f"no trial of that kind in {named}")
        return 0
    console = out()
    several = len(named.experiments) > 1
    groups = group_trials(store, named.run, trials, several=several, shown=len(trials))
    console.print(RichDocument(TrialGroups(tuple(groups))))
    if more:
        console.print(f"only the first {limit} are listed; use --limit to see more")
    first = groups[0].examples[0]
    side, sample = (shlex.quote(plain(text)) for text in (f"{name_of(named.run)}:{first.experiment}", first.sample_id))
    console.print()
    commands(console, "next", [(f"fairtrial show {side} --sample {sample}", "one trial in full")])
    return 0
