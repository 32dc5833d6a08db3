"""Why a trial was executed again, as `show` and the viewer say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalConfig, EvalResult, EvalSuite, Sample, TrialKey, exact_match, open_store
from fairtrial.cli import command_show as screen
from fairtrial.fleet import EvalLoop, EvalReply, EvalRequest, collect_results, submit_dataset
from fairtrial.mailbox.memory import InMemoryMailbox
from fairtrial.reports.render.safe_text import executions_text
from fairtrial.viewer.pages.trial import _facts


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def said(report: Any) -> list[str]:
    """What the screens say about each trial; both say the same."""
    texts = []
    for result in report.results:
        facts = dict(_facts(report.run, result))
        assert facts.get("repeated", "") == executions_text(result)
        assert not [name for name in facts if "earlier_attempts" in name or "deliveries" in name]
        texts.append(executions_text(result))
    return texts


async def test_retries_and_retried_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fairtrial.trials.run_trial.retry_pause", lambda failures, retry_after: 0.0)
    failures = tmp_path / "failures"

    async def unsteady(given: int) -> int:
        left = int(failures.read_text())
        if left:
            failures.write_text(str(left - 1))
            raise ConnectionError("away")
        return given

    data = Dataset([Sample("1", 1, 1)])
    store = open_store("memory:")
    failures.write_text("2")
    report = await EvalSuite("a", data, unsteady, exact_match, config=EvalConfig(max_retries=2)).run(store=store)
    assert said(report) == ["2 retries after an error or a timeout (max_retries)"]

    failures.write_text("1")
    suite = EvalSuite("b", data, unsteady, exact_match)
    assert said(await suite.run(store=store)) == [""]
    again = await suite.run(store=store, resume="errors")
    assert said(again) == [
        "1 attempt in an earlier execution that ended in an error (--resume errors, or a resumed run)"
    ]
    assert again.pass_rate == 1.0


async def test_a_request_that_was_delivered_again_leaves_a_trace() -> None:
    requests, results = InMemoryMailbox("requests", EvalRequest), InMemoryMailbox("results", EvalReply)
    loop = EvalLoop(loop=lambda given: given, evaluator=exact_match, requests=requests, results=results)
    await submit_dataset(Dataset([Sample("1", 1, 1), Sample("2", 2, 2)]), requests)
    (first,) = await requests.receive(1, 60, 1)
    await first.nack(0)
    await loop.run(until_empty=True)
    report = await collect_results(results, 2, timeout_seconds=20)
    again = first.body.sample.id
    assert {result.sample_id: executions_text(result) for result in report.results} == {
        again: "its request was delivered 2 times (a worker stopped, lost its lease or handed it back)",
        {"1": "2", "2": "1"}[again]: "",
    }
    assert len(said(report)) == 2


def test_a_result_that_does_not_say_why_is_not_explained() -> None:
    made = EvalResult(key=TrialKey("r", "e", "1", 0), ordinal=0, outcome="timeout", attempt=3)
    assert executions_text(made) == ""
    assert "attempt 3" in screen._timing(made)
