"""Translates errors of redis-py."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import redis.exceptions as theirs

from fairtrial.errors import (
    MailboxAccessError,
    MailboxConnectionError,
    MailboxError,
    MailboxFullError,
    MailboxNotDurableError,
)

_PASSING = (
    "LOADING",
    "READONLY",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "BUSY ",
    "UNBLOCKED",
    "MISCONF",
    "NOREPLICAS",
)
_MOVING = (theirs.ClusterError, theirs.AskError, theirs.TryAgainError)
_REFUSED = ("NOAUTH", "NOPERM", "WRONGPASS", "NOPROTO")


@contextmanager
def lost_connections() -> Iterator[None]:
    """Raise redis-py's ConnectionError where it raises something else for a connection that was reset.

    Depending on the timing, redis-py raises an AttributeError, a TypeError or a RuntimeError (its issue 4287), because
    its reader or writer is None.
    """
    try:
        yield
    except (AttributeError, TypeError, RuntimeError) as error:
        raise theirs.ConnectionError(f"the connection was lost ({error!r})") from error


class ServerNotDurable(theirs.RedisError):
    """The server may lose confirmed messages. A RedisError, so that redis-py closes the connection."""


def translated(error: BaseException, doing: str) -> MailboxError:
    """Return the error as a `MailboxError`, with the text of the server, which contains no URL and no password."""
    if isinstance(error, MailboxError):
        return error
    if isinstance(error, ServerNotDurable):
        return MailboxNotDurableError(str(error))
    text = f"{doing}: {error}"
    if isinstance(error, theirs.AuthenticationError | theirs.NoPermissionError | theirs.AuthorizationError):
        return MailboxAccessError(text)
    if isinstance(error, theirs.ConnectionError | theirs.TimeoutError | theirs.ReadOnlyError | OSError):
        return MailboxConnectionError(f"{doing}: {_plainly(str(error))}")
    said = str(error)
    if isinstance(error, _MOVING):  # redis-py has cut off the word by which they could be known.
        return MailboxConnectionError(f"{doing}: the Redis Cluster is changing ({type(error).__name__}: {said})")
    if said.startswith(_REFUSED):
        return MailboxAccessError(text)
    if isinstance(error, theirs.OutOfMemoryError) or said.startswith("OOM"):
        return MailboxFullError(text)
    if said.startswith(_PASSING):
        return MailboxConnectionError(text)
    return MailboxError(text)


def is_gone(error: BaseException) -> bool:
    """Return whether the error means that the mailbox or its consumer group does not exist."""
    said = str(error)
    return said.startswith(("NOGROUP", "UNBLOCKED")) or "no such key" in said.lower()


def _plainly(said: str) -> str:
    """Simplify redis-py's message about an unreachable server."""
    found = re.match(r"Error (\d+) connecting to (\S+)\.(?: |$)(.*)", said, re.DOTALL)
    if found is None:
        return said
    secured = re.search(r"\[SSL[^]]*\] (.*?)(?: \(_ssl\.c|$)", found[3])  # Its number means something else there.
    return f"cannot connect to {found[2]}: {secured[1] if secured else os.strerror(int(found[1]))}"
