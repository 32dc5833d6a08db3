"""The names that wait, for ordinary code: here they block until there is a result.

    from fairtrial.sync import EvalLoop, EvalSuite, MainLoop, collect_results, evaluate, submit_dataset

Everything is as in `fairtrial` except that `run`, `execute`, `stream`, `rescore` and the functions are not coroutines.
Inside a running event loop they are refused, because they would stop it: there, await those of `fairtrial`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fairtrial.base.frozen import EMPTY
from fairtrial.base.offload import in_event_loop
from fairtrial.base.sync_bridge import call_sync
from fairtrial.data.session.session import Session, restore_session
from fairtrial.data.session.views import SessionView
from fairtrial.errors import ConfigurationError
from fairtrial.fleet.client.collect import collect_results_sync, submit_dataset_sync
from fairtrial.fleet.messages import EvalRequest, ExpectedT
from fairtrial.fleet.queues import Broker
from fairtrial.fleet.worker import eval_loop, main_loop, sessions
from fairtrial.fleet.worker.worker import run_interruptibly
from fairtrial.models.adapter import PromptResponse
from fairtrial.models.judges.checks import check_judge_sync
from fairtrial.models.main_loop import InputT, OutputT
from fairtrial.reports.figures.analysis_plan import AnalysisPlan
from fairtrial.reports.report import EvalReport
from fairtrial.runs.events import Observer
from fairtrial.scoring.evaluator import Evaluator, Scorer
from fairtrial.store.protocol import RunStore
from fairtrial.suites import suite
from fairtrial.trials.result import EvalResult

__all__ = [
    "EvalLoop",
    "EvalSuite",
    "MainLoop",
    "SessionStore",
    "check_judge",
    "collect_results",
    "evaluate",
    "submit_dataset",
]


def _refuse_in_event_loop(name: str, package: str = "fairtrial") -> None:
    if in_event_loop():
        raise ConfigurationError(
            f"fairtrial.sync.{name} must be called outside of an event loop, which it would stop\n"
            f"await {package}.{name} instead"
        )


def _with_parameters_of[**P, T](call: Callable[P, T]) -> Callable[[Callable[..., Any]], Callable[P, T]]:
    """Show a function with the parameters and the result of the one that it calls."""

    def shown(fn: Callable[..., Any]) -> Callable[P, T]:
        return functools.wraps(call, assigned=(), updated=())(fn)

    return shown


class BlockingEvalLoop(eval_loop.EvalLoop[InputT, OutputT, ExpectedT]):
    """An `EvalLoop` whose `run` and `execute` block. Signals end `run` as they end `fairtrial.EvalLoop.run_sync`."""

    def run(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:  # type: ignore[override]
        """Work until stopped; see `fairtrial.EvalLoop.run`."""
        _refuse_in_event_loop("EvalLoop.run")
        call = partial(super().run, max_iterations=max_iterations, until_empty=until_empty)
        run_interruptibly(call, self.stop, self.hurry, self.config.drain_seconds)

    run_sync = run

    def execute(self, request: EvalRequest) -> EvalResult:  # type: ignore[override]
        """Execute and score one request, here and now."""
        _refuse_in_event_loop("EvalLoop.execute")
        return call_sync(partial(super().execute, request))


class BlockingMainLoop(main_loop.MainLoop[InputT, OutputT]):
    """A `MainLoop` whose `run` and `execute` block; `initialize` may still be sync or async."""

    def run(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:  # type: ignore[override]
        """Serve requests until stopped; see `fairtrial.EvalLoop.run`."""
        _refuse_in_event_loop("MainLoop.run")
        call = partial(super().run, max_iterations=max_iterations, until_empty=until_empty)
        run_interruptibly(call, self.stop, self.hurry, self.config.drain_seconds)

    run_sync = run

    def execute(self, input: InputT) -> tuple[PromptResponse[OutputT], Session]:  # type: ignore[override]
        """Return the response to one input, and the session with everything that happened."""
        _refuse_in_event_loop("MainLoop.execute")
        return call_sync(partial(super().execute, input))

    execute_sync = execute


class BlockingSuite(suite.EvalSuite[InputT, OutputT, ExpectedT]):
    """An `EvalSuite` whose `run`, `stream` and `rescore` block, as `run_sync`, `stream_sync` and `rescore_sync` do."""

    # Spelled out: through a decorator, type checkers lose the types of the suite.
    def run(  # type: ignore[override]
        self,
        *,
        store: RunStore | str | None = None,
        mailbox: Broker | str | None = None,
        bus: Observer | Sequence[Observer] = (),
        tags: Mapping[str, str] = EMPTY,
        fresh: bool = False,
        retry_errors: bool = False,
        run_id: str | None = None,
        once: str | None = None,
        force: bool = False,
        plan: AnalysisPlan | None = None,
        progress: bool = False,
    ) -> EvalReport[OutputT]:
        """Run the suite and report; see `fairtrial.EvalSuite.run`."""
        _refuse_in_event_loop("EvalSuite.run")
        return self.run_sync(
            store=store,
            mailbox=mailbox,
            bus=bus,
            tags=tags,
            fresh=fresh,
            retry_errors=retry_errors,
            run_id=run_id,
            once=once,
            force=force,
            plan=plan,
            progress=progress,
        )

    def stream(  # type: ignore[override]
        self,
        *,
        store: RunStore | str | None = None,
        mailbox: Broker | str | None = None,
        bus: Observer | Sequence[Observer] = (),
        tags: Mapping[str, str] = EMPTY,
        fresh: bool = False,
    ) -> Iterator[EvalResult[OutputT]]:
        """Run the suite and iterate over its results as they arrive; see `fairtrial.EvalSuite.stream`."""
        _refuse_in_event_loop("EvalSuite.stream")
        return self.stream_sync(store=store, mailbox=mailbox, bus=bus, tags=tags, fresh=fresh)

    def rescore(  # type: ignore[override]
        self,
        run_id: str,
        evaluator: Evaluator | Scorer | None = None,
        *,
        store: RunStore | str | None = None,
        bus: Observer | Sequence[Observer] = (),
        fresh: bool = False,
    ) -> EvalReport[OutputT]:
        """Score what a run has stored again; see `fairtrial.EvalSuite.rescore`."""
        _refuse_in_event_loop("EvalSuite.rescore")
        return self.rescore_sync(run_id, evaluator, store=store, bus=bus, fresh=fresh)


class BlockingSessionStore:
    """A session store for ordinary code, which returns sessions that evaluators read.

    Args:
        store: Any session store, such as `FolderSessionStore(folder)`. Loops are given this one, not the wrapper.
    """

    def __init__(self, store: sessions.SessionStore) -> None:
        self.store = store

    def save(self, session_id: str, session: Session | bytes) -> None:
        """Keep a session, or the snapshot of one."""
        _refuse_in_event_loop("SessionStore.save", "fairtrial.fleet")
        call_sync(partial(self.store.save, session_id, session))

    def load(self, session_id: str) -> SessionView:
        """Return the session of that id. Raises `SessionError` if there is none."""
        _refuse_in_event_loop("SessionStore.load", "fairtrial.fleet")
        return restore_session(call_sync(partial(self.store.load, session_id)))

    def delete(self, session_id: str) -> None:
        """Forget a session; one that is not there is no error."""
        _refuse_in_event_loop("SessionStore.delete", "fairtrial.fleet")
        call_sync(partial(self.store.delete, session_id))


@_with_parameters_of(check_judge_sync)
def check_judge(*args: Any, **kwargs: Any) -> Any:
    """Run the canaries past a judge; see `fairtrial.check_judge`."""
    _refuse_in_event_loop("check_judge")
    return check_judge_sync(*args, **kwargs)


@_with_parameters_of(submit_dataset_sync)
def submit_dataset(*args: Any, **kwargs: Any) -> Any:
    """Put a request for every trial of a dataset into a mailbox; see `fairtrial.submit_dataset`."""
    _refuse_in_event_loop("submit_dataset")
    return submit_dataset_sync(*args, **kwargs)


@_with_parameters_of(collect_results_sync)
def collect_results(*args: Any, **kwargs: Any) -> Any:
    """Collect the results of a run and report them; see `fairtrial.collect_results`."""
    _refuse_in_event_loop("collect_results")
    return collect_results_sync(*args, **kwargs)


if TYPE_CHECKING:  # With all of its overloads, of which a decorator would keep one.
    evaluate = suite.evaluate_sync
else:

    @functools.wraps(suite.evaluate_sync, assigned=(), updated=())
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        """Evaluate a task on samples, in memory unless a store is given; see `fairtrial.evaluate`."""
        _refuse_in_event_loop("evaluate")
        return suite.evaluate_sync(*args, **kwargs)


EvalLoop = BlockingEvalLoop
MainLoop = BlockingMainLoop
EvalSuite = BlockingSuite
SessionStore = BlockingSessionStore
