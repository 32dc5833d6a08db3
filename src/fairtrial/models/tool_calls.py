"""Calls of tools by a model: arguments are checked, errors become messages to the model, every call is described."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import anyio

from fairtrial.base.codec import dumps, to_json
from fairtrial.base.offload import DaemonThreads
from fairtrial.data.attachment import Attachment
from fairtrial.data.session.events import ToolInvoked
from fairtrial.data.session.trajectory import ToolCall
from fairtrial.errors import CodecError
from fairtrial.models.tools import UNPARSED, StopAgent, Tool, ToolContent

LONGEST_ERROR = 2000
"""The longest error message of a tool that a model receives and a session records."""


class ToolCaller:
    """Calls the tools of one trial.

    Args:
        tools: The tools by name.
        threads: The threads of sync tools.
        timeout_seconds: The time limit of one call.
        prompt_name: The name of the agent, for the record.
        adapter_name: The provider of the model, for the record.
        session_id: The session of the trial, for the record.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        threads: DaemonThreads,
        timeout_seconds: float | None = None,
        *,
        prompt_name: str = "",
        adapter_name: str = "",
        session_id: UUID | None = None,
    ) -> None:
        self.tools = tools
        self._threads = threads
        self._timeout = timeout_seconds
        self._prompt_name = prompt_name
        self._adapter_name = adapter_name
        self._session_id = session_id
        self.stopped: tuple[str, StopAgent] | None = None
        """The tool that ended the agent, if one did."""

    async def call(self, call: ToolCall) -> tuple[ToolInvoked, ToolContent]:
        """Call a tool; returns the event to record and the content for the model, an error message if it failed."""
        began = anyio.current_time()
        invoked, text = await self._call(call)
        return replace(invoked, duration_ms=round((anyio.current_time() - began) * 1000, 3)), text

    async def _call(self, call: ToolCall) -> tuple[ToolInvoked, ToolContent]:
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return self._failed(call, f"there is no tool {call.name!r}; the tools are: {known}")
        if UNPARSED in call.arguments:
            return self._failed(call, "the arguments must be a JSON object")
        try:
            arguments = tool.arguments(call.arguments)
        except CodecError as error:
            return self._failed(call, f"bad arguments: {error}")
        stop: StopAgent | None = None
        try:
            with anyio.fail_after(self._timeout):
                value = await self._invoke(tool, arguments)
        except StopAgent as error:
            stop, value = error, error.output
        except Exception as error:
            timed_out = isinstance(error, TimeoutError) and not str(error)
            problem = f"it did not finish within {self._timeout:g} s" if timed_out and self._timeout else ""
            return self._failed(call, problem or f"{type(error).__name__}: {error}")
        try:
            answer = self._invoked(call, to_json(value), True, None), _content(value)
        except CodecError as error:
            return self._failed(call, f"its result cannot be shown: {error}")
        if stop is not None and self.stopped is None:
            self.stopped = call.name, stop
        return answer

    async def _invoke(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        if tool.is_async or tool.inline:
            value = tool.fn(**arguments)
        else:
            value = await self._threads.run(partial(tool.fn, **arguments))
        return await value if inspect.isawaitable(value) else value

    def _failed(self, call: ToolCall, problem: str) -> tuple[ToolInvoked, ToolContent]:
        problem = problem[:LONGEST_ERROR]
        return self._invoked(call, None, False, problem), f"Error: {problem}"

    def _invoked(self, call: ToolCall, result: Any, success: bool, problem: str | None) -> ToolInvoked:
        return ToolInvoked(
            call.name,
            call.arguments,
            result,
            success,
            problem,
            self._prompt_name,
            self._adapter_name,
            self._session_id,
            datetime.now(UTC),
            call_id=call.id,
        )


def _content(value: Any) -> ToolContent:
    """Return a result as the model receives it: attachments as parts, other values as text."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list | tuple) else (value,)
    if not any(isinstance(part, Attachment) for part in parts):
        return dumps(value)
    return tuple(part if isinstance(part, str | Attachment) else dumps(part) for part in parts)
