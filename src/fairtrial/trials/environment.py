"""Environments of agents, such as a sandbox or a browser, whose state can be saved and restored."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

from fairtrial.base.codec import from_json, to_json
from fairtrial.base.codec.encode import SPARSE
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import CodecError, ConfigurationError, EnvironmentMismatchError


@runtime_checkable
class Environment(Protocol):
    """The protocol of environments: any class with these two methods.

    Its kind and version are part of every serialised state, as `env_kind` and `version`, so that state is never
    restored into another kind of environment or an incompatible version; and they are class attributes, `env_kind` and
    `version` or `ENV_KIND` and `VERSION`, which the registry asks for. An environment may also have `tools()`, a
    sequence of callables an agent may use, and `close()`, sync or async, which the framework always calls.
    """

    async def serialize(self) -> dict[str, Any]:
        """Return the state as JSON, with `env_kind` and `version`."""
        ...

    @staticmethod
    async def deserialize(data: dict[str, Any]) -> Environment:
        """Return an environment in this state."""
        ...


def check_state(data: Mapping[str, Any], *, env_kind: str, version: str) -> None:
    """Raise unless serialised state is of this kind and of a compatible version (the same first number)."""
    for field in ("env_kind", "version"):
        if not isinstance(data.get(field), str) or not data[field]:
            raise EnvironmentMismatchError(f"environment state needs {field!r} as text; it was written without one")
    if data["env_kind"] != env_kind:
        raise EnvironmentMismatchError(f"the state must be of environment {env_kind!r} (got {data['env_kind']!r})")
    if data["version"].partition(".")[0] != version.partition(".")[0]:
        raise EnvironmentMismatchError(
            f"the state was written by version {data['version']} of environment {env_kind!r}; "
            f"version {version} cannot read it"
        )


@dataclass(frozen=True, slots=True)
class EnvironmentSaved:
    """The state of a trial's environment at the end of an attempt; `error` says why there is none.

    A checkpoint of `agent_task(checkpoints=True)` has the number of the turn that follows, from 0.
    """

    state: Mapping[str, Any] = EMPTY
    error: str | None = None
    turn: int | None = dataclasses.field(default=None, metadata=SPARSE)


@dataclass(frozen=True, slots=True)
class Episode:
    """A restored environment with a unique id: each restore is a separate episode."""

    environment: Environment
    episode_id: str


def _named(kind: type[Environment]) -> tuple[str, str]:
    """The kind and version of a class, which must be known without making an environment of it."""
    found: list[str] = []
    for field in ("env_kind", "version"):
        value = getattr(kind, field, None) or getattr(kind, field.upper(), None)
        if not isinstance(value, str):
            raise ConfigurationError(
                f"environment {kind.__name__} needs {field!r} (or {field.upper()!r}) as a class attribute with text"
            )
        found.append(value)
    return found[0], found[1]


class EnvironmentRegistry:
    """The kinds of environment that may be restored. Kinds are registered by code, never named by data."""

    def __init__(self, *kinds: type[Environment]) -> None:
        self._kinds: dict[str, type[Environment]] = {}
        for kind in kinds:
            self.register(kind)

    def register[K: type[Environment]](self, kind: K) -> K:
        """Add a kind; usable as a class decorator."""
        env_kind, _ = _named(kind)
        known = self._kinds.setdefault(env_kind, kind)
        if known is not kind:
            raise ConfigurationError(
                f"both {known.__name__} and {kind.__name__} call themselves environment {env_kind!r}"
            )
        return kind

    async def save(self, environment: Environment) -> dict[str, Any]:
        """Return a copy of the environment's state as JSON, checked to be restorable."""
        data = await environment.serialize()
        env_kind, version = _named(type(environment))
        check_state(data, env_kind=env_kind, version=version)
        try:
            state: dict[str, Any] = to_json(data)
        except CodecError as error:
            raise EnvironmentMismatchError(f"the state of environment {env_kind!r} cannot be stored: {error}") from None
        return state

    async def restore(self, data: Mapping[str, Any]) -> Episode:
        """Restore a new, independent episode from a saved state."""
        named = data.get("env_kind")
        kind = self._kinds.get(named) if isinstance(named, str) else None
        if kind is None:
            known = ", ".join(sorted(self._kinds)) or "none"
            raise EnvironmentMismatchError(f"no environment {named!r} is registered (registered: {known})")
        env_kind, version = _named(kind)
        check_state(data, env_kind=env_kind, version=version)
        return Episode(await kind.deserialize(from_json(dict[str, Any], dict(data))), uuid4().hex)


def tools_of(environment: object) -> Sequence[Callable[..., Any]]:
    """Return the tools of an environment; none if it has no `tools()`."""
    offer = getattr(environment, "tools", None)
    return tuple(offer()) if callable(offer) else ()


async def close_environment(environment: object) -> None:
    """Close an environment, sync or async, if it has `close()`."""
    close = getattr(environment, "close", None) or getattr(environment, "aclose", None)
    if callable(close):
        result = close()
        if inspect.isawaitable(result):
            await result
