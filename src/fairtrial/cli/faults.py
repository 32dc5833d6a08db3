"""What is said when something goes wrong, and the codes the command line ends with."""

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
    StoreUnavailableError,
)

_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_INSTALLED = tuple(
    os.path.realpath(path) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)  # fmt: skip


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1  # A gate or a floor was not met.
    USAGE = 2  # The command, a file or a setting is wrong.
    INCONCLUSIVE = 3  # The data cannot tell.
    ERRORED = 4  # More trials ended in an error than may, or results are missing.
    OUR_FAULT = 70
    INTERRUPTED = 130


class Mistake(ConfigurationError):
    """Something the person at the keyboard can put right: what happened, and what to do."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


class EndedEarly(Mistake):
    """The store or the queue failed in the middle of a run, which can be resumed."""

    def __init__(self, error: FairtrialError) -> None:
        super().__init__(str(error), _remedy(error) or "the run ended early: the same command resumes it")


@dataclass(frozen=True, slots=True)
class Explanation:
    """An error as it is told."""

    what: str
    where: str | None
    remedy: str
    code: ExitCode

    def lines(self) -> Iterator[str]:
        """The sentences, one a line."""
        place = f"{self.where}: " if self.where else ""
        yield f"error: {place}{self.what}"
        if self.remedy:
            yield f"  {self.remedy}"


def explain(error: BaseException) -> Explanation:
    """What happened, where in the user's own files, and what to do about it."""
    place = place_of(error)
    what = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, FairtrialError):
        if place is not None and (place in what or (isinstance(error, DatasetError) and error.line is not None)):
            place = None  # It says so itself, or names a file that is more to the point.
        first, _, rest = str(error).strip().partition("\n")  # What is wrong, then what to do.
        remedy = _remedy(error) or " ".join(rest.split())
        what = " ".join(first.split()) if remedy and rest else what
        code = ExitCode.INCONCLUSIVE if isinstance(error, EndedEarly) else ExitCode.USAGE
        return Explanation(what, place, remedy, code)
    if place is not None and _is_users(error):
        what = f"{type(error).__name__}: {what}" if str(error) else type(error).__name__
        return Explanation(what, place, "that is your own code; --debug shows the whole traceback", ExitCode.USAGE)
    if isinstance(error, OSError) and error.filename is not None:
        return Explanation(f"{error.filename}: {error.strerror or error}", None, "", ExitCode.USAGE)
    return Explanation(
        f"{type(error).__name__}: {what}",
        None,
        "this is a fault of Fairtrial's, not of yours: please report it, with what the same command and --debug print",
        ExitCode.OUR_FAULT,
    )


def _remedy(error: FairtrialError) -> str:
    if isinstance(error, Mistake):
        return error.remedy
    if isinstance(error, StoreUnavailableError):
        return "see that the database runs and that --store (or FAIRTRIAL_STORE) names it, then run the same again"
    if isinstance(error, MailboxConnectionError):
        return "see that the server runs and that --mailbox (or FAIRTRIAL_MAILBOX) names it, then run the same again"
    return ""


def place_of(error: BaseException) -> str | None:
    """`file:line` of the last step in files of the user's own; None if it never went through one."""
    found: str | None = None
    for frame, line in traceback.walk_tb(_whole(error)):
        file = frame.f_code.co_filename
        if is_users_file(file):
            found = f"{shown_path(file)}:{line}"
    if isinstance(error, SyntaxError) and error.filename and is_users_file(error.filename):
        found = f"{shown_path(error.filename)}:{error.lineno}"
    return found


def _whole(error: BaseException) -> TracebackType | None:
    return error.__traceback__


def _is_users(error: BaseException) -> bool:
    """True if the innermost step was not in our own code: the user's, or something the user's code called."""
    if isinstance(error, SyntaxError):
        return True
    last = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = frame.f_code.co_filename
    return last is not None and not os.path.realpath(last).startswith(_OURS)


def is_users_file(file: str) -> bool:
    """True for a file that belongs neither to us, nor to Python, nor to an installed package."""
    if file.startswith("<"):
        return False
    real = os.path.realpath(file)
    return not real.startswith(_OURS) and not real.startswith(_INSTALLED) and "site-packages" not in real


def shown_path(file: str) -> str:
    """A path as people know it: relative to where they are, if it is under there."""
    here = os.path.realpath(os.getcwd()) + os.sep
    real = os.path.realpath(file)
    return real[len(here) :] if real.startswith(here) else file


def report_fault(error: BaseException, *, debug: bool) -> ExitCode:
    """Say on standard error what went wrong; returns the code to end with."""
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
