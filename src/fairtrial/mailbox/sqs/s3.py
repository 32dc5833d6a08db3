"""Claim checks in S3: large bodies are kept in a bucket, and the message carries their hash."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from fairtrial.errors import BodyError, ConfigurationError, MessageTooLargeError
from fairtrial.mailbox.claim_check import MAX_BYTES
from fairtrial.mailbox.sqs.connection import SqsConnection
from fairtrial.mailbox.sqs.errors import FAILURES, code_of, translated

THRESHOLD: Final = 256 * 1024
_HASH: Final = re.compile(r"[0-9a-f]{64}")


class S3ClaimCheck:
    """Stores large bodies in the bucket of an SQS address, under `<prefix>/<SHA-256>`.

    Objects are not deleted when a message is settled, because several messages may have the same body: give the bucket
    a lifecycle rule that deletes them after 15 days, which is longer than SQS keeps a message.

    Args:
        connection: The connection, whose address names the bucket.
        threshold: Larger bodies, in bytes, are stored here. A smaller one costs less in the message.
        max_bytes: Larger bodies are refused.
    """

    def __init__(self, connection: SqsConnection, *, threshold: int = THRESHOLD, max_bytes: int = MAX_BYTES) -> None:
        if connection.address.bucket is None:
            raise ConfigurationError("the SQS address must name a bucket: sqs://region/prefix?bucket=NAME")
        if not 0 < threshold <= max_bytes:
            raise ConfigurationError(f"threshold must be between 1 and max_bytes (got {threshold})")
        self.bucket = connection.address.bucket
        self.threshold = threshold
        self.max_bytes = max_bytes
        self._connection = connection

    async def keep(self, body: bytes) -> str:
        """Store a body; returns its hash."""
        if len(body) > self.max_bytes:
            raise MessageTooLargeError(f"the body must have at most {self.max_bytes} bytes (got {len(body)})")
        sha256 = hashlib.sha256(body).hexdigest()
        try:
            # Even if it is there: that renews the age by which the bucket deletes objects.
            await self._connection.call_s3("put_object", Bucket=self.bucket, Key=self._key(sha256), Body=body)
        except FAILURES as error:
            raise translated(error, f"storing a large body in bucket {self.bucket}") from None
        return sha256

    async def fetch(self, sha256: str) -> bytes:
        """Return the body with this hash.

        Raises:
            BodyError: the hash is invalid or not found, or the body is damaged or too large.
            OSError: the bucket cannot be read at present.
        """
        if not _HASH.fullmatch(sha256):
            raise BodyError("it names no valid claim check")
        try:
            answer = await self._connection.call_s3("get_object", Bucket=self.bucket, Key=self._key(sha256))
            async with answer["Body"] as stream:
                size = int(answer["ContentLength"])
                if size > self.max_bytes:  # Checked before it is read, because the bucket is shared.
                    raise BodyError(f"the body must have at most {self.max_bytes} bytes (got {size})")
                body: bytes = await stream.read()
        except FAILURES as error:
            if code_of(error) in ("NoSuchKey", "404"):
                raise BodyError(f"its body {sha256[:12]} is not in bucket {self.bucket}") from None
            raise OSError(str(translated(error, f"reading a large body from bucket {self.bucket}"))) from None
        if hashlib.sha256(body).hexdigest() != sha256:
            raise BodyError(f"its body {sha256[:12]} in bucket {self.bucket} is damaged")
        return body

    def _key(self, sha256: str) -> str:
        return f"{self._connection.address.prefix}/{sha256}"
