"""The progress display of a run. Events are only counted; a separate thread draws a few times a second."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fairtrial.base.formatting import money
from fairtrial.base.rates import rate_bounds
from fairtrial.reports.render.safe_text import plain
from fairtrial.runs.events import BatchesProgressed, EvalRunStarted, RunEvent, SampleEvaluated, TrialStarted
from fairtrial.store.protocol import RunStore

_WINDOW_SECONDS = 20.0
_PLAIN_SECONDS = 15.0
_NOTEBOOK_SECONDS = 0.5
_ERRORS: frozenset[Any] = frozenset({"task_error", "scorer_error", "timeout", "dead_letter", "user_error"})


class Tally:
    """Counts the events of a run; an observer, called on the event loop for every trial."""

    def __init__(
        self,
        store: RunStore | None = None,
        started: Callable[[EvalRunStarted], None] | None = None,
        *,
        retries: bool = False,
    ) -> None:
        self._store = store
        self._started = started
        self.announces_resume = started is not None
        # Stored errors that this run retries count neither as done nor as errors.
        self._again = _ERRORS if retries else frozenset({"scorer_error"})
        self.suite = ""
        self.one_each = True
        self.planned = 0
        self.done = self.first = 0
        self.scored = self.passed = 0
        self.errors: Counter[str] = Counter()
        self.begun = self.ended = 0
        self.tokens = 0
        self.cost: float | None = None
        self.since = time.monotonic()
        self.remark = ""
        self.batches = ""  # How far the batches at the providers are.

    def publish(self, event: RunEvent) -> None:
        """Count an event."""
        event_type = type(event)
        if event_type is TrialStarted:
            self.begun += 1
        elif event_type is SampleEvaluated:
            self._count(event.result)  # type: ignore[union-attr]  # told apart by its class, which costs less
        elif isinstance(event, EvalRunStarted):
            self._start(event)
        elif isinstance(event, BatchesProgressed):
            self.batches = event.line

    def _count(self, result: Any) -> None:
        self.ended += 1
        self.done += 1
        if result.outcome == "scored":
            self.scored += 1
            self.passed += result.score.passed
        else:
            self.errors[result.outcome] += 1
        usage = result.usage
        self.tokens += usage.input_tokens + usage.output_tokens
        if usage.cost_usd is not None or result.judge_cost_usd is not None:
            self.cost = (self.cost or 0.0) + result.total_cost_usd

    def _start(self, event: EvalRunStarted) -> None:
        self.suite, self.planned = event.run.suite, event.planned
        self.one_each = event.run.repeats == 1 and len(event.run.experiments) == 1
        self.done = self.first = event.done
        self.since = time.monotonic()
        if event.done and self._store is not None:
            for part in self._store.totals(event.run_id):
                self.scored += part.outcomes.get("scored", 0)
                self.passed += part.passed
                self.tokens += part.input_tokens + part.output_tokens
                if part.cost_usd is not None or part.judge_cost_usd is not None:
                    self.cost = (self.cost or 0.0) + part.total_cost_usd
                for name in _ERRORS & part.outcomes.keys():
                    if name in self._again:
                        self.done -= part.outcomes[name]
                    else:
                        self.errors[name] += part.outcomes[name]
            self.first = self.done
        if self._started is not None:
            self._started(event)


class Display:
    """Renders a tally as lines in a terminal."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._marks: deque[tuple[float, int]] = deque()

    def __rich__(self) -> RenderableType:
        tally = self.tally
        if not tally.planned:
            return Text("starting", style="dim")
        head = Table.grid(padding=(0, 1))
        head.add_column(no_wrap=True, overflow="ellipsis", max_width=30)
        head.add_column(ratio=1)
        for _ in range(3):
            head.add_column(no_wrap=True, justify="right")
        done = min(tally.done, tally.planned)
        head.add_row(
            Text(plain(tally.suite), style="bold"),
            ProgressBar(total=tally.planned, completed=done, width=None),
            f"{done:,}/{tally.planned:,}",
            f"{done / tally.planned:.0%}",
            self._eta(),
        )
        lines: list[RenderableType] = [head, _line(self._verdicts()), _line(self._pace())]
        if tally.batches:
            lines.append(Text(f"  {tally.batches}", no_wrap=True, overflow="ellipsis"))
        if tally.remark:
            lines.append(Text(tally.remark, style="yellow", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _verdicts(self) -> list[tuple[str, str]]:
        tally = self.tally
        parts = [(passed_so_far(tally), "green" if tally.scored else "dim")]
        parts.extend((text, "red") for text in _errors(tally))
        if not tally.errors:
            parts.append(("no errors", "dim"))
        return parts

    def _pace(self) -> list[tuple[str, str]]:
        tally = self.tally
        parts = [(f"{max(tally.begun - tally.ended, 0):,} in flight", ""), (f"{self.rate():,.1f}/s", "")]
        if tally.tokens:
            parts.append((f"{tally.tokens:,} tokens", ""))
        if tally.cost is not None:
            parts.append((money(tally.cost), ""))
        return parts

    def rate(self) -> float:
        """Recent trials per second."""
        now, done = time.monotonic(), self.tally.done
        if not self._marks:
            self._marks.append((self.tally.since, self.tally.first))
        self._marks.append((now, done))
        while len(self._marks) > 2 and now - self._marks[1][0] > _WINDOW_SECONDS:
            self._marks.popleft()
        start, before = self._marks[0]
        return (done - before) / (now - start) if now > start else 0.0

    def _eta(self) -> str:
        rate = self.rate()
        left = self.tally.planned - self.tally.done
        if left <= 0:
            return "eta 0:00"
        if rate <= 0:
            return "eta -:--"
        seconds = int(left / rate)
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"eta {hours}:{minutes:02}:{seconds % 60:02}" if hours else f"eta {minutes}:{seconds % 60:02}"

    def plain_line(self) -> str:
        """Return the progress as one line for a log file."""
        tally = self.tally
        errors = ", ".join(_errors(tally))
        return (
            f"{plain(tally.suite)}: {tally.done:,} of {tally.planned:,} trials, {passed_so_far(tally)}, "
            f"{errors or 'no errors'}, {self.rate():,.1f}/s, {self._eta()}"
            + (f"; {tally.batches}" if tally.batches else "")
        )


def _errors(tally: Tally) -> list[str]:
    # A copy, because the event loop continues to count while this thread draws.
    errors = sorted(tally.errors.copy().items())
    return [f"{number:,} {name.replace('_', ' ')}{'' if number == 1 else 's'}" for name, number in errors]


def passed_so_far(tally: Tally) -> str:
    """Return the share of scored trials that passed until now, with its interval if each sample has one trial.

    Several trials of a sample are not independent, so that an interval of them all would be too narrow. The pass rate
    of a report is a mean over samples; this share says how the trials went that have ended.
    """
    if not tally.scored:
        return "nothing scored yet"
    if not tally.one_each:
        return f"passed {tally.passed / tally.scored:.1%} of {tally.scored:,} scored so far"
    low, high = rate_bounds(tally.passed, tally.scored)
    return f"passed {tally.passed / tally.scored:.1%} [{low:.1%}, {high:.1%}]"


def _line(parts: list[tuple[str, str]]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for position, (text, style) in enumerate(parts):
        line.append("   " if position else "  ").append(text, style=style or None)
    return line


@contextmanager
def shown(
    tally: Tally, console: Console, *, quiet: bool = False, prints: bool = True, last: bool = False
) -> Iterator[None]:
    """Show a tally while the block runs: live in a terminal, now and then a line elsewhere, nothing when quiet.

    In a notebook it is one line that changes.

    Args:
        tally: What is shown.
        console: Where.
        quiet: Show nothing.
        prints: Whether what user code prints goes to the same terminal, and must be kept above the display.
        last: Whether the last line is shown when the block has ended, where lines are shown.
    """
    if quiet:
        yield
        return
    display = Display(tally)
    if console.is_terminal and not console.is_dumb_terminal:
        with Live(display, console=console, transient=True, redirect_stdout=prints, redirect_stderr=True):
            yield
        return
    ended = threading.Event()
    update = _notebook_line()

    def write() -> None:
        if not tally.planned:
            return
        if update is None:
            console.print(display.plain_line(), soft_wrap=True)
        else:
            update({"text/plain": display.plain_line()})

    def talk() -> None:
        while not ended.wait(_PLAIN_SECONDS if update is None else _NOTEBOOK_SECONDS):
            write()

    thread = threading.Thread(target=talk, name="fairtrial progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if last or update is not None:
            write()


def _notebook_line() -> Callable[[Any], None] | None:
    """Return what updates a line of output in the notebook that this code runs in; None outside of notebooks."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        return None
    display = importlib.import_module("IPython.display").display  # Optional: IPython is not a dependency.
    handle = display({"text/plain": "starting"}, raw=True, display_id=True)
    return lambda data: handle.update(data, raw=True)
