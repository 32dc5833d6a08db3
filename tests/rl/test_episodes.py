"""Episodes behind a trainer's address, and rewards and conversations for other trainers, without any trainer."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ConfigurationError, EvalSuite, Metric, Score, exact_match, rl
from fairtrial.cli.app import invoke
from fairtrial.cli.episode import episode
from fairtrial.integrations.model_server import FaultRule, ModelServer, NotAuthorised
from fairtrial.models import MarkdownSection, PromptTemplate, ScriptedAdapter, prompt_task
from fairtrial.rl.episode import TrainingConversations
from fairtrial.rl.local_model import parse_tool_calls
from fairtrial.rl.trainers import TextGame, split_system, task_row, weighted_metrics
from tests.rl import reward_suites
from tests.rl.test_trl_environments import counting
from tests.rl.trainers import counter_suites, word_suites
from tests.rl.trainers.counter_suites import Counter

SUITE = "tests/rl/trainers/word_suites.py:suite"
CALL = '<tool_call>{"name": "add", "arguments": {"number": %d}}</tool_call>'


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    assert Counter.opened == Counter.closed


@pytest.mark.proves("R104")
def test_an_episode_calls_the_model_of_the_trainer_and_returns_the_reward(tmp_path: Path) -> None:
    rl.write_prompts(word_suites.suite, tmp_path / "train.jsonl", "areal")
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    played = pickle.loads(pickle.dumps(rl.episode(word_suites.suite, model="step-3")))
    with ModelServer() as server:
        url = f"{server.base_url}/v1"
        rewards = {
            row["sample_id"]: asyncio.run(played.run(row, base_url=url, api_key="k", http_client=None)) for row in rows
        }
        assert {request.model for request in server.requests()} == {"step-3"}
        assert server.requests()[0].system == "Obey."
    assert rewards == word_suites.REWARDS


def test_an_episode_with_tools_has_its_environment_closed() -> None:
    with ModelServer(counting) as server:
        playing = rl.episode(counter_suites.suite).play(
            {"extra_info": {"sample_id": "five"}}, base_url=f"{server.base_url}/v1", api_key="k"
        )
        result = asyncio.run(playing)
    assert result == rl.EpisodeResult("five", 1.0, {"right": 1.0, "letters": 1.0, "calls": 1.0}, "terminated")


def test_an_episode_that_fails_has_no_reward() -> None:
    with ModelServer(faults=FaultRule(NotAuthorised())) as server:
        url = f"{server.base_url}/v1"
        result = asyncio.run(rl.episode(word_suites.suite).play({"sample_id": "pear"}, base_url=url, api_key="k"))
        assert asyncio.run(rl.episode(word_suites.suite).run({"sample_id": "pear"}, base_url=url)) is None
    assert (result.reward, result.status) == (None, "failed")
    assert "The key is not valid" in str(result.error)


def test_a_prompt_can_be_an_episode_and_any_other_task_is_refused() -> None:
    prompt = PromptTemplate[str]("echo", sections=[MarkdownSection("Say", "$input")])
    suite = EvalSuite("p", word_suites.data, prompt_task(prompt, ScriptedAdapter(["x"])), word_suites.score)
    with ModelServer() as server:
        sample = next(iter(word_suites.data))
        assert asyncio.run(rl.episode(suite).run(sample, base_url=f"{server.base_url}/v1")) == 0.75
    with pytest.raises(ConfigurationError, match="must be an agent_task or a prompt_task"):
        rl.episode(EvalSuite("plain", word_suites.data, str, exact_match))
    with pytest.raises(ConfigurationError, match=r"must have sample or sample_id \(got prompt\)"):
        asyncio.run(rl.episode(word_suites.suite).run({"prompt": "x"}, base_url="http://127.0.0.1:1/v1"))


class TestCommand:
    def test_it_prints_the_reward(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        with ModelServer() as server:
            url = f"{server.base_url}/v1"
            assert invoke([SUITE, "--sample", "pear", "--base-url", url, "--json"], episode) == 0
            assert json.loads(capsys.readouterr().out) == {
                "format": "fairtrial.episode/1", "sample_id": "pear", "reward": 1.0,
                "metrics": {"correct": 1.0, "brief": 1.0, "length": 8.0}, "status": "terminated", "error": None,
            }  # fmt: skip
            monkeypatch.setenv("OPENAI_BASE_URL", url)
            assert invoke([SUITE, "--sample", "apple"], episode) == 0
        assert capsys.readouterr().out == "apple  reward 0.75  terminated  correct 1  brief 0  length 9\n"

    def test_rewards_go_to_agent_lightning_and_errors_do_not(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        faults = FaultRule(NotAuthorised(), when="apple")
        with ModelServer(faults=faults) as server, ModelServer() as events:
            monkeypatch.setenv("AGL_OPENAI_BASE_URL", f"{server.base_url}/v1")
            monkeypatch.setenv("AGL_EVENT_URL", f"{events.base_url}/_reset")
            assert invoke([SUITE, "--sample", "pear"], episode) == 0
            monkeypatch.setenv("AGL_EVENT_URL", f"{events.base_url}/none")
            assert invoke([SUITE, "--sample", "pear"], episode) == 2
            assert "could not be sent to" in capsys.readouterr().err
            assert invoke([SUITE, "--sample", "apple"], episode) == 4
        said = capsys.readouterr()
        assert said.out.startswith("apple  not scored (failed): ")
        assert "could not be sent" not in said.err

    def test_mistakes_are_explained(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AGL_OPENAI_BASE_URL", "OPENAI_BASE_URL"):
            monkeypatch.delenv(name, raising=False)
        assert invoke([SUITE, "--sample", "pear"], episode) == 2
        assert "pass --base-url" in capsys.readouterr().err
        assert invoke([SUITE, "--sample", "pair", "--base-url", "http://127.0.0.1:1/v1"], episode) == 2
        assert "did you mean 'pear'?" in capsys.readouterr().err


class TestVerl:
    def test_the_reward_is_that_of_the_score_with_fixed_metrics(self, tmp_path: Path) -> None:
        rl.write_prompts(word_suites.suite, tmp_path / "train.jsonl", "verl")
        function = pickle.loads(pickle.dumps(rl.verl_reward(word_suites.suite, metrics=["length", "none"])))
        assert not inspect.iscoroutinefunction(function)
        assert function.__name__ == "compute_score"
        for line in (tmp_path / "train.jsonl").read_text().splitlines():
            row = json.loads(line)
            found = function(
                data_source=row["data_source"],
                solution_str=row["prompt"][-1]["content"],
                ground_truth=row["reward_model"]["ground_truth"],
                extra_info=row["extra_info"],
                reward_router_address=None,
            )
            assert found["score"] == word_suites.REWARDS[row["extra_info"]["sample_id"]]
            assert list(found) == ["score", "length", "none"]
            assert math.isnan(found["none"])

    def test_an_error_is_raised_unless_a_reward_for_it_was_chosen(self) -> None:
        strict = rl.verl_reward(reward_suites.suite)
        with pytest.raises(ValueError, match="questions have no score"):
            strict(solution_str="why?", extra_info={"sample_id": "a"})
        lenient = rl.verl_reward(reward_suites.suite, metrics=["length"], on_error=-1.0)
        found = lenient(solution_str="why?", extra_info={"sample_id": "a"})
        assert found["score"] == -1.0
        assert math.isnan(found["length"])
        with pytest.raises(ConfigurationError, match="extra_info must have sample or sample_id"):
            lenient(solution_str="x", extra_info={"index": 1})
        with pytest.raises(ConfigurationError, match='must not have the name "score"'):
            rl.verl_reward(reward_suites.suite, metrics=["score"])


class TestConversations:
    def test_answers_with_tool_calls_are_observed_and_the_next_is_scored(self) -> None:
        game = TextGame(TrainingConversations(counter_suites.suite), {"sample_id": "six"}, 5, parse_tool_calls)
        game.prompt = [{"role": "user", "content": "Count to six."}]
        first, failed = game.step(CALL % 6), game.step(CALL % -1)
        assert first.observations == [{"role": "tool", "content": "6", "tool_call_id": "call_0"}]
        assert failed.observations[0]["content"] == "Error: ValueError: only numbers of at least 0"
        assert not first.done
        last = game.step("done")
        assert (last.reward, last.done, last.metrics) == (1.0, True, {"right": 1.0, "letters": 1.0, "calls": 2.0})
        assert Counter.opened == Counter.closed
        game.close()

    def test_the_last_turn_is_scored_in_any_case(self) -> None:
        game = TextGame(
            TrainingConversations(counter_suites.suite), {"extra_info": {"sample_id": "five"}}, 1, parse_tool_calls
        )
        taken = game.step(CALL % 5)
        assert (taken.done, taken.reward) == (True, 0.0)
        with pytest.raises(ConfigurationError, match="must have sample or sample_id"):
            TextGame(TrainingConversations(counter_suites.suite), {}, 1, parse_tool_calls)

    def test_a_conversation_has_the_prompt_and_the_tools_and_is_closed_without_a_score(self) -> None:
        conversation = TrainingConversations(counter_suites.suite).begin(task_row("five"))
        assert conversation.prompt == [{"role": "user", "content": "Count to five."}]
        assert conversation.tools[0]["function"]["name"] == "add"
        conversation.close()
        conversation.close()
        assert conversation.score is None
        sample = next(iter(word_suites.data))
        spoken = TrainingConversations(word_suites.suite).begin(task_row(sample))
        assert spoken.finish("apple").reward == 1.0
        assert task_row({"sample_id": "x"}) == {"sample_id": "x"}


def test_weights_for_verifiers_sum_to_one() -> None:
    score = Score(metrics=(Metric("a", 0.5, 3.0), Metric("b", 1.0, 1.0), Metric("n", 7.0)))
    found = weighted_metrics(score)
    assert found == [("a", 0.5, 0.75), ("b", 1.0, 0.25), ("n", 7.0, 0.0)]
    assert sum(value * weight for _, value, weight in found) == score.reward
    assert weighted_metrics(Score(0.3)) == [("reward", 0.3, 1.0)]
    chat: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert split_system(chat) == ("s", "u")
    assert split_system(chat[1:] * 2) == (None, chat[1:] * 2)
