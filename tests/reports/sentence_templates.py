"""The sentence templates of the source, as text with {} for each placeholder, and as regular expressions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fairtrial

SOURCE = Path(fairtrial.__file__).parent
TOPICS = ("figures", "compare", "gate", "leaderboard", "plan", "calibrate", "watch")
WORDED = ("remarks", "document")
"""The modules of `reports.report` that word statistical figures; the others only lay out what these say."""

_NAMED = re.compile(r"\{\w+\}")  # A placeholder of str.format in a constant.


@cache
def templates() -> frozenset[str]:
    """Return every template: strings with a placeholder and two words, or a word between three.

    Arguments of exceptions are messages for programmers and have tests of their own; a `__repr__` is no sentence.
    """
    folders = ("stats", *(f"reports/{topic}" for topic in TOPICS))
    files = [file for folder in folders for file in sorted((SOURCE / folder).glob("*.py"))]
    files += [SOURCE / "reports" / "report" / f"{name}.py" for name in WORDED]
    return frozenset(text for file in files for text in _texts(file))


def _texts(file: Path) -> Iterator[str]:
    nodes: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if _no_sentence(node):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMED.search(node.value):
            text = _NAMED.sub("{}", node.value)
        else:
            continue
        words = re.findall(r"[a-zA-Z]{2,}", text)
        if " " in text.strip() and (len(words) > 1 or (words and text.count("{}") > 2)):
            yield text


def _no_sentence(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        return bool(name.endswith("Error"))
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return docstring or isinstance(node, ast.Raise) or (isinstance(node, ast.FunctionDef) and node.name == "__repr__")


@cache
def pattern(text: str) -> re.Pattern[str]:
    """Return the expression that matches what a template prints: whole words, with anything for a placeholder."""
    first, *rest = filter(None, text.split("{}"))
    start = r"(?<!\w)" if text[:1].isalnum() else ""
    end = r"(?!\w)" if text[-1:].isalnum() else ""
    # Atomic groups: what comes between two placeholders is sought once, so that long lines cost no backtracking.
    found = "".join(f"(?>.*?{re.escape(part)})" for part in rest)
    return re.compile(start + re.escape(first) + found + end)
