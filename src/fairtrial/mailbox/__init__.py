"""Message queues with leases: the protocol and its implementations.

Exported names are imported lazily, so that a process imports only the client of the server that it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairtrial.base.lazy import lazy_names

if TYPE_CHECKING:
    from fairtrial.mailbox.body import WireBody
    from fairtrial.mailbox.bulk import acknowledge_all, reply_all, send_all
    from fairtrial.mailbox.claim_check import ClaimCheck
    from fairtrial.mailbox.dead_letters import DeadLetter, DeadLetters, DLQPolicy
    from fairtrial.mailbox.lease import Lease, LeaseExtender
    from fairtrial.mailbox.memory import InMemoryMailbox
    from fairtrial.mailbox.postgres import PostgresConnection, PostgresMailbox, PostgresMailboxFactory
    from fairtrial.mailbox.protocol import Mailbox, MailboxDepth, Message, Receipt, Renewer
    from fairtrial.mailbox.redis import RedisConnection, RedisMailbox, RedisMailboxFactory
    from fairtrial.mailbox.resolver import CompositeResolver, MailboxFactory, MailboxResolver
    from fairtrial.mailbox.sqs import S3ClaimCheck, SqsAddress, SqsConnection, SqsMailbox, SqsMailboxFactory

_WHERE = {
    "ClaimCheck": "claim_check",
    "CompositeResolver": "resolver",
    "DLQPolicy": "dead_letters",
    "DeadLetter": "dead_letters",
    "DeadLetters": "dead_letters",
    "InMemoryMailbox": "memory",
    "Lease": "lease",
    "LeaseExtender": "lease",
    "Mailbox": "protocol",
    "MailboxDepth": "protocol",
    "MailboxFactory": "resolver",
    "MailboxResolver": "resolver",
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
    "acknowledge_all": "bulk",
    "reply_all": "bulk",
    "send_all": "bulk",
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
    __getattr__ = lazy_names(__name__, _WHERE)
