"""The queues of a fleet, by the names of its suites."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fairtrial.cli import options
from fairtrial.cli.adhoc import load
from fairtrial.cli.user_errors import UserError
from fairtrial.errors import MailboxAccessError
from fairtrial.reports.render.safe_text import plain


def suite_names(names: Sequence[str], store: str | None) -> list[str]:
    """Return the names of the suites given by name or file; by default the configured and stored ones."""
    if names:
        return [load(name).name if is_file(name) else name for name in names]
    distinct = _known_suites(store)
    if not distinct:
        raise UserError("no suite is given, and none is configured or stored here", "as in: fairtrial fleet support")
    return distinct


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

    async def queues() -> list[str]:
        async with _broker(url) as broker:
            try:
                found: list[str] = await broker.suites()
            except MailboxAccessError:  # Users with the rights of workers may not search for queues.
                return []
            return found

    if asyncio.run(look()):
        return
    known = _known_suites(store)
    if name in known:
        return
    known = list(dict.fromkeys([*known, *asyncio.run(queues())]))
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
