"""The mailboxes of a fleet, for commands that look at them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fairtrial.cli import options
from fairtrial.cli.faults import Mistake


def suite_names(names: Sequence[str], store: str | None) -> list[str]:
    """The suites that are meant: those that were named (by name, or by the file they are in), or those of the store."""
    from fairtrial.cli.loading import load

    if names:
        return [load(name).name if _is_place(name) else name for name in names]
    settings, _ = options.settings_with(store)
    found = [load(where).name for where in settings["suites"]]
    try:
        found += [run.suite for run in options.open_existing(store).runs(limit=200)]
    except Mistake:
        pass  # No store here: a machine that only works has none.
    distinct = list(dict.fromkeys(found))
    if not distinct:
        raise Mistake("which suite? None is named, and none is known here", "as in: fairtrial fleet support")
    return distinct


def _is_place(name: str) -> bool:
    return name.partition(":")[0].endswith(".py") or ":" in name


def with_mailboxes[T](url: str, names: Sequence[str], look: Callable[[str, Any], Awaitable[T]]) -> list[T]:
    """What `look` finds in the mailbox of each suite's requests."""
    import asyncio

    async def ask() -> list[T]:
        async with _office(url) as office:
            return [await look(name, await office.requests(name)) for name in names]

    return asyncio.run(ask())


@asynccontextmanager
async def _office(url: str) -> AsyncIterator[Any]:
    from fairtrial.fleet.post import open_post_office

    office = open_post_office(url)
    try:
        yield office
    finally:
        await office.close()
