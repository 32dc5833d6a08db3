"""The content of requests and answers: what several protocols encode and read in the same way."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from fairtrial.base.codec import parse_json, to_json
from fairtrial.data.attachment import Attachment
from fairtrial.data.session.trajectory import ChatMessage, Echo, ToolCall
from fairtrial.errors import CodecError, InvalidCallError
from fairtrial.models.schema import OutputSchema
from fairtrial.models.tools import UNPARSED

_MERGED = ("tools", "include")  # Lists that parameters add to instead of replacing them.


def with_params(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with its parameters: lists of tools and of what to include are joined."""
    check_one_answer(params)
    merged = {**body, **params}
    for name in _MERGED:
        own, given = body.get(name), params.get(name)
        if isinstance(own, list) and isinstance(given, list | tuple):
            merged[name] = [*own, *(item for item in given if item not in own)]
    return merged


def check_one_answer(params: Mapping[str, Any]) -> None:
    """Refuse parameters that ask for several answers, of which all but one would be paid for and lost."""
    for name in ("n", "candidateCount"):
        if params.get(name) not in (None, 1):
            raise InvalidCallError(
                f"{name} must be 1 (got {params[name]!r}): a call has one answer\n"
                "ask for several answers with EvalConfig(repeats=...): each is a trial of its own"
            )


def split_data_url(url: str) -> tuple[str, str] | None:
    """Return the media type and base64 text of a data URL; None for any other URL."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        return None
    media_type = head.removeprefix("data:").partition(";")[0]
    return (media_type if "/" in media_type else "application/octet-stream"), data


def instruction(schema: OutputSchema) -> str:
    """Return the schema of an answer as an instruction, for servers without structured outputs."""
    return (
        "Answer with JSON only, with no text around it, that satisfies this JSON Schema:\n"
        f"{json.dumps(schema.schema, ensure_ascii=False)}"
    )


def content_of(message: ChatMessage) -> tuple[str | Attachment, ...]:
    """Return the parts of a message; the APIs refuse empty texts."""
    content = message.content
    return tuple(part for part in ((content,) if isinstance(content, str) else content) if part != "")


def tool_call(name: Any, arguments: Any, call_id: Any, echo: Echo | None = None) -> ToolCall:
    """Create a tool call. Arguments that are not a JSON object are kept as text, so that the model can be told."""
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = parse_json(arguments or "{}")
        except CodecError:
            parsed = None
    if not isinstance(name, str):
        raise TypeError("a tool call without a name")
    if not isinstance(parsed, Mapping):
        parsed = {UNPARSED: arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return ToolCall(name, parsed, str(call_id or ""), echo)


def arguments_text(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text; invalid JSON is returned unchanged."""
    unparsed = call.arguments.get(UNPARSED)
    return unparsed if isinstance(unparsed, str) else json.dumps(call.arguments, default=to_json)


def plain_arguments(call: ToolCall) -> Any:
    """Return the arguments of a call as a JSON value, for protocols that send them as an object."""
    return json.loads(sendable(json.dumps(call.arguments, ensure_ascii=False, default=to_json)))


def add_turn(turns: list[dict[str, Any]], role: str, parts: list[dict[str, Any]], key: str = "content") -> None:
    """Append parts to a conversation whose roles must alternate; the results of parallel calls are one turn."""
    if turns and turns[-1]["role"] == role:
        turns[-1][key].extend(parts)
    else:
        turns.append({"role": role, key: parts})


def sendable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode: models sometimes send half of a surrogate pair."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def text_of(value: Any) -> str:
    """Return a value that must be text; raises TypeError otherwise."""
    if not isinstance(value, str):
        raise TypeError(f"expected text (got {type(value).__name__})")
    return value


def count_of(value: Any) -> int:
    """Return a token count; 0 if the value is not a number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def amount_of(value: Any) -> float | None:
    """Return an amount of dollars; None if the value is not a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        return None
    return float(value)


def base64_text(content: bytes) -> str:
    """Encode bytes as base64."""
    return base64.b64encode(content).decode("ascii")
