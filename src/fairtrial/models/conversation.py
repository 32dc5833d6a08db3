"""Tasks in which an agent talks to a user over many turns."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from fairtrial.base.frozen import first_is
from fairtrial.base.offload import DaemonThreads
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.data.session.views import USER
from fairtrial.errors import BrokenUserError, ConfigurationError
from fairtrial.models.agent import CONVERSE, AgentEnded, AgentLoop, EndReason, agent_task
from fairtrial.models.users import UserTurn, as_user, call_either, takes_two
from fairtrial.scoring.parameters import is_async_callable
from fairtrial.trials.context import TrialContext
from fairtrial.trials.task import USER_OF, WITH_ADAPTER, task

type ConversationEnd = Literal["user", "agent", "state", "turns"]
"""What ended a conversation: the user, the agent, the state of the environment, or the limit of turns."""

type EndsWhen = Callable[[Any], bool | Awaitable[bool]]
"""Is given the environment after each answer of the agent; True ends the conversation."""


@first_is(str)
@dataclass(frozen=True, slots=True)
class ConversationEnded:
    """The end of a conversation: what ended it, and the number of messages of the user."""

    reason: ConversationEnd
    turns: int
    detail: str = ""

    @property
    def agent_reason(self) -> EndReason:
        """What this end is for the agent: at the limit of turns it was cut off."""
        return "truncated" if self.reason == "turns" else "terminated"


class _AgentTurns(Protocol):
    """The agent of one trial."""

    async def answer(self, message: ChatMessage) -> str:
        """Return the answer to a message."""
        ...

    @property
    def ended(self) -> AgentEnded | None:
        """How the agent ended by itself; None while it can go on."""
        ...

    def end_with(self, end: ConversationEnded) -> AgentEnded:
        """Return the end of an agent that could go on, when the conversation is over."""
        ...

    @property
    def output(self) -> Any:
        """What the agent gave as its output; None if it did not."""
        ...


def conversation_task(
    agent: Any,
    user: Any,
    *,
    max_turns: int = 20,
    greeting: str = "",
    ends_when: EndsWhen | None = None,
    name: str = "conversation",
) -> Callable[[Any, TrialContext], Awaitable[Any]]:
    """Create a task in which an agent talks to a user, in turns.

    What both sides say is recorded as `ChatMessage`, the user's with the actor "user"; the end as `ConversationEnded`.
    The output is the last answer of the agent. The model calls and tool calls of a simulated user are recorded with the
    actor "user", too: they are no work of the task, their cost is counted as a cost of judging and their number of
    tokens as the metric `user_tokens`, and they are never trained.

    A conversation ends when the user ends it (a simulated user by a tool call; a script after its last message), when a
    tool of the agent raises `StopAgent`, when `ends_when` returns True, or after `max_turns` messages of the user. No
    word that one of them writes ends it. If the user ends it with a last message, the agent still answers.

    Args:
        agent: `agent_task(...)`, whose limits of turns and seconds then hold for each answer; an adapter; or a function
            of the messages so far, sync or async, `(messages)` or `(messages, ctx)`, that returns the answer.
        user: `simulated_user(...)`, `recorded_user(...)`, a list of texts, or a function like that of the agent, which
            returns None to end.
        max_turns: The largest number of messages of the user.
        greeting: What the agent says before the user's first message, without a call of its model.
        ends_when: Called with the environment after each answer of the agent: the conversation is over when the state
            says so, such as an order that was sent.
        name: The name of the task.
    """
    if max_turns < 1:
        raise ConfigurationError(f"max_turns must be at least 1 (got {max_turns})")
    other = as_user(user)
    open_agent = _opener(agent, name)

    async def conversation(input: Any, ctx: TrialContext) -> Any:
        async with open_agent(ctx, greeting) as side:
            talk = [ChatMessage("assistant", greeting)] if greeting else []
            next_turn = await _of_user(partial(other.open, ctx))
            end: ConversationEnded | None = None
            turns = 0
            while end is None:
                if turns >= max_turns:
                    end = ConversationEnded("turns", turns, f"{max_turns} turns")
                    break
                turn: UserTurn = await _of_user(partial(next_turn, talk))
                if turn.message is not None:
                    turns += 1
                    talk += [turn.message, ChatMessage("assistant", await side.answer(turn.message))]
                    end = await _end(side, ctx, ends_when, turns)
                if end is None and turn.ends:
                    end = ConversationEnded("user", turns, turn.detail)
            ctx.session.record(end, actor=USER if end.reason == "user" else "task")
            ctx.session.record(side.ended or side.end_with(end))
            said = next((message.text for message in reversed(talk) if message.role == "assistant"), "")
            return said if side.output is None else side.output

    def rebuild(other_agent: Any) -> Any:
        return conversation_task(
            other_agent,
            user,
            max_turns=max_turns,
            greeting=greeting,
            ends_when=ends_when,
            name=name,
        )

    with_adapter = getattr(agent, WITH_ADAPTER, None)
    if with_adapter is not None:
        setattr(conversation, WITH_ADAPTER, lambda adapter: rebuild(with_adapter(adapter)))
    elif _is_adapter(agent):
        setattr(conversation, WITH_ADAPTER, rebuild)
    setattr(conversation, USER_OF, other)
    adapter = agent if _is_adapter(agent) else getattr(agent, "adapter", None)
    if adapter is not None:
        conversation.adapter = adapter  # type: ignore[attr-defined]  # Read by `runs.costs` to look up the price.
    return task(name=name)(conversation)


async def _of_user(call: Callable[[], Any]) -> Any:
    """Return what a user gives; its errors are none of the agent."""
    try:
        value = call()
        return await value if inspect.isawaitable(value) else value
    except BrokenUserError:
        raise
    except Exception as error:
        raise BrokenUserError(f"the user failed: {type(error).__name__}: {error}") from error


async def _end(
    side: _AgentTurns, ctx: TrialContext, ends_when: EndsWhen | None, turns: int
) -> ConversationEnded | None:
    """Return the end of a conversation after an answer; None if it goes on."""
    if side.ended is not None:
        return ConversationEnded("agent", turns, side.ended.detail)
    if ends_when is not None:
        over = ends_when(ctx.environment)
        if await over if inspect.isawaitable(over) else over:
            return ConversationEnded("state", turns)
    return None


type _Opener = Callable[[TrialContext, str], AbstractAsyncContextManager[_AgentTurns]]


def _opener(agent: Any, name: str) -> _Opener:
    """Return what opens the agent of a trial."""
    if _is_adapter(agent):
        agent = agent_task(agent, name=name)
    converse = getattr(agent, CONVERSE, None)
    if converse is not None:

        @asynccontextmanager
        async def opened(ctx: TrialContext, greeting: str) -> AsyncIterator[_AgentTurns]:
            async with converse(ctx) as loop:
                if greeting:
                    loop.say(ChatMessage("assistant", greeting))
                yield _AgentSide(loop)

        return opened
    if not callable(agent):
        raise ConfigurationError(
            "the agent of a conversation must be agent_task(...), an adapter, or a function of the messages "
            f"(got {agent!r:.80})"
        )
    is_async, takes_context, threads = is_async_callable(agent), takes_two(agent), DaemonThreads()

    @asynccontextmanager
    async def called(ctx: TrialContext, greeting: str) -> AsyncIterator[_AgentTurns]:
        side = _FunctionSide(agent, ctx, is_async, takes_context, threads, name)
        if greeting:
            side.say(ChatMessage("assistant", greeting), "task")
        yield side

    return called


def _is_adapter(agent: Any) -> bool:
    return callable(getattr(agent, "complete", None)) and isinstance(getattr(agent, "model", None), str)


class _AgentSide:
    """An agent of `agent_task`, whose loop continues with each message of the user."""

    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop
        self.output: Any = None
        self.ended: AgentEnded | None = None

    async def answer(self, message: ChatMessage) -> str:
        loop = self._loop
        loop.say(message, actor=USER)
        loop.last_text = ""
        output = await loop.run()
        end = loop.end
        if end is not None and (end.reason != "terminated" or loop.caller.stopped is not None):
            self.ended = end
            if loop.caller.stopped is not None:
                self.output = loop.caller.stopped[1].output
        elif not isinstance(output, str):
            self.output = output
        return loop.last_text

    def end_with(self, end: ConversationEnded) -> AgentEnded:
        return self._loop.ended(end.agent_reason, end.detail)


class _FunctionSide:
    """An agent that is a function of the messages."""

    def __init__(
        self,
        fn: Callable[..., Any],
        ctx: TrialContext,
        is_async: bool,
        takes_context: bool,
        threads: DaemonThreads,
        name: str,
    ) -> None:
        self._fn, self._ctx, self._is_async, self._threads, self._name = fn, ctx, is_async, threads, name
        self._takes_context = takes_context
        self._messages: list[ChatMessage] = []
        self.output: Any = None
        self.ended: AgentEnded | None = None

    def say(self, message: ChatMessage, actor: str) -> None:
        self._messages.append(message)
        self._ctx.session.record(message, actor=actor)

    async def answer(self, message: ChatMessage) -> str:
        self.say(message, USER)
        given = tuple(self._messages)
        args: Sequence[Any] = (given, self._ctx) if self._takes_context else (given,)
        said = await call_either(self._fn, tuple(args), is_async=self._is_async, threads=self._threads)
        if isinstance(said, str):
            said = ChatMessage("assistant", said)
        if not isinstance(said, ChatMessage) or said.role != "assistant":
            raise ConfigurationError(
                f"the agent of a conversation must return a text or a message of the assistant (got {said!r:.80})"
            )
        self.say(said, "task")
        return said.text

    def end_with(self, end: ConversationEnded) -> AgentEnded:
        return AgentEnded(end.agent_reason, end.turns, end.detail, self._name)
