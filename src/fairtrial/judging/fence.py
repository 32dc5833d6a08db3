"""Fence untrusted text inside a prompt, so that it cannot end its own fence.

Each piece is written as one line of JSON between two marks that carry a token. JSON keeps it on one line and escapes
its quotes; the token is a hash of everything that is fenced, so no text can contain the token of the fence it will be
in, and the same question always gets the same prompt, which a cache can answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.codec import canonical, to_json
from fairtrial.errors import DataError

_OPEN = "<<<BEGIN {token} {name}>>>"
_CLOSE = "<<<END {token} {name}>>>"
_BLOCK = re.compile(r"^<<<BEGIN ([0-9a-f]{32}) ([a-z_]+)>>>\n(.*)\n<<<END \1 \2>>>$", re.MULTILINE)


def token_for(pieces: Mapping[str, Any], *, salt: str) -> str:
    """Return the token of a fence around these pieces. Raises if a piece contains it, which no text can achieve."""
    content = canonical([salt, dict(pieces)])
    token = hashlib.sha256(content).hexdigest()[:32]
    if token.encode() in content:
        raise DataError("the text to be judged contains the token of its own fence; it is not sent to the judge")
    return token


def fenced(name: str, piece: Any, token: str) -> str:
    """Return a piece between its markers."""
    # ASCII JSON: marks that reorder or hide text on a screen become visible escapes.
    line = json.dumps(to_json(piece), ensure_ascii=True)
    return f"{_OPEN.format(token=token, name=name)}\n{line}\n{_CLOSE.format(token=token, name=name)}"


def fence(pieces: Mapping[str, Any], *, salt: str) -> tuple[str, str]:
    """Fence several pieces, each with a heading; returns (token, text)."""
    token = token_for(pieces, salt=salt)
    blocks = [f"{name.replace('_', ' ').capitalize()}:\n{fenced(name, piece, token)}" for name, piece in pieces.items()]
    return token, "\n\n".join(blocks)


def read_fences(text: str) -> Sequence[tuple[str, str, Any]]:
    """Return (token, name, piece) of every fence in a prompt, for tests and audits."""
    return [(token, name, json.loads(line)) for token, name, line in _BLOCK.findall(text)]
