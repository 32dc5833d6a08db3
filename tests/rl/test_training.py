"""Rollouts in memory, the buffer of prompts, the log of metrics, and the training loop."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import ChatMessage, ConfigurationError, Dataset, Metric, Sample, Score, TrialContext, exact_match
from fairtrial.models import BaseAdapter, ModelCall, ModelReply, ResponseCache, ScriptedAdapter, agent_task
from fairtrial.rl import DataBuffer, MetricLog, Rollout, TrainConfig, advantages, generate_rollouts, rollout, train
from tests.rl.build import Lock, Presser, guess, judge, opened, questions


class Counting(BaseAdapter):
    """Counts its calls, and answers with their number."""

    def __init__(self, cache: ResponseCache | None = None) -> None:
        super().__init__(name="counting", model="policy", cache=cache)
        self.calls = 0

    async def _send(self, call: ModelCall) -> ModelReply:
        self.calls += 1
        return ModelReply(ChatMessage("assistant", str(self.calls)), None, "stop", "policy")


class TestRollout:
    @pytest.mark.proves("R101")
    async def test_samples_become_groups_with_advantages(self) -> None:
        found = await rollout(questions(3), guess, judge, group_size=5, seed=1, advantage="rloo")
        assert [group.sample_id for group in found] == ["q0", "q1", "q2"]
        for group in found:
            assert len(group.rollouts) == 5
            assert list(group.advantages) == advantages(group.rewards, kind="rloo")
        again = await rollout(questions(3), guess, judge, group_size=5, seed=1)
        assert [group.rewards for group in again] == [group.rewards for group in found]

    async def test_seeds_are_new_in_every_call(self) -> None:
        seeds: list[int] = []

        def note(question: str, ctx: TrialContext) -> str:
            seeds.append(ctx.seed)
            return "yes"

        for _ in range(2):
            await rollout(questions(1), note, judge, group_size=2)
        assert len(set(seeds)) == 4

    async def test_the_response_cache_is_not_used_for_the_task(self, tmp_path: Path) -> None:
        adapter = Counting(ResponseCache(tmp_path / "cache.db"))
        task = agent_task(adapter)
        for _ in range(2):
            await rollout(questions(1), task, judge, group_size=3)
        assert adapter.calls == 6
        await adapter.complete("outside")
        await adapter.complete("outside")
        assert adapter.calls == 7

    async def test_a_group_size_below_1_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="group_size must be at least 1"):
            await rollout(questions(1), guess, judge, group_size=0)


class TestGenerateRollouts:
    @pytest.mark.proves("R101", "R99")
    async def test_unscored_rollouts_are_aligned_with_their_samples_and_environments_are_closed(self) -> None:
        Lock.opened = Lock.closed = 0
        samples: list[Sample[str, Any]] = [Sample(f"s{i}", "open it") for i in range(4)]
        found = await generate_rollouts(samples, endpoint=Presser(1), environment_factory=lambda sample: Lock())
        assert [one.sample_id for one in found] == ["s0", "s1", "s2", "s3"]
        assert [(one.reward, one.advantage, dict(one.metrics), one.outcome) for one in found] == [
            (None, None, {}, "unscored")
        ] * 4
        assert {one.status for one in found} == {"terminated"}
        assert all(one.last_reply == "done" for one in found)
        assert all(opened(one.trajectory, samples[0]) in (0.0, 1.0) for one in found)
        assert (Lock.opened, Lock.closed) == (4, 4)

    async def test_a_failed_rollout_keeps_its_place(self) -> None:
        def fragile(given: int) -> str:
            return str(1 // given)

        found = await generate_rollouts([Sample("a", 1), Sample("b", 0), Sample("c", 1)], fragile)
        assert [one.status for one in found] == ["terminated", "failed", "terminated"]
        assert "ZeroDivisionError" in str(found[1].error)
        assert [message.text for message in found[0].messages] == ["1", "1"]

    async def test_a_task_or_an_endpoint_is_needed(self) -> None:
        with pytest.raises(ConfigurationError, match="either a task or an endpoint"):
            await generate_rollouts(questions(1))
        with pytest.raises(ConfigurationError, match="belong to endpoint"):
            await generate_rollouts(questions(1), guess, environment_factory=lambda sample: Lock())


class TestDataBuffer:
    def test_every_epoch_has_every_item_once_in_another_order(self) -> None:
        buffer: DataBuffer[int] = DataBuffer(range(10), seed=1)
        epochs = [buffer.get_prompts(10) for _ in range(3)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert DataBuffer(range(10), seed=1).get_prompts(10) == epochs[0]
        assert DataBuffer[int](range(4), shuffle=False).get_prompts(6) == [0, 1, 2, 3, 0, 1]

    def test_the_last_epoch_ends(self) -> None:
        buffer: DataBuffer[str] = DataBuffer("abc", epochs=2, shuffle=False)
        assert ["".join(buffer.get_prompts(2)) for _ in range(4)] == ["ab", "ca", "bc", ""]
        assert buffer.epoch == 2

    def test_items_given_back_come_first(self) -> None:
        buffer: DataBuffer[str] = DataBuffer("abcd", shuffle=False)
        first = buffer.get_prompts(3)
        buffer.give_back(first[1:])
        assert buffer.get_prompts(4) == ["b", "c", "d", "a"]
        with pytest.raises(ConfigurationError, match="only items of the buffer"):
            buffer.give_back(["z"])

    @given(st.lists(st.integers(1, 7), max_size=8), st.lists(st.integers(1, 7), min_size=1, max_size=8), st.booleans())
    def test_a_saved_buffer_continues_as_if_it_had_never_stopped(
        self, before: list[int], after: list[int], returned: bool
    ) -> None:
        buffer: DataBuffer[int] = DataBuffer(range(5), seed=7)
        for count in before:
            taken = buffer.get_prompts(count)
            if returned:
                buffer.give_back(taken[-1:])
        other: DataBuffer[int] = DataBuffer(range(5), seed=7)
        other.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
        assert [other.get_prompts(count) for count in after] == [buffer.get_prompts(count) for count in after]

    def test_the_state_of_another_buffer_is_refused(self, tmp_path: Path) -> None:
        data = questions(4)
        buffer: DataBuffer[Any] = DataBuffer(data, seed=1)
        buffer.get_prompts(3)
        buffer.save(tmp_path / "buffer.json")
        same: DataBuffer[Any] = DataBuffer(data, seed=1)
        same.load(tmp_path / "buffer.json")
        assert same.get_prompts(2) == buffer.get_prompts(2)
        for other, what in (
            (DataBuffer[Any](questions(5), seed=1), "items"),
            (DataBuffer[Any](data, seed=2), "seed"),
            (DataBuffer[Any](data, seed=1, shuffle=False), "shuffle"),
        ):
            with pytest.raises(ConfigurationError, match=f"the same {what}"):
                other.load(tmp_path / "buffer.json")
        (tmp_path / "buffer.json").write_text("[")
        with pytest.raises(ConfigurationError, match=r"must be a file that DataBuffer\.save wrote"):
            same.load(tmp_path / "buffer.json")
        with pytest.raises(ConfigurationError, match="must be one of a DataBuffer"):
            same.load_state_dict({})

    def test_wrong_arguments_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="at least one item"):
            DataBuffer([])
        with pytest.raises(ConfigurationError, match="epochs must be at least 1"):
            DataBuffer("a", epochs=0)
        with pytest.raises(ConfigurationError, match="number of prompts must be at least 1"):
            DataBuffer("a").get_prompts(0)


class TestMetricLog:
    def test_every_target_gets_every_number(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []
        screen, lines = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdout", screen)
        with MetricLog(tmp_path / "log.jsonl", lines, sys.stdout, lambda *given: seen.append(given)) as log:
            for name, value in (("reward", 1.0), ("score/right", 1.0), ("score/turns", 3.0)):
                log.log_metric(name, value, step=4)
            log.log_metric("loss", float("nan"), step=4)
        assert [entry[:2] for entry in seen[:3]] == [("reward", 1.0), ("score/right", 1.0), ("score/turns", 3.0)]
        rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert rows[2] == {"step": 4, "name": "score/turns", "value": 3.0}
        assert rows[3]["value"] == "nan"
        assert lines.getvalue() == (tmp_path / "log.jsonl").read_text()
        assert screen.getvalue().splitlines()[2] == "step 4  score/turns 3"

    def test_another_target_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="a target of MetricLog must be"):
            MetricLog(3)  # type: ignore[arg-type]


class Bandit:
    """A policy with one number: the probability of the right answer, which training raises."""

    def __init__(self) -> None:
        self.right = 0.3
        self.seen: list[tuple[int, int]] = []

    def task(self, question: Any, ctx: TrialContext) -> str:
        return "yes" if random.Random(ctx.seed).random() < self.right else "no"

    def train_step(self, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> float:
        assert len(rollouts) == len(advantages)
        self.seen.append((len(rollouts), sum(value > 0 for value in advantages)))
        for one, advantage in zip(rollouts, advantages, strict=True):
            sign = 1.0 if one.last_reply == "yes" else -1.0
            self.right = min(0.99, max(0.01, self.right + 0.01 * sign * advantage))
        return 1.0 - self.right


def said_yes(output: str, sample: Sample[Any, Any]) -> Score:
    return Score(metrics=(Metric("yes", float(output == "yes"), weight=1.0), Metric("length", len(output))))


class TestTrain:
    @pytest.mark.proves("R101", "R104", "R139")
    async def test_a_policy_learns_and_every_metric_is_logged(self) -> None:
        bandit, seen = Bandit(), list[Any]()
        config = TrainConfig(num_steps=12, batch_size=3, group_size=6, seed=5)
        log = MetricLog(lambda *given: seen.append(given))
        history = await train(bandit, DataBuffer(["a", "b", "c", "d"]), bandit.task, said_yes, config, log=log)
        assert [row["step"] for row in history] == list(range(12))
        assert history[-1]["mean_reward"] > history[0]["mean_reward"] + 0.3
        assert {(row["rollouts"], row["scored"]) for row in history} == {(18, 18)}
        assert history[0]["loss"] == pytest.approx(1 - bandit.right, abs=1.0)
        names = [name for name, _, step in seen if step == 3]
        assert {name: names.count(name) for name in set(names)} == {
            "reward": 18, "score/yes": 18, "score/length": 18, "loss": 1, "mean_reward": 1,
        }  # fmt: skip

    async def test_a_prompt_without_a_scored_rollout_is_given_back_once(self) -> None:
        tried: list[Any] = []

        def broken(given: Any) -> str:
            tried.append(given["prompt"])
            if given["prompt"] == "bad":
                raise RuntimeError("no")
            return "yes"

        bandit = Bandit()
        buffer = DataBuffer(["bad", "good"], shuffle=False, epochs=1)
        config = TrainConfig(num_steps=9, batch_size=1, group_size=2)
        history = await train(bandit, buffer, broken, said_yes, config)
        assert tried == ["bad"] * 4 + ["good"] * 2
        assert [(row["loss"] is None, row["mean_reward"]) for row in history] == [
            (True, None),
            (True, None),
            (False, 1.0),
        ]
        assert len(bandit.seen) == 1

    async def test_an_interrupted_step_gives_its_prompts_back(self) -> None:
        buffer = DataBuffer(["a", "b", "c", "d"], shuffle=False)
        started = anyio.Event()

        async def slow(given: Any) -> str:
            started.set()
            await anyio.sleep(600)
            return ""

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train, Bandit(), buffer, slow, said_yes, TrainConfig(num_steps=1, batch_size=2))
            await started.wait()
            tasks.cancel_scope.cancel()
        assert buffer.get_prompts(2) == ["a", "b"]

    async def test_a_batch_that_reaches_into_the_next_epoch_has_distinct_samples(self) -> None:
        data: Dataset[int, Any] = Dataset([Sample("a", 1, "1"), Sample("b", 2, "2")])

        class Backend:
            async def train_step(self, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> float:
                self.ids = [one.sample_id for one in rollouts]
                return 0.5

        backend = Backend()
        buffer: DataBuffer[Any] = DataBuffer(data, shuffle=False)
        history = await train(backend, buffer, str, exact_match, TrainConfig(num_steps=1, batch_size=3, group_size=1))
        assert (backend.ids, history[0]["loss"]) == (["a", "b", "a#2"], 0.5)

    def test_wrong_settings_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"TrainConfig\.num_steps must be at least 1"):
            TrainConfig(num_steps=0)
        with pytest.raises(ConfigurationError, match="kind of advantage"):
            TrainConfig(num_steps=1, advantage="x")  # type: ignore[arg-type]


def test_importing_loads_no_trainer(child: Callable[..., str]) -> None:
    said = child(
        "import sys, fairtrial\nbefore = set(sys.modules)\nassert 'fairtrial.rl' not in before\nimport fairtrial.rl\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(roots & {'torch', 'datasets', 'trl', 'verl', 'verifiers', 'transformers', 'openai'}))"
    )
    assert said == "[]"


def test_the_scripted_model_is_a_policy_too() -> None:
    found = anyio.run(lambda: generate_rollouts([Sample("a", "hi")], endpoint=ScriptedAdapter(["hello"])))
    assert found[0].last_reply == "hello"
