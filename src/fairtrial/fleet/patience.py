"""Calls to a mailbox whose server may be away for a while."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio

from fairtrial.errors import MailboxConnectionError, MailboxFullError
from fairtrial.store.redact import RedactingFilter

log = logging.getLogger("fairtrial.fleet")
log.addFilter(RedactingFilter())

PATIENCE_SECONDS = 600.0
_FIRST_DELAY = 0.05
_LONGEST_DELAY = 2.0


def _never() -> bool:
    return False


async def persistently[T](
    call: Callable[[], Awaitable[T]],
    doing: str,
    *,
    seconds: float = PATIENCE_SECONDS,
    enough: Callable[[], bool] = _never,
) -> T:
    """The result of a call; while the server is away or full it is made again, for `seconds` at most.

    Only for calls that may be made twice. When `enough` says so, the next failure is raised.
    """
    end = anyio.current_time() + seconds
    delay = _FIRST_DELAY
    while True:
        try:
            return await call()
        except (MailboxConnectionError, MailboxFullError) as error:
            if anyio.current_time() >= end or enough():
                raise
            if delay == _FIRST_DELAY:
                log.warning("%s: %s; trying again", doing, error)
        await anyio.sleep(delay)
        delay = min(delay * 2, _LONGEST_DELAY)
