"""Files of other tools that are cut off, unfinished, empty or unusual."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fairtrial import EvalReport, EvalResult, open_store
from fairtrial.errors import DataError
from fairtrial.runs.imported import Import, load_importer, merge_suites, store_run
from fairtrial.store.protocol import RunRecord, RunStore

FILES = Path(__file__).with_name("files")
EVAL = {"eval_id": "e1", "task": "team/quiz", "model": "openai/gpt-5", "dataset": {"name": "quiz"}}


@pytest.fixture
def store() -> RunStore:
    return open_store("memory:")


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
