"""Suites, prompts and evaluators from what people type, and what is said when there are none."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.cli.faults import Mistake, explain, place_of
from fairtrial.errors import ConfigurationError, FairtrialError

if TYPE_CHECKING:
    from fairtrial.suites import EvalSuite


def load(where: str) -> EvalSuite:
    """The suite behind `file.py`, `file.py:name`, `module` or `module:name`."""
    from fairtrial.suites.loading import load_suite

    try:
        return load_suite(where)
    except ConfigurationError as error:
        raise _told(error, where) from error.__cause__


def load_object(where: str, what: str) -> Any:
    """Whatever `file.py:name` names."""
    from fairtrial.suites.loading import load_module

    place, _, name = where.partition(":")
    if not name:
        raise Mistake(f"{what} is FILE:NAME, and {where!r} has no name", f"as in: {place}:{what.split()[-1]}")
    try:
        module = load_module(place)
    except ConfigurationError as error:
        raise _told(error, where) from error.__cause__
    value: Any = module
    for step in name.split("."):
        if not hasattr(value, step):
            near = difflib.get_close_matches(step, [known for known in dir(value) if not known.startswith("_")], 1)
            raise Mistake(f"there is no {name!r} in {place}", f"did you mean {place}:{near[0]}?" if near else "")
        value = getattr(value, step)
    return value


def _told(error: ConfigurationError, where: str) -> FairtrialError:
    """An error of importing as the user's own: the line of theirs it came from, not one of ours."""
    cause = error.__cause__
    if cause is None:
        return error
    place = place_of(cause) or where
    if isinstance(cause, FairtrialError):
        told = explain(cause)
        remedy = told.remedy
        what = told.what if told.where is None else f"{place}: {told.what}"
    else:
        said = cause.msg if isinstance(cause, SyntaxError) else str(cause)  # The place has been named.
        what = f"{place}: {type(cause).__name__}: {' '.join(said.split())}"
        remedy = _remedy(cause, place)
    return Mistake(what, remedy)


def _remedy(cause: BaseException, place: str) -> str:
    if isinstance(cause, ModuleNotFoundError):
        suite = Path(place.rpartition(":")[0])
        if cause.name and suite.with_name(f"{cause.name.partition('.')[0]}.py").is_file():
            return f"name the suite by its path, so that files beside it are found: {suite}"
        return (
            f"install the package that brings {cause.name}, or correct the name; files beside the suite and in this "
            "folder can be imported"
        )
    if isinstance(cause, ImportError):
        return "correct the name that is imported; --debug shows the whole traceback"
    if isinstance(cause, SyntaxError):
        return "correct the line; nothing was run"
    return "the suite's file itself fails; --debug shows the whole traceback"
