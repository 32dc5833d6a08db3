"""Load a suite from a path or an import string, such as `evals/support.py:suite` or `evals.support`."""

from __future__ import annotations

import difflib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Self

from fairtrial.errors import ConfigurationError
from fairtrial.runs.code import project_files
from fairtrial.suites.suite import EvalSuite


def load_suite(where: str) -> EvalSuite:
    """Load the suite that an import string names.

    Args:
        where: `path/to/file.py`, `package.module`, or either followed by `:name` when there is more than one suite.

    Raises:
        ConfigurationError: there is no such file or module, its import fails, or it has several suites and none is
            named.
    """
    location, _, name = where.partition(":") if not _is_drive(where) else (where, "", "")
    module = load_module(location)
    if name:
        return _named(module, location, name)
    found = {known: value for known, value in vars(module).items() if isinstance(value, EvalSuite)}
    distinct = {id(suite): suite for suite in found.values()}
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    if not distinct:
        raise ConfigurationError(
            f"{location} must define an EvalSuite at the top level, as in `suite = EvalSuite(...)` (it has none)"
        )
    shown = ", ".join(f"{location}:{known}" for known in found if not known.startswith("_")) or ", ".join(found)
    raise ConfigurationError(f"{location} has {len(distinct)} suites; name one of them: {shown}")


def load_module(location: str) -> ModuleType:
    """Import the module of a suite, by its path or by its dotted name.

    Raises:
        ConfigurationError: there is no such module, or its import fails.
    """
    if not location:
        raise ConfigurationError("name a suite: path/to/file.py or package.module, with :name if it has several")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # As `python -m` does, so that a project that is not installed can be imported.
    folder = Path(location).is_dir() and not Path(location, "__init__.py").is_file()
    with _LoadedFiles() as loaded:
        if location.endswith(".py") or "/" in location or os.sep in location or folder:
            module = _from_file(location, loaded)
        else:
            module = _imported(location, location)
    changed = loaded.changed(project_files(module.__file__ or ""))
    if changed:
        loaded.forget()
        raise ConfigurationError(
            f"{', '.join(map(_shown, changed))} changed while the suite was being loaded, so the code in memory is not "
            "the code on disk: run the command again"
        )
    return module


class _LoadedFiles(importlib.abc.MetaPathFinder):
    """Records the state of each file just before it is imported.

    The code version of a suite is a hash of its files. A file that changes during a slow import would give its code
    the version of other code, which the workers of a fleet would accept.
    """

    def __init__(self) -> None:
        self._states: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Record the file that this module will be loaded from; finding it is left to the other finders."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.has_location and spec.origin:
            self.record(spec.origin)

    def record(self, file: str) -> None:
        """Record the state of a file that is about to be loaded."""
        state = _state(file)
        if state is not None:
            self._states[file] = state

    def changed(self, files: Iterable[str]) -> list[str]:
        """Return those of the files that have changed since they were loaded here."""
        return [file for file in files if file in self._states and _state(file) not in (None, self._states[file])]

    def forget(self) -> None:
        """Remove the modules that were loaded here, so that they can be loaded again."""
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) in self._states:
                del sys.modules[name]


def _state(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _is_drive(where: str) -> bool:
    return len(where) > 2 and where[1] == ":" and where[2] in "\\/"


def _named(module: ModuleType, location: str, name: str) -> EvalSuite:
    value: object = module
    for step in name.split("."):
        try:
            value = getattr(value, step)
        except AttributeError:
            known = [other for other, thing in vars(module).items() if isinstance(thing, EvalSuite)]
            hint = f"; its suites are: {', '.join(known)}" if known else ", nor any other EvalSuite"
            raise ConfigurationError(f"there is no {name!r} in {location}{hint}") from None
    if not isinstance(value, EvalSuite):
        raise ConfigurationError(f"{location}:{name} must be an EvalSuite (got {type(value).__name__})")
    return value


def _python_files(folder: Path) -> list[str]:
    """Return the Python files in a folder as suggestions, those in `evals` first."""
    found = [str(file) for file in folder.glob("*.py")] if folder.is_dir() else []
    return sorted(found, key=lambda file: ("eval" not in Path(file).name, file))


def _from_file(location: str, recorded: _LoadedFiles) -> ModuleType:
    path = Path(location)
    if path.is_dir():
        files = _python_files(path)
        example = f", as in {files[0]}" if files else ""
        raise ConfigurationError(f"{location} is a folder: name the file of the suite in it{example}")
    if not path.is_file():
        files = _python_files(path.parent)
        near = difflib.get_close_matches(location, files, 1, 0.7)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(files[:4])}" if files else ""
        raise ConfigurationError(
            f"there is no file {location} (looked from the folder {Path.cwd().name!r})" + (f"; {hint}" if hint else "")
        )
    path = path.resolve()
    root, name = _import_name(path)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    loaded = _loaded_from(path)
    if loaded is not None:
        return loaded
    if "." in name:
        return _imported(name, location)
    recorded.record(str(path))
    return _executed(path, name, location)


def _import_name(path: Path) -> tuple[Path, str]:
    """Return the folder to import a file from and its module name, which includes the package that contains it."""
    parts = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.append(folder.name)
        folder = folder.parent
    return folder, ".".join(reversed(parts))


def _loaded_from(path: Path) -> ModuleType | None:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # The program itself is `__main__`; other modules import it a second time under its own name.
        if name != "__main__" and file and file.endswith(path.name) and Path(file).resolve() == path:
            return module
    return None


def _executed(path: Path, name: str, location: str) -> ModuleType:
    if name in sys.modules or not name.isidentifier() or name in sys.stdlib_module_names:
        # A file called json.py must not replace the standard module `json`.
        name = "fairtrial_suite_" + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # noqa: S101 - a path that ends in .py always has one
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise _failed(location, error) from error
    return module


def _imported(name: str, location: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise ConfigurationError(
                f"there is no module {missing} (from {location}): give the path of a .py file, or a dotted name that "
                "can be imported from this folder"
            ) from None
        raise _failed(location, error) from error
    except (Exception, SystemExit) as error:
        raise _failed(location, error) from error


def _failed(location: str, error: BaseException) -> ConfigurationError:
    message = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    return ConfigurationError(f"importing {location} failed at {_where(error)}: {message}")


def _where(error: BaseException) -> str:
    """Return file and line of the last frame outside the import system."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in (__file__, importlib.__file__)
    ]
    return f"{_shown(frames[-1].filename)}:{frames[-1].lineno}" if frames else "its first line"


def _shown(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file
