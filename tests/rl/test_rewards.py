"""Evaluators as rewards of trainers, and prompt files."""

from __future__ import annotations

import json
import logging
import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ConfigurationError, Dataset, EvalSuite, Sample, exact_match
from fairtrial.models import MarkdownSection, PromptTemplate, ScriptedAdapter, prompt_task
from fairtrial.rl import RewardFunction, reward, trl, write_prompts
from tests.rl import reward_suites
from tests.rl.reward_suites import Sum, async_suite, data, suite, tool_suite, turns_suite

ROWS: dict[str, Any] = {"sample_id": ["a", "b", "a"]}
SAID = ["abc", "A?", "abcD"]


@pytest.fixture
def rows(tmp_path: Path) -> list[Any]:
    write_prompts(suite, tmp_path / "train.jsonl")
    return [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]


class TestReward:
    @pytest.mark.proves("R101")
    @pytest.mark.parametrize("chosen", [suite, async_suite])
    def test_a_batch_is_scored_and_an_error_is_never_a_number(
        self, chosen: EvalSuite, caplog: pytest.LogCaptureFixture
    ) -> None:
        function = reward(chosen)
        logged: dict[str, float] = {}
        reward_suites.calls.clear()
        with caplog.at_level(logging.WARNING, "fairtrial.rl"):
            found = function(
                prompts=["p"] * 3, completions=SAID, completion_ids=[[1]] * 3, trainer_state=None,
                log_metric=logged.__setitem__, **ROWS,
            )  # fmt: skip
        assert found == [pytest.approx(1.0), None, pytest.approx((0.75 * 2 + 1) / 3)]
        assert function.failures == 1
        assert "1 of 3 completions have no reward, because the evaluator failed: ValueError" in caplog.text
        assert logged == {"length": 3.5}
        assert sorted(reward_suites.calls) == sorted(SAID)

    def test_the_reward_is_that_of_the_suites_own_run(self) -> None:
        report = suite.run_sync(store="memory:")
        function = reward(suite)
        scored = {result.sample_id: result.score.reward for result in report.results if result.score}
        assert function(completions=["abc", "abc"], sample_id=["a", "b"]) == [scored["a"], scored["b"]]

    def test_messages_are_scored_like_the_texts_in_them(self) -> None:
        said = [[{"role": "assistant", "content": text}] for text in SAID]
        assert reward(suite)(completions=said, **ROWS) == reward(suite)(completions=SAID, **ROWS)

    def test_an_evaluator_of_the_trajectory_sees_the_prompt_and_the_answer(self) -> None:
        function = reward(turns_suite)
        prompt = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
        found = function(
            prompts=[prompt, "y"], completions=[[{"role": "assistant", "content": "z"}], "z"], sample_id=["a", "a"]
        )
        assert found == [1 / 3, 1 / 2]

    @pytest.mark.parametrize("arguments", [{"n": 1, "other": None}, '{"n": 1}', "{"])
    def test_messages_of_tools_become_tool_calls(self, arguments: Any) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        said = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
        ]
        score = reward(tool_suite).score({"sample_id": "a"}, said)
        assert score.passed
        assert not reward(tool_suite).score(data[0], "three").passed

    def test_a_row_carries_its_sample_with_the_types_of_the_dataset(self, rows: list[Any]) -> None:
        function = reward(suite)
        assert function(completions=["abc"], sample=[rows[0]["sample"]]) == [1.0]
        changed = json.dumps({"id": "new", "input": {"left": 7, "right": 1}, "expected": None})
        with pytest.raises(AttributeError, match="left"):  # Without a declared type, JSON stays JSON.
            function.score({"sample": changed}, "abc")

    def test_it_is_pickled_by_its_import_string(self) -> None:
        function = reward(suite, name="letters")
        sent = pickle.dumps(function)
        assert b"tests.rl.reward_suites:suite" in sent
        assert b"Be brief" not in sent
        again = pickle.loads(sent)
        assert isinstance(again, RewardFunction)
        assert (again.__name__, again(completions=SAID, **ROWS)) == ("letters", function(completions=SAID, **ROWS))

    def test_it_works_in_a_spawned_process(self) -> None:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(reward(suite), (["p"], ["abc"]), {"sample_id": ["a"]})
        assert found == [1.0]

    def test_an_evaluator_with_a_dataset_is_a_reward_too(self) -> None:
        function = pickle.loads(pickle.dumps(reward(reward_suites.letters, data)))
        assert function(completions=["abc"], sample_id=["a"]) == [1.0]
        alone = reward(reward_suites.letters)
        assert alone.score(Sample("x", Sum(1, 1)), "abc").reward == 1.0
        with pytest.raises(ConfigurationError, match="cannot be looked up without a dataset"):
            alone(completions=["abc"], sample_id=["a"])

    def test_what_cannot_be_imported_is_refused_at_once(self) -> None:
        local = EvalSuite("local", data, str, exact_match)
        with pytest.raises(ConfigurationError, match="suite 'local' must be a variable at the top level of a module"):
            reward(local)
        with pytest.raises(ConfigurationError, match="the evaluator must be a variable"):
            reward(lambda output, expected: 1.0)
        with pytest.raises(ConfigurationError, match="a suite has a dataset of its own"):
            reward(suite, data)

    @pytest.mark.long
    def test_a_script_is_named_by_its_path(self, tmp_path: Path, child: Callable[..., str]) -> None:
        (tmp_path / "train.py").write_text(
            "import pickle, sys\nfrom fairtrial import *\nfrom fairtrial import rl\n"
            "suite = EvalSuite('s', Dataset.of({'a': 'b'}), str, exact_match)\n"
            "if __name__ == '__main__':\n"
            "    open('reward.pickle', 'wb').write(pickle.dumps(rl.reward(suite)))\n"
        )
        child("import subprocess, sys; subprocess.run([sys.executable, 'train.py'], check=True)")
        said = child(
            "import pickle; f = pickle.loads(open('reward.pickle', 'rb').read())\n"
            "print(f(completions=['b'], sample_id=[f._dataset[0].id]))"
        )
        assert said == "[1.0]"

    @pytest.mark.parametrize("chosen", [suite, async_suite])
    def test_a_batch_without_samples_says_what_to_do(self, chosen: EvalSuite) -> None:
        function = reward(chosen)
        with pytest.raises(ConfigurationError, match=r"column sample or sample_id \(got level\)"):
            function(completions=["x"], level=[1])
        with pytest.raises(ConfigurationError, match="has no sample 'z'"):
            function(completions=["x"], sample_id=["z"])
        with pytest.raises(ConfigurationError, match="completions must be given"):
            function(["x"])
        with pytest.raises(ConfigurationError, match="must have samples as JSON text"):
            function(completions=["x"], sample=["{}"])


class TestTrl:
    """What needs no TRL; `python scripts/peers trainers` trains with it."""

    def test_one_function_is_the_reward_of_the_score(self) -> None:
        training = trl(suite)
        assert training.reward_weights == [1.0]
        (function,) = training.reward_funcs
        assert function(completions=SAID, **ROWS) == reward(suite)(completions=SAID, **ROWS)

    def test_one_function_for_each_metric_scores_each_completion_once_and_the_weights_sum_to_1(self) -> None:
        training = trl(suite, metrics={"letters": 2.0, "sum": 1.0})
        letters, total = pickle.loads(pickle.dumps(training.reward_funcs))
        assert [letters.__name__, total.__name__] == ["letters", "sum"]
        reward_suites.calls.clear()
        first = letters(prompts=["p"] * 3, completions=SAID, **ROWS)
        second = total(prompts=["p"] * 3, completions=SAID, **ROWS)
        assert len(reward_suites.calls) == 3
        assert first == [1.0, None, 0.75]
        pairs = zip(first, second, reward(suite)(completions=SAID, **ROWS), strict=True)
        for one, other, whole in pairs:
            if whole is not None:
                weighted = [value * weight for value, weight in zip((one, other), training.reward_weights, strict=True)]
                assert sum(weighted) == pytest.approx(whole)
        assert letters(completions=["abcD"], sample_id=["a"]) == [0.75]

    def test_other_metrics_than_those_of_the_evaluator_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="weights of metrics must be more than 0"):
            trl(suite, metrics={"letters": 0.0})
        (function,) = trl(suite, metrics={"letters": 1.0}).reward_funcs
        with pytest.raises(ConfigurationError, match="must be the metrics of the evaluator that have a weight"):
            function(completions=["abc"], sample_id=["a"])


class TestWritePrompts:
    def test_the_prompt_is_what_the_task_says_first(self, rows: list[Any]) -> None:
        assert [row["prompt"] for row in rows] == [
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in ("1+2", "0+5")
        ]
        assert [row["sample_id"] for row in rows] == ["a", "b"]
        assert json.loads(rows[1]["sample"]) == {
            "id": "b", "input": asdict(Sum(0, 5)), "expected": "5", "metadata": {"level": 1},
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("format", "keys"),
        [
            ("trl", {"prompt", "sample_id", "sample"}),
            ("verl", {"data_source", "prompt", "reward_model", "extra_info"}),
            ("skyrl", {"data_source", "prompt", "env_class", "reward_spec", "extra_info"}),
            ("openrlhf", {"input", "label"}),
            ("miles", {"prompt", "label", "metadata"}),
            ("areal", {"messages", "sample_id", "sample"}),
            ("messages", {"messages", "sample_id", "sample"}),
        ],
    )
    def test_every_trainer_has_its_columns(self, format: Any, keys: set[str], tmp_path: Path) -> None:
        assert write_prompts(suite, tmp_path / "rows.jsonl", format) == 2
        first, second = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
        assert set(first) == set(second) == keys
        if format == "verl":
            assert first["reward_model"] == {"style": "rule", "ground_truth": "3"}
            assert json.loads(second["extra_info"]["sample"])["id"] == "b"
            assert second["extra_info"]["index"] == 1

    def test_prompt_templates_and_functions_have_prompts_too(self, tmp_path: Path) -> None:
        template = PromptTemplate[str]("demo", "greet", sections=[MarkdownSection("Task", "Greet $name.")])
        names = Dataset.of({"Ann": "hi"})
        greeting = EvalSuite("greet", names, prompt_task(template, ScriptedAdapter(["hi"])), exact_match)
        write_prompts(greeting, tmp_path / "a.jsonl")
        assert "Greet Ann." in json.loads((tmp_path / "a.jsonl").read_text())["prompt"][-1]["content"]
        plain = EvalSuite("plain", names, str, exact_match)
        write_prompts(plain, tmp_path / "b.jsonl")
        assert json.loads((tmp_path / "b.jsonl").read_text())["prompt"] == [{"role": "user", "content": "Ann"}]
        write_prompts(plain, tmp_path / "c.jsonl", prepare_messages=lambda sample: [{"role": "user", "content": "?"}])
        assert json.loads((tmp_path / "c.jsonl").read_text())["prompt"] == [{"role": "user", "content": "?"}]

    def test_an_unknown_format_is_refused_and_nothing_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="format must be one of trl, verl"):
            write_prompts(suite, tmp_path / "x.jsonl", "ppo")  # type: ignore[arg-type]
        assert not (tmp_path / "x.jsonl").exists()
