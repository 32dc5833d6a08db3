"""A model with tools, in a loop, as a task."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import anyio

from fairtrial.codec import dumps, to_json
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, ConfigurationError
from fairtrial.frozen import EMPTY
from fairtrial.models.adapter import Completion, ProviderAdapter
from fairtrial.models.tools import UNPARSED, Tool, as_tools, tool_message
from fairtrial.offload import DaemonThreads
from fairtrial.scoring.behaviour import SessionEvaluator
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import Metric, Score
from fairtrial.session.events import ToolInvoked
from fairtrial.session.trajectory import ChatMessage, ToolCall
from fairtrial.session.views import SessionView
from fairtrial.trials.context import TrialContext
from fairtrial.trials.environment import close_environment, tools_of
from fairtrial.trials.task import Task, task

type PrepareMessages = Callable[[Sample[Any, Any]], Sequence[ChatMessage] | Awaitable[Sequence[ChatMessage]]]
"""Makes the opening messages of a sample."""

type EnvironmentFactory = Callable[[Sample[Any, Any]], Any]
"""Makes the environment of a sample: the object, an awaitable of it, or an async context manager."""

type EndReason = Literal["terminated", "truncated", "error"]
"""The agent was done; a budget ran out; something failed."""

_CUT_SHORT = frozenset({"length", "max_tokens"})
_LONGEST_ERROR = 2000


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """An agent's loop is over: why, and after how many turns."""

    reason: EndReason
    turns: int
    detail: str = ""


def agent_task(
    adapter: ProviderAdapter,
    *,
    tools: Sequence[Callable[..., Any] | Tool] = (),
    prepare_messages: PrepareMessages | None = None,
    environment_factory: EnvironmentFactory | None = None,
    max_turns: int = 20,
    max_tokens: int | None = None,
    max_seconds: float | None = None,
    tool_timeout_seconds: float | None = None,
    system: str = "",
    output_type: Any = str,
    params: Mapping[str, Any] = EMPTY,
    name: str = "agent",
) -> Task:
    """A task that lets a model call tools until it answers.

    Everything said is recorded as `ChatMessage`, every call as `ToolInvoked`, the end as `AgentEnded`. Calls that fail
    (bad arguments, an unknown tool, an exception) are told to the model, which may do better. When a budget runs out,
    the agent ends as "truncated" and its output is what it said last, to be scored like any other.

    Args:
        adapter: The model.
        tools: Typed Python functions, sync or async; sync ones run in threads. Calls of one turn run side by side.
        prepare_messages: Makes the opening messages from the sample; the input as a user message unless given.
        environment_factory: Makes an environment for each trial, from the sample. Its `tools()` are added to the
            tools, and it is closed after scoring, whatever happens.
        max_turns: How often the model may speak.
        max_tokens: How many tokens it may use, checked before each turn.
        max_seconds: How long it may take.
        tool_timeout_seconds: How long one tool call may take.
        system: A system message to begin with.
        output_type: The type of the answer.
        params: Sampling parameters.
        name: The task's name, under which its calls are recorded.
    """
    if max_turns < 1:
        raise ConfigurationError(f"an agent needs at least one turn, not {max_turns}")
    fixed = as_tools(tools)  # What is wrong with a tool is said now, not in the first trial.
    threads = DaemonThreads()

    async def agent(input: Any, ctx: TrialContext) -> Any:
        offered = dict(fixed)
        if environment_factory is not None:
            environment = await ctx.enter(_opened(environment_factory, ctx.sample))
            offered = as_tools((*fixed.values(), *tools_of(environment)))
        loop = _Loop(adapter, ctx, offered, threads, tool_timeout_seconds, output_type, params, name)
        if system:
            loop.say(ChatMessage("system", system))
        for message in await _opening(prepare_messages, ctx.sample, input):
            loop.say(message)
        return await loop.run(max_turns, max_tokens, max_seconds)

    agent.adapter = adapter  # type: ignore[attr-defined]  # Read by `runs.costs` to look up the price.
    agent.__annotations__["return"] = output_type  # So that stored outputs are read back as what they were.
    return task(name=name)(agent)


class _Loop:
    """One trial's conversation."""

    def __init__(
        self,
        adapter: ProviderAdapter,
        ctx: TrialContext,
        tools: dict[str, Tool],
        threads: DaemonThreads,
        tool_timeout: float | None,
        output_type: Any,
        params: Mapping[str, Any],
        name: str,
    ) -> None:
        self.adapter = adapter
        self.ctx = ctx
        self.tools = tools
        self.specs = tuple(tool.spec for tool in tools.values())
        self.threads = threads
        self.tool_timeout = tool_timeout
        self.output_type = output_type
        self.params = params
        self.name = name
        self.messages: list[ChatMessage] = []
        self.turns = 0
        self.tokens = 0

    def say(self, message: ChatMessage) -> None:
        self.messages.append(message)
        self.ctx.session.record(message)

    async def run(self, max_turns: int, max_tokens: int | None, max_seconds: float | None) -> Any:
        end: AgentEnded | None = None
        output: Any = None
        deadline = float("inf") if max_seconds is None else anyio.current_time() + max_seconds
        try:
            with anyio.CancelScope(deadline=deadline) as scope:
                while end is None:
                    if self.turns >= max_turns:
                        end = self._ended("truncated", f"{max_turns} turns")
                    elif max_tokens is not None and self.tokens >= max_tokens:
                        end = self._ended("truncated", f"{self.tokens} tokens of {max_tokens}")
                    else:
                        completion = await self._turn()
                        if not completion.message.tool_calls:
                            output = completion.output
                            cut = completion.finish_reason in _CUT_SHORT
                            end = self._ended(
                                *(("truncated", "the answer was cut short") if cut else ("terminated", ""))
                            )
            if scope.cancelled_caught:
                end = self._ended("truncated", f"{max_seconds:g} seconds")
        except BaseException as error:
            # A cancelled trial is one whose time ran out, or whose run was stopped.
            cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            said = "cancelled" if cancelled else f"{type(error).__name__}: {error}"
            end = self._ended("truncated" if cancelled else "error", said[:_LONGEST_ERROR])
            raise
        finally:
            if end is not None:
                self.ctx.session.record(end)
        if output is None and self.output_type is str:
            said_last = (message.text for message in reversed(self.messages) if message.role == "assistant")
            return next((text for text in said_last if text), "")
        return output

    def _ended(self, reason: EndReason, detail: str) -> AgentEnded:
        return AgentEnded(reason, self.turns, detail)

    async def _turn(self) -> Completion[Any]:
        completion: Completion[Any] = await self.adapter.complete(
            self.messages,
            tools=self.specs,
            output_type=self.output_type,
            params=self.params,
            session=self.ctx.session,
            prompt_name=self.name,
        )
        self.turns += 1
        if completion.usage is not None:
            self.tokens += completion.usage.total_tokens
        self.say(completion.message)
        if completion.message.tool_calls:
            for call, text in zip(completion.message.tool_calls, await self._call_all(completion.message), strict=True):
                self.say(tool_message(call, text))
        return completion

    async def _call_all(self, message: ChatMessage) -> list[str]:
        """Call the tools side by side; record them in the order they were asked for, also if time runs out."""
        results: list[tuple[ToolInvoked, str] | None] = [None] * len(message.tool_calls)

        async def one(index: int, call: ToolCall) -> None:
            results[index] = await self._call(call)

        try:
            async with anyio.create_task_group() as group:
                for index, call in enumerate(message.tool_calls):
                    group.start_soon(one, index, call)
        finally:
            for done in results:
                if done is not None:
                    self.ctx.session.record(done[0])
        return [done[1] for done in results if done is not None]

    async def _call(self, call: ToolCall) -> tuple[ToolInvoked, str]:
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return self._failed(call, f"there is no tool {call.name!r}; the tools are: {known}")
        if UNPARSED in call.arguments:
            return self._failed(call, "the arguments are not a JSON object")
        try:
            arguments = tool.arguments(call.arguments)
        except CodecError as error:
            return self._failed(call, f"bad arguments: {error}")
        try:
            with anyio.fail_after(self.tool_timeout):
                value = await self._invoke(tool, arguments)
        except Exception as error:
            timed_out = isinstance(error, TimeoutError) and not str(error)
            problem = f"it did not finish within {self.tool_timeout:g} s" if timed_out and self.tool_timeout else ""
            return self._failed(call, problem or f"{type(error).__name__}: {error}")
        try:
            text = value if isinstance(value, str) else dumps(value)
            return self._invoked(call, to_json(value), True, None), text
        except CodecError as error:
            return self._failed(call, f"its result cannot be shown: {error}")

    async def _invoke(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        if tool.is_async or tool.inline:
            value = tool.fn(**arguments)
        else:
            value = await self.threads.run(partial(tool.fn, **arguments))
        return await value if inspect.isawaitable(value) else value

    def _failed(self, call: ToolCall, problem: str) -> tuple[ToolInvoked, str]:
        problem = problem[:_LONGEST_ERROR]
        return self._invoked(call, None, False, problem), f"Error: {problem}"

    def _invoked(self, call: ToolCall, result: Any, success: bool, problem: str | None) -> ToolInvoked:
        return ToolInvoked(
            call.name,
            call.arguments,
            result,
            success,
            problem,
            self.name,
            self.adapter.name,
            self.ctx.session.session_id,
            datetime.now(UTC),
        )


async def _opening(prepare: PrepareMessages | None, sample: Sample[Any, Any], given: Any) -> Sequence[ChatMessage]:
    if prepare is not None:
        prepared = prepare(sample)
        return await prepared if inspect.isawaitable(prepared) else prepared
    if isinstance(given, ChatMessage):
        return (given,)
    if isinstance(given, Sequence) and given and all(isinstance(message, ChatMessage) for message in given):
        return given
    return (ChatMessage("user", given if isinstance(given, str) else dumps(given)),)


@asynccontextmanager
async def _opened(factory: EnvironmentFactory, sample: Sample[Any, Any]) -> Any:
    made = factory(sample)
    if inspect.isawaitable(made):
        made = await made
    if hasattr(made, "__aenter__"):
        async with made as environment:
            yield environment
        return
    try:
        yield made
    finally:
        await close_environment(made)


def tool_schema_accuracy(tools: Sequence[Callable[..., Any] | Tool]) -> SessionEvaluator:
    """The share of the trial's tool calls that named a known tool and gave it valid arguments; all must, to pass.

    A trial without calls passes: nothing in it was wrong.
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
        return Score(share, not problems, "; ".join(problems), metrics)

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
