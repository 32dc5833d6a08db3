"""Prompts and main loops as tasks."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, cast

from typing_extensions import TypeVar

from fairtrial.base.codec import dumps
from fairtrial.base.offload import DaemonThreads
from fairtrial.data.sample import Sample
from fairtrial.data.session.session import ControlDispatcher, Session
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import CodecError, ConfigurationError
from fairtrial.models.adapter import Completion, PromptResponse, ProviderAdapter
from fairtrial.models.prompt import Prompt, PromptTemplate
from fairtrial.trials.config import Experiment
from fairtrial.trials.context import TrialContext, TrialKey, _current
from fairtrial.trials.sample_types import input_type_of
from fairtrial.trials.task import CHECK_INPUT, FIRST_MESSAGES, WITH_ADAPTER, ResolvedTask, Task, resolve_task, task

# With defaults, for MainLoop(my_function), which names no types; the syntax of PEP 695 has them only from Python 3.13.
InputT = TypeVar("InputT", default=Any)
OutputT = TypeVar("OutputT", default=Any)


class TaskLoop(Generic[InputT, OutputT]):
    """Converts one input to one output: a subclass with `initialize`, or any task.

        class Answer(MainLoop[str, str]):
            def initialize(self, input):
                return Prompt(TEMPLATE).bind(Question(input)), Session()

        loop = Answer(adapter=OpenAIAdapter(model="gpt-4o-mini"))       # or MainLoop(my_function)
        response, session = asyncio.run(loop.execute("Why?"))

    A main loop can be the task of a suite; the events of its own session are then added to that of the trial.

    This is the half of a `MainLoop` that needs no mailbox; the other half is `fairtrial.fleet.MainLoop`.
    """

    def __init__(
        self,
        task: Task | None = None,
        *,
        adapter: ProviderAdapter | None = None,
        bus: ControlDispatcher | None = None,
    ) -> None:
        overridden = type(self).initialize is not TaskLoop.initialize
        if (task is not None) == overridden:
            raise ConfigurationError(f"{type(self).__name__} must have either a task or an initialize(input) method")
        if overridden and adapter is None:
            raise ConfigurationError(f"{type(self).__name__} must have adapter=..., the model for its prompts")
        self._adapter = adapter
        self._bus = bus  # For `Session(dispatcher=self._bus)` in `initialize`.
        self._task: ResolvedTask | None = None if task is None else resolve_task(task)
        self._threads = DaemonThreads()

    @property
    def adapter(self) -> ProviderAdapter | None:
        """The model."""
        return self._adapter

    @property
    def input_type(self) -> Any:
        """The input type from the type arguments of a subclass or the annotation of the task; else `object`."""
        declared = self._type_argument(0)
        return input_type_of(self._task.fn) if declared is object and self._task is not None else declared

    def initialize(self, input: InputT) -> tuple[Prompt[OutputT], Session]:
        """Return the prompt for an input and the session to record in. Subclasses implement this, sync or async."""
        raise NotImplementedError

    async def execute(self, input: InputT) -> tuple[PromptResponse[OutputT], Session]:
        """Return the response to one input and the session that recorded it."""
        if self._task is not None:
            # Outside a suite, each execution is a trial of its own.
            session = Session(dispatcher=self._bus)
            context = TrialContext(TrialKey("", "baseline", "input"), Sample("input", input), Experiment(), session)
            token = _current.set(context)
            try:
                output = await self._call(self._task, input, context)
            finally:
                _current.reset(token)
                context.end_task()
                if context.has_resources:
                    await context.resources.aclose()
            return _response(output), context.session
        prompt, session = await self._initialized(input)
        return await self._evaluate(prompt, session), session

    def as_task(self) -> Callable[[InputT, TrialContext], Awaitable[OutputT]]:
        """Return the loop as a task; called by `EvalSuite(task=loop)`."""
        resolved = self._task

        async def main_loop(input: Any, ctx: TrialContext) -> Any:
            if resolved is not None:
                return await self._call(resolved, input, ctx)
            prompt, session = await self._initialized(input)
            if session is ctx.session:
                return (await self._evaluate(prompt, session)).output
            try:
                return (await self._evaluate(prompt, session)).output
            finally:
                # The events of the loop belong to this attempt, even if it failed.
                ctx.session.extend(session.everything().envelopes)

        main_loop.adapter = self._adapter  # type: ignore[attr-defined]  # Read by `runs.costs`.
        main_loop.__annotations__["return"] = self._output_type()
        return task(name=type(self).__name__ if resolved is None else resolved.name)(main_loop)

    async def _initialized(self, input: InputT) -> tuple[Prompt[OutputT], Session]:
        made: Any = self.initialize(input)
        if inspect.isawaitable(made):
            made = await made
        return cast("tuple[Prompt[OutputT], Session]", made)

    async def _evaluate(self, prompt: Prompt[OutputT], session: Session) -> PromptResponse[OutputT]:
        assert self._adapter is not None  # noqa: S101 - __init__ made sure
        return await evaluate_prompt(self._adapter, prompt, session)

    async def _call(self, resolved: ResolvedTask, input: Any, context: TrialContext) -> Any:
        args = (input, context) if resolved.takes_context else (input,)
        if resolved.is_async or resolved.inline:
            result = resolved.fn(*args)
        else:
            result = await self._threads.run(partial(resolved.fn, *args))
        return await result if inspect.isawaitable(result) else result

    def _output_type(self) -> Any:
        return self._task.output_type if self._task is not None else self._type_argument(1)

    def _type_argument(self, place: int) -> Any:
        """Return a type argument of a subclass: the input (0) or the output (1); `object` if it has none."""
        for base in (base for kind in type(self).__mro__ for base in types.get_original_bases(kind)):
            origin, args = typing.get_origin(base), typing.get_args(base)
            if isinstance(origin, type) and issubclass(origin, TaskLoop) and not _is_open(args[place]):
                return args[place]
        return object

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def _is_open(argument: Any) -> bool:
    return argument is Any or isinstance(argument, typing.TypeVar | TypeVar)


def prompt_task[O](
    prompt: PromptTemplate[O], adapter: ProviderAdapter, *, params: Callable[[Any], object] | None = None
) -> Callable[[object, TrialContext], Awaitable[O]]:
    """Create a task from a prompt and a model.

    Args:
        prompt: The template. A dataclass, model or mapping as input binds its parameters by name; any other input is
            the one parameter that is left. Parameters the input does not have come from the experiment's.
        adapter: The model.
        params: A function from the input to the parameters, if the input itself is not the parameters.
    """

    async def prompted(input: Any, ctx: TrialContext) -> Any:
        given = input if params is None else params(input)
        bound = prompt.bind(_parameters(prompt, given, ctx.experiment.params))
        return (await evaluate_prompt(adapter, bound, ctx.session)).output

    prompted.__annotations__["return"] = prompt.output_type

    def check_input(input: Any, experiment: Mapping[str, Any]) -> None:
        prompt.bind(_parameters(prompt, input, experiment))

    if params is None:
        setattr(prompted, CHECK_INPUT, check_input)  # Called by `runs.costs` before the first trial.

    def first_messages(sample: Sample[Any, Any], experiment: Mapping[str, Any]) -> Sequence[ChatMessage]:
        given = sample.input if params is None else params(sample.input)
        return prompt.bind(_parameters(prompt, given, experiment)).messages

    setattr(prompted, FIRST_MESSAGES, first_messages)
    setattr(prompted, WITH_ADAPTER, lambda other: prompt_task(prompt, other, params=params))
    prompted.adapter = adapter  # type: ignore[attr-defined]  # Read by `runs.costs` to look up the price.
    return task(name=prompt.name)(prompted)


async def evaluate_prompt[O](adapter: ProviderAdapter, prompt: Prompt[O], session: Session) -> PromptResponse[O]:
    """Call the model with a prompt and record the conversation."""
    for message in prompt.messages:
        session.record(message)
    response = await adapter.evaluate(prompt, session=session)
    session.record(response.completion.message)
    return response


def _parameters(prompt: PromptTemplate[Any], given: Any, others: Mapping[str, Any]) -> Mapping[str, Any]:
    found: dict[str, Any]
    if isinstance(given, Mapping):
        found = dict(given)
    elif dataclasses.is_dataclass(given) and not isinstance(given, type):
        found = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    elif isinstance(fields := getattr(type(given), "model_fields", None), Mapping):
        found = {name: getattr(given, name) for name in fields}
    else:
        open_names = [name for name in prompt.placeholders if name not in others]
        if not prompt.placeholders:
            raise ConfigurationError(
                f"prompt {prompt.name!r} has no placeholder for the input, so every sample would ask the same\n"
                "write $input where it belongs, not {input} or {{input}}"
            )
        if len(open_names) != 1:
            wanted = ", ".join(f"${name}" for name in open_names) or "no parameters"
            columns = ", ".join(f'"{name}"' for name in open_names)
            raise ConfigurationError(
                f"prompt {prompt.name!r} needs {wanted} (got an input of type {type(given).__name__})\n"
                f'use inputs with these fields (for a table: columns={{"input": [{columns}]}}, or '
                f"--column input={','.join(open_names)}), or prompt_task params=..., a function from the input to the "
                "parameters"
            )
        found = {open_names[0]: given}
    return {**{name: others[name] for name in prompt.placeholders if name in others and name not in found}, **found}


def _response(output: Any) -> PromptResponse[Any]:
    try:
        text = output if isinstance(output, str) else dumps(output)
    except CodecError:
        text = str(output)
    return PromptResponse(output, Completion(ChatMessage("assistant", text), output, raw=text))
