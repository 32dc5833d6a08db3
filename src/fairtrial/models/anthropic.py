"""Models behind Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Unpack, cast

from fairtrial.codec import to_json
from fairtrial.data.attachment import Attachment
from fairtrial.errors import InvalidCallError, ModelUnavailableError
from fairtrial.frozen import EMPTY
from fairtrial.models.pricing import priced
from fairtrial.models.reply import ModelCall, ModelReply
from fairtrial.models.schema import OutputSchema, is_recursive, output_schema
from fairtrial.models.sdk import (
    Client,
    SdkAdapter,
    SdkOptions,
    base64_text,
    count_of,
    instruction,
    sendable,
    text_of,
    tool_call,
)
from fairtrial.session.events import TokenUsage
from fairtrial.session.trajectory import ChatMessage, ToolCall

# What Anthropic's structured outputs refuse; told in words instead.
_IN_WORDS = frozenset(
    {
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
        "minLength", "maxLength", "pattern", "minItems", "maxItems", "uniqueItems",
    }
)  # fmt: skip


class AnthropicAdapter(SdkAdapter):
    """A model of Anthropic's, or of any server that speaks its messages.

    Args:
        model: The model.
        max_tokens: How long an answer may be; the protocol wants a number.
        options: All that `OpenAIAdapter` takes: `base_url` (ANTHROPIC_BASE_URL), `api_key` (ANTHROPIC_API_KEY),
            `params`, `timeout_seconds`, `stream`, `structured_output`, `blobs`, `headers`, `prices_of`, `retry`,
            `limiter`, `cache`, `trial_budget` and `run_budget`.
    """

    provider = "anthropic"
    package = "anthropic"
    extra = "anthropic"
    path = "/v1/messages"
    key_variables = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    url_variable = "ANTHROPIC_BASE_URL"
    default_url = "https://api.anthropic.com"

    def __init__(self, model: str, *, max_tokens: int = 4096, **options: Unpack[SdkOptions]) -> None:
        options["params"] = {"max_tokens": max_tokens, **options.get("params", EMPTY)}
        super().__init__(model, **options)

    def _make_client(self) -> Client:
        import anthropic

        client = anthropic.AsyncAnthropic(
            api_key=self._key,
            base_url=self._base_url,
            max_retries=0,
            timeout=self._timeout,
            default_headers=self._headers,
            http_client=anthropic.DefaultAioHttpClient(),
        )
        return cast("Client", client)

    def _body(self, call: ModelCall) -> dict[str, Any]:
        system: list[str] = []
        messages: list[dict[str, Any]] = []
        for message in call.messages:
            if message.role in ("system", "developer"):
                system.append(sendable(message.text))
                continue
            role = "assistant" if message.role == "assistant" else "user"
            blocks = self._blocks(message)
            if messages and messages[-1]["role"] == role:
                # The protocol wants the roles to alternate; the results of parallel calls are one message.
                messages[-1]["content"].extend(blocks)
            else:
                messages.append({"role": role, "content": blocks})
        body: dict[str, Any] = {"model": self._model, "messages": messages}
        if call.tools:
            body["tools"] = [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema": tool.parameters or {"type": "object", "properties": {}},
                }
                for tool in call.tools
            ]
        schema = output_schema(call.output_type)
        if schema is not None and self._structured == "native" and _is_native(schema):
            body["output_config"] = {"format": {"type": "json_schema", "schema": _in_words(schema.schema)}}
        elif schema is not None:
            system.append(instruction(schema))
        if system:
            body["system"] = "\n\n".join(system)
        return {**body, **call.params}

    def _blocks(self, message: ChatMessage) -> list[dict[str, Any]]:
        if message.role == "tool":
            content = [self._block(part) for part in _parts(message)]
            return [{"type": "tool_result", "tool_use_id": message.name, "content": content}]
        blocks = [self._block(part) for part in _parts(message)]
        blocks.extend(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _plain(call)} for call in message.tool_calls
        )
        # An empty message is refused; silence has to be shown somehow.
        return blocks or [{"type": "text", "text": "(nothing)"}]

    def _block(self, part: str | Attachment) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": sendable(part)}
        content = self._bytes(part)
        if part.media_type.startswith("text/"):
            return {"type": "text", "text": content.decode("utf-8", "replace")}
        source = {"type": "base64", "media_type": part.media_type, "data": base64_text(content)}
        if part.media_type.startswith("image/"):
            return {"type": "image", "source": source}
        if part.media_type == "application/pdf":
            return {"type": "document", "source": source}
        raise InvalidCallError(f"Anthropic's protocol carries no {part.media_type}")

    def _read(self, tree: Mapping[str, Any]) -> ModelReply:
        blocks: list[Mapping[str, Any]] = tree["content"]
        texts = [text_of(block["text"]) for block in blocks if block["type"] == "text"]
        calls = tuple(
            tool_call(block["name"], block["input"], block.get("id")) for block in blocks if block["type"] == "tool_use"
        )
        reason = tree.get("stop_reason")
        refusal = ("".join(texts) or "no reason given") if reason == "refusal" else None
        named = tree.get("model")
        model = named if isinstance(named, str) and named else self._model
        usage = self._usage(tree.get("usage"), model)
        return ModelReply(ChatMessage("assistant", "".join(texts), calls), usage, reason, model, refusal)

    def _usage(self, usage: Any, model: str) -> TokenUsage | None:
        if not isinstance(usage, Mapping):
            return None
        read, written = (
            count_of(usage.get("cache_read_input_tokens")),
            count_of(usage.get("cache_creation_input_tokens")),
        )
        # Anthropic counts what went through its cache apart from the input; for us it is part of it.
        counted = TokenUsage(
            count_of(usage.get("input_tokens")) + read + written, count_of(usage.get("output_tokens")), read
        )
        return priced(counted, model, provider=self._prices_of, base_url=self._base_url, cache_writes=written)

    async def _gather(self, events: AsyncIterator[Any]) -> Mapping[str, Any]:
        answer: dict[str, Any] = {}
        blocks: dict[int, dict[str, Any]] = {}
        ended = False
        async for event in events:
            kind = event["type"]
            if kind == "message_start":
                answer = dict(event["message"])
            elif kind == "content_block_start":
                blocks[event["index"]] = {**event["content_block"], "partial": ""}
            elif kind == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                elif delta["type"] == "input_json_delta":
                    block["partial"] += delta["partial_json"]
            elif kind == "message_delta":
                answer |= event["delta"]
                answer["usage"] = {**(answer.get("usage") or {}), **(event.get("usage") or {})}
            elif kind == "message_stop":
                ended = True
        if not ended:
            raise ModelUnavailableError(f"{self._where()} broke off in the middle of its answer")
        for block in blocks.values():
            if block["type"] == "tool_use" and block["partial"]:
                block["input"] = block["partial"]  # As text: it is read, or found unreadable, in one place.
        answer["content"] = [blocks[index] for index in sorted(blocks)]
        return answer


def _parts(message: ChatMessage) -> tuple[str | Attachment, ...]:
    content = message.content
    # The protocol refuses empty texts.
    return tuple(part for part in ((content,) if isinstance(content, str) else content) if part != "")


def _plain(call: ToolCall) -> Any:
    return json.loads(sendable(json.dumps(call.arguments, ensure_ascii=False, default=to_json)))


def _is_native(schema: OutputSchema) -> bool:
    # Anthropic's structured outputs know no type that contains itself.
    return schema.strict and not is_recursive(schema.schema)


def _in_words(schema: Any) -> Any:
    """The schema with the constraints Anthropic refuses moved into the descriptions."""
    if isinstance(schema, list):
        return [_in_words(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    told = {key: schema[key] for key in schema if key in _IN_WORDS}
    kept = {
        key: {name: _in_words(value) for name, value in item.items()}
        if key in ("properties", "$defs")
        else _in_words(item)
        for key, item in schema.items()
        if key not in told
    }
    if told:
        words = ", ".join(f"{key}: {json.dumps(value)}" for key, value in told.items())
        kept["description"] = f"{kept['description']} ({words})" if "description" in kept else words
    return kept
