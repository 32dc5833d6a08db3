"""Replies of the server."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.record import Record

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
