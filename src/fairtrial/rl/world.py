"""The environment and the tools of one rollout, for trainers that run the conversation themselves."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio

from fairtrial.base.codec import to_json
from fairtrial.base.offload import DaemonThreads
from fairtrial.base.sync_bridge import blocking_portal
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import ToolInvoked
from fairtrial.data.session.trajectory import ToolCall
from fairtrial.errors import ConfigurationError
from fairtrial.models.agent import AGENT, AgentParts, open_environment
from fairtrial.models.tool_calls import ToolCaller
from fairtrial.models.tools import Tool, as_tools
from fairtrial.suites.suite import EvalSuite
from fairtrial.trials.environment import tools_of

WORLD = "_fairtrial_world"
"""The attribute of a trainer's environment with its `World`."""

_log = logging.getLogger("fairtrial.rl")


def agent_parts(suite: EvalSuite) -> AgentParts | None:
    """Return the tools and the environment of the agent of a suite; None if its task is no `agent_task`."""
    found: AgentParts | None = getattr(suite.prepared().rules.tasks[0].fn, AGENT, None)
    return found


def required_parts(suite: EvalSuite, what: str) -> AgentParts:
    """Return the tools and the environment of the agent of a suite; raises if its task is no `agent_task`."""
    found = agent_parts(suite)
    if found is None:
        raise ConfigurationError(f"{what} needs a suite whose task is an agent_task(...) (got that of {suite.name!r})")
    return found


def tool_rows(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """Return tools in the format of chat templates."""
    specs = [tool.spec for tool in tools.values()]
    return [
        {
            "type": "function",
            "function": {"name": one.name, "description": one.description, "parameters": to_json(one.parameters)},
        }
        for one in specs
    ]


class World:
    """The open environment of one rollout; opened when it is made.

    The environment is opened and closed in one task of the event loop of `fairtrial.base.sync_bridge`, because context
    managers may not be left in another task than they were entered in.

    Attributes:
        environment: The environment; None if the agent has none.
        tools: Its tools and those of the agent, by name.
        invoked: The calls so far.
        problem: Why the environment could not be opened.
    """

    def __init__(self, parts: AgentParts, sample: Sample[Any, Any], *, close_seconds: float = 10.0) -> None:
        self.sample = sample
        self.environment: Any = None
        self.tools: Mapping[str, Tool] = parts.tools
        self.invoked: list[ToolInvoked] = []
        self.problem: str | None = None
        self._parts = parts
        self._close_seconds = close_seconds
        self._portal = blocking_portal()
        self._ready: Future[None] = Future()
        self._leaving: anyio.Event | None = None
        self._holder: Future[None] | None = self._portal.start_task_soon(self._hold)
        self._ready.result()

    async def _hold(self) -> None:
        self._leaving = anyio.Event()
        try:
            async with AsyncExitStack() as stack:
                if self._parts.environment_factory is not None:
                    opening = open_environment(self._parts.environment_factory, self.sample, self._parts.environments)
                    self.environment = await stack.enter_async_context(opening)
                    self.tools = as_tools((*self._parts.tools.values(), *tools_of(self.environment)))
                self._caller = ToolCaller(self.tools, DaemonThreads(), self._parts.tool_timeout_seconds)
                self._ready.set_result(None)
                await self._leaving.wait()
        except Exception as error:
            if self._ready.done():
                _log.warning("closing the environment of %s failed: %s", self.sample.id, _said(error))
            else:
                self.problem = f"its environment could not be opened: {_said(error)}"
                self._ready.set_result(None)

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolInvoked:
        """Call a tool and record it; a failed call is marked as such."""
        if self.problem is not None or self._holder is None:
            return ToolInvoked(name, arguments, None, False, self.problem or "the environment is closed")
        invoked, _ = self._portal.call(self._caller.call, ToolCall(name, arguments))
        self.invoked.append(invoked)
        return invoked

    def close(self) -> None:
        """Close the environment; a second call does nothing."""
        holder, self._holder = self._holder, None
        if holder is None or holder.done():
            return
        leaving = self._leaving
        if leaving is not None:
            self._portal.start_task_soon(partial(_set, leaving))
        try:
            holder.result(self._close_seconds)
        except TimeoutError:
            _log.warning("the environment of %s did not close within %g s", self.sample.id, self._close_seconds)
            holder.cancel()


def worlds_of(environments: Sequence[Any] | None) -> list[World | None] | None:
    """Return the worlds of the environments that a trainer passes to reward functions; None if it has none."""
    if environments is None:
        return None
    return [getattr(one, WORLD, None) for one in environments]


async def _set(event: anyio.Event) -> None:
    event.set()


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
