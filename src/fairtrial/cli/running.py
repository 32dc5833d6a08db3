"""Carrying out a suite for the command line: progress, interruption, and the verdict as an exit code."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.cli.faults import EndedEarly, ExitCode, Mistake
from fairtrial.cli.names import name_of
from fairtrial.cli.progress import Tally, shown
from fairtrial.cli.rerun import NOTE, PART
from fairtrial.cli.screen import count, err, note, sentence
from fairtrial.errors import MailboxError, RunBusyError, RunMismatchError, StoreError
from fairtrial.runs.events import ResumeWarning

if TYPE_CHECKING:
    from fairtrial.report import EvalReport
    from fairtrial.runs.events import EvalRunStarted
    from fairtrial.store.protocol import RunStore
    from fairtrial.suites import EvalSuite


@dataclass(frozen=True, slots=True)
class Orders:
    """How suites are to be run."""

    store: RunStore
    words: Sequence[str]  # What was typed after `fairtrial`.
    base: Sequence[str] = ()  # The words that name what to run; kept with the run, for commands that run it again.
    mailbox: str | None = None
    fresh: bool = False
    retry_errors: bool = False
    force: bool = False
    run_id: str | None = None  # The run to resume.
    quiet: bool = False
    json: bool = False
    compares: bool = False  # Several models were named: the run ends in their comparison.
    tags: tuple[tuple[str, str], ...] = ()
    probes: Sequence[Any] = ()  # Observers that answer probes.


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of one suite."""

    report: EvalReport
    resumed: bool


class Interrupted(KeyboardInterrupt):
    """A run was interrupted and can be resumed."""


def carry_out(suite: EvalSuite, orders: Orders) -> Ran:
    """Run a suite to its end, or go on with its unfinished run.

    Raises:
        Interrupted: after Ctrl-C; everything that can be said has been said.
    """
    from fairtrial.runs.sync import announcing

    if not len(suite.dataset):
        raise Mistake(
            f"dataset {suite.dataset.name!r} of suite {suite.name!r} has no samples, so nothing was run",
            "see that its file or the code that makes it has samples",
        )
    fresh = orders.fresh or (orders.run_id is None and _is_other_part(suite, orders.store))
    begun: list[EvalRunStarted] = []

    def started(event: EvalRunStarted) -> None:
        begun.append(event)
        if event.notice is not None:
            note(f"note: {_for_command_line(event.notice, orders)}")
        orders.store.update_run(event.run_id, notes={NOTE: list(orders.base)})
        if event.done and not orders.quiet:
            console.print(
                f"resuming {name_of(event.run)} ({event.run_id}): "
                f"{event.done:,} of {event.planned:,} trials are stored",
                soft_wrap=True,
            )

    console = err()
    tally = Tally(orders.store, started, retries=orders.retry_errors)

    def announce(text: str) -> None:
        tally.remark = text
        if orders.quiet or not console.is_terminal:
            console.file.write(f"{text}\n")

    options: dict[str, Any] = {"mailbox": orders.mailbox} if orders.mailbox else {}
    try:
        with (
            announcing(announce),
            warnings.catch_warnings(),
            shown(tally, console, quiet=orders.quiet, prints=sys.stdout.isatty() and not orders.json),
        ):
            warnings.simplefilter("ignore", ResumeWarning)  # `started` says it.
            report = suite.run_sync(
                store=orders.store,
                bus=[tally, *orders.probes],
                tags=dict(orders.tags),
                fresh=fresh,
                retry_errors=orders.retry_errors,
                run_id=orders.run_id,
                force=orders.force,
                **options,
            )
    except KeyboardInterrupt:
        _say_interrupted(orders, begun)
        raise Interrupted from None
    except RunMismatchError as error:
        what, _, remedy = _for_command_line(str(error), orders).partition(". ")
        raise Mistake(what, remedy[:1].lower() + remedy[1:]) from None
    except (StoreError, MailboxError, RunBusyError) as error:
        if not begun:
            raise
        raise EndedEarly(error) from error
    return Ran(report, resumed=bool(begun and begun[0].done))


def _for_command_line(text: str, orders: Orders) -> str:
    """Return a sentence about runs with the options of the command line in place of the library's arguments."""
    text = re.sub(r"suite\.rescore\([^)]*\) \((.*?) SUITE\)", r"\1 " + shlex.join(orders.base), text)
    return re.sub(r"(?:fresh=True|run_id='\w+'(?:, force=True)?) \((--[^)]*)\)", r"\1", text)


def _is_other_part(suite: EvalSuite, store: RunStore) -> bool:
    """True if the last part of this suite that was run is not this part: a part never waits for another."""
    if not suite.name.endswith(PART):
        return False
    latest = next(iter(store.runs(suite=suite.name, limit=1)), None)
    return latest is not None and latest.dataset_fingerprint != suite.dataset.fingerprint


@contextlib.contextmanager
def stdout_for_facts(json: bool) -> Iterator[None]:
    """With --json, what user code prints goes to standard error: standard output holds JSON and nothing else."""
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        yield


def _say_interrupted(orders: Orders, begun: list[EvalRunStarted]) -> None:
    from fairtrial.runs.sync import shown_command

    again = [word for word in orders.words if word != "--fresh"]  # With --fresh it would not go on.
    console = err()
    if begun:
        run = orders.store.get_run(begun[0].run_id)
        stored = sum(byte.bit_count() for byte in orders.store.done(run.run_id))
        sentence(console, f"interrupted: {name_of(run)} has {stored:,} of {count(run.planned, 'trial')} stored")
    console.print(f"go on with: {shown_command(['fairtrial', *again])}", soft_wrap=True)


def verdict(report: EvalReport, *, fail_under: float | None, max_error_share: float) -> tuple[ExitCode, str]:
    """The code a run ends with, and why if it is not 0."""
    worst = max(
        ((sum(part.errors.values()) / part.total if part.total else 0.0, name) for name, part in _parts(report)),
        default=(0.0, ""),
    )
    if worst[0] > max_error_share:
        errors = sum(report[worst[1]].errors.values())
        return ExitCode.ERRORED, (
            f"{errors:,} of {count(report[worst[1]].total, 'trial')}{_of(report, worst[1])} ended in an error, "
            f"more than the allowed {max_error_share:.0%} (--max-error-share)"
        )
    if report.status == "incomplete":
        return ExitCode.ERRORED, f"{report.run.notes.get('stopped')}; the same command executes them"
    if report.status == "interrupted":
        return ExitCode.INCONCLUSIVE, "the run ended early and can be resumed"
    if fail_under is not None:
        for name, part in _parts(report):
            rate = part.pass_rate_all
            if rate is None or rate < fail_under:
                shown_rate = "nothing was scored" if rate is None else f"{rate:.1%} passed"
                return ExitCode.FAILED, (
                    f"{shown_rate}{_of(report, name)}, under the floor of {fail_under:.1%} "
                    "(--fail-under; errors count as failures)"
                )
    return ExitCode.OK, ""


def _parts(report: EvalReport) -> Iterator[tuple[str, Any]]:
    for name in report.experiments:
        yield name, report[name]


def _of(report: EvalReport, name: str) -> str:
    return f" in experiment {name}" if len(report.experiments) > 1 else ""


def common_errors(report: EvalReport, limit: int = 3) -> list[tuple[str, int]]:
    """The errors that came most often, with how often."""
    from collections import Counter

    found: Counter[str] = Counter()
    kinds: tuple[Any, ...] = ("task_error", "timeout", "scorer_error", "dead_letter")
    for result in report.store.results(report.run_id, outcomes=kinds, limit=2_000, outputs=False):
        found[" ".join((result.error or result.outcome).removeprefix("fairtrial.errors.").split())] += 1
    return found.most_common(limit)


def cache_file(root: Path | None) -> Path:
    """Where the answers of models are kept."""
    return (root or Path()) / ".fairtrial" / "responses.db"
