"""An adapter for Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

from fairtrial.base.frozen import EMPTY
from fairtrial.data.sample import Attachment
from fairtrial.data.session.events import ANTHROPIC_ENDINGS, TokenUsage, ending_of
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.errors import InvalidCallError, ModelUnavailableError
from fairtrial.models.adapter import AnswerT, ModelCall, ModelReply
from fairtrial.models.batches.anthropic_wire import AnthropicBatches
from fairtrial.models.batches.wire import BatchWire
from fairtrial.models.pricing import NO_EXTRAS, UsageExtras
from fairtrial.models.schema import is_recursive, output_schema
from fairtrial.models.sdk import SdkAdapter, SdkOptions
from fairtrial.models.tools import (
    add_turn,
    base64_text,
    content_of,
    count_of,
    instruction,
    plain_arguments,
    required_text,
    sendable,
    tool_call,
    with_params,
)

# Keywords that Anthropic's structured outputs refuse; they are moved to the description.
_IN_WORDS = frozenset(
    {
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
        "minLength", "maxLength", "pattern", "minItems", "maxItems", "uniqueItems",
    }
)  # fmt: skip


_THINKING = frozenset({"thinking", "redacted_thinking"})
_PLAIN = frozenset({"text", "tool_use"})


class AnthropicAdapter(SdkAdapter[AnswerT]):
    """A model of Anthropic, or of any server with the same messages API.

    Args:
        model: The model.
        max_tokens: The largest number of tokens of an answer, thinking included; the API requires it.
        prompt_cache: Mark the part of the prompt that the next call repeats (tools, system, history) for the provider's
            cache. None marks it in calls with tools only: each call of an agent repeats the previous one.
        options: The options of `OpenAIAdapter`: `base_url` (ANTHROPIC_BASE_URL), `api_key` (ANTHROPIC_API_KEY),
            `params`, `timeout_seconds`, `stream`, `structured_output`, `blobs`, `headers`, `prices_of`, `batch`,
            `retry`, `limiter`, `cache`, `trial_budget` and `run_budget`.
    """

    provider = "anthropic"
    package = "anthropic"
    client_class = "AsyncAnthropic"
    path = "/v1/messages"
    batch_wire: ClassVar[BatchWire | None] = AnthropicBatches()
    key_variables: ClassVar[tuple[str, ...]] = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    url_variable = "ANTHROPIC_BASE_URL"
    default_url = "https://api.anthropic.com"

    def __init__(
        self, model: str, *, max_tokens: int = 32_000, prompt_cache: bool | None = None, **options: Unpack[SdkOptions]
    ) -> None:
        options["params"] = {"max_tokens": max_tokens, **options.get("params", EMPTY)}
        super().__init__(model, **options)
        self._prompt_cache = prompt_cache

    def _key_headers(self, key: str) -> dict[str, str]:
        return {"X-Api-Key": key}

    def _body(self, call: ModelCall) -> dict[str, Any]:
        system: list[str] = []
        messages: list[dict[str, Any]] = []
        for message in call.messages:
            instructs = message.role in ("system", "developer")
            if instructs and not messages:
                system.append(sendable(message.text))
                continue
            role = "system" if instructs else "assistant" if message.role == "assistant" else "user"
            add_turn(messages, role, self._blocks(message))
        body: dict[str, Any] = {"model": self._model, "messages": messages}
        if call.tools:
            body["tools"] = [
                {"name": tool.name, "description": tool.description, "input_schema": tool.schema} for tool in call.tools
            ]
        schema = output_schema(call.output_type)
        # Anthropic's structured outputs do not support recursive types.
        native = self._structured == "native" and schema is not None and schema.strict
        if schema is not None and native and not is_recursive(schema.schema):
            body["output_config"] = {"format": {"type": "json_schema", "schema": _in_words(schema.schema)}}
        elif schema is not None:
            system.append(instruction(schema))
        if system:
            body["system"] = "\n\n".join(system)
        if self._prompt_cache or (self._prompt_cache is None and call.tools):
            _mark_for_cache(body)
        return with_params(body, call.params)

    def _blocks(self, message: ChatMessage) -> list[dict[str, Any]]:
        if message.role == "tool":
            content = [self._block(part) for part in content_of(message)]
            result = {"type": "tool_result", "tool_use_id": message.name, "content": content}
            return [{**result, "is_error": True} if message.failed else result]
        echoed = self._echoed(message.echo)
        if echoed is not None and _spoken(echoed) == (message.text, message.tool_calls):
            return list(echoed)  # Unchanged, with thinking and signatures; not used if the message was edited.
        blocks = [self._block(part) for part in content_of(message)]
        blocks.extend(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": plain_arguments(call)}
            for call in message.tool_calls
        )
        # The API refuses empty messages.
        return blocks or [{"type": "text", "text": "(nothing)"}]

    def _block(self, part: str | Attachment) -> dict[str, Any]:
        content = self._loaded(part)
        if isinstance(part, str) or isinstance(content, str):
            return {"type": "text", "text": content}
        source = {"type": "base64", "media_type": part.media_type, "data": base64_text(content)}
        if part.media_type.startswith("image/"):
            return {"type": "image", "source": source}
        if part.media_type == "application/pdf":
            return {"type": "document", "source": source}
        raise InvalidCallError(f"Anthropic's API does not support attachments of type {part.media_type}")

    def _read(self, tree: Mapping[str, Any]) -> ModelReply:
        blocks: list[Mapping[str, Any]] = tree["content"]
        text, calls = _spoken(blocks)
        thoughts = [required_text(block["thinking"]) for block in blocks if block["type"] == "thinking"]
        reason = tree.get("stop_reason")
        if reason is not None:
            required_text(reason)
        ending = ending_of(reason, ANTHROPIC_ENDINGS)
        refusal = (text or "no reason given") if ending == "refused" else None
        model = self._served_model(tree.get("model"))
        extras = self._extras(tree)
        usage = self._usage(tree.get("usage"), model, extras)
        plain = all(block["type"] in _PLAIN and not block.get("citations") for block in blocks)
        echo = None if plain else self._echo([_returnable(block) for block in blocks])
        message = ChatMessage(
            "assistant", text if blocks else (), calls, reasoning="\n\n".join(filter(None, thoughts)), echo=echo
        )
        return ModelReply(message, usage, reason, model, refusal, extras=extras)

    def _joined(self, first: ChatMessage, second: ChatMessage) -> ChatMessage:
        joined = super()._joined(first, second)
        return replace(joined, echo=self._echo([*self._blocks(first), *self._blocks(second)]))

    def _extras(self, tree: Mapping[str, Any]) -> UsageExtras:
        usage = tree.get("usage")
        if not isinstance(usage, Mapping):
            return NO_EXTRAS
        return UsageExtras.of(
            usage.get("service_tier"),
            hour_writes=count_of((usage.get("cache_creation") or EMPTY).get("ephemeral_1h_input_tokens")),
            searches=count_of((usage.get("server_tool_use") or EMPTY).get("web_search_requests")),
        )

    def _counted(self, usage: Mapping[str, Any]) -> TokenUsage:
        read = count_of(usage.get("cache_read_input_tokens"))
        written = count_of(usage.get("cache_creation_input_tokens"))
        # Anthropic does not count cached tokens as input tokens; `TokenUsage` does.
        return TokenUsage(
            count_of(usage.get("input_tokens")) + read + written,
            count_of(usage.get("output_tokens")),
            read,
            reasoning_tokens=count_of((usage.get("output_tokens_details") or {}).get("thinking_tokens")),
            cache_write_tokens=written,
        )

    async def _gather(self, events: AsyncIterator[Any]) -> Mapping[str, Any]:
        answer: dict[str, Any] = {}
        blocks: dict[int, dict[str, Any]] = {}
        inputs: dict[int, str] = {}
        ended = False
        async for event in events:
            kind = event["type"]
            if kind == "message_start":
                answer = dict(event["message"])
            elif kind == "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            elif kind == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                elif delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                elif delta["type"] == "thinking_delta":
                    block["thinking"] += delta["thinking"]
                elif delta["type"] == "citations_delta":
                    block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
                elif delta["type"] == "signature_delta":
                    block["signature"] = block.get("signature", "") + delta["signature"]
            elif kind == "message_delta":
                answer |= event["delta"]
                answer["usage"] = {**(answer.get("usage") or {}), **(event.get("usage") or {})}
            elif kind == "message_stop":
                ended = True
        if not ended:
            raise ModelUnavailableError(f"{self._where()} ended its stream before the answer was complete", sent=True)
        for index, text in inputs.items():
            if text:
                blocks[index]["input"] = text  # As text, which `tool_call` parses.
        answer["content"] = [blocks[index] for index in sorted(blocks)]
        return answer


def _spoken(blocks: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text and the tool calls of an answer."""
    text = "".join(required_text(block["text"]) for block in blocks if block["type"] == "text")
    uses = (block for block in blocks if block["type"] == "tool_use")
    return text, tuple(tool_call(block["name"], block["input"], block.get("id")) for block in uses)


def _returnable(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block in a form that can be sent back: the input of a tool must be an object."""
    if "input" not in block:  # The provider's own tools have inputs too.
        return dict(block)
    return {**block, "input": plain_arguments(tool_call(block["name"], block["input"], block.get("id")))}


def _mark_for_cache(body: dict[str, Any]) -> None:
    """Mark the ends of the tools, of the system prompt and of the conversation so far."""
    mark = {"cache_control": {"type": "ephemeral"}}
    if body.get("tools"):
        body["tools"][-1] |= mark
    if body.get("system"):
        body["system"] = [{"type": "text", "text": body["system"], **mark}]
    if body["messages"]:
        content = body["messages"][-1]["content"]
        if content[-1]["type"] not in _THINKING:  # Thinking blocks cannot be marked.
            content[-1] = content[-1] | mark


def _in_words(schema: Any) -> Any:
    """Move the constraints that Anthropic refuses to the descriptions of a schema."""
    if isinstance(schema, list):
        return [_in_words(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    constraints = {key: schema[key] for key in schema if key in _IN_WORDS}
    kept = {
        key: {name: _in_words(value) for name, value in item.items()}
        if key in ("properties", "$defs")
        else _in_words(item)
        for key, item in schema.items()
        if key not in constraints
    }
    if constraints:
        words = ", ".join(f"{key}: {json.dumps(value)}" for key, value in constraints.items())
        kept["description"] = f"{kept['description']} ({words})" if "description" in kept else words
    return kept
