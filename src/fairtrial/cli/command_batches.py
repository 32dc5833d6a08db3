"""`fairtrial batches`: the batches of runs at the providers of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from fairtrial.store.batches import BatchIntent, BatchTable
    from fairtrial.store.protocol import RunRecord, RunStore

_RUNS_READ = 100


def batches(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run (default: those of the newest 100 with a batch under way).",
            autocompletion=options.complete_run,
            show_default=False,
        ),
    ] = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel the run's batches; what they have finished is paid and kept.")
    ] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """List a run's batches at model providers; cancel them.

    Progress is as of the last look of the process that executes the run.

    \b
    Examples:
      fairtrial batches                 those under way
      fairtrial batches support@3       all of a run
      fairtrial batches support@3 --cancel
    """
    from fairtrial.base.formatting import count
    from fairtrial.cli.screen import note, out, print_json, print_table
    from fairtrial.store.batches import OPEN, batch_table

    opened = options.open_existing(store)
    table = batch_table(opened)
    if cancel:
        if run is None:
            raise UserError("--cancel needs a run", "as in: fairtrial batches support@3 --cancel")
        _cancel(opened, table, options.find_run(opened, run).run)
    if run is not None:
        found = options.find_run(opened, run).run
        rows = [(found, intent) for intent in table.intents(found.run_id)]
    else:
        recent = opened.runs(limit=_RUNS_READ)
        rows = [(one, intent) for one in recent for intent in table.intents(one.run_id) if intent.state in OPEN]
    answered = {one.run_id: table.answered(one.run_id) for one, _ in rows}
    if json:
        facts = [_facts(one, intent, *answered[one.run_id].get(intent.id, (0, None))) for one, intent in rows]
        print_json({"format": "fairtrial.batches/1", "batches": facts})
        return 0
    if not rows:
        note(f"{'the run has no batches' if run else 'no batch is under way'}; start some with: fairtrial run --batch")
        return 0
    print_table(out(), _table(rows, answered))
    waiting = [intent for _, intent in rows if intent.state in OPEN]
    if waiting and all(intent.provider == "anthropic" for intent in waiting):
        note(f"{count(len(waiting), 'batch', 'batches')} of Anthropic: no progress is reported before a batch ends")
    return 0


def _facts(run: RunRecord, intent: BatchIntent, replies: int, cost: float | None) -> dict[str, Any]:
    from fairtrial.reports.report.run_json import moment

    return {
        "run": run.name,
        "run_id": run.run_id,
        "batch": intent.batch_id,
        "intent": intent.id,
        "provider": intent.provider,
        "model": intent.model,
        "state": intent.state,
        "created_at": moment(intent.created_at),
        "requests": intent.requests,
        "done": intent.done,
        "failed": intent.failed,
        "replies": replies,
        "cost_usd": cost,
    }


def _table(rows: list[tuple[RunRecord, BatchIntent]], answered: dict[str, Any]) -> Any:
    from fairtrial.base.formatting import ago, money
    from fairtrial.cli.command_runs import short_name
    from fairtrial.cli.screen import add_row, make_table

    table = make_table(
        "run", "state", "sent", "requests", "done", "failed", "cost", "batch",
        right=("requests", "done", "failed", "cost"), cut=("batch",),
    )  # fmt: skip
    for run, intent in rows:
        _, cost = answered[run.run_id].get(intent.id, (0, None))
        add_row(
            table,
            short_name(run),
            intent.state,
            ago(intent.created_at),
            f"{intent.requests:,}",
            "-" if intent.done is None else f"{intent.done:,}",
            "-" if intent.failed is None else f"{intent.failed:,}",
            money(cost),
            intent.batch_id or "-",
        )
    return table


def _cancel(store: RunStore, table: BatchTable, run: RunRecord) -> None:
    """Cancel the open batches of a run that no process executes."""
    from fairtrial.base.formatting import count
    from fairtrial.base.sync_bridge import call_sync
    from fairtrial.cli.screen import note
    from fairtrial.runs.run_lease import active_owner

    owner = active_owner(store, run.run_id)
    if owner is not None:
        raise UserError(
            f"run {run.name} is being executed by {owner}, which would send the requests again",
            "interrupt it first (Ctrl-C): its batches stay at the provider",
        )
    intents = table.intents(run.run_id)
    known = [intent for intent in intents if intent.state == "submitted"]
    unknown = [intent for intent in intents if intent.state == "submitting"]
    if not known and not unknown:
        if intents:  # Else the list says it.
            note(f"no batch of run {run.name} is under way: there is nothing to cancel")
        return

    async def cancel_all() -> list[bool]:
        return [await _cancel_one(intent) for intent in known]

    cancelled = sum(call_sync(cancel_all))
    had_ended = f" ({len(known) - cancelled} had ended)" if cancelled < len(known) else ""
    note(
        f"cancelled {count(cancelled, 'batch', 'batches')}{had_ended}; what they have finished is paid, and is used if "
        "the run is resumed"
    )
    if unknown:
        note(
            f"of {count(len(unknown), 'batch', 'batches')} it is not known whether the provider has made it: resume "
            "the run, which looks for it"
        )


async def _cancel_one(intent: BatchIntent) -> bool:
    """Cancel a batch; False if it had ended."""
    from fairtrial.models import AnthropicAdapter, OpenAIAdapter
    from fairtrial.models.batches.calls import BatchCalls

    kind = AnthropicAdapter if intent.provider == AnthropicAdapter.provider else OpenAIAdapter
    async with kind(intent.model, base_url=intent.base_url) as adapter:
        calls = BatchCalls(adapter, adapter.require_batches())
        if calls.account != intent.account:
            raise UserError(
                f"batch {intent.batch_id} was sent with another key than {kind.key_variables[0]} has now",
                "set that key, and try again",
            )
        try:
            status = await calls.wire.get(await calls.client(), str(intent.batch_id))
            if not status.ended:
                await calls.wire.cancel(await calls.client(), str(intent.batch_id))
        except Exception as error:
            raise UserError(f"batch {intent.batch_id} cannot be cancelled: {calls.error(error)}", "") from error
    return not status.ended
