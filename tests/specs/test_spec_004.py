"""The fifth specification, block by block: rollouts, rewards, environments, in code of our own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from fairtrial import ChatMessage, ConfigurationError, Metric, Sample, Score, Trajectory, evaluate, evaluate_sync, rl
from fairtrial.data import load_jsonl
from fairtrial.errors import EnvironmentMismatchError
from fairtrial.models import ScriptedAdapter, agent_task
from fairtrial.reports import EvalReport, group_by, summarize
from fairtrial.trials import Environment, EnvironmentRegistry, EvalConfig, EvalResult

BASE = EvalConfig(max_concurrent=2)


def score_fn(trajectory: Trajectory, sample: Sample[Any, Any]) -> Score:
    said = trajectory.messages[-1].text
    return Score(
        metrics=(
            Metric("correct", 1.0 if said == sample.ground_truth else 0.0, weight=1.0),
            Metric("num_turns", len(trajectory.messages), weight=0),
        )
    )


def _samples(path: Path) -> list[Sample[Any, Any]]:
    rows = [{"problem": "3+4", "answer": "7", "level": 1}, {"problem": "9*9", "answer": "81", "level": 2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        Sample(id=str(i), input=row, ground_truth=row["answer"], metadata={"difficulty": row["level"]})
        for i, row in enumerate(load_jsonl(path))
    ]


def _prepare(sample: Sample[Any, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Solve {sample.input['problem']}"}]


@pytest.mark.proves("R102", "R2")
def test_block_75_an_experiment_runs_under_trio_and_is_saved_in_folders_that_did_not_exist(tmp_path: Path) -> None:
    config = replace(BASE, max_samples=2, max_concurrent=1, experiment_name="math_baseline")
    task = agent_task(ScriptedAdapter(["7", "80"]), prepare_messages=_prepare)
    report = trio.run(evaluate, _samples(tmp_path / "rows.jsonl"), task, score_fn, config)
    folder = tmp_path / "outputs" / "evals"
    report.save(folder / config.experiment_name)
    assert report.summary["mean"] == 0.5
    assert EvalReport.load(folder / "math_baseline").summary["mean"] == 0.5


@pytest.mark.proves("R42", "R47", "R153")
def test_block_76_saved_runs_are_loaded_sliced_by_the_samples_metadata_and_searched_for_failures(
    tmp_path: Path,
) -> None:
    task = agent_task(ScriptedAdapter(["7", "80"]), prepare_messages=_prepare)
    config = replace(BASE, max_concurrent=1, experiment_name="math_500_a")
    evaluate_sync(_samples(tmp_path / "rows.jsonl"), task, score_fn, config).save(tmp_path / "runs" / "math_500_a")
    (run,) = [EvalReport.load(path) for path in (tmp_path / "runs").glob("math_500_*")]
    assert run.config["experiment_name"] == "math_500_a"
    levels = group_by(run.results, key=lambda result: result.metadata["difficulty"])
    figures = {level: summarize(results) for level, results in sorted(levels.items())}
    assert {level: (found["mean"], found["n"]) for level, found in figures.items()} == {1: (1.0, 1), 2: (0.0, 1)}
    assert run.summary["mean"] == summarize(run.results)["mean"]
    failures = [result for result in run.results if result.score is not None and result.score.reward < 0.5]
    assert [(result.sample_id, [m.name for m in result.score.metrics]) for result in failures if result.score] == [
        ("1", ["correct", "num_turns"])
    ]
    with pytest.raises(KeyError, match="colour"):
        run.results[0].metadata["colour"]
    assert "difficulty" not in run.results[0].own_metadata  # Its own are those of the execution.


@pytest.mark.proves("R101")
def test_block_77_a_training_loop_takes_prompts_rolls_out_scores_and_steps() -> None:
    class Backend:
        def train_step(self, trajectories: Sequence[rl.Rollout], advantages: Sequence[float | None]) -> float:
            return float(sum(advantage is not None for advantage in advantages))

    async def run_rl_training(backend: Backend, data_buffer: rl.DataBuffer[str], endpoint: Any) -> list[dict[str, Any]]:
        metrics_history = []
        for step in range(2):
            prompt_batch = data_buffer.get_prompts(2)
            samples: list[Sample[Any, Any]] = [
                Sample(id=f"step_{step}_{i}", input={"prompt": p}, ground_truth=None)
                for i, p in enumerate(prompt_batch)
            ]
            rollouts = await rl.generate_rollouts(samples=samples, endpoint=endpoint)
            scores = [score_fn(one.trajectory, sample) for one, sample in zip(rollouts, samples, strict=True)]
            rewards = [score.reward for score in scores]
            for score in scores:
                log.log_metric("reward", score.reward, step=step)
                for metric in score.metrics:
                    log.log_metric(f"score/{metric.name}", metric.value, step=step)
            loss = backend.train_step(rollouts, rl.advantages(rewards))
            metrics_history.append({"step": step, "loss": loss, "mean_reward": sum(rewards) / len(rewards)})
        return metrics_history

    logged: list[tuple[str, float, int]] = []
    log = rl.MetricLog(lambda *given: logged.append(given))
    history = trio.run(run_rl_training, Backend(), rl.DataBuffer(["p", "q"]), ScriptedAdapter(["ok"], repeat=True))
    assert history == [{"step": step, "loss": 2.0, "mean_reward": 0.0} for step in range(2)]
    assert {name for name, _, _ in logged} == {"reward", "score/correct", "score/num_turns"}
    assert [step for name, _, step in logged if name == "reward"] == [0, 0, 1, 1]


@pytest.mark.proves("R125")
def test_block_78_metrics_scores_samples_results_and_reports_are_plain_records(tmp_path: Path) -> None:
    metric = Metric(name="turns", value=12, metadata={"kind": "count"})
    assert (metric.weight, Score(metrics=(metric,)).reward) == (0.0, 0.0)
    sample: Sample[dict[str, Any], str] = Sample(id="1", input={"p": 1}, ground_truth="7", metadata={"level": 3})
    assert sample.expected == "7"
    trajectory = Trajectory((ChatMessage("user", "3+4"), ChatMessage("assistant", "7")))
    score = Score(metrics=(Metric("correct", 1.0, weight=3.0), Metric("style", 0.0, weight=1.0)))
    result: EvalResult = EvalResult(
        sample_id="1", sample=sample, trajectory=trajectory, score=score, metadata={"seconds": 2}
    )
    assert (result.score, result.sample, result.trajectory) == (score, sample, trajectory)
    assert (result.metadata["seconds"], result.metadata["level"]) == (2, 3)
    report = EvalReport.of([result])
    report.save(tmp_path / "new" / "run")
    again = EvalReport.load(tmp_path / "new" / "run")
    assert again.summary["mean"] == 0.75
    assert again.results[0].sample.ground_truth == "7"
    assert again.results[0].trajectory == trajectory


@pytest.mark.proves("R96", "R152")
def test_block_79_prepared_messages_are_records_or_mappings() -> None:
    def prepare(sample: Sample[Any, Any]) -> Sequence[Any]:
        return [ChatMessage("system", "Be brief."), {"role": "user", "content": str(sample.input)}]

    adapter = ScriptedAdapter(["ok"])
    report = evaluate_sync([Sample("1", 7)], agent_task(adapter, prepare_messages=prepare), score_fn, BASE)
    assert [message.role for message in report.results[0].trajectory.messages] == ["system", "user", "assistant"]

    def wrong(sample: Sample[Any, Any]) -> Sequence[Any]:
        return [{"role": "user", "text": "x"}]

    report = evaluate_sync(
        [Sample("1", 7)], agent_task(ScriptedAdapter(["ok"]), prepare_messages=wrong), score_fn, BASE
    )
    assert "a message must be a ChatMessage or a mapping" in str(report.results[0].error)


class Calculator:
    ENV_KIND = "calculator"
    VERSION = "1.2.0"

    def __init__(self) -> None:
        self.history: list[str] = []

    async def serialize(self) -> dict[str, Any]:
        return {"env_kind": self.ENV_KIND, "version": self.VERSION, "history": list(self.history)}

    @staticmethod
    async def deserialize(data: dict[str, Any]) -> Calculator:
        if data["env_kind"] != Calculator.ENV_KIND or not data["version"].startswith("1."):
            raise ConfigurationError("another environment's state")
        restored = Calculator()
        restored.history = data["history"]
        return restored


@pytest.mark.proves("R98")
async def test_blocks_80_81_an_environment_is_known_by_its_methods_and_its_kind_in_either_spelling() -> None:
    environment = Calculator()
    assert isinstance(environment, Environment)
    environment.history.append("3+4")
    registry = EnvironmentRegistry(Calculator)
    state = await registry.save(environment)
    episode = await registry.restore(state)
    assert isinstance(episode.environment, Calculator)
    assert episode.environment.history == ["3+4"]
    with pytest.raises(EnvironmentMismatchError, match=r"version 2\.0\.0"):
        await registry.restore({**state, "version": "2.0.0"})
