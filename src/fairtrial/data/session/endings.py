"""How model answers end: one table for each protocol, from the reason that the provider gives."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

type Ending = Literal["complete", "cut off", "refused", "failed", "paused", "context full", "unknown"]
"""What a reason means.

- complete: the model finished, or calls tools.
- cut off: a limit of tokens ended the answer.
- refused: the model or a filter declined.
- failed: the server failed although its status is 200; the call is retried.
- paused: the provider waits for the message to be sent back, and goes on.
- context full: the conversation does not fit into the context of the model.
- unknown: the reason is in no table. The answer counts as complete, and reports count the reason by its name.
"""

# Chat completions of many servers: OpenAI, Mistral (`error`, `model_length`), OpenRouter (`error`), Gemini
# (`malformed_function_call`), DeepSeek (`insufficient_system_resource`), vLLM and SGLang (`abort`).
CHAT_ENDINGS: Mapping[str, Ending] = MappingProxyType(
    {
        "stop": "complete",
        "tool_calls": "complete",
        "function_call": "complete",
        "eos": "complete",
        "length": "cut off",
        "model_length": "context full",
        "content_filter": "refused",
        "refusal": "refused",
        "safety": "refused",
        "recitation": "refused",
        "prohibited_content": "refused",
        "error": "failed",
        "abort": "failed",
        "insufficient_system_resource": "failed",
        "malformed_function_call": "failed",
    }
)

# The reason is `incomplete_details.reason` if there is one, else the status.
RESPONSES_ENDINGS: Mapping[str, Ending] = MappingProxyType(
    {
        "completed": "complete",
        "max_output_tokens": "cut off",
        "content_filter": "refused",
        "refusal": "refused",
        "failed": "failed",
        "cancelled": "failed",
        "in_progress": "failed",
        "queued": "failed",
    }
)

ANTHROPIC_ENDINGS: Mapping[str, Ending] = MappingProxyType(
    {
        "end_turn": "complete",
        "stop_sequence": "complete",
        "tool_use": "complete",
        "max_tokens": "cut off",
        "refusal": "refused",
        "pause_turn": "paused",
        "compaction": "paused",
        "model_context_window_exceeded": "context full",
    }
)

# Google's own API: the names of google-genai's `FinishReason`. Answers without text end with `NO_IMAGE` and the like.
GEMINI_ENDINGS: Mapping[str, Ending] = MappingProxyType(
    {
        "STOP": "complete",
        "MAX_TOKENS": "cut off",
        "SAFETY": "refused",
        "RECITATION": "refused",
        "BLOCKLIST": "refused",
        "PROHIBITED_CONTENT": "refused",
        "SPII": "refused",
        "IMAGE_SAFETY": "refused",
        "IMAGE_PROHIBITED_CONTENT": "refused",
        "IMAGE_RECITATION": "refused",
        "FINISH_REASON_UNSPECIFIED": "failed",
        "MALFORMED_FUNCTION_CALL": "failed",
        "MALFORMED_RESPONSE": "failed",
        "UNEXPECTED_TOOL_CALL": "failed",
        "TOO_MANY_TOOL_CALLS": "failed",
        "OTHER": "failed",
        "IMAGE_OTHER": "failed",
        "NO_IMAGE": "failed",
        "LANGUAGE": "failed",
    }
)

# Amazon Bedrock's Converse, which has most of Anthropic's names.
CONVERSE_ENDINGS: Mapping[str, Ending] = MappingProxyType(
    {
        "end_turn": "complete",
        "stop_sequence": "complete",
        "tool_use": "complete",
        "max_tokens": "cut off",
        "content_filtered": "refused",
        "guardrail_intervened": "refused",
        "malformed_model_output": "failed",
        "malformed_tool_use": "failed",
        "model_context_window_exceeded": "context full",
    }
)

# "timeout" is what an adapter records for a request without an answer.
_ALL: Mapping[str, Ending] = {
    **RESPONSES_ENDINGS,
    **ANTHROPIC_ENDINGS,
    **GEMINI_ENDINGS,
    **CONVERSE_ENDINGS,
    **CHAT_ENDINGS,
    "timeout": "failed",
}
CUT_OFF_REASONS = frozenset(name for name, ending in _ALL.items() if ending in ("cut off", "context full"))
"""What providers say when an answer ended at a limit of tokens."""


def ending_of(reason: str | None, table: Mapping[str, Ending] = _ALL) -> Ending:
    """Return what a reason means by the table of a protocol, by default in any of them; no reason means complete."""
    if reason is None:
        return "complete"
    # Gemini's own names are in capitals.
    return table.get(reason) or table.get(reason.lower(), "unknown")
