"""A session as bytes and back. A snapshot is data: it names types and never leads to importing one."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from fairtrial.codec import from_json, parse_json
from fairtrial.codec.encode import compact
from fairtrial.codec.escape import escape_text
from fairtrial.errors import CodecError, SessionError
from fairtrial.session.views import Envelope, RecordedView

_VERSION = 1


def snapshot_bytes(session_id: str, tags: Mapping[str, str], envelopes: tuple[Envelope, ...]) -> bytes:
    """A record as bytes."""
    tree = {
        "version": _VERSION,
        "session_id": session_id,
        "tags": {escape_text(name): escape_text(value) for name, value in tags.items()},
        "events": envelopes,  # Named tuples, which JSON writes as arrays.
    }
    return compact(tree).encode("utf-8")


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
