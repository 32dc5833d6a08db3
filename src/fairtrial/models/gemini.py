"""An adapter for Google's own API, `generateContent`, of the Gemini API and of Vertex AI."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack
from uuid import uuid4

from fairtrial.data.sample import Attachment
from fairtrial.data.session.events import GEMINI_ENDINGS, TokenUsage, ending_of
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.errors import ConfigurationError, InvalidCallError, ModelUnavailableError
from fairtrial.models.adapter import AnswerT, ModelCall, ModelReply
from fairtrial.models.http import HttpAdapter, server_sent_events
from fairtrial.models.pricing import NO_EXTRAS, UsageExtras
from fairtrial.models.schema import output_schema
from fairtrial.models.sdk import SdkOptions
from fairtrial.models.tools import (
    add_turn,
    base64_text,
    check_one_answer,
    count_of,
    instruction,
    plain_arguments,
    required_text,
    sendable,
    tool_call,
)

# Parameters beside `generationConfig`; all others go inside it.
_OUTER = frozenset({"safetySettings", "tools", "toolConfig", "cachedContent", "labels", "serviceTier", "store"})
_RENAMED = {"maxTokens": "maxOutputTokens", "maxCompletionTokens": "maxOutputTokens", "stop": "stopSequences"}
_MADE = "made-"  # The start of ids that we made, because the API gave none; they are not sent.
_INLINE = ("image/", "audio/", "video/", "application/pdf")


class GeminiAdapter(HttpAdapter[AnswerT]):
    """A model at Google's own API: thoughts and their signatures, audio, video and files are sent as the API has them.

    Args:
        model: The model, such as "gemini-3.8-flash".
        options: The options of `OpenAIAdapter`: `base_url` (GOOGLE_GEMINI_BASE_URL), `api_key` (GEMINI_API_KEY or
            GOOGLE_API_KEY), `params` and so on. Parameters are those of `generationConfig`, in either spelling
            (`{"thinkingConfig": {"includeThoughts": True}}`), and fields beside it such as `safetySettings`.
    """

    provider = "gemini"
    key_variables: ClassVar[tuple[str, ...]] = ("GEMINI_API_KEY", "GOOGLE_API_KEY")
    url_variable = "GOOGLE_GEMINI_BASE_URL"
    default_url = "https://generativelanguage.googleapis.com/v1beta"
    price_list = "google"

    def __init__(self, model: str, **options: Unpack[SdkOptions]) -> None:
        super().__init__(model, **options)
        name = model.removeprefix("models/")
        self.path = f"/models/{name}:generateContent"
        self.stream_path = f"/models/{name}:streamGenerateContent?alt=sse"

    async def _request_headers(self, url: str, content: bytes) -> dict[str, str]:
        return {"x-goog-api-key": await self._current_key()}

    def _events(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        return server_sent_events(chunks)

    def _body(self, call: ModelCall) -> dict[str, Any]:
        system: list[str] = []
        contents: list[dict[str, Any]] = []
        names = {made.id: made.name for message in call.messages for made in message.tool_calls}
        for message in call.messages:
            if message.role in ("system", "developer"):
                system.append(sendable(message.text))
                continue
            role = "model" if message.role == "assistant" else "user"
            add_turn(contents, role, self._parts(message, names), "parts")
        config: dict[str, Any] = {}
        schema = output_schema(call.output_type)
        if schema is not None and self._structured == "native":
            config = {"responseMimeType": "application/json", "responseJsonSchema": schema.schema}
        elif schema is not None:
            system.append(instruction(schema))
        body: dict[str, Any] = {"contents": contents}
        if system:
            body["systemInstruction"] = {"parts": [{"text": "\n\n".join(system)}]}
        if call.tools:
            declared = [
                {"name": tool.name, "description": tool.description, "parametersJsonSchema": tool.schema}
                for tool in call.tools
            ]
            body["tools"] = [{"functionDeclarations": declared}]
        return _with_params(body, config, call.params)

    def _parts(self, message: ChatMessage, names: Mapping[str, str]) -> list[dict[str, Any]]:
        if message.role == "tool":
            return [self._result(message, names)]
        echoed = self._echoed(message.echo)
        if echoed is not None and _spoken(echoed) == (message.text, _unnamed(message.tool_calls)):
            return list(echoed)  # Unchanged, with signatures; not used if the message was edited.
        content = message.content
        parts = [self._part(part) for part in ((content,) if isinstance(content, str) else content) if part != ""]
        parts.extend(
            {"functionCall": _with_id(call.id, {"name": call.name, "args": plain_arguments(call)})}
            for call in message.tool_calls
        )
        return parts or [{"text": ""}]

    def _result(self, message: ChatMessage, names: Mapping[str, str]) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "name": names.get(message.name, message.name),
            "response": {"error" if message.failed else "result": sendable(message.text)},
        }
        if not isinstance(message.content, str):
            files = [self._part(part) for part in message.content if isinstance(part, Attachment)]
            if files:
                answer["parts"] = files
        return {"functionResponse": _with_id(message.name, answer)}

    def _part(self, part: str | Attachment) -> dict[str, Any]:
        content = self._loaded(part)
        if isinstance(part, str) or isinstance(content, str):
            return {"text": content}
        if part.media_type.startswith(_INLINE):
            return {"inlineData": {"mimeType": part.media_type, "data": base64_text(content)}}
        raise InvalidCallError(f"Google's API does not support attachments of type {part.media_type}")

    def _read(self, tree: Mapping[str, Any]) -> ModelReply:
        model = self._served_model(tree.get("modelVersion"))
        extras = self._extras(tree)
        usage = self._usage(tree.get("usageMetadata"), model, extras)
        blocked = (tree.get("promptFeedback") or {}).get("blockReason")
        if blocked and not tree.get("candidates"):
            return ModelReply(ChatMessage("assistant", ""), usage, "content_filter", model, f"the prompt: {blocked}")
        candidate = tree["candidates"][0]
        reason = candidate.get("finishReason")
        ending = ending_of(None if reason is None else required_text(reason), GEMINI_ENDINGS)
        parts: Sequence[Mapping[str, Any]] = (candidate.get("content") or {}).get("parts") or []
        text, calls = _spoken(parts)
        calls = tuple(
            call if call.id else ToolCall(call.name, call.arguments, f"{_MADE}{uuid4().hex[:12]}") for call in calls
        )
        thoughts = [required_text(part["text"]) for part in parts if part.get("thought") and "text" in part]
        refusal = f"cut off by Google's filter: {reason}" if ending == "refused" else None
        if ending == "complete":
            reason = "tool_calls" if calls else "stop"
        else:
            reason = {"refused": "content_filter", "cut off": "length"}.get(ending, reason)
        plain = all(part.keys() <= {"text", "functionCall", "inlineData"} for part in parts)
        files = [
            self._kept_part(part["inlineData"]) for part in parts if "inlineData" in part and not part.get("thought")
        ]
        content: Any = (*((text,) if text else ()), *files) if files else text if parts else ()
        echo = None if plain else self._echo(list(parts))
        message = ChatMessage("assistant", content, calls, reasoning="".join(thoughts), echo=echo)
        return ModelReply(message, usage, reason, model, refusal, extras=extras)

    def _kept_part(self, data: Mapping[str, Any]) -> Attachment:
        found = self._from_data_url(f"data:{data['mimeType']};base64,{data['data']}")
        if not isinstance(found, Attachment):
            raise TypeError("inlineData must be base64")
        return found

    async def _send(self, call: ModelCall) -> ModelReply:
        reply = await super()._send(call)
        asked = call.params.get("serviceTier") or call.params.get("service_tier")
        extras = UsageExtras.of(asked)  # The Gemini API does not say in the answer which tier it was.
        if not extras.tier or reply.extras.tier or reply.usage is None:
            return reply
        return replace(reply, usage=replace(reply.usage, cost_usd=None), extras=replace(reply.extras, tier=extras.tier))

    def _extras(self, tree: Mapping[str, Any]) -> UsageExtras:
        usage = tree.get("usageMetadata")
        if not isinstance(usage, Mapping):
            return NO_EXTRAS
        given, made, kept = (
            [(detail.get("modality"), count_of(detail.get("tokenCount"))) for detail in usage.get(name) or ()]
            for name in ("promptTokensDetails", "candidatesTokensDetails", "cacheTokensDetails")
        )
        # Video, pictures that the model makes, and sound from the cache have prices of their own.
        other = [count for kind, count in given if kind == "VIDEO"]
        other += [count for kind, count in made if kind not in ("TEXT", "AUDIO")]
        other += [count for kind, count in kept if kind == "AUDIO"]
        return UsageExtras.of(
            usage.get("serviceTier") or usage.get("trafficType"),
            audio_input=sum(count for kind, count in given if kind == "AUDIO"),
            audio_output=sum(count for kind, count in made if kind == "AUDIO"),
            other=sum(other),
        )

    def _counted(self, usage: Mapping[str, Any]) -> TokenUsage:
        thoughts = count_of(usage.get("thoughtsTokenCount"))
        return TokenUsage(
            count_of(usage.get("promptTokenCount")) + count_of(usage.get("toolUsePromptTokenCount")),
            count_of(usage.get("candidatesTokenCount")) + thoughts,
            count_of(usage.get("cachedContentTokenCount")),
            reasoning_tokens=thoughts,
        )

    async def _gather(self, events: AsyncIterator[Any]) -> Mapping[str, Any]:
        answer: dict[str, Any] = {}
        parts: list[dict[str, Any]] = []
        reason: str | None = None
        async for chunk in events:
            if "error" in chunk:
                return {"error": chunk["error"]}  # Classified like that of an answer in one piece.
            answer |= {key: value for key, value in chunk.items() if key != "candidates"}
            for candidate in chunk.get("candidates") or ():
                if candidate.get("index"):
                    continue  # Only the first of several answers is used.
                reason = candidate.get("finishReason") or reason
                for part in (candidate.get("content") or {}).get("parts") or ():
                    if parts and _continues(parts[-1], part):
                        parts[-1]["text"] += part["text"]
                    else:
                        parts.append(dict(part))
        blocked = (answer.get("promptFeedback") or {}).get("blockReason")
        if reason is None and not blocked:
            raise ModelUnavailableError(f"{self._where()} ended its stream before the answer was complete", sent=True)
        if reason is not None:
            answer["candidates"] = [{"content": {"role": "model", "parts": parts}, "finishReason": reason}]
        return answer


class VertexAdapter(GeminiAdapter):
    """A Gemini model at Vertex AI. GOOGLE_CLOUD_PROJECT and GOOGLE_CLOUD_LOCATION are the project and the region.

    `api_key` is a function that returns an access token, because tokens end after an hour: with google-auth,
    `credentials.refresh(Request())` and `credentials.token`.
    """

    provider = "vertex"
    key_variables = ("GOOGLE_CLOUD_ACCESS_TOKEN",)
    url_variable = "GOOGLE_CLOUD_PROJECT"
    default_url = ""

    @classmethod
    def _url_from_environment(cls) -> str | None:
        project = os.environ.get(cls.url_variable)
        if not project:
            return None
        location = os.environ.get("GOOGLE_CLOUD_LOCATION") or "global"
        host = "aiplatform.googleapis.com" if location == "global" else f"{location}-aiplatform.googleapis.com"
        return f"https://{host}/v1/projects/{project}/locations/{location}/publishers/google"

    async def _request_headers(self, url: str, content: bytes) -> dict[str, str]:
        return {"authorization": f"Bearer {await self._current_key()}"}


def _with_params(body: dict[str, Any], config: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Add parameters: fields of `generationConfig`, or beside it; tools are added to those of the call."""
    for name, value in params.items():
        key = _camel(name)
        key = _RENAMED.get(key, key)
        if key == "generationConfig":
            config |= value
        elif key == "tools":
            body["tools"] = [*body.get("tools", ()), *value]
        elif key in _OUTER:
            body[key] = value
        elif key == "stopSequences" and isinstance(value, str):
            config[key] = [value]
        elif key == "contents":
            raise ConfigurationError("params must have parameters of the API (got 'contents', which are the messages)")
        else:
            config[key] = value
    check_one_answer(config)
    return {**body, "generationConfig": config} if config else body


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _spoken(parts: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text and the tool calls of an answer."""
    text = "".join(required_text(part["text"]) for part in parts if "text" in part and not part.get("thought"))
    called = (part["functionCall"] for part in parts if "functionCall" in part)
    return text, tuple(tool_call(call["name"], call.get("args") or {}, call.get("id")) for call in called)


def _unnamed(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.name, call.arguments, "" if call.id.startswith(_MADE) else call.id) for call in calls)


def _with_id(call_id: str, content: dict[str, Any]) -> dict[str, Any]:
    return content if not call_id or call_id.startswith(_MADE) else {"id": call_id, **content}


def _continues(last: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Return whether a part of a stream continues the text before it; signatures belong to the part that has them."""
    kinds = [{*each} - {"thought"} for each in (last, part)]
    return kinds == [{"text"}, {"text"}] and bool(last.get("thought")) == bool(part.get("thought"))
