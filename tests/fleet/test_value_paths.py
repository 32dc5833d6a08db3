"""A value has one score on every path: run, resumed, retried, rescored, isolated, sent, stored, saved and loaded."""

from __future__ import annotations

import asyncio
import pprint
import threading
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalReport, EvalResult, EvalSuite, Sample, Score, TrialKey, evaluator, open_store, task
from fairtrial.base.codec import decode, from_json, to_json
from fairtrial.cli.app import invoke
from fairtrial.fleet import EvalLoop, EvalReply, EvalRequest, MainLoop, MainLoopRequest, MemoryBroker, connect_broker
from fairtrial.integrations.inspect import write_log
from fairtrial.mailbox import InMemoryMailbox, PostgresMailbox, RedisMailbox, SqsConnection, SqsMailbox
from fairtrial.runs.imported import load_importer, store_run
from fairtrial.store.portable import save_run
from fairtrial.suites.worker import run_worker
from fairtrial.trials.run_trial import run_trial, score_again
from fairtrial.trials.task import resolve_task
from tests.fleet import value_kinds
from tests.fleet.value_kinds import DAY, KINDS
from tests.trials.build import rules

pytestmark = pytest.mark.long  # 231 samples on every path.


@dataclass(frozen=True)
class Item:
    """Has the qualified name and the fields of another class."""

    name: str
    when: Any = None


KINDS_HERE = [*KINDS, ("item of another module", Item, [Item("a"), Item("b", "2026-01-02")])]
# Not read back, or only where their class is at hand: otherwise they must be refused.
UNREADABLE: list[Any] = [
    bytearray(b"x"),
    type("Text", (str,), {})("a"),
    type("Number", (int,), {})(1),
    defaultdict(int, a=1),
    Counter("a"),
    OrderedDict(a=DAY),
    Item("c", DAY),  # The annotation of its field does not say what it is.
]

type Verdict = tuple[str, float | None, str | None]


@evaluator(inline=True)
def same(output: Any, expected: Any) -> Score:
    """Compares values and types; the reason shows both, so that a value that has changed is seen."""
    passed = type(output) is type(expected) and output == expected
    return Score(float(passed), passed, f"{pprint.pformat(output)} for {pprint.pformat(expected)}")


@task(inline=True)
def give_back(given: Any) -> Any:
    return given


def given_in_child(given: Any) -> Any:
    return given


def samples_of(name: str, values: list[Any]) -> list[Sample[Any, Any]]:
    """Each value as input and expected value; and what its JSON is without a type, which must not count as equal."""
    made = []
    for place, value in enumerate(values):
        made.append(Sample(f"{name} {place}", value, value))
        twin = from_json(object, to_json(value))
        if type(twin) is not type(value) or twin != value:
            made.append(Sample(f"{name} {place} as JSON", value, twin))
            made.append(Sample(f"JSON of {name} {place}", twin, value))
    return made


SAMPLES = {name: samples_of(name, values) for name, _, values in KINDS_HERE}
EVERYTHING = Dataset([sample for samples in SAMPLES.values() for sample in samples])


def annotated(kind: Any, fn: Callable[[Any], Any] = give_back) -> Callable[[Any], Any]:
    """The task of a kind, as somebody would write it for values of this kind alone."""

    @task(inline=True)
    def of_kind(given: Any) -> Any:
        return fn(given)

    of_kind.__annotations__ = {"given": kind, "return": kind}
    return of_kind


def verdict_of(result: EvalResult) -> Verdict:
    score = result.score
    return (result.outcome, None, None) if score is None else (result.outcome, score.value, score.reason)


def verdicts(report: EvalReport) -> dict[str, Verdict]:
    return {result.sample_id: verdict_of(result) for result in report.results}


@pytest.fixture(scope="module")
def reference() -> Mapping[str, Verdict]:
    """The verdicts of a run in this process, where values are never anything but themselves."""
    report = asyncio.run(EvalSuite("reference", EVERYTHING, give_back, same).run(store="memory:"))
    made = verdicts(report)
    typed = {verdict[:2] for name, verdict in made.items() if "JSON" not in name}
    assert typed == {("scored", 1.0), ("task_error", None)}
    assert {verdict[1] for name, verdict in made.items() if "JSON" in name} == {0.0}
    return made


class Failing:
    """Fails until it works."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.works = threading.Event()  # State: what it is set to says nothing of the code.

    def task(self, given: Any) -> Any:
        if not self.works.is_set():
            raise RuntimeError("away")
        return self.fn(given)

    def evaluator(self, output: Any, expected: Any) -> Any:
        if not self.works.is_set():
            raise RuntimeError("away")
        return self.fn(output, expected)


async def test_resumed_runs_score_what_they_stored(tmp_path: Path, reference: Mapping[str, Verdict]) -> None:
    failing, url = Failing(same), str(tmp_path / "runs.db")
    suite = EvalSuite("resumed", EVERYTHING, give_back, failing.evaluator)
    first = await suite.run(store=url)
    assert first.errors["scorer_error"] == len(EVERYTHING) - first.errors["task_error"]
    failing.works.set()
    assert verdicts(await suite.run(store=url, resume=first.run_id)) == reference


async def test_retried_trials_have_their_values(tmp_path: Path, reference: Mapping[str, Verdict]) -> None:
    failing, url = Failing(give_back), str(tmp_path / "runs.db")
    suite = EvalSuite("retried", EVERYTHING, failing.task, same)
    first = await suite.run(store=url)
    failing.works.set()
    assert verdicts(await suite.run(store=url, resume=f"errors:{first.run_id}")) == reference


def copied(url: Any, run_id: str, folder: Path, how: str) -> str:
    """Copy a run to a store of its own."""
    target = folder / "saved.fairtrial.db"
    if how == "exported by the command":
        assert invoke(["export", run_id, "--store", url, "--format", "run", "--output", str(target)]) == 0
        return str(target)
    for name in ("first.fairtrial.db", target.name)[how == "saved" :]:
        save_run(open_store(url) if isinstance(url, str) else url, run_id, folder / name)
        url = str(folder / name)
    return str(target)


@pytest.mark.parametrize(("where", "saved"), [
    ("sqlite", ""), ("sqlite", "saved twice"), ("memory", ""), ("memory", "saved"), ("postgresql", ""),
    ("postgresql", "exported by the command"),
])  # fmt: skip
async def test_rescored_runs_have_their_values(
    where: str, saved: str, tmp_path: Path, reference: Mapping[str, Verdict], request: pytest.FixtureRequest
) -> None:
    url: Any = {"memory": open_store("memory:")}.get(where, str(tmp_path / "runs.db"))
    if where == "postgresql":
        url = request.getfixturevalue("pg_url")
    suite = EvalSuite("rescored", EVERYTHING, give_back, same)
    first = await suite.run(store=url)
    if saved:
        url = copied(url, first.run_id, tmp_path, saved)
        assert verdicts(EvalReport.load(url)) == reference
    assert verdicts(await suite.rescore(first.run_id, same, store=url)) == reference
    # The samples in another order, among others: each trial has its own sample.
    among = Dataset([Sample("other", 1), *EVERYTHING.shuffle(1)])
    again = await EvalSuite("rescored", among, give_back, same).rescore(first.run_id, same, store=url)
    assert verdicts(again) == reference


async def test_imported_logs_have_the_scores_that_were_exported(
    tmp_path: Path, reference: Mapping[str, Verdict]
) -> None:
    report = await EvalSuite("logged", EVERYTHING, give_back, same).run(store="memory:")
    (path,) = write_log(report.store, report.run, tmp_path / "logged.eval")
    (suite,) = load_importer("inspect").read(path).suites
    store = open_store("memory:")
    run = store_run(store, suite, suite.runs[0], "inspect").run
    assert verdicts(EvalReport(store, run)) == reference


async def test_stored_outputs_of_annotated_tasks_are_scored_the_same(reference: Mapping[str, Verdict]) -> None:
    for name, kind, _ in KINDS_HERE:
        used = rules(annotated(kind), same)
        for sample in SAMPLES[name]:
            key = TrialKey("run", used.experiments[0].name, sample.id)
            first = await run_trial(used, key, 0, sample, 0)
            assert verdict_of(first) == reference[sample.id], first.error
            if first.output_json is not None:
                stored = replace(first, output=decode(object, first.output_json))
                again = await score_again(used, key, 0, sample, stored, None)
                assert verdict_of(again) == reference[sample.id], (name, again.error)


async def test_isolated_tasks_give_their_values(tmp_path: Path, reference: Mapping[str, Verdict]) -> None:
    suite = EvalSuite("isolated", EVERYTHING, task(isolate=True)(given_in_child), same)
    assert verdicts(await suite.run(store="memory:")) == reference


@asynccontextmanager
async def mailbox(where: str, body: type[Any], request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    name = f"values-{uuid.uuid4().hex}"
    if where == "redis":
        async with RedisMailbox(name, body, request.getfixturevalue("redis_url")) as made:
            yield made
    elif where == "postgresql":
        async with PostgresMailbox(name, body, request.getfixturevalue("mailbox_database")) as made:
            yield made
    elif where == "sqs":
        url = request.getfixturevalue("sqs_url")
        async with SqsConnection(url) as connection, SqsMailbox(name, body, connection) as made:
            yield made
    else:
        yield InMemoryMailbox(name, body)


async def carried(box: Any, bodies: list[Any]) -> list[Any]:
    """What comes out of a mailbox."""
    for body in bodies:
        await box.send(body)
    received: list[Any] = []
    while len(received) < len(bodies):
        messages = await box.receive(10, 30, 5)
        assert messages, f"{len(received)} of {len(bodies)} arrived"
        for message in messages:
            received.append(message.body)
            await message.acknowledge()
    return received


WHERE = ["memory", "redis", "postgresql", "sqs"]


@pytest.mark.parametrize("where", WHERE)
async def test_loops_score_what_was_sent(
    where: str, reference: Mapping[str, Verdict], request: pytest.FixtureRequest
) -> None:
    """A loop for each kind, of an annotated task; a value that the annotation does not fit is refused or unchanged."""
    kinds = {sample.id: kind for name, kind, _ in KINDS_HERE for sample in SAMPLES[name]}
    key = TrialKey("run", "baseline", "")
    sent = [EvalRequest(key._replace(sample_id=sample.id), sample, echo=True) for sample in EVERYTHING]
    async with mailbox(where, EvalRequest, request) as requests, mailbox(where, EvalReply, request) as replies:
        results = []
        for body in await carried(requests, sent):
            loop = EvalLoop(loop=annotated(kinds[body.key.sample_id]), evaluator=same, requests=InMemoryMailbox("r"))
            results.append(EvalReply(await loop.execute(body)))
        for reply in await carried(replies, results):
            result = reply.result
            assert verdict_of(result) == reference[result.sample_id], (result.sample_id, result.error)


@pytest.mark.parametrize("where", WHERE)
async def test_fleets_score_what_the_suite_has(
    where: str, tmp_path: Path, reference: Mapping[str, Verdict], request: pytest.FixtureRequest
) -> None:
    urls = {"redis": "redis_url", "postgresql": "pg_url", "sqs": "sqs_url"}
    broker = MemoryBroker() if where == "memory" else connect_broker(request.getfixturevalue(urls[where]))
    try:
        suite = EvalSuite("fleet", EVERYTHING, give_back, same)
        loops: list[EvalLoop] = []
        worker = asyncio.create_task(run_worker(suite, broker, started=loops.append))
        report = await suite.run(store=str(tmp_path / "runs.db"), mailbox=broker)
        loops[0].stop()
        await worker
        assert verdicts(report) == reference
    finally:
        await broker.close()


async def same_number(given: int) -> int:
    return given


def same_looking() -> Any:
    """A class that has the name of every other class that this returns."""

    @dataclass(frozen=True)
    class Item:
        value: int

    return Item


async def test_workers_use_the_suites_own_samples_where_names_are_ambiguous(tmp_path: Path, redis_url: str) -> None:
    items = [same_looking()(1), same_looking()(1)]
    dataset = Dataset([Sample(str(place), place, item) for place, item in enumerate(items)])

    def is_own(output: int, expected: Any) -> bool:
        return expected is items[output]

    broker = connect_broker(redis_url)
    try:
        suite = EvalSuite("same", dataset, same_number, is_own)
        loops: list[EvalLoop] = []
        worker = asyncio.create_task(run_worker(suite, broker, started=loops.append))
        report = await suite.run(store=str(tmp_path / "runs.db"), mailbox=broker)
        loops[0].stop()
        await worker
        assert [(result.outcome, result.passed, result.error) for result in report.results] == [
            ("scored", True, None)
        ] * 2
    finally:
        await broker.close()


async def test_two_hops_give_the_values_of_one(reference: Mapping[str, Verdict]) -> None:
    for name, kind, _ in KINDS_HERE:
        main = MainLoop(annotated(kind))
        main._resolved = resolve_task(main)
        for sample in SAMPLES[name]:
            if sample.id.startswith("JSON"):
                continue  # A MainLoop reads JSON as its input type, for callers that have no types.
            sent = MainLoopRequest.from_wire(MainLoopRequest(sample.input).to_wire())
            answer = type(reply := await main._answer_request(sent)).from_wire(reply.to_wire())
            assert answer.error is None or reference[sample.id][0] == "task_error", (sample.id, answer.error)
            assert answer.type_name == EvalRequest(sample=sample).type_names[0], sample.id


@pytest.mark.parametrize("path", ["loop", "isolated", "rescored"])
async def test_what_cannot_be_read_back_is_refused_and_never_scored_otherwise(path: str) -> None:
    samples = [Sample(str(at), value, value) for at, value in enumerate(UNREADABLE)]
    assert all(same(value, value).passed for value in UNREADABLE)
    if path == "loop":
        loop = EvalLoop(loop=give_back, evaluator=same, requests=InMemoryMailbox("r"))
        sent = [EvalRequest.from_wire(EvalRequest(sample=sample).to_wire()) for sample in samples]
        results = [await loop.execute(request) for request in sent]
    else:
        used = rules(task(isolate=True)(given_in_child) if path == "isolated" else give_back, same)
        results = []
        for sample in samples:
            key = TrialKey("run", used.experiments[0].name, sample.id)
            result = await run_trial(used, key, 0, sample, 0)
            if path == "rescored":
                assert result.passed
                stored = replace(result, output=decode(object, result.output_json or ""))
                # Another evaluator's sample, so that no value is at hand that says what the output was.
                result = await score_again(used, key, 0, Sample(sample.id, 1), stored, None)
            results.append(result)
        used.close()
    refused = [result for result in results if not result.passed]
    assert len(refused) >= 4
    for result in refused:
        assert result.outcome in ("task_error", "scorer_error"), result.sample_id
        assert "which cannot be resolved here" in str(result.error)


def test_the_table_has_every_type_that_the_codec_names() -> None:
    from fairtrial.base.codec.scalars import SCALARS

    shown = {kind for _, kind, _ in KINDS}
    assert {kind for kind in SCALARS if kind not in (None, type(None))} <= shown
    assert value_kinds.Item.__qualname__ == Item.__qualname__
    assert len(KINDS_HERE) >= 60
