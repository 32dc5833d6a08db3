"""Commands run in this process, in a folder of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fairtrial.cli.app import invoke

EVALS = """
from fairtrial import Dataset, EvalSuite, Experiment, Sample, TrialContext, exact_match, task

samples = [
    Sample("one", 1, 2, {"level": "easy", "rank": 1}),
    Sample("two", 2, 4, {"level": "easy", "rank": 2}),
    Sample("three", 3, 6, {"level": "hard", "rank": 3}),
    Sample("four", 4, 9, {"level": "hard", "rank": 4}),
]


@task(inline=True)
def double(number: int, ctx: TrialContext) -> int:
    if number == ctx.experiment.params.get("breaks_at"):
        raise ValueError("that is too hard")
    return number * ctx.experiment.params.get("factor", 2)


suite = EvalSuite("doubles", Dataset(samples, name="numbers"), double, exact_match)
"""

TWO = EVALS.replace(
    "double, exact_match)",
    'double, exact_match, experiments=[Experiment("plain"), Experiment("triple", params={"factor": 3})])',
)

BROKEN = EVALS.replace(
    "double, exact_match)", 'double, exact_match, experiments=[Experiment("broken", params={"breaks_at": 3})])'
)


@dataclass(frozen=True, slots=True)
class Done:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


type Cli = Callable[..., Done]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, 80 columns, and no trace in this process of what suites imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("GITHUB_STEP_SUMMARY", "FAIRTRIAL_MAILBOX", "FAIRTRIAL_CACHE", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file and str(file).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command; a suite that was edited since is read again."""

    def run(*words: str) -> Done:
        here = str(Path.cwd())
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(here):
                del sys.modules[name]
        capsys.readouterr()
        code = invoke(words)
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


@pytest.fixture
def evals(place: Path) -> Path:
    """A suite of four samples, one of which fails."""
    file = place / "evals.py"
    file.write_text(EVALS)
    return file


@pytest.fixture
def two(place: Path) -> Path:
    """The same with two experiments."""
    file = place / "evals.py"
    file.write_text(TWO)
    return file


@pytest.fixture
def ran(cli: Cli, two: Path) -> Cli:
    """The command in a folder with a finished run of two experiments."""
    cli("run", "evals.py", "--quiet")
    return cli
