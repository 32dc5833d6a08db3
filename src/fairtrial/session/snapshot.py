"""A session as bytes and back. A snapshot is data: it names types and never leads to importing one."""

from __future__ import annotations

import json
from uuid import UUID

from fairtrial.codec import from_json, parse_json, to_json
from fairtrial.errors import CodecError, SessionError
from fairtrial.session.views import Envelope, RecordedView

_VERSION = 1
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def snapshot_bytes(view: RecordedView) -> bytes:
    """The record behind a view as bytes."""
    events = [
        [
            found.seq,
            found.time,
            found.actor,
            found.attempt,
            found.span_id,
            found.parent_id,
            found.kind,
            found.data,
        ]
        for found in view.envelopes
    ]
    tree = {"version": _VERSION, "session_id": str(view.session_id), "tags": to_json(view.tags), "events": events}
    return _encode(tree).encode("utf-8")


def restore_session(data: bytes) -> RecordedView:
    """The read-only view of a session from its snapshot."""
    try:
        tree = parse_json(data)
        if tree["version"] != _VERSION:
            raise SessionError(
                f"the snapshot has format {tree['version']!r}, this version of Fairtrial reads {_VERSION}; upgrade it"
            )
        envelopes = tuple(Envelope(*fields) for fields in tree["events"])
        return RecordedView(UUID(tree["session_id"]), from_json(dict[str, str], tree["tags"], frozen=True), envelopes)
    except (CodecError, KeyError, TypeError, ValueError) as error:
        raise SessionError(f"not a session snapshot: {error}") from None
