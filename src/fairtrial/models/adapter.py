"""The interface of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import TypeVar

from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.data.session.events import TokenUsage
from fairtrial.data.session.session import Session
from fairtrial.data.session.trajectory import ChatMessage

if TYPE_CHECKING:
    from fairtrial.models.prompt import Prompt

# The default output type is text. Defaults of type parameters in the syntax of PEP 695 need Python 3.13.
OutputT = TypeVar("OutputT", default=str)
# `OpenAIAdapter[Answer]` documents what an adapter is used for. It has no effect: an adapter can return any type.
AnswerT = TypeVar("AnswerT", default=Any, covariant=True)


@first_is(str)
@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as it is described to a model: name, description, and parameters as a JSON Schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = EMPTY


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
