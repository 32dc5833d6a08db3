"""Files that other tools wrote are imported, and our stored results reproduce the figures that the tools report.

The files are made by `python scripts/peers files`."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from math import fsum
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalReport, EvalResult, PromptExecuted, ToolInvoked, open_store
from fairtrial.errors import DataError
from fairtrial.runs.imported import Import, detect_format, load_importer, merge_suites, store_run
from fairtrial.store.protocol import RunRecord, RunStore

FILES = Path(os.environ.get("FAIRTRIAL_PEER_FILES") or Path(__file__).with_name("files"))
EXACT = 1e-9


@pytest.fixture
def store() -> RunStore:
    return open_store("memory:")


def imported(store: RunStore, path: Path) -> list[RunRecord]:
    """Import a file with the format that is recognized."""
    format = detect_format(path)
    assert format is not None
    found = load_importer(format).read(path)
    return [store_run(store, suite, run, format).run for suite in found.suites for run in suite.runs]


def file_of(tool: str, pattern: str) -> Path:
    (path,) = (FILES / tool).glob(pattern)
    return path


def reported(tool: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FILES / tool / "reported.json").read_text())
    return found


def mean_of_samples(results: Iterable[EvalResult], metric: str) -> float:
    """The mean over samples of the mean over repeats, as Inspect reduces epochs."""
    by_sample: dict[str, list[float]] = {}
    for result in results:
        if result.score is not None and (value := result.score.metric(metric)) is not None:
            by_sample.setdefault(result.sample_id, []).append(value)
    means = [fsum(values) / len(values) for values in by_sample.values()]
    return fsum(means) / len(means)


def mean_of_trials(results: Iterable[EvalResult], metric: str) -> float:
    found = [result.score.metric(metric) for result in results if result.score is not None]
    values = [value for value in found if value is not None]
    return fsum(values) / len(values)


@pytest.mark.parametrize(
    ("path", "format"),
    [
        ("inspect/forecast.eval", "inspect"),
        ("inspect/short.json", "inspect"),
        ("promptfoo/results.json", "promptfoo"),
        ("lm-eval", "lm-eval"),
        ("pydantic-evals/report.json", "pydantic-evals"),
    ],
)
def test_the_format_of_a_file_is_recognized(path: str, format: str) -> None:
    assert detect_format(FILES / path) == format


@pytest.mark.proves("R144")
@pytest.mark.parametrize("name", ["forecast.eval", "short.json"])
def test_means_of_an_inspect_log_are_reproduced(store: RunStore, name: str) -> None:
    (run,) = imported(store, FILES / "inspect" / name)
    results = list(store.results(run.run_id))
    theirs = {key: value for key, value in reported("inspect")[name].items() if not key.endswith("/stderr")}
    assert theirs
    for key, value in theirs.items():
        scorer = key.partition("/")[0]
        metric = f"parts.{scorer}" if scorer in ("named", "short") else scorer
        assert mean_of_samples(results, metric) == pytest.approx(value, abs=EXACT)
    assert run.noted.imported is not None
    assert run.noted.imported.origin["reported"] == reported("inspect")[name]


def test_epochs_errors_and_unscored_samples_of_an_inspect_log(store: RunStore) -> None:
    (run,) = imported(store, FILES / "inspect" / "forecast.eval")
    results = {(result.sample_id, result.repeat): result for result in store.results(run.run_id)}
    assert (run.suite, run.experiments, run.repeats, len(results)) == ("forecast", ("mockllm-model",), 2, 10)
    failed = {key for key, result in results.items() if result.outcome == "task_error"}
    assert failed == {("Bergen", 1), ("Quito", 0), ("Quito", 1)}
    assert "no forecast for Bergen" in str(results["Bergen", 1].error)
    lima, oslo = results["Lima", 0].score, results["Oslo", 0].score
    assert lima is not None
    assert oslo is not None
    assert lima.metric("sometimes") is None  # NaN.
    assert lima.value == 1.0
    # Outside 0 to 1: a number without a verdict, and not the value.
    (words,) = (metric for metric in oslo.metrics if metric.name == "words")
    assert (words.value, words.passed, words.higher_is_better) == (34.0, None, None)
    assert (oslo.value, oslo.passed) == (1.0, True)
    part = EvalReport(store, run)["mockllm-model"]
    assert (part.planned, part.successful) == (10, 7)
    assert run.noted.imported is not None
    assert any("3 samples ended with an error" in remark for remark in run.noted.imported.remarks)


def test_the_conversation_of_an_inspect_log_has_its_long_texts_and_tool_calls(store: RunStore) -> None:
    (run,) = imported(store, FILES / "inspect" / "forecast.eval")
    result = next(one for one in store.results(run.run_id) if (one.sample_id, one.repeat) == ("Oslo", 0))
    messages = result.trajectory.messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[0].text.count("Think.") == 40
    assert "attachment://" not in "".join(message.text for message in messages)
    assert messages[1].tool_calls[0].arguments == {"city": "Oslo"}
    (call,) = result.session[ToolInvoked].all()
    assert (call.name, call.params, call.failed) == ("weather", {"city": "Oslo"}, False)
    assert str(call.result).startswith("snow")
    assert [event.usage.input_tokens for event in result.session[PromptExecuted].all() if event.usage] == [43, 43]
    assert (result.usage.input_tokens, result.usage.output_tokens, result.usage.cached_tokens) == (86, 14, 6)
    assert str(result.output).startswith("Expect snow in Oslo.")
    assert result.sample.metadata == {"north": True}
    assert result.sample.expected == "snow"


def test_an_inspect_log_is_the_same_as_eval_and_as_json(store: RunStore) -> None:
    (run,) = imported(store, FILES / "inspect" / "short.json")
    results = {result.sample_id: result for result in store.results(run.run_id)}
    assert len(results) == 5
    assert results["Lima"].sample.input == [{"role": "user", "content": "What is the weather in Lima?"}]
    assert results["Oslo"].sample.input.count("Think.") == 40
    assert {name for name, result in results.items() if not result.passed} == {"Cairo"}


@pytest.mark.proves("R144")
def test_counts_and_scores_of_promptfoo_are_reproduced(store: RunStore) -> None:
    path = file_of("promptfoo", "results.json")
    (run,) = imported(store, path)
    theirs = json.loads(path.read_text())["results"]
    report = EvalReport(store, run)
    assert (run.suite, run.repeats, run.dataset_size) == ("capitals-of-the-world", 2, 4)
    assert set(run.experiments) == {"small-brief", "small-question", "large-brief", "large-question"}
    for prompt in theirs["prompts"]:
        name, metrics = f"{prompt['provider']}-{prompt['label']}", prompt["metrics"]
        results = [one for one in store.results(run.run_id) if one.key.experiment == name]
        part = report[name]
        assert sum(one.passed for one in results) == metrics["testPassCount"]
        assert sum(one.outcome == "task_error" for one in results) == metrics["testErrorCount"]
        assert part.planned == len(results) == 8
        scores = [one.score.metric("score") or 0.0 for one in results if one.score is not None]
        assert fsum(scores) == pytest.approx(metrics["score"], abs=EXACT)
        for metric, total in metrics["namedScores"].items():
            found = [
                entry.value for one in results if one.score is not None for entry in one.score.metrics
                if entry.name.startswith(f"{metric}.")
            ]  # fmt: skip
            assert fsum(found) == pytest.approx(total, abs=EXACT)


@pytest.mark.proves("R144")
def test_a_promptfoo_test_that_ended_with_an_error_is_an_error_and_not_a_score(store: RunStore, tmp_path: Path) -> None:
    document = json.loads(file_of("promptfoo", "results.json").read_text())
    rows = document["results"]["results"]
    rows[0] |= {"failureReason": 2, "success": False, "score": 0, "error": "the provider is down"}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document))
    (run,) = imported(store, path)
    results = list(store.results(run.run_id))
    failed = [one for one in results if one.outcome == "task_error"]
    assert len(failed) == sum(row["failureReason"] == 2 for row in rows) > 1
    assert all(one.score is None and not one.success for one in failed)
    assert "the provider is down" in {one.error for one in failed}
    assert len(results) == len(rows)


def test_a_promptfoo_score_outside_0_to_1_is_a_metric_and_the_verdict_the_value(store: RunStore) -> None:
    (run,) = imported(store, file_of("promptfoo", "results.json"))
    japan = [one for one in store.results(run.run_id) if one.sample.input == {"country": "Japan"}]
    assert len(japan) == 8
    for result in japan:
        assert result.score is not None
        assert (result.score.value, result.passed) == (1.0, True)
        assert result.score.metric("score") == len(str(result.output))
    peru = next(one for one in store.results(run.run_id) if one.sample.input == {"country": "Peru"})
    assert peru.score is not None
    assert (peru.score.value, peru.passed, peru.sample.metadata) == (0.75, False, {"continent": "America"})


@pytest.mark.proves("R144")
def test_means_of_lm_eval_are_reproduced(store: RunStore) -> None:
    runs = {run.suite: run for run in imported(store, FILES / "lm-eval")}
    theirs = json.loads(file_of("lm-eval", "results_*.json").read_text())["results"]
    assert set(runs) == {"capitals_choice", "capitals_text"}
    compared = 0
    for task, run in runs.items():
        results = list(store.results(run.run_id))
        assert len(results) == 5
        for name, value in theirs[task].items():
            metric, _, filter = name.partition(",")
            if isinstance(value, float | int) and filter and "_stderr" not in metric:
                stored = metric if filter == "none" else name
                assert mean_of_trials(results, stored) == pytest.approx(value, abs=EXACT)
                compared += 1
    assert compared == 4


def test_answers_of_several_filters_are_one_trial(store: RunStore) -> None:
    (run,) = imported(store, file_of("lm-eval", "samples_capitals_text_*.jsonl"))
    japan = next(one for one in store.results(run.run_id) if one.sample.input["country"] == "Japan")
    assert japan.output == {"strict": "Tokyo, of course", "flexible": "Tokyo"}
    assert japan.score is not None
    assert {metric.name: metric.value for metric in japan.score.metrics} == {
        "exact_match,strict": 0.0, "exact_match,flexible": 1.0
    }  # fmt: skip


@pytest.mark.proves("R144")
def test_averages_of_pydantic_evals_are_reproduced(store: RunStore) -> None:
    (run,) = imported(store, FILES / "pydantic-evals" / "report.json")
    results = list(store.results(run.run_id))
    theirs = reported("pydantic-evals")
    for name, value in {**theirs["scores"], **theirs["metrics"]}.items():
        assert mean_of_trials(results, name) == pytest.approx(value, abs=EXACT)
    assert mean_of_trials(results, "EqualsExpected") == pytest.approx(theirs["assertions"], abs=EXACT)
    scored = [result for result in results if result.outcome == "scored"]
    assert sum(result.passed for result in scored) / len(scored) == pytest.approx(theirs["assertions"], abs=EXACT)


def test_repeats_and_failures_of_pydantic_evals_are_trials(store: RunStore) -> None:
    (run,) = imported(store, FILES / "pydantic-evals" / "report.json")
    results = {(result.sample_id, result.repeat): result for result in store.results(run.run_id)}
    assert (run.repeats, run.dataset_size, len(results)) == (2, 4, 8)
    assert [results["kenya", repeat].outcome for repeat in (0, 1)] == ["task_error", "task_error"]
    peru = results["peru", 1]
    assert peru.score is not None
    assert (peru.passed, peru.score.metric("length"), peru.metadata["labels"]) == (False, 5.0, {"size": "short"})
    assert peru.usage.input_tokens == 11


def test_a_second_import_adds_nothing(store: RunStore) -> None:
    path = FILES / "inspect" / "forecast.eval"
    first, second = imported(store, path), imported(store, path)
    assert [run.run_id for run in first] == [run.run_id for run in second]
    assert len(list(store.runs())) == 1


def test_the_dataset_of_an_import_can_be_loaded(store: RunStore, tmp_path: Path) -> None:
    from fairtrial.runs.imported import write_suite

    (suite,) = load_importer("promptfoo").read(file_of("promptfoo", "results.json")).suites
    ((path, _),) = write_suite(suite, tmp_path)
    assert [sample.input["country"] for sample in Dataset.load(path)] == ["France", "Peru", "Japan", "Kenya"]


# Files of other tools that are cut off, unfinished, empty or unusual.


EVAL = {"eval_id": "e1", "task": "team/quiz", "model": "openai/gpt-5", "dataset": {"name": "quiz"}}


def stored(store: RunStore, format: str, path: Path) -> tuple[RunRecord, list[EvalResult]]:
    (suite,) = load_importer(format).read(path).suites
    (run,) = suite.runs
    record = store_run(store, suite, run, format).run
    return record, list(store.results(record.run_id))


def remarks(run: RunRecord) -> str:
    assert run.noted.imported is not None
    return "\n".join(run.noted.imported.remarks)


def log(path: Path, samples: list[dict[str, Any]], members: Mapping[str, Any] | None = None) -> Path:
    """An .eval file with these samples; by default a finished one."""
    if members is None:
        members = {"header.json": {"version": 2, "status": "success", "eval": EVAL}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for sample in samples:
            archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
        for name, content in members.items():
            archive.writestr(name, json.dumps(content))
    return path


def answered(sample_id: str | int, scores: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    values = {name: {"value": value} for name, value in scores.items()}
    return {
        "id": sample_id,
        "epoch": 1,
        "input": "?",
        "target": "x",
        "messages": [],
        "output": {},
        "scores": values,
        **more,
    }


def test_a_log_that_was_cut_off_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cut.eval"
    path.write_bytes((FILES / "inspect" / "forecast.eval").read_bytes()[:9_000])
    with pytest.raises(DataError, match=r"cut\.eval must be a complete ZIP file"):
        load_importer("inspect").read(path)


def test_a_damaged_member_of_a_log_is_refused_by_name(tmp_path: Path) -> None:
    content = bytearray((FILES / "inspect" / "forecast.eval").read_bytes())
    place = content.index(b"samples/") + 400
    content[place : place + 40] = bytes(40)
    path = tmp_path / "damaged.eval"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged\.eval: samples/.* cannot be read"):
        load_importer("inspect").read(path)


def test_a_member_with_another_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "changed.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("header.json", json.dumps({"version": 2, "status": "success", "eval": EVAL}))
    path.write_bytes(path.read_bytes().replace(b"team/quiz", b"team/quix"))
    with pytest.raises(DataError, match=r"header\.json cannot be read: its checksum differs"):
        load_importer("inspect").read(path)


def test_long_texts_that_a_log_keeps_apart_are_put_back(store: RunStore, tmp_path: Path) -> None:
    name = "86c12ef44f5abdcca317b675a1029843"
    message = {"role": "user", "content": f"attachment://{name}"}
    sample = answered("a", {"m": "C"}, messages=[message], attachments={name: "a long text"})
    sample["input"] = f"attachment://{name}"
    _, (result,) = stored(store, "inspect", log(tmp_path / "a.eval", [sample]))
    assert (result.sample.input, result.trajectory.messages[0].text) == ("a long text", "a long text")


def test_a_log_that_is_still_being_written_is_a_stopped_run(store: RunStore, tmp_path: Path) -> None:
    start = {"_journal/start.json": {"version": 2, "eval": EVAL}}
    run, results = stored(store, "inspect", log(tmp_path / "a.eval", [answered("a", {"m": "C"})], start))
    assert (run.status, run.suite, run.experiments) == ("stopped", "quiz", ("openai-gpt-5",))
    assert run.noted.stopped == "started at the source"
    assert [result.passed for result in results] == [True]


def test_a_log_without_samples_is_left_out_and_says_so(tmp_path: Path) -> None:
    found = load_importer("inspect").read(log(tmp_path / "none.eval", []))
    assert found.suites == ()
    assert found.left_out == ("none.eval: it has no samples (success)",)


def test_words_and_letters_have_the_values_that_inspect_gives_them(store: RunStore, tmp_path: Path) -> None:
    values = {"C": 1, "I": 0, "P": 0.5, "N": 0, "yes": 1, "No": 0, "True": 1, "0.25": 0.25}
    samples = [answered(n, {"m": value}) for n, value in enumerate(values)]
    samples.append(answered("flag", {"m": True}))
    samples.append(answered("word", {"m": "maybe"}))
    _, results = stored(store, "inspect", log(tmp_path / "a.eval", samples))
    found = [None if result.score is None else result.score.value for result in results]
    assert found == [*values.values(), 1.0, None]
    assert results[-1].outcome == "scorer_error"  # Inspect has no number for it: not a score of 0.


def test_a_trial_without_the_score_that_decides_is_unscored_and_keeps_the_others(
    store: RunStore, tmp_path: Path
) -> None:
    samples = [answered("a", {"main": 1, "other": 0.2}), answered("b", {"main": float("nan"), "other": 0.9})]
    run, results = stored(store, "inspect", log(tmp_path / "a.eval", samples))
    assert [result.outcome for result in results] == ["scored", "scorer_error"]
    assert results[1].metadata["scores"] == {"main": None, "other": 0.9}
    assert "1 samples have no score of main" in remarks(run)


def test_scores_that_all_leave_0_to_1_are_metrics_and_no_trial_passes(store: RunStore, tmp_path: Path) -> None:
    samples = [answered("a", {"elo": 1500}), answered("b", {"elo": 0.7})]
    run, results = stored(store, "inspect", log(tmp_path / "a.eval", samples))
    assert [result.passed for result in results] == [False, False]
    assert store.metric_totals(run.run_id)["openai-gpt-5"]["elo"].mean == pytest.approx(750.35)
    assert "no score stays within 0 to 1 (elo)" in remarks(run)


def test_two_logs_of_one_task_are_runs_of_one_suite_that_can_be_compared(store: RunStore, tmp_path: Path) -> None:
    from fairtrial import compare

    first = log(tmp_path / "a.eval", [answered(n, {"m": "C"}) for n in range(4)])
    other = {"header.json": {"version": 2, "status": "success", "eval": {**EVAL, "eval_id": "e2", "model": "m2"}}}
    second = log(tmp_path / "b.eval", [answered(n, {"m": "I" if n else "C"}) for n in range(5)], other)
    importer = load_importer("inspect")
    merged: Import = merge_suites([importer.read(first), importer.read(second)])
    (suite,) = merged.suites
    assert (len(suite.dataset), len(suite.runs)) == (5, 2)
    runs = [store_run(store, suite, run, "inspect").run for run in suite.runs]
    before, after = (EvalReport(store, run)[run.experiments[0]] for run in runs)
    assert "4 samples on both sides" in str(compare(before, after))


def test_a_number_that_is_not_finite_in_samples_of_lm_eval_is_unscored(store: RunStore, tmp_path: Path) -> None:
    rows = [
        {"doc_id": 0, "doc": {"q": 1}, "target": "1", "filter": "none", "metrics": ["acc"], "acc": 1.0},
        {"doc_id": 1, "doc": {"q": 2}, "target": "2", "filter": "none", "metrics": ["acc"], "acc": float("nan")},
    ]
    path = tmp_path / "samples_quiz_2026-11-16T10-00-00.1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, results = stored(store, "lm-eval", path)
    assert [result.outcome for result in results] == ["scored", "scorer_error"]
    assert "results_2026-11-16T10-00-00.1.json" in remarks(run)


def test_a_line_of_lm_eval_that_is_no_sample_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "samples_quiz_2026-11-16T10-00-00.1.jsonl"
    path.write_text('{"doc_id": 0, "metrics": []}\n{"doc_id": 1}\n')
    with pytest.raises(DataError, match=r"jsonl:2: .*'doc_id' and a list 'metrics'"):
        load_importer("lm-eval").read(path)


@pytest.mark.parametrize(
    ("format", "content", "said"),
    [
        ("promptfoo", '{"evalId": "x", "results": {"results": []}}', "must be results of promptfoo"),
        ("promptfoo", "[]", "must contain a JSON object"),
        ("pydantic-evals", '{"name": "x", "cases": []}', "must have cases or failures"),
        ("pydantic-evals", '{"name": "x"}', "it has no list of cases"),
        ("pydantic-evals", '{"name": ', "must be JSON"),
        ("inspect", '{"version": 2, "status": "success", "eval": {}}', "names no task"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(format: str, content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(DataError, match=said):
        load_importer(format).read(path)


def test_two_cases_of_one_name_with_other_inputs_are_refused(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{"name": "a", "inputs": given, "task_duration": 1, "scores": {}} for given in (1, 2)]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"name": "x", "cases": cases, "failures": []}))
    with pytest.raises(DataError, match="different inputs are both named 'a'"):
        load_importer("pydantic-evals").read(path)
