"""Log records as JSON: one object a line, with the ids of run, trial and worker, and without secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from fairtrial import Dataset, EvalSuite, Sample, evaluate, exact_match
from fairtrial.errors import StoreUnavailableError
from fairtrial.fleet import EvalLoop, EvalRequest
from fairtrial.runs.events import JsonLogFormatter, log_fields
from fairtrial.store.memory import MemoryStore
from fairtrial.store.redact import register_secret
from tests.fleet.build import boxes
from tests.fleet.build import request as trial_request


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Lines:
    """What is logged, as a program reads it."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def only(self, part: str) -> dict[str, Any]:
        (found,) = (record for record in self.records() if part in record["message"])
        return found


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines = Lines()
    handler = logging.StreamHandler(lines.stream)
    handler.setFormatter(JsonLogFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    yield lines
    root.removeHandler(handler)


def test_a_record_is_one_line_whatever_is_in_it() -> None:
    # Not through a logger: pytest-xdist cannot send captured logs that hold half a character.
    extra = {"size": 3, "ratio": float("nan"), "why": None}
    message = "two\nlines \u2028 and \ud800 of %s"
    made = logging.getLogger("mine").makeRecord("mine", logging.WARNING, "", 0, message, ("text",), None, extra=extra)
    (line,) = JsonLogFormatter().format(made).split("\n")
    record = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert record.pop("time").endswith("Z")
    assert record == {
        "level": "warning",
        "logger": "mine",
        "message": "two\nlines \u2028 and \ud800 of text",
        "size": 3,
        "ratio": "nan",
        "why": "None",
    }


def test_secrets_are_redacted_in_every_field(lines: Lines) -> None:
    secret = 'Zq7"w/9k\\m4pXv2'
    register_secret(secret)
    try:
        raise ValueError(f"refused: {secret}")
    except ValueError:
        logging.getLogger("mine").exception("with %s", secret, extra={"url": f"https://x/{secret}"})
    record = lines.only("with")
    assert (record["message"], record["url"]) == ("with [redacted]", "https://x/[redacted]")
    assert record["exception"].endswith("ValueError: refused: [redacted]")
    assert "7\\" not in lines.stream.getvalue()


@pytest.mark.parametrize("inline", [True, False], ids=["async", "in a thread"])
async def test_what_a_task_logs_names_its_run_and_trial(lines: Lines, inline: bool) -> None:
    async def answer(question: str) -> str:
        logging.getLogger("mine").warning("asked %s", question)
        return question

    def answer_in_thread(question: str) -> str:
        logging.getLogger("mine").warning("asked %s", question)
        return question

    task = answer if inline else answer_in_thread
    report = await evaluate([Sample("one", "a", "a"), Sample("two", "b", "b")], task, exact_match)
    for sample, question in (("one", "a"), ("two", "b")):
        record = lines.only(f"asked {question}")
        assert record["run"] == report.run_id
        assert record["trial"] == f"{report.run_id}/baseline/{sample}#0"
        assert record["attempt"] == 1


async def test_the_writer_thread_names_the_run(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(MemoryStore):
        failures = 1

        def commit(self, *args: Any, **options: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise StoreUnavailableError("gone for lunch")
            return super().commit(*args, **options)

    suite = EvalSuite("lunch", Dataset([Sample("one", "a", "a")]), str, exact_match)
    report = await suite.run(store=Away())
    assert lines.only("gone for lunch")["run"] == report.run_id


async def test_a_worker_names_itself_and_the_trial_of_a_message(lines: Lines) -> None:
    requests, _ = boxes()
    loop = EvalLoop(requests=requests, evaluator=exact_match, loop=str, name="w7")
    request: EvalRequest = trial_request(1)
    await requests.send(request)  # Without an address for its result.
    await loop.run(until_empty=True)
    record = lines.only("dead-lettering request")
    assert (record["worker"], record["run"], record["trial"]) == ("w7", request.key.run_id, str(request.key))
    assert record["attempt"] == request.attempt


def test_fields_end_with_their_block(lines: Lines) -> None:
    with log_fields(run="r1"), log_fields(worker="w1"):
        logging.getLogger("mine").warning("inside")
    logging.getLogger("mine").warning("outside")
    assert (lines.only("inside")["run"], lines.only("inside")["worker"]) == ("r1", "w1")
    assert not {"run", "worker"} & set(lines.only("outside"))
