"""Blocking versions of the async API.

    from fairtrial.sync import EvalLoop, EvalSuite, MainLoop, collect_results, evaluate, submit_dataset

Everything is as in `fairtrial` and `fairtrial.fleet`, except that `run`, `execute`, `stream`, `rescore` and the
functions are not coroutines.
Inside a running event loop they raise an error, because they would block it: await the async versions there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from fairtrial.base.offload import in_event_loop
from fairtrial.base.sync_bridge import call_sync
from fairtrial.data.session.session import Session, restore_session
from fairtrial.data.session.views import SessionView
from fairtrial.errors import ConfigurationError
from fairtrial.fleet.client.collect import collect_results_sync, submit_dataset_sync
from fairtrial.fleet.messages import EvalRequest, ExpectedT
from fairtrial.fleet.worker import eval_loop, main_loop, sessions
from fairtrial.fleet.worker.worker import run_interruptibly
from fairtrial.models.adapter import PromptResponse
from fairtrial.models.judges.checks import check_judge_sync
from fairtrial.models.main_loop import InputT, OutputT
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


_HOMES = {"check_judge": "models.judges", "evaluate": "", "EvalSuite": ""}  # The others are in `fairtrial.fleet`.


def _refuse_in_event_loop(name: str) -> None:
    if in_event_loop():
        home = _HOMES.get(name.partition(".")[0], "fleet")
        raise ConfigurationError(
            f"fairtrial.sync.{name} cannot be called inside an event loop, because it would block it\n"
            f"await {'.'.join(filter(None, ('fairtrial', home, name)))} instead"
        )


def _blocking[T: Callable[..., Any]](name: str, call: T) -> T:
    """Return `call` under the name that it has here, refused inside an event loop."""

    @functools.wraps(call, assigned=("__doc__",), updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        _refuse_in_event_loop(name)
        return call(*args, **kwargs)

    return cast(T, checked)


class BlockingEvalLoop(eval_loop.EvalLoop[InputT, OutputT, ExpectedT]):
    """An `EvalLoop` whose `run` and `execute` block. Signals end `run` as they end its `run_sync`."""

    def run(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:  # type: ignore[override]
        """Work until stopped; see `fairtrial.fleet.EvalLoop.run`."""
        _refuse_in_event_loop("EvalLoop.run")
        call = partial(super().run, max_iterations=max_iterations, until_empty=until_empty)
        run_interruptibly(call, self.stop, self.hurry, self.config.drain_seconds)

    run_sync = run

    def execute(self, request: EvalRequest) -> EvalResult:  # type: ignore[override]
        """Execute and score one request in this process."""
        _refuse_in_event_loop("EvalLoop.execute")
        return call_sync(partial(super().execute, request))


class BlockingMainLoop(main_loop.MainLoop[InputT, OutputT]):
    """A `MainLoop` whose `run` and `execute` block; `initialize` may still be sync or async."""

    def run(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:  # type: ignore[override]
        """Serve requests until stopped; see `fairtrial.fleet.EvalLoop.run`."""
        _refuse_in_event_loop("MainLoop.run")
        call = partial(super().run, max_iterations=max_iterations, until_empty=until_empty)
        run_interruptibly(call, self.stop, self.hurry, self.config.drain_seconds)

    run_sync = run

    def execute(self, input: InputT) -> tuple[PromptResponse[OutputT], Session]:  # type: ignore[override]
        """Return the response to one input, and the session with everything that happened."""
        _refuse_in_event_loop("MainLoop.execute")
        return call_sync(partial(super().execute, input))


class BlockingSuite(suite.EvalSuite[InputT, OutputT, ExpectedT]):
    """An `EvalSuite` whose `run`, `stream` and `rescore` block, as `run_sync`, `stream_sync` and `rescore_sync` do."""

    run = _blocking("EvalSuite.run", suite.EvalSuite.run_sync)  # type: ignore[assignment]
    stream = _blocking("EvalSuite.stream", suite.EvalSuite.stream_sync)  # type: ignore[assignment]
    rescore = _blocking("EvalSuite.rescore", suite.EvalSuite.rescore_sync)  # type: ignore[assignment]


class BlockingSessionStore:
    """A session store that blocks and returns sessions that evaluators read.

    Args:
        store: Any session store, such as `FolderSessionStore(folder)`. Loops are given this one, not the wrapper.
    """

    def __init__(self, store: sessions.SessionStore) -> None:
        self.store = store

    def save(self, session_id: str, session: Session | bytes) -> None:
        """Keep a session, or the snapshot of one."""
        _refuse_in_event_loop("SessionStore.save")
        call_sync(partial(self.store.save, session_id, session))

    def load(self, session_id: str) -> SessionView:
        """Return the session of that id. Raises `SessionError` if there is none."""
        _refuse_in_event_loop("SessionStore.load")
        return restore_session(call_sync(partial(self.store.load, session_id)))

    def delete(self, session_id: str) -> None:
        """Delete a session if it exists."""
        _refuse_in_event_loop("SessionStore.delete")
        call_sync(partial(self.store.delete, session_id))


check_judge = _blocking("check_judge", check_judge_sync)
submit_dataset = _blocking("submit_dataset", submit_dataset_sync)
collect_results = _blocking("collect_results", collect_results_sync)
evaluate = _blocking("evaluate", suite.evaluate_sync)
EvalLoop = BlockingEvalLoop
MainLoop = BlockingMainLoop
EvalSuite = BlockingSuite
SessionStore = BlockingSessionStore
