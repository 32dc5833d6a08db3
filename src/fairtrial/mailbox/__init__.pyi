from fairtrial.mailbox.body import ClaimCheck as ClaimCheck, WireBody as WireBody
from fairtrial.mailbox.lease import Lease as Lease, LeaseExtender as LeaseExtender
from fairtrial.mailbox.memory import InMemoryMailbox as InMemoryMailbox
from fairtrial.mailbox.postgres import PostgresConnection as PostgresConnection, PostgresMailbox as PostgresMailbox
from fairtrial.mailbox.protocol import (
    CompositeResolver as CompositeResolver,
    DeadLetter as DeadLetter,
    DeadLetters as DeadLetters,
    DLQPolicy as DLQPolicy,
    Mailbox as Mailbox,
    MailboxDepth as MailboxDepth,
    MailboxFactory as MailboxFactory,
    MailboxResolver as MailboxResolver,
    Message as Message,
    Receipt as Receipt,
    Renewer as Renewer,
)
from fairtrial.mailbox.redis import (
    RedisConnection as RedisConnection,
    RedisMailbox as RedisMailbox,
    RedisMailboxFactory as RedisMailboxFactory,
)
from fairtrial.mailbox.server import (
    ServerMailboxFactory as ServerMailboxFactory,
    acknowledge_all as acknowledge_all,
    reply_all as reply_all,
    send_all as send_all,
)
from fairtrial.mailbox.sqs import (
    S3ClaimCheck as S3ClaimCheck,
    SqsAddress as SqsAddress,
    SqsConnection as SqsConnection,
    SqsMailbox as SqsMailbox,
)

__all__: list[str]
