"""What a suite executes: described when the suite is made, and compared before each of its runs.

A value that has changed since is a new identity, unless trials have changed it: a counter, a cache. To tell them apart,
a suite is described again at the end of each run. What changed in between is state: it keeps the value that it had
before the first trial, as it would have in a new process, and a resumed run names it in a warning.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from fairtrial.base.codec import digest
from fairtrial.runs.callables import Description, describe
from fairtrial.runs.code import package_versions, project_code

_MAX_CHANGES = 10_000
_MAX_PARTS = 400  # A run records the digests of at most 400 parts, to name what has changed.
_ROOTS = ("<", "task", "evaluator", "adapter", "lifespan")


@dataclass(frozen=True, slots=True)
class SuiteCode:
    """What a suite executes, as it is when a run begins.

    Attributes:
        evaluator: A digest of the evaluator's code, composition and values.
        code: A digest of the project's files, and of the code and values of tasks, adapter and lifespan.
        parts: Digests of files and values by name, to say what has changed; empty if there are too many.
        packages: The versions of the installed packages that the project imports.
        reads: Digests of text files and environment variables that the code names and may read at any time.
        unknown: What cannot be described.
        state: What trials have changed in this process.
    """

    evaluator: str
    code: str
    parts: Mapping[str, str]
    packages: Mapping[str, str]
    reads: Mapping[str, str]
    unknown: tuple[str, ...] = ()
    state: tuple[str, ...] = ()


@dataclass(slots=True)
class _Runs:
    """The runs of this process, and what their trials changed: (suite, part) -> (digest before, digest after)."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    active: int = 0
    counted: int = 0  # Raised when a run begins and when it ends.
    changes: dict[tuple[str, str], tuple[str | None, str | None]] = field(default_factory=dict)


_runs = _Runs()


class Baseline:
    """The parts of a suite when it was last described without trials in between."""

    def __init__(self) -> None:
        self._roots: list[Any] = []
        self._parts: dict[str, str] | None = None
        self._counted = 0

    def settle(self, suite: str, roots: Mapping[str, Any], now: dict[str, str]) -> tuple[dict[str, str], list[str]]:
        """Return the parts that identify a run, and the names of those that trials have changed."""
        given = list(roots.values())
        with _runs.lock:
            same = len(given) == len(self._roots) and all(map(is_, given, self._roots))
            before = now if self._parts is None or not same else self._parts
            uncertain = bool(_runs.active) or _runs.counted != self._counted
            settled, state = dict(now), []
            gone = [part for scope, part in _runs.changes if scope == suite and part not in now]
            for part in dict.fromkeys([*now, *before, *gone]):
                key, found = _key(suite, part), now.get(part)
                change = _runs.changes.get(key)
                if change is None and uncertain and before.get(part) != found:
                    change = before.get(part), found  # A trial of another suite may have changed it.
                    _remember(key, change)
                if change is None:
                    continue
                if change[1] != found:
                    del _runs.changes[key]  # Assigned after the trials.
                    continue
                state.append(part)
                settled.pop(part, None)
                if change[0] is not None:
                    settled[part] = change[0]
            self._roots, self._parts, self._counted = given, now, _runs.counted
        return settled, state

    @contextmanager
    def observe(self, suite: str, home: str, version: str | None, roots: Mapping[str, Any]) -> Iterator[None]:
        """Record what changes during the block, in which trials are executed."""
        start = self._parts or {}
        with _runs.lock:
            _runs.active += 1
            _runs.counted += 1
        try:
            yield
        finally:
            end = _Parts(home, version, roots).digests
            with _runs.lock:
                _runs.active -= 1
                _runs.counted += 1
                for part in start.keys() | end.keys():
                    if start.get(part) != end.get(part):
                        key = _key(suite, part)
                        first = _runs.changes.get(key, (start.get(part), None))[0]
                        _remember(key, (first, end.get(part)))
                self._parts, self._counted = end, _runs.counted


def _key(suite: str, part: str) -> tuple[str, str]:
    """Return the key of a change: global values are shared by all suites, arguments of a suite are its own."""
    return (suite if part.removeprefix(_CODE).startswith(_ROOTS) else "", part)


def _remember(key: tuple[str, str], change: tuple[str | None, str | None]) -> None:
    _runs.changes.pop(key, None)
    if change[0] != change[1]:
        if len(_runs.changes) >= _MAX_CHANGES:
            del _runs.changes[next(iter(_runs.changes))]
        _runs.changes[key] = change


def describe_code(
    suite: str, home: str, version: str | None, roots: Mapping[str, Any], baseline: Baseline | None = None
) -> SuiteCode:
    """Describe what a suite executes.

    Args:
        suite: The name of the suite.
        home: The file that defines it.
        version: A version maintained by the user, which replaces the code.
        roots: "evaluator", and the tasks and other callables by their names.
        baseline: The suite when it was last described.
    """
    made = _Parts(home, version, roots)
    scorer, others = made.scorer, made.others
    files_of_parts = sorted(scorer.files | others.files)
    project = project_code("" if version is not None else home, files_of_parts, [*scorer.typed, *others.typed])
    settled, state = (made.digests, []) if baseline is None else baseline.settle(suite, roots, made.digests)
    values = scorer.values | others.values
    code = {name: found for name, found in settled.items() if name.startswith(_CODE)}
    files = {} if version is not None else dict(project.files)
    parts = {
        name.removeprefix(_CODE): found[:8] for name, found in settled.items() if name.removeprefix(_CODE) in values
    }
    parts |= {name: found[:8] for name, found in files.items()}
    reads = {**project.reads, **scorer.varying, **others.varying}
    return SuiteCode(
        evaluator=digest({name: found for name, found in settled.items() if not name.startswith(_CODE)})[:32],
        code=f"version:{version}" if version is not None else digest([files, code])[:32],
        parts=parts if len(parts) <= _MAX_PARTS else {},
        packages=package_versions(project.packages | scorer.packages | others.packages),
        reads={name: found[:8] for name, found in sorted(reads.items())},
        unknown=(
            *(f"{name} ({kind})" for name, kind in sorted({**scorer.unknown, **others.unknown}.items())),
            *project.unknown,
            *(f"{name} (edited after it was imported)" for name in project.edited),
        ),
        state=tuple(dict.fromkeys(name for part in state if not (name := part.removeprefix(_CODE)).startswith("<"))),
    )


_CODE = "code "  # Precedes the names of parts that belong to the tasks, not to the evaluator.


class _Parts:
    """The parts of the evaluator and of everything else, described separately: rescoring changes only the first."""

    def __init__(self, home: str, version: str | None, roots: Mapping[str, Any]) -> None:
        others = {name: value for name, value in roots.items() if name != "evaluator"}
        self.scorer = describe({"evaluator": roots.get("evaluator")}, home)
        self.others = Description() if version is not None else describe(others, home)
        self.digests = self.scorer.digests()
        self.digests |= {f"{_CODE}{name}": found for name, found in self.others.digests().items()}
