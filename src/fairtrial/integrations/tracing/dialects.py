"""One reading of the attributes that instrumentations write: what kind of span it is, its messages, tokens and calls.

Known dialects: the official GenAI conventions (and pydantic-ai and Logfire, which follow them), OpenInference,
OpenLLMetry, Langfuse, LangSmith and the Vercel AI SDK.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fairtrial.data.session.events import MAX_CALL_TOKENS, TokenUsage
from fairtrial.data.session.trajectory import ChatMessage, ToolCall, result_of
from fairtrial.integrations.tracing.received import ReceivedLog, ReceivedSpan

type SpanKind = Literal["model", "tool", "other"]

# Tuples, because values of attributes may be lists, which have no hash.
_MODEL_OPERATIONS = ("chat", "text_completion", "generate_content", "response")
_ROLES = {"developer": "system", "human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}
_INDEX = re.compile(r"\.(\d+)\.(.+)")
_FINISH = {"tool_call": "tool_calls", "tool-calls": "tool_calls", "tool_use": "tool_calls"}
_OLD_EVENTS = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message|gen_ai\.choice")


class Conversation(NamedTuple):
    """The messages that a model call was given, and those that it answered with."""

    given: tuple[ChatMessage, ...]
    answered: tuple[ChatMessage, ...]


class ToolRun(NamedTuple):
    """One executed tool."""

    name: str
    params: Mapping[str, Any]
    result: Any
    call_id: str


def kind_of_span(attributes: Mapping[str, Any]) -> SpanKind:
    """Return what a span stands for."""
    operation = attributes.get("gen_ai.operation.name")
    inference = attributes.get("openinference.span.kind")
    vercel = str(attributes.get("ai.operationId") or "")
    langsmith, langfuse = attributes.get("langsmith.span.kind"), attributes.get("langfuse.observation.type")
    if (
        operation in _MODEL_OPERATIONS
        or inference == "LLM"
        or langsmith == "llm"
        or langfuse == "generation"
        or vercel.endswith((".doGenerate", ".doStream"))
        or (attributes.get("llm.request.type") in ("chat", "completion") and operation is None)
    ):
        return "model"
    if (
        operation == "execute_tool"
        or inference == "TOOL"
        or attributes.get("traceloop.span.kind") == "tool"
        or langsmith == "tool"
        or langfuse == "tool"
        or vercel == "ai.toolCall"
    ):
        return "tool"
    return "other"


def model_of(attributes: Mapping[str, Any]) -> str:
    """Return the model of a call."""
    found = first_of(
        attributes, "gen_ai.response.model", "gen_ai.request.model", "llm.model_name",
        "langfuse.observation.model.name", "ai.response.model", "ai.model.id",
    )  # fmt: skip
    return _text(found)


def provider_of(attributes: Mapping[str, Any]) -> str:
    """Return the provider of a call."""
    return _text(first_of(attributes, "gen_ai.provider.name", "gen_ai.system", "llm.provider", "ai.model.provider"))


def finish_reason_of(attributes: Mapping[str, Any]) -> str | None:
    """Return why the answer ended: the first reason, wherever and however it is written."""
    written = first_of(
        attributes, "gen_ai.response.finish_reasons", "ai.response.finishReason", "gen_ai.response.finish_reason",
        "llm.finish_reason", "gen_ai.completion.0.finish_reason",
    )  # fmt: skip
    found = decoded(written)
    if isinstance(found, Sequence) and not isinstance(found, str):
        found = found[0] if found else None
    if found is None:
        choices = _mapping(decoded(attributes.get("gen_ai.completion"))).get("choices")
        found = _mapping(choices[0]).get("finish_reason") if isinstance(choices, list) and choices else None
    return None if found is None else _FINISH.get(str(found), str(found))


def usage_of(attributes: Mapping[str, Any]) -> TokenUsage | None:
    """Return the tokens of a call; None if none are given."""
    details = _mapping(decoded(attributes.get("langfuse.observation.usage_details")))

    def count(names: Iterable[str], keys: Iterable[str] = ()) -> int | None:
        for value in (*(attributes.get(name) for name in names), *(details.get(key) for key in keys)):
            if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_CALL_TOKENS:
                return int(value)
        return None

    given = count(
        ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt",
         "ai.usage.inputTokens", "ai.usage.promptTokens"),
        ("prompt_tokens", "input"),
    )  # fmt: skip
    answered = count(
        ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion",
         "ai.usage.outputTokens", "ai.usage.completionTokens"),
        ("completion_tokens", "output"),
    )  # fmt: skip
    if given is None and answered is None:
        return None
    cached = count(
        ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens",
         "llm.token_count.prompt_details.cache_read", "ai.usage.cachedInputTokens"),
        ("input_cached_tokens",),
    )  # fmt: skip
    written = count(
        ("gen_ai.usage.cache_write.input_tokens", "gen_ai.usage.cache_creation.input_tokens",
         "llm.token_count.prompt_details.cache_write"),
    )  # fmt: skip
    thought = count(
        ("gen_ai.usage.reasoning.output_tokens", "gen_ai.usage.reasoning_tokens",
         "llm.token_count.completion_details.reasoning", "ai.usage.reasoningTokens"),
        ("output_reasoning_tokens",),
    )  # fmt: skip
    return TokenUsage(
        given or 0, answered or 0, cached or 0, reasoning_tokens=thought or 0, cache_write_tokens=written or 0
    )


def cost_of(attributes: Mapping[str, Any]) -> float | None:
    """Return the cost of a call in US dollars, as the instrumentation has it; None if it has none."""
    details = _mapping(decoded(attributes.get("langfuse.observation.cost_details")))
    names = ("fairtrial.cost_usd", "llm.cost.total", "gen_ai.usage.cost")
    for value in (*(attributes.get(name) for name in names), details.get("total")):
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
            return float(value)
    return None


def tool_of(span: ReceivedSpan) -> ToolRun:
    """Return the tool that a span executed."""
    attributes = span.attributes
    name = first_of(attributes, "gen_ai.tool.name", "tool.name", "ai.toolCall.name", "traceloop.entity.name")
    given = first_of(
        attributes, "gen_ai.tool.call.arguments", "tool_arguments", "ai.toolCall.args", "tool.parameters",
        "input.value", "traceloop.entity.input", "langfuse.observation.input", "gen_ai.prompt",
    )  # fmt: skip
    result = decoded(attributes.get("ai.toolCall.result")) or first_of(  # JSON always: a text is in quotes.
        attributes, "gen_ai.tool.call.result", "tool_response", "output.value",
        "traceloop.entity.output", "langfuse.observation.output", "gen_ai.completion",
    )  # fmt: skip
    call_id = first_of(attributes, "gen_ai.tool.call.id", "ai.toolCall.id", "tool_call.id", "tool.id")
    return ToolRun(_text(name) or span.name.removeprefix("execute_tool "), _arguments(given), result_of(result),
                   _text(call_id))  # fmt: skip


def conversation_of(span: ReceivedSpan, logs: Iterable[ReceivedLog] = ()) -> Conversation:
    """Return the messages of a model call, from the span's attributes, its events or its log records."""
    attributes = dict(span.attributes)
    for log in logs:
        for name in ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions"):
            if name in log.attributes:
                attributes.setdefault(name, log.attributes[name])
    given, answered = _message_lists(attributes)
    if not given and not answered:
        given, answered = _event_messages(span, logs)
    system = decoded(attributes.get("gen_ai.system_instructions"))
    if system and not any(_mapping(message).get("role") == "system" for message in given):
        parts = system if isinstance(system, list) else [{"type": "text", "content": system}]
        given = [{"role": "system", "parts": parts}, *given]
    return Conversation(read_messages(given), read_messages(answered))


def _message_lists(attributes: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages in the form in which they were written."""
    given, answered = _list(attributes.get("gen_ai.input.messages")), _list(attributes.get("gen_ai.output.messages"))
    if given or answered:
        return given, answered
    given, answered = indexed(attributes, "llm.input_messages"), indexed(attributes, "llm.output_messages")
    if given or answered:
        return given, answered
    if "ai.prompt.messages" in attributes:
        calls = _list(attributes.get("ai.response.toolCalls"))
        content = [{"type": "tool-call", **_mapping(call)} for call in calls]
        if attributes.get("ai.response.text"):
            content.insert(0, {"type": "text", "text": attributes["ai.response.text"]})
        return _list(attributes["ai.prompt.messages"]), [{"role": "assistant", "content": content}]
    given, answered = indexed(attributes, "gen_ai.prompt"), indexed(attributes, "gen_ai.completion")
    if given or answered:
        return given, [{"role": "assistant", **message} for message in answered]
    if "langfuse.observation.input" in attributes:
        asked = decoded(attributes["langfuse.observation.input"])
        answer = decoded(attributes.get("langfuse.observation.output"))
        return _list(_mapping(asked).get("messages", asked)), answer if isinstance(answer, list) else [answer]
    asked = _mapping(decoded(attributes.get("gen_ai.prompt") or attributes.get("request_data")))
    answer = _mapping(decoded(attributes.get("gen_ai.completion") or attributes.get("response_data")))
    choices = _list(answer.get("choices"))
    answers = [_mapping(choice).get("message") for choice in choices] or _list(answer.get("messages"))
    return _list(asked.get("messages")), answers or ([answer["message"]] if "message" in answer else [])


def _event_messages(span: ReceivedSpan, logs: Iterable[ReceivedLog]) -> tuple[list[Any], list[Any]]:
    """Return messages that were written as events, one for each message."""
    given: list[Any] = []
    answered: list[Any] = []
    written = [(log.name, _mapping(log.body) or log.attributes) for log in logs]
    written += [(name, attributes) for name, attributes in span.events]
    for name, body in written:
        found = _OLD_EVENTS.fullmatch(name)
        if found is None:
            continue
        message = {key: decoded(value) for key, value in body.items()}
        if found[1] is None:
            answered.append({"role": "assistant", **_mapping(message.get("message"))})
        else:
            given.append({**message, "role": found[1], "tool_call_id": message.get("id")})
    return given, answered


def read_messages(messages: Iterable[Any]) -> tuple[ChatMessage, ...]:
    """Return messages that are written in any of the known ways."""
    trees = filter(None, map(_mapping, messages))
    return tuple(message for tree in trees for message in _message(tree))


def _message(tree: Mapping[str, Any]) -> list[ChatMessage]:
    """Return one written message; several results of tools in one become one message each."""
    if any(name.startswith("message.") for name in tree):
        tree = _plain_inference(tree)
    role = str(tree.get("role") or "user")
    role = _ROLES.get(role, role)
    text: list[str] = []
    calls: list[ToolCall] = []
    results: list[ChatMessage] = []
    parts = tree.get("parts", tree.get("content"))
    for part in parts if isinstance(parts, list) else [{"type": "text", "text": parts}]:
        _read_part(part if isinstance(part, Mapping) else {"type": "text", "text": part}, text, calls, results)
    for call in [*_list(tree.get("tool_calls")), *indexed(tree, "tool_calls")]:
        written = _mapping(call)
        inner = _mapping(written.get("function")) or written
        calls.append(ToolCall(_text(inner.get("name")), _arguments(inner.get("arguments")), _text(written.get("id"))))
    if role == "tool" and not results:
        return [ChatMessage("tool", "".join(text), name=_text(tree.get("tool_call_id") or tree.get("name")))]
    if text or calls or not results:
        return [ChatMessage(role, "".join(text), tuple(calls)), *results]
    return results


def _read_part(part: Mapping[str, Any], text: list[str], calls: list[ToolCall], results: list[ChatMessage]) -> None:
    kind = str(part.get("type") or "text").replace("-", "_")
    if kind in ("text", "input_text", "output_text"):
        text.append(_text(part.get("text", part.get("content"))))
    elif kind in ("tool_call", "tool_use"):
        name = _text(part.get("name") or part.get("toolName"))
        given = next((part[key] for key in ("arguments", "input", "args") if key in part), None)
        calls.append(ToolCall(name, _arguments(given), _text(part.get("id") or part.get("toolCallId"))))
    elif kind in ("tool_call_response", "tool_result"):
        result = next((part[key] for key in ("response", "result", "output", "content") if key in part), None)
        if isinstance(result, Mapping) and result.keys() == {"type", "value"}:
            result = result["value"]  # The Vercel AI SDK: {"type": "text", "value": ...}.
        call_id = _text(part.get("id") or part.get("toolCallId") or part.get("tool_use_id"))
        results.append(ChatMessage("tool", _text(result), name=call_id))


def _plain_inference(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flattened message of OpenInference in the form of OpenAI's."""
    contents = [each.get("message_content.text", "") for each in indexed(tree, "message.contents")]
    calls = [
        {"id": call.get("tool_call.id"), "name": call.get("tool_call.function.name"),
         "arguments": call.get("tool_call.function.arguments")}
        for call in indexed(tree, "message.tool_calls")
    ]  # fmt: skip
    return {
        "role": tree.get("message.role"),
        "content": tree.get("message.content") or "".join(contents),
        "tool_calls": calls,
        "tool_call_id": tree.get("message.tool_call_id"),
    }


def indexed(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Return what is written as `prefix.0.name`, `prefix.1.name`, ..."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in attributes.items():
        if name.startswith(prefix):
            match = _INDEX.fullmatch(name, len(prefix))
            if match is not None:
                found.setdefault(int(match[1]), {})[match[2]] = value
    return [found[index] for index in sorted(found)]


def first_of(attributes: Mapping[str, Any], *names: str) -> Any:
    """Return the first of some attributes that is there and not empty."""
    return next((attributes[name] for name in names if attributes.get(name) not in (None, "")), None)


def decoded(value: Any) -> Any:
    """Return the value of JSON text; other values, and other text, unchanged."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _list(value: Any) -> list[Any]:
    found = decoded(value)
    return [decoded(item) for item in found] if isinstance(found, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _arguments(value: Any) -> Mapping[str, Any]:
    found = decoded(value)
    if isinstance(found, Mapping):
        return found
    return {} if found in (None, "") else {"value": found}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
