"""Mailboxes on PostgreSQL. Needs the extra `postgres`."""

from fairtrial.errors import MissingExtraError

try:
    import psycopg as _client  # noqa: F401 - only to say what is missing
except ImportError as error:
    raise MissingExtraError("a mailbox on PostgreSQL", "postgres") from error

from fairtrial.mailbox.postgres.connection import PostgresConnection
from fairtrial.mailbox.postgres.mailbox import PostgresMailbox

__all__ = ["PostgresConnection", "PostgresMailbox"]
