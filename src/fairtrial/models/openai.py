"""Models behind OpenAI's chat completions: OpenAI's own, and every server that speaks the protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from fairtrial.data.attachment import Attachment
from fairtrial.errors import InvalidCallError, ModelUnavailableError
from fairtrial.models.pricing import priced
from fairtrial.models.reply import ModelCall, ModelReply
from fairtrial.models.schema import output_schema
from fairtrial.models.sdk import (
    Client,
    SdkAdapter,
    arguments_text,
    base64_text,
    count_of,
    instruction,
    sendable,
    text_of,
    tool_call,
)
from fairtrial.session.events import TokenUsage
from fairtrial.session.trajectory import ChatMessage


class OpenAIAdapter(SdkAdapter):
    """A model of OpenAI's, or of any server that speaks its chat completions.

    Args:
        model: The model.
        base_url: Where it is, up to and including `/v1`; OPENAI_BASE_URL or OpenAI unless given.
        api_key: The key; OPENAI_API_KEY unless given.
        params: Parameters of every call in the protocol's own words, such as `{"temperature": 0}`.
        timeout_seconds: How long one request may take.
        stream: Receive answers in pieces. The result is the same; proxies that drop silent connections are content.
        structured_output: "native" asks for typed outputs by `response_format`, "prompt" in words.
        blobs: Where the bytes of attachments are found, and those of images and token traces are kept.
        headers: Additional headers of every request.
        prices_of: Whose price list holds, where `base_url` does not say.
        retry: When failed requests are tried again.
        limiter: How many may be under way at once; one for all tasks of the process unless given.
        cache: Where answers are kept.
        trial_budget: What one trial may use.
        run_budget: What one run may use.
        spending: What counts against `run_budget`: this adapter's calls unless given; a fleet may share one.
        prices: What the model costs (`Prices`), where no price list knows it or another price was agreed.
    """

    provider = "openai"
    package = "openai"
    extra = "openai"
    path = "/chat/completions"
    key_variables = ("OPENAI_API_KEY",)
    url_variable = "OPENAI_BASE_URL"
    default_url = "https://api.openai.com/v1"

    def _make_client(self) -> Client:
        import openai

        client = openai.AsyncOpenAI(
            api_key=self._key,
            base_url=self._base_url,
            max_retries=0,
            timeout=self._timeout,
            default_headers=self._headers,
            http_client=openai.DefaultAioHttpClient(),
        )
        return cast("Client", client)

    def _body(self, call: ModelCall) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "messages": [self._sent(message) for message in call.messages]}
        if call.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.parameters or {"type": "object", "properties": {}},
                    },
                }
                for tool in call.tools
            ]
        schema = output_schema(call.output_type)
        if schema is not None and self._structured == "native":
            wanted = {"name": schema.name, "schema": schema.schema, "strict": schema.strict}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        elif schema is not None:
            body["messages"].append({"role": "user", "content": instruction(schema)})
        if self._stream:
            body["stream_options"] = {"include_usage": True}
        return {**body, **call.params}

    def _sent(self, message: ChatMessage) -> dict[str, Any]:
        if message.role == "tool":
            return {"role": "tool", "tool_call_id": message.name, "content": sendable(message.text)}
        content: Any
        if isinstance(message.content, str):
            content = sendable(message.content)
        else:
            content = [self._part(part) for part in message.content]
        sent: dict[str, Any] = {"role": message.role, "content": content}
        if message.name:
            sent["name"] = message.name
        if message.tool_calls:
            sent["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments_text(call)},
                }
                for call in message.tool_calls
            ]
            sent["content"] = content or None
        return sent

    def _part(self, attachment: str | Attachment) -> dict[str, Any]:
        if isinstance(attachment, str):
            return {"type": "text", "text": sendable(attachment)}
        kind, _, form = attachment.media_type.partition("/")
        content = self._bytes(attachment)
        if kind == "text":
            return {"type": "text", "text": content.decode("utf-8", "replace")}
        data = base64_text(content)
        if kind == "image":
            return {"type": "image_url", "image_url": {"url": f"data:{attachment.media_type};base64,{data}"}}
        if kind == "audio":
            known = {"mpeg": "mp3", "x-wav": "wav", "wave": "wav"}
            return {"type": "input_audio", "input_audio": {"data": data, "format": known.get(form, form)}}
        if attachment.media_type == "application/pdf":
            named = attachment.name or "document.pdf"
            return {"type": "file", "file": {"filename": named, "file_data": f"data:application/pdf;base64,{data}"}}
        raise InvalidCallError(f"OpenAI's protocol carries no {attachment.media_type}")

    def _read(self, tree: Mapping[str, Any]) -> ModelReply:
        choice = tree["choices"][0]
        said: Mapping[str, Any] = choice["message"]
        calls = tuple(
            tool_call(call["function"]["name"], call["function"].get("arguments"), call.get("id"))
            for call in said.get("tool_calls") or ()
        )
        if "content" not in said and not calls and not said.get("refusal"):
            raise KeyError("content")
        reason = choice.get("finish_reason")
        refusal = said.get("refusal") or ("cut off by the content filter" if reason == "content_filter" else None)
        named = tree.get("model")
        model = named if isinstance(named, str) and named else self._model
        return ModelReply(
            ChatMessage("assistant", self._content(said), calls),
            self._usage(tree.get("usage"), model),
            reason,
            model,
            refusal,
            self._tokens(choice.get("logprobs")),
        )

    def _content(self, said: Mapping[str, Any]) -> str | tuple[str | Attachment, ...]:
        content = said.get("content")
        images = said.get("images")  # Not in OpenAI's protocol, but widely spoken.
        if isinstance(content, str) and not images:
            return content
        parts: list[str | Attachment] = []
        spoken: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        for part in spoken:
            if part["type"] == "text":
                parts.append(text_of(part["text"]))
            elif part["type"] == "image_url":
                parts.append(self._from_data_url(part["image_url"]["url"]))
        parts.extend(self._from_data_url(image["image_url"]["url"]) for image in images or ())
        if all(isinstance(part, str) for part in parts):
            return "".join(cast("list[str]", parts))
        return tuple(part for part in parts if part != "")

    def _usage(self, usage: Any, model: str) -> TokenUsage | None:
        if not isinstance(usage, Mapping):
            return None
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        counted = TokenUsage(
            count_of(usage.get("prompt_tokens")), count_of(usage.get("completion_tokens")), count_of(cached)
        )
        return priced(counted, model, provider=self._prices_of, base_url=self._base_url)

    def _tokens(self, logprobs: Any) -> Attachment | None:
        if not logprobs or self._blobs is None:
            return None
        return self._blobs.put(json.dumps(logprobs).encode(), media_type="application/json", name="logprobs.json")

    async def _gather(self, events: AsyncIterator[Any]) -> Mapping[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
        calls: dict[int, dict[str, Any]] = {}
        logprobs: list[Any] = []
        reason: str | None = None
        answer: dict[str, Any] = {"choices": [{"message": message}]}
        async for chunk in events:
            answer["model"] = chunk.get("model")
            answer["usage"] = chunk.get("usage") or answer.get("usage")
            for choice in chunk["choices"]:
                if choice.get("index"):
                    continue  # Only the first of several answers is used.
                delta = choice.get("delta") or {}
                for key in ("content", "refusal"):
                    if isinstance(delta.get(key), str):
                        message[key] = (message.get(key) or "") + delta[key]
                for piece in delta.get("tool_calls") or ():
                    known = calls.setdefault(piece["index"], {"id": "", "function": {"name": "", "arguments": ""}})
                    known["id"] = piece.get("id") or known["id"]
                    function = piece.get("function") or {}
                    known["function"]["name"] += function.get("name") or ""
                    known["function"]["arguments"] += function.get("arguments") or ""
                logprobs.extend((choice.get("logprobs") or {}).get("content") or ())
                reason = choice.get("finish_reason") or reason
        if reason is None:
            raise ModelUnavailableError(f"{self._where()} broke off in the middle of its answer")
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        answer["choices"][0] |= {"finish_reason": reason, "logprobs": {"content": logprobs} if logprobs else None}
        return answer
