"""R98: environments whose state can be saved and restored."""

from __future__ import annotations

from typing import Any, ClassVar

import anyio
import pytest

from fairtrial import ConfigurationError, Environment, Experiment, Sample, TrialContext, evaluate, open_store
from fairtrial.errors import EnvironmentMismatchError
from fairtrial.trials import EnvironmentRegistry, check_state
from fairtrial.trials.environment import close_environment, tools_of


class Notebook:
    env_kind: ClassVar[str] = "notebook"
    version: ClassVar[str] = "2.1"

    def __init__(self, pages: list[Any] | None = None) -> None:
        self.pages = [] if pages is None else pages
        self.closed = 0

    async def serialize(self) -> dict[str, Any]:
        return {"env_kind": self.env_kind, "version": self.version, "pages": self.pages}

    @staticmethod
    async def deserialize(data: dict[str, Any]) -> Notebook:
        return Notebook(data["pages"])

    def tools(self) -> list[Any]:
        return [self.pages.append]

    def close(self) -> None:
        self.closed += 1


class Forgetful(Notebook):
    async def serialize(self) -> dict[str, Any]:
        return {"pages": []}


def saved(pages: list[Any], registry: EnvironmentRegistry | None = None) -> dict[str, Any]:
    return anyio.run((registry or EnvironmentRegistry(Notebook)).save, Notebook(pages))


@pytest.mark.proves("R98")
def test_an_environment_is_restored_by_its_kind_under_a_new_episode_id() -> None:
    registry = EnvironmentRegistry(Notebook)
    assert isinstance(Notebook(), Environment)
    state = saved(["a", b"\xff", float("inf")], registry)
    first, second = anyio.run(registry.restore, state), anyio.run(registry.restore, state)
    assert isinstance(first.environment, Notebook)
    assert first.environment.pages == ["a", b"\xff", float("inf")]
    assert first.episode_id != second.episode_id


@pytest.mark.proves("R98")
def test_saved_states_and_restored_episodes_share_nothing() -> None:
    registry = EnvironmentRegistry(Notebook)
    live = Notebook([["deep"]])
    state = anyio.run(registry.save, live)
    live.pages[0].append("later")
    first, second = anyio.run(registry.restore, state), anyio.run(registry.restore, state)
    assert isinstance(first.environment, Notebook)
    assert isinstance(second.environment, Notebook)
    first.environment.pages[0].append("mine")
    assert second.environment.pages == [["deep"]]
    assert state["pages"] == [["deep"]]


@pytest.mark.proves("R98")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env_kind": "browser"}, r"no environment 'browser' is registered \(registered: notebook\)"),
        ({"env_kind": None}, "no environment None is registered"),
        ({"version": "3.0"}, "written by version 3.0 of environment 'notebook'; version 2.1 cannot read it"),
        ({"version": ""}, "needs 'version' as text"),
        ({"version": 2}, "needs 'version' as text"),
    ],
)
def test_another_kind_or_version_is_refused_by_raising(change: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvironmentMismatchError, match=words):
        anyio.run(EnvironmentRegistry(Notebook).restore, {**saved([]), **change})


@pytest.mark.proves("R98")
def test_a_newer_minor_version_is_read() -> None:
    assert anyio.run(EnvironmentRegistry(Notebook).restore, {**saved(["x"]), "version": "2.9"}).episode_id


@pytest.mark.proves("R98")
def test_state_without_its_kind_or_with_what_cannot_be_stored_is_never_saved() -> None:
    registry = EnvironmentRegistry(Notebook)
    with pytest.raises(EnvironmentMismatchError, match="needs 'env_kind' as text"):
        anyio.run(registry.save, Forgetful())
    with pytest.raises(EnvironmentMismatchError, match=r"cannot be stored: at \$\.pages\[0\]: a builtins\.object"):
        anyio.run(registry.save, Notebook([object()]))
    with pytest.raises(EnvironmentMismatchError, match=r"of environment 'notebook' \(got 'x'\)"):
        check_state({"env_kind": "x", "version": "1"}, env_kind="notebook", version="1")


@pytest.mark.proves("R98")
def test_kinds_are_registered_by_code_once() -> None:
    registry = EnvironmentRegistry()
    assert registry.register(Notebook) is Notebook
    assert registry.register(Notebook) is Notebook

    class Other(Notebook):
        pass

    with pytest.raises(ConfigurationError, match="both Notebook and Other call themselves environment 'notebook'"):
        registry.register(Other)
    for field in ("env_kind", "version"):
        with pytest.raises(ConfigurationError, match=rf"Bad needs '{field}' \(or '{field.upper()}'\) as a class"):
            registry.register(type("Bad", (Notebook,), {field: ""}))
    with pytest.raises(EnvironmentMismatchError, match=r"\(registered: none\)"):
        anyio.run(EnvironmentRegistry().restore, saved([]))


@pytest.mark.proves("R98")
def test_tools_and_close_are_optional_and_close_may_be_async() -> None:
    class Later:
        closed = 0

        async def aclose(self) -> None:
            Later.closed += 1

    book = Notebook()
    tools_of(book)[0]("page")
    anyio.run(close_environment, book)
    anyio.run(close_environment, Later())
    anyio.run(close_environment, object())
    assert (book.pages, book.closed, Later.closed, tools_of(object())) == (["page"], 1, 1, ())


@pytest.mark.proves("R98")
async def test_a_run_goes_on_from_the_states_that_another_run_saved() -> None:
    registry = EnvironmentRegistry(Notebook)

    async def write(state: dict[str, Any], ctx: TrialContext) -> dict[str, Any]:
        episode = await registry.restore(state)
        assert isinstance(episode.environment, Notebook)
        episode.environment.pages.append(f"{ctx.sample.id} in {ctx.experiment.name}")
        return await registry.save(episode.environment)

    def two_pages(output: dict[str, Any], expected: int) -> bool:
        return len(output["pages"]) == expected

    store = open_store("memory:")
    blank = await registry.save(Notebook())
    old = {**blank, "version": "1.0"}
    samples = [Sample("a", blank, 1), Sample("b", blank, 1), Sample("old", old, 1)]
    first = await evaluate(samples, write, two_pages, store=store, experiments=[Experiment("first")])
    assert [result.outcome for result in first.results] == ["scored", "scored", "task_error"]
    assert "EnvironmentMismatchError" in str(first.results[2].error)
    again = [Sample(result.sample_id, result.output, 2) for result in first.results if result.success]
    second = await evaluate(again, write, two_pages, store=store, experiments=[Experiment("second")])
    assert second.pass_rate == 1.0
    assert (await registry.restore(second.results[0].output)).environment.pages == [  # type: ignore[attr-defined]
        "a in first",
        "a in second",
    ]
