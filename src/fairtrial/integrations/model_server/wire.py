"""The interface of the protocols."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from fairtrial.integrations.model_server.reply import Reply, Usage
from fairtrial.integrations.model_server.request import ParsedRequest
from fairtrial.integrations.model_server.request import Protocol as ProtocolName

# A fixed creation time, so that equal servers give answers that are equal byte for byte.
EPOCH = 1_700_000_000


class Wire(Protocol):
    """One provider's protocol: how requests are read and answers are written."""

    name: ProtocolName

    def parse(self, body: Mapping[str, Any], *, number: int, raw: bytes, headers: Mapping[str, str]) -> ParsedRequest:
        """Parse a request; raises `InvalidRequestError` if the provider would refuse it."""
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
    """Encode a value as ASCII JSON, so that even a lone surrogate can be sent. Bytes are returned unchanged."""
    if isinstance(value, bytes):
        return value
    return json.dumps(value, separators=(",", ":")).encode("ascii")
