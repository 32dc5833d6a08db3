"""Runs written as logs of Inspect. That Inspect itself reads them is checked by `scripts/peers files inspect`."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ChatMessage, Dataset, EvalReport, EvalSuite, Metric, Sample, Score, TokenUsage, open_store
from fairtrial.data.session import PromptExecuted, ToolCall
from fairtrial.errors import MissingExtraError
from fairtrial.integrations.inspect import suite, write_log
from fairtrial.integrations.inspect.tasks import _evaluator
from fairtrial.runs.imported import load_importer, store_run
from fairtrial.trials import EvalConfig, Experiment, TrialContext


def answer(question: str, ctx: TrialContext) -> str:
    if question == "c":
        raise ValueError("too hard")
    ctx.session.record(ChatMessage("user", question))
    ctx.session.record(PromptExecuted(model="m", usage=TokenUsage(10, 5, 2)))
    ctx.session.record(ChatMessage("assistant", "", (ToolCall("look", {"q": question}, "c1"),), reasoning="hm"))
    ctx.session.record(ChatMessage("tool", "found", (), "c1"))
    ctx.session.record(ChatMessage("assistant", question.upper()))
    return question.upper()


def judge(output: str, expected: str) -> Score:
    good = output == expected
    return Score(
        0.9 if good else 0.1, good, "compared", [Metric("words", 3.0), Metric("same", float(good), passed=good)]
    )


def report_of(*experiments: str) -> EvalReport:
    samples = [Sample(f"id/{name}", name, name.upper() if name != "b" else "X", {"n": 1}) for name in "abc"]
    suite = EvalSuite(
        "letters", Dataset(samples, name="letters"), answer, judge,
        experiments=[Experiment(name) for name in experiments or ("baseline",)], config=EvalConfig(repeats=2),
    )  # fmt: skip
    return suite.run_sync(store="memory:")


def test_a_log_that_is_imported_again_has_the_same_figures(tmp_path: Path) -> None:
    report = report_of()
    (path,) = write_log(report.store, report.run, tmp_path / "letters.eval")
    (suite,) = load_importer("inspect").read(path).suites
    store = open_store("memory:")
    run = store_run(store, suite, suite.runs[0], "inspect").run
    before = {(one.sample_id, one.repeat): one for one in report.store.results(report.run.run_id)}
    after = {(one.sample_id, one.repeat): one for one in store.results(run.run_id)}
    assert before.keys() == after.keys()
    assert len(after) == 6
    for key, mine in before.items():
        theirs = after[key]
        assert (theirs.outcome, theirs.passed, theirs.usage) == (mine.outcome, mine.passed, mine.usage)
        assert theirs.trajectory.messages == mine.trajectory.messages or mine.outcome == "task_error"
        if mine.score is not None:
            assert theirs.score is not None
            assert theirs.score.value == mine.score.value
            assert theirs.score.metric("words") == 3.0
            assert theirs.sample.metadata == {"n": 1}
    assert {key[0] for key, one in after.items() if one.outcome == "task_error"} == {"id/c"}
    assert "too hard" in str(after["id/c", 0].error)


def test_a_log_that_is_imported_again_has_its_own_verdicts_and_kinds_of_error(tmp_path: Path) -> None:
    def strict(output: str, expected: str) -> Score:
        if expected == "C":
            raise ValueError("no scale")
        return Score(0.7, passed=False) if expected == "A" else Score(0.3, passed=True)

    data = Dataset([Sample(name, name, name.upper()) for name in "abc"], name="letters")
    report = EvalSuite("strict", data, str.upper, strict).run_sync(store="memory:")
    (path,) = write_log(report.store, report.run, tmp_path / "strict.eval")
    (suite,) = load_importer("inspect").read(path).suites
    store = open_store("memory:")
    stored = store_run(store, suite, suite.runs[0], "inspect")
    after = {one.sample_id: (one.outcome, one.stage, one.passed) for one in store.results(stored.run.run_id)}
    assert after == {"a": ("scored", None, False), "b": ("scored", None, True), "c": ("scorer_error", "score", False)}
    assert EvalReport(store, stored.run).pass_rate == report.pass_rate == 0.5
    assert not any("no verdicts" in remark for remark in suite.runs[0].remarks)


def test_a_log_has_the_members_that_inspect_reads(tmp_path: Path) -> None:
    report = report_of()
    (path,) = write_log(report.store, report.run, tmp_path / "letters.eval")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        header = json.loads(archive.read("header.json"))
        sample = json.loads(archive.read("samples/id/a_epoch_1.json"))
        summaries = json.loads(archive.read("summaries.json"))
    assert names[0] == "_journal/start.json"
    assert names[-2:] == ["summaries.json", "header.json"]
    assert (header["version"], header["status"]) == (2, "success")
    assert header["eval"]["dataset"] == {"name": "letters", "samples": 3, "sample_ids": ["id/a", "id/b", "id/c"]}
    assert header["results"]["completed_samples"] == 4
    figures = {one["name"]: one["metrics"] for one in header["results"]["scores"]}
    assert figures["score"]["pass_rate"]["value"] == 0.5
    assert figures["score"]["mean"]["value"] == pytest.approx(0.5)
    assert sample["model_usage"] == {
        "baseline": {"input_tokens": 8, "output_tokens": 5, "total_tokens": 15, "input_tokens_cache_read": 2}
    }
    assert sample["messages"][1]["tool_calls"][0]["arguments"] == {"q": "a"}
    assert len(summaries) == 6


def test_every_experiment_has_a_log_of_its_own(tmp_path: Path) -> None:
    report = report_of("small", "large")
    paths = write_log(report.store, report.run, tmp_path / "letters.eval")
    assert [path.name for path in paths] == ["letters-small.eval", "letters-large.eval"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letters-large.eval", "letters-small.eval"]


# What the adapter of Inspect does without Inspect. `python scripts/peers files inspect` runs tasks with it.


def scored(scores: dict[str, Any], wanted: str | None = None, error: str | None = None) -> Score:
    values = {name: {"value": value, "answer": None, "explanation": f"by {name}"} for name, value in scores.items()}
    return _evaluator(wanted)({"completion": "x", "scores": values, "scorer_error": error}, None)


def test_the_first_scorer_is_the_value_and_the_others_are_metrics() -> None:
    score = scored({"match": "C", "words": 34, "parts": {"named": 1, "short": "I"}})
    assert (score.value, score.passed, score.reason) == (1.0, True, "by match")
    assert {metric.name: (metric.value, metric.passed) for metric in score.metrics} == {
        "match": (1.0, True), "words": (34.0, None), "parts.named": (1.0, None), "parts.short": (0.0, False)
    }  # fmt: skip


def test_another_scorer_or_a_part_of_one_can_be_the_value() -> None:
    assert scored({"words": 34, "match": "I"}, "match").value == 0.0
    assert scored({"parts": {"a": 0.2, "b": 0.7}}, "parts.b").value == 0.7


@pytest.mark.parametrize(
    ("scores", "wanted", "said"),
    [
        ({"words": 34}, None, r"the score of words must be from 0 to 1 .*got 34"),
        ({"match": None, "other": 1}, "match", r"no score of match \(scores: other, match\)"),
        ({}, None, r"no score of any scorer"),
    ],
)
def test_a_trial_without_a_value_is_a_scorer_error(scores: dict[str, Any], wanted: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scored(scores, wanted)


def test_an_error_of_a_scorer_is_one_of_the_evaluator() -> None:
    with pytest.raises(ValueError, match="KeyError: 'x'"):
        scored({"match": "C"}, error="KeyError: 'x'")


def test_without_inspect_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    monkeypatch.delitem(sys.modules, "fairtrial.integrations.inspect.tasks", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install \"fairtrial\[inspect\]\""):
        suite(object(), model="mockllm/model")
