"""Fakes: time, and environments of agents."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fairtrial.base.codec import to_json
from fairtrial.base.frozen import EMPTY
from fairtrial.base.sync_bridge import call_sync
from fairtrial.data.session.session import Session
from fairtrial.data.session.views import RecordedView
from fairtrial.errors import CodecError, FairtrialError
from fairtrial.models.tools import as_tools
from fairtrial.trials.environment import EnvironmentRegistry, close_environment, tools_of


def session_of(*events: object, tags: Mapping[str, str] = EMPTY) -> RecordedView:
    """Return the session of a trial with exactly these events."""
    session = Session(tags=tags)
    for event in events:
        session.record(event)
    return session.view()


class FakeClock:
    """A clock that only `advance` moves."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._start = now

    def time(self) -> float:
        """Return the seconds since the epoch."""
        return self._now

    def monotonic(self) -> float:
        """Return the seconds since this clock was made."""
        return self._now - self._start

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds


type Step = tuple[str, Mapping[str, Any]]
"""A tool call of the script: the name of the tool and its arguments."""


def check_environment(factory: Callable[[], Any], script: Sequence[Step] = ()) -> None:
    """Check that environments of one type can be saved, restored, forked and closed.

    At every point of the script the state is saved and restored, and the original and the copy must answer the rest of
    the script the same way. They must share nothing, leave saved states unchanged, write their kind and version into
    every state, and survive being closed twice.

    Args:
        factory: Returns a new environment, or an awaitable of it.
        script: Tool calls, such as `[("press", {"pin": 1}), ("press", {"pin": 2})]`.

    Raises:
        AssertionError: with all problems that were found.
    """
    problems = call_sync(partial(_problems, factory, list(script)))
    if problems:
        raise AssertionError("\n".join(dict.fromkeys(problems)))


async def _problems(factory: Callable[[], Any], script: list[Step]) -> list[str]:
    opened: list[Any] = []

    async def new() -> Any:
        made = factory()
        opened.append(await made if inspect.isawaitable(made) else made)
        return opened[-1]

    found: list[str] = []
    try:
        registry = EnvironmentRegistry(type(await new()))
        for place in range(len(script) + 1):
            found += await _check_place(registry, new, opened, script, place)
    except FairtrialError as error:
        found.append(str(error))
    for environment in opened:
        for time in ("first", "second"):
            try:
                await close_environment(environment)
            except Exception as error:
                found.append(f"close() must not raise (the {time} call raised {type(error).__name__}: {error})")
    return found


async def _check_place(
    registry: EnvironmentRegistry, new: Callable[[], Any], opened: list[Any], script: list[Step], place: int
) -> list[str]:
    where = f"after {place} of {len(script)} calls"
    original = await new()
    for step in script[:place]:
        await _answer(original, step)
    state = await registry.save(original)
    kept = copy.deepcopy(state)
    restored = (await registry.restore(state)).environment
    opened.append(restored)
    if restored is original:
        return [f"{where}: deserialize() must return a new environment (it returned the one that was saved)"]
    found: list[str] = []
    if (again := await registry.save(restored)) != kept:
        found.append(
            f"{where}: the state of the restored environment must be the saved one (got {again}, saved {kept})"
        )
    expected = [await _answer(restored, step) for step in script[place:]]
    if (after := await registry.save(original)) != kept:
        found.append(
            f"{where}: the restored environment must share nothing with the original (its state became {after})"
        )
    if state != kept:
        found.append(f"{where}: the saved state must not change while environments are used (it became {state})")
    answers = [await _answer(original, step) for step in script[place:]]
    for number, (one, other) in enumerate(zip(answers, expected, strict=True), place + 1):
        if one != other:
            found.append(
                f"{where}: the restored environment must answer as the original does (call {number}: {other!r}, "
                f"original {one!r})"
            )
            break
    return found


async def _answer(environment: Any, step: Step) -> Any:
    name, arguments = step
    tools = as_tools(tools_of(environment))
    if name not in tools:
        raise FairtrialError(f"the environment has no tool {name!r}; it has {', '.join(tools) or 'none'}")
    try:
        value = tools[name].fn(**arguments)
        value = await value if inspect.isawaitable(value) else value
        return to_json(value)
    except CodecError as error:
        raise FairtrialError(f"the answer of tool {name!r} must be a JSON value: {error}") from None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
