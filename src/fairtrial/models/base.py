"""What every adapter does around the one call to its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fairtrial.errors import CodecError, OutputParseError
from fairtrial.frozen import EMPTY
from fairtrial.models.adapter import Completion, OutputT, PromptResponse, ToolSpec
from fairtrial.models.prompt import Prompt
from fairtrial.models.structured import OutputRepaired, parse_output, repair_messages
from fairtrial.session.events import PromptExecuted, TokenUsage
from fairtrial.session.session import JUDGE, Session
from fairtrial.session.trajectory import ChatMessage
from fairtrial.session.views import SessionView
from fairtrial.trials.context import TrialContext, _current


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One request to a model, free of any provider's form."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    output_type: Any = str
    params: Mapping[str, Any] = EMPTY
    prompt_name: str = ""
    actor: str = "task"


@dataclass(frozen=True, slots=True)
class ModelReply:
    """One answer of a model, free of any provider's form."""

    message: ChatMessage
    usage: TokenUsage | None = None
    finish_reason: str | None = None
    model: str = ""


class BaseAdapter:
    """An adapter's common half: records every call, reads typed outputs and asks once more when one can't be read.

    Subclasses say who they are and send one request.
    """

    def __init__(self, *, name: str, model: str, params: Mapping[str, Any] = EMPTY) -> None:
        self._name = name
        self._model = model
        self._params = dict(params)

    @property
    def name(self) -> str:
        """The provider."""
        return self._name

    @property
    def model(self) -> str:
        """The model."""
        return self._model

    async def _send(self, call: ModelCall) -> ModelReply:
        """Send one request; raise a `ModelError` if that fails."""
        raise NotImplementedError

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolSpec] = (),
        output_type: type[OutputT] = str,  # type: ignore[assignment]  # the default of OutputT is str
        params: Mapping[str, Any] = EMPTY,
        session: Session | SessionView | None = None,
        actor: str = "task",
        prompt_name: str = "",
    ) -> Completion[OutputT]:
        """One answer to a conversation, recorded in the session, or in the running trial's where none is given."""
        recorder, actor = _recorder(session, actor)
        merged = {**self._params, **params} if params else self._params
        call = ModelCall(tuple(messages), tuple(tools), output_type, merged, prompt_name, actor)
        reply = await self._answer(call, recorder)
        usage = reply.usage
        try:
            output = self._parse(call, reply)
        except CodecError as error:
            problem = str(error)
            again = replace(call, messages=(*call.messages, *repair_messages(problem, reply.message)))
            first, reply = reply, await self._answer(again, recorder)
            usage = reply.usage if usage is None else usage + (reply.usage or TokenUsage())
            output = self._repaired(call, problem, first, reply, recorder)
        return Completion(reply.message, output, usage, reply.finish_reason, reply.model, reply.message.text)

    async def evaluate[O](
        self, prompt: Prompt[O], *, session: Session | SessionView | None = None, actor: str = "task"
    ) -> PromptResponse[O]:
        """The typed output of a bound prompt."""
        completion: Completion[O] = await self.complete(
            prompt.messages, output_type=prompt.output_type, session=session, actor=actor, prompt_name=prompt.name
        )
        if completion.output is None and prompt.output_type is not type(None):
            raise OutputParseError(f"prompt {prompt.name!r} got no answer", raw=completion.raw)
        return PromptResponse(completion.output, completion)  # type: ignore[arg-type]  # None only where O is None

    async def _answer(self, call: ModelCall, recorder: Session | None) -> ModelReply:
        reply = await self._send(call)
        if recorder is not None:
            recorder.record(
                PromptExecuted(
                    call.prompt_name, self._name, reply.model or self._model, reply.usage, reply.finish_reason
                ),
                actor=call.actor,
            )
        return reply

    def _parse(self, call: ModelCall, reply: ModelReply) -> Any:
        # A model that calls tools has not answered yet.
        if reply.message.tool_calls:
            return None
        return parse_output(call.output_type, reply.message.text)

    def _repaired(
        self, call: ModelCall, problem: str, first: ModelReply, second: ModelReply, recorder: Session | None
    ) -> Any:
        try:
            output, failure = self._parse(call, second), None
        except CodecError as error:
            output, failure = None, error
        if recorder is not None:
            event = OutputRepaired(call.prompt_name, problem, first.message.text, failure is None)
            recorder.record(event, actor=call.actor)
        if failure is not None:
            kind = getattr(call.output_type, "__name__", str(call.output_type))
            raise OutputParseError(
                f"{self._name} model {self._model!r} did not answer with a {kind}, even when asked again: {failure}",
                raw=second.message.text,
            ) from failure
        return output


def running_trial() -> TrialContext | None:
    """The trial that is running here, if any."""
    return _current.get()


def _recorder(session: Session | SessionView | None, actor: str) -> tuple[Session | None, str]:
    """Where to record. Evaluators hold views, which nothing can be written to: theirs is the trial's, as a judge."""
    if isinstance(session, Session):
        return session, actor
    trial = running_trial()
    return (None if trial is None else trial.session), (actor if session is None else JUDGE)
