"""The text of a message on SQS: a line of JSON with our own id and counters, then the body.

The counters of SQS cannot tell a nack from an expired lease. So a message that is returned is sent again as a copy with
the counters of the message, and its id stays the same.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from fairtrial.errors import BodyError

_ID: Final = re.compile(r"[0-9a-f]{32}")
_DEAD_ID: Final = re.compile(r"[0-9]{13,15}-[0-9a-f]{8}")
_REFUSED: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MAX_COUNT: Final = 1_000_000_000
_MAX_REASON: Final = 2000
HEADER_BYTES: Final = 16 * 1024
"""Room for the header within the size limit of a message."""


@dataclass(frozen=True, slots=True)
class WireMessage:
    """One message.

    Attributes:
        payload: The body: text, base64, or the hash of a claim check, depending on `form`.
        form: `text`, `base64` or `claim`.
        id: The id of the message, the same in every copy.
        reply_to: The reply address; empty if there is none.
        deliveries: The deliveries of earlier copies.
        expiries: The expired leases of earlier copies.
        not_before: Do not deliver it before this time, in seconds since the epoch.
        dead_id: The id of the dead letter; empty for other messages.
        reason: Why it is a dead letter.
        error: The type of the error that made it one.
        died_at: When it became one, in seconds since the epoch.
    """

    payload: str
    form: str = "text"
    id: str = ""
    reply_to: str = ""
    deliveries: int = 0
    expiries: int = 0
    not_before: float = 0.0
    dead_id: str = ""
    reason: str = ""
    error: str = ""
    died_at: float = 0.0

    @classmethod
    def of(cls, body: bytes, reply_to: str) -> Self:
        """Return a new message. Bodies with characters that SQS refuses are sent as base64."""
        try:
            text = body.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        if text is None or _REFUSED.search(text):
            return cls(base64.b64encode(body).decode(), "base64", secrets.token_hex(16), reply_to)
        return cls(text, "text", secrets.token_hex(16), reply_to)

    @classmethod
    def of_claim(cls, sha256: str, reply_to: str) -> Self:
        """Return a new message whose body is in a claim check."""
        return cls(sha256, "claim", secrets.token_hex(16), reply_to)

    def dumps(self) -> str:
        """Return the text to send."""
        header = {name: value for name, value in asdict(self).items() if name != "payload" and value != _DEFAULTS[name]}
        return json.dumps(header, separators=(",", ":"), ensure_ascii=False) + "\n" + self.payload

    @classmethod
    def loads(cls, text: str) -> Self:
        """Return the message of a text that was received.

        Raises:
            BodyError: it was not sent by a mailbox.
        """
        header, mark, payload = text.partition("\n")
        try:
            values = json.loads(header) if mark and len(header) <= HEADER_BYTES else None
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not _is_valid(values):
            raise BodyError("it was not sent by a mailbox: its first line is not a valid header")
        return cls(payload, **values)

    def body(self) -> bytes:
        """Return the body of a message that is not in a claim check. Raises `BodyError` if it is damaged."""
        if self.form == "text":
            return self.payload.encode("utf-8", "surrogatepass")
        try:
            return base64.b64decode(self.payload, validate=True)
        except (binascii.Error, ValueError):
            raise BodyError("its base64 is damaged") from None


_DEFAULTS: Final = {field.name: field.default for field in fields(WireMessage)}


def as_storable(text: str, longest: int = _MAX_REASON) -> str:
    """Return a reason or error as a header can store it: not too long, without characters that SQS refuses."""
    return _REFUSED.sub("\ufffd", text[:longest])


def _is_valid(values: dict[str, Any]) -> bool:
    """Check a header: anyone who can write to the queue can make one, and its values are displayed and logged."""
    for name, value in values.items():
        default = _DEFAULTS.get(name)
        if name == "payload" or name not in _DEFAULTS:
            return False
        if isinstance(default, str) and not isinstance(value, str):
            return False
        if isinstance(default, int | float) and (type(value) not in (int, type(default)) or not 0 <= value < 1e12):
            return False
        if isinstance(default, int) and value > _MAX_COUNT:
            return False
    dead_id = values.get("dead_id", "")
    return (
        _ID.fullmatch(values.get("id", "")) is not None
        and values.get("form", "text") in ("text", "base64", "claim")
        and (not dead_id or _DEAD_ID.fullmatch(dead_id) is not None)
    )
