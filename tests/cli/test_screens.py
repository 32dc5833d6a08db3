"""Properties of all screens: no wrapped rows, no control codes in a pipe, help with examples."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairtrial.cli.app import GROUPS, command_tree
from fairtrial.cli.settings import KNOWN, variable_of
from fairtrial.cli.user_errors import ExitCode
from tests.cli.conftest import EVALS, Cli

LONG = EVALS.replace('"doubles"', '"a-suite-with-a-name-that-is-far-too-long-for-any-table-of-ours"').replace(
    'Sample("one"', 'Sample("a-sample-whose-id-does-not-fit-into-any-column-that-we-might-offer-it-on-a-narrow-screen"'
).replace("double, exact_match)", 'double, exact_match, experiments=[Experiment("an-experiment-of-many-words"), '
          'Experiment("another-experiment-of-even-more-words", params={"breaks_at": 1})])')  # fmt: skip
SUITE = "a-suite-with-a-name-that-is-far-too-long-for-any-table-of-ours"
SCREENS = [
    ["runs"],
    ["show", SUITE],
    ["show", SUITE, "--by", "level"],
    ["trials", SUITE, "--failed"],
    ["compare", SUITE],
    ["plan", SUITE],
    ["store", "stats"],
    ["doctor", "--settings"],
]


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "TERM": "xterm-256color", **variables}


def in_terminal(words: list[str], *, columns: int, **variables: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:
                return
            if not piece:
                return
            written.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        subprocess.run(
            [sys.executable, "-m", "fairtrial.cli", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(COLUMNS=str(columns), LINES="40", **variables),
            check=False,
            timeout=120,
        )
    finally:
        os.close(theirs)
        reader.join(30)
        os.close(ours)
    return b"".join(written).decode()


@pytest.mark.parametrize("columns", [80, 140])
def test_no_row_of_a_table_is_longer_than_the_screen(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    (place / "evals.py").write_text(LONG)
    monkeypatch.setenv("COLUMNS", str(columns))
    cli("run", "evals.py", "--quiet", "--max-error-share", "1")
    for words in SCREENS:
        done = cli(*words)
        assert done.code == 0, done.err
        lines = done.out.splitlines()
        tables = [
            line for line in lines if not line.startswith("  fairtrial ")
        ]  # Commands are never cut: to copy them.
        assert max(len(line) for line in tables) <= columns, (words, max(tables, key=len))


def test_rows_are_single_lines(cli: Cli, place: Path) -> None:
    (place / "evals.py").write_text(LONG)
    cli("run", "evals.py", "--quiet", "--max-error-share", "1")
    assert len(cli("runs").out.splitlines()) == 2
    assert len(cli("trials", SUITE, "--failed").out.splitlines()) == 2 + 3 + 3


@pytest.mark.long
def test_a_pipe_gets_no_control_codes_and_a_terminal_gets_colours(place: Path) -> None:
    (place / "evals.py").write_text(EVALS)
    done = subprocess.run(
        [sys.executable, "-m", "fairtrial.cli", "run", "evals.py"],
        capture_output=True, text=True, env=environment(), check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    assert not re.search(r" +$", done.stdout, re.MULTILINE)
    coloured = in_terminal(["run", "evals.py"], columns=80)
    assert "\x1b[" in coloured
    assert "75.0%" in coloured
    without = in_terminal(["show", "doubles"], columns=80, NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*3\dm", without)
    assert "75.0%" in without


def test_a_reader_who_has_seen_enough_is_no_error(place: Path) -> None:
    (place / "evals.py").write_text(EVALS)
    command = f"{sys.executable} -m fairtrial.cli"
    script = f"{command} run evals.py -q > first && {command} export doubles -f jsonl -o - | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, env=environment(), check=False,
        timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def everything() -> list[list[str]]:
    """Every command there is."""

    def below(group: Any, above: list[str]) -> Iterator[list[str]]:
        for name, command in getattr(group, "commands", {}).items():
            yield [*above, name]
            yield from below(command, [*above, name])

    return list(below(command_tree(), []))


@pytest.mark.parametrize("words", everything(), ids=" ".join)
def test_every_command_has_help_with_examples(cli: Cli, words: list[str]) -> None:
    done = cli(*words, "--help")
    assert (done.code, done.err) == (0, "")
    assert "Examples:" in done.out
    assert f"fairtrial {words[0]}" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    if words not in (["store"], ["fleet"], ["fleet", "dlq"], ["watch"], ["dataset"]):
        assert "--json" in done.out


def test_the_commands_are_listed_in_groups_and_none_is_left_out(cli: Cli) -> None:
    done = cli("--help")
    assert done.code == 0
    assert sorted(name for names in GROUPS.values() for name in names) == sorted({words[0] for words in everything()})
    assert [line[:-1] for line in done.out.splitlines() if line[:-1] in GROUPS] == list(GROUPS)
    root: Any = command_tree()
    for name, text in (one for names in GROUPS.values() for one in names.items()):
        assert root.commands[name].get_short_help_str(100) == text
        assert f"\n  {name:<11}  {text}\n" in done.out  # Each fits on its line.


def test_version_and_no_words_at_all(cli: Cli) -> None:
    from fairtrial import __version__

    assert cli("--version").out == f"fairtrial {__version__}\n"
    assert cli().code == 2
    assert "Usage: fairtrial" in cli().err
    assert cli("store").code == 2


def test_the_shell_completes_names_of_runs(cli: Cli, evals: Path) -> None:
    cli("run", "evals.py", "--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "fairtrial.cli"],
        env=environment(_FAIRTRIAL_COMPLETE="complete_bash", COMP_WORDS="fairtrial show do", COMP_CWORD="2"),
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["doubles", "doubles@1"]


def test_the_documentation_names_every_command_setting_exit_code_and_format() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    page = "".join(path.read_text(encoding="utf-8") for path in sorted((root / "docs" / "reference").glob("*.md")))
    for words in everything():
        assert f"`{words[0]}" in page, words
        assert words[-1] in page, words
    for name in KNOWN:
        assert f"\n{name.rpartition('.')[2]} = " in page or f"\n[tool.fairtrial.{name}]" in page
        assert variable_of(name) in page
    for code in ExitCode:
        assert f"\n| {int(code)} | " in page
    sources = "".join(path.read_text(encoding="utf-8") for path in (root / "src/fairtrial/cli").glob("*.py"))
    formats = {found.replace("{verb}", verb) for found in re.findall(r'"(fairtrial\.[a-z_{}]+/1)"', sources)
               for verb in ("retry", "drop")}  # fmt: skip
    assert len(formats) > 15
    assert [name for name in formats if f"`{name}`" not in page] == []


@pytest.mark.parametrize("words", everything(), ids=" ".join)
def test_every_example_in_the_help_is_a_command_with_options_that_exist(words: list[str]) -> None:
    root: Any = command_tree()
    command = root
    for word in words:
        command = command.commands[word]
    examples = re.findall(r"fairtrial (.*?)(?:   |;|\n|&&|$)", f"{command.help}\n{command.epilog}".replace("\\\n", " "))
    assert examples
    for example in examples:
        meant = root
        parts = example.split()
        while parts and parts[0] in getattr(meant, "commands", {}):
            meant = meant.commands[parts.pop(0)]
        meant = getattr(meant, "commands", {}).get("status", meant)  # The default command of a group.
        known = {option for parameter in meant.params for option in parameter.opts}
        assert meant is not root, example
        assert {part for part in parts if part.startswith("-") and part != "-"} <= known, example
