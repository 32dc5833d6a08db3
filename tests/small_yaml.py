"""Reads the part of YAML that `deploy/` is written in, and refuses the rest: no library of ours or the tests' reads it.

Mappings and lists by indentation, one scalar per line, `|` blocks, JSON in brackets, comments, several documents.
"""

from __future__ import annotations

import json
import re
from typing import Any

_KEY = re.compile(r"""(?P<key>[A-Za-z0-9_./-]+):(?: (?P<rest>.*))?$""")


def documents(text: str) -> list[Any]:
    found = []
    for part in re.split(r"^---$", text, flags=re.MULTILINE):
        lines = _Lines(part)
        found.append(_block(lines, 0))
        assert lines.peek() is None, f"not understood: {lines.peek()}"
    return found


class _Lines:
    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.at = 0

    def peek(self) -> tuple[int, str] | None:
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.strip() and not line.lstrip().startswith("#"):
                assert "\t" not in line, f"a tab: {line!r}"
                return len(line) - len(line.lstrip()), line.strip()
            self.at += 1
        return None

    def raw_block(self, deeper_than: int) -> str:
        """A `|` block."""
        taken: list[str] = []
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.strip() and len(line) - len(line.lstrip()) <= deeper_than:
                break
            taken.append(line)
            self.at += 1
        indent = len(taken[0]) - len(taken[0].lstrip())
        return "\n".join(line[indent:] for line in taken).strip("\n") + "\n"


def _block(lines: _Lines, indent: int) -> Any:
    first = lines.peek()
    assert first is not None
    if first[0] < indent:
        return None
    return _list(lines, first[0]) if first[1].startswith("- ") else _mapping(lines, first[0])


def _list(lines: _Lines, indent: int) -> list[Any]:
    found: list[Any] = []
    while (line := lines.peek()) is not None and line[0] == indent and line[1].startswith("- "):
        inner = line[1][2:]
        if inner == "|":
            lines.at += 1
            found.append(lines.raw_block(indent))
        elif _KEY.match(inner) and not inner.startswith(("[", "{", '"')):
            lines.lines[lines.at] = " " * (indent + 2) + inner  # A mapping that begins beside the dash.
            found.append(_mapping(lines, indent + 2))
        else:
            lines.at += 1
            found.append(_scalar(inner))
    return found


def _mapping(lines: _Lines, indent: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while (line := lines.peek()) is not None and line[0] == indent and not line[1].startswith("- "):
        match = _KEY.match(line[1])
        assert match is not None, f"not understood: {line[1]!r}"
        assert match["key"] not in found, f"twice: {match['key']}"
        lines.at += 1
        if match["rest"] == "|":
            found[match["key"]] = lines.raw_block(indent)
        elif match["rest"]:
            found[match["key"]] = _scalar(match["rest"])
        else:
            after = lines.peek()
            deeper = after is not None and (after[0] > indent or (after[0] == indent and after[1].startswith("- ")))
            found[match["key"]] = _block(lines, indent) if deeper else None
    return found


def _scalar(text: str) -> Any:
    if text[0] in '["{':
        return json.loads(text)
    assert text[0] not in "'&*!>%@`|", f"not understood: {text!r}"
    assert " #" not in text, f"a comment behind a value: {text!r}"
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else text
