"""Worker processes of a suite."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Sample, TrialContext, exact_match, open_store
from fairtrial.base.isolation import ChildDiedError, IsolatedError, IsolatedRunner
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest, MemoryBroker
from fairtrial.fleet.worker.execution import SuspectPool
from fairtrial.runs.code import project_files
from fairtrial.runs.identity import identify
from fairtrial.suites.worker import execute_requests, execute_suspects, run_worker
from fairtrial.trials.context import TrialKey
from tests.fleet.processes import Processes, end, said, wait_for_lines
from tests.redis_server import RedisServer


def fingerprint(suite: EvalSuite) -> str:
    return identify(suite.prepared(), samples=False).fingerprint


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def fleet(tmp_path: Path, redis_url: str) -> Iterator[Processes]:
    with Processes(tmp_path, redis_url, traced=True, samples=200, log=tmp_path / "executed") as processes:
        yield processes


@dataclass(frozen=True)
class Question:
    text: str


def questions(suite_name: str = "asked", **options: Any) -> EvalSuite:
    async def answer(question: Question, ctx: TrialContext) -> str:
        assert isinstance(question, Question)
        return f"{ctx.shared}: {question.text}{ctx.experiment.params.get('mark', '')}"

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[str]:
        yield "shared"

    data = Dataset([Sample(f"q{i}", Question(f"why {i}"), f"shared: why {i}?") for i in range(30)])
    return EvalSuite(
        suite_name,
        data,
        answer,
        exact_match,
        experiments=[Experiment("plain"), Experiment("marked", {"mark": "?"})],
        lifespan=lifespan,
        **options,
    )


@pytest.mark.proves("R49", "R59", "R60")
async def test_a_worker_runs_the_suites_tasks_with_their_types_parameters_and_lifespan() -> None:
    broker = MemoryBroker()
    loops: list[EvalLoop] = []
    worker = asyncio.create_task(run_worker(questions(), broker, started=loops.append))
    report = await questions().run(store="memory:", mailbox=broker)
    loops[0].stop()
    assert (await worker) is loops[0]
    assert (report["plain"].pass_rate, report["marked"].pass_rate) == (0.0, 1.0)
    assert report["plain"].results[0].output == "shared: why 0"
    assert loops[0].counters.finished == 60


async def test_a_worker_collects_garbage_less_often() -> None:
    seen: list[int] = []

    def threshold(number: int) -> int:
        seen.append(gc.get_threshold()[0])
        return number

    suite = EvalSuite("s", Dataset([Sample("s", 1, 1)]), threshold, exact_match, version="1")
    broker, before = MemoryBroker(), gc.get_threshold()
    requests, results = await broker.requests("s"), await broker.results("s", "r")
    await requests.send(EvalRequest(TrialKey("r", "baseline", "s"), Sample("s", 1, 1)), reply_to=results)
    await run_worker(suite, broker, max_iterations=2, config=EvalLoopConfig(wait_seconds=0.1))
    assert seen == [10_000]
    assert gc.get_threshold() == before


async def test_the_labels_of_a_run_reach_the_sessions_on_workers() -> None:
    def labels(number: int, ctx: TrialContext) -> dict[str, str]:
        return dict(ctx.session.tags)

    def suite() -> EvalSuite:
        return EvalSuite("labels", Dataset([Sample("s", 1, 1)], name="one"), labels, exact_match, version="1")

    broker = MemoryBroker()
    loops: list[EvalLoop] = []
    worker = asyncio.create_task(run_worker(suite(), broker, started=loops.append))
    tags = {"team": "süß 测试", "ticket": "42"}
    there = await suite().run(store="memory:", mailbox=broker, tags=tags)
    loops[0].stop()
    await worker
    here = await suite().run(store="memory:", tags=tags)
    (fleet,), (local,) = there.results, here.results
    assert {name: fleet.output[name] for name in tags} == tags
    assert fleet.output.keys() == local.output.keys()


async def test_workers_with_other_code_refuse_and_those_that_allow_drift_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = MemoryBroker()
    loops: list[EvalLoop] = []
    config = EvalLoopConfig(refuse_seconds=0.05)
    other = asyncio.create_task(run_worker(questions(version="2"), broker, config=config, started=loops.append))
    run = asyncio.create_task(questions(version="1").run(store="memory:", mailbox=broker))
    while "were made from other code" not in caplog.text:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)
    assert not run.done()
    allowed = EvalLoopConfig(allow_drift=True)
    right = asyncio.create_task(run_worker(questions(version="2"), broker, config=allowed, started=loops.append))
    assert (await run).total == 60
    for loop in loops:
        loop.stop()
    await asyncio.gather(other, right)
    assert loops[0].counters.finished == 0
    assert loops[0].counters.refused > 0


async def test_workers_may_write_the_store_themselves_and_the_client_finds_the_results_there(tmp_path: Path) -> None:
    broker, url = MemoryBroker(), f"{tmp_path}/runs.db"
    loops: list[EvalLoop] = []
    seen: list[Any] = []

    class Watcher:
        def publish(self, event: Any) -> None:
            seen.append(type(event).__name__)

    worker = asyncio.create_task(run_worker(questions(), broker, store=url, started=loops.append))
    report = await questions().run(store=url, mailbox=broker, bus=Watcher())
    loops[0].stop()
    await worker
    assert (report.status, report.total, loops[0].counters.finished) == ("finished", 60, 60)
    assert seen.count("SampleEvaluated") == 60
    assert report["plain"].results[0].sample.input == {"text": "why 0"}


class TestFingerprint:
    PROJECT = {
        "evals/cases.py": "import helpers.words\nfrom helpers import marks as m\nLIMIT = 3\n",
        "helpers/__init__.py": "",
        "helpers/words.py": "import json\nfrom .deep import DEPTH\n",
        "helpers/deep.py": "DEPTH = 1\n",
        "helpers/marks.py": "def lazily():\n    import helpers.late\n",
        "helpers/late.py": "",
        "evals/support.py": (
            "from typing import TYPE_CHECKING\nfrom cases import LIMIT\nfrom fairtrial import *\n"
            "if TYPE_CHECKING:\n    import unrelated\n"
            "suite = EvalSuite('s', Dataset.of({'a': 'b'}), str.upper, exact_match)\n"
        ),
        "unrelated.py": "X = 1\n",
        "client.py": "import unrelated\nimport helpers.late\nfrom evals.support import suite\n",
    }
    SHOW = (
        "from fairtrial.runs.code import project_files\nfrom fairtrial.runs.identity import identify\n"
        "print(identify(suite.prepared(), samples=False).fingerprint, "
        "*[f.rpartition('/')[2] for f in project_files(suite.home)])"
    )

    @pytest.fixture
    def project(self, tmp_path: Path) -> Path:
        for name, text in self.PROJECT.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return tmp_path

    def client(self, child: Any, project: Path) -> list[str]:
        code = f"import sys\nsys.path[:0] = ['', 'evals']\nfrom client import suite\n{self.SHOW}"
        return str(child(code, cwd=project)).split()

    def worker(self, child: Any, cwd: Path, file: str = "evals/support.py") -> list[str]:
        paths = "import sys\nsys.path.append('..')\n" if file == "support.py" else ""
        code = f"{paths}from fairtrial.suites.loading import load_suite\nsuite = load_suite({file!r})\n{self.SHOW}"
        return str(child(code, cwd=cwd)).split()

    @pytest.mark.proves("R59")
    def test_client_and_worker_agree_although_they_are_different_programs(self, child: Any, project: Path) -> None:
        made = self.client(child, project)
        assert made == self.worker(child, project)
        names = ["__init__.py", "cases.py", "deep.py", "late.py", "marks.py", "support.py", "words.py"]
        assert sorted(made[1:]) == names
        assert self.worker(child, project / "evals", "support.py")[0] == made[0]

    @pytest.mark.long
    def test_a_change_in_anything_the_suite_imports_changes_it_and_a_change_elsewhere_does_not(
        self, child: Any, project: Path
    ) -> None:
        before = self.worker(child, project)[0]
        (project / "unrelated.py").write_text("X = 2\n")
        assert self.worker(child, project)[0] == before
        (project / "helpers/deep.py").write_text("DEPTH = 2\n")
        assert self.worker(child, project)[0] != before

    def test_a_version_takes_the_place_of_the_code(self) -> None:
        one, two = questions(version="1"), questions(version="2")
        assert fingerprint(one) == fingerprint(one)
        assert fingerprint(one) != fingerprint(two)
        assert any(file.endswith("test_worker.py") for file in project_files(one.home))

    def test_settings_that_matter_to_a_trial_are_part_of_it(self) -> None:
        one = questions(version="1", config=EvalConfig(timeout_seconds=5))
        two = questions(version="1", config=EvalConfig(timeout_seconds=6))
        more = questions(version="1", config=EvalConfig(timeout_seconds=5, max_concurrent=99))
        assert fingerprint(one) != fingerprint(two)
        assert fingerprint(one) == fingerprint(more)


@pytest.mark.proves("R59", "R60", "R61")
def test_processes_share_a_run_and_end_cleanly(fleet: Processes, tmp_path: Path) -> None:
    workers = [fleet.worker(), fleet.worker("--concurrency", "5", "--name", "second")]
    answer = said(fleet.client(f"{tmp_path}/runs.db"))
    assert (answer["status"], answer["successful"]) == ("finished", 200), fleet.logs()
    assert [end(worker) for worker in workers] == [0, 0], fleet.logs()
    executed = (tmp_path / "executed").read_text().split()
    assert sorted(map(int, executed)) == list(range(200))


@pytest.mark.proves("R83")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_told_to_end_finishes_what_is_in_flight_and_hands_over_the_rest(
    fleet: Processes, tmp_path: Path, number: signal.Signals
) -> None:
    first = fleet.worker(sleep="0.3,0.4")
    client = fleet.client(f"{tmp_path}/runs.db", sleep="0.3,0.4")
    wait_for_lines(tmp_path / "executed", 10)
    assert end(first, number=number) == 0, fleet.logs()
    begun = len((tmp_path / "executed").read_text().split())
    assert begun < 200
    fleet.worker(sleep="0,0.01")
    assert said(client)["successful"] == 200
    executed = (tmp_path / "executed").read_text().split()
    assert sorted(map(int, executed)) == list(range(200))  # Nothing was begun twice.


def test_an_interrupted_client_withdraws_its_requests_and_says_how_to_resume(
    fleet: Processes, tmp_path: Path, redis_server: RedisServer
) -> None:
    fleet.worker(sleep="0.3,0.4")  # On a busy machine, the client handles its signal seconds later.
    client = fleet.client(f"{tmp_path}/runs.db")
    wait_for_lines(tmp_path / "executed", 10)
    assert end(client, number=signal.SIGINT) == -signal.SIGINT
    assert "Resume it with: python" in fleet.logs()
    with redis_server.client() as redis:
        assert redis.xlen("{fairtrial:fleet-test.requests}:stream") <= 20  # What is in flight, and no more.
    store = open_store(f"{tmp_path}/runs.db")
    assert [run.status for run in store.runs()] == ["interrupted"]
    store.close()
    fleet.worker(sleep="0,0.01")
    answer = said(fleet.client(f"{tmp_path}/runs.db"))
    assert (answer["status"], answer["successful"]) == ("finished", 200)
    assert sorted(map(int, (tmp_path / "executed").read_text().split())) == list(range(200))


@pytest.mark.proves("R82")
@pytest.mark.long
def test_a_trial_that_kills_its_workers_is_dead_lettered_in_a_process_of_its_own_and_its_neighbours_are_not(
    fleet: Processes, tmp_path: Path
) -> None:
    fleet.settings = {**fleet.settings, "poison": 77, "sleep": "0.05,0.1"}
    client = fleet.client(f"{tmp_path}/runs.db")
    workers = [fleet.worker("--lease", "1")]
    while client.poll() is None:
        if workers[-1].poll() is not None:  # As a supervisor would.
            workers.append(fleet.worker("--lease", "1"))
        try:
            client.wait(0.05)
        except subprocess.TimeoutExpired:
            pass
    answer = said(client)
    assert (answer["status"], answer["errors"]) == ("finished", {"dead_letter": 1}), fleet.logs()
    assert answer["successful"] == 199
    assert len(workers) == 2
    assert "the trial crashes its process" in fleet.logs()


@pytest.mark.long
@pytest.mark.proves("R82")
def test_a_trial_that_stalls_the_interpreter_of_its_worker_is_an_error_and_the_other_worker_finishes_the_run(
    fleet: Processes, tmp_path: Path
) -> None:
    fleet.settings = {**fleet.settings, "stall": 7, "samples": 60, "timeout": 2, "sleep": "0.05,0.1"}
    workers = [fleet.worker("--lease", "3", "--isolated-processes", "1") for _ in range(2)]
    answer = said(fleet.client(f"{tmp_path}/runs.db"))
    assert (answer["status"], answer["errors"]) == ("finished", {"timeout": 1}), fleet.logs()
    assert answer["successful"] == 59
    assert sorted(worker.poll() is None for worker in workers) == [False, True], fleet.logs()
    logs = "".join(path.read_text() for path in tmp_path.glob("worker-*.log"))
    assert "its interpreter has been stalled for" in logs
    assert "fleet_suite.py" in logs.partition("Fatal Python error")[2]  # The stack says where.


async def test_a_suspected_trial_has_the_suites_lifespan() -> None:
    request = EvalRequest(TrialKey("r", "marked", "q1"), Sample("q1", Question("why 1"), "shared: why 1?"), 3, 1)
    sent: list[Any] = []
    await execute_requests(questions(), [request.to_wire()], sent.append)
    ((_, answer),) = [part for part in sent if part is not None]
    reply = EvalReply.from_wire(answer)
    assert (reply.result.outcome, reply.result.passed, reply.result.ordinal) == ("scored", True, 3)


ALONE = """
import sys
from contextlib import contextmanager
from fairtrial import Dataset, EvalSuite, Sample, exact_match

@contextmanager
def lifespan():
    if {opens}:
        yield "shared"
        raise OSError("does not close")
    raise OSError("no database today")

def echo(given):
    return given

suite = EvalSuite("alone", Dataset([Sample("s", 1, 1)]), echo, exact_match, lifespan=lifespan, version="1")
"""


@pytest.mark.parametrize("fault", ["no database today", "fails when it is imported", ""])
async def test_a_suspect_is_not_dead_lettered_because_its_process_could_not_begin_or_close(
    tmp_path: Path, fault: str
) -> None:
    text = "1 / 0" if "import" in fault else ALONE.format(opens=not fault)
    (tmp_path / "alone_suite.py").write_text(text)
    runner = IsolatedRunner()
    execute = partial(execute_suspects, str(tmp_path / "alone_suite.py"))
    config = EvalLoopConfig(concurrency=1, isolated_processes=1, buffer_seconds=1)
    pool = SuspectPool(execute, runner, config, limit_seconds=60)
    request = EvalRequest(TrialKey("run", "baseline", "s"), Sample("s", 1, 1))
    try:
        if not fault:
            assert EvalReply.from_wire(await pool.run(request.to_wire())).result.outcome == "scored"
            return
        with pytest.raises(IsolatedError, match="could not begin") as told:
            await pool.run(request.to_wire())
    finally:
        runner.close()
    assert not isinstance(told.value, ChildDiedError)
    assert ("no database today" if "database" in fault else "alone_suite.py") in str(told.value)


def test_a_suites_home_is_the_file_of_the_code_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "house_suites.py").write_text(
        textwrap.dedent(
            """
            from fairtrial import EvalSuite

            class HouseSuite(EvalSuite):
                def __init__(self, name, dataset, task, evaluator):
                    super().__init__(name, dataset, task, evaluator)
            """
        )
    )
    import importlib

    from fairtrial.suites import suite as module

    house = importlib.import_module("house_suites")
    data = Dataset.of({1: 1}, name="one")
    assert house.HouseSuite("house", data, abs, exact_match).home == __file__
    assert EvalSuite("plain", data, abs, exact_match).home == __file__
    assert module._evaluation(data, abs, exact_match, None, ()).home == __file__
    del sys.modules["house_suites"]
