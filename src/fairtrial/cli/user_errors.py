"""Error messages and exit codes of the command line."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType

from fairtrial.errors import (
    ConfigurationError,
    DatasetError,
    FairtrialError,
    MailboxConnectionError,
    StoreFullError,
    StoreUnavailableError,
)

_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_INSTALLED = tuple(
    os.path.realpath(path) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)  # fmt: skip


class ExitCode(IntEnum):
    """Exit codes of commands."""

    OK = 0
    FAILED = 1  # A gate or a floor was not met.
    USAGE = 2  # Invalid command, file or setting.
    INCONCLUSIVE = 3  # Too little data to decide.
    ERRORED = 4  # More trials ended in an error than allowed, or results are missing.
    UNREPORTED = 5  # The run is finished, and its report could not be read.
    INTERNAL_ERROR = 70
    INTERRUPTED = 130


class UserError(ConfigurationError):
    """An error that the user can fix: what happened, and what to do."""

    code = ExitCode.USAGE

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


class EndedEarlyError(UserError):
    """The store or the queue failed before or during a run; the remedy says how to go on."""

    code = ExitCode.INCONCLUSIVE


NOTHING_EXECUTED = "nothing was executed: check the address, then run the same command again"


class ReportMissingError(UserError):
    """The store failed after the end of a run; the remedy shows its report."""

    code = ExitCode.UNREPORTED


@dataclass(frozen=True, slots=True)
class Explanation:
    """An error message: what, where, remedy and exit code."""

    what: str
    where: str | None
    remedy: str
    code: ExitCode

    def lines(self) -> Iterator[str]:
        """The message, one sentence per line."""
        prefix = f"{self.where}: " if self.where else ""
        yield f"error: {prefix}{self.what}"
        if self.remedy:
            yield f"  {self.remedy}"


def explain(error: BaseException) -> Explanation:
    """Explain an error: what happened, where in the user's files, and what to do."""
    location = location_of(error)
    what = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, FairtrialError):
        if location is not None and (location in what or (isinstance(error, DatasetError) and error.line is not None)):
            location = None  # The message already names it, or a more relevant file.
        first, _, rest = str(error).strip().partition("\n")  # First line: what is wrong; the rest: what to do.
        remedy = _remedy(error) or " ".join(rest.split())
        what = " ".join(first.split()) if remedy and rest else what
        code = error.code if isinstance(error, UserError) else ExitCode.USAGE
        return Explanation(what, location, remedy, code)
    if location is not None and _is_users(error):
        what = f"{type(error).__name__}: {what}" if str(error) else type(error).__name__
        return Explanation(
            what, location, "the error is in your code; --debug shows the full traceback", ExitCode.USAGE
        )
    if isinstance(error, OSError) and error.filename is not None:
        return Explanation(f"{error.filename}: {error.strerror or error}", None, "", ExitCode.USAGE)
    return Explanation(
        f"{type(error).__name__}: {what}",
        None,
        "this is a bug in Fairtrial: please report it with the output of the same command with --debug",
        ExitCode.INTERNAL_ERROR,
    )


def _remedy(error: FairtrialError) -> str:
    if isinstance(error, UserError):
        return error.remedy
    if isinstance(error, StoreFullError):
        return "make room on the disk of the database, then retry"
    if isinstance(error, StoreUnavailableError):
        return "check that the database is running and that --store (or FAIRTRIAL_STORE) is correct, then retry"
    if isinstance(error, MailboxConnectionError):
        return "check that the server is running and that --mailbox (or FAIRTRIAL_MAILBOX) is correct, then retry"
    return ""


def location_of(error: BaseException) -> str | None:
    """Return `file:line` of the innermost frame in the user's files; None if there is none."""
    location: str | None = None
    for frame, line in traceback.walk_tb(_whole(error)):
        file = frame.f_code.co_filename
        if is_users_file(file):
            location = f"{shown_path(file)}:{line}"
    if isinstance(error, SyntaxError) and error.filename and is_users_file(error.filename):
        location = f"{shown_path(error.filename)}:{error.lineno}"
    return location


def _whole(error: BaseException) -> TracebackType | None:
    return error.__traceback__


def _is_users(error: BaseException) -> bool:
    """True if the innermost frame is not in Fairtrial's code: it is in the user's, or in a library the user called."""
    if isinstance(error, SyntaxError):
        return True
    last = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = frame.f_code.co_filename
    return last is not None and not os.path.realpath(last).startswith(_OURS)


def is_users_file(file: str) -> bool:
    """True for a file that is neither Fairtrial's, nor Python's, nor of an installed package."""
    if file.startswith("<"):
        return False
    real = os.path.realpath(file)
    return not real.startswith(_OURS) and not real.startswith(_INSTALLED) and "site-packages" not in real


def shown_path(file: str) -> str:
    """Return a path relative to the working directory, if it is inside."""
    here = os.path.realpath(os.getcwd()) + os.sep
    real = os.path.realpath(file)
    return real[len(here) :] if real.startswith(here) else file


def report_error(error: BaseException, *, debug: bool) -> ExitCode:
    """Print an error on standard error; returns the exit code."""
    from fairtrial.cli.screen import err, sentence
    from fairtrial.store.redact import current

    explained = explain(error)
    if debug:
        traceback.print_exception(error, file=err().file)
    redactor = current()
    for position, line in enumerate(explained.lines()):
        sentence(err(), redactor.text(line), style="bold red" if position == 0 else None)
    for note in getattr(error, "__notes__", ()):
        sentence(err(), f"  {redactor.text(note)}")
    return explained.code
