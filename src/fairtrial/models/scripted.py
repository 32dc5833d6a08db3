"""A scripted model, and tasks that choose an answer."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Unpack

from fairtrial.base.codec import dumps
from fairtrial.base.frozen import EMPTY
from fairtrial.data.session.events import TokenUsage
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.errors import ConfigurationError
from fairtrial.models.adapter import AdapterOptions, ModelCall, ModelReply, ProviderAdapter
from fairtrial.models.base import BaseAdapter
from fairtrial.scoring.answers import ChoiceQuestion, ChoicesShown
from fairtrial.trials.context import TrialContext
from fairtrial.trials.task import WITH_ADAPTER, task


def choice_task(
    adapter: ProviderAdapter, *, shuffle: bool = True, params: Mapping[str, Any] = EMPTY
) -> Callable[[ChoiceQuestion, TrialContext], Awaitable[str]]:
    """Create a task that puts a `ChoiceQuestion` to a model and returns its reply; score it with `multiple_choice`.

    Args:
        adapter: The model.
        shuffle: Present the choices in an order drawn from the seed of the trial: another one for every sample and
            repeat, the same in every experiment.
        params: Sampling parameters of the call.
    """

    async def answer_choice(input: ChoiceQuestion, ctx: TrialContext) -> str:
        shown = input.shuffle(ctx.seed) if shuffle else input
        ctx.session.record(ChoicesShown(shown.choices))
        asked = ChatMessage("user", shown.prompt())
        ctx.session.record(asked)
        completion = await adapter.complete([asked], params=params, session=ctx.session, prompt_name="choice")
        ctx.session.record(completion.message)
        return completion.text

    setattr(answer_choice, WITH_ADAPTER, lambda other: choice_task(other, shuffle=shuffle, params=params))
    answer_choice.adapter = adapter  # type: ignore[attr-defined]  # Read by `runs.costs` to look up the price.
    return task(name="choice")(answer_choice)


type ScriptedReply = Any
"""Text, a `ToolCall` or a list of them, a `ChatMessage`, an exception to raise, or any other value as JSON text."""

type Script = Sequence[ScriptedReply] | Mapping[str, ScriptedReply] | Callable[[Sequence[ChatMessage]], ScriptedReply]


class ScriptedAdapter(BaseAdapter):
    """A fake model that replies from a script, without HTTP.

    Args:
        replies: A list of replies, given in order; a mapping from the last user message (or a part of it) to the
            reply; or a function, sync or async, from the messages to the reply. A reply is text, a `ToolCall` or a
            list of them, a `ChatMessage`, an exception (which is raised), or any value, which is sent as JSON.
        model: The name of the model.
        usage: The usage of each call; by default four characters count as a token.
        repeat: Restart a list at its end instead of raising.
        embedding: Returns the vector of a text, for `embed`.
        params, retry, limiter, cache, trial_budget, run_budget, spending, prices: As for `BaseAdapter`.

    `calls` contains the calls that it received, oldest first.
    """

    def __init__(
        self,
        replies: Script,
        *,
        model: str = "scripted",
        name: str = "scripted",
        usage: TokenUsage | None = None,
        repeat: bool = False,
        embedding: Callable[[str], Sequence[float]] | None = None,
        **options: Unpack[AdapterOptions],
    ) -> None:
        super().__init__(name=name, model=model, **options)
        if isinstance(replies, str) or not (callable(replies) or isinstance(replies, Sequence | Mapping)):
            raise ConfigurationError(
                f"the replies of ScriptedAdapter must be a list, a mapping or a function (got {type(replies).__name__})"
            )
        self._replies = replies
        self._usage = usage
        self._repeat = repeat
        self._embedding = embedding
        self._lock = Lock()
        self._calls: list[ModelCall] = []

    can_embed = True

    @property
    def has_price(self) -> bool:
        """Whether `prices` or `usage` determine the cost of a call."""
        return bool(super().has_price) or (self._usage is not None and self._usage.cost_usd is not None)

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """The calls, oldest first."""
        with self._lock:
            return tuple(self._calls)

    async def _send(self, call: ModelCall) -> ModelReply:
        with self._lock:
            number = len(self._calls)
            self._calls.append(call)
        if call.embeds:
            return self._embed(call)
        reply = self._pick(call, number)
        if inspect.isawaitable(reply):
            reply = await reply
        if isinstance(reply, BaseException):
            raise reply
        message = _message(reply, number)
        usage = self._usage or TokenUsage(sum(_tokens(sent) for sent in call.messages), _tokens(message))
        return ModelReply(message, usage, "tool_calls" if message.tool_calls else "stop", self.model)

    def _embed(self, call: ModelCall) -> ModelReply:
        if self._embedding is None:
            raise ConfigurationError("ScriptedAdapter has no embeddings: pass embedding=, a function of a text")
        vectors = [[float(number) for number in self._embedding(message.text)] for message in call.messages]
        usage = self._usage or TokenUsage(sum(_tokens(sent) for sent in call.messages))
        return ModelReply(ChatMessage("assistant", dumps(vectors)), usage, "stop", self.model)

    def _pick(self, call: ModelCall, number: int) -> ScriptedReply:
        replies = self._replies
        if isinstance(replies, Mapping):
            return self._look_up(replies, call)
        if not isinstance(replies, Sequence):
            return replies(call.messages)
        if self._repeat and replies:
            return replies[number % len(replies)]
        if number >= len(replies):
            raise ConfigurationError(f"the script has {len(replies)} replies, and this is call {number + 1}")
        return replies[number]

    def _look_up(self, replies: Mapping[str, ScriptedReply], call: ModelCall) -> ScriptedReply:
        asked = next((message.text for message in reversed(call.messages) if message.role == "user"), "")
        if asked in replies:
            return replies[asked]
        for part, reply in replies.items():
            if part in asked:
                return reply
        raise ConfigurationError(f"the script has no reply to {asked[:200]!r}")


def _message(reply: ScriptedReply, number: int) -> ChatMessage:
    if isinstance(reply, ChatMessage):
        return reply
    if isinstance(reply, str):
        return ChatMessage("assistant", reply)
    calls = (reply,) if isinstance(reply, ToolCall) else reply
    if isinstance(calls, Sequence) and calls and all(isinstance(call, ToolCall) for call in calls):
        named = (replace(call, id=call.id or f"call_{number}_{i}") for i, call in enumerate(calls))
        return ChatMessage("assistant", "", tuple(named))
    return ChatMessage("assistant", dumps(reply))


def _tokens(message: ChatMessage) -> int:
    called = sum(len(call.name) + len(dumps(call.arguments)) for call in message.tool_calls)
    return -(-(len(message.text) + called) // 4)
