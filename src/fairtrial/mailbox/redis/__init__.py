"""Mailboxes on Redis Streams. Needs the extra `redis`."""

from fairtrial.errors import MissingExtraError

try:
    import redis as _client  # noqa: F401 - only to say what is missing
except ImportError as error:
    raise MissingExtraError("a mailbox on Redis", "redis") from error

from fairtrial.mailbox.redis.connection import RedisConnection
from fairtrial.mailbox.redis.mailbox import RedisMailbox, RedisMailboxFactory

__all__ = ["RedisConnection", "RedisMailbox", "RedisMailboxFactory"]
