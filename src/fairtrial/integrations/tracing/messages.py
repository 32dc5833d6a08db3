"""Messages of a session in the form of the GenAI conventions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def genai_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return recorded messages as `{"role", "parts"}`. Reasoning and what providers want back are left out."""
    return [{"role": str(message["role"]), "parts": _parts(message)} for message in messages]


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part for part in content if isinstance(part, str)]
    text = "".join(texts)
    if message["role"] == "tool":
        return [{"type": "tool_call_response", "id": message.get("name") or "", "response": text}]
    parts: list[dict[str, Any]] = [{"type": "text", "content": text}] if text else []
    for call in message.get("tool_calls") or ():
        arguments = call.get("arguments") or {}
        parts.append({"type": "tool_call", "id": call.get("id") or "", "name": call["name"], "arguments": arguments})
    return parts
