"""Serialization of message bodies: by the codec, or by the methods of the body's type."""

from __future__ import annotations

from typing import Any, Protocol, Self, get_origin

from fairtrial.base.codec import decode, dumps
from fairtrial.errors import ConfigurationError

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
