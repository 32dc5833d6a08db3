"""Google's `generateContent` and `streamGenerateContent`, of the Gemini API and of Vertex AI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fairtrial.integrations.model_server.openai_wire import PathWire
from fairtrial.integrations.model_server.reply import (
    InvalidRequestError,
    ParsedMessage,
    ParsedRequest,
    ParsedTool,
    Reply,
    Usage,
    pieces,
    required,
)

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
_FINISH = {
    "stop": "STOP",
    "tool_calls": "STOP",
    "length": "MAX_TOKENS",
    "content_filter": "SAFETY",
    "refusal": "SAFETY",
}


class GeminiWire(PathWire):
    """Reads one request, whose path has the model, and writes its answer."""

    name = "gemini"
    path = re.compile(r"/models/(?P<model>[^/:]+):(?P<stream>stream)?[gG]enerateContent")

    def parse(self, body: Mapping[str, Any], number: int) -> ParsedRequest:
        """The request in neutral form; the system instruction becomes its first message."""
        contents = required(body, "contents", list)
        if not contents:
            raise InvalidRequestError("contents is not specified")
        system = body.get("systemInstruction")
        first = () if system is None else (ParsedMessage("system", _text(system), system),)
        config = body.get("generationConfig") or {}
        return ParsedRequest(
            number,
            self.name,
            self.model,
            (*first, *(_message(content) for content in contents)),
            body,
            tools=_tools(body.get("tools") or []),
            required_tool=_required_tool(body.get("toolConfig")),
            output_schema=config.get("responseJsonSchema") or config.get("responseSchema"),
            stream=self.stream,
        )

    def completion(self, request: ParsedRequest, reply: Reply, usage: Usage) -> dict[str, Any]:
        """The body of an answer."""
        return _answer(request, _parts(request, reply), usage, _reason(reply))

    def events(self, request: ParsedRequest, reply: Reply, usage: Usage) -> list[bytes]:
        """The chunks of a streamed answer; the last one has the reason and the usage."""
        small: list[dict[str, Any]] = []
        for part in _parts(request, reply):
            if "text" in part and "thoughtSignature" not in part:
                small.extend({**part, "text": piece} for piece in pieces(part["text"]))
            else:
                small.append(part)
        sent = [_answer(request, [part]) for part in small[:-1]]
        sent.append(_answer(request, small[-1:], usage, _reason(reply)))
        return [self.event(one) for one in sent]

    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """The body of an error answer."""
        return {"error": {"code": status, "message": message, "status": _STATUSES.get(status, "INTERNAL")}}

    def raw_event(self, data: str) -> bytes:
        """An event with any text as its data."""
        return f"data: {data}\r\n\r\n".encode()


def call_parts(message: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Return the ids of the tool calls in an answer or a message, and the signatures that must come back with them."""
    content = message["candidates"][0]["content"] if "candidates" in message else message
    parts = content.get("parts") or []
    calls = [part["functionCall"].get("id", "") for part in parts if "functionCall" in part]
    return calls, [{"signature": part["thoughtSignature"]} for part in parts if "thoughtSignature" in part]


def _answer(
    request: ParsedRequest, parts: list[dict[str, Any]], usage: Usage | None = None, reason: str | None = None
) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    if reason is not None:
        candidate["finishReason"] = reason
    answer: dict[str, Any] = {
        "candidates": [candidate],
        "modelVersion": request.model,
        "responseId": f"resp_{request.number}",
    }
    if usage is not None:
        answer["usageMetadata"] = {
            "promptTokenCount": usage.input_tokens,
            "cachedContentTokenCount": usage.cached_tokens,
            "candidatesTokenCount": usage.output_tokens - usage.reasoning_tokens,
            "thoughtsTokenCount": usage.reasoning_tokens,
            "totalTokenCount": usage.input_tokens + usage.output_tokens,
            "promptTokensDetails": _details(usage.input_tokens, usage.audio_input_tokens),
            "candidatesTokensDetails": _details(
                usage.output_tokens - usage.reasoning_tokens, usage.audio_output_tokens
            ),
            # Only Vertex AI says it; the Gemini API does not.
            **({"trafficType": f"ON_DEMAND_{usage.service_tier.upper()}"} if usage.service_tier else {}),
        }
    return answer


def _details(tokens: int, audio: int) -> list[dict[str, Any]]:
    counts = {"TEXT": tokens - audio, "AUDIO": audio}
    return [{"modality": kind, "tokenCount": count} for kind, count in counts.items() if count]


def _parts(request: ParsedRequest, reply: Reply) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if reply.reasoning:
        parts.append({"text": reply.reasoning, "thought": True})
    if reply.visible_text or not reply.tool_calls:
        parts.append({"text": reply.visible_text})
    for index, call in enumerate(reply.tool_calls):
        # The Gemini API gives calls ids; Vertex AI does not, and a test sends none with an empty id.
        named = {} if call.id == "" else {"id": call.id or f"fc_{request.number}_{index}"}
        part: dict[str, Any] = {"functionCall": {**named, "name": call.name, "args": call.arguments_object}}
        signature = call.thought_signature or (reply.signature_for(request.number) if reply.reasoning else None)
        if signature is not None and index == 0:  # Of parallel calls, the first has it.
            part["thoughtSignature"] = signature
        parts.append(part)
    return parts


def _reason(reply: Reply) -> str:
    return "SAFETY" if reply.refusal is not None else _FINISH.get(reply.reason, reply.reason)


def _message(content: Any) -> ParsedMessage:
    if not isinstance(content, dict) or content.get("role") not in ("user", "model"):
        raise InvalidRequestError("contents: please use a valid role: user, model.")
    parts = content.get("parts")
    if not isinstance(parts, list) or not parts:
        raise InvalidRequestError("contents: parts must not be empty")
    results = [part for part in parts if "functionResponse" in part]
    if results and len(results) == len(parts):
        text = "".join(str(part["functionResponse"]["response"].get("result", "")) for part in results)
        return ParsedMessage("tool", text, content)
    return ParsedMessage("assistant" if content["role"] == "model" else "user", _text(content), content)


def _text(content: Any) -> str:
    return "".join(part["text"] for part in content["parts"] if "text" in part and not part.get("thought"))


def _tools(raw: Any) -> tuple[ParsedTool, ...]:
    declared = [each for tool in raw for each in tool.get("functionDeclarations") or ()]
    return tuple(
        ParsedTool(each["name"], each.get("description") or "", each.get("parametersJsonSchema") or {"type": "object"})
        for each in declared
    )


def _required_tool(config: Any) -> str | None:
    calling = (config or {}).get("functionCallingConfig") or {}
    if calling.get("mode") != "ANY":
        return None
    names = calling.get("allowedFunctionNames") or [""]
    return str(names[0])
