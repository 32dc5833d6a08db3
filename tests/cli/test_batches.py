"""Batches on the command line: `run --batch`, `batches` and what cannot be combined."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fairtrial import open_store
from fairtrial.integrations.model_server import BatchOptions, ModelServer
from fairtrial.models.batches.requests import account_digest
from fairtrial.store.batches import BatchIntent, BatchRequest, batch_table

ASKING = """
from fairtrial import Dataset, EvalConfig, EvalSuite, contains
from fairtrial.models import OpenAIAdapter

model = OpenAIAdapter("gpt-5.5", api="chat")


async def answer(question: str) -> str:
    return (await model.complete(question)).text


config = EvalConfig(grace_seconds=0.1)
suite = EvalSuite("asking", Dataset.of({"a": "a", "b": "b", "c": "c"}), answer, contains, config=config)
"""


@pytest.fixture
def asking(place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A suite that asks a model of OpenAI, and a server of OpenAI with batches."""
    (place / "asking.py").write_text(ASKING)
    monkeypatch.setattr("fairtrial.models.batches.sender._TICK_SECONDS", 0.02)
    with ModelServer(batches=BatchOptions(0.1)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.base_url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        yield server


def test_a_run_with_batches_is_answered_by_one_and_listed(asking: Any, cli: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: 0.01)
    done = cli("run", "asking.py", "--batch")
    assert done.code == 0, done.err
    assert len(asking.batches().executed) == 3
    (batch,) = cli("batches", "asking@1", "--json").json["batches"]
    assert (batch["state"], batch["requests"], batch["replies"], batch["failed"]) == ("collected", 3, 3, 0)
    assert "collected" in cli("batches", "asking@1").out
    assert "no batch is under way" in cli("batches").err
    assert "needs a run" in cli("batches", "--cancel").err
    nothing = cli("batches", "asking@1", "--cancel")
    assert nothing.code == 0
    assert "collected" in nothing.out
    assert nothing.err == "no batch of run asking@1 is under way: there is nothing to cancel\n"


def interrupt_when_submitted() -> None:
    """Type Ctrl-C as soon as the provider's id of a batch is stored."""
    store = open_store(".fairtrial/runs.db")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        states = [one.state for run in store.runs() for one in batch_table(store).intents(run.run_id)]
        if states == ["submitted"]:
            break
        time.sleep(0.02)
    store.close()
    os.kill(os.getpid(), signal.SIGINT)


def test_after_ctrl_c_a_batch_stays_and_answers_the_resumed_run(cli: Any, place: Path, monkeypatch: Any) -> None:
    (place / "asking.py").write_text(ASKING)
    monkeypatch.setattr("random.uniform", lambda low, high: 0.01)
    with ModelServer(batches=BatchOptions(3600.0, rate=0.0)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.base_url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        hand = threading.Thread(target=interrupt_when_submitted)
        hand.start()
        done = cli("run", "asking.py", "--batch")
        hand.join()
        assert done.code == 130
        said = " ".join(done.err.split())
        (listed,) = cli("batches", "--json").json["batches"]
        assert (
            "1 batch stays at the provider, and will be paid: a resumed run uses the replies; to cancel, type" in said
        )
        assert f"fairtrial batches {listed['run_id']} --cancel" in said
        assert "resume it with: fairtrial run asking.py --batch" in said
        assert (listed["state"], listed["requests"], listed["replies"]) == ("submitted", 3, 0)
        server.advance(3600.0)
        assert cli("run", "asking.py", "--batch").code == 0
        ledger = server.batches()
    assert (len(ledger.created), len(ledger.executed)) == (1, 3)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--mailbox", "redis://localhost:1"], "--batch cannot be used with a fleet"),
        (["--processes", "2"], "--batch cannot be used with several processes"),
    ],
)
def test_batches_are_refused_where_trials_wait_elsewhere(asking: Any, cli: Any, options: Any, problem: str) -> None:
    done = cli("run", "asking.py", "--batch", *options)
    assert done.code == 2
    assert problem in done.err
    assert asking.batches().created == ()


def test_isolated_tasks_are_refused(asking: Any, cli: Any, place: Path) -> None:
    (place / "alone.py").write_text(
        ASKING.replace("from fairtrial import", "from fairtrial import task,")
        .replace("async def answer(question: str) -> str:", "@task(isolate=True)\ndef answer(question: str) -> str:")
        .replace("(await model.complete(question)).text", "question")
    )
    done = cli("run", "alone.py", "--batch")
    assert done.code == 2
    assert "--batch cannot be used with isolated tasks" in done.err


def test_the_batches_of_an_interrupted_run_can_be_cancelled(asking: Any, cli: Any, monkeypatch: Any) -> None:
    assert cli("run", "asking.py", "--quiet").code == 0
    store = open_store(".fairtrial/runs.db")
    (run,) = store.runs()
    with ModelServer(batches=BatchOptions(3600.0)) as server:
        base_url = f"{server.base_url}/v1"
        import openai

        client = openai.OpenAI(api_key="sk-test", base_url=base_url, max_retries=0)
        line = b'{"custom_id":"x","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[]}}\n'
        file = client.files.create(file=("x.jsonl", line), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        client.close()
        intent = BatchIntent(
            "0123456789ab", "openai", account_digest(base_url, "sk-test"), base_url, "/v1/chat/completions", "gpt-5.5",
            1, time.time(), "submitted", made.id,
        )  # fmt: skip
        batch_table(store).plan(run.run_id, intent, [BatchRequest("0" * 28, intent.id, 0)])
        monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
        assert "was sent with another key" in cli("batches", "asking@1", "--cancel").err
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        done = cli("batches", "asking@1", "--cancel")
        assert "cancelled 1 batch;" in done.err
        server.advance(3600.0)
        again = cli("batches", "asking@1", "--cancel")
        assert again.code == 0, "a batch that has ended keeps none of the others from being cancelled"
        assert "cancelled 0 batches (1 had ended)" in again.err
        (created,) = server.batches().created
    store.close()
    assert created.status in ("cancelling", "cancelled")
