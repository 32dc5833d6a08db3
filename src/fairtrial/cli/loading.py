"""Load suites, prompts and evaluators named on the command line."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.cli.user_errors import UserError, explain, location_of
from fairtrial.errors import ConfigurationError, FairtrialError

if TYPE_CHECKING:
    from fairtrial.suites import EvalSuite


def load(where: str) -> EvalSuite:
    """Load the suite named `file.py`, `file.py:name`, `module` or `module:name`."""
    from fairtrial.suites.loading import load_suite

    try:
        return load_suite(where)
    except ConfigurationError as error:
        raise _explain(error, where) from error.__cause__


def load_object(where: str, what: str) -> Any:
    """Load the object named `file.py:name`."""
    from fairtrial.suites.loading import load_module

    path, _, name = where.partition(":")
    if not name:
        raise UserError(f"{what} must be FILE:NAME (got {where!r})", f"as in: {path}:{what.split()[-1]}")
    try:
        module = load_module(path)
    except ConfigurationError as error:
        raise _explain(error, where) from error.__cause__
    value: Any = module
    for step in name.split("."):
        if not hasattr(value, step):
            near = difflib.get_close_matches(
                step, [attribute for attribute in dir(value) if not attribute.startswith("_")], 1
            )
            raise UserError(f"there is no {name!r} in {path}", f"did you mean {path}:{near[0]}?" if near else "")
        value = getattr(value, step)
    return value


def _explain(error: ConfigurationError, where: str) -> FairtrialError:
    """Convert an import error into one that names the user's line instead of ours."""
    cause = error.__cause__
    if cause is None:
        return error
    location = location_of(cause) or where
    if isinstance(cause, FairtrialError):
        told = explain(cause)
        remedy = told.remedy
        what = told.what if told.where is None else f"{location}: {told.what}"
    else:
        message = cause.msg if isinstance(cause, SyntaxError) else str(cause)  # The place has been named.
        what = f"{location}: {type(cause).__name__}: {' '.join(message.split())}"
        remedy = _remedy(cause, location)
    return UserError(what, remedy)


def _remedy(cause: BaseException, location: str) -> str:
    if isinstance(cause, ModuleNotFoundError):
        suite = Path(location.rpartition(":")[0])
        if cause.name and suite.with_name(f"{cause.name.partition('.')[0]}.py").is_file():
            return f"name the suite by its path, so that files beside it are found: {suite}"
        return (
            f"install the package that provides {cause.name}, or correct the name; files beside the suite and in this "
            "folder can be imported"
        )
    if isinstance(cause, ImportError):
        return "correct the name that is imported; --debug shows the full traceback"
    if isinstance(cause, SyntaxError):
        return "correct this line; nothing was run"
    return "the suite's file itself fails; --debug shows the full traceback"
