"""Every command and option that a message recommends exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fairtrial
from fairtrial.cli.app import _OPTIONS, command_tree

SOURCE = Path(fairtrial.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
COMMAND = re.compile(r"(?:^|[:`\s])fairtrial ([a-z]+)(?= |`|$)")
OF_OTHER_PROGRAMS = {"--upgrade", "--base-url"}  # Of pip, and of `python -m fairtrial.cli.episode`.
ANSWERED = {option for table in _OPTIONS.values() for option in table}  # The answer is the option that exists.
STYLES = ("html.py", "plots.py")  # Variables of style sheets begin like options.
THREADS = ("progress", "lease", "writer", "loop", "viewer")  # Named after us, as in "fairtrial writer".


def texts(folder: str) -> Iterator[tuple[str, str]]:
    """Every piece of text in the modules of a package."""
    for path in sorted(path for path in (SOURCE / folder).rglob("*.py") if path.name not in STYLES):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.name, node.value


def commands(group: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield (*above, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*above, name))


ROOT: Any = command_tree()
KNOWN = dict(commands(ROOT))


@pytest.mark.parametrize("folder", ["cli", "report", "store", "runs"])
def test_every_option_that_a_message_names_exists(folder: str) -> None:
    every = {"--help", *(option for one in (ROOT, *KNOWN.values()) for p in one.params for option in p.opts)}
    every |= {option for one in (ROOT, *KNOWN.values()) for p in one.params for option in p.secondary_opts}
    named = {(option, where) for where, text in texts(folder) for option in OPTION.findall(text)}
    assert {pair for pair in named if pair[0] not in every | OF_OTHER_PROGRAMS | ANSWERED} == set()
    assert folder != "cli" or "--floor" in {option for option, _ in named}


@pytest.mark.parametrize("folder", ["cli", "report", "store", "runs"])
def test_every_command_that_a_message_names_exists(folder: str) -> None:
    unknown = {
        (first, where)
        for where, text in texts(folder)
        for first in COMMAND.findall(text)
        if (first,) not in KNOWN and first not in THREADS
    }
    assert unknown == set()
