"""An answer as the type that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fairtrial.codec import from_json, parse_json
from fairtrial.codec.escape import escape_text
from fairtrial.session.trajectory import ChatMessage

_FENCE = "```"


@dataclass(frozen=True, slots=True)
class OutputRepaired:
    """An answer was not of the form asked for, and the model was asked once more. `repaired` says if that helped."""

    prompt_name: str
    problem: str
    raw: str
    repaired: bool


def parse_output(kind: Any, text: str, *, wrapped: bool = False) -> Any:
    """Read an answer as a `kind`; text itself, if that is what was asked for.

    Args:
        kind: Any type the codec knows.
        text: The answer.
        wrapped: The schema sent was an object that holds the value under "value"; a model that was not held to it
            may still answer with the value itself.

    Raises:
        CodecError: it is not one.
    """
    if kind is str:
        return text
    tree = _escaped(parse_json(_without_fence(text)))
    if wrapped and isinstance(tree, dict) and set(tree) == {"value"}:
        tree = tree["value"]
    return from_json(kind, tree)


def _without_fence(text: str) -> str:
    """The content of a Markdown code block that is the whole answer; any other answer as it is.

    Models that were not made to answer in JSON like to wrap it. No regular expression: an answer can be a megabyte of
    newlines, and backtracking over those stops the interpreter.
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
    """What follows an answer that could not be read: the answer, and the request for a better one."""
    request = (
        f"That answer could not be read: {problem}.\n"
        "Answer again with JSON only, in exactly the form asked for, with no text around it."
    )
    return ChatMessage("assistant", said.text or "(nothing)"), ChatMessage("user", request)


def _escaped(tree: Any) -> Any:
    """Model text is not our wire form: what looks like one of the codec's marks is only text."""
    if isinstance(tree, str):
        return escape_text(tree)
    if isinstance(tree, list):
        return [_escaped(item) for item in tree]
    if isinstance(tree, dict):
        return {escape_text(key): _escaped(item) for key, item in tree.items()}
    return tree
