"""One store with a few runs, one server and one browser for all tests of the viewer."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from fairtrial import EvalResult, Metric, PromptExecuted, Sample, Score, Session, TokenUsage, ToolInvoked, TrialKey
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.store import RunRecord, RunStore, open_store
from fairtrial.viewer.serve import ServeOptions, ViewServer

SAMPLES = 40
HOSTILE = (
    "<script>window.hit=1;alert(1)</script>",
    "\"><img src=x onerror=\"window.hit=1\">",
    "'><svg/onload=window.hit=1>",
    "</title><script>window.hit=1</script>",
    "</textarea><script>window.hit=1</script>",
    "</pre></details><iframe srcdoc='<script>parent.hit=1</script>'>",
    "[a](javascript:window.hit=1) ![x](http://127.0.0.1:9/leak.png)",
    "{{ 7*7 }}{% raw %}${7*7}<%= 7*7 %>",
    "<style>@import url(http://127.0.0.1:9/x.css)</style>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>",
    "<base href=http://127.0.0.1:9/><form action=javascript:window.hit=1><button autofocus onfocus=window.hit=1>",
    "javascript:window.hit=1//\u2028<!--<script>window.hit=1</script>",
    "\u202e\u200b<a href=javascript:window.hit=1>x</a>\x1b]8;;javascript:window.hit=1\x07",
)  # fmt: skip


class Answer(NamedTuple):
    status: int
    text: str
    headers: dict[str, str]


@dataclass
class Viewed:
    """A server with its store, and a session."""

    server: ViewServer
    store: RunStore
    cookie: str

    @property
    def prefix(self) -> str:
        return self.server.access.prefix

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/{self.prefix}/"

    def get(
        self, path: str = "", *, method: str = "GET", host: str | None = None, body: str = "", **headers: str
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        given = {"Cookie": self.cookie, "Host": host or f"127.0.0.1:{self.server.port}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.putrequest(method, f"/{self.prefix}/{path}", skip_host=True, skip_accept_encoding=True)
        for name, value in given.items():
            connection.putheader(name, value)
        if body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body.encode())
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        connection.close()
        return Answer(answer.status, text, {name.lower(): value for name, value in answer.getheaders()})

    def json(self, path: str) -> Any:
        answer = self.get(path, Accept="application/json")
        assert answer.status == 200, answer.text
        return json.loads(answer.text)


def record(run_id: str, suite: str = "support", size: int = SAMPLES, **changes: Any) -> RunRecord:
    given: dict[str, Any] = {
        "dataset_name": "questions", "dataset_version": "1", "dataset_fingerprint": (suite * 32)[:32],
        "dataset_size": size, "experiments": ("baseline", "careful"), "repeats": 1, "evaluator": "exact",
        "created_at": 1000.0, "status": "running",
    } | changes  # fmt: skip
    return RunRecord(run_id=run_id, suite=suite, **given)


def session_of(answer: str, place: int) -> bytes:
    session = Session(tags={})
    session.record(ChatMessage("system", "You help customers."))
    session.record(ChatMessage("user", f"Where is order {place}?"))
    session.record(ChatMessage("assistant", "", (ToolCall("find_order", {"order": place}),)))
    session.record(PromptExecuted(model="fake", usage=TokenUsage(10, 5), duration_ms=12.0))
    session.record(ToolInvoked("find_order", {"order": place}, {"status": "lost"}, True, duration_ms=30.0))
    session.record(ChatMessage("assistant", answer, reasoning="I should be brief."))
    session.record(PromptExecuted(model="judge-model", usage=TokenUsage(50, 5), duration_ms=80.0), actor="judge")
    return session.snapshot()


def trial(run: RunRecord, ordinal: int) -> EvalResult:
    """One sample in ten fails by an error, the baseline fails every third, careful every fifth."""
    place, experiment, repeat = run.split(ordinal)
    name = run.experiments[experiment]
    key = TrialKey(run.run_id, name, f"q{place:02}", repeat)
    if place % 10 == 9:
        return EvalResult(
            key=key,
            ordinal=ordinal,
            outcome="task_error",
            error="ValueError: no such order",
            stage="task",
            execution=ordinal + 1,
        )
    passed = place % (3 if experiment == 0 else 5) != 0
    answer = f"Order {place} {'arrives on Friday' if passed else 'was never seen'}, says {name}."
    detail = {"judge_model": "judge-model", "prompt_sha256": "ab" * 32, "reply": "a fine answer"}
    score = Score(
        1.0 if passed else 0.25, passed, "as expected" if passed else "not what was asked for",
        [Metric("helpful", 0.5 + 0.01 * place, passed=passed, reason="judged", metadata=detail)],
    )  # fmt: skip
    return EvalResult(
        key=key, ordinal=ordinal, outcome="scored", score=score, output=answer, latency_ms=100 + 7 * place,
        usage=TokenUsage(30 + place, 20, cost_usd=0.001), execution=ordinal + 1,
        started_at=2000.0 + ordinal, snapshot=session_of(answer, place),
    )  # fmt: skip


def support_samples(size: int = SAMPLES) -> dict[int, Sample[Any, Any]]:
    kinds = ("refund", "delivery", "address")
    return {
        place: Sample(
            f"q{place:02}", f"Where is order {place}?", "Friday", {"kind": kinds[place % 3], "level": place % 2}
        )
        for place in range(size)
    }


def add_support_runs(store: RunStore) -> None:
    for number in (1, 2):
        run = store.create_run(record(f"support-run-{number}", tags={"branch": "main", "build": str(number)}))
        store.commit(run.run_id, [trial(run, ordinal) for ordinal in range(run.planned)], support_samples())
        store.update_run(run.run_id, status="finished", finished_at=1000.0 + 10 * number)


def add_running_run(store: RunStore) -> None:
    run = store.create_run(record("running-run", "endless", experiments=("baseline",)))
    store.commit(run.run_id, [trial(run, ordinal) for ordinal in range(10)], support_samples())


def add_hostile_run(store: RunStore) -> None:
    """Every text of a run is an attack."""
    names = (HOSTILE[0], HOSTILE[1])
    changes = {
        "experiments": names,
        "dataset_name": HOSTILE[2],
        "evaluator": HOSTILE[3],
        "tags": {HOSTILE[0]: HOSTILE[1]},
    }
    run = store.create_run(record("hostile-run", "<img src=x onerror=hit=1>", len(HOSTILE), **changes))
    samples, results = {}, []
    for place, text in enumerate(HOSTILE):
        samples[place] = Sample(f"{place}/{text}", {text: text}, text, {text: text, "kind": text})
        for experiment in range(2):
            session = Session(tags={})
            session.record(ChatMessage(text, text, (ToolCall(text, {text: text}, id=text),), text, reasoning=text))
            session.record(ToolInvoked(text, {text: text}, text, False, error=text, duration_ms=5.0))
            session.record(PromptExecuted(text, text, text, TokenUsage(1, 1), text, duration_ms=9.0), actor="judge")
            metric = Metric(text, 0.5, passed=False, reason=text, metadata={"judge_model": text, "reply": text})
            key = TrialKey(run.run_id, names[experiment], f"{place}/{text}", 0)
            ordinal = run.ordinal(place, experiment, 0)
            results.append(
                EvalResult(
                    key=key,
                    ordinal=ordinal,
                    outcome="scored",
                    score=Score(0.1 * experiment, bool(experiment and place % 2), text, [metric], name=text),
                    output=text + f" {experiment}",
                    metadata={text: text},
                    execution=ordinal + 1,
                    snapshot=session.snapshot(),
                )
                if place != 1 or experiment
                else EvalResult(
                    key=key, ordinal=ordinal, outcome="task_error", error=text, stage="task", execution=ordinal + 1
                )
            )
    store.commit(run.run_id, results, samples)
    store.update_run(run.run_id, status="finished", finished_at=1005.0)


def add_long_run(store: RunStore, messages: int = 5_000) -> None:
    """One trial with thousands of messages."""
    run = store.create_run(record("long-run", "long", 1, experiments=("baseline",)))
    session = Session(tags={})
    for number in range(messages):
        role = "assistant" if number % 2 else "user"
        session.record(ChatMessage(role, f"message {number}: " + "some words that fill a line of the page. " * 20))
    session.record(ChatMessage("assistant", "the very last needle in this haystack"))
    result = EvalResult(
        key=TrialKey(run.run_id, "baseline", "q00", 0),
        ordinal=0,
        outcome="scored",
        score=Score(1.0),
        output="done",
        execution=1,
        snapshot=session.snapshot(),
    )
    store.commit(run.run_id, [result], {0: Sample("q00", "talk for long", None, {})})
    store.update_run(run.run_id, status="finished", finished_at=1005.0)


def start_server(path: Path | str, **options: Any) -> tuple[ViewServer, threading.Thread]:
    server = ViewServer(ServeOptions(str(path), port=0, **options))
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), daemon=True)
    thread.start()
    assert ready.wait(60)
    return server, thread


def open_session(server: ViewServer, reviewer: str | None = None) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    address = server.invitation() if reviewer is None else server.reviewer_addresses()[reviewer]
    connection.request("GET", address[address.index("/", 8) :])
    answer = connection.getresponse()
    cookie = answer.getheader("set-cookie") or ""
    connection.close()
    return cookie.partition(";")[0]


@pytest.fixture(scope="session")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    path = tmp_path_factory.mktemp("viewer") / "runs.db"
    store = open_store(path)
    add_support_runs(store)
    add_running_run(store)
    add_hostile_run(store)
    add_long_run(store)
    server, thread = start_server(path, reviewers=("rev",), user="me")
    yield Viewed(server, store, open_session(server))
    server.stop()
    thread.join(60)
    store.close()
    assert not thread.is_alive()


def segment(text: str) -> str:
    return quote(quote(text, safe="", errors="surrogatepass"), safe="")
