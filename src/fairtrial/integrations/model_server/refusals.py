"""The rules of providers of reasoning models: which requests they refuse, with their error messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from fairtrial.base.lru import LruCache
from fairtrial.integrations.model_server import bedrock_wire, faults, gemini_wire
from fairtrial.integrations.model_server.reply import ParsedRequest

_MAX_CALLS = 100_000
_THINKING = ("thinking", "redacted_thinking")


class Refusal(NamedTuple):
    """Why a request is refused, and the provider's code and status for it."""

    message: str
    code: str | None = None
    status: int = 400


class SentReasoning:
    """The reasoning that was sent with each tool call, by the id of the call; clients must return it unchanged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: LruCache[str, Any] = LruCache(_MAX_CALLS)

    def note(self, request: ParsedRequest, answer: Mapping[str, Any]) -> None:
        """Remember the reasoning of an answer that calls tools."""
        spoken = answer["choices"][0]["message"] if request.protocol == "openai" else answer
        calls, reasoning = _PARTS[request.protocol](spoken)
        with self._lock:
            for call_id in calls:
                self._sent.put(call_id, reasoning)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._sent.clear()

    def problem(self, request: ParsedRequest) -> Refusal | None:
        """Return the provider's refusal if reasoning that it sent is missing or changed, else None."""
        parts = _PARTS[request.protocol]
        for index, message in enumerate(request.messages):
            if message.role != "assistant":
                continue
            calls, returned = parts(message.raw)
            for call_id in calls:
                with self._lock:
                    sent = self._sent.get(call_id)
                if sent and _canonical(sent) != _canonical(returned):
                    return _not_returned(request, index, sent, returned)
        return None


def refusal(fault: faults.Fault, request: ParsedRequest, sent: SentReasoning) -> Refusal | None:
    """Return why a provider with this rule refuses the request; None if it does not, or if the fault is another one."""
    body = request.body
    match fault:
        case faults.ReasoningNotReturned():
            return sent.problem(request)
        case faults.ToolsNeedResponses():
            if request.protocol != "openai" or not request.tools or body.get("reasoning_effort") == "none":
                return None
            return Refusal(
                f"Function tools with reasoning_effort are not supported for {request.model} in /v1/chat/completions. "
                "To use function tools, use /v1/responses or set reasoning_effort to 'none'."
            )
        case faults.StreamOptionsRefused():
            return Refusal("Extra inputs are not permitted", status=422) if "stream_options" in body else None
        case faults.EncryptedRefused():
            wanted = "reasoning.encrypted_content" in (body.get("include") or ())
            return Refusal("Encrypted content is not supported with this model.") if wanted else None
        case faults.TemperatureRefused():
            given = body.get("temperature")
            if given is None or given == 1:
                return None
            if request.protocol == "anthropic":
                return Refusal("`temperature` may only be set to 1 when thinking is enabled or in adaptive mode.")
            if request.protocol == "responses":
                return Refusal("Unsupported parameter: 'temperature' is not supported with this model.")
            problem = f"Unsupported value: 'temperature' does not support {given} with this model."
            return Refusal(f"{problem} Only the default (1) value is supported.", "unsupported_value")
    return None


def _not_returned(request: ParsedRequest, index: int, sent: Any, returned: Any) -> Refusal:
    if request.protocol == "openai":
        if sent.get("reasoning_content") != returned.get("reasoning_content"):
            return Refusal("The `reasoning_content` in the thinking mode must be passed back to the API.")
        return Refusal(
            "Function call is missing a thought_signature in functionCall parts. This is required for tools to work "
            "correctly, and missing thought_signature may lead to degraded model performance."
        )
    if request.protocol == "responses":
        if not returned:
            return Refusal(
                f"Item of type 'function_call' was provided without its required 'reasoning' item: '{sent[0]['id']}'."
            )
        return Refusal(
            f"The encrypted content for item {sent[0]['id']} could not be verified. Reason: Encrypted content could "
            "not be decrypted or parsed.",
            "invalid_encrypted_content",
        )
    if request.protocol == "gemini":
        return Refusal("Function call is missing a thought_signature in functionCall parts.")
    place = f"messages.{index - (request.body.get('system') is not None)}.content.0"
    if not returned:
        return Refusal(
            f"{place}.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`. When `thinking` is "
            "enabled, a final `assistant` message must start with a thinking block."
        )
    return Refusal(
        f"{place}: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified. These "
        "blocks must remain as they were in the original response."
    )


def _chat_parts(message: Mapping[str, Any]) -> tuple[list[str], Any]:
    calls: Any = message.get("tool_calls") or []
    kept: dict[str, Any] = {}
    if message.get("reasoning_content"):
        kept["reasoning_content"] = message["reasoning_content"]
    extra = {call["id"]: call["extra_content"] for call in calls if call.get("extra_content")}
    return [call["id"] for call in calls], kept | ({"extra_content": extra} if extra else {})


def _response_parts(message: Mapping[str, Any]) -> tuple[list[str], Any]:
    items: Any = message.get("output") or message.get("items") or []
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    return calls, [item for item in items if item["type"] == "reasoning"]


def _message_parts(message: Mapping[str, Any]) -> tuple[list[str], Any]:
    content = message.get("content")
    blocks: Any = content if isinstance(content, list) else []
    calls = [block["id"] for block in blocks if block.get("type") == "tool_use"]
    return calls, [block for block in blocks if block.get("type") in _THINKING]


_PARTS = {
    "openai": _chat_parts,
    "responses": _response_parts,
    "anthropic": _message_parts,
    "gemini": gemini_wire.call_parts,
    "bedrock": bedrock_wire.call_parts,
}


def _canonical(value: Any) -> str:
    # Clients add `cache_control`, which is not part of what was sent.
    if isinstance(value, list):
        value = [{key: item[key] for key in item if key != "cache_control"} for item in value]
    return json.dumps(value, sort_keys=True)
