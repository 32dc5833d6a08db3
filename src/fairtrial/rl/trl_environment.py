"""Environments of agents as TRL drives them: it runs the conversation, we own the world, its tools and its end."""

from __future__ import annotations

import atexit
import inspect
import weakref
from collections.abc import Mapping
from typing import Any, Literal

from fairtrial.errors import ConfigurationError
from fairtrial.models.agent import AgentParts
from fairtrial.models.tools import Tool
from fairtrial.rl.import_path import import_path, load_object
from fairtrial.rl.reward import RewardFunction, reward
from fairtrial.rl.world import WORLD, World, required_parts
from fairtrial.suites.suite import EvalSuite

_TYPES: Mapping[str, Any] = {
    "integer": int,
    "number": float,
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
}
_TAKEN = ("reset", "get_reward", "close")


class TrlEnvironmentFactory:
    """Makes the environments of TRL's `environment_factory`; made by `TrlTraining.environment_factory`.

    TRL finds the tools as methods of the class, resets an environment before each rollout and never closes it. It is
    closed after scoring, at the next reset, by `close()`, and at the end of the process.
    """

    def __init__(self, suite: EvalSuite) -> None:
        self.where = import_path(suite, f"suite {suite.name!r}")
        self._parts = required_parts(suite, "environment_factory")
        self._samples = reward(suite)
        self._class = _environment_class(self._parts, self._samples, suite)
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        atexit.register(_close_all, weakref.ref(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.where,)

    def __call__(self) -> Any:
        """Return an environment, which opens nothing until it is reset."""
        made = self._class()
        self._made.add(made)
        return made

    def close(self) -> None:
        """Close the environments that TRL has left open."""
        for made in list(self._made):
            made._close()


def _restore(where: str) -> TrlEnvironmentFactory:
    return TrlEnvironmentFactory(load_object(where))


def _close_all(factory: weakref.ref[TrlEnvironmentFactory]) -> None:
    found = factory()
    if found is not None:
        found.close()


def _environment_class(parts: AgentParts, samples: RewardFunction, suite: EvalSuite) -> type:
    close_seconds = suite.config.close_seconds

    class TrlEnvironment:
        def __init__(self) -> None:
            self._world: World | None = None

        def reset(self, **row: Any) -> None:
            """Open the environment of a sample; TRL calls it before each rollout."""
            self._close()
            self._world = World(parts, samples.sample_of(row), close_seconds=close_seconds)

        def _close(self) -> None:
            if self._world is not None:
                self._world.close()

    setattr(TrlEnvironment, WORLD, property(lambda self: self._world))
    for name, tool in _tools(parts, suite, close_seconds).items():
        if name in _TAKEN or name.startswith("_"):
            raise ConfigurationError(f"a tool of an environment of TRL must have another name (got {name!r})")
        setattr(TrlEnvironment, name, _method(tool))
    return TrlEnvironment


def _tools(parts: AgentParts, suite: EvalSuite, close_seconds: float) -> Mapping[str, Tool]:
    """Return the tools of the first sample's environment, which is opened to ask for them."""
    world = World(parts, next(iter(suite.dataset)), close_seconds=close_seconds)
    world.close()
    if world.problem is not None:
        raise ConfigurationError(f"the tools of suite {suite.name!r} are not known: {world.problem}")
    return world.tools


def _method(tool: Tool) -> Any:
    """Return a tool as a method with the signature and the docstring from which TRL makes its schema."""
    spec = tool.spec
    properties: Mapping[str, Any] = spec.parameters.get("properties", {})
    known = inspect.signature(tool.fn).parameters

    def call(self: Any, **arguments: Any) -> Any:
        if self._world is None:
            raise RuntimeError("the environment was not reset")
        invoked = self._world.call(spec.name, arguments)
        if invoked.success is False:
            raise RuntimeError(invoked.error)  # TRL shows it to the model.
        return invoked.result

    hints = {name: _hint(schema) for name, schema in properties.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(
                inspect.Parameter(name, keyword, default=known[name].default, annotation=hint)
                for name, hint in hints.items()
            ),
        ]
    )
    call.__annotations__ = dict(hints)
    call.__name__ = call.__qualname__ = spec.name
    lines = [f"    {name}: {schema.get('description') or name}" for name, schema in properties.items()]
    call.__doc__ = "\n".join([spec.description or spec.name, *(["", "Args:", *lines] if lines else [])])
    return call


def _hint(schema: Mapping[str, Any]) -> Any:
    choices = schema.get("enum")
    if choices:
        return Literal[tuple(choices)]
    return _TYPES.get(str(schema.get("type")), dict)
