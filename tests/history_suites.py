"""What really happens to runs in a history: suites that run, retries by late workers, rescoring, and `store prune`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import zlib
from collections.abc import Callable
from io import StringIO
from pathlib import Path

from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Sample, Score, TrialContext
from fairtrial.cli.app import invoke
from fairtrial.fleet import EvalLoopConfig, MemoryBroker, connect_broker
from fairtrial.store import RunStore
from fairtrial.suites.worker import run_worker


def number_of(*parts: object) -> int:
    """Return a number that is as good as random, and the same in every process."""
    return zlib.crc32(repr(parts).encode())


class HistorySuite:
    """A suite some of whose trials fail: some always, some until a worker `works`."""

    def __init__(self, name: str, samples: list[Sample[str, str]], experiments: tuple[str, ...], repeats: int) -> None:
        self.name = name
        self.works = threading.Event()
        self.judge = Judge(name)
        self.suite = EvalSuite(
            name, Dataset(samples, name="d", version="1"), self.task, self.judge,
            experiments=[Experiment(name) for name in experiments],
            config=EvalConfig(repeats=repeats, max_same_errors=0),
        )  # fmt: skip

    def outcome(self, experiment: str, given: str, repeat: int) -> str:
        kind = number_of(self.name, experiment, given, repeat) % 6
        return "task_error" if kind == 0 or (kind < 3 and not self.works.is_set()) else "scored"

    async def task(self, given: str, ctx: TrialContext) -> str:
        if self.outcome(ctx.experiment.name, given, ctx.key.repeat) != "scored":
            raise ValueError("no")
        return "out"

    def run(self, store: RunStore) -> str:
        """Run the suite in this process."""
        return asyncio.run(self.suite.run(store=store)).run_id

    def run_late(self, store: RunStore, run_id: str, url: str | None, end: Callable[[], None]) -> None:
        """Retry the errors of a run by a worker that begins when its client is gone and the run has ended."""
        self.works.set()
        asyncio.run(self._run_late(store, run_id, url, end))

    async def _run_late(self, store: RunStore, run_id: str, url: str | None, end: Callable[[], None]) -> None:
        broker = MemoryBroker() if url is None else connect_broker(url)
        client = asyncio.create_task(self.suite.run(store=store, mailbox=broker, resume=f"errors:{run_id}"))
        requests = await broker.requests(self.name)
        errors = sum(result.score is None for result in store.results(run_id))
        async with asyncio.timeout(30):
            while (await requests.depth()).waiting < errors:  # noqa: ASYNC110 - the queue tells nobody
                await asyncio.sleep(0.01)
        client.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await client
        end()
        config = EvalLoopConfig(empty_seconds=0.1)
        await run_worker(self.suite, broker, store=None if url else store, config=config, until_empty=True)
        await broker.close()


class Judge:
    """An evaluator with verdicts of its own, which differ from what the values say."""

    def __init__(self, name: str) -> None:
        self.name = name

    def score(self, given: str) -> Score:
        number = number_of(self.name, given)
        value = (0.0, 0.25, 0.5, 1.0)[number % 4]
        return Score(value, passed=(value >= 0.5) != (number % 10 == 0))

    def __call__(self, output: str | None, input: str) -> Score:
        return self.score(input)


def rescore(store: RunStore, run_id: str, samples: list[Sample[str, str]], name: str) -> tuple[str, Judge]:
    """Score the outputs of a run again, by the suite that has all samples; return the new run and its evaluator."""
    judge = Judge(name)
    suite = EvalSuite("rescoring", Dataset(samples, name="d", version="1"), str, judge)
    return asyncio.run(suite.rescore(run_id, judge, store=store)).run_id, judge


def prune(url: str, folder: Path, *, keep_last: int) -> list[str]:
    """Delete the runs that ended more than a day ago by the command; return their ids."""
    printed = StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        words = ["store", "prune", "--older-than", "1d", "--keep-last", str(keep_last), "--yes", "--json"]
        assert invoke([*words, "--store", url]) == 0
    return json.loads(printed.getvalue())["runs"]  # type: ignore[no-any-return]
