"""What an adapter is, its replies, and the ids of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from typing_extensions import TypeVar

from fairtrial.base.codec.encode import PRIVATE
from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.data.sample import Attachment
from fairtrial.data.session.events import TokenUsage
from fairtrial.data.session.session import POLICY, Session, TokensMissing, check_tokens, record_tokens
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.models.pricing import NO_EXTRAS, Prices, UsageExtras

if TYPE_CHECKING:
    from fairtrial.models.cache import ResponseCache
    from fairtrial.models.limiter import Budget, Limiter, RetryPolicy, SpendingLog
    from fairtrial.models.prompt import Prompt


# The default output type is text. Defaults of type parameters in the syntax of PEP 695 need Python 3.13.
OutputT = TypeVar("OutputT", default=str)
# `OpenAIAdapter[Answer]` documents what an adapter is used for. It has no effect: an adapter can return any type.
AnswerT = TypeVar("AnswerT", default=Any, covariant=True)


class AdapterOptions(TypedDict, total=False):
    """The options of all adapters; `BaseAdapter` documents them."""

    params: Mapping[str, Any]
    retry: RetryPolicy | None
    limiter: Limiter | None
    cache: ResponseCache | None
    trial_budget: Budget | None
    run_budget: Budget | None
    spending: SpendingLog | None
    prices: Prices | None


@first_is(str)
@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as it is described to a model: name, description, and parameters as a JSON Schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = EMPTY

    @property
    def schema(self) -> Mapping[str, Any]:
        """The parameters; without any, the schema of an empty object."""
        return self.parameters or {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Completion[O]:
    """The reply of a model: the message, and the output of the requested type (for `str`, the text)."""

    message: ChatMessage
    output: O | None = None
    usage: TokenUsage | None = None
    finish_reason: str | None = None
    model: str = ""
    raw: str = ""  # The text of the reply before it was parsed.

    @property
    def text(self) -> str:
        """The text of the reply; empty if it only calls tools."""
        return self.message.text


@dataclass(frozen=True, slots=True)
class PromptResponse[O]:
    """The response to a prompt: the typed output and the completion."""

    output: O
    completion: Completion[O]

    @property
    def usage(self) -> TokenUsage:
        """The token usage."""
        return self.completion.usage or TokenUsage()


class ProviderAdapter(Protocol[AnswerT]):
    """A model behind one interface. Adapters record a `PromptExecuted` event for every call into the session."""

    @property
    def name(self) -> str:
        """The provider, as in "openai"."""
        ...

    @property
    def model(self) -> str:
        """The model."""
        ...

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolSpec] = (),
        output_type: type[OutputT] = ...,
        params: Mapping[str, Any] = EMPTY,
        session: Session | None = None,
        actor: str = "task",
        prompt_name: str = "",
    ) -> Completion[OutputT]:
        """Call the model once."""
        ...

    async def evaluate[O](
        self, prompt: Prompt[O], *, session: Session | None = None, actor: str = "task"
    ) -> PromptResponse[O]:
        """Call the model with a bound prompt; returns the typed output."""
        ...


TOKEN_PARAMS: Mapping[str, Any] = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
"""The parameters of a chat completion that request them; old versions of vLLM need `top_logprobs`, too."""

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed",
    "max_tokens", "max_completion_tokens",
)  # fmt: skip
# The values with which the policy itself is sampled, so that log-probabilities are its own.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (None, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
}


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of one reply; `problem` says why they cannot be trained on."""

    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    problem: str | None = None

    def record(self, session: Session, params: Mapping[str, Any], *, actor: str, model: str) -> None:
        """Record the tokens in a session, or why the policy's are missing."""
        if self.problem is None:
            ids = (self.prompt_ids, self.completion_ids, self.logprobs)
            record_tokens(session, *ids, sampling(params), actor=actor, model=model)
        elif actor == POLICY:
            session.record(TokensMissing(self.problem))


def sampling(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a call that decide how tokens are sampled."""
    return {name: params[name] for name in _SAMPLING if params.get(name) is not None}


def changed_sampling(params: Mapping[str, Any]) -> list[str]:
    """Return the parameters with which tokens are not sampled from the policy itself."""
    return [f"{name}={params[name]!r}" for name, neutral in _NEUTRAL.items() if params.get(name) not in neutral]


def read_tokens(tree: Mapping[str, Any], choice: Mapping[str, Any]) -> SampledTokens:
    """Return the tokens of a chat completion.

    vLLM writes `prompt_token_ids` beside the choices and `token_ids` into the choice; SGLang writes `prompt_token_ids`
    and `response_token_ids` into the choice.
    """
    prompt = _either(tree.get("prompt_token_ids"), choice.get("prompt_token_ids"))
    sampled = _either(choice.get("token_ids"), choice.get("response_token_ids"))
    if not isinstance(prompt, list) or not isinstance(sampled, list):
        missing = "prompt" if not isinstance(prompt, list) else "reply"
        return SampledTokens(problem=f"the server sent no token ids of the {missing}")
    entries = (choice.get("logprobs") or {}).get("content")
    if not isinstance(entries, list):
        return SampledTokens(problem="the server sent no log-probabilities")
    logprobs: list[Any] = [entry.get("logprob") if isinstance(entry, Mapping) else None for entry in entries]
    try:
        check_tokens(prompt, sampled, logprobs)
    except ValueError as error:
        return SampledTokens(problem=str(error))
    if not prompt or not sampled:
        return SampledTokens(problem=f"the server sent {len(prompt)} ids of the prompt and {len(sampled)} of the reply")
    return SampledTokens(prompt, sampled, logprobs)


def _either(first: Any, second: Any) -> Any:
    return second if first is None else first


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One request to a model."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    output_type: Any = str
    params: Mapping[str, Any] = EMPTY
    prompt_name: str = ""
    actor: str = "task"
    embeds: bool = False  # The messages are texts to embed; the text of the reply is their vectors as JSON.

    @property
    def text(self) -> str:
        """The text of the last message."""
        return self.messages[-1].text if self.messages else ""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """One reply of a model.

    `refusal` is the text of a refusal, if the model declined to answer; `tokens` refers to token ids and
    log-probabilities, if they were requested; `sampled` are the tokens for training, `extras` the parts of the usage
    with prices of their own: both are never cached.
    """

    message: ChatMessage
    usage: TokenUsage | None = None
    finish_reason: str | None = None
    model: str = ""
    refusal: str | None = None
    tokens: Attachment | None = None
    sampled: SampledTokens | None = field(default=None, metadata=PRIVATE)
    extras: UsageExtras = field(default=NO_EXTRAS, compare=False, metadata=PRIVATE)
