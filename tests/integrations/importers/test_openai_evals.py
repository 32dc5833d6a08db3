"""Saved OpenAI Evals become ordinary runs with the same numbers, datasets and evaluators."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import fsum
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalReport, EvalResult, EvalSuite, compare, exact_match, open_store, task
from fairtrial.base.plugins import plugin_names
from fairtrial.errors import DataError, DatasetError
from fairtrial.integrations.importers.openai_evals import OpenAIEvals
from fairtrial.integrations.model_server import HostedEvals
from fairtrial.runs.imported import detect_format, load_importer, store_run, write_suite
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.suites.loading import load_suite
from tests.integrations.importers.project import (
    CRITERIA,
    EXACT,
    NAMES,
    ROWS,
    TONE,
    answers,
    eval_of,
    item_of,
    large_project,
    message,
    result_of,
    run_of,
    sample_of,
    small_project,
    write_archive,
    write_lines,
)


@pytest.fixture
def store() -> RunStore:
    return open_store("memory:")


def imported(project: HostedEvals, store: RunStore, folder: Path) -> list[RunRecord]:
    found = OpenAIEvals().read(write_archive(project, folder))
    return [store_run(store, suite, run, "openai-evals").run for suite in found.suites for run in suite.runs]


def one_run(items: list[dict[str, Any]], *, criteria: list[dict[str, Any]] = CRITERIA, **changes: Any) -> HostedEvals:
    return HostedEvals(
        evals=[eval_of("eval_capitals", "Capitals", criteria)],
        runs=[run_of("evalrun_a", items, **changes)],
        items={"evalrun_a": items},
    )


def results(store: RunStore, run: RunRecord) -> dict[str, EvalResult]:
    return {f"{result.sample_id}#{result.repeat}": result for result in store.results(run.run_id)}


def origin_of(run: RunRecord) -> dict[str, Any]:
    origin: Any = run.notes["imported"]
    return dict(origin)


def means(items: list[dict[str, Any]]) -> dict[str, float]:
    """The mean score of every criterion, as the source has it."""
    scores: dict[str, list[float]] = {}
    for item in items:
        for result in item["results"]:
            if item["status"] in ("pass", "fail") and result["score"] is not None:
                scores.setdefault(result["name"], []).append(result["score"])
    return {name: fsum(found) / len(found) for name, found in scores.items()}


def test_imported_means_and_counts_are_those_of_the_source(store: RunStore, tmp_path: Path) -> None:
    project = large_project(count=47)
    for number, items in enumerate(project.items.values()):
        for place, item in enumerate(items):
            item["results"][2]["score"] = 1 + (place * 0.37 + number) % 6  # Scores with many digits.
    runs = imported(project, store, tmp_path / "saved")
    assert len(runs) == len(project.runs) == 4
    for run in runs:
        source = run.tags["run"]
        items = project.items[source]
        report = EvalReport(store, run)
        (part,) = (report[name] for name in report.experiments)
        counts = next(one["result_counts"] for one in project.runs if one["id"] == source)
        assert (run.status, part.planned, part.successful) == ("finished", 47, 47)
        assert part.pass_rate == pytest.approx(counts["passed"] / counts["total"], abs=1e-9)
        theirs = means(items)
        ours = {name: totals.mean for name, totals in store.metric_totals(run.run_id)[part.name].items()}
        assert ours["exact"] == pytest.approx(theirs[EXACT], abs=1e-9)
        if run.suite == "capitals":
            assert ours["names it"] == pytest.approx(theirs[NAMES], abs=1e-9)
            assert ours["tone.score"] == pytest.approx(theirs[TONE], abs=1e-9)


def test_a_score_outside_0_to_1_is_a_metric_and_only_its_verdict_counts(store: RunStore, tmp_path: Path) -> None:
    (run, _) = imported(small_project(), store, tmp_path / "saved")
    found = results(store, run)
    score = found["2#0"].score
    assert score is not None
    assert {metric.name: metric.value for metric in score.metrics} == {
        "exact": 0.0, "names it": 1.0, "tone": 1.0, "tone.score": 7.0
    }  # fmt: skip
    assert not score.passed
    assert score.value == pytest.approx(2 / 3)


def test_a_criterion_that_once_leaves_0_to_1_is_read_the_same_in_all_runs(store: RunStore, tmp_path: Path) -> None:
    project = small_project()
    for item in (*project.items["evalrun_a"], *project.items["evalrun_b"]):
        del item["results"][1:]
        item["results"][0]["score"] = 0.5
    project.items["evalrun_b"][3]["results"][0]["score"] = 1.5
    for run in imported(project, store, tmp_path / "saved"):
        names = {metric.name for result in store.results(run.run_id) for metric in result.score.metrics}  # type: ignore[union-attr]
        assert names == {"exact", "exact.score"}


def test_several_items_of_one_row_are_repeats(store: RunStore, tmp_path: Path) -> None:
    items = [item_of("evalrun_a", number, "Lima", part=part) for number in range(3) for part in range(2)]
    (run,) = imported(one_run(items[:5], data_source={}), store, tmp_path / "saved")
    assert (run.dataset_size, run.repeats, run.planned) == (3, 2, 6)
    assert list(results(store, run)) == ["0#0", "0#1", "1#0", "1#1", "2#0"]


def test_errors_stay_errors_and_are_never_zero(store: RunStore, tmp_path: Path) -> None:
    failed_sample = {"error": {"code": "server_error", "message": "The model is overloaded"}, "output": []}
    grader_error = {"sample": {"error": {"code": "grader", "message": "no verdict"}}}
    broken = result_of(EXACT, None, False, **grader_error)
    items = [
        item_of("evalrun_a", 0, "Paris"),
        item_of("evalrun_a", 1, "", status="error", results=[], sample=sample_of("Japan", "", **failed_sample)),
        item_of("evalrun_a", 2, "", status="error", results=[], sample=None),
        item_of("evalrun_a", 3, "Rome", status="fail", results=[broken]),
        item_of("evalrun_a", 4, "Nairobi", status="error"),
        item_of("evalrun_a", 5, "Santiago", status="fail", sample=sample_of("Chile", "", **failed_sample)),
        item_of("evalrun_a", 6, "Cairo", status="strange"),
        item_of("evalrun_a", 7, "Madrid", status="in_progress", results=[]),
    ]
    (run,) = imported(one_run(items), store, tmp_path / "saved")
    found = {name: (one.outcome, one.error, one.score is None) for name, one in results(store, run).items()}
    assert found == {
        "0#0": ("scored", None, False),
        "1#0": ("task_error", "server_error: The model is overloaded", True),
        "2#0": ("task_error", "the source recorded an error and no message", True),
        "3#0": ("scorer_error", "exact: grader: no verdict", True),
        "4#0": ("scorer_error", "the source recorded an error and no message", True),
        "5#0": ("task_error", "server_error: The model is overloaded", True),
        "6#0": ("scorer_error", "status 'strange' without a verdict", True),
    }
    assert EvalReport(store, run)["gpt-4.1-mini"].errors == {"task_error": 3, "scorer_error": 3}
    remarks = origin_of(run)["remarks"]
    assert "1 output items were not finished" in remarks
    assert "2 rows of the data source have no output item" in remarks
    assert remarks[-1].startswith("the source counts 0 passed, 3 failed, 3 errored; its output items say")


def test_a_result_without_a_score_is_left_out_of_the_mean(store: RunStore, tmp_path: Path) -> None:
    items = answers("evalrun_a", {})
    items[3]["results"][1] |= {"score": None, "passed": False}
    items[4] |= {"results": [], "status": "pass"}
    items[5] |= {"results": [result_of(EXACT, None, None)], "status": "fail", "sample": None}
    (run,) = imported(one_run(items), store, tmp_path / "saved")
    totals = store.metric_totals(run.run_id)["gpt-4.1-mini"]["names it"]
    assert (totals.trials, totals.mean) == (7, 1.0)
    found = results(store, run)
    assert found["4#0"].score is not None
    assert (found["4#0"].score.value, found["4#0"].score.metrics) == (1.0, ())
    assert found["5#0"].score is not None
    assert (found["5#0"].score.value, found["5#0"].output) == (0.0, None)
    assert "2 grader results have no score" in origin_of(run)["remarks"]


def test_rows_without_an_output_item_are_planned_and_not_run(store: RunStore, tmp_path: Path) -> None:
    items = answers("evalrun_a", {}, count=8)
    project = one_run(items, data_source={"type": "completions", "source": {"type": "file_id", "id": "file-rows"}})
    project.files["file-rows"] = "".join(json.dumps(row) + "\n" for row in ROWS)
    (run,) = imported(project, store, tmp_path / "saved")
    part = EvalReport(store, run)["gpt-4.1-mini"]
    assert (run.dataset_size, part.planned, part.successful) == (10, 10, 8)
    assert origin_of(run)["items_without_output"] == 2


def test_numbers_that_mean_other_rows_in_another_run_do_not_pair_different_questions(
    store: RunStore, tmp_path: Path
) -> None:
    project = small_project()
    for number, item in enumerate(project.items["evalrun_b"]):
        item["datasource_item_id"] = 9 - number
    runs = imported(project, store, tmp_path / "saved")
    first, second = ({r.sample_id: r.sample.input["country"] for r in store.results(run.run_id)} for run in runs)
    assert first == second
    for result in store.results(runs[1].run_id):
        country, said = result.sample.input["country"], result.output
        assert (country, "Valparaiso" if country == "Chile" else result.sample.expected) == (country, said)


def test_a_run_keeps_its_origin_messages_tokens_and_times(store: RunStore, tmp_path: Path) -> None:
    (run, _) = imported(small_project(), store, tmp_path / "saved")
    assert run.tags == {"origin": "openai-evals", "eval": "eval_capitals", "run": "evalrun_a"}
    origin = origin_of(run)
    assert (origin["run_name"], origin["counts"]["total"]) == ("Run evalrun_a", 10)
    assert origin["metadata"] == {"team": "maps"}
    assert (run.created_at, run.finished_at) == (1_790_000_000, 1_790_000_011)
    result = results(store, run)["0#0"]
    assert [(said.role, said.text) for said in result.trajectory.messages] == [
        ("user", "What is the capital of France?"), ("assistant", "Paris")
    ]  # fmt: skip
    assert (result.usage.input_tokens, result.usage.output_tokens, result.usage.cached_tokens) == (12, 3, 2)
    assert result.known_latency_ms is None
    assert EvalReport(store, run)["gpt-4.1-mini"].mean_latency_ms is None
    assert "Imported: openai-evals evalrun_a." in str(EvalReport(store, run))


def test_a_second_import_adds_nothing_and_a_changed_run_is_named(store: RunStore, tmp_path: Path) -> None:
    project = small_project()
    imported(project, store, tmp_path / "saved")
    before = [(run.run_id, run.number) for run in store.runs()]
    project.items["evalrun_a"][0]["status"] = "pass"
    (suite,) = OpenAIEvals().read(write_archive(project, tmp_path / "saved")).suites
    states = [store_run(store, suite, run, "openai-evals").state for run in suite.runs]
    assert states == ["changed", "present"]
    assert [(run.run_id, run.number) for run in store.runs()] == before


class StoppedError(Exception):
    """The process ended."""


class Stopping:
    """A store in which an import ends after its results and before its status."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name == "update_run":
            raise StoppedError
        return getattr(self._store, name)


def test_an_import_that_was_interrupted_is_completed(store: RunStore, tmp_path: Path) -> None:
    (suite,) = OpenAIEvals().read(write_archive(small_project(), tmp_path / "saved")).suites
    with pytest.raises(StoppedError):
        store_run(Stopping(store), suite, suite.runs[0], "openai-evals")
    (half,) = store.runs()
    assert half.status == "running"
    whole = store_run(store, suite, suite.runs[0], "openai-evals")
    assert (whole.state, whole.run.run_id, whole.run.status) == ("imported", half.run_id, "finished")
    assert len(results(store, whole.run)) == 10


def test_an_interrupted_import_of_a_source_that_changed_since_starts_again(store: RunStore, tmp_path: Path) -> None:
    old = one_run(answers("evalrun_a", dict.fromkeys(range(10), "old")))
    new = one_run(answers("evalrun_a", dict.fromkeys(range(10), "new")))
    (before,) = OpenAIEvals().read(write_archive(old, tmp_path / "old")).suites
    (after,) = OpenAIEvals().read(write_archive(new, tmp_path / "new")).suites
    with pytest.raises(StoppedError):
        store_run(Stopping(store), before, before.runs[0], "openai-evals")
    (half,) = store.runs()
    assert {result.output for result in results(store, half).values()} == {"old"}
    whole = store_run(store, after, after.runs[0], "openai-evals")
    assert (whole.state, whole.run.run_id, whole.run.status) == ("imported", half.run_id, "finished")
    assert {result.output for result in results(store, whole.run).values()} == {"new"}


@pytest.mark.parametrize("status", ["finished", "running"])
@pytest.mark.parametrize("retry_errors", [False, True])
def test_a_suite_of_the_same_name_never_resumes_an_imported_run(
    store: RunStore, tmp_path: Path, retry_errors: bool, status: Any
) -> None:
    (suite,) = OpenAIEvals().read(write_archive(one_run(answers("evalrun_a", {2: "?"})), tmp_path / "saved")).suites
    run = store_run(store, suite, suite.runs[0], "openai-evals").run
    store.update_run(run.run_id, status=status)

    @task(inline=True)
    def answer(item: dict[str, str]) -> str:
        return "Paris"

    mine = EvalSuite(suite.name, suite.dataset, answer, exact_match)
    report = mine.run_sync(store=store, resume="errors" if retry_errors else "auto")
    assert report.run_id != run.run_id
    assert (report.run.number, report.pass_rate) == (2, 0.1)
    assert results(store, run)["0#0"].output == "Paris"
    assert results(store, run)["1#0"].output == "Tokyo"


def test_an_import_does_not_hide_an_unfinished_run_of_the_suite(store: RunStore, tmp_path: Path) -> None:
    (suite,) = OpenAIEvals().read(write_archive(one_run(answers("evalrun_a", {})), tmp_path / "saved")).suites

    @task(inline=True)
    def answer(item: dict[str, str]) -> str:
        return "Paris"

    mine = EvalSuite(suite.name, suite.dataset, answer, exact_match)
    first = mine.run_sync(store=store)
    store.update_run(first.run_id, status="interrupted")
    store_run(store, suite, suite.runs[0], "openai-evals")
    assert mine.run_sync(store=store).run_id == first.run_id


def test_imported_runs_can_be_compared(store: RunStore, tmp_path: Path) -> None:
    first, second = (EvalReport(store, run) for run in imported(small_project(), store, tmp_path / "saved"))
    comparison = compare(first, second)
    assert "capitals-short-answers@2:gpt-4.1 against capitals-short-answers@1:gpt-4.1-mini" in str(comparison)
    assert "10 samples on both sides" in str(comparison)


def test_the_dataset_is_read_by_dataset_load_and_the_suite_scores_like_the_source(
    store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    criteria = [
        *CRITERIA[:2],
        {**CRITERIA[0], "id": "not-1", "name": "not Lima", "operation": "ne", "reference": "Lima"},
        {**CRITERIA[0], "id": "like-1", "name": "says so", "operation": "like", "input": "<{{sample.output_text}}>",
         "reference": "<{{item.country}}: {{ item.capital }}"},
    ]  # fmt: skip
    items = answers("evalrun_a", {2: "it is LIMA", 3: "Italy: Rome", 4: "nairobi"})
    for item in items:
        said, row = item["sample"]["output"][0]["content"], item["datasource_item"]
        says_so = f"<{row['country']}: {row['capital']}" in f"<{said}>"
        del item["results"][2:]
        item["results"] += [
            result_of("not-1", float(said != "Lima"), said != "Lima"),
            result_of("like-1", float(says_so), says_so),
        ]
        item["status"] = "pass" if all(one["passed"] for one in item["results"]) else "fail"
    project = one_run(items, criteria=criteria)
    (suite,) = OpenAIEvals().read(write_archive(project, tmp_path / "saved")).suites
    run = store_run(store, suite, suite.runs[0], "openai-evals").run
    (data, _), (module, _) = write_suite(suite, tmp_path / "out")
    loaded = Dataset.load(data)
    assert loaded.fingerprint == suite.dataset.fingerprint
    assert [grader.evaluator for grader in suite.graders] == [
        "exact_match", "contains, any case", "exact_match, negated", "contains"
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    again = load_suite(str(module)).rescore_sync(run.run_id, store=store)
    theirs = {one.sample_id: one.score for one in store.results(run.run_id)}
    for result in again.results:
        assert result.score is not None
        source = theirs[result.sample_id]
        assert source is not None
        assert {m.name: m.value for m in result.score.metrics} == {m.name: m.value for m in source.metrics}
        assert (result.passed, result.known_latency_ms) == (source.passed, None)


def graders_of(criteria: list[dict[str, Any]], folder: Path) -> tuple[dict[str, tuple[str | None, str]], str]:
    project = one_run(answers("evalrun_a", {}), criteria=criteria)
    (suite,) = OpenAIEvals().read(write_archive(project, folder)).suites
    text = "" if suite.code is None else suite.code("data.jsonl")
    return {grader.name: (grader.evaluator, grader.remark) for grader in suite.graders}, text


def test_judges_take_over_prompt_labels_and_threshold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = message("Is {{sample.output_text}} right about {{item.country}}? The answer is {{item.capital}}.")
    criteria = [
        CRITERIA[0],
        {"type": "label_model", "name": "right", "model": "o4-mini", "input": prompt, "labels": ["yes", "no"],
         "passing_labels": ["yes"]},
        {"type": "score_model", "name": "tone", "model": "o4-mini", "input": prompt, "pass_threshold": 0.7},
        {"type": "text_similarity", "name": "close", "evaluation_metric": "fuzzy_match", "pass_threshold": 0.9,
         "input": "{{sample.output_text}}", "reference": "{{item.capital}}"},
    ]  # fmt: skip
    graders, text = graders_of(criteria, tmp_path)
    assert {name: made for name, (made, _) in graders.items()} == {
        "exact": "exact_match", "right": "label_judge", "tone": "numeric_judge", "close": "fuzzy_match"
    }  # fmt: skip
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    made: dict[str, Any] = {"__file__": str(tmp_path / "suite.py")}
    write_lines(tmp_path / "data.jsonl", [{"id": "1", "input": {}}])
    exec(compile(text, "suite.py", "exec"), made)
    assert made["right"].criterion == (
        "Is [the output to assess] right about [country of the input]? The answer is [the reference answer]."
    )
    assert "pass_at=0.7" in text
    assert made["close"]("Paris", "Pariss").passed is False
    assert made["suite"].name == "capitals"


@pytest.mark.parametrize(
    ("criterion", "reason"),
    [
        ({"type": "python", "source": "def grade(sample, item): return 1"}, "write it as a function"),
        ({"type": "multi", "calculate_output": "a + b", "graders": {}}, "combine its graders"),
        (
            {"type": "text_similarity", "evaluation_metric": "bleu", "input": "a", "reference": "b"},
            "the metric bleu is not supported",
        ),
        ({"type": "telepathy"}, "graders of type 'telepathy' are not supported"),
        ({**CRITERIA[0], "operation": "near"}, "operation 'near' is not supported"),
        ({**CRITERIA[0], "input": "{{sample.output_json.city}}"}, "it reads {{sample.output_json.city}}"),
        ({"type": "label_model", "input": message("?"), "labels": ["a"], "passing_labels": []}, "it has no labels"),
        ({"type": "score_model", "input": [{"role": "user", "content": {"type": "input_image"}}]}, "images or audio"),
        ({"type": "score_model", "input": []}, "its prompt is empty"),
        (CRITERIA[2], "it scores from 1 to 7"),
    ],
)
def test_a_grader_without_an_equivalent_is_named_with_the_reason(
    tmp_path: Path, criterion: dict[str, Any], reason: str
) -> None:
    graders, text = graders_of([{**criterion, "id": "x-1", "name": "odd"}, {**CRITERIA[1], "name": "named"}], tmp_path)
    assert graders["odd"][0] is None
    assert reason in graders["odd"][1]
    assert graders["named"][0] == "contains, any case"
    assert "NOT_TRANSLATED = {" in text
    assert "'odd': " in text


def test_graders_whose_names_clash_stay_apart(tmp_path: Path) -> None:
    criteria = [
        {**CRITERIA[0], "id": f"id-{n}", "name": name} for n, name in enumerate(["a b", "a b", "a-b", "class", "1"])
    ]
    graders, text = graders_of(criteria, tmp_path)
    assert list(graders) == ["a b", "a b-2", "a-b", "class", "1"]
    assert "all_of(a_b, a_b_2, a_b_3, grader_class, grader_1)" in text
    compile(text, "suite.py", "exec")


@pytest.mark.parametrize(
    ("spoil", "said", "remedy"),
    [
        (lambda d: (d / "runs.jsonl").unlink(), "must be a folder saved from OpenAI Evals (it has no runs", "script"),
        (lambda d: cut(d / "items" / "evalrun_a.jsonl"), "evalrun_a.jsonl:10: ", "save script again"),
        (lambda d: (d / "runs.jsonl").write_text('{"id": "r"}\n'), "runs.jsonl:1: 'eval_id' must be a non-empty", ""),
        (lambda d: (d / "evals.jsonl").write_text("[1]\n"), "evals.jsonl:1: a row must be a JSON object", ""),
        (lambda d: (d / "items" / "evalrun_a.jsonl").write_text('{"id": "x"}\n'), "'datasource_item' of x must be", ""),
    ],
)  # fmt: skip
def test_input_that_cannot_be_read_is_named_with_its_place_and_the_remedy(
    tmp_path: Path, spoil: Callable[[Path], object], said: str, remedy: str
) -> None:
    folder = write_archive(small_project(), tmp_path / "saved")
    spoil(folder)
    with pytest.raises(DataError) as raised:
        OpenAIEvals().read(folder)
    assert said in str(raised.value)
    assert remedy in " ".join(getattr(raised.value, "__notes__", [""]))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def test_what_has_nothing_to_import_is_left_out_by_name(store: RunStore, tmp_path: Path) -> None:
    project = small_project()
    project.runs.append(run_of("evalrun_c", [], status="failed", error={"code": "quota", "message": "used up"}))
    project.runs.append(run_of("evalrun_d", [], eval_id="eval_gone"))
    project.items["evalrun_c"] = []
    found = OpenAIEvals().read(write_archive(project, tmp_path / "saved"))
    assert found.left_out == (
        "run evalrun_c of capitals-short-answers: it has no output items (failed, quota: used up)",
        "run evalrun_d: its eval eval_gone is not in evals.jsonl",
    )


def test_a_part_of_a_run_is_imported_as_stopped(store: RunStore, tmp_path: Path) -> None:
    folder = write_archive(small_project(), tmp_path / "saved")
    (folder / "items" / "evalrun_a.jsonl").rename(folder / "items" / "evalrun_a.part")
    runs = [{**run, "status": "canceled"} if run["id"] == "evalrun_b" else run for run in small_project().runs]
    write_lines(folder / "runs.jsonl", [runs[0], {**runs[1], "status": "in_progress"}, runs[1]])
    (suite,) = OpenAIEvals().read(folder).suites
    stored = [store_run(store, suite, run, "openai-evals").run for run in suite.runs]
    assert [(run.status, run.notes["stopped"]) for run in stored] == [
        ("stopped", "only some of its output items were saved"), ("stopped", "canceled at the source")
    ]  # fmt: skip


def test_names_of_suites_and_experiments_are_safe_and_distinct(store: RunStore, tmp_path: Path) -> None:
    project = small_project()
    project.evals[0]["name"] = "Q/A: support@night"
    project.evals.append({**project.evals[0], "id": "eval_two"})
    project.runs[1] |= {"eval_id": "eval_two", "model": "ft:gpt-4.1:acme::abc"}
    runs = imported(project, store, tmp_path / "saved")
    assert [(run.suite, run.experiments) for run in runs] == [
        ("q-a-support-night", ("gpt-4.1-mini",)), ("q-a-support-night-2", ("ft-gpt-4.1-acme-abc",))
    ]  # fmt: skip


def test_files_that_somebody_changed_are_kept(tmp_path: Path) -> None:
    (suite,) = OpenAIEvals().read(write_archive(small_project(), tmp_path / "saved")).suites
    assert [state for _, state in write_suite(suite, tmp_path / "out")] == ["written", "written"]
    module = tmp_path / "out" / "capitals_short_answers.py"
    module.write_text("# mine\n")
    assert [state for _, state in write_suite(suite, tmp_path / "out")] == ["unchanged", "kept"]
    assert module.read_text() == "# mine\n"


def test_every_importer_can_be_loaded_and_recognizes_its_own(tmp_path: Path) -> None:
    assert detect_format(tmp_path) is None
    write_archive(small_project(), tmp_path)
    assert detect_format(tmp_path) == "openai-evals"
    for name in plugin_names("importers"):
        assert load_importer(name).recognizes(tmp_path) is (name == "openai-evals")


def test_a_file_with_an_odd_row_is_not_read_as_rows(store: RunStore, tmp_path: Path) -> None:
    project = one_run(answers("evalrun_a", {}), data_source={"source": {"type": "file_id", "id": "file-x"}})
    project.files["file-x"] = '{"prompt": "no item"}\n'
    (run,) = imported(project, store, tmp_path / "saved")
    assert run.dataset_size == 10
    project.files["file-x"] = "not JSON\n"
    with pytest.raises(DatasetError, match="file-x:1"):
        imported(project, store, tmp_path / "saved")
