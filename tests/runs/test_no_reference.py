"""A sample without an expected value is told from one whose expected value is None, wherever it goes."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalResult, EvalSuite, Sample, Score, TrialKey, exact_match, open_store, task
from fairtrial.fleet import EvalLoop, EvalReply, EvalRequest, MemoryBroker, connect_broker
from fairtrial.rl.reward import RewardFunction, sample_text
from fairtrial.store.portable import load_run, save_run
from fairtrial.suites.worker import run_worker

NONE: Sample[Any, Any] = Sample("none", None, expected=None)
MISSING: Sample[Any, Any] = Sample("missing", None)
GIVEN: Sample[Any, Any] = Sample("given", "x", "x")
ALL = (NONE, MISSING, GIVEN)


def test_a_sample_knows_whether_it_has_an_expected_value() -> None:
    assert [sample.has_expected for sample in ALL] == [True, False, True]
    assert [sample.expected for sample in ALL] == [None, None, "x"]
    assert Sample("a", 1, ground_truth=None).has_expected
    assert not Sample("a", 1, metadata={"level": 1}).has_expected
    assert Sample("a", 1, None) != Sample("a", 1)
    assert Sample("a", 1, None, ground_truth=5).expected == 5
    assert [sample.has_expected for sample in Dataset.of({"a": None, "b": 1})] == [True, True]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda sample: replace(sample, metadata={})])
def test_a_copy_knows_it_too(copied: Callable[[Any], Any]) -> None:
    assert [copied(sample) for sample in ALL] == list(ALL)
    assert replace(MISSING, expected=3).has_expected
    assert replace(NONE, expected=3).expected == 3


def test_fingerprints_tell_them_apart_and_others_are_as_before() -> None:
    def fingerprint(**given: Any) -> str:
        return Dataset([Sample("a", "q", **given)]).fingerprint

    assert fingerprint() != fingerprint(expected=None)
    assert fingerprint() == "ce7c241f68d114b1a2aba2a499067ed1"  # Of earlier versions: what was stored can be resumed.
    assert fingerprint(expected=1) == "b8f17322d834e02e7e8c64611cba76a4"


FILES = {
    "d.jsonl": "\n".join(
        json.dumps(row)
        for row in (
            {"id": "none", "input": None, "expected": None},
            {"id": "missing", "input": None},
            {"id": "given", "input": "x", "expected": "x"},
        )
    ),
    "d.json": json.dumps(
        [
            {"id": "none", "input": None, "ground_truth": None},
            {"id": "missing", "input": None},
            {"id": "given", "input": "x", "ground_truth": "x"},
        ]
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("types", [(), (object, str), (object, object)])
def test_files_of_json_say_it(tmp_path: Path, name: str, types: tuple[Any, ...]) -> None:
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    assert list(Dataset.load(path, *types)) == list(ALL)
    if name.endswith("jsonl"):
        assert list(Dataset.load(path, *types, lazy=True)) == list(ALL)
        assert Dataset.load(path, lazy=True).fingerprint == Dataset(ALL).fingerprint


def test_an_empty_cell_is_no_expected_value(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("id,input,expected\na,x,\nb,x,x\n", encoding="utf-8")
    assert [sample.has_expected for sample in Dataset.load(path)] == [False, True]


def test_null_in_the_file_of_another_tool_is_no_expected_value(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"id": "a", "input": "x", "expected": null}\n', encoding="utf-8")
    assert not Dataset.load(path, format="braintrust")[0].has_expected
    assert Dataset.load(path)[0].has_expected


def test_the_wire_keeps_it() -> None:
    for sample in ALL:
        request = EvalRequest.from_wire(EvalRequest(sample=sample).to_wire())
        assert request.sample == sample
        assert request.typed(object, object) == sample
        result: EvalResult = EvalResult(key=TrialKey("r", "baseline", sample.id), outcome="scored", score=Score(1.0))
        assert EvalReply.from_wire(EvalReply(result, 0, sample).to_wire()).sample == sample


def test_rows_of_trainers_keep_it() -> None:
    reward = RewardFunction(exact_match, None, ("", None), "reward")
    for sample in ALL:
        assert reward.sample_of({"sample": json.dumps(sample_text(sample))}) == sample


@task(isolate=True)
def isolated(given: Any) -> Any:
    return given


def outcomes(report: Any) -> dict[str, Any]:
    return {result.sample_id: result.score and result.score.value for result in report.results}


SCORES = {"none": 1.0, "missing": None, "given": 1.0}


@pytest.mark.parametrize("fn", [lambda given: given, isolated])
@pytest.mark.parametrize("kind", ["memory:", "sqlite:///{}/runs.db", "postgresql"])
def test_stores_rescoring_and_exports_keep_it(
    tmp_path: Path, kind: str, fn: Any, request: pytest.FixtureRequest
) -> None:
    url = str(request.getfixturevalue("pg_url")) if kind == "postgresql" else kind
    store = open_store(url.format(tmp_path))
    suite = EvalSuite("s", Dataset(ALL, name="d"), fn, exact_match)
    report = suite.run_sync(store=store)
    assert outcomes(report) == SCORES
    assert "the sample has no expected value" in next(result.error for result in report.results if result.error)
    assert [result.sample for result in report.results] == list(ALL)
    assert outcomes(suite.rescore_sync(report.run_id, store=store)) == SCORES
    assert outcomes(suite.run_sync(store=store, resume=report.run_id)) == SCORES
    save_run(store, report.run_id, tmp_path / "saved.fairtrial")
    copied, run_id = load_run(tmp_path / "saved.fairtrial")
    assert [sample for _, sample in copied.samples(run_id)] == list(ALL)


@pytest.mark.parametrize("kind", ["memory", "redis", "postgresql"])
def test_workers_keep_it(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = {"memory": "", "redis": "valkey_url", "postgresql": "pg_url"}[kind]
    address = str(request.getfixturevalue(url)) if url else ""
    suite = EvalSuite("s", Dataset(ALL, name="d"), lambda given: given, exact_match)

    async def run() -> Any:
        broker = connect_broker(address) if address else MemoryBroker()
        loops: list[EvalLoop] = []
        worker = asyncio.create_task(run_worker(suite, broker, started=loops.append))
        report = await suite.run(store=address if kind == "postgresql" else str(tmp_path / "runs.db"), mailbox=broker)
        loops[0].stop()
        await worker
        await broker.close()
        return report

    report = asyncio.run(run())
    assert outcomes(report) == SCORES
    assert [result.sample for result in report.results] == list(ALL)
