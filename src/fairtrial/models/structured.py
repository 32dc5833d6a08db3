"""Parse replies as the requested type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fairtrial.base.codec import from_json, parse_json
from fairtrial.base.codec.escape import escape_text
from fairtrial.data.session.trajectory import ChatMessage

_FENCE = "```"


@dataclass(frozen=True, slots=True)
class OutputRepaired:
    """A reply did not match the requested type, and the model was asked to repair it. `repaired`: whether it did."""

    prompt_name: str
    problem: str
    raw: str
    repaired: bool


def parse_output(kind: Any, text: str, *, wrapped: bool = False) -> Any:
    """Parse a reply as a `kind`; text is returned as it is.

    Args:
        kind: Any type the codec knows.
        text: The answer.
        wrapped: The schema was an object with the value under "value"; a model that ignored it may have answered with
            the value itself.

    Raises:
        CodecError: the reply does not match the type.
    """
    if kind is str:
        return text
    # A key that comes twice says two things, and choosing one would be a guess.
    tree = _escaped(parse_json(_without_fence(text), unique_keys=True))
    if wrapped and isinstance(tree, dict) and set(tree) == {"value"}:
        tree = tree["value"]
    return from_json(kind, tree)


def _without_fence(text: str) -> str:
    """Return the content if the whole answer is a Markdown code block, else the answer.

    Models often wrap JSON in a code block. This does not use a regular expression: an answer can be a megabyte of
    newlines, and backtracking over those blocks the interpreter.
    """
    block = text.strip()
    first_line, newline, rest = block.partition("\n")
    language = first_line.removeprefix(_FENCE).strip()
    if not newline or not first_line.startswith(_FENCE) or not rest.endswith(_FENCE):
        return text
    if language and not language.replace("-", "_").isidentifier():
        return text
    return rest.removesuffix(_FENCE)


def repair_messages(problem: str, said: ChatMessage) -> tuple[ChatMessage, ChatMessage]:
    """Return the messages to add after an invalid answer: the answer, and the request to repair it."""
    request = (
        f"That answer could not be read: {problem}.\n"
        "Answer again with JSON only, in exactly the form asked for, with no text around it."
    )
    return said if said.text else ChatMessage("assistant", "(nothing)"), ChatMessage("user", request)


def _escaped(tree: Any) -> Any:
    """Escape keys that look like marks of the codec: in the output of a model they are ordinary text."""
    if isinstance(tree, str):
        return escape_text(tree)
    if isinstance(tree, list):
        return [_escaped(item) for item in tree]
    if isinstance(tree, dict):
        return {escape_text(key): _escaped(item) for key, item in tree.items()}
    return tree
