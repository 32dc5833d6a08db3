"""Mailboxes on Amazon SQS. Needs the extra `sqs`."""

from fairtrial.errors import MissingExtraError

try:
    import aiobotocore as _client  # noqa: F401 - only to say what is missing
except ImportError as error:
    raise MissingExtraError("a mailbox on SQS", "sqs") from error

from fairtrial.mailbox.sqs.connection import SqsAddress, SqsConnection
from fairtrial.mailbox.sqs.mailbox import SqsMailbox
from fairtrial.mailbox.sqs.queues import S3ClaimCheck

__all__ = ["S3ClaimCheck", "SqsAddress", "SqsConnection", "SqsMailbox"]
