"""Run a suite for the command line: progress, interruption, and exit codes."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.cli.names import name_of
from fairtrial.cli.screen import err, note, sentence
from fairtrial.cli.user_errors import EndedEarly, ExitCode, UserError
from fairtrial.errors import MailboxError, RunBusyError, RunMismatchError, StoreError
from fairtrial.formatting import count, duration
from fairtrial.report.rerun import PART
from fairtrial.runs.events import ResumeWarning
from fairtrial.runs.progress import Tally, shown
from fairtrial.store.notes import write_notes
from fairtrial.store.redact import current

if TYPE_CHECKING:
    from fairtrial.report import EvalReport
    from fairtrial.runs.events import EvalRunStarted
    from fairtrial.store.protocol import RunStore
    from fairtrial.suites import EvalSuite


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options for running suites."""

    store: RunStore
    words: Sequence[str]  # The command line after `fairtrial`.
    base: Sequence[str] = ()  # The words that name the suite; stored with the run, to suggest commands.
    mailbox: str | None = None
    fresh: bool = False
    retry_errors: bool = False
    force: bool = False
    run_id: str | None = None  # The run to resume.
    quiet: bool = False
    json: bool = False
    compares: bool = False  # Several models: the run ends with their comparison.
    tags: tuple[tuple[str, str], ...] = ()
    observers: Sequence[Any] = ()  # Of health probes and traces.

    @property
    def resume_words(self) -> list[str]:
        """The command line that resumes the run; with --fresh it would start a new one."""
        return [word for word in self.words if word != "--fresh"]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of running one suite."""

    report: EvalReport
    resumed: bool


_NAMED = 4  # Experiments with too many errors that are named.


class Interrupted(KeyboardInterrupt):
    """A run was interrupted and can be resumed."""


def run_suite(suite: EvalSuite, run_options: RunOptions) -> RunOutcome:
    """Run a suite to its end, or resume its unfinished run.

    Raises:
        Interrupted: after Ctrl-C; everything that can be said has been said.
    """
    from fairtrial.runs.sync import announcing

    fresh = run_options.fresh or (run_options.run_id is None and _is_other_part(suite, run_options.store))
    begun: list[EvalRunStarted] = []

    def started(event: EvalRunStarted) -> None:
        begun.append(event)
        if event.notice is not None:
            note(f"note: {_for_command_line(event.notice, run_options)}")
        resume_words = [current().text(word) for word in run_options.resume_words]
        notes = write_notes(command_line=run_options.base, resume_words=resume_words)
        run_options.store.update_run(event.run_id, notes=notes)
        if event.done and not run_options.quiet:
            console.print(event.resume_text(f"{name_of(event.run)} ({event.run_id})"), soft_wrap=True)

    console = err()
    tally = Tally(run_options.store, started, retries=run_options.retry_errors)

    def announce(text: str) -> None:
        tally.remark = text
        if run_options.quiet or not console.is_terminal:
            console.file.write(f"{text}\n")

    began = time.monotonic()
    options: dict[str, Any] = {"mailbox": run_options.mailbox} if run_options.mailbox else {}
    try:
        with (
            announcing(announce),
            warnings.catch_warnings(),
            shown(tally, console, quiet=run_options.quiet, prints=sys.stdout.isatty() and not run_options.json),
        ):
            warnings.simplefilter("ignore", ResumeWarning)  # `started` prints the same.
            report = suite.run_sync(
                store=run_options.store,
                bus=[tally, *run_options.observers],
                tags=dict(run_options.tags),
                fresh=fresh,
                retry_errors=run_options.retry_errors,
                run_id=run_options.run_id,
                force=run_options.force,
                **options,
            )
    except KeyboardInterrupt:
        _say_interrupted(run_options, begun)
        raise Interrupted from None
    except RunMismatchError as error:
        what, _, remedy = _for_command_line(str(error), run_options).partition(". ")
        raise UserError(what, remedy[:1].lower() + remedy[1:]) from None
    except (StoreError, MailboxError, RunBusyError) as error:
        if not begun:
            raise
        raise EndedEarly(error) from error
    if begun and begun[0].retried and not run_options.quiet:
        took = duration((time.monotonic() - began) * 1000)
        console.print(f"retried {count(begun[0].retried, 'trial')} in {took}", soft_wrap=True)
    return RunOutcome(report, resumed=bool(begun and begun[0].done))


def _for_command_line(text: str, run_options: RunOptions) -> str:
    """Replace arguments of the library in a message by the options of the command line."""
    text = re.sub(r"suite\.rescore\([^)]*\) \((.*?) SUITE\)", r"\1 " + shlex.join(run_options.base), text)
    return re.sub(r"(?:fresh=True|run_id='\w+'(?:, force=True)?) \((--[^)]*)\)", r"\1", text)


def _is_other_part(suite: EvalSuite, store: RunStore) -> bool:
    """Return True if the latest run of a part of this suite has other samples: it must not be resumed."""
    if not suite.name.endswith(PART):
        return False
    latest = next(iter(store.runs(suite=suite.name, limit=1)), None)
    return latest is not None and latest.dataset_fingerprint != suite.dataset.fingerprint


@contextlib.contextmanager
def stdout_for_json(json: bool) -> Iterator[None]:
    """With --json, redirect the output of user code to standard error, so that standard output is only JSON."""
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        yield


def _say_interrupted(run_options: RunOptions, begun: list[EvalRunStarted]) -> None:
    from fairtrial.runs.sync import shown_command

    console = err()
    if begun:
        run = run_options.store.get_run(begun[0].run_id)
        stored = sum(byte.bit_count() for byte in run_options.store.done(run.run_id))
        sentence(console, f"interrupted: {name_of(run)} has {stored:,} of {count(run.planned, 'trial')} stored")
    console.print(f"resume it with: {shown_command(['fairtrial', *run_options.resume_words])}", soft_wrap=True)


def exit_status(report: EvalReport, *, fail_under: float | None, max_error_share: float) -> tuple[ExitCode, str]:
    """Return the exit code of a run, and the reason if it is not 0."""
    errors = {name: sum(part.errors.values()) for name, part in _parts(report)}
    worst = [
        f"{errors[name]:,} of {count(part.total, 'trial')}{_of(report, name)}"
        for name, part in _parts(report)
        if errors[name] > max_error_share * part.total
    ]
    if worst:
        more = f" and {count(len(worst) - _NAMED, 'more experiment')}" if len(worst) > _NAMED else ""
        return ExitCode.ERRORED, (
            f"{', '.join(worst[:_NAMED])}{more} ended in an error, "
            f"more than the allowed {max_error_share:.0%} (--max-error-share)"
        )
    if report.status == "incomplete":
        return ExitCode.ERRORED, f"{report.run.noted.stopped}; run the same command to execute them"
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


def cache_file(root: Path | None) -> Path:
    """Return the file of the response cache."""
    return (root or Path()) / ".fairtrial" / "responses.db"
