"""Requests and replies, whatever their protocol: their records, tokens and latency."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from fairtrial.base.frozen import first_is


class Record:
    """A base class that makes pydantic refuse unknown fields, so that a misspelt option in a script is an error."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


_SCALE = 2.0**-53


def draw(*parts: object) -> float:
    """Return a number in [0, 1) that is a pure function of `parts`.

    It is a hash: with a generator, the number for request 17 would depend on how many numbers other requests have
    drawn before, and so on their timing.
    """
    digest = blake2b("\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * _SCALE


_NORMAL = NormalDist()


def _not_negative(**seconds: float) -> None:
    for name, value in seconds.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number of seconds, at least 0 (got {value!r})")


@first_is(int, float)
@dataclass(frozen=True, slots=True)
class FixedLatency(Record):
    """The same number of seconds every time."""

    seconds: float = 0.0
    kind: Literal["fixed"] = field(default="fixed", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _not_negative(seconds=self.seconds)

    def at(self, quantile: float) -> float:
        """The latency in seconds at this quantile, in [0, 1)."""
        return self.seconds


@first_is(int, float)
@dataclass(frozen=True, slots=True)
class UniformLatency(Record):
    """Uniformly distributed between two numbers of seconds."""

    low: float
    high: float
    kind: Literal["uniform"] = field(default="uniform", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _not_negative(low=self.low, high=self.high)
        if self.low > self.high:
            raise ValueError(f"low must be at most high (got {self.low!r} and {self.high!r})")

    def at(self, quantile: float) -> float:
        """The latency in seconds at this quantile, in [0, 1)."""
        return self.low + (self.high - self.low) * quantile


@first_is(int, float)
@dataclass(frozen=True, slots=True)
class LogNormalLatency(Record):
    """Log-normal with a long tail, as on real servers: `median` and `maximum` in seconds, `sigma` of the logarithm."""

    median: float
    sigma: float = 0.5
    maximum: float = 60.0
    kind: Literal["lognormal"] = field(default="lognormal", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _not_negative(median=self.median, sigma=self.sigma, maximum=self.maximum)

    def at(self, quantile: float) -> float:
        """The latency in seconds at this quantile, in [0, 1)."""
        # inv_cdf is not defined at 0, which is a possible draw.
        deviation = _NORMAL.inv_cdf(max(quantile, 1e-12))
        return min(self.median * math.exp(self.sigma * deviation), self.maximum)


type Latency = Annotated[FixedLatency | UniformLatency | LogNormalLatency, Field(discriminator="kind")]
"""Any of the latency distributions."""


_PIECES = re.compile(r"\S+\s*|\s+")


def count_tokens(text: str) -> int:
    """Count tokens: four characters each, rounded up, so that tests can predict the count."""
    return -(-len(text) // 4)


def pieces(text: str) -> list[str]:
    """Split a text after each run of white space; joining the pieces gives the same text."""
    return _PIECES.findall(text)


type StreamIndex = Literal["counted", "missing", "zero"]
"""The `index` of tool calls in a stream of chat completions: as documented, as from Gemini, as from its gateways."""

type TokenDamage = Literal["ids_missing", "logprob_missing", "not_a_number", "clamped", "retokenized"]
"""What can be wrong with the token ids and log-probabilities of an answer."""


@first_is(int)
@dataclass(frozen=True, slots=True)
class Usage(Record):
    """The token counts that a reply reports."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cache_write_tokens: int = 0
    audio_input_tokens: int = 0  # Of the input.
    audio_output_tokens: int = 0  # Of the output.
    hour_write_tokens: int = 0  # Of `cache_write_tokens`, those for one hour: of Anthropic's and Bedrock's protocols.
    service_tier: str = ""
    cost: float | None = None  # OpenRouter's own cost, for chat completions only.


@first_is(str)
@dataclass(frozen=True, slots=True)
class ToolCallReply(Record):
    """One call of a tool. If `arguments` is text, it is sent unchanged, so that a test can send invalid JSON.

    `thought_signature` is sent as Gemini's `extra_content` on chat completions, and nowhere else.
    """

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    id: str | None = None
    thought_signature: str | None = None

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text, as OpenAI's protocol sends them."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)

    @property
    def arguments_object(self) -> dict[str, Any] | str:
        """The arguments as an object, as Google's and Amazon's protocols send them; text is left as it is."""
        return self.arguments if isinstance(self.arguments, str) else dict(self.arguments)


@first_is(str)
@dataclass(frozen=True, slots=True)
class Reply(Record):
    """One reply of the model, independent of the protocol.

    `output` is JSON to be sent as the text. `finish_reason` is one of OpenAI's names (`stop`, `length`, `tool_calls`,
    `content_filter`) or `refusal`, translated for Anthropic's protocol; None derives it from the content. Any other
    name is sent as it is: as the status of a response, in Responses.

    `reasoning` is sent as `reasoning_content` (chat completions), as a `reasoning` item with encrypted content
    (Responses) or as a `thinking` block with a signature (Anthropic). `signature` is that signature, or the encrypted
    content; by default a unique one. `redacted_reasoning` is the data of a `redacted_thinking` block, which only
    Anthropic's protocol has.

    `hosted` are blocks of the provider's own tools, such as `server_tool_use` and `web_search_tool_result`, and of text
    with citations. They are sent before the text, in Anthropic's protocol only.

    `tokens` damages the token ids of a server with `token_ids`; see `TokensDamaged`.
    """

    text: str = ""
    tool_calls: tuple[ToolCallReply, ...] = ()
    output: Any = None
    finish_reason: str | None = None
    usage: Usage | None = None
    refusal: str | None = None
    reasoning: str = ""
    signature: str | None = None
    redacted_reasoning: str = ""
    tokens: TokenDamage | None = None
    stream_index: StreamIndex = "counted"
    hosted: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.output is not None and self.text:
            raise ValueError("a Reply must have either text or output (got both)")

    @property
    def content(self) -> str:
        """The text as sent: `text`, or `output` as JSON."""
        return self.text if self.output is None else json.dumps(self.output, ensure_ascii=False)

    @property
    def visible_text(self) -> str:
        """The refusal if there is one, else the content."""
        return self.content if self.refusal is None else self.refusal

    @property
    def reason(self) -> str:
        """Why the model stopped, as one of OpenAI's names."""
        if self.finish_reason is not None:
            return self.finish_reason
        return "tool_calls" if self.tool_calls else "stop"

    def usage_for(self, input_tokens: int) -> Usage:
        """Return the usage that this reply reports; counted from the text if it was not given."""
        if self.usage is not None:
            return self.usage
        spoken = count_tokens(self.content) + count_tokens(self.refusal or "")
        called = sum(count_tokens(call.name) + count_tokens(call.arguments_json) for call in self.tool_calls)
        reasoned = count_tokens(self.reasoning) + count_tokens(self.redacted_reasoning)
        return Usage(input_tokens, spoken + called + reasoned, reasoning_tokens=reasoned)

    def signature_for(self, number: int) -> str:
        """The signature of the reasoning in the answer to the request of this number."""
        if self.signature is not None:
            return self.signature
        made = blake2b(f"{number}:{self.reasoning}".encode("utf-8", "surrogatepass"), digest_size=24).digest()
        return b64encode(made).decode("ascii")

    def cut_to(self, tokens: int) -> Reply:
        """Return the reply truncated to this many tokens.

        Reasoning comes first and counts too. A tool call that does not fit is left out as a whole.
        """
        if self.usage_for(0).output_tokens <= tokens:
            return self
        reasoning = self.reasoning[: tokens * 4]
        left = max(tokens - count_tokens(reasoning) - count_tokens(self.redacted_reasoning), 0)
        return Reply(
            self.content[: left * 4],
            finish_reason="length",
            reasoning=reasoning,
            signature=self.signature,
            redacted_reasoning=self.redacted_reasoning,
        )


type Protocol = Literal["openai", "responses", "anthropic", "gemini", "bedrock"]
"""The protocols the server speaks: OpenAI's chat completions and Responses, Anthropic's messages, Google's
`generateContent`, Amazon Bedrock's `Converse`."""


class InvalidRequestError(Exception):
    """A request is invalid; the server answers with status 400 and this message."""


@first_is(str)
@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """One message: its role, its text with all text parts joined, and the message as it was sent."""

    role: str
    text: str
    raw: Mapping[str, Any]


@first_is(str)
@dataclass(frozen=True, slots=True)
class ParsedTool:
    """A tool the client offers."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@first_is(int)
@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A completion request as received. `body` is the whole request; the other fields are derived from it.

    `number` counts completion requests from 1. `attempt` counts admitted requests with the same body from 1.
    `messages` begins with the system prompt if there is one, in both protocols. `digest`, `size` and `headers` are
    those of the HTTP request.
    """

    number: int
    protocol: Protocol
    model: str
    messages: tuple[ParsedMessage, ...]
    body: Mapping[str, Any]
    digest: str = ""
    size: int = 0
    tools: tuple[ParsedTool, ...] = ()
    required_tool: str | None = None
    """The tool that the client requires; "" if it requires any tool."""
    output_schema: Mapping[str, Any] | None = None
    stream: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 1

    @property
    def system(self) -> str:
        """The text of all system and developer messages."""
        return "\n".join(message.text for message in self.messages if message.role in ("system", "developer"))

    @property
    def last_user(self) -> str:
        """The text of the last user message, or "" if there is none."""
        return next((message.text for message in reversed(self.messages) if message.role == "user"), "")

    @property
    def last(self) -> ParsedMessage | None:
        """The last message of any role."""
        return self.messages[-1] if self.messages else None

    @property
    def turn(self) -> int:
        """The number of assistant messages in the request."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def conversation(self) -> str:
        """A key that identifies the conversation: the one that the client sent, or the first user message.

        A client sends a key as `metadata.conversation` (OpenAI), `metadata.user_id` (Anthropic) or `user`.
        """
        metadata = self.body.get("metadata")
        if isinstance(metadata, dict):
            for name in ("conversation", "user_id"):
                if isinstance(metadata.get(name), str):
                    return str(metadata[name])
        if isinstance(self.body.get("user"), str):
            return str(self.body["user"])
        return next((message.text for message in self.messages if message.role == "user"), "")

    @property
    def input_tokens(self) -> int:
        """The tokens of all message texts, by `count_tokens`."""
        return sum(_tokens_of(message) for message in self.messages)

    @property
    def max_output_tokens(self) -> int | None:
        """The largest number of tokens of the answer that the client allows; None without a limit."""
        for name in ("max_output_tokens", "max_completion_tokens", "max_tokens"):
            limit = self.body.get(name)
            if isinstance(limit, int) and not isinstance(limit, bool):
                return limit
        return None


def _tokens_of(message: ParsedMessage) -> int:
    content = message.raw.get("content")
    if message.role != "tool" or not isinstance(content, list):
        return count_tokens(message.text)
    # Anthropic puts the results of several calls into one message; other protocols have one message for each.
    return sum(count_tokens(content_text([part])) for part in content)


def required(body: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a required field of a request; raises if it is missing or has another type."""
    value = body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequestError(f"{name}: a value of type {kind.__name__} is required")
    return value


def tools_in(body: Mapping[str, Any]) -> list[Any]:
    """Return the tools of a request; raises if they are no list."""
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise InvalidRequestError("tools: must be a list")
    return tools


def content_text(content: object) -> str:
    """Return the text of a message's content, which is a string or a list of parts; only text parts count."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise InvalidRequestError("messages: content must be a string or a list of parts")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            raise InvalidRequestError("messages: each part of a content must be an object")
        if part.get("type") == "tool_result":
            texts.append(content_text(part.get("content")))
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
    return "".join(texts)


def parse_messages(raw: list[Any]) -> tuple[ParsedMessage, ...]:
    """Parse the messages of a request and check their roles.

    Anthropic sends tool results in user messages; here they have the role `tool`, as with OpenAI, so that the last
    user message means the same in both protocols.
    """
    if not raw:
        raise InvalidRequestError("messages: at least one is required")
    parsed: list[ParsedMessage] = []
    for message in raw:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequestError("messages: each must be an object with a role")
        content = message.get("content")
        text = content_text(content)
        only_results = isinstance(content, list) and all(part.get("type") == "tool_result" for part in content)
        role = "tool" if content and only_results else message["role"]
        parsed.append(ParsedMessage(role, text, message))
    return tuple(parsed)


type Engine = Literal["vllm", "sglang"]
"""The inference engines whose token ids the server can return."""

_END, _CALLS, _THOUGHT, _MERGED = 256, 257, 258, 259
_ROLES = {"system": 260, "developer": 260, "user": 261, "assistant": 262, "tool": 263}
_CLAMPED = -9999.0


def check_request(engine: Engine | None, body: Mapping[str, Any]) -> None:
    """Refuse what the engine refuses: SGLang does not stream token ids."""
    if engine == "sglang" and body.get("stream") is True and body.get("return_token_ids") is True:
        raise InvalidRequestError("return_token_ids is not supported for streaming requests")


class SentTokens:
    """The tokens of one answer, as an engine sends them."""

    def __init__(self, engine: Engine, request: ParsedRequest, reply: Reply) -> None:
        self._engine = engine
        self._damage = reply.tokens
        self.prompt = prompt_ids([message.raw for message in request.messages], merged=self._damage == "retokenized")
        self.sampled = [*_content(reply), *([] if reply.reason == "length" else [_END])]

    def of_answer(self) -> dict[str, Any]:
        """The fields beside the choices."""
        return {"prompt_token_ids": self.prompt} if self._engine == "vllm" and self._damage != "ids_missing" else {}

    def of_choice(self) -> dict[str, Any]:
        """The fields of a choice."""
        if self._damage == "ids_missing":
            return {}
        if self._engine == "vllm":
            return {"token_ids": self.sampled}
        return {"prompt_token_ids": self.prompt, "response_token_ids": self.sampled}

    def logprobs(self) -> list[dict[str, Any]]:
        """The log-probability of each token."""
        found = [_entry(place, token) for place, token in enumerate(self.sampled)]
        if self._damage == "logprob_missing":
            return found[:-1]
        if self._damage in ("not_a_number", "clamped"):
            found[0]["logprob"] = None if self._damage == "not_a_number" else _CLAMPED
        return found

    def spread(self, chunks: Sequence[dict[str, Any]]) -> None:
        """Add the tokens to the chunks of a stream: those of the prompt to the first, the others as they come."""
        chunks[0] |= self.of_answer()
        ids, logprobs = self.of_choice().get("token_ids", []), self.logprobs()
        later, end = chunks[1:], 0
        for place, chunk in enumerate(later, 1):
            begin, end = end, len(self.sampled) * place // len(later)
            found = {"content": logprobs[begin:end], "refusal": None}
            chunk["choices"][0] |= {"logprobs": found, **({"token_ids": ids[begin:end]} if ids else {})}


def requested_tokens(engine: Engine | None, request: ParsedRequest, reply: Reply) -> SentTokens | None:
    """Return the tokens of an answer, if the server has them and the client asks for them."""
    if engine is None or request.body.get("return_token_ids") is not True or reply.refusal is not None:
        return None
    return SentTokens(engine, request, reply)


def prompt_ids(messages: Sequence[Mapping[str, Any]], *, merged: bool = False) -> list[int]:
    """Return the ids of a conversation, up to where the model answers.

    Args:
        messages: The messages as they were sent.
        merged: Tokenize the first reply of the model differently, as engines do that render conversations again.
    """
    ids: list[int] = []
    for message in messages:
        body = _message(message)
        if merged and message["role"] == "assistant":
            body, merged = [_MERGED, *body[2:]], False
        ids += [_ROLES.get(message["role"], _ROLES["user"]), *body, _END]
    return [*ids, _ROLES["assistant"]]


def _message(message: Mapping[str, Any]) -> list[int]:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    thought = message.get("reasoning_content") or ""
    ids = [_THOUGHT, *_bytes(thought), _THOUGHT] if thought else []
    return [*ids, *_bytes(content), *_calls([(call.get("name"), call.get("arguments")) for call in calls])]


def _content(reply: Reply) -> list[int]:
    thought = [_THOUGHT, *_bytes(reply.reasoning), _THOUGHT] if reply.reasoning else []
    calls = _calls([(call.name, call.arguments_json) for call in reply.tool_calls])
    return [*thought, *_bytes(reply.content), *calls]


def _calls(calls: Sequence[tuple[Any, Any]]) -> list[int]:
    ids: list[int] = []
    for name, arguments in calls:
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            pass
        ids += [_CALLS, *_bytes(json.dumps([name, arguments], sort_keys=True))]
    return ids


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "surrogatepass"))


def _entry(place: int, token: int) -> dict[str, Any]:
    text = chr(token) if token < 128 else ""
    return {"token": text, "logprob": -draw("logprob", place, token), "bytes": [token % 256], "top_logprobs": []}
