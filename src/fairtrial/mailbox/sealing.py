"""Compression and signing of message bodies.

Without signatures, anyone who can write to the broker can forge results. With `FAIRTRIAL_QUEUE_KEY` set in the
environment of clients and workers, a body has an HMAC over itself, its mailbox and the reply address; a body without a
valid one becomes a dead letter and never reaches a worker.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from fairtrial.errors import BodyError, ConfigurationError, StoreError
from fairtrial.store.compress import compress, decompress

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
