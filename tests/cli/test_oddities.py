"""Output on narrow screens, with limited encodings and names with spaces."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from fairtrial.base.formatting import make_printable
from fairtrial.cli.screen import make_exact
from tests.cli.conftest import EVALS, TWO, Cli
from tests.cli.test_screens import environment

NAMES = (
    TWO.replace('"doubles"', '"prüfung 日本"').replace('"plain"', '"naïve"').replace('Sample("four"', 'Sample("vier ⅘"')
)
SUITE = "prüfung 日本"


def in_ascii(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "fairtrial.cli", *words],
        env=environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0", COLUMNS="80", LANG="C.UTF-8"),
        capture_output=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.fixture
def names(place: Path) -> Path:
    file = place / "evals.py"
    file.write_text(NAMES, encoding="utf-8")
    return file


@pytest.mark.long
@pytest.mark.usefixtures("names")
def test_a_terminal_that_knows_only_ascii_gets_every_screen() -> None:
    ran = in_ascii("run", "evals.py")
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"pr?fung ????  run " in ran.stdout
    for words in (["runs"], ["trials", SUITE, "--failed"], ["show", SUITE, "--sample", "vier ⅘"], ["compare", SUITE]):
        done = in_ascii(*words)
        assert (done.returncode, done.stderr) == (0, b""), words
        assert done.stdout.isascii()
    rows = in_ascii("runs").stdout.decode("ascii").splitlines()
    assert rows[1].startswith("pr?fung ????@1  ")
    assert max(map(len, rows)) <= 80
    assert in_ascii("show", "größe").stderr.startswith(b"error: there is no run 'gr??e'")


@pytest.mark.usefixtures("names")
def test_an_export_into_a_pipe_is_utf_8_in_an_ascii_locale() -> None:
    in_ascii("run", "evals.py", "--quiet")
    done = in_ascii("export", SUITE, "--format", "csv", "-o", "-")
    assert done.returncode == 0
    assert "vier ⅘" in done.stdout.decode("utf-8")


def test_characters_are_replaced_by_as_much_room_as_they_take() -> None:
    text = "größe 日本 … ok"
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    make_printable(stream)
    stream.write(text)
    seen = stream.buffer.getvalue().decode("ascii")
    assert seen == "gr??e ???? ~ ok"
    assert len(seen) == cell_len(text)
    make_printable(io.StringIO())  # Whatever has no encoding is left alone.
    make_exact(io.StringIO())


def test_suggested_commands_work_with_unusual_names(cli: Cli, names: Path) -> None:
    done = cli("run", "evals.py")
    offered = [line.strip().partition("   ")[0] for line in done.out.splitlines() if line.startswith("  fairtrial ")]
    assert len(offered) == 3
    offered += [line.strip().partition("   ")[0] for line in cli("trials", SUITE, "--failed").out.splitlines()[-1:]]
    for line in offered:
        words = shlex.split(line)
        assert words[0] == "fairtrial"
        assert cli(*words[1:]).code == 0, line
    assert names.exists()


def test_a_table_that_does_not_fit_becomes_a_list_with_every_figure(
    cli: Cli, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("run", "evals.py", "--quiet")
    monkeypatch.setenv("COLUMNS", "40")
    shown = cli("runs").out.splitlines()
    assert shown[0] == "doubles@1"
    assert "  trials 8" in shown
    assert "  experiments plain, triple" in shown
    sliced = cli("show", "doubles", "--by", "level").out.splitlines()
    assert sliced[:4] == ["easy", "  experiment plain", "  samples 2", "  pass rate 100.0%"]
    assert cli("trials", "doubles", "--failed").out.splitlines()[0].startswith("failed: ")
    for words in (["runs"], ["show", "doubles", "--by", "level"], ["doctor", "--settings"], ["store", "stats"]):
        assert max(map(len, cli(*words).out.splitlines())) <= 40
    monkeypatch.setenv("COLUMNS", "80")
    assert len(cli("runs").out.splitlines()) == 2
    assert two.exists()


def test_rows_of_a_calibration_never_wrap_and_reasons_stand_below(cli: Cli, evals: Path) -> None:
    cli("run", "evals.py", "--quiet")
    evals.with_name("labels.csv").write_text("id,label\none,pass\ntwo,pass\n")
    done = cli("calibrate", "doubles", "--labels", "labels.csv")
    assert done.code == 0
    lines = done.out.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("judge's rate"))
    rows = lines[start : lines.index("", start)]
    assert len(rows) == 9
    rows.remove(next(row for row in rows if row.startswith("corrected") and row.endswith("2 labels, 4 judged")))
    assert all(row.split()[-1].isdecimal() for row in rows)  # Each row ends in its n.
    assert any(line.startswith("specificity") and ": " in line for line in lines[start + len(rows) + 1 :])


def test_a_limited_list_of_runs_gives_the_number_of_older_runs(cli: Cli, evals: Path) -> None:
    for _ in range(3):
        cli("run", "evals.py", "--quiet")
    done = cli("runs", "--limit", "2")
    assert (len(done.out.splitlines()), done.err) == (3, "1 older: list them with --limit 3\n")
    assert cli("runs").err == ""
    assert evals.exists()


HOSTILE = "\x1b]0;PWNED\x07\x1b[2J\u061c\u202e"


@pytest.mark.parametrize(
    "words",
    [
        ("run", "evals.py"),
        ("runs",),
        ("show", "doubles"),
        ("trials", "doubles", "--failed"),
        ("show", "doubles", "--sample", f"nope{HOSTILE}"),
        ("runs", "--suite", f"x{HOSTILE}"),
        ("run", f"nope{HOSTILE}.py"),
        ("export", f"x{HOSTILE}", "--format", "csv"),
    ],
    ids=lambda words: ascii(" ".join(words)),
)
def test_no_name_reaches_the_terminal_as_a_command_to_it(cli: Cli, place: Path, words: tuple[str, ...]) -> None:
    evals = EVALS.replace('"doubles"', f'"doubles{HOSTILE.encode("unicode_escape").decode()}"')
    (place / "evals.py").write_text(evals.replace('"numbers"', repr(f"numbers{HOSTILE}")))
    cli("run", "evals.py")
    done = cli(*(word.replace("doubles", f"doubles{HOSTILE}") for word in words))
    for mark in ("\x1b]0;", "\x1b[2J", "\u061c", "\u202e"):
        assert mark not in done.out + done.err
