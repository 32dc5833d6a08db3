"""Message queues with leases: the protocol and its implementations.

Exported names are imported lazily, so that a process imports only the client of the server that it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairtrial.base.lazy import lazy_names

if TYPE_CHECKING:
    from fairtrial.mailbox.body import ClaimCheck, WireBody
    from fairtrial.mailbox.lease import Lease, LeaseExtender
    from fairtrial.mailbox.memory import InMemoryMailbox
    from fairtrial.mailbox.postgres import PostgresConnection, PostgresMailbox, PostgresMailboxFactory
    from fairtrial.mailbox.protocol import (
        CompositeResolver,
        DeadLetter,
        DeadLetters,
        DLQPolicy,
        Mailbox,
        MailboxDepth,
        MailboxFactory,
        MailboxResolver,
        Message,
        Receipt,
        Renewer,
    )
    from fairtrial.mailbox.redis import RedisConnection, RedisMailbox, RedisMailboxFactory
    from fairtrial.mailbox.server import acknowledge_all, reply_all, send_all
    from fairtrial.mailbox.sqs import S3ClaimCheck, SqsAddress, SqsConnection, SqsMailbox, SqsMailboxFactory

_WHERE = {
    "ClaimCheck": "body",
    "CompositeResolver": "protocol",
    "DLQPolicy": "protocol",
    "DeadLetter": "protocol",
    "DeadLetters": "protocol",
    "InMemoryMailbox": "memory",
    "Lease": "lease",
    "LeaseExtender": "lease",
    "Mailbox": "protocol",
    "MailboxDepth": "protocol",
    "MailboxFactory": "protocol",
    "MailboxResolver": "protocol",
    "Message": "protocol",
    "PostgresConnection": "postgres",
    "PostgresMailbox": "postgres",
    "PostgresMailboxFactory": "postgres",
    "Receipt": "protocol",
    "RedisConnection": "redis",
    "RedisMailbox": "redis",
    "RedisMailboxFactory": "redis",
    "Renewer": "protocol",
    "S3ClaimCheck": "sqs",
    "SqsAddress": "sqs",
    "SqsConnection": "sqs",
    "SqsMailbox": "sqs",
    "SqsMailboxFactory": "sqs",
    "WireBody": "body",
    "acknowledge_all": "server",
    "reply_all": "server",
    "send_all": "server",
}

__all__ = [
    "ClaimCheck",
    "CompositeResolver",
    "DLQPolicy",
    "DeadLetter",
    "DeadLetters",
    "InMemoryMailbox",
    "Lease",
    "LeaseExtender",
    "Mailbox",
    "MailboxDepth",
    "MailboxFactory",
    "MailboxResolver",
    "Message",
    "PostgresConnection",
    "PostgresMailbox",
    "PostgresMailboxFactory",
    "Receipt",
    "RedisConnection",
    "RedisMailbox",
    "RedisMailboxFactory",
    "Renewer",
    "S3ClaimCheck",
    "SqsAddress",
    "SqsConnection",
    "SqsMailbox",
    "SqsMailboxFactory",
    "WireBody",
    "acknowledge_all",
    "reply_all",
    "send_all",
]


if not TYPE_CHECKING:  # A type checker would take this to mean that every name exists.
    __getattr__, __dir__ = lazy_names(__name__, _WHERE)
