"""A named evaluation: dataset, task, evaluator, experiments and settings."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, overload

import anyio
from typing_extensions import TypeVar

from fairtrial.base.frozen import EMPTY
from fairtrial.base.sync_bridge import call_sync
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError, MailboxError
from fairtrial.reports.figures.analysis_plan import AnalysisPlan
from fairtrial.reports.report import EvalReport
from fairtrial.runs.baseline import Baseline, describe_code
from fairtrial.runs.events import Observer
from fairtrial.runs.executor import OpenExecutor
from fairtrial.runs.identity import identify
from fairtrial.runs.plan import Lifespan, RunRequest, parse_resume
from fairtrial.runs.rescore import rescore_run
from fairtrial.runs.runner import Interrupt, OnResult, execute_run, prepare
from fairtrial.runs.sync import run_interruptibly
from fairtrial.scoring.evaluator import Evaluator, Scorer, resolve
from fairtrial.scoring.parameters import name_of
from fairtrial.store import open_store
from fairtrial.store.memory import MemoryStore
from fairtrial.suites.stream import Feed, ResultStream, wait_for_left
from fairtrial.trials.config import EvalConfig, Experiment
from fairtrial.trials.result import EvalResult, OutputT

if TYPE_CHECKING:
    from fairtrial.fleet.queues import Broker
    from fairtrial.models.adapter import ProviderAdapter
    from fairtrial.store.protocol import RunRecord, RunStore
    from fairtrial.suites.signatures import AsyncTask, SuiteEvaluator, SyncTask
    from fairtrial.trials.context import TraceSource

InputT = TypeVar("InputT", default=Any)
ExpectedT = TypeVar("ExpectedT", default=Any)


class EvalSuite(Generic[InputT, OutputT, ExpectedT]):  # noqa: UP046 - they have defaults
    """What to evaluate, and how.

    Args:
        name: The name of the suite, under which its runs are listed; by default that of the dataset.
        dataset: The samples.
        task: The code under test: any callable `(input)` or `(input, ctx)`, sync or async; for a prompt,
            `prompt_task(prompt, adapter)`.
        evaluator: Scores the outputs.
        experiments: Variants of the task to compare; by default one named "baseline".
        config: Settings of the run.
        adapter: The model of evaluators with an `adapter` parameter and of judges without a model of their own.
        lifespan: A function that returns a context manager; its value is shared by all trials as `ctx.shared`.
        version: The version of the code; by default a hash of the project's files.
        traces: Collects the spans of the application under test, such as
            `fairtrial.integrations.tracing.TraceReceiver`; they become events of the trials' sessions.
    """

    @overload
    def __init__(
        self,
        name: str = "",
        dataset: Dataset[InputT, ExpectedT] | None = None,
        task: AsyncTask[InputT, OutputT] = ...,
        evaluator: SuiteEvaluator[InputT, OutputT, ExpectedT] | None = None,
        *,
        experiments: Sequence[Experiment] = (),
        config: EvalConfig | None = None,
        adapter: ProviderAdapter | None = None,
        lifespan: Lifespan | None = None,
        version: str | None = None,
        traces: TraceSource | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str = "",
        dataset: Dataset[InputT, ExpectedT] | None = None,
        task: SyncTask[InputT, OutputT] | None = None,
        evaluator: SuiteEvaluator[InputT, OutputT, ExpectedT] | None = None,
        *,
        experiments: Sequence[Experiment] = (),
        config: EvalConfig | None = None,
        adapter: ProviderAdapter | None = None,
        lifespan: Lifespan | None = None,
        version: str | None = None,
        traces: TraceSource | None = None,
    ) -> None: ...
    def __init__(
        self,
        name: str = "",
        dataset: Dataset[InputT, ExpectedT] | None = None,
        task: Any = None,
        evaluator: Evaluator | Scorer | None = None,
        *,
        experiments: Sequence[Experiment] = (),
        config: EvalConfig | None = None,
        adapter: ProviderAdapter | None = None,
        lifespan: Lifespan | None = None,
        version: str | None = None,
        traces: TraceSource | None = None,
    ) -> None:
        _check_name(name)
        if not name and isinstance(dataset, Dataset):
            name = suite_name(dataset.name)
        if evaluator is None:
            raise ConfigurationError(f"suite {name!r} must have an evaluator, such as evaluator=exact_match")
        if not isinstance(dataset, Dataset):
            raise ConfigurationError(
                f"the dataset of suite {name!r} must be a Dataset (got {type(dataset).__name__})\n"
                'write Dataset.of({"2+2": "4"}), Dataset.load("questions.jsonl"), or '
                'Dataset([Sample("id", input, expected)])'
            )
        self.name = name
        self.dataset = dataset
        self.task = task
        self.evaluator = evaluator
        self.experiments = tuple(experiments)
        self.config = _checked_config(config)
        self.adapter = adapter
        self.lifespan = lifespan
        self.version = version
        self.traces = traces
        self.home = _calling_file(self)  # The file it was made in.
        self._feeds: set[Feed] = set()
        self._baseline = Baseline()
        self._request(None, EMPTY, ())  # Describe the code, and report invalid settings now.

    def __repr__(self) -> str:
        variants = f", {len(self.experiments)} experiments" if self.experiments else ""
        return (
            f"<{type(self).__name__} {self.name!r}: {len(self.dataset):,} samples of {self.dataset.name!r}{variants}>"
        )

    def prepared(self) -> RunRequest:
        """Return the checked tasks, experiments, evaluator and settings, as a worker needs them."""
        return self._request(None, EMPTY, ())

    def _request(
        self,
        store: Any,
        tags: Mapping[str, str] | None,
        observers: Sequence[Observer],
        *,
        resume: str = "auto",
        allow_changed_code: bool = False,
        once: str | None = None,
        plan: AnalysisPlan | None = None,
    ) -> RunRequest:
        if plan is not None and not plan.is_for(self.name):
            raise ConfigurationError(f"the plan is for suite {plan.suite!r} (got {self.name!r})")
        request = prepare(
            self.name,
            self.dataset,
            self.task,
            self.evaluator,
            self.experiments,
            self.config,
            store=store,
            tags=EMPTY if tags is None else tags,
            observers=observers,
            adapter=self.adapter,
            lifespan=self.lifespan,
            version=self.version,
            resume=parse_resume(resume),
            allow_changed_code=allow_changed_code,
            once=once,
            home=self.home,
            traces=self.traces,
            baseline=self._baseline,
        )
        return request if plan is None else replace(request, plan=plan)

    async def run(
        self,
        *,
        store: RunStore | str | None = None,
        mailbox: Broker | str | None = None,
        bus: Observer | Sequence[Observer] | None = None,
        tags: Mapping[str, str] | None = None,
        resume: str = "auto",
        allow_changed_code: bool = False,
        once: str | None = None,
        plan: AnalysisPlan | None = None,
        progress: bool = False,
    ) -> EvalReport[OutputT]:
        """Run the suite, or resume its latest run if that is unfinished, and report.

        A run is resumed only if its dataset, experiments, evaluator, settings and code are those of the suite.
        Otherwise a new one is started, and a `ResumeWarning` says what differs.

        Args:
            store: The store for the results, or its URL; by default the project's `.fairtrial/runs.db`.
            mailbox: The broker of this suite's workers, such as `redis://host:6379` or
                `postgresql://host/database`, which execute the trials. Without it they are executed in this process.
            bus: Receives the events of the run: an object with `publish(event)`, or several.
            tags: Labels for the run and its sessions.
            resume: `"auto"` resumes the latest run if it is unfinished, `"never"` starts a new one, and `"errors"` also
                resumes a finished run to retry the trials that ended in an error. The id of a run resumes that run, or
                raises `RunMismatchError` if it differs from the suite; `"errors:ID"` also retries its errors.
            allow_changed_code: Resume even if the code has changed. The report then says that there are two code
                versions.
            once: A key: the run of this suite that has it is resumed, and never executed again when it is finished.
            plan: What will be compared and how (`AnalysisPlan`), stored before the first trial. A resumed run keeps its
                own; another one is recorded with the number of results that there were.
            progress: Show the progress of the run on standard error: a live display on a terminal, a live line in a
                notebook, and a line every 15 seconds elsewhere.
        """
        with self._prepare(store, bus, tags, resume, allow_changed_code, once, plan, progress) as request:
            run = await self._execute(request, mailbox)
        return EvalReport(request.store, run, output_types=_output_types(request))

    def run_sync(
        self,
        *,
        store: RunStore | str | None = None,
        mailbox: Broker | str | None = None,
        bus: Observer | Sequence[Observer] | None = None,
        tags: Mapping[str, str] | None = None,
        resume: str = "auto",
        allow_changed_code: bool = False,
        once: str | None = None,
        plan: AnalysisPlan | None = None,
        progress: bool = False,
    ) -> EvalReport[OutputT]:
        """Blocking version of `run`."""
        with self._prepare(store, bus, tags, resume, allow_changed_code, once, plan, progress) as request:
            run = run_interruptibly(
                lambda interrupt: self._execute(request, mailbox, interrupt=interrupt),
                durable=not isinstance(request.store, MemoryStore),
            )
        return EvalReport(request.store, run, output_types=_output_types(request))

    @contextmanager
    def _prepare(
        self,
        store: RunStore | str | None,
        bus: Observer | Sequence[Observer] | None,
        tags: Mapping[str, str] | None,
        resume: str,
        allow_changed_code: bool,
        once: str | None,
        plan: AnalysisPlan | None,
        progress: bool,
    ) -> Iterator[RunRequest]:
        """Return the checked parameters of a run, and show its progress during the block."""
        opened = _opened(store)
        with _show_progress(progress, opened, parse_resume(resume).retry_errors) as observers:
            yield self._request(
                opened,
                tags,
                (*_observers(bus), *observers),
                resume=resume,
                allow_changed_code=allow_changed_code,
                once=once,
                plan=plan,
            )

    def stream(
        self,
        *,
        store: RunStore | str | None = None,
        mailbox: Broker | str | None = None,
        bus: Observer | Sequence[Observer] | None = None,
        tags: Mapping[str, str] | None = None,
        resume: str = "auto",
    ) -> ResultStream:
        """Run the suite and iterate over its results as they arrive: `async for result in suite.stream()`.

        Leaving the iteration early stops the run, which can be resumed. To wait until it has stopped, use
        `async with suite.stream() as results`. The arguments are those of `run`.

        The next `stream` of the same suite and store resumes the run and yields only the results that were not stored
        yet. All results of the run are in `EvalReport.load(store, "name of the suite").results`. With `resume="never"`,
        a new run begins.
        """

        async def execute(on_result: OnResult) -> None:
            request = self._request(_opened(store), tags, _observers(bus), resume=resume)
            await self._execute(request, mailbox, on_result=on_result)

        return ResultStream(execute, self._feeds)

    def stream_sync(
        self,
        *,
        store: RunStore | str | None = None,
        mailbox: Broker | str | None = None,
        bus: Observer | Sequence[Observer] | None = None,
        tags: Mapping[str, str] | None = None,
        resume: str = "auto",
    ) -> Iterator[EvalResult[OutputT]]:
        """Blocking version of `stream`: `for result in suite.stream_sync()`."""
        results = EvalSuite.stream(self, store=store, mailbox=mailbox, bus=bus, tags=tags, resume=resume)
        try:
            while True:
                try:
                    result = call_sync(results.__anext__)
                except StopAsyncIteration:
                    return
                yield result
        finally:
            call_sync(results.aclose)

    async def _execute(
        self,
        request: RunRequest,
        mailbox: Broker | str | None,
        *,
        interrupt: Interrupt | None = None,
        on_result: OnResult | None = None,
    ) -> RunRecord:
        if not len(request.dataset):
            raise ConfigurationError(
                f"dataset {request.dataset.name!r} of suite {self.name!r} has no samples, so nothing was run\n"
                "check the dataset file, or the code that creates the samples"
            )
        await wait_for_left(self._feeds)
        if mailbox is None:
            return await execute_run(
                request, open_executor=_executor(request), interrupt=interrupt, on_result=on_result
            )
        from fairtrial.fleet.client.dispatch import dispatch_run
        from fairtrial.fleet.queues import connect_broker

        broker = connect_broker(mailbox) if isinstance(mailbox, str) else mailbox
        try:
            return await dispatch_run(
                request,
                broker,
                fingerprint=identify(request, samples=False).fingerprint,
                interrupt=interrupt,
                on_result=on_result,
            )
        finally:
            if broker is not mailbox:
                with anyio.CancelScope(shield=True), suppress(MailboxError):  # The run has ended, however it did.
                    await broker.close()

    async def rescore(
        self,
        run_id: str,
        evaluator: Evaluator | Scorer | None = None,
        *,
        store: RunStore | str | None = None,
        bus: Observer | Sequence[Observer] | None = None,
        resume: str = "auto",
    ) -> EvalReport[OutputT]:
        """Score the stored outputs and sessions of a run again, as a new run; the task is not called.

        Repeating the call resumes a rescoring that was interrupted, and repeats failed scoring.

        Args:
            run_id: The run whose outputs are scored. Its samples and experiments must be the suite's.
            evaluator: Scores them; by default the suite's own.
            store: The store of the run.
            bus: Receives the events of the run: an object with `publish(event)`, or several.
            resume: `"never"` starts a new run even if a rescoring is unfinished.
        """
        opened = _opened(store)
        request = self._rescoring(opened, evaluator, bus, resume)
        run = await self._rescore(request, run_id)
        return EvalReport(opened, run, output_types=_output_types(request))

    def rescore_sync(
        self,
        run_id: str,
        evaluator: Evaluator | Scorer | None = None,
        *,
        store: RunStore | str | None = None,
        bus: Observer | Sequence[Observer] | None = None,
        resume: str = "auto",
    ) -> EvalReport[OutputT]:
        """Blocking version of `rescore`."""
        opened = _opened(store)
        request = self._rescoring(opened, evaluator, bus, resume)
        run = run_interruptibly(
            lambda interrupt: self._rescore(request, run_id, interrupt),
            durable=not isinstance(opened, MemoryStore),
        )
        return EvalReport(opened, run, output_types=_output_types(request))

    async def _rescore(self, request: RunRequest, run_id: str, interrupt: Interrupt | None = None) -> RunRecord:
        any_experiment, open_executor = not self.experiments, _executor(request)
        return await rescore_run(
            request, run_id, any_experiment=any_experiment, open_executor=open_executor, interrupt=interrupt
        )

    def _rescoring(self, store: RunStore, evaluator: Evaluator | Scorer | None, bus: Any, resume: str) -> RunRequest:
        request = self._request(store, EMPTY, _observers(bus), resume=resume)
        if evaluator is None:
            return request
        scorer = resolve(evaluator)
        baseline = Baseline()
        changed = replace(
            request,
            scorer=scorer,
            rules=replace(request.rules, scorer=scorer),
            evaluator=evaluator,
            baseline=baseline,
        )
        code = describe_code(self.name, self.home, self.version, changed.roots, baseline)
        return replace(changed, code=code)


def _executor(request: RunRequest) -> OpenExecutor | None:
    """Return what opens the processes of a run; None if it has only this one."""
    if request.config.processes == 1:
        return None
    from fairtrial.fleet.local.pool import execute_in_processes

    return execute_in_processes


def _calling_file(suite: EvalSuite) -> str:
    """Return the file that creates a suite, ignoring this package and the `__init__` of subclasses."""
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


@contextmanager
def _show_progress(progress: bool, store: RunStore, retry_errors: bool) -> Iterator[Sequence[Observer]]:
    """Show the progress of a run during the block, if wanted; yields the observers that the run needs for it."""
    if not progress:
        yield ()
        return
    from rich.console import Console

    from fairtrial.runs.progress import Tally, shown

    tally = Tally(store, retries=retry_errors)
    with shown(tally, Console(stderr=True), last=True):
        yield (tally,)


def _output_types(request: RunRequest) -> Mapping[str, Any]:
    pairs = zip(request.rules.experiments, request.rules.tasks, strict=True)
    return {experiment.name: task.output_type for experiment, task in pairs}


def _opened(store: RunStore | str | None) -> RunStore:
    return open_store(store) if store is None or isinstance(store, str) else store


def _observers(bus: Observer | Sequence[Observer] | None) -> Sequence[Observer]:
    """Return the observers. Raises `ConfigurationError` for one that could receive nothing."""
    observers = () if bus is None else tuple(bus) if isinstance(bus, Sequence) else (bus,)
    for observer in observers:
        if not callable(getattr(observer, "publish", None)):
            raise ConfigurationError(
                f"bus must be an object with publish(event), or several of them (got {observer!r:.100}): "
                "a function is subscribed by ControlDispatcher().subscribe(EventType, function)"
            )
    return observers


def _as_dataset(samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]]) -> Dataset[Any, Any]:
    return samples if isinstance(samples, Dataset) else Dataset(samples)


def _evaluation(
    samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]],
    task: Any,
    evaluator: Evaluator | Scorer,
    config: EvalConfig | None,
    experiments: Sequence[Experiment],
) -> EvalSuite:
    given: Any = samples
    if inspect.isroutine(given):
        raise ConfigurationError(
            f"samples must be a Dataset or Samples (got the function {name_of(given)!r})\n"
            "the samples come first, as in evaluate(dataset, task, evaluator)"
        )
    dataset = _as_dataset(samples)
    settings = _checked_config(config)
    name = settings.experiment_name or suite_name(dataset.name)
    return EvalSuite(name, dataset, task, evaluator, experiments=experiments, config=settings)


def _checked_config(config: EvalConfig | None) -> EvalConfig:
    given: object = config
    if given is None or isinstance(given, EvalConfig):
        return config or EvalConfig()
    how = (
        f"write config=EvalConfig({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        if isinstance(given, dict)
        else ""
    )
    raise ConfigurationError(f"config must be an EvalConfig (got {type(given).__name__})\n{how}".rstrip())


def _check_name(name: object) -> None:
    """Raise if the first argument is not a name."""
    if not isinstance(name, str):
        raise ConfigurationError(
            f"the name of a suite must be text (got {type(name).__name__})\nthe name comes first, as in "
            'EvalSuite("support", dataset, task, evaluator); or pass all by keyword: '
            "EvalSuite(dataset=..., task=..., evaluator=...)"
        )


def suite_name(name: str) -> str:
    """Return the name of a dataset or a prompt as a valid suite name: `openai/gsm8k` becomes `openai-gsm8k`."""
    return re.sub(r"[:@/\s]+", "-", name).strip("-") or "dataset"


@overload
async def evaluate[I, O, E](
    samples: Iterable[Sample[I, E]],
    task: AsyncTask[I, O],
    evaluator: SuiteEvaluator[I, O, E],
    config: EvalConfig | None = None,
    *,
    experiments: Sequence[Experiment] = (),
    store: RunStore | str | None = None,
    tags: Mapping[str, str] | None = None,
) -> EvalReport[O]: ...
@overload
async def evaluate[I, O, E](
    samples: Iterable[Sample[I, E]],
    task: SyncTask[I, O],
    evaluator: SuiteEvaluator[I, O, E],
    config: EvalConfig | None = None,
    *,
    experiments: Sequence[Experiment] = (),
    store: RunStore | str | None = None,
    tags: Mapping[str, str] | None = None,
) -> EvalReport[O]: ...
async def evaluate(
    samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]],
    task: Any,
    evaluator: Evaluator | Scorer,
    config: EvalConfig | None = None,
    *,
    experiments: Sequence[Experiment] = (),
    store: RunStore | str | None = None,
    tags: Mapping[str, str] | None = None,
) -> EvalReport:
    """Evaluate a task on samples, in memory unless a store is given."""
    suite = _evaluation(samples, task, evaluator, config, experiments)
    return await suite.run(store="memory:" if store is None else store, tags=tags)


@overload
def evaluate_sync[I, O, E](
    samples: Iterable[Sample[I, E]],
    task: AsyncTask[I, O],
    evaluator: SuiteEvaluator[I, O, E],
    config: EvalConfig | None = None,
    *,
    experiments: Sequence[Experiment] = (),
    store: RunStore | str | None = None,
    tags: Mapping[str, str] | None = None,
) -> EvalReport[O]: ...
@overload
def evaluate_sync[I, O, E](
    samples: Iterable[Sample[I, E]],
    task: SyncTask[I, O],
    evaluator: SuiteEvaluator[I, O, E],
    config: EvalConfig | None = None,
    *,
    experiments: Sequence[Experiment] = (),
    store: RunStore | str | None = None,
    tags: Mapping[str, str] | None = None,
) -> EvalReport[O]: ...
def evaluate_sync(
    samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]],
    task: Any,
    evaluator: Evaluator | Scorer,
    config: EvalConfig | None = None,
    *,
    experiments: Sequence[Experiment] = (),
    store: RunStore | str | None = None,
    tags: Mapping[str, str] | None = None,
) -> EvalReport:
    """Blocking version of `evaluate`, for scripts and notebooks."""
    suite = _evaluation(samples, task, evaluator, config, experiments)
    return suite.run_sync(store="memory:" if store is None else store, tags=tags)
