"""Translates errors of psycopg."""

from __future__ import annotations

import psycopg

from fairtrial.errors import (
    ConfigurationError,
    FairtrialError,
    MailboxAccessError,
    MailboxConnectionError,
    MailboxError,
    MailboxFullError,
)

_FULL = ("53100", "53200")  # disk_full, out_of_memory
_READ_ONLY = "25006"  # As during a failover.
# The server tells the state of a refused connection, but psycopg passes on the text alone.
_REFUSED = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "permission denied for database")
_POOLED = ("unsupported startup parameter", "prepared statement")


def translated(error: BaseException, doing: str) -> FairtrialError:
    """Return the error as a `MailboxError`, with the text of the server, which contains no URL and no password."""
    if isinstance(error, FairtrialError):
        return error
    text = f"{doing}: {_first_lines(str(error))}"
    if any(part in text for part in _POOLED):
        return ConfigurationError(f"{text}\nfor a PgBouncer, add ?pgbouncer=true to the address")
    state = getattr(error, "sqlstate", None) or ""
    if isinstance(error, psycopg.errors.InsufficientPrivilege) or state.startswith("28") or _is_refusal(text):
        return MailboxAccessError(text)
    if state in _FULL:
        return MailboxFullError(text)
    if isinstance(error, psycopg.OperationalError | OSError | TimeoutError) or state == _READ_ONLY:
        return MailboxConnectionError(text)
    return MailboxError(text)


def _is_refusal(text: str) -> bool:
    return any(part in text for part in _REFUSED) or ('role "' in text and "does not exist" in text)


def _first_lines(text: str) -> str:
    """Return the message without the multiple attempts and the row data that may follow."""
    lines = [line for line in text.strip().splitlines() if not line.startswith(("DETAIL", "CONTEXT", "- "))]
    return " ".join(lines[:2])
