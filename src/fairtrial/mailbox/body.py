"""Bodies as bytes and back: through the codec, or by a type's own faster way."""

from __future__ import annotations

from typing import Any, Protocol, Self, cast

from fairtrial.codec import decode, dumps


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
        """The body from what `to_wire` wrote. Raises `CodecError` for anything else, whoever sent it."""
        ...


def encode_body(body: Any) -> bytes:
    """A body as bytes. Raises `CodecError` for what cannot travel."""
    kind = type(body)
    if hasattr(kind, "to_wire") and hasattr(kind, "from_wire"):
        return cast(bytes, body.to_wire())
    return dumps(body).encode("utf-8")


def decode_body[T](kind: type[T], data: bytes) -> T:
    """A body from bytes. Raises `CodecError` for what is not one."""
    if hasattr(kind, "to_wire") and hasattr(kind, "from_wire"):
        return cast(T, cast(Any, kind).from_wire(data))
    return decode(kind, data)
