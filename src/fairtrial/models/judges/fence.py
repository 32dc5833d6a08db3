"""Fence untrusted text inside a prompt, so that it cannot end its own fence.

Each piece is written as one line of JSON between two marks that carry a token. JSON keeps it on one line and escapes
its quotes; the token is a hash of everything that is fenced, so no text can contain the token of the fence it will be
in, and the same question always gets the same prompt, which a cache can answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.base.codec import canonical, from_json, to_json
from fairtrial.data.sample import Attachment
from fairtrial.errors import DataError

_OPEN = "<<<BEGIN {token} {name}>>>"
_CLOSE = "<<<END {token} {name}>>>"
_ATTACHMENT = {"sha256", "media_type", "size", "name"}
_SHA256 = re.compile("[0-9a-f]{64}")
_BLOCK = re.compile(r"^<<<BEGIN ([0-9a-f]{32}) ([a-z_]+)>>>\n(.*)\n<<<END \1 \2>>>$", re.MULTILINE)


def token_for(pieces: Mapping[str, Any], *, salt: str) -> str:
    """Return the token of a fence around these pieces. Raises if a piece contains it, which no text can achieve."""
    content = canonical([salt, dict(pieces)])
    token = hashlib.sha256(content).hexdigest()[:32]
    if token.encode() in content:
        raise DataError("the text to be judged contains the token of its own fence; it is not sent to the judge")
    return token


class Material:
    """Pieces to be judged as JSON, with their attachments taken out and numbered.

    A judge sees the attachments themselves, and in their place only the number: a file name must not decide.
    """

    def __init__(self, pieces: Mapping[str, Any]) -> None:
        self.attachments: list[Attachment] = []
        self._trees = {name: self._shown(to_json(piece)) for name, piece in pieces.items()}

    def fenced(self, name: str, token: str) -> str:
        """Return a piece between its markers."""
        line = _visible(json.dumps(self._trees[name], ensure_ascii=False))
        return f"{_OPEN.format(token=token, name=name)}\n{line}\n{_CLOSE.format(token=token, name=name)}"

    def with_attachments(self, text: str) -> str | tuple[str | Attachment, ...]:
        """Return the content of the message with the material: its attachments come first."""
        parts: list[str | Attachment] = []
        for number, attachment in enumerate(self.attachments, 1):
            parts += [f"Attachment {number}, a part of the material to assess:\n", attachment, "\n\n"]
        return (*parts, text) if parts else text

    def _shown(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self._shown(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if tree.keys() == _ATTACHMENT and isinstance(tree["sha256"], str) and _SHA256.fullmatch(tree["sha256"]):
            self.attachments.append(from_json(Attachment, tree))
            return {"attachment": len(self.attachments)}
        return {key: self._shown(item) for key, item in tree.items()}


def fence(pieces: Mapping[str, Any], *, salt: str) -> tuple[str, str, Material]:
    """Fence several pieces, each with a heading; returns (token, text, material)."""
    token, material = token_for(pieces, salt=salt), Material(pieces)
    blocks = [f"{name.replace('_', ' ').capitalize()}:\n{material.fenced(name, token)}" for name in pieces]
    return token, "\n\n".join(blocks), material


class _Escapes(dict[int, str]):
    """Escapes of the characters that hide or reorder text on a screen; text of every script stays readable."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        hides = unicodedata.category(character) in _HIDING or character in _FILLERS
        self[code] = json.dumps(character)[1:-1] if hides else character
        return self[code]


# Control, format and bidirectional characters, surrogates, private and unassigned ones, separators of lines.
_HIDING = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_FILLERS = "\u115f\u1160\u3164\uffa0"  # Letters that are not visible.
_escapes = _Escapes()


def _visible(text: str) -> str:
    return text if text.isascii() else text.translate(_escapes)


def read_fences(text: str) -> Sequence[tuple[str, str, Any]]:
    """Return (token, name, piece) of every fence in a prompt, for tests and audits."""
    return [(token, name, json.loads(line)) for token, name, line in _BLOCK.findall(text)]
