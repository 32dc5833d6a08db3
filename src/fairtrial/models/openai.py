"""An adapter for OpenAI's APIs, Responses and chat completions, and for servers that implement them."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Unpack, cast
from urllib.parse import urlsplit

from fairtrial.base.codec import dumps
from fairtrial.base.frozen import EMPTY
from fairtrial.data.sample import Attachment
from fairtrial.data.session.events import CHAT_ENDINGS, TokenUsage, ending_of
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import ConfigurationError, InvalidCallError, ModelError, ModelUnavailableError
from fairtrial.models import responses
from fairtrial.models.adapter import TOKEN_PARAMS, AnswerT, ModelCall, ModelReply, changed_sampling, read_tokens
from fairtrial.models.base import log
from fairtrial.models.batches.openai_wire import OpenAIBatches
from fairtrial.models.batches.wire import BatchWire
from fairtrial.models.cache import ResponseCache
from fairtrial.models.pricing import NO_EXTRAS, UsageExtras
from fairtrial.models.schema import output_schema
from fairtrial.models.sdk import SdkAdapter, SdkOptions
from fairtrial.models.tools import (
    amount_of,
    arguments_text,
    base64_text,
    content_of,
    count_of,
    instruction,
    required_text,
    sendable,
    tool_call,
    with_params,
)

type OpenAIApi = Literal["responses", "chat"]
"""Which of OpenAI's APIs is used: Responses or chat completions."""

# The fields with the reasoning of a chat completion, which differ by server; all of them are sent back.
_REASONING = ("reasoning_content", "reasoning", "reasoning_details", "extra_content")


class OpenAIAdapter(SdkAdapter[AnswerT]):
    """A model of OpenAI, or of any server with the Responses or chat completions API.

    Args:
        model: The model.
        api: "responses" or "chat" (completions). By default Responses for OpenAI and Azure, whose reasoning models
            need it to call tools, and chat completions for every other `base_url`. Responses are used without state:
            nothing is stored at the provider, and reasoning is sent back encrypted.
        tokens: Request token ids and log-probabilities of every call, as vLLM and SGLang return them for chat
            completions, and record them for training (`TokensSampled`, or `TokensMissing` with the reason). The
            response cache is not used.
        base_url: The address, up to and including `/v1`; by default OPENAI_BASE_URL or that of OpenAI.
        api_key: The key, or a function that returns the present one, sync or async, for keys that are renewed; by
            default OPENAI_API_KEY.
        params: Parameters of every call with the names of the API, such as `{"temperature": 0}`.
        timeout_seconds: The time limit of one request.
        stream: Receive answers in chunks, with the same result. Useful behind proxies that close idle connections.
        structured_output: How typed outputs are requested: "native" uses `response_format`, "prompt" an instruction.
        blobs: The folder with the bytes of attachments; also stores images and token traces from the model.
        headers: Additional headers of every request.
        prices_of: The provider whose price list applies, if `base_url` does not determine it.
        retry: The retry policy of failed requests.
        limiter: Limits the number of concurrent requests; by default one limiter for all tasks of the process.
        cache: The cache of responses.
        trial_budget: The budget of one trial.
        run_budget: The budget of one run.
        spending: The usage that counts towards `run_budget`; by default that of this adapter. A fleet can share one.
        batch: Send calls in the provider's batches, at half price (`Batching`).
        prices: The prices of the model (`Prices`), if no price list has it or other prices apply.
    """

    provider = "openai"
    package = "openai"
    client_class = "AsyncOpenAI"
    key_variables: ClassVar[tuple[str, ...]] = ("OPENAI_API_KEY",)
    url_variable = "OPENAI_BASE_URL"
    default_url = "https://api.openai.com/v1"
    can_embed = True
    embedding_path = "/embeddings"
    batch_wire: ClassVar[BatchWire | None] = OpenAIBatches()
    default_api: ClassVar[OpenAIApi | None] = None  # None: decided by the address.
    stream_usage: ClassVar[bool] = True  # Whether streams need `stream_options` to report usage.

    def __init__(
        self, model: str, *, api: OpenAIApi | None = None, tokens: bool = False, **options: Unpack[SdkOptions]
    ) -> None:
        if api not in (None, "responses", "chat"):
            raise ConfigurationError(f'api must be "responses", "chat" or None (got {api!r})')
        if tokens and options.get("cache") is not None:
            raise ConfigurationError(
                "an adapter with tokens=True must have no cache (got one): after a training step, the same model has "
                "other weights"
            )
        super().__init__(model, **options)
        self._api = api or self.default_api or ("responses" if _is_openai(self._base_url) else "chat")
        if tokens and self._api != "chat":
            raise ConfigurationError(
                f"an adapter with tokens=True must call chat completions of vLLM or SGLang (got api={self._api!r} at "
                f"{self._base_url}, which returns no token ids)\npass base_url=... of the engine"
            )
        self._token_ids = tokens
        self._warned = False
        self._encrypted = True  # Until the model refuses to send encrypted reasoning.
        self.path = "/responses" if self._api == "responses" else "/chat/completions"
        self._echo_provider = f"{self._echo_provider}/{self._api}"

    @property
    def api(self) -> OpenAIApi:
        """The API that is used: "responses" or "chat"."""
        return self._api

    def _cache_salt(self) -> Any:
        return [super()._cache_salt(), self._api]

    def _make_client(self) -> Any:
        client = super()._make_client()
        if urlsplit(self._base_url).hostname != "api.openai.com":
            # The SDK reads them from the environment; they are nobody else's business.
            client.organization = client.project = None
        return client

    async def _send(self, call: ModelCall) -> ModelReply:
        try:
            return await super()._send(call)
        except InvalidCallError as error:
            if not self._adapts(error):
                raise
            return await super()._send(call)

    def _adapts(self, error: ModelError) -> bool:
        text = str(error).lower()
        if self._api != "responses" or "encrypted content" not in text or "not supported" not in text:
            return False
        # Whether a model reasons cannot be told from its name: deployments at Azure have names of their own.
        self._encrypted = False
        return True

    def _body(self, call: ModelCall) -> dict[str, Any]:
        if call.embeds:
            texts = [sendable(message.text) for message in call.messages]
            return {"model": self._model, "input": texts, "encoding_format": "float", **call.params}
        if self._api == "responses":
            return responses.body(self, call, encrypted=self._encrypted)
        body: dict[str, Any] = {"model": self._model, "messages": [self._sent(message) for message in call.messages]}
        if call.tools:
            functions = [
                {"name": tool.name, "description": tool.description, "parameters": tool.schema} for tool in call.tools
            ]
            body["tools"] = [{"type": "function", "function": function} for function in functions]
        schema = output_schema(call.output_type)
        if schema is not None and self._structured == "native":
            wanted = {"name": schema.name, "schema": schema.schema, "strict": schema.strict}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        elif schema is not None:
            body["messages"].append({"role": "user", "content": instruction(schema)})
        if self._stream and self.stream_usage:
            body["stream_options"] = {"include_usage": True}
        if self._token_ids:
            body |= TOKEN_PARAMS
            self._warn_of_sampling(call.params)
        return with_params(body, call.params)

    def _warn_of_sampling(self, params: Mapping[str, Any]) -> None:
        """Warn, once, of parameters with which the log-probabilities may not be those of the policy."""
        changed = [] if self._warned else changed_sampling(params)
        if changed:
            self._warned = True
            log.warning(
                "%s is sampled with %s: its log-probabilities are those of the policy only without them, or if the "
                "engine reports processed ones (vLLM: --logprobs-mode processed_logprobs)",
                self._where(),
                ", ".join(changed),
            )

    def _response_cache(self) -> ResponseCache | None:
        return None if self._token_ids else super()._response_cache()

    def _by_status(self, error: Any, status: int) -> ModelError:
        found = super()._by_status(error, status)
        if self._token_ids and self._stream and isinstance(found, InvalidCallError):
            return InvalidCallError(f"{found}\nSGLang does not stream token ids: use stream=False with tokens=True.")
        return found

    def _sent(self, message: ChatMessage) -> dict[str, Any]:
        if message.role == "tool":
            if any(not isinstance(part, str) for part in content_of(message)):
                raise InvalidCallError(
                    "the result of a tool must be text in chat completions (got an attachment): "
                    'use OpenAIAdapter(..., api="responses") or AnthropicAdapter, which can send pictures'
                )
            return {"role": "tool", "tool_call_id": message.name, "content": sendable(message.text)}
        given = message.content
        content = sendable(given) if isinstance(given, str) else [self._part(part) for part in given]
        sent: dict[str, Any] = {"role": message.role, "content": content}
        if message.name:
            sent["name"] = message.name
        if message.tool_calls:
            sent["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments_text(call)},
                    **(self._echoed(call.echo) or EMPTY),
                }
                for call in message.tool_calls
            ]
            sent["content"] = content or None
        echoed = self._echoed(message.echo)
        if echoed is not None:
            parts = echoed.pop("content", None)
            if parts is not None and _spoken(parts) == message.text:
                sent["content"] = parts
            sent |= echoed
        return sent

    def _part(self, attachment: str | Attachment) -> dict[str, Any]:
        content = self._loaded(attachment)
        if isinstance(attachment, str) or isinstance(content, str):
            return {"type": "text", "text": content}
        kind, _, form = attachment.media_type.partition("/")
        data = base64_text(content)
        if kind == "image":
            return {"type": "image_url", "image_url": {"url": f"data:{attachment.media_type};base64,{data}"}}
        if kind == "audio":
            known = {"mpeg": "mp3", "x-wav": "wav", "wave": "wav"}
            return {"type": "input_audio", "input_audio": {"data": data, "format": known.get(form, form)}}
        if attachment.media_type == "application/pdf":
            named = attachment.name or "document.pdf"
            return {"type": "file", "file": {"filename": named, "file_data": f"data:application/pdf;base64,{data}"}}
        raise InvalidCallError(f"OpenAI's chat completions do not support attachments of type {attachment.media_type}")

    def _read(self, tree: Mapping[str, Any]) -> ModelReply:
        if self._api == "responses":
            return responses.read(self, tree)
        choice = tree["choices"][0]
        answer: Mapping[str, Any] = choice["message"]
        if isinstance(problem := choice.get("error"), Mapping):
            raise self._by_code(problem) or ModelUnavailableError(
                f"{self._where()} failed while it was answering: {problem}", sent=True
            )
        requested = answer.get("tool_calls") or ()
        calls = tuple(
            tool_call(
                call["function"]["name"],
                call["function"].get("arguments"),
                call_id,
                self._echo({"extra_content": call["extra_content"]}) if call.get("extra_content") else None,
            )
            for call, call_id in zip(requested, _call_ids(requested), strict=True)
        )
        kept = {name: answer[name] for name in _REASONING if answer.get(name)}
        content = answer.get("content")
        if isinstance(content, list) and any(part["type"] == "thinking" for part in content):
            kept["content"] = content
        reason = choice.get("finish_reason")
        if reason is not None:
            required_text(reason)
        silent = content is None and not (calls or kept or answer.get("refusal") or answer.get("images"))
        if silent and ("content" not in answer or ending_of(reason, CHAT_ENDINGS) == "complete"):
            raise KeyError("content")
        refusal = answer.get("refusal") or (
            f"ended with {reason!r}" if ending_of(reason, CHAT_ENDINGS) == "refused" else None
        )
        model = self._served_model(tree.get("model"))
        extras = self._extras(tree)
        echo = self._echo(kept) if kept else None
        return ModelReply(
            ChatMessage("assistant", self._content(answer), calls, reasoning=_reasoning(answer), echo=echo),
            self._usage(tree.get("usage"), model, extras),
            reason,
            model,
            refusal,
            None if self._token_ids else self._tokens(choice.get("logprobs")),
            read_tokens(tree, choice) if self._token_ids else None,
            extras,
        )

    def _read_vectors(self, tree: Mapping[str, Any]) -> ModelReply:
        ordered = sorted(tree["data"], key=lambda item: item["index"])
        vectors = [[float(number) for number in item["embedding"]] for item in ordered]
        model = required_text(tree.get("model") or "")
        usage = self._usage(tree.get("usage"), model)
        return ModelReply(ChatMessage("assistant", dumps(vectors)), usage, "stop", model)

    def _content(self, answer: Mapping[str, Any]) -> str | tuple[str | Attachment, ...]:
        content = answer.get("content")
        images = answer.get("images")  # Not part of OpenAI's API, but a common extension.
        if isinstance(content, str) and not images:
            return content
        parts: list[str | Attachment] = []
        spoken: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        for part in spoken:
            if part["type"] == "text":
                parts.append(required_text(part["text"]))
            elif part["type"] == "image_url":
                parts.append(self._from_data_url(part["image_url"]["url"]))
        parts.extend(self._from_data_url(image["image_url"]["url"]) for image in images or ())
        if all(isinstance(part, str) for part in parts):
            return "".join(cast("list[str]", parts))
        return tuple(part for part in parts if part != "")

    def _extras(self, tree: Mapping[str, Any]) -> UsageExtras:
        """Return the parts of the usage with prices of their own."""
        usage = tree.get("usage")
        if not isinstance(usage, Mapping):
            return NO_EXTRAS
        given = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or EMPTY
        made = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or EMPTY
        cost = usage.get("cost")  # OpenRouter's, in dollars; with the user's own key it is only OpenRouter's share.
        own = amount_of(cost.get("total_cost") if isinstance(cost, Mapping) else cost)
        if own is not None and usage.get("is_byok"):
            upstream = amount_of((usage.get("cost_details") or EMPTY).get("upstream_inference_cost"))
            own = None if upstream is None else own + upstream
        return UsageExtras.of(
            tree.get("service_tier"),
            audio_input=count_of(given.get("audio_tokens")),
            audio_output=count_of(made.get("audio_tokens")),
            cost_usd=own,
        )

    def _counted(self, usage: Mapping[str, Any]) -> TokenUsage:
        chat = "prompt_tokens" in usage
        given, made = ("prompt_tokens", "completion_tokens") if chat else ("input_tokens", "output_tokens")
        of_input: Mapping[str, Any] = usage.get(f"{given}_details") or {}
        of_output: Mapping[str, Any] = usage.get(f"{made}_details") or {}
        return TokenUsage(
            count_of(usage.get(given)),
            count_of(usage.get(made)),
            count_of(of_input.get("cached_tokens")),
            reasoning_tokens=count_of(of_output.get("reasoning_tokens")),
            cache_write_tokens=count_of(of_input.get("cache_write_tokens")),
        )

    def _tokens(self, logprobs: Any) -> Attachment | None:
        if not logprobs or self._blobs is None:
            return None
        return self._blobs.put(json.dumps(logprobs).encode(), media_type="application/json", name="logprobs.json")

    async def _gather(self, events: AsyncIterator[Any]) -> Mapping[str, Any]:
        if self._api == "responses":
            return await responses.gather(self, events)
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
        calls = _StreamedCalls()
        logprobs: list[Any] = []
        token_ids: list[Any] = []
        reason: str | None = None
        problem: Any = None
        answer: dict[str, Any] = {"choices": [{"message": message}]}
        async for chunk in events:
            if chunk.get("prompt_token_ids") is not None:
                answer["prompt_token_ids"] = chunk["prompt_token_ids"]
            answer["model"] = chunk.get("model")
            answer["usage"] = chunk.get("usage") or answer.get("usage")
            answer["service_tier"] = chunk.get("service_tier") or answer.get("service_tier")
            for choice in chunk["choices"]:
                if choice.get("index"):
                    continue  # Only the first of several answers is used.
                delta = choice.get("delta") or {}
                for key in ("content", "refusal", "reasoning_content", "reasoning"):
                    if isinstance(delta.get(key), str):
                        message[key] = (message.get(key) or "") + delta[key]
                for key in ("content", "reasoning_details"):
                    if isinstance(delta.get(key), list):
                        message[key] = _joined(message.get(key), delta[key])
                if delta.get("extra_content"):
                    message["extra_content"] = delta["extra_content"]
                for piece in delta.get("tool_calls") or ():
                    known = calls.call_of(piece)
                    if piece.get("extra_content"):
                        known["extra_content"] = piece["extra_content"]
                    function = piece.get("function") or {}
                    known["function"]["name"] += function.get("name") or ""
                    known["function"]["arguments"] += function.get("arguments") or ""
                logprobs.extend((choice.get("logprobs") or {}).get("content") or ())
                token_ids.extend(choice.get("token_ids") or ())
                reason = choice.get("finish_reason") or reason
                problem = choice.get("error") or problem
        if reason is None:
            raise ModelUnavailableError(f"{self._where()} ended its stream before the answer was complete", sent=True)
        message["tool_calls"] = calls.calls
        answer["choices"][0] |= {"finish_reason": reason, "logprobs": {"content": logprobs} if logprobs else None}
        if problem is not None:
            answer["choices"][0]["error"] = problem
        if token_ids:
            answer["choices"][0]["token_ids"] = token_ids
        return answer


class _StreamedCalls:
    """Tool calls in the making. A piece continues the call with its index; Gemini sends no index, or always 0."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._by_index: dict[Any, dict[str, Any]] = {}

    def call_of(self, piece: Mapping[str, Any]) -> dict[str, Any]:
        """Return the call that a piece belongs to."""
        index, call_id = piece.get("index"), piece.get("id")
        known = self._by_index.get(index)
        named = bool((piece.get("function") or EMPTY).get("name"))
        if known is None and index is None and self.calls and not call_id and not named:
            known = self.calls[-1]
        if known is None or (call_id and known["id"] and call_id != known["id"]):
            known = {"id": "", "function": {"name": "", "arguments": ""}}
            self.calls.append(known)
            if index is not None:
                self._by_index[index] = known
        known["id"] = call_id or known["id"]
        return known


def _call_ids(calls: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of calls, new ones where a server sent none or the same twice: results are matched by id."""
    ids: list[str] = []
    for call in calls:
        given = str(call.get("id") or "")
        ids.append(given if given and given not in ids else f"call_{uuid.uuid4().hex[:24]}")
    return ids


_AZURE = (".openai.azure.com", ".services.ai.azure.com", ".cognitiveservices.azure.com")


def _is_openai(base_url: str) -> bool:
    """Return whether an address belongs to OpenAI or Azure."""
    host = urlsplit(base_url).hostname or ""
    return host == "api.openai.com" or host.endswith((".api.openai.com", *_AZURE))


def _spoken(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts if part["type"] == "text")


def _reasoning(answer: Mapping[str, Any]) -> str:
    """Return the visible reasoning of an answer, from the field that the server uses."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(answer.get(name), str):
            return str(answer[name])
    content = answer.get("content")
    # Mistral's: lists of texts.
    thoughts = [part["thinking"] for part in content if part["type"] == "thinking"] if isinstance(content, list) else []
    return "".join(text for pieces in thoughts for piece in pieces if isinstance(text := piece.get("text"), str))


def _joined(known: Any, pieces: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Append pieces to a list of parts: a piece with the type and index of the last part continues that part."""
    parts: list[Any] = [{"type": "text", "text": known}] if isinstance(known, str) and known else list(known or ())
    for piece in pieces:
        last = parts[-1] if parts else None
        if last is None or (last["type"], last.get("index")) != (piece["type"], piece.get("index")):
            parts.append(dict(piece))
            continue
        for key, value in piece.items():
            grows = key in ("text", "summary", "data", "thinking") and isinstance(value, str | list)
            last[key] = last[key] + value if grows and last.get(key) else value
    return parts
