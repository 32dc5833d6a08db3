"""Secrets are never written to the store or the logs."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from fairtrial import ChatMessage, Dataset, EvalSuite, Sample, Score, ToolInvoked, evaluate_sync, exact_match
from fairtrial.errors import SecretInDataError
from fairtrial.runs import RunEvent
from fairtrial.runs.sync import resume_command
from fairtrial.store import RunStore, open_store
from fairtrial.store.compress import decompress
from fairtrial.trials import EvalConfig, Experiment, TrialContext

SECRET = "sk-live-4f0c9a77e2b1d38e"


def test_a_secret_that_user_code_lets_slip_reaches_neither_store_nor_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_PROVIDER_API_KEY", SECRET)

    async def leaky(given: str, ctx: TrialContext) -> str:
        ctx.session.record(ChatMessage("user", f"the key is {SECRET}"))
        ctx.session.record(ToolInvoked("curl", {"header": f"Bearer {SECRET}"}, {"url": f"https://u:{SECRET}@host/"}))
        if given == "raise":
            raise RuntimeError(f"401 for {SECRET}")
        return f"{given} {SECRET}"

    def judge(output: str, expected: str) -> Score:
        if output.startswith("score"):
            raise ValueError(f"cannot judge {output}")
        return Score(1.0, reason=f"it says {output}")

    class Talkative:
        def publish(self, event: RunEvent) -> None:
            raise RuntimeError(f"bus of {SECRET}")

    dataset = Dataset([Sample(name, name, name) for name in ("fine", "raise", "score")])
    store = open_store(f"sqlite:///{tmp_path}/runs.db")
    suite = EvalSuite("leaky", dataset, leaky, judge)
    with caplog.at_level(logging.DEBUG):
        report = suite.run_sync(store=store, bus=Talkative())
        errors = [str(result.error) for result in report.results]
        assert all("transcript" in result.redacted_parts for result in report.results)
    store.close()
    assert "the run continues" in caplog.text
    assert SECRET not in caplog.text
    assert "[redacted]" in caplog.text
    assert sum("[redacted]" in error for error in errors) == 2
    for file in tmp_path.iterdir():
        assert SECRET.encode() not in file.read_bytes()
    with closing(sqlite3.connect(tmp_path / "runs.db")) as database, database:
        transcripts = [row[0] for row in database.execute("SELECT transcript FROM details")]
    database.close()
    assert len(transcripts) == 3
    for transcript in transcripts:
        plain = decompress(transcript)
        assert SECRET.encode() not in plain
        assert b"[redacted]" in plain


def test_ordinary_variables_change_neither_ids_nor_expected_values_nor_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZER_NAME", "bert-base-uncased")
    monkeypatch.setenv("AWS_SECRET_NAME", "customer-support")
    monkeypatch.setenv("CACHE_KEY_PREFIX", "evaluation")
    sample = Sample("customer-support-1", "evaluation", "bert-base-uncased", {"team": "customer-support"})
    report = evaluate_sync(Dataset([sample]), lambda given: "bert-base-uncased", exact_match)
    [result] = report.results
    assert (result.sample_id, result.output, result.redacted) == ("customer-support-1", "bert-base-uncased", False)
    assert result.sample == sample
    assert list(report.group_by("team")) == ["customer-support"]


def test_a_run_whose_params_look_like_a_credential_is_resumed(store: RunStore) -> None:
    calls: list[int] = []

    def task(number: int) -> int:
        calls.append(number)
        if len(calls) == 2:
            raise RuntimeError("boom")
        return number

    def suite() -> EvalSuite:
        params = {"tokenizer": "bert-base-uncased", "url": "redis://u:secretpw12@h", "key": "ghp_abcdefghijklmnop1234"}
        return EvalSuite(
            "s",
            Dataset([Sample(f"s{n}", n, n) for n in range(4)]),
            task,
            exact_match,
            experiments=[Experiment("a", params)],
            config=EvalConfig(stop_on_error=True, max_concurrent=1, max_retries=0),
            version="1",
        )

    assert suite().run_sync(store=store).status == "interrupted"
    assert suite().run_sync(store=store).status == "finished"
    assert len(store.runs()) == 1


@pytest.mark.parametrize(
    ("field", "sample"),
    [
        ("the id of sample number 2", Sample(f"x-{SECRET}", 1)),
        ("the input of sample 'x'", Sample("x", {"deep": [SECRET]})),
        ("the expected value of sample 'x'", Sample("x", 1, SECRET)),
        ("the metadata of sample 'x'", Sample("x", 1, 1, {"note": f"it is {SECRET}"})),
    ],
)
def test_a_run_is_refused_before_its_first_trial_when_a_sample_holds_a_secret(
    field: str, sample: Sample[object, object], monkeypatch: pytest.MonkeyPatch, store: RunStore
) -> None:
    monkeypatch.setenv("MY_PROVIDER_API_KEY", SECRET)
    calls: list[object] = []
    suite = EvalSuite("s", Dataset([Sample("first", 1), sample]), calls.append, exact_match)
    with pytest.raises(SecretInDataError, match=rf"^{field} must not contain a secret .*MY_PROVIDER_API_KEY") as raised:
        suite.run_sync(store=store)
    assert SECRET not in str(raised.value)
    assert calls == []
    assert store.runs() == []


def test_a_secret_far_down_a_dataset_stops_the_run_before_the_trial_of_its_sample(
    monkeypatch: pytest.MonkeyPatch, store: RunStore
) -> None:
    monkeypatch.setenv("MY_PROVIDER_API_KEY", SECRET)
    calls: list[object] = []
    samples: list[Sample[object, object]] = [Sample(f"s{n}", n if n != 1500 else SECRET) for n in range(1600)]
    suite = EvalSuite("s", Dataset(samples), calls.append, lambda output, expected: True)
    with pytest.raises(SecretInDataError, match="the input of sample 's1500'"):
        suite.run_sync(store=store)
    assert SECRET not in calls
    [run] = store.runs()
    assert run.status == "interrupted"
    assert SECRET not in repr(run)


def test_a_run_is_refused_when_a_parameter_or_a_tag_holds_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PROVIDER_API_KEY", SECRET)
    store = open_store("memory:")
    calls: list[object] = []
    experiments = [Experiment("a", {"key": SECRET})]
    dataset: Dataset[int, int] = Dataset([Sample("x", 1)])
    with pytest.raises(SecretInDataError, match="the parameters of an experiment"):
        EvalSuite("s", dataset, calls.append, exact_match, experiments=experiments).run_sync(store=store)
    with pytest.raises(SecretInDataError, match="the run's tags"):
        EvalSuite("s", dataset, calls.append, exact_match).run_sync(store=store, tags={"key": SECRET})
    assert (calls, store.runs()) == ([], [])


def test_the_command_that_resumes_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["evals.py", "--store", "postgresql://me:pw1@db/evals", "--mailbox=redis://:other-secret@host:6379"]
    monkeypatch.setattr(sys, "argv", words)
    shown = resume_command()
    assert "pw1" not in shown
    assert "other-secret" not in shown
    assert shown.startswith("python evals.py --store 'postgresql://me:[redacted]@db/evals'")
    assert shown.endswith("(with the password in place of [redacted]; or set FAIRTRIAL_STORE)")
    monkeypatch.setattr(sys, "argv", ["evals.py", "--store", "runs.db"])
    assert resume_command() == "python evals.py --store runs.db"


def test_an_interrupted_run_in_memory_is_not_said_to_be_stored() -> None:
    def interrupted(given: str) -> str:
        if given == "0":
            os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.2)
        return given

    with pytest.raises(KeyboardInterrupt) as caught:
        evaluate_sync([Sample(str(n), str(n), str(n)) for n in range(50)], interrupted, exact_match)
    assert str(caught.value) == "the run was interrupted; it was kept in memory only, so it cannot be resumed"
