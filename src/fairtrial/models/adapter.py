"""What a model is to the rest of Fairtrial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import TypeVar

from fairtrial.frozen import EMPTY
from fairtrial.session.events import TokenUsage
from fairtrial.session.session import Session
from fairtrial.session.trajectory import ChatMessage

if TYPE_CHECKING:
    from fairtrial.models.prompt import Prompt

# A call that names no output type gives text; the syntax of PEP 695 has defaults only from Python 3.13.
OutputT = TypeVar("OutputT", default=str)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model sees it: its name, what it is for, and its parameters as a JSON Schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = EMPTY


@dataclass(frozen=True, slots=True)
class Completion[O]:
    """What a model answered: the message, and the output of the type that was asked for (the text, for `str`)."""

    message: ChatMessage
    output: O | None = None
    usage: TokenUsage | None = None
    finish_reason: str | None = None
    model: str = ""
    raw: str = ""  # The reply as it came, before it was parsed.


@dataclass(frozen=True, slots=True)
class PromptResponse[O]:
    """What a prompt gave: the typed output and the completion behind it."""

    output: O
    completion: Completion[O]

    @property
    def usage(self) -> TokenUsage:
        """What it used."""
        return self.completion.usage or TokenUsage()


class ProviderAdapter(Protocol):
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
        """One answer to a conversation."""
        ...

    async def evaluate[O](
        self, prompt: Prompt[O], *, session: Session | None = None, actor: str = "task"
    ) -> PromptResponse[O]:
        """The typed output of a bound prompt."""
        ...
