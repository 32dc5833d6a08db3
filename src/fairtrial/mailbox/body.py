"""Bodies as bytes and back: through the codec, or by a type's own faster way."""

from __future__ import annotations

from typing import Any, Protocol, Self

from fairtrial.codec import decode, dumps

NEWER_FORMAT_DELAY = 5.0
"""Seconds until a message that only newer workers can read is offered again."""


class WireBody(Protocol):
    """A type that writes and reads itself.

    For bodies that travel by the ten thousand per second: a class with both methods is not walked by the codec.
    What it writes is JSON, like everything else on the wire, so that dead letters can be read by people.
    """

    def to_wire(self) -> bytes:
        """The body as JSON in UTF-8. Raises `CodecError` for what cannot travel."""
        ...

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The body from what `to_wire` wrote. Raises `CodecError` for anything else, whoever sent it.

        `NewerFormatError` says that a newer version could read it: the message is handed back, not set aside.
        """
        ...


def encode_body(body: Any) -> bytes:
    """A body as bytes. Raises `CodecError` for what cannot travel."""
    if _writes_itself(type(body)):
        written: bytes = body.to_wire()
        return written
    return dumps(body).encode("utf-8")


def decode_body[T](kind: type[T], data: bytes) -> T:
    """A body from bytes. Raises `CodecError` for what is not one."""
    if _writes_itself(kind):
        reader: Any = kind
        read: T = reader.from_wire(data)
        return read
    return decode(kind, data)


def _writes_itself(kind: Any) -> bool:
    return hasattr(kind, "to_wire") and hasattr(kind, "from_wire")
