"""Runs from the command line: what is selected, how it is shown."""

from __future__ import annotations

import contextlib
import copy
import difflib
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.base.backoff import UNAVAILABLE
from fairtrial.base.formatting import count, duration
from fairtrial.cli.options import find_sample, parse_pairs
from fairtrial.cli.screen import err, held_output, note, sentence
from fairtrial.cli.user_errors import NOTHING_EXECUTED, EndedEarlyError, ExitCode, ReportMissingError, UserError
from fairtrial.errors import MailboxError, RunBusyError, RunMismatchError, StoreError, StoreUnavailableError
from fairtrial.reports.render.safe_text import plain
from fairtrial.reports.run_names import PART, name_of
from fairtrial.runs.events import ResumeWarning
from fairtrial.runs.plan import parse_resume
from fairtrial.runs.progress import Tally, shown
from fairtrial.runs.writer import call_store
from fairtrial.store.notes import write_notes
from fairtrial.store.protocol import RESUMABLE
from fairtrial.store.redact import current

if TYPE_CHECKING:
    from fairtrial.data.dataset import Dataset
    from fairtrial.reports import EvalReport
    from fairtrial.reports.figures.analysis_plan import AnalysisPlan
    from fairtrial.runs.events import EvalRunStarted
    from fairtrial.store.protocol import RunRecord, RunStore
    from fairtrial.suites import EvalSuite
    from fairtrial.trials.config import Experiment


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a suite to run, and settings to override."""

    max_samples: int | None = None
    samples: Sequence[str] = ()
    filters: Sequence[str] = ()
    repeats: int | None = None
    concurrency: int | None = None
    experiments: Sequence[str] = ()
    params: Sequence[str] = ()
    seed: int | None = None
    max_cost: float | None = None
    strict_cost: bool = False
    max_same_errors: int | None = None
    processes: int | None = None

    @property
    def is_part(self) -> bool:
        """True if only some samples are selected."""
        return self.max_samples is not None or bool(self.samples) or bool(self.filters)

    def check_for_fleet(self) -> None:
        """Reject options that change the suite: workers run it as its file defines it."""
        if self.processes is not None:
            raise UserError("--processes cannot be used with a fleet", "start one worker for each processor instead")
        used = {
            "--max-samples": self.max_samples is not None,
            "--sample": bool(self.samples),
            "--filter": bool(self.filters),
            "--experiment": bool(self.experiments),
            "--set": bool(self.params),
            "--seed": self.seed is not None,
        }
        wrong = [option for option, is_given in used.items() if is_given]
        if wrong:
            raise UserError(
                f"{' and '.join(wrong)} cannot be used with a fleet: workers run the suite as its file defines it",
                "omit --mailbox to run locally",
            )


def selected(suite: EvalSuite, selection: Selection) -> EvalSuite:
    """Return a copy of the suite with the options applied; a part of the samples gets a separate suite name.

    So a quick look at five samples never takes the place of `suite@latest`, nor does it get in the way of a run that
    waits to be resumed.
    """
    chosen = copy.copy(suite)
    changes: dict[str, Any] = {
        "repeats": selection.repeats,
        "max_concurrent": selection.concurrency,
        "processes": selection.processes,
        "seed": selection.seed,
        "max_cost_usd": selection.max_cost,
        "strict_cost": selection.strict_cost or None,
        "max_same_errors": selection.max_same_errors,
    }
    chosen.config = replace(suite.config, **{name: value for name, value in changes.items() if value is not None})
    if selection.is_part:
        chosen.dataset = _part(suite, selection)
        chosen.config = replace(chosen.config, max_samples=None)
        chosen.name = suite.name + PART
    if selection.experiments:
        chosen.experiments = _experiments(suite, selection.experiments)
    if selection.params:
        chosen.experiments = _with_params(chosen, dict(parse_pairs("--set", selection.params)))
    return chosen


def _part(suite: EvalSuite, selection: Selection) -> Dataset[Any, Any]:
    dataset = suite.dataset if suite.config.max_samples is None else suite.dataset.head(suite.config.max_samples)
    if selection.samples:
        ids = [sample.id for sample in dataset]
        wanted = {text: find_sample(text, ids) for text in selection.samples}
        missing = [text for text, sample_id in wanted.items() if sample_id is None]
        if missing:
            raise _no_sample(suite, dataset, sorted(missing)[0])
        chosen = set(wanted.values())
        dataset = dataset.filter(lambda sample: sample.id in chosen)
    if selection.filters:
        facts = list(parse_pairs("--filter", selection.filters))
        texts = list(parse_pairs("--filter", selection.filters, as_text=True))
        # `--filter level=3` matches both the number 3 and the text "3".
        pairs = [(key, (value, text)) for (key, value), (_, text) in zip(facts, texts, strict=True)]
        everything, dataset = (
            dataset,
            dataset.filter(
                lambda sample: all(key in sample.metadata and sample.metadata[key] in values for key, values in pairs)
            ),
        )
        if not len(dataset):
            raise _nothing_left(suite, everything, selection.filters, [key for key, _ in pairs])
    return dataset if selection.max_samples is None else dataset.head(selection.max_samples)


def _no_sample(suite: EvalSuite, dataset: Dataset[Any, Any], wanted: str) -> UserError:
    ids = [sample.id for sample in dataset]
    near = difflib.get_close_matches(wanted, ids, 3, 0.5)
    hint = (
        f"did you mean {' or '.join(map(plain, near))}?" if near else f"ids look like: {', '.join(map(plain, ids[:3]))}"
    )
    return UserError(
        f"dataset {plain(suite.dataset.name)!r} of suite {suite.name!r} has no sample {plain(wanted)!r}", hint
    )


def _nothing_left(
    suite: EvalSuite, dataset: Dataset[Any, Any], filters: Sequence[str], keys: Sequence[str]
) -> UserError:
    metadata_keys = sorted({key for sample in dataset for key in sample.metadata})
    strange = [key for key in keys if key not in metadata_keys]
    what = f"no sample of suite {suite.name!r} has {' and '.join(map(plain, filters))}"
    if strange:
        near = difflib.get_close_matches(strange[0], metadata_keys, 1)
        hint = f"did you mean {near[0]}?" if near else f"the metadata has {', '.join(metadata_keys) or 'no keys'}"
        return UserError(what, hint)
    values = sorted({str(sample.metadata[keys[0]]) for sample in dataset if keys[0] in sample.metadata})
    return UserError(what, f"{plain(keys[0])} is one of {', '.join(map(plain, values[:8]))}")


def _experiments(suite: EvalSuite, names: Sequence[str]) -> tuple[Experiment, ...]:
    from fairtrial.trials.config import Experiment

    offered = suite.experiments or (Experiment(suite.config.experiment_name or "baseline"),)
    by_name = {experiment.name: experiment for experiment in offered}
    for name in names:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(by_name)}"
            raise UserError(f"suite {suite.name!r} has no experiment {name!r}", hint)
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _with_params(suite: EvalSuite, params: dict[str, Any]) -> tuple[Experiment, ...]:
    from fairtrial.trials.config import Experiment

    offered = suite.experiments or (Experiment(suite.config.experiment_name or "baseline"),)
    return tuple(replace(experiment, params={**experiment.params, **params}) for experiment in offered)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options for running suites."""

    store: RunStore
    words: Sequence[str]  # The command line after `fairtrial`.
    base: Sequence[str] = ()  # The words that name the suite; stored with the run, to suggest commands.
    mailbox: str | None = None
    resume: str = "auto"  # As `EvalSuite.run` takes it.
    allow_changed_code: bool = False
    once: str | None = None  # The key of a run that is executed once.
    plan: AnalysisPlan | None = None
    quiet: bool = False
    json: bool = False
    compares: bool = False  # Several models: the run ends with their comparison.
    tags: tuple[tuple[str, str], ...] = ()
    observers: Sequence[Any] = ()  # Of health probes and traces.

    @property
    def resume_words(self) -> list[str]:
        """The command line that resumes the run; with `--resume never` it would start a new one."""
        return _without_resume(self.words) if self.resume == "never" else list(self.words)

    def resume_command(self, run: RunRecord) -> str:
        """The command that resumes this very run, whatever has become of it."""
        if self.once is not None or parse_resume(self.resume).run_id is not None:
            return _command(self.words)
        named = f"errors:{run.run_id}" if self.resume == "errors" else run.run_id
        return _command([*_without_resume(self.words), "--resume", named])

    @property
    def store_words(self) -> Sequence[str]:
        """The words that name the store, if the command line has any."""
        at = next((at for at, word in enumerate(self.words) if word.partition("=")[0] == "--store"), None)
        return [] if at is None else self.words[at : at + (1 if "=" in self.words[at] else 2)]

    def show_command(self, run: RunRecord) -> str:
        """The command that shows the report of a run."""
        return _command(["show", run.run_id, *self.store_words])


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of running one suite."""

    report: EvalReport
    resumed: bool


_NAMED = 4  # Experiments with too many errors that are named.


class RunInterruptedError(KeyboardInterrupt):
    """A run was interrupted and can be resumed."""


def run_suite(suite: EvalSuite, run_options: RunOptions) -> RunOutcome:
    """Run a suite to its end, or resume its unfinished run.

    Raises:
        RunInterruptedError: after Ctrl-C; everything that can be said has been said.
    """
    from fairtrial.runs.sync import announcing

    resume = run_options.resume
    named = parse_resume(resume).run_id is not None or run_options.once is not None
    if not named and _is_other_part(suite, run_options.store):
        resume = "never"
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
    tally = Tally(run_options.store, started, retries=parse_resume(resume).retry_errors)

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
                resume=resume,
                allow_changed_code=run_options.allow_changed_code,
                once=run_options.once,
                plan=run_options.plan,
                **options,
            )
    except KeyboardInterrupt:
        _say_interrupted(run_options, begun)
        raise RunInterruptedError from None
    except RunMismatchError as error:
        what, _, remedy = _for_command_line(str(error), run_options).partition(". ")
        raise UserError(what, remedy[:1].lower() + remedy[1:]) from None
    except (StoreError, MailboxError, RunBusyError) as error:
        if begun:
            how = "the run ended early: the same command resumes it"
            if isinstance(error, StoreUnavailableError):  # If it has just ended, the same command would start another.
                how = f"the run ended early; resume it with: {run_options.resume_command(begun[0].run)}"
            raise EndedEarlyError(str(error), how) from error
        if isinstance(error, UNAVAILABLE):
            raise EndedEarlyError(str(error), NOTHING_EXECUTED) from error
        raise
    if not begun and not run_options.quiet:
        sentence(console, f"{name_of(report.run)} ({report.run_id}) has this key and has ended: nothing was executed")
    if begun and begun[0].retried and not run_options.quiet:
        took = duration((time.monotonic() - began) * 1000)
        console.print(f"retried {count(begun[0].retried, 'trial')} in {took}", soft_wrap=True)
    return RunOutcome(report, resumed=not begun or bool(begun[0].done))


def reported[T](run_options: RunOptions, report: EvalReport, show: Callable[[], T]) -> T:
    """Read and print the report of a run that has ended; a store that is unavailable is waited for, as in the run.

    Raises:
        ReportMissingError: the run is finished, and the store was unavailable for too long.
        RunInterruptedError: after Ctrl-C; everything that can be said has been said.
    """

    def attempt() -> T:
        with held_output():
            return show()

    run = report.run
    ended_early = run.status in RESUMABLE
    how = (
        f"the run ended early; resume it with: {run_options.resume_command(run)}"
        if ended_early
        else f"the run is finished and stored, do not repeat it; show it with: {run_options.show_command(run)}"
    )
    try:
        return call_store(attempt, "reading the report")
    except StoreUnavailableError as error:
        raise (EndedEarlyError if ended_early else ReportMissingError)(
            f"the report cannot be read: {error}", how
        ) from error
    except KeyboardInterrupt:
        sentence(err(), f"interrupted: {how}")
        raise RunInterruptedError from None
    except Exception as error:
        error.add_note(how)
        raise


def _for_command_line(text: str, run_options: RunOptions) -> str:
    """Replace arguments of the library in a message by the options of the command line."""
    text = re.sub(r"suite\.rescore\([^)]*\) \((.*?) SUITE\)", r"\1 " + shlex.join(run_options.base), text)
    return re.sub(r"resume='\w+'(?:, allow_changed_code=True)? \((--[^)]*)\)", r"\1", text)


def _without_resume(words: Sequence[str]) -> list[str]:
    at = next((at for at, word in enumerate(words) if word.partition("=")[0] == "--resume"), None)
    return list(words) if at is None else [*words[:at], *words[at + (1 if "=" in words[at] else 2) :]]


def _is_other_part(suite: EvalSuite, store: RunStore) -> bool:
    """Return True if the latest run of a part of this suite has other samples: it must not be resumed."""
    if not suite.name.endswith(PART):
        return False
    latest = next(iter(call_store(lambda: store.runs(suite=suite.name, limit=1), "reading the latest run")), None)
    return latest is not None and latest.dataset_fingerprint != suite.dataset.fingerprint


@contextlib.contextmanager
def stdout_for_json(json: bool) -> Iterator[None]:
    """With --json, redirect the output of user code to standard error, so that standard output is only JSON."""
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        yield


def _say_interrupted(run_options: RunOptions, begun: list[EvalRunStarted]) -> None:
    how = f"resume it with: {_command(run_options.resume_words)}"
    if begun:
        run = begun[0].run
        try:
            stored = sum(byte.bit_count() for byte in run_options.store.done(run.run_id))
            run = run_options.store.get_run(run.run_id)
            sentence(err(), f"interrupted: {name_of(run)} has {stored:,} of {count(run.planned, 'trial')} stored")
        except StoreUnavailableError:  # Then it may have ended, and the same command would start a new run.
            how = f"resume it with: {run_options.resume_command(run)}"
        _say_batches(run_options, run)
        if run.finished_at is not None:
            how = f"it had ended; show it with: {run_options.show_command(run)}"
    err().print(how, soft_wrap=True)


def _say_batches(run_options: RunOptions, run: RunRecord) -> None:
    """Say what becomes of batches that are under way."""
    from fairtrial.store.batches import OPEN

    table = getattr(run_options.store, "batches", None)
    try:
        under_way = 0 if table is None else sum(one.state in OPEN for one in table.intents(run.run_id))
    except StoreUnavailableError:
        return
    if under_way:
        which = "1 batch stays" if under_way == 1 else f"{under_way} batches stay"
        sentence(
            err(),
            f"{which} at the provider, and will be paid: a resumed run uses the replies; to cancel, type "
            f"{_command(['batches', run.run_id, '--cancel', *run_options.store_words])}",
        )


def _command(words: Sequence[str]) -> str:
    from fairtrial.runs.sync import shown_command

    return shown_command(["fairtrial", *words])


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
