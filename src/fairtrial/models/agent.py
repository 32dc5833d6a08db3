"""Tasks that call a model with tools in a loop."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import anyio

from fairtrial.base.codec import dumps, to_json
from fairtrial.base.codec.encode import SPARSE
from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.base.offload import DaemonThreads
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import ToolInvoked, ending_of
from fairtrial.data.session.session import POLICY
from fairtrial.data.session.trajectory import ChatMessage, ToolCall, as_message, chat_messages
from fairtrial.data.session.views import SessionView
from fairtrial.errors import CodecError, ConfigurationError, ContextLengthError, ModelError, ModelRefusedError
from fairtrial.models.adapter import Completion, ProviderAdapter
from fairtrial.models.tools import (
    LONGEST_ERROR,
    BeforeTool,
    Tool,
    ToolCaller,
    ToolSource,
    as_tools,
    split_sources,
    tool_message,
)
from fairtrial.scoring.behaviour import SessionEvaluator
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import Metric, Score
from fairtrial.trials.context import TrialContext
from fairtrial.trials.environment import EnvironmentRegistry, EnvironmentSaved, close_environment, tools_of
from fairtrial.trials.task import CHECK_INPUT, FIRST_MESSAGES, WITH_ADAPTER, task

type MessageLike = ChatMessage | Mapping[str, Any]
"""A message, a mapping with its fields (`{"role": "user", "content": "Hello"}`), or one in OpenAI's format."""

type PrepareMessages = Callable[[Sample[Any, Any]], Sequence[MessageLike] | Awaitable[Sequence[MessageLike]]]
"""Returns the first messages for a sample."""

type EnvironmentFactory = Callable[[Sample[Any, Any]], Any]
"""Returns the environment for a sample: the object, an awaitable of it, an async context manager, or saved state."""

type BeforeRequest = Callable[[Sequence[ChatMessage]], Sequence[ChatMessage] | Awaitable[Sequence[ChatMessage]]]
"""Is given the conversation before each request, and returns the conversation that is sent from then on."""

type EndReason = Literal["terminated", "truncated", "error"]
"""The agent finished; a budget was used up; an error occurred."""

FORK = "__fairtrial_fork__"
"""The attribute of an agent with checkpoints: returns the agent that continues from (messages, state, turn)."""

AGENT = "__fairtrial_agent__"
"""The attribute of an agent with its `AgentParts`."""

CONVERSE = "__fairtrial_converse__"
"""The attribute of an agent with a function that opens its `AgentLoop` for a trial: a conversation uses it by turns."""

_SAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """The end of an agent's loop: the reason and the number of turns.

    `name` is the name under which its calls are recorded, `duration_ms` the time since it began. `fallback` is the
    model that took over, if one did.
    """

    reason: EndReason
    turns: int
    detail: str = ""
    name: str = field(default="", compare=False, metadata=SPARSE)
    duration_ms: float | None = field(default=None, compare=False, metadata=SPARSE)
    fallback: str = field(default="", metadata=SPARSE)


@first_is(int)
@dataclass(frozen=True, slots=True)
class HistoryReplaced:
    """`before_request` replaced the conversation: how many messages it left out, and which ones it added."""

    removed: int
    added: tuple[ChatMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentParts:
    """What a trainer that runs the conversation itself needs of an agent."""

    tools: Mapping[str, Tool]
    environment_factory: EnvironmentFactory | None
    environments: EnvironmentRegistry | None
    tool_timeout_seconds: float | None
    sources: Sequence[ToolSource] = ()


def agent_task(
    adapter: ProviderAdapter,
    *,
    tools: Sequence[Callable[..., Any] | Tool | ToolSource] = (),
    prepare_messages: PrepareMessages | None = None,
    environment_factory: EnvironmentFactory | None = None,
    environments: EnvironmentRegistry | None = None,
    continue_on_retry: bool = False,
    checkpoints: bool = False,
    max_turns: int = 20,
    max_tokens: int | None = None,
    max_seconds: float | None = None,
    tool_timeout_seconds: float | None = None,
    max_result_chars: int | None = None,
    before_request: BeforeRequest | None = None,
    before_tool: BeforeTool | None = None,
    fallback: ProviderAdapter | None = None,
    system: str = "",
    output_type: Any = str,
    params: Mapping[str, Any] = EMPTY,
    first_params: Mapping[str, Any] = EMPTY,
    name: str = "agent",
) -> Callable[[Any, TrialContext], Awaitable[Any]]:
    """Create a task that lets a model call tools until it answers.

    Messages are recorded as `ChatMessage`, tool calls as `ToolInvoked`, the end as `AgentEnded`. If a tool call fails
    (bad arguments, an unknown tool, an exception), the model receives the error and can try again; a tool that raises
    `StopAgent` ends the agent. When a budget is used up, or the conversation no longer fits into the context of the
    model, the agent ends as "truncated", and its last text is the output, which is scored as usual. A first call that
    does not fit is an error.

    Args:
        adapter: The model.
        tools: Typed Python functions, sync or async; sync ones run in threads. Calls of one turn run concurrently. The
            tools of a server are `mcp_tools(...)`, opened for each trial.
        prepare_messages: Returns the first messages for a sample. By default they are the input: a text, a message, a
            list of messages, `{"prompt": text}` or `{"messages": [...]}`; messages may be in OpenAI's format, with
            tool calls. Another mapping is refused before the first call; other values are sent as JSON.
        environment_factory: Returns an environment for each trial, from the sample. Its `tools()` are added to the
            tools, evaluators receive it, and it is always closed after scoring. If the factory returns saved state,
            `environments` restores it.
        environments: The types of environment that can be saved and restored. The state at the end of every attempt is
            then recorded as `EnvironmentSaved`.
        continue_on_retry: Start a retry from the state in which the previous attempt ended.
        checkpoints: Record the state of the environment before every model call, so that `fairtrial.rl.fork` can
            continue the trial from any turn.
        max_turns: The largest number of model calls.
        max_tokens: The largest number of tokens, checked before each turn.
        max_seconds: The time limit.
        tool_timeout_seconds: The time limit of one tool call.
        max_result_chars: The longest text of a tool's result. The rest is left out, of the record too, and the model is
            told so.
        before_request: Called with the conversation before each request; what it returns is sent instead, from then on.
            `trim_history` and `summarize_history` are two. A change is recorded as `HistoryReplaced`.
        before_tool: Called with each `ToolCall`, one after the other, before any call of the turn is made. None lets it
            happen, a text denies it and tells the model why; raising `StopAgent` ends the agent.
        fallback: A model that takes over for the rest of the trial if the first one cannot be reached, also after its
            retries. The end of the agent names it.
        system: A system message before all others.
        output_type: The type of the answer.
        params: Sampling parameters.
        first_params: Further parameters of the first turn only, such as `{"tool_choice": "required"}`, which in every
            turn would keep the model from answering.
        name: The name of the task, under which its calls are recorded.
    """
    settings = dict(locals())  # The arguments, for the same task with another model or another beginning.
    if max_turns < 1:
        raise ConfigurationError(f"max_turns must be at least 1 (got {max_turns})")
    if continue_on_retry and environments is None:
        raise ConfigurationError("continue_on_retry needs environments=EnvironmentRegistry(...), which restores them")
    if checkpoints and environment_factory is not None and environments is None:
        raise ConfigurationError(
            "checkpoints need environments=EnvironmentRegistry(...), which saves and restores them"
        )
    if max_result_chars is not None and max_result_chars < 1:
        raise ConfigurationError(f"max_result_chars must be at least 1 (got {max_result_chars})")
    functions, sources = split_sources(tools)
    fixed = as_tools(functions)  # Report invalid tools now instead of in the first trial.
    threads = DaemonThreads()

    @asynccontextmanager
    async def opened(ctx: TrialContext) -> AsyncIterator[AgentLoop]:
        offered = [*fixed.values()]
        async with AsyncExitStack() as stack:
            if environment_factory is not None:
                saved = _last_state(ctx) if continue_on_retry else None
                factory = environment_factory if saved is None else lambda _sample: saved
                ctx.environment = await ctx.enter(open_environment(factory, ctx.sample, environments))
                offered += as_tools(tools_of(ctx.environment)).values()
            for source in sources:
                offered += await stack.enter_async_context(source.open())
            caller = ToolCaller(
                as_tools(offered),
                threads,
                tool_timeout_seconds,
                max_result_chars,
                prompt_name=name,
                adapter_name=adapter.name,
                session_id=ctx.session.session_id,
            )
            saver = partial(_checkpoint, ctx, environments) if checkpoints else None
            hooks = _Hooks(before_request, before_tool, fallback, saver)
            limits = _Limits(max_turns, max_tokens, max_seconds)
            loop = AgentLoop(adapter, ctx, caller, output_type, params, first_params, name, hooks, limits)
            if system:
                loop.say(ChatMessage("system", system))
            try:
                yield loop
            finally:
                if environments is not None and ctx.environment is not None:
                    await _save(ctx, environments)

    async def agent(input: Any, ctx: TrialContext) -> Any:
        async with opened(ctx) as loop:
            for message in await opening_messages(prepare_messages, ctx.sample, input):
                loop.say(message)
            return await loop.run()

    @asynccontextmanager
    async def converse(ctx: TrialContext) -> AsyncIterator[AgentLoop]:
        async with opened(ctx) as loop:
            if prepare_messages is not None:
                for message in await opening_messages(prepare_messages, ctx.sample, None):
                    loop.say(message)
            loop.records_end = False
            yield loop

    async def first_messages(sample: Sample[Any, Any], params: Mapping[str, Any]) -> Sequence[ChatMessage]:
        opening = await opening_messages(prepare_messages, sample, sample.input)
        return (ChatMessage("system", system), *opening) if system else opening

    def rebuild(**changes: Any) -> Any:
        return agent_task(**{**settings, **changes})

    def fork(messages: Sequence[ChatMessage], state: Mapping[str, Any], turn: int) -> Any:
        return rebuild(
            prepare_messages=lambda _sample: messages,
            environment_factory=None if environment_factory is None else lambda _sample: state,
            continue_on_retry=False,
            max_turns=max_turns - turn,
            first_params=EMPTY if turn else first_params,
            system="",
        )

    setattr(agent, CONVERSE, converse)
    setattr(agent, FIRST_MESSAGES, first_messages)
    if prepare_messages is None:
        setattr(agent, CHECK_INPUT, lambda given, _params: _messages_of(given))
    setattr(agent, WITH_ADAPTER, lambda other: rebuild(adapter=other, fallback=None))
    setattr(agent, AGENT, AgentParts(fixed, environment_factory, environments, tool_timeout_seconds, sources))
    if checkpoints:
        setattr(agent, FORK, fork)
    agent.adapter = adapter  # type: ignore[attr-defined]  # Read by `runs.costs` to look up the price.
    agent.__annotations__["return"] = output_type  # So that stored outputs are read back with this type.
    return task(name=name)(agent)


@dataclass(frozen=True, slots=True)
class _Hooks:
    before_request: BeforeRequest | None
    before_tool: BeforeTool | None
    fallback: ProviderAdapter | None
    save_checkpoint: Callable[[int], Awaitable[None]] | None


@dataclass(frozen=True, slots=True)
class _Limits:
    max_turns: int
    max_tokens: int | None
    max_seconds: float | None


@dataclass(slots=True)
class AgentLoop:
    """The agent of one trial: its conversation, and how it ended.

    With `records_end` False only an end by an error is recorded: the loop is run again for the next turn of a user.
    """

    adapter: ProviderAdapter
    ctx: TrialContext
    caller: ToolCaller
    output_type: Any
    params: Mapping[str, Any]
    first_params: Mapping[str, Any]
    name: str
    hooks: _Hooks
    limits: _Limits
    messages: list[ChatMessage] = field(default_factory=list)
    last_text: str = ""
    turns: int = 0
    tokens: int = 0
    began: float = field(default_factory=anyio.current_time)
    records_end: bool = True
    end: AgentEnded | None = None

    def say(self, message: ChatMessage, *, actor: str = POLICY) -> None:
        """Add a message to the conversation, and record it."""
        self.messages.append(message)
        if message.role == "assistant":
            self.last_text = message.text or self.last_text
        self.ctx.session.record(message, actor=actor)

    async def run(self) -> Any:
        """Let the model call tools until it answers; returns the output."""
        max_turns, max_tokens, max_seconds = self.limits.max_turns, self.limits.max_tokens, self.limits.max_seconds
        first = self.turns
        end: AgentEnded | None = None
        output: Any = None
        deadline = float("inf") if max_seconds is None else anyio.current_time() + max_seconds
        try:
            with anyio.CancelScope(deadline=deadline) as scope:
                while end is None:
                    if self.turns - first >= max_turns:
                        end = self.ended("truncated", f"{max_turns} turns")
                    elif max_tokens is not None and self.tokens >= max_tokens:
                        end = self.ended("truncated", f"{self.tokens} tokens of {max_tokens}")
                    else:
                        try:
                            completion = await self._turn()
                        except ContextLengthError:
                            if not self.turns:
                                raise
                            end = self.ended("truncated", "the context of the model is full")
                            continue
                        if self.caller.stopped is not None:
                            stopper, stop = self.caller.stopped
                            output = stop.output
                            end = self.ended("terminated", f"{stopper} ended it")
                        elif not completion.message.tool_calls:
                            output = completion.output
                            end = self.ended(*_ENDED.get(ending_of(completion.finish_reason), ("terminated", "")))
            if scope.cancelled_caught:
                end = self.ended("truncated", f"{max_seconds:g} seconds")
        except BaseException as error:
            # A trial is cancelled at its time limit or when its run is stopped.
            cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            refused = isinstance(error, ModelRefusedError)
            if isinstance(error, ModelRefusedError) and error.refusal:
                self.say(ChatMessage("assistant", error.refusal))
            description = "cancelled" if cancelled else f"{type(error).__name__}: {error}"
            ended: EndReason = "truncated" if cancelled else "terminated" if refused else "error"
            self.ctx.session.record(self.ended(ended, description[:LONGEST_ERROR]))
            raise
        self.end = end
        if self.records_end and end is not None:
            self.ctx.session.record(end)
        return self.last_text if output is None and self.output_type is str else output

    def ended(self, reason: EndReason, detail: str) -> AgentEnded:
        """Return an end of the loop as it stands now."""
        took_over = self.adapter.model if self.adapter is self.hooks.fallback else ""
        milliseconds = (anyio.current_time() - self.began) * 1000
        return AgentEnded(reason, self.turns, detail, self.name, milliseconds, took_over)

    async def _turn(self) -> Completion[Any]:
        if self.hooks.save_checkpoint is not None:
            await self.hooks.save_checkpoint(self.turns)
        if self.hooks.before_request is not None:
            await self._replace_history(self.hooks.before_request)
        try:
            completion = await self._request()
        except ModelError as error:
            fallback = self.hooks.fallback
            if not error.retryable or fallback is None or self.adapter is fallback:
                raise
            self.adapter = fallback
            self.caller.adapter_name = self.adapter.name
            completion = await self._request()
        self.turns += 1
        if completion.usage is not None:
            self.tokens += completion.usage.total_tokens
        self.say(completion.message)
        if completion.message.tool_calls:
            for message in await self._call_all(completion.message):
                self.say(message)
            if self.caller.broken is not None:
                raise self.caller.broken
        return completion

    async def _request(self) -> Completion[Any]:
        return await self.adapter.complete(
            self.messages,
            tools=tuple(tool.spec for tool in self.caller.tools.values()),
            output_type=self.output_type,
            params=self.params if self.turns else {**self.params, **self.first_params},
            session=self.ctx.session,
            prompt_name=self.name,
        )

    async def _replace_history(self, hook: BeforeRequest) -> None:
        before = tuple(self.messages)
        result = hook(before)
        after = [as_message(message) for message in (await result if inspect.isawaitable(result) else result)]
        known = {id(message) for message in before}
        added = tuple(message for message in after if id(message) not in known)
        if list(map(id, after)) != list(map(id, before)):
            self.messages = after
            self.ctx.session.record(HistoryReplaced(len(before) - len(after) + len(added), added))

    async def _call_all(self, message: ChatMessage) -> list[ChatMessage]:
        """Call the tools concurrently and record each call when it ends; returns the results in the requested order."""
        results = [message] * len(message.tool_calls)
        denials = [await self.caller.review(call, self.hooks.before_tool) for call in message.tool_calls]

        async def one(index: int, call: ToolCall) -> None:
            invoked, content = await self.caller.call(call, denials[index])
            results[index] = tool_message(call, content, failed=invoked.error is not None)
            self.ctx.session.record(invoked)

        if len(message.tool_calls) == 1:  # A group of tasks would cost a quarter of the turn.
            await one(0, message.tool_calls[0])
            return results
        async with anyio.create_task_group() as group:
            for index, call in enumerate(message.tool_calls):
                group.start_soon(one, index, call)
        return results


_ENDED: Mapping[str, tuple[EndReason, str]] = {
    "cut off": ("truncated", "the answer was truncated"),
    "context full": ("truncated", "the context of the model is full"),
}


async def opening_messages(
    prepare: PrepareMessages | None, sample: Sample[Any, Any], given: Any
) -> Sequence[ChatMessage]:
    """Return the first messages of an agent: those that are prepared for the sample, or else its input."""
    if prepare is not None:
        prepared = prepare(sample)
        messages = await prepared if inspect.isawaitable(prepared) else prepared
        return tuple(as_message(message) for message in messages)
    return _messages_of(given)


def _messages_of(given: Any) -> tuple[ChatMessage, ...]:
    """Return an input as messages.

    Raises:
        ConfigurationError: it is a mapping that says neither what the prompt nor what the messages are.
    """
    messages = chat_messages(given)
    if messages is not None:
        return messages
    if isinstance(given, Mapping):
        raise ConfigurationError(
            'an input that is a mapping must be {"prompt": text}, {"messages": [...]} or a message with "role" and '
            f'"content" (got the keys {", ".join(map(repr, given)) or "none"})\n'
            "say what the model is asked: prepare_messages=lambda sample: [...], or a task of your own"
        )
    return (ChatMessage("user", dumps(given)),)


def _last_state(ctx: TrialContext) -> Mapping[str, Any] | None:
    """Return the state of the environment at the end of the last attempt; None if there is none."""
    saved = ctx.session.view()[EnvironmentSaved].latest() if ctx.attempt > 1 else None
    return saved.state if saved is not None and saved.error is None else None


async def _save(ctx: TrialContext, environments: EnvironmentRegistry) -> None:
    """Record the state of the environment, even if the trial reached its time limit."""
    with anyio.CancelScope(shield=True):
        ctx.session.record(await _saved(ctx, environments))


async def _checkpoint(ctx: TrialContext, environments: EnvironmentRegistry | None, turn: int) -> None:
    """Record the state of the environment before a turn; empty if there is no environment."""
    saved = EnvironmentSaved()
    if environments is not None and ctx.environment is not None:
        saved = await _saved(ctx, environments)
    ctx.session.record(replace(saved, turn=turn))


async def _saved(ctx: TrialContext, environments: EnvironmentRegistry) -> EnvironmentSaved:
    with anyio.move_on_after(_SAVE_SECONDS):
        try:
            return EnvironmentSaved(await environments.save(ctx.environment))
        except Exception as error:
            return EnvironmentSaved(error=f"{type(error).__name__}: {error}"[:LONGEST_ERROR])
    return EnvironmentSaved(error=f"it was not saved within {_SAVE_SECONDS:g} s")


@asynccontextmanager
async def open_environment(
    factory: EnvironmentFactory, sample: Sample[Any, Any], environments: EnvironmentRegistry | None
) -> Any:
    """Open the environment of a sample, and close it at the end."""
    made = factory(sample)
    if inspect.isawaitable(made):
        made = await made
    if isinstance(made, Mapping):
        if environments is None:
            raise ConfigurationError(
                "environment_factory returned saved state: give agent_task environments=EnvironmentRegistry(...) to "
                "restore it"
            )
        made = (await environments.restore(made)).environment
    if hasattr(made, "__aenter__"):
        async with made as environment:
            yield environment
        return
    try:
        yield made
    finally:
        await close_environment(made)


def tool_schema_accuracy(tools: Sequence[Callable[..., Any] | Tool]) -> SessionEvaluator[object, object]:
    """Score the share of tool calls with a known tool and valid arguments; a trial passes if all calls are valid.

    A trial without tool calls passes.
    """
    known = as_tools(tools)

    @evaluator(form="session", inline=True, name="tool_schema_accuracy")
    def accuracy(output: Any, expected: Any, session: SessionView) -> Score:
        calls = session[ToolInvoked].all()
        problems = [problem for call in calls if (problem := _problem(known, call)) is not None]
        share = 1.0 - len(problems) / len(calls) if calls else 1.0
        metrics = (
            Metric("tool_calls", float(len(calls))),
            Metric("valid_tool_calls", float(len(calls) - len(problems))),
        )
        return Score(share, not problems, "; ".join(problems) if calls else "no tool was called", metrics)

    return accuracy


def _problem(known: Mapping[str, Tool], call: ToolInvoked) -> str | None:
    tool = known.get(call.name)
    if tool is None:
        return f"there is no tool {call.name!r}"
    try:
        tool.arguments(to_json(call.params))
    except CodecError as error:
        return f"{call.name}: {error}"
    return None
