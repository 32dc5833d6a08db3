"""The world an agent acts in: a sandbox, a calculator, a browser. Its state can be saved and restored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

from fairtrial.codec import from_json, to_json
from fairtrial.errors import CodecError, ConfigurationError, EnvironmentMismatchError


@runtime_checkable
class Environment(Protocol):
    """What every environment can do.

    `env_kind` and `version` are class attributes, and part of every serialised state, so that state is never restored
    into another kind of environment or an incompatible version. An environment may also have `tools()`, a sequence of
    callables an agent may use, and `close()`, sync or async, which the framework always calls.
    """

    @property
    def env_kind(self) -> str:
        """What kind of environment this is. A class attribute will do, and is what the registry asks for."""
        ...

    @property
    def version(self) -> str:
        """The version of its state. A class attribute will do."""
        ...

    async def serialize(self) -> dict[str, Any]:
        """The state as JSON, with `env_kind` and `version`."""
        ...

    @staticmethod
    async def deserialize(data: dict[str, Any]) -> Environment:
        """An environment in that state."""
        ...


def check_state(data: Mapping[str, Any], *, env_kind: str, version: str) -> None:
    """Raise unless serialised state is of this kind and of a compatible version (the same first number)."""
    for field in ("env_kind", "version"):
        if not isinstance(data.get(field), str) or not data[field]:
            raise EnvironmentMismatchError(f"environment state needs {field!r} as text; it was written without one")
    if data["env_kind"] != env_kind:
        raise EnvironmentMismatchError(f"the state is of environment {data['env_kind']!r}, not {env_kind!r}")
    if data["version"].partition(".")[0] != version.partition(".")[0]:
        raise EnvironmentMismatchError(
            f"the state was written by version {data['version']} of environment {env_kind!r}; "
            f"version {version} cannot read it"
        )


@dataclass(frozen=True, slots=True)
class Episode:
    """An environment that was restored, under a new name of its own: two restores are two episodes."""

    environment: Environment
    episode_id: str


def _named(kind: type[Environment]) -> tuple[str, str]:
    """The kind and version of a class, which must be known without making an environment of it."""
    found = [getattr(kind, field, None) for field in ("env_kind", "version")]
    for field, value in zip(("env_kind", "version"), found, strict=True):
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f"environment {kind.__name__} needs {field!r} as a class attribute with text")
    return str(found[0]), str(found[1])


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
        """The environment's state as JSON, checked to be restorable and sharing nothing with the environment."""
        data = await environment.serialize()
        check_state(data, env_kind=environment.env_kind, version=environment.version)
        try:
            state: dict[str, Any] = to_json(data)
        except CodecError as error:
            raise EnvironmentMismatchError(
                f"the state of environment {environment.env_kind!r} cannot be stored: {error}"
            ) from None
        return state

    async def restore(self, data: Mapping[str, Any]) -> Episode:
        """A new episode in the saved state; it shares nothing with other episodes restored from it."""
        named = data.get("env_kind")
        kind = self._kinds.get(named) if isinstance(named, str) else None
        if kind is None:
            known = ", ".join(sorted(self._kinds)) or "none"
            raise EnvironmentMismatchError(f"no environment {named!r} is registered (registered: {known})")
        env_kind, version = _named(kind)
        check_state(data, env_kind=env_kind, version=version)
        return Episode(await kind.deserialize(from_json(dict[str, Any], dict(data))), uuid4().hex)


def tools_of(environment: object) -> Sequence[Callable[..., Any]]:
    """The tools an environment offers; none if it has no `tools()`."""
    offer = getattr(environment, "tools", None)
    return tuple(offer()) if callable(offer) else ()


async def close_environment(environment: object) -> None:
    """Close an environment, however it closes; one without `close()` needs nothing."""
    close = getattr(environment, "close", None) or getattr(environment, "aclose", None)
    if callable(close):
        result = close()
        if inspect.isawaitable(result):
            await result
