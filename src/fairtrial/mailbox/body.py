"""Bodies of messages: encoded, signed, and stored elsewhere when they are large."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from pathlib import Path
from typing import Any, Protocol, Self, get_origin

from fairtrial.base.codec import decode, dumps
from fairtrial.base.offload import in_thread
from fairtrial.data.sample import Attachment, BlobFolder
from fairtrial.errors import BodyError, ConfigurationError, DataError, MessageTooLargeError, StoreError
from fairtrial.store.compress import compress, decompress

NEWER_FORMAT_DELAY = 5.0
"""Seconds until a message that only newer workers can read is redelivered."""


class WireBody(Protocol):
    """A type that serializes itself.

    For high message rates: a class with both methods bypasses the codec. It must write JSON, so that dead letters are
    readable.
    """

    def to_wire(self) -> bytes:
        """Return the body as JSON in UTF-8. Raises `CodecError` if it cannot be serialized."""
        ...

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """Return the body from the bytes of `to_wire`. Raises `CodecError` if they are invalid.

        `NewerFormatError` means that a newer version can read it: the message is handed back instead of dead-lettered.
        """
        ...


def bind_body_type(mailbox: Any, kind: type[Any]) -> None:
    """Set the body type of a mailbox that was created without one.

    Raises:
        ConfigurationError: the mailbox already has a different body type.
    """
    bind = getattr(mailbox, "bind_body_type", None)  # Optional for custom mailboxes.
    if bind is not None:
        bind(kind)


def check_body_type(mailbox: str, body_type: Any, kind: type[Any]) -> None:
    """Raise `ConfigurationError` if the body type of a mailbox is not `kind`."""
    known = get_origin(body_type) or body_type
    if isinstance(known, type) and not issubclass(known, kind):
        raise ConfigurationError(
            f"mailbox {mailbox!r} must carry {kind.__name__} (got {known.__name__})\n"
            f"use a separate mailbox for each type of message"
        )


def encode_body(body: Any) -> bytes:
    """Return a body as bytes. Raises `CodecError` if it cannot be serialized."""
    if _writes_itself(type(body)):
        written: bytes = body.to_wire()
        return written
    return dumps(body).encode("utf-8")


def decode_body[T](kind: type[T], data: bytes) -> T:
    """Return a body from bytes. Raises `CodecError` if they are invalid."""
    if _writes_itself(kind):
        reader: Any = kind
        read: T = reader.from_wire(data)
        return read
    return decode(kind, data)


def _writes_itself(kind: Any) -> bool:
    return hasattr(kind, "to_wire") and hasattr(kind, "from_wire")


KEY_VARIABLE = "FAIRTRIAL_QUEUE_KEY"
_SIGNED = b"hmac-sha256:"
_DIGITS = 64
_MIN_KEY = 16
# A smaller body fits one packet anyway.
_WORTH_COMPRESSING = 4_096


def queue_key() -> bytes | None:
    """Return the key of this process; None if messages are not signed."""
    key = os.environ.get(KEY_VARIABLE, "").encode("utf-8", "surrogateescape")
    if key and len(key) < _MIN_KEY:
        raise ConfigurationError(f"{KEY_VARIABLE} must have at least {_MIN_KEY} characters (got {len(key)})")
    return key or None


def seal(body: bytes, key: bytes | None, mailbox: str, reply_to: str) -> bytes:
    """Return a body compressed and signed."""
    if len(body) > _WORTH_COMPRESSING:
        body = compress(body)
    if key is None:
        return body
    return b"%s%s:%s" % (_SIGNED, _signature(body, key, mailbox, reply_to), body)


def unseal(data: bytes, key: bytes | None, mailbox: str, reply_to: str) -> bytes:
    """Return the original body. Raises `BodyError` if it is damaged, or not signed with our key."""
    signature, body = _split(data)
    if key is not None:
        if signature is None:
            raise BodyError(f"it is not signed: set {KEY_VARIABLE} for every client and worker of this queue")
        if not hmac.compare_digest(signature, _signature(body, key, mailbox, reply_to)):
            raise BodyError(
                f"its signature is wrong: it was changed, redirected, or signed with another {KEY_VARIABLE}"
            )
    elif signature is not None:
        raise BodyError(f"it is signed, but this process has no {KEY_VARIABLE}")
    return _decompressed(body)


def readable(data: bytes) -> bytes:
    """Return the original body for display, without verification; unchanged if it cannot be decoded."""
    body = _split(data)[1]
    try:
        return _decompressed(body)
    except BodyError:
        return body


def _split(data: bytes) -> tuple[bytes | None, bytes]:
    end = len(_SIGNED) + _DIGITS
    if not data.startswith(_SIGNED) or data[end : end + 1] != b":":
        return None, data
    return data[len(_SIGNED) : end], data[end + 1 :]


def _signature(body: bytes, key: bytes, mailbox: str, reply_to: str) -> bytes:
    # Lengths separate the parts unambiguously.
    head = f"{len(mailbox)}:{mailbox}:{len(reply_to)}:{reply_to}:".encode()
    return hmac.new(key, head + body, hashlib.sha256).hexdigest().encode()


def _decompressed(body: bytes) -> bytes:
    try:
        return decompress(body)
    except StoreError:
        raise BodyError("its compressed content is damaged or too large") from None


THRESHOLD = 64 * 1024
MAX_BYTES = 64 * 1024 * 1024
_BLOB = re.compile(r"[0-9a-f]{64}")


class ClaimCheck:
    """Stores large bodies in a folder that all workers of a fleet share.

    Args:
        root: The folder.
        threshold: Larger bodies, in bytes, are stored here.
        max_bytes: Larger bodies are refused.
    """

    def __init__(
        self, root: Path | str | BlobFolder, *, threshold: int = THRESHOLD, max_bytes: int = MAX_BYTES
    ) -> None:
        if not 0 < threshold <= max_bytes:
            raise ConfigurationError(f"threshold must be between 1 and max_bytes (got {threshold})")
        self.folder = root if isinstance(root, BlobFolder) else BlobFolder(root)
        self.threshold = threshold
        self.max_bytes = max_bytes

    async def keep(self, body: bytes) -> str:
        """Store a body; returns its hash."""
        if len(body) > self.max_bytes:
            raise MessageTooLargeError(f"the body must have at most {self.max_bytes} bytes (got {len(body)})")
        return await in_thread(lambda: self._keep(body))

    async def fetch(self, sha256: str) -> bytes:
        """Return the body with this hash.

        Raises:
            BodyError: the hash is invalid or not found, or the body is damaged or too large.
            OSError: the folder cannot be read at present.
        """
        try:
            return await in_thread(lambda: self._fetch(Attachment(sha256)))
        except DataError as error:
            raise BodyError(str(error)) from None

    async def prune(self, older_than_seconds: float) -> int:
        """Delete bodies that were last sent longer ago than this; returns their number.

        Use a longer time than any message can exist: a body may belong to several messages, so it is not deleted when
        one of them is settled.
        """
        return await in_thread(lambda: self._prune(time.time() - older_than_seconds))

    def _keep(self, body: bytes) -> str:
        sha256 = self.folder.put(body).sha256
        os.utime(self.folder.path(sha256))  # Sent again: update its age.
        return sha256

    def _fetch(self, attachment: Attachment) -> bytes:
        try:
            size = self.folder.path(attachment.sha256).stat().st_size
        except FileNotFoundError:
            size = 0
        if size > self.max_bytes:  # Checked before it is read, because the folder is shared.
            raise BodyError(f"the body must have at most {self.max_bytes} bytes (got {size})")
        return self.folder.get(attachment)

    def _prune(self, before: float) -> int:
        removed = 0
        for path in self.folder.root.glob("??/*"):
            if _BLOB.fullmatch(path.name) and path.stat().st_mtime < before:
                path.unlink(missing_ok=True)
                removed += 1
        return removed
