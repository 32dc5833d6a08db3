"""Dead letters, and the queues that commands name."""

from __future__ import annotations

import asyncio
import difflib
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

import typer

from fairtrial.cli import options
from fairtrial.cli.adhoc import load
from fairtrial.cli.user_errors import ExitCode, UserError
from fairtrial.errors import MailboxAccessError
from fairtrial.reports.render.safe_text import plain


def suite_names(names: Sequence[str], url: str | None, store: str | None) -> list[str]:
    """Return the names of the suites given by name or file; by default those with a queue at `url`, or known here."""
    if names:
        return [load(name).name if is_file(name) else name for name in names]
    from fairtrial.fleet.queues import requests_name

    known = {requests_name(name): name for name in _known_suites(store)}
    found = None if url is None else _suites_with_queues(url)
    if found is None and not known:
        why = "" if url is None else "this user may not search the server for queues, "
        raise UserError(
            f"{why}no suite is given, and none is configured or stored here", "as in: fairtrial fleet support"
        )
    # The name of a mailbox replaces some characters: a suite that is known here is shown by its own name.
    return list(dict.fromkeys([*known.values(), *(known.get(requests_name(name), name) for name in found or ())]))


def _suites_with_queues(url: str) -> list[str] | None:
    """Return the suites that have a queue, as mailbox names spell them; None if this user may not search for them."""

    async def ask() -> list[str] | None:
        async with _broker(url) as broker:
            try:
                found: list[str] = await broker.suites()
            except MailboxAccessError:  # Users with the rights of workers may not search for queues.
                return None
            return found

    return asyncio.run(ask())


def _known_suites(store: str | None) -> list[str]:
    """Return the names of the configured and stored suites."""
    settings, _ = options.settings_with(store)
    suites = [load(where).name for where in settings["suites"]]
    try:
        suites += [run.suite for run in options.open_existing(store).runs(limit=200)]
    except UserError:
        pass  # No store here: a machine with only workers has none.
    return list(dict.fromkeys(suites))


def check_suite(url: str, name: str, store: str | None) -> None:
    """Raise if nothing is known of a suite: it has no queue, and it is neither configured nor stored."""

    async def look() -> bool:
        async with _broker(url) as broker:
            return bool(await (await broker.requests(name)).exists())

    if asyncio.run(look()):
        return
    known = _known_suites(store)
    if name in known:
        return
    known = list(dict.fromkeys([*known, *(_suites_with_queues(url) or ())]))
    near = difflib.get_close_matches(name, known, 3, 0.5)
    if near:
        hint = f"did you mean {' or '.join(map(plain, near))}?"
    elif known:
        hint = f"the known suites are {', '.join(map(plain, known[:5]))}"
    else:
        hint = "this server has no queues; check the address"
    raise UserError(f"there is no queue of a suite {plain(name)!r}, and no run of it is stored here", hint)


def is_file(name: str) -> bool:
    """True if a suite is given by its file and not by its name."""
    return name.partition(":")[0].endswith(".py") or ":" in name


def with_mailboxes[T](url: str, names: Sequence[str], look: Callable[[str, Any], Awaitable[T]]) -> list[T]:
    """Call `look` with the request mailbox of each suite and return the results."""

    async def ask() -> list[T]:
        async with _broker(url) as broker:
            return [await look(name, await broker.requests(name)) for name in names]

    return asyncio.run(ask())


def existing_mailboxes(url: str, names: Sequence[str]) -> set[str]:
    """Return which of these mailboxes exist on the server."""

    async def ask() -> set[str]:
        async with _broker(url) as broker:
            return {name for name in names if await broker.has_mailbox(name)}

    return asyncio.run(ask()) if names else set()


@asynccontextmanager
async def _broker(url: str) -> AsyncIterator[Any]:
    from fairtrial.fleet.queues import connect_broker

    broker = connect_broker(url)
    try:
        yield broker
    finally:
        await broker.close()


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, show, retry or drop dead letters (failed requests).",
    epilog="Examples: fairtrial fleet dlq list support; fairtrial fleet dlq retry support --all",
)

Suite = Annotated[str, typer.Argument(metavar="SUITE", help="Name or file of the suite.")]
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Id of a dead letter, from `fairtrial fleet dlq list`.")
]
Everything = Annotated[bool, typer.Option("--all", help="All dead letters of the suite.")]


@app.command("list")
def list_letters(
    suite: Annotated[
        str | None, typer.Argument(metavar="[SUITE]", help="Name or file of the suite (default: all suites).")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Number of dead letters to list.")] = 50,
    mailbox: options.MailboxUrl = None,
    json: options.Json = False,
) -> int:
    """List dead letters of a suite, or of all that have a queue, oldest first.

    \b
    Examples:
      fairtrial fleet dlq list --mailbox redis://queue:6379
      fairtrial fleet dlq list support --limit 500 --json
    """
    from fairtrial.base.formatting import ago
    from fairtrial.cli.screen import add_row, make_table, note, out, print_json, print_table

    url = options.mailbox_url(mailbox)
    names = [_name(suite)] if suite is not None else suite_names((), url, None)

    async def page(name: str, requests: Any) -> list[tuple[str, Any]]:
        return [(name, letter) for letter in await requests.dead_letters.page(limit=limit)]

    pages = with_mailboxes(url, names, page)
    letters = sorted((one for found in pages for one in found), key=lambda one: one[1].died_at)[:limit]
    if suite is not None and not letters:
        _check_suite(suite, mailbox)
    whose = "any suite" if suite is None else names[0]
    if json:
        facts = [{"suite": name, **_facts(letter)} for name, letter in letters]
        named = None if suite is None else names[0]
        print_json({"format": "fairtrial.dead_letters/1", "suite": named, "letters": facts})
        return 0
    if not letters:
        note(f"no dead letters for {whose}")
        return 0
    columns = (*(() if suite is not None else ("suite",)), "id", "when", "tries", "sample", "reason")
    table = make_table(*columns, right=("tries",), cut=("suite", "sample"), prose=("reason",))
    for name, letter in letters:
        cells = (letter.id, ago(letter.died_at), str(letter.delivery_count), _sample(letter), letter.reason)
        add_row(table, *(() if suite is not None else (name,)), *cells)
    print_table(out(), table)
    return 0


@app.command("show")
def show_letter(
    suite: Suite,
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of a dead letter, from `fairtrial fleet dlq list`.")],
    mailbox: options.MailboxUrl = None,
    json: options.Json = False,
) -> int:
    """Show one dead letter in full.

    \b
    Examples:
      fairtrial fleet dlq show support 1763184000000-0
    """
    from fairtrial.base.formatting import ago
    from fairtrial.cli.screen import out, print_json
    from fairtrial.reports.render.safe_text import plain

    letter = next((candidate for candidate in _ask(suite, mailbox, _everything) if candidate.id == id), None)
    if letter is None:
        _check_suite(suite, mailbox)
        raise UserError(
            f"there is no dead letter {plain(id)!r} of {_name(suite)}", f"see: fairtrial fleet dlq list {suite}"
        )
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
    suite: Suite,
    ids: Ids = None,
    everything: Everything = False,
    force: Annotated[bool, typer.Option("--force", help="Retry even if no client collects the result.")] = False,
    mailbox: options.MailboxUrl = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Put dead letters back into the queue and reset their delivery counts.

    Their results go to the client that waits for them. Dead letters of a run that has ended are refused, because no
    client collects their results: run the suite again with --resume errors instead. A request that may have ended its
    process is executed in a child process again.

    \b
    Examples:
      fairtrial fleet dlq retry support 1763184000000-0
      fairtrial fleet dlq retry support --all
    """
    check = None if force else partial(_check_collected, options.mailbox_url(mailbox), _name(suite), store)
    return _act(suite, ids, everything, mailbox, json, "retry", "went back into the queue", check)


@app.command("drop")
def drop_letters(
    suite: Suite, ids: Ids = None, everything: Everything = False, mailbox: options.MailboxUrl = None,
    json: options.Json = False,
) -> int:  # fmt: skip
    """Delete dead letters permanently.

    \b
    Examples:
      fairtrial fleet dlq drop support 1763184000000-0
      fairtrial fleet dlq drop support --all
    """
    return _act(suite, ids, everything, mailbox, json, "drop", "dropped")


def _act(
    suite: str,
    ids: list[str] | None,
    everything: bool,
    mailbox: str | None,
    json: bool,
    verb: str,
    done: str,
    check: Callable[[list[Any]], None] | None = None,
) -> int:
    """Change the chosen dead letters; `check` raises if they must not be changed."""
    from fairtrial.base.formatting import count
    from fairtrial.cli.screen import note, print_json

    if bool(ids) == everything:
        raise UserError(
            f"give the ids of the dead letters to {verb}, or --all", f"see: fairtrial fleet dlq list {suite}"
        )

    if check is not None:
        check([letter for letter in _ask(suite, mailbox, _everything) if everything or letter.id in (ids or ())])

    async def act(letters: Any) -> int:
        changed = 0
        if ids:
            return int(await getattr(letters, verb)(*ids))
        async for page in _pages(letters):
            changed += await getattr(letters, verb)(*(letter.id for letter in page))
        return changed

    changed = _ask(suite, mailbox, act)
    if not changed:
        _check_suite(suite, mailbox)
    if json:
        print_json({"format": f"fairtrial.dead_letters_{verb}/1", "suite": _name(suite), "count": changed})
    else:
        note(f"{count(changed, 'dead letter')} of {_name(suite)} {done}")
    if ids and changed < len(ids):
        note(f"{count(len(ids) - changed, 'id')} not found; see: fairtrial fleet dlq list {suite}")
        return int(ExitCode.USAGE)
    return 0


def _ask(suite: str, mailbox: str | None, look: Any) -> Any:
    async def ask(_: str, requests: Any) -> Any:
        return await look(requests.dead_letters)

    return with_mailboxes(options.mailbox_url(mailbox), [_name(suite)], ask)[0]


def _check_suite(suite: str, mailbox: str | None) -> None:
    """Raise if the suite is given by a name of which nothing is known."""
    if not is_file(suite):
        check_suite(options.mailbox_url(mailbox), suite, None)


def _check_collected(url: str, suite: str, store: str | None, letters: list[Any]) -> None:
    """Raise if no client collects the results of some dead letters: their run has ended, or their mailbox is gone."""
    from fairtrial.base.formatting import count
    from fairtrial.fleet.queues import results_name
    from fairtrial.reports.render.safe_text import plain
    from fairtrial.reports.run_names import base_words, name_of
    from fairtrial.store.protocol import RESUMABLE

    addresses = Counter(letter.reply_to for letter in letters if letter.reply_to)
    if not addresses:
        return
    try:
        runs = {results_name(run.suite, run.run_id): run for run in options.open_existing(store).runs(suite=suite)}
    except UserError:
        runs = {}  # No store here: a machine with only workers has none.
    for address, number in addresses.items():
        run = runs.get(address)
        if run is None:
            continue
        if run.status not in ("running", *RESUMABLE):
            words = shlex.join(base_words(run))
            raise UserError(
                f"run {name_of(run)} has ended: no client collects the results of its {count(number, 'dead letter')}",
                f"retry its failed trials with: fairtrial {words} --mailbox URL --resume errors",
            )
    unknown = [address for address in addresses if address not in runs]
    gone = set(unknown) - existing_mailboxes(url, unknown)
    if gone:
        number = sum(addresses[address] for address in gone)
        raise UserError(
            f"no client collects the results of {count(number, 'dead letter')}: the mailbox "
            f"{plain(min(gone))} does not exist",
            "run the suite again with --resume errors, or use --force to execute them all the same",
        )


async def _everything(letters: Any) -> list[Any]:
    return [letter async for page in _pages(letters) for letter in page]


async def _pages(letters: Any) -> AsyncIterator[Any]:
    after: str | None = None
    while page := await letters.page(after=after, limit=200):
        yield page
        after = page[-1].id


def _name(suite: str) -> str:
    return suite_names([suite], None, None)[0]


def _facts(letter: Any) -> dict[str, Any]:
    from fairtrial.reports.report.run_json import moment

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
    from fairtrial.fleet.messages import EvalRequest

    try:
        request = letter.body(EvalRequest)
    except BodyError:
        return "-"
    return str(request.sample.id)
