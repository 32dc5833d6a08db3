"""Forking trials at any turn, the values of turns, and the check of environments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import pytest

from fairtrial import ConfigurationError, Dataset, EvalReport, EvalResult, EvalSuite, Sample, current_trial, exact_match
from fairtrial.base.sync_bridge import call_sync
from fairtrial.models import ScriptedAdapter, agent_task
from fairtrial.rl import checkpoints, fork, groups, turn_values
from fairtrial.testing import check_environment
from fairtrial.trials import EnvironmentRegistry, EnvironmentSaved, EvalConfig
from tests.rl.build import Lock, Presser, opened

registry = EnvironmentRegistry(Lock)
data: Dataset[str, Any] = Dataset([Sample("s", "open it")])


def lock_suite(seed: int = 4, *, right: float = 0.6, **settings: Any) -> EvalSuite:
    agent = agent_task(
        Presser(seed, right),
        environment_factory=lambda sample: Lock(),
        environments=registry,
        checkpoints=True,
        system="You open locks.",
        **settings,
    )
    return EvalSuite("locks", data, agent, opened, config=EvalConfig(max_concurrent=50), version="1")


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    """Every environment that a test opens is closed."""
    Lock.opened = Lock.closed = 0
    yield
    assert Lock.opened == Lock.closed


@pytest.fixture
async def parent() -> EvalResult:
    return (await lock_suite(right=1.0).run(store="memory:")).results[0]


class TestCheckpoints:
    @pytest.mark.proves("R98")
    async def test_messages_and_state_are_recorded_before_every_model_call(self, parent: EvalResult) -> None:
        found = checkpoints(parent)
        assert [place.turn for place in found] == [0, 1, 2, 3]
        assert [list(place.state["pins"]) for place in found] == [[], [1], [1, 2], [1, 2, 3]]
        assert [len(place.messages) for place in found] == [2, 4, 6, 8]
        assert found[2].messages == parent.trajectory.messages[:6]
        last = parent.session[EnvironmentSaved].latest()
        assert last is not None
        assert last.turn is None

    async def test_an_agent_without_checkpoints_records_none(self) -> None:
        agent = agent_task(Presser(), environment_factory=lambda sample: Lock(), environments=registry)
        suite = EvalSuite("plain", data, agent, opened, version="1")
        result = (await suite.run(store="memory:")).results[0]
        assert len(result.session[EnvironmentSaved].all()) == 1
        with pytest.raises(
            ConfigurationError, match=r"has no checkpoints\nrun it with agent_task\(\.\.\., checkpoints"
        ):
            checkpoints(result)

    def test_checkpoints_need_a_registry_if_there_is_an_environment(self) -> None:
        with pytest.raises(ConfigurationError, match="checkpoints need environments=EnvironmentRegistry"):
            agent_task(Presser(), environment_factory=lambda sample: Lock(), checkpoints=True)

    async def test_a_redacted_trial_cannot_be_continued(self, parent: EvalResult) -> None:
        with pytest.raises(ConfigurationError, match="secrets were replaced"):
            checkpoints(replace(parent, redacted_parts=("transcript",)))


class TestFork:
    @pytest.mark.proves("R98", "R99")
    async def test_children_continue_from_the_turn_and_the_parent_is_untouched(self, parent: EvalResult) -> None:
        before = parent.trajectory.messages
        report = await fork(parent, lock_suite(), turn=2, n=20)
        (group,) = groups(report)
        assert (group.sample_id, len(group.rollouts)) == ("s@2", 20)
        assert all(one.messages[:6] == before[:6] for one in group.rollouts)
        assert {len(one.messages) for one in group.rollouts} == {9}
        assert set(group.rewards) == {0.0, 1.0}  # The last pin is right or wrong.
        assert report.run.tags == {"fork_run": parent.key.run_id, "fork_sample": "s", "fork_repeat": "0"}
        assert parent.trajectory.messages == before
        assert (Lock.opened, Lock.closed) == (21, 21)

    async def test_a_child_has_what_is_left_of_the_turns(self) -> None:
        suite = lock_suite(right=1.0, max_turns=3)
        parent = (await suite.run(store="memory:")).results[0]
        assert [place.turn for place in checkpoints(parent)] == [0, 1, 2]
        (group,) = groups(await fork(parent, suite, turn=2, n=2))
        assert [one.status for one in group.rollouts] == ["truncated", "truncated"]
        assert [len(one.messages) for one in group.rollouts] == [8, 8]

    async def test_an_agent_without_an_environment_can_be_forked_too(self) -> None:
        agent = agent_task(ScriptedAdapter(["yes"], repeat=True), checkpoints=True)
        suite = EvalSuite("talk", Dataset([Sample("q", "well?", "yes")]), agent, exact_match, version="1")
        result = (await suite.run(store="memory:")).results[0]
        report = await fork(result, suite, turn=0, n=3)
        assert (report.total, report.pass_rate) == (3, 1.0)

    async def test_a_forked_child_can_be_forked_again(self, parent: EvalResult) -> None:
        suite = lock_suite(right=1.0)
        child = (await fork(parent, suite, turn=1, n=1)).results[0]
        assert [place.turn for place in checkpoints(child)] == [0, 1, 2]
        assert [list(place.state["pins"]) for place in checkpoints(child)] == [[1], [1, 2], [1, 2, 3]]

    async def test_mistakes_are_sentences(self, parent: EvalResult) -> None:
        with pytest.raises(ConfigurationError, match=r"turn must be one of 0, 1, 2, 3 .*got \[7\]"):
            await fork(parent, lock_suite(), turn=7)
        with pytest.raises(ConfigurationError, match="n must be at least 1"):
            await fork(parent, lock_suite(), turn=0, n=0)
        with pytest.raises(ConfigurationError, match=r"must be an agent_task\(\.\.\., checkpoints=True\)"):
            await fork(parent, EvalSuite("other", data, str, opened), turn=0)
        with pytest.raises(ConfigurationError, match="has no experiment 'x'; it has baseline"):
            await fork(replace(parent, key=parent.key._replace(experiment="x")), lock_suite(), turn=0)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
class TestTurnValues:
    @pytest.mark.proves("R98", "R99")
    @pytest.mark.parametrize("n", [40, pytest.param(200, marks=pytest.mark.long)])
    async def test_values_of_a_known_chain_are_within_their_intervals(self, parent: EvalResult, n: int) -> None:
        """Three pins, each right with 0.6; with 200 rollouts of each turn, 800 children of one trial."""
        found = await turn_values(parent, lock_suite(seed=11), n=n, level=0.999)
        truth = [0.6**3, 0.6**2, 0.6, 1.0]
        for value, expected in zip(found, truth, strict=True):
            assert value.value.interval is not None
            assert value.value.interval.contains(expected), (value.turn, value.value.mean, expected)
            assert value.value.n == n
        credits = [value.credit for value in found]
        assert sum(credit for credit in credits if credit is not None) == pytest.approx(1 - (found[0].value.mean or 0))
        assert (Lock.opened, Lock.closed) == (4 * n + 1, 4 * n + 1)

    async def test_the_turn_that_lost_the_game_has_the_lowest_credit(self) -> None:
        class Wrong(Presser):
            """Presses the second pin wrong."""

            async def _send(self, call: Any) -> Any:
                second = sum(message.role == "tool" for message in call.messages) == 1
                self._right = 0.0 if second else 1.0
                return await super()._send(call)

        agent = agent_task(Wrong(), environment_factory=lambda sample: Lock(), environments=registry, checkpoints=True)
        lost = (await EvalSuite("locks", data, agent, opened, version="1").run(store="memory:")).results[0]
        assert lost.score is not None
        assert lost.score.reward == 0.0
        found = await turn_values(lost, lock_suite(right=0.9, seed=3), n=20)
        worst = min(found, key=lambda value: value.credit or 0.0)
        assert (worst.turn, worst.summary) == (1, "press(pin=9)")
        assert str(worst).startswith("turn 1  value ")
        assert "credit -" in str(worst)


class Shared(Lock):
    """Copies share their pins."""

    last: list[int] = []

    async def serialize(self) -> dict[str, Any]:
        type(self).last = self.pins
        return await super().serialize()

    @classmethod
    async def deserialize(cls, data: dict[str, Any]) -> Self:
        made = cls()
        made.pins = cls.last
        return made


class Forgetful(Lock):
    """Restores to the state it was saved in, and then answers differently."""

    def __init__(self, pins: Sequence[int] = ()) -> None:
        super().__init__(pins)
        self.fresh = True

    @classmethod
    async def deserialize(cls, data: dict[str, Any]) -> Self:
        made = cls(data["pins"])
        made.fresh = False
        return made

    def tools(self) -> list[Any]:
        def press(pin: int) -> str:
            """Press a pin."""
            self.pins.append(pin)
            return "click" if self.fresh else "clunk"

        return [press]


class Unversioned(Lock):
    async def serialize(self) -> dict[str, Any]:
        return {"env_kind": self.env_kind, "pins": list(self.pins)}


class ClosesOnce(Lock):
    open = True

    def close(self) -> None:
        super().close()
        if not self.open:
            type(self).closed -= 1
            raise RuntimeError("already closed")
        self.open = False


class TestCheckEnvironment:
    @pytest.fixture(autouse=True)
    def counted(self) -> None:
        """The check closes environments twice."""

    SCRIPT = [("press", {"pin": 1}), ("press", {"pin": 5}), ("press", {"pin": 3})]

    @pytest.mark.proves("R98")
    def test_a_sound_environment_passes_and_is_closed(self) -> None:
        Lock.opened = Lock.closed = 0
        check_environment(Lock, self.SCRIPT)

        async def later() -> Lock:
            return Lock()

        check_environment(later, self.SCRIPT[:1])
        assert Lock.opened > 0
        assert Lock.closed == 2 * Lock.opened

    @pytest.mark.parametrize(
        ("kind", "problem"),
        [
            (Shared, "must share nothing with the original"),
            (Forgetful, "must answer as the original does"),
            (Unversioned, "environment state needs 'version' as text"),
            (ClosesOnce, r"close\(\) must not raise \(the second call raised RuntimeError: already closed\)"),
        ],
    )
    def test_defects_are_found(self, kind: Any, problem: str) -> None:
        with pytest.raises(AssertionError, match=problem):
            check_environment(kind, self.SCRIPT)

    def test_an_unknown_tool_of_the_script_is_named(self) -> None:
        with pytest.raises(AssertionError, match="the environment has no tool 'pull'; it has press"):
            check_environment(Lock, [("pull", {})])


def test_the_context_of_a_trial_is_that_of_the_child() -> None:
    """A child sees its own sample, so seeds of children differ."""
    seeds: list[int] = []

    def note(messages: Any) -> str:
        seeds.append(current_trial().seed)
        return "yes"

    agent = agent_task(ScriptedAdapter(note), checkpoints=True)
    suite = EvalSuite("talk", Dataset([Sample("q", "well?", "yes")]), agent, exact_match, version="1")
    report: EvalReport = suite.run_sync(store="memory:")
    call_sync(lambda: fork(report.results[0], suite, turn=0, n=4))
    assert len(set(seeds)) == 5
