"""From Redis's errors to ours."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import redis.exceptions as theirs

from fairtrial.errors import MailboxAccessError, MailboxConnectionError, MailboxError, MailboxFullError

_PASSING = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ", "UNBLOCKED", "MISCONF")
_REFUSED = ("NOAUTH", "NOPERM", "WRONGPASS", "NOPROTO")


@contextmanager
def lost_connections() -> Iterator[None]:
    """Raise redis-py's own ConnectionError where it fails over a connection that was reset under it.

    Depending on the moment, redis-py lets an AttributeError, a TypeError or a RuntimeError out (its issue 4287): its
    reader or writer is None by then.
    """
    try:
        yield
    except (AttributeError, TypeError, RuntimeError) as error:
        raise theirs.ConnectionError(f"the connection was lost ({error!r})") from error


def translated(error: BaseException, doing: str) -> MailboxError:
    """The error as one of ours. The text of the server is kept; no address and no password is in it."""
    if isinstance(error, MailboxError):
        return error
    text = f"{doing}: {error}"
    if isinstance(error, theirs.AuthenticationError | theirs.NoPermissionError | theirs.AuthorizationError):
        return MailboxAccessError(text)
    if isinstance(error, theirs.ConnectionError | theirs.TimeoutError | theirs.ReadOnlyError | OSError):
        return MailboxConnectionError(f"{doing}: {_plainly(str(error))}")
    said = str(error)
    if said.startswith(_REFUSED):
        return MailboxAccessError(text)
    if isinstance(error, theirs.OutOfMemoryError) or said.startswith("OOM"):
        return MailboxFullError(text)
    if said.startswith(_PASSING):
        return MailboxConnectionError(text)
    return MailboxError(text)


def is_gone(error: BaseException) -> bool:
    """Whether the server says that the mailbox, or its group of readers, does not exist."""
    said = str(error)
    return said.startswith(("NOGROUP", "UNBLOCKED")) or "no such key" in said.lower()


def _plainly(said: str) -> str:
    """What the client says of a server that is not there, without its numbers and its tuples."""
    found = re.match(r"Error (\d+) connecting to (\S+)\.(?: |$)(.*)", said, re.DOTALL)
    if found is None:
        return said
    secured = re.search(r"\[SSL[^]]*\] (.*?)(?: \(_ssl\.c|$)", found[3])  # Its number means something else there.
    return f"cannot connect to {found[2]}: {secured[1] if secured else os.strerror(int(found[1]))}"
