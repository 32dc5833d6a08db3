"""An adapter for Amazon Bedrock's `Converse`, with AWS credentials: requests are signed by Signature Version 4."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Unpack
from urllib.parse import quote

import anyio.to_thread

from fairtrial.base.codec import parse_json
from fairtrial.base.frozen import EMPTY
from fairtrial.data.sample import Attachment
from fairtrial.data.session.events import CONVERSE_ENDINGS, TokenUsage, ending_of
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.errors import (
    CodecError,
    InvalidCallError,
    MalformedReplyError,
    MissingExtraError,
    ModelAuthError,
    ModelUnavailableError,
    RateLimitedError,
)
from fairtrial.models.adapter import AnswerT, ModelCall, ModelReply
from fairtrial.models.http import HttpAdapter
from fairtrial.models.pricing import UsageExtras
from fairtrial.models.schema import output_schema
from fairtrial.models.sdk import SdkOptions
from fairtrial.models.tools import (
    add_turn,
    base64_text,
    count_of,
    instruction,
    plain_arguments,
    required_text,
    sendable,
    tool_call,
)

_CREDENTIALS = "aws-credentials"  # In place of a key: the credential chain of AWS.
_REGION = re.compile(r"//bedrock-runtime(?:-fips)?\.([a-z0-9-]+)\.")
_IMAGES = {"image/png": "png", "image/jpeg": "jpeg", "image/gif": "gif", "image/webp": "webp"}
_CONFIG = {
    "max_tokens": "maxTokens", "maxTokens": "maxTokens", "temperature": "temperature", "top_p": "topP", "topP": "topP",
    "stop": "stopSequences", "stopSequences": "stopSequences",
}  # fmt: skip
_OUTER = frozenset(
    {
        "guardrailConfig", "promptVariables", "additionalModelResponseFieldPaths", "requestMetadata",
        "performanceConfig", "serviceTier", "additionalModelRequestFields", "outputConfig",
    }
)  # fmt: skip


class ConverseAdapter(HttpAdapter[AnswerT]):
    """A model at Amazon Bedrock, by `Converse`, with the credentials of AWS or a Bedrock API key.

    Credentials come from the chain of botocore: environment, profile, container, instance; they are renewed. With
    AWS_BEARER_TOKEN_BEDROCK or `api_key`, requests have that key instead of a signature.

    Args:
        model: The id or ARN of a model or an inference profile, such as "eu.anthropic.claude-opus-5-v1:0".
        options: The options of `OpenAIAdapter`; `base_url` is derived from AWS_REGION. Parameters are those of
            `inferenceConfig`, fields of the request such as `guardrailConfig`, and others, which are sent to the model
            as `additionalModelRequestFields`.
    """

    provider = "bedrock-runtime"
    key_variables: ClassVar[tuple[str, ...]] = ("AWS_BEARER_TOKEN_BEDROCK",)
    url_variable = "AWS_REGION"
    default_key = _CREDENTIALS
    price_list = "aws"

    def __init__(self, model: str, **options: Unpack[SdkOptions]) -> None:
        if importlib.util.find_spec("botocore") is None:
            raise MissingExtraError(type(self).__name__, "models")
        super().__init__(model, **options)
        self.path = f"/model/{quote(model, safe='')}/converse"
        self.stream_path = f"{self.path}-stream"
        found = _REGION.search(self._base_url)
        self._prices_of = self._prices_of or ("aws" if found else None)
        self._region = found[1] if found else _region() or "us-east-1"
        self._aws: Any = None
        self._aws_lock = threading.Lock()

    @classmethod
    def _url_from_environment(cls) -> str | None:
        region = _region()
        given = os.environ.get("AWS_ENDPOINT_URL_BEDROCK_RUNTIME")
        return given or (f"https://bedrock-runtime.{region}.amazonaws.com" if region else None)

    async def _request_headers(self, url: str, content: bytes) -> dict[str, str]:
        if self._key != _CREDENTIALS:
            return {"authorization": f"Bearer {await self._current_key()}"}
        # In a thread, because credentials may be asked for, and renewed, over the network.
        return await anyio.to_thread.run_sync(self._signature, url, content)

    def _signature(self, url: str, content: bytes) -> dict[str, str]:
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session

        try:
            with self._aws_lock:
                if self._aws is None:
                    self._aws = Session().get_credentials()
                credentials = None if self._aws is None else self._aws.get_frozen_credentials()
        except BotoCoreError as error:
            raise ModelAuthError(f"{self._where()}: the credentials of AWS cannot be loaded: {error}") from None
        if credentials is None:
            raise ModelAuthError(
                f"{self._where()} needs credentials of AWS, and the chain found none: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or AWS_BEARER_TOKEN_BEDROCK"
            )
        request = AWSRequest("POST", url, data=content, headers={"content-type": "application/json"})
        SigV4Auth(credentials, "bedrock", self._region).add_auth(request)
        return {name.lower(): value for name, value in request.headers.items()}

    def _body(self, call: ModelCall) -> dict[str, Any]:
        system: list[dict[str, Any]] = []
        messages: list[dict[str, Any]] = []
        for message in call.messages:
            if message.role in ("system", "developer"):
                system.append({"text": sendable(message.text)})
                continue
            role = "assistant" if message.role == "assistant" else "user"
            add_turn(messages, role, self._blocks(message))
        body: dict[str, Any] = {"messages": messages}
        schema = output_schema(call.output_type)
        if schema is not None and self._structured == "native":
            wanted = {"schema": json.dumps(schema.schema), "name": schema.name}
            body["outputConfig"] = {"textFormat": {"type": "json_schema", "structure": {"jsonSchema": wanted}}}
        elif schema is not None:
            system.append({"text": instruction(schema)})
        if system:
            body["system"] = system
        if call.tools:
            named = [{"name": tool.name, "description": tool.description or tool.name} for tool in call.tools]
            schemas = [{"inputSchema": {"json": tool.schema}} for tool in call.tools]
            body["toolConfig"] = {
                "tools": [{"toolSpec": name | schema} for name, schema in zip(named, schemas, strict=True)]
            }
        return _with_params(body, call.params)

    def _blocks(self, message: ChatMessage) -> list[dict[str, Any]]:
        content = message.content
        parts = [self._block(part) for part in ((content,) if isinstance(content, str) else content) if part != ""]
        if message.role == "tool":
            result = {"toolUseId": message.name, "content": parts or [{"text": ""}]}
            return [{"toolResult": {**result, "status": "error"} if message.failed else result}]
        echoed = self._echoed(message.echo)
        if echoed is not None and _spoken(echoed) == (message.text, message.tool_calls):
            return list(echoed)  # Unchanged, with reasoning and signatures; not used if the message was edited.
        parts.extend(
            {"toolUse": {"toolUseId": call.id, "name": call.name, "input": plain_arguments(call)}}
            for call in message.tool_calls
        )
        return parts or [{"text": "(nothing)"}]  # The API refuses empty messages.

    def _block(self, part: str | Attachment) -> dict[str, Any]:
        content = self._loaded(part)
        if isinstance(part, str) or isinstance(content, str):
            return {"text": content}
        source = {"bytes": base64_text(content)}
        if part.media_type in _IMAGES:
            return {"image": {"format": _IMAGES[part.media_type], "source": source}}
        if part.media_type == "application/pdf":
            return {"document": {"format": "pdf", "name": "document", "source": source}}
        raise InvalidCallError(f"Amazon Bedrock's Converse does not support attachments of type {part.media_type}")

    def _read(self, tree: Mapping[str, Any]) -> ModelReply:
        blocks: Sequence[Mapping[str, Any]] = tree["output"]["message"]["content"]
        reason = tree.get("stopReason")
        ending = ending_of(None if reason is None else required_text(reason), CONVERSE_ENDINGS)
        text, calls = _spoken(blocks)
        thoughts = [
            required_text(block["reasoningContent"]["reasoningText"]["text"])
            for block in blocks
            if "reasoningText" in (block.get("reasoningContent") or {})
        ]
        refusal = (text or str(reason)) if ending == "refused" else None
        plain = all(block.keys() <= {"text", "toolUse"} for block in blocks)
        echo = None if plain else self._echo([_returnable(block) for block in blocks])
        content = text if blocks else ()
        message = ChatMessage("assistant", content, calls, reasoning="\n\n".join(thoughts), echo=echo)
        extras = self._extras(tree)
        usage = self._usage(tree.get("usage"), self._model, extras)
        return ModelReply(message, usage, reason, self._model, refusal, extras=extras)

    def _extras(self, tree: Mapping[str, Any]) -> UsageExtras:
        latency = (tree.get("performanceConfig") or EMPTY).get("latency")
        details = (tree.get("usage") or EMPTY).get("cacheDetails") or ()
        return UsageExtras.of(
            (tree.get("serviceTier") or EMPTY).get("type") or latency,
            hour_writes=sum(count_of(detail.get("inputTokens")) for detail in details if detail.get("ttl") == "1h"),
        )

    def _counted(self, usage: Mapping[str, Any]) -> TokenUsage:
        read, written = count_of(usage.get("cacheReadInputTokens")), count_of(usage.get("cacheWriteInputTokens"))
        given = count_of(usage.get("inputTokens")) + read + written
        return TokenUsage(given, count_of(usage.get("outputTokens")), read, cache_write_tokens=written)

    async def _events(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        from botocore.eventstream import EventStreamBuffer, ParserError

        buffer = EventStreamBuffer()
        async for chunk in chunks:
            buffer.add_data(chunk)
            try:
                for event in buffer:
                    kind = event.headers.get(":exception-type") or event.headers[":event-type"]
                    yield {kind: parse_json(event.payload)}
            except CodecError as error:
                raise MalformedReplyError(f"{self._where()} sent an event that is not JSON: {error}") from None
            except ParserError as error:
                raise ModelUnavailableError(f"{self._where()} sent a damaged stream: {error}", sent=True) from None

    async def _gather(self, events: AsyncIterator[Any]) -> Mapping[str, Any]:
        blocks: dict[int, dict[str, Any]] = {}
        inputs: dict[int, str] = {}
        answer: dict[str, Any] = {}
        async for event in events:
            ((kind, data),) = event.items()
            if kind.endswith("Exception"):
                self._raise_for(kind, str(data.get("message")))
            index = data.get("contentBlockIndex", 0)
            if kind == "contentBlockStart":
                blocks[index] = {"toolUse": {**data["start"]["toolUse"], "input": {}}}
            elif kind == "contentBlockDelta":
                _add(blocks, inputs, index, data["delta"])
            elif kind == "messageStop":
                answer["stopReason"] = data["stopReason"]
            elif kind == "metadata":
                answer |= data
        if "stopReason" not in answer:
            raise ModelUnavailableError(f"{self._where()} ended its stream before the answer was complete", sent=True)
        for index, text in inputs.items():
            blocks[index]["toolUse"]["input"] = text  # As text, which `tool_call` parses.
        answer["output"] = {"message": {"content": [blocks[index] for index in sorted(blocks)]}}
        return answer

    def _raise_for(self, kind: str, message: str) -> None:
        text = f"{self._where()} failed while it was answering: {kind}: {message}"
        if kind == "throttlingException":
            raise RateLimitedError(text)
        if kind == "validationException":
            raise InvalidCallError(text)
        raise ModelUnavailableError(text, sent=True)


def _region() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


def _add(blocks: dict[int, dict[str, Any]], inputs: dict[int, str], index: int, delta: Mapping[str, Any]) -> None:
    """Add a piece of a stream to its block."""
    if "toolUse" in delta:
        inputs[index] = inputs.get(index, "") + delta["toolUse"]["input"]
    elif "text" in delta:
        block = blocks.setdefault(index, {"text": ""})
        block["text"] += delta["text"]
    elif "reasoningContent" in delta:
        piece = delta["reasoningContent"]
        block = blocks.setdefault(index, {"reasoningContent": {}})["reasoningContent"]
        if "redactedContent" in piece:
            block["redactedContent"] = piece["redactedContent"]
            return
        text = block.setdefault("reasoningText", {"text": ""})
        text["text"] += piece.get("text") or ""
        if "signature" in piece:
            text["signature"] = piece["signature"]


def _with_params(body: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Add parameters to where they belong in the request."""
    for name, value in params.items():
        if name in _CONFIG:
            body.setdefault("inferenceConfig", {})[_CONFIG[name]] = [value] if isinstance(value, str) else value
        elif name == "inferenceConfig":
            body.setdefault(name, {}).update(value)
        elif name == "toolConfig":
            own = body.get(name, {})
            body[name] = {**own, **value, "tools": [*own.get("tools", ()), *value.get("tools", ())]}
        elif name in _OUTER:
            body[name] = {**body.get(name, {}), **value} if isinstance(value, Mapping) else value
        else:
            body.setdefault("additionalModelRequestFields", {})[name] = value
    return body


def _spoken(blocks: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text and the tool calls of an answer."""
    cited = [block.get("citationsContent") or {"content": (block,)} for block in blocks]
    text = "".join(required_text(part["text"]) for block in cited for part in block["content"] if "text" in part)
    uses = (block["toolUse"] for block in blocks if "toolUse" in block)
    return text, tuple(tool_call(use["name"], use["input"], use.get("toolUseId")) for use in uses)


def _returnable(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block in a form that can be sent back: the input of a tool must be an object."""
    if "toolUse" not in block:
        return dict(block)
    use = block["toolUse"]
    return {"toolUse": {**use, "input": plain_arguments(tool_call(use["name"], use["input"], use.get("toolUseId")))}}
