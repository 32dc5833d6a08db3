"""A named evaluation: dataset, task, evaluator, experiments and settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import anyio

from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError
from fairtrial.frozen import EMPTY
from fairtrial.models.main_loop import prompt_task
from fairtrial.report.report import EvalReport
from fairtrial.runs.events import Observer
from fairtrial.runs.identity import evaluator_digest, identify
from fairtrial.runs.rescore import rescore_run
from fairtrial.runs.runner import Interrupt, Lifespan, OnResult, RunRequest, execute_run, prepare
from fairtrial.runs.sync import run_interruptibly
from fairtrial.scoring.evaluator import Evaluator, Scorer, resolve
from fairtrial.store import open_store
from fairtrial.store.memory import MemoryStore
from fairtrial.suites.stream import Feed, ResultStream, wait_for_left
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.experiment import Experiment

if TYPE_CHECKING:
    from fairtrial.fleet.post import PostOffice
    from fairtrial.models.adapter import ProviderAdapter
    from fairtrial.models.prompt import PromptTemplate
    from fairtrial.store.protocol import RunRecord, RunStore


class EvalSuite:
    """What to evaluate, and how.

    Args:
        name: What people call it; runs are listed under this name.
        dataset: The samples.
        task: The thing under test: any callable `(input)` or `(input, ctx)`, sync or async.
        evaluator: Scores the outputs.
        experiments: Variants of the task to run side by side; one named "baseline" unless given.
        config: Settings of the run.
        prompt: A prompt template to evaluate with `adapter`, in place of a task.
        adapter: The model behind the prompt; also handed to evaluators that ask for one.
        lifespan: Opens what all trials share (`ctx.shared`): a function that returns a context manager.
        version: The identity of the code, where you keep count yourself; the project's files are hashed otherwise.
    """

    def __init__(
        self,
        name: str,
        dataset: Dataset[Any, Any],
        task: Any = None,
        evaluator: Evaluator | Scorer | None = None,
        *,
        experiments: Sequence[Experiment] = (),
        config: EvalConfig | None = None,
        prompt: PromptTemplate[Any] | None = None,
        adapter: ProviderAdapter | None = None,
        lifespan: Lifespan | None = None,
        version: str | None = None,
    ) -> None:
        if prompt is not None:
            if task is not None or adapter is None:
                raise ConfigurationError(f"suite {name!r}: a prompt needs an adapter and takes the place of a task")
            task = prompt_task(prompt, adapter)
        if evaluator is None:
            raise ConfigurationError(f"suite {name!r} has no evaluator: give it one, such as exact_match")
        if not isinstance(dataset, Dataset):
            raise ConfigurationError(f"suite {name!r} needs a Dataset, not {type(dataset).__name__}")
        self.name = name
        self.dataset = dataset
        self.task = task
        self.evaluator = evaluator
        self.experiments = tuple(experiments)
        self.config = config or EvalConfig()
        self.adapter = adapter
        self.lifespan = lifespan
        self.version = version
        self.home = _calling_file(self)  # The file it was made in.
        self._feeds: set[Feed] = set()
        self._request(None, EMPTY, ())  # Whatever is wrong with it is said here, not at its first run.

    def prepared(self) -> RunRequest:
        """What a worker needs to know: tasks, experiments, evaluator and settings, checked."""
        return self._request(None, EMPTY, ())

    def _request(
        self,
        store: Any,
        tags: Mapping[str, str],
        observers: Sequence[Observer],
        *,
        fresh: bool = False,
        retry_errors: bool = False,
        run_id: str | None = None,
        force: bool = False,
    ) -> RunRequest:
        return prepare(
            self.name,
            self.dataset,
            self.task,
            self.evaluator,
            self.experiments,
            self.config,
            store=store,
            tags=tags,
            observers=observers,
            adapter=self.adapter,
            lifespan=self.lifespan,
            version=self.version,
            fresh=fresh,
            retry_errors=retry_errors,
            run_id=run_id,
            force=force,
            home=self.home,
        )

    async def run(
        self,
        *,
        store: RunStore | str | None = None,
        mailbox: PostOffice | str | None = None,
        bus: Observer | Sequence[Observer] = (),
        tags: Mapping[str, str] = EMPTY,
        fresh: bool = False,
        retry_errors: bool = False,
        run_id: str | None = None,
        force: bool = False,
    ) -> EvalReport:
        """Run the suite, or resume its latest run if that is unfinished, and report.

        A run is resumed only if its dataset, experiments, evaluator, settings and code are those of the suite.
        Otherwise a new one is started, and a `ResumeWarning` says what differs.

        Args:
            store: Where results are kept: a store, its URL, or the project's own `.fairtrial/runs.db`.
            mailbox: Where this suite's workers get their work, such as `redis://host:6379`; the trials are executed
                there. Without it they are executed in this process.
            bus: Told what happens: anything with `publish(event)`, or several.
            tags: Labels for the run and its sessions.
            fresh: Start a new run even if one is unfinished.
            retry_errors: Try again the trials that ended in an error.
            run_id: The run to resume; `RunMismatchError` if it differs from the suite.
            force: Resume although the code differs. The report then says that there are two code versions.
        """
        opened = _opened(store)
        request = self._request(
            opened, tags, _observers(bus), fresh=fresh, retry_errors=retry_errors, run_id=run_id, force=force
        )
        return EvalReport(opened, await self._carried_out(request, mailbox))

    def run_sync(
        self,
        *,
        store: RunStore | str | None = None,
        mailbox: PostOffice | str | None = None,
        bus: Observer | Sequence[Observer] = (),
        tags: Mapping[str, str] = EMPTY,
        fresh: bool = False,
        retry_errors: bool = False,
        run_id: str | None = None,
        force: bool = False,
    ) -> EvalReport:
        """`run`, from ordinary code."""
        opened = _opened(store)
        request = self._request(
            opened, tags, _observers(bus), fresh=fresh, retry_errors=retry_errors, run_id=run_id, force=force
        )
        run = run_interruptibly(
            lambda interrupt: self._carried_out(request, mailbox, interrupt=interrupt),
            durable=not isinstance(opened, MemoryStore),
        )
        return EvalReport(opened, run)

    def stream(
        self,
        *,
        store: RunStore | str | None = None,
        mailbox: PostOffice | str | None = None,
        bus: Observer | Sequence[Observer] = (),
        tags: Mapping[str, str] = EMPTY,
        fresh: bool = False,
    ) -> ResultStream:
        """Run the suite and iterate over its results as they arrive: `async for result in suite.stream()`.

        Leaving the iteration early stops the run, which can be resumed. To wait until it has stopped, use
        `async with suite.stream() as results`. The arguments are those of `run`.
        """

        async def execute(on_result: OnResult) -> None:
            request = self._request(_opened(store), tags, _observers(bus), fresh=fresh)
            await self._carried_out(request, mailbox, on_result=on_result)

        return ResultStream(execute, self._feeds)

    async def _carried_out(
        self,
        request: RunRequest,
        mailbox: PostOffice | str | None,
        *,
        interrupt: Interrupt | None = None,
        on_result: OnResult | None = None,
    ) -> RunRecord:
        await wait_for_left(self._feeds)
        if mailbox is None:
            return await execute_run(request, interrupt=interrupt, on_result=on_result)
        from fairtrial.fleet.dispatch import dispatch_run
        from fairtrial.fleet.post import open_post_office

        office = open_post_office(mailbox) if isinstance(mailbox, str) else mailbox
        try:
            return await dispatch_run(
                request,
                office,
                fingerprint=identify(request, samples=False).fingerprint,
                interrupt=interrupt,
                on_result=on_result,
            )
        finally:
            if office is not mailbox:
                with anyio.CancelScope(shield=True):
                    await office.close()

    async def rescore(
        self,
        run_id: str,
        evaluator: Evaluator | Scorer | None = None,
        *,
        store: RunStore | str | None = None,
        bus: Observer | Sequence[Observer] = (),
        fresh: bool = False,
    ) -> EvalReport:
        """Score the stored outputs and sessions of a run again, as a new run; the task is not called.

        The same call again goes on with a rescoring that was interrupted, and repeats scoring that failed.

        Args:
            run_id: The run whose outputs are scored. Its samples and experiments must be the suite's.
            evaluator: Scores them; the suite's own unless given.
            store: Where the run is.
            bus: Told what happens: anything with `publish(event)`, or several.
            fresh: Start a new run even if one is unfinished.
        """
        opened = _opened(store)
        request = self._rescoring(opened, evaluator, bus, fresh)
        return EvalReport(opened, await rescore_run(request, run_id, any_experiment=not self.experiments))

    def rescore_sync(
        self,
        run_id: str,
        evaluator: Evaluator | Scorer | None = None,
        *,
        store: RunStore | str | None = None,
        bus: Observer | Sequence[Observer] = (),
        fresh: bool = False,
    ) -> EvalReport:
        """`rescore`, from ordinary code."""
        opened = _opened(store)
        request = self._rescoring(opened, evaluator, bus, fresh)
        run = run_interruptibly(
            lambda interrupt: rescore_run(request, run_id, any_experiment=not self.experiments, interrupt=interrupt),
            durable=not isinstance(opened, MemoryStore),
        )
        return EvalReport(opened, run)

    def _rescoring(
        self, store: RunStore, evaluator: Evaluator | Scorer | None, bus: Observer | Sequence[Observer], fresh: bool
    ) -> RunRequest:
        request = self._request(store, EMPTY, _observers(bus), fresh=fresh)
        if evaluator is None:
            return request
        scorer = resolve(evaluator)
        return replace(
            request,
            scorer=scorer,
            rules=replace(request.rules, scorer=scorer),
            evaluator=evaluator,
            evaluator_digest=evaluator_digest(evaluator),
        )


def _calling_file(suite: EvalSuite) -> str:
    """Return the file of the code that makes a suite: not ours, and not the `__init__` of a subclass."""
    ours = __name__.partition(".")[0]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] != ours and suite not in (frame.f_locals.get(name) for name in _first(frame)):
            return str(frame.f_globals.get("__file__", ""))
        frame = frame.f_back
    return ""


def _first(frame: FrameType) -> tuple[str, ...]:
    """Return the name of the first parameter of the function that a frame executes."""
    return frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()


def _opened(store: RunStore | str | None) -> RunStore:
    return open_store(store) if store is None or isinstance(store, str) else store


def _observers(bus: Observer | Sequence[Observer]) -> Sequence[Observer]:
    return bus if isinstance(bus, Sequence) else (bus,)


def _as_dataset(samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]]) -> Dataset[Any, Any]:
    return samples if isinstance(samples, Dataset) else Dataset(samples)


def _evaluation(
    samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]],
    task: Any,
    evaluator: Evaluator | Scorer,
    config: EvalConfig | None,
    experiments: Sequence[Experiment],
) -> EvalSuite:
    dataset = _as_dataset(samples)
    settings = config or EvalConfig()
    name = settings.experiment_name or _suite_name(dataset.name)
    return EvalSuite(name, dataset, task, evaluator, experiments=experiments, config=settings)


def _suite_name(name: str) -> str:
    """A name for a suite, made of a dataset's: `openai/gsm8k` becomes `openai-gsm8k`."""
    return re.sub(r"[:@/\s]+", "-", name).strip("-") or "dataset"


async def evaluate(
    samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]],
    task: Any,
    evaluator: Evaluator | Scorer,
    config: EvalConfig | None = None,
    *,
    experiments: Sequence[Experiment] = (),
    store: RunStore | str | None = None,
    tags: Mapping[str, str] = EMPTY,
) -> EvalReport:
    """Evaluate a task on samples, in memory unless a store is given."""
    suite = _evaluation(samples, task, evaluator, config, experiments)
    return await suite.run(store="memory:" if store is None else store, tags=tags)


def evaluate_sync(
    samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]],
    task: Any,
    evaluator: Evaluator | Scorer,
    config: EvalConfig | None = None,
    *,
    experiments: Sequence[Experiment] = (),
    store: RunStore | str | None = None,
    tags: Mapping[str, str] = EMPTY,
) -> EvalReport:
    """`evaluate`, from ordinary code and notebooks."""
    suite = _evaluation(samples, task, evaluator, config, experiments)
    return suite.run_sync(store="memory:" if store is None else store, tags=tags)
