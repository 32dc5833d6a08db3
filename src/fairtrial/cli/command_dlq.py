"""`fairtrial dlq`: requests that were set aside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import typer

from fairtrial.cli import options

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Dead letters: requests that workers set aside. List, show, retry or drop them.",
    epilog="Examples: fairtrial dlq list support; fairtrial dlq retry support --all",
)

Suite = Annotated[str, typer.Argument(metavar="SUITE", help="The suite's name, or its file.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Which; see `fairtrial dlq list`.")]
Everything = Annotated[bool, typer.Option("--all", help="All of them.")]


def register(parent: typer.Typer) -> None:
    """Add the group."""
    parent.add_typer(app, name="dlq")


@app.command("list")
def list_letters(
    suite: Suite,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many, oldest first.")] = 50,
    mailbox: options.MailboxUrl = None,
    json: options.Json = False,
) -> int:
    """List the dead letters of a suite, oldest first.

    \b
    Examples:
      fairtrial dlq list support --mailbox redis://queue:6379
      fairtrial dlq list support --limit 500 --json
    """
    from fairtrial.cli.screen import add_row, ago, make_table, note, out, print_json, print_table

    found = _ask(suite, mailbox, lambda letters: letters.page(limit=limit))
    if json:
        print_json(
            {"format": "fairtrial.dead_letters/1", "suite": _name(suite), "letters": [_facts(one) for one in found]}
        )
        return 0
    if not found:
        note(f"no dead letters of {_name(suite)}")
        return 0
    table = make_table("id", "when", "tries", "sample", "reason", right=("tries",), cut=("sample", "reason"))
    for letter in found:
        add_row(table, letter.id, ago(letter.died_at), str(letter.delivery_count), _sample(letter), letter.reason)
    print_table(out(), table)
    return 0


@app.command("show")
def show_letter(
    suite: Suite,
    id: Annotated[str, typer.Argument(metavar="ID", help="Which; see `fairtrial dlq list`.")],
    mailbox: options.MailboxUrl = None,
    json: options.Json = False,
) -> int:
    """Show one dead letter whole.

    \b
    Examples:
      fairtrial dlq show support 1763184000000-0
    """
    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.screen import ago, out, print_json
    from fairtrial.render.safe_text import plain

    letter = next((one for one in _ask(suite, mailbox, _everything) if one.id == id), None)
    if letter is None:
        raise Mistake(f"there is no dead letter {plain(id)!r} of {_name(suite)}", f"see: fairtrial dlq list {suite}")
    if json:
        print_json({"format": "fairtrial.dead_letter/1", "suite": _name(suite), **_facts(letter)})
        return 0
    console = out()
    for label, text in (
        ("id", letter.id),
        ("set aside", f"{ago(letter.died_at)}, after {letter.delivery_count} deliveries"),
        ("reason", letter.reason),
        ("error", letter.error or "-"),
        ("reply to", letter.reply_to or "-"),
        ("message", letter.text),
    ):
        console.print(f"{label:10}{plain(text)}", soft_wrap=not console.is_terminal)
    return 0


@app.command("retry")
def retry_letters(
    suite: Suite, ids: Ids = None, everything: Everything = False, mailbox: options.MailboxUrl = None,
    json: options.Json = False,
) -> int:  # fmt: skip
    """Put dead letters back into the queue, with a clean record.

    Their results go to the client that waits for them. When a run is over, have it run again with --retry-errors.

    \b
    Examples:
      fairtrial dlq retry support 1763184000000-0
      fairtrial dlq retry support --all
    """
    return _act(suite, ids, everything, mailbox, json, "retry", "went back into the queue")


@app.command("drop")
def drop_letters(
    suite: Suite, ids: Ids = None, everything: Everything = False, mailbox: options.MailboxUrl = None,
    json: options.Json = False,
) -> int:  # fmt: skip
    """Delete dead letters for good.

    \b
    Examples:
      fairtrial dlq drop support 1763184000000-0
      fairtrial dlq drop support --all
    """
    return _act(suite, ids, everything, mailbox, json, "drop", "dropped")


def _act(
    suite: str, ids: list[str] | None, everything: bool, mailbox: str | None, json: bool, verb: str, done: str
) -> int:
    from fairtrial.cli.faults import ExitCode, Mistake
    from fairtrial.cli.screen import count, note, print_json

    if bool(ids) == everything:
        raise Mistake(f"say which dead letters to {verb}: their ids, or --all", f"see: fairtrial dlq list {suite}")

    async def act(letters: Any) -> int:
        changed = 0
        if ids:
            return int(await getattr(letters, verb)(*ids))
        async for page in _pages(letters):
            changed += await getattr(letters, verb)(*(one.id for one in page))
        return changed

    changed = _ask(suite, mailbox, act)
    if json:
        print_json({"format": f"fairtrial.dead_letters_{verb}/1", "suite": _name(suite), "count": changed})
    else:
        note(f"{count(changed, 'dead letter')} of {_name(suite)} {done}")
    if ids and changed < len(ids):
        note(f"{count(len(ids) - changed, 'id')} of those are not there; see: fairtrial dlq list {suite}")
        return int(ExitCode.USAGE)
    return 0


def _ask(suite: str, mailbox: str | None, look: Any) -> Any:
    from fairtrial.cli.post import with_mailboxes

    async def ask(_: str, requests: Any) -> Any:
        return await look(requests.dead_letters)

    return with_mailboxes(options.mailbox_url(mailbox), [_name(suite)], ask)[0]


async def _everything(letters: Any) -> list[Any]:
    return [one async for page in _pages(letters) for one in page]


async def _pages(letters: Any) -> AsyncIterator[Any]:
    after: str | None = None
    while page := await letters.page(after=after, limit=200):
        yield page
        after = page[-1].id


def _name(suite: str) -> str:
    from fairtrial.cli.post import suite_names

    return suite_names([suite], None)[0]


def _facts(letter: Any) -> dict[str, Any]:
    from fairtrial.render.run_json import moment

    return {
        "id": letter.id,
        "message_id": letter.message_id,
        "sample_id": _sample(letter),
        "delivery_count": letter.delivery_count,
        "reason": letter.reason,
        "error": letter.error,
        "reply_to": letter.reply_to,
        "died_at": moment(letter.died_at),
        "text": letter.text,
    }


def _sample(letter: Any) -> str:
    from fairtrial.errors import BodyError
    from fairtrial.fleet.wire import EvalRequest

    try:
        request = letter.body(EvalRequest)
    except BodyError:
        return "-"
    return str(request.sample.id)
