"""Serialize sessions. A snapshot only names types; reading one never imports a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from fairtrial.base.codec import from_json, parse_json
from fairtrial.base.codec.encode import compact
from fairtrial.base.codec.escape import escape_text
from fairtrial.data.session.views import Envelope, RecordedView
from fairtrial.errors import CodecError, SessionError

_VERSION = 1
_PLAIN = frozenset({"task", "judge", "framework"})
_HEAD: Any = tuple[int, float, str, int, str | None, str | None, str]  # An envelope without its data.


def snapshot_bytes(session_id: str, tags: Mapping[str, str], envelopes: tuple[Envelope, ...]) -> bytes:
    """Serialize a record."""
    tree = {
        "version": _VERSION,
        "session_id": session_id,
        "tags": {escape_text(name): escape_text(value) for name, value in tags.items()},
        # Named tuples, which JSON writes as arrays; only an actor's name may still need its text escaped.
        "events": [
            found if found.actor in _PLAIN else found._replace(actor=escape_text(found.actor)) for found in envelopes
        ],
    }
    return compact(tree).encode("utf-8")


def restore_session(data: bytes) -> RecordedView:
    """Return the read-only view of a session from its snapshot."""
    try:
        tree = parse_json(data)
        if not isinstance(tree, dict):
            raise CodecError("an object was expected")
        if tree.get("version") != _VERSION:
            raise SessionError(
                f"the snapshot has format {tree.get('version')!r}, but this Fairtrial reads format {_VERSION}; upgrade "
                "the older of the two"
            )
        session_id = from_json(UUID, tree.get("session_id"))
        tags = from_json(dict[str, str], tree.get("tags"), frozen=True)
        events = tree.get("events")
        if not isinstance(events, list):
            raise CodecError("its events are missing")
        return RecordedView(session_id, tags, tuple(_envelope(fields) for fields in events))
    except CodecError as error:
        raise SessionError(f"not a session snapshot: {error}") from None


def _envelope(fields: Any) -> Envelope:
    if not isinstance(fields, list) or not fields:
        raise CodecError("an event is not an array")
    *head, data = fields  # The data stays as it is on the wire until someone asks for it with a type.
    seq, time, actor, attempt, span_id, parent_id, kind = from_json(_HEAD, head)
    return Envelope(seq, time, actor, attempt, span_id, parent_id, kind, data)
