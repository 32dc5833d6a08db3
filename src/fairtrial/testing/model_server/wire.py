"""What the two protocols have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from fairtrial.testing.model_server.reply import Reply, Usage
from fairtrial.testing.model_server.request import ParsedRequest
from fairtrial.testing.model_server.request import Protocol as ProtocolName

# A fixed birthday: two runs against equal servers must be able to compare equal byte for byte.
EPOCH = 1_700_000_000


class Wire(Protocol):
    """One provider's protocol: how requests are read and answers are written."""

    name: ProtocolName

    def parse(self, body: Mapping[str, Any], *, number: int, raw: bytes, headers: Mapping[str, str]) -> ParsedRequest:
        """The request in neutral form; raises `InvalidRequestError` if the provider would not take it."""
        ...

    def completion(self, request: ParsedRequest, reply: Reply, usage: Usage) -> dict[str, Any]:
        """The body of an answer."""
        ...

    def events(self, request: ParsedRequest, reply: Reply, usage: Usage) -> list[bytes]:
        """The events of a streamed answer, ready to be sent."""
        ...

    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """The body of an error answer."""
        ...

    def error_event(self, message: str) -> bytes:
        """The event that ends a stream in failure."""
        ...

    def raw_event(self, data: str) -> bytes:
        """An event with any text as its data, for faults."""
        ...


def to_bytes(value: object) -> bytes:
    """JSON, ASCII only: whatever a test puts in a reply, even a lone surrogate, can be sent. Bytes stay as they are."""
    if isinstance(value, bytes):
        return value
    return json.dumps(value, separators=(",", ":")).encode("ascii")
