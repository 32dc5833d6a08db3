"""Carrying out a suite for the command line: progress, interruption, and the verdict as an exit code."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.cli.faults import ExitCode, Mistake
from fairtrial.cli.names import name_of
from fairtrial.cli.progress import Tally, shown
from fairtrial.cli.rerun import NOTE, PART
from fairtrial.cli.screen import count, err, note, sentence
from fairtrial.errors import RunMismatchError

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
    quiet: bool = False
    json: bool = False
    compares: bool = False  # Several models were named: the run ends in their comparison.
    tags: tuple[tuple[str, str], ...] = ()


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

    fresh = orders.fresh or _is_other_part(suite, orders.store)
    if not fresh:
        _check_code(suite, orders)
    begun: list[EvalRunStarted] = []

    def started(event: EvalRunStarted) -> None:
        begun.append(event)
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
            sys.stderr.write(f"{text}\n")

    options: dict[str, Any] = {"mailbox": orders.mailbox} if orders.mailbox else {}
    try:
        with (
            announcing(announce),
            warnings.catch_warnings(),
            shown(tally, console, quiet=orders.quiet, prints=sys.stdout.isatty() and not orders.json),
        ):
            # Changed code has been spoken of already, in our own words.
            warnings.filterwarnings("ignore", message="the code of suite")
            report = suite.run_sync(
                store=orders.store,
                bus=[tally],
                tags=dict(orders.tags),
                fresh=fresh,
                retry_errors=orders.retry_errors,
                **options,
            )
    except KeyboardInterrupt:
        _say_interrupted(orders, begun)
        raise Interrupted from None
    except RunMismatchError as error:
        raise Mistake(*_split(str(error))) from None
    return Ran(report, resumed=bool(begun and begun[0].done))


def _split(text: str) -> tuple[str, str]:
    what, _, remedy = text.partition(". ")
    return what, remedy[:1].lower() + remedy[1:].replace("fresh=True (--fresh)", "--fresh")


def _is_other_part(suite: EvalSuite, store: RunStore) -> bool:
    """True if the last part of this suite that was run is not this part: a part never waits for another."""
    if not suite.name.endswith(PART):
        return False
    latest = next(iter(store.runs(suite=suite.name, limit=1)), None)
    return latest is not None and latest.dataset_fingerprint != suite.dataset.fingerprint


def _check_code(suite: EvalSuite, orders: Orders) -> None:
    """Results of two versions of the code in one run are results of neither: going on is asked for, not assumed.

    Unless that is what was asked for: to score again what could not be scored, or to try errors again.
    """
    from fairtrial.runs.identity import code_hash, latest_executed

    latest = latest_executed(orders.store, suite.name)
    if latest is None or latest.parent_run is not None or latest.status in ("finished", "stopped"):
        return
    if latest.code_hash == code_hash(suite.version):
        return
    if orders.force or orders.retry_errors or latest.status == "unscored":
        note(f"note: the code has changed since {name_of(latest)} began; its results mix both versions")
        return
    stored = sum(byte.bit_count() for byte in orders.store.done(latest.run_id))
    raise Mistake(
        f"the code of suite {suite.name!r} has changed since {name_of(latest)} began, "
        f"and {stored:,} of its {latest.planned:,} trials are stored",
        "start over with --fresh, or go on with --force and mix results of both versions",
    )


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
