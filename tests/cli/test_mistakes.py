"""Mistakes people make, and exactly what they are told: the place and the remedy, and no traceback."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fairtrial
from fairtrial.cli import faults
from fairtrial.cli.app import app
from fairtrial.testing.model_server import FaultRule, ModelServer, NotAuthorised
from tests.cli.conftest import EVALS, Cli

HEAD = "from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Sample, exact_match\n"
GOOD = [{"id": f"s{number}", "input": {"n": number}, "expected": number} for number in range(800)]


def rows(*changed: tuple[int, dict[str, object]]) -> str:
    """800 good rows, some of them changed (lines count from 1)."""
    lines = [json.dumps(row) for row in GOOD]
    for line, change in changed:
        lines[line - 1] = json.dumps(GOOD[line - 1] | change)
    return "\n".join(lines) + "\n"


LOADS = (
    "from dataclasses import dataclass\n" + HEAD + "\n\n@dataclass(frozen=True)\nclass Question:\n    n: int\n\n\n"
    'suite = EvalSuite("s", Dataset.load("q.jsonl", Question, int), lambda q: q.n, exact_match)\n'
)

# (files, words, what is said on standard error)
MISTAKES: dict[str, tuple[dict[str, str], list[str], str]] = {
    "no suite named": (
        {},
        ["run"],
        "error: no suite was named, and no pyproject.toml here or above names any\n"
        '  name one, as in: fairtrial run evals.py; or set suites = ["evals.py"] under [tool.fairtrial]\n',
    ),
    "a file that is not there": (
        {},
        ["run", "missing.py"],
        "error: there is no file missing.py (looked from the folder 'HERE')\n",
    ),
    "a folder": (
        {"evals/a.py": ""},
        ["run", "evals/"],
        "error: evals/ is a folder: name the file of the suite in it\n",
    ),
    "a module that is not there": (
        {},
        ["run", "no_such.module"],
        "error: there is no module no_such (from no_such.module): give the path of a .py file, or a dotted name that "
        "can be imported from this folder\n",
    ),
    "an import of something not installed": (
        {"evals.py": HEAD + "\nimport no_such_package\n"},
        ["run", "evals.py"],
        "error: evals.py:3: ModuleNotFoundError: No module named 'no_such_package'\n"
        "  install the package that brings no_such_package, or correct the name; files beside the suite and in this "
        "folder can be imported\n",
    ),
    "a name that does not exist": (
        {"evals.py": "from fairtrial import exact_mach\n"},
        ["run", "evals.py"],
        "error: evals.py:1: ImportError: cannot import name 'exact_mach' from 'fairtrial' (INIT)\n"
        "  correct the name that is imported; --debug shows the whole traceback\n",
    ),
    "a line that is no Python": (
        {"evals.py": HEAD + "suite = EvalSuite(\n"},
        ["run", "evals.py"],
        "error: evals.py:2: SyntaxError: '(' was never closed\n  correct the line; nothing was run\n",
    ),
    "a file that fails": (
        {"evals.py": "def work():\n    return 1 / 0\n\n\nwork()\n"},
        ["run", "evals.py"],
        "error: evals.py:2: ZeroDivisionError: division by zero\n"
        "  the suite's file itself fails; --debug shows the whole traceback\n",
    ),
    "no suite in the file": (
        {"evals.py": "x = 1\n"},
        ["run", "evals.py"],
        "error: there is no EvalSuite in evals.py: assign one to a name at the top level, as in "
        "`suite = EvalSuite(...)`\n",
    ),
    "a misspelt suite": (
        {"evals.py": EVALS},
        ["run", "evals.py:suit"],
        "error: there is no 'suit' in evals.py; its suites are: suite\n",
    ),
    "two suites in the file": (
        {"evals.py": EVALS + 'other = EvalSuite("others", Dataset(samples), double, exact_match)\n'},
        ["run", "evals.py"],
        "error: there are 2 suites in evals.py; say which one: evals.py:suite, evals.py:other\n",
    ),
    "a suite without an evaluator": (
        {"evals.py": HEAD + '\nsuite = EvalSuite("s", Dataset([]), print)\n'},
        ["run", "evals.py"],
        "error: evals.py:3: suite 's' has no evaluator\n",
    ),
    "a task that cannot be called": (
        {"evals.py": HEAD + '\n\nsuite = EvalSuite("s", Dataset([]), "task", exact_match)\n'},
        ["run", "evals.py"],
        "error: evals.py:4: a task must be callable, and 'task' is not\n",
    ),
    "a setting out of range": (
        {"evals.py": HEAD + "\nconfig = EvalConfig(repeats=0)\n"},
        ["run", "evals.py"],
        "error: evals.py:3: EvalConfig.repeats is a whole number of at least 1, not 0\n",
    ),
    "two samples of one id": (
        {"evals.py": LOADS, "q.jsonl": rows((734, {"id": "s7"}))},
        ["run", "evals.py"],
        "error: q.jsonl:734: duplicate id 's7'; it was used before on line 8\n",
    ),
    "a wrong type in line 734": (
        {"evals.py": LOADS, "q.jsonl": rows((734, {"input": {"n": "many"}}))},
        ["run", "evals.py"],
        'error: q.jsonl:734: at $.input.n: expected int, got str ("many")\n',
    ),
    "a misspelt field": (
        {"evals.py": LOADS, "q.jsonl": rows((3, {"input": {"m": 3}}))},
        ["run", "evals.py"],
        "error: q.jsonl:3: at $.input: Question has no field 'm'; Question has n\n",
    ),
    "a dataset that is not there": (
        {"evals.py": LOADS},
        ["run", "evals.py"],
        "error: evals.py:10: q.jsonl: no such file (looked from PLACE)\n",
    ),
    "a sample that is not there": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--sample", "fuor"],
        "error: dataset 'numbers' of suite 'doubles' has no sample 'fuor'\n  did you mean four?\n",
    ),
    "an experiment that is not there": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--experiment", "basline"],
        "error: suite 'doubles' has no experiment 'basline'\n  did you mean baseline?\n",
    ),
    "a filter nothing fits": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--filter", "level=medium"],
        "error: no sample of suite 'doubles' has level=medium\n  level is one of easy, hard\n",
    ),
    "a filter by a key nobody has": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--filter", "levl=easy"],
        "error: no sample of suite 'doubles' has levl=easy\n  did you mean level?\n",
    ),
    "a parameter without a value": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--set", "style"],
        "error: --set takes KEY=VALUE, not 'style'\n  as in: --set style=terse\n",
    ),
    "no store": (
        {},
        ["show", "support"],
        "error: there is no store at .fairtrial/runs.db\n  make one with: fairtrial run SUITE (`fairtrial config` says "
        "where this place comes from; --store names another)\n",
    ),
    "an address that is no store": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--store", "mysql://db/evals"],
        "error: not the address of a store: use sqlite:///path, a path that ends in .db or .sqlite, "
        "postgresql://host/database, or memory:\n",
    ),
    "a cache policy that does not exist": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--cache", "always"],
        "error: a cache policy is one of off, read, read-write, refresh, not 'always'\n",
    ),
    "a part of a suite for a fleet": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--mailbox", "redis://127.0.0.1:1", "--sample", "one", "--set", "a=1"],
        "error: --sample and --set cannot go to a fleet: its workers run the suite as its file has it\n"
        "  leave --mailbox out to run this here\n",
    ),
    "no queue": (
        {},
        ["fleet", "support"],
        "error: no queue is named\n  name one: --mailbox redis://host:6379, FAIRTRIAL_MAILBOX, or "
        'mailbox = "..." under [tool.fairtrial]\n',
    ),
    "half of an ad-hoc run": (
        {},
        ["run", "--prompt", "ask.md", "--model", "openai:gpt-5"],
        "error: a prompt is run with --prompt, --dataset, --model and --evaluator together; --dataset and --evaluator "
        "are missing\n  as in: fairtrial run --prompt ask.md --dataset q.jsonl --model openai:gpt-5 --evaluator "
        "exact_match\n",
    ),
    "a suite and a prompt": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--prompt", "ask.md"],
        "error: --prompt, --dataset, --model and --evaluator make a suite of their own\n  leave SUITE out\n",
    ),
    "an option that does not exist": (
        {},
        ["run", "--concurency", "3"],
        "error: no such option: --concurency (Possible options: --concurrency)\n  see: fairtrial run --help\n",
    ),
    "a command that does not exist": (
        {},
        ["comparre"],
        "error: no such command 'comparre'. Did you mean 'compare'?\n  see: fairtrial --help\n",
    ),
    "a number that is none": (
        {},
        ["run", "--repeats", "many"],
        "error: invalid value for '--repeats': Input should be a valid integer, unable to parse string as an integer\n"
        "  see: fairtrial run --help\n",
    ),
}

ASK = {"ask.md": "What is the capital of $input?", "q.jsonl": '{"id": "f", "input": "France", "expected": "Paris"}\n'}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_place_and_remedy(cli: Cli, place: Path, name: str) -> None:
    files, words, said = MISTAKES[name]
    for file, text in files.items():
        (place / file).parent.mkdir(exist_ok=True)
        (place / file).write_text(text)
    done = cli(*words)
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err
    assert done.err == (
        said.replace("HERE", place.name).replace("PLACE", str(Path.cwd())).replace("INIT", str(fairtrial.__file__))
    )


class TestModels:
    WORDS = ("run", "--prompt", "ask.md", "--dataset", "q.jsonl", "--evaluator", "exact_match", "--quiet")

    @pytest.fixture(autouse=True)
    def asked(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for file, text in ASK.items():
            (place / file).write_text(text)
        for variable in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
            monkeypatch.delenv(variable, raising=False)

    def test_no_key(self, cli: Cli) -> None:
        done = cli(*self.WORDS, "--model", "openai:gpt-5")
        assert (done.code, done.err) == (2, NO_KEY)

    def test_a_wrong_key(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        with ModelServer("Paris", faults=[FaultRule(NotAuthorised(401))]) as server:
            monkeypatch.setenv("OPENAI_BASE_URL", f"{server.base_url}/v1")
            monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-wrong-wrong")
            done = cli(*self.WORDS, "--model", "openai:gpt-5")
        assert done.code == 4
        assert done.err == WRONG_KEY
        assert "sk-wrong" not in done.err

    def test_a_server_that_is_down(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "not-a-real-key")
        done = cli(*self.WORDS, "--model", "openai:gpt-5")
        assert done.code == 4
        assert done.err == SERVER_DOWN.replace("PORT", str(port))

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--model", "opnai:gpt"], "error: there is no provider 'opnai'\n  did you mean --model openai:gpt?\n"),
            (["--model", "mine"], "error: there is no provider 'mine'\n  use openai:NAME, anthropic:NAME or file"),
            (["--model", "openai"], "error: --model openai does not say which\n  as in: --model openai:NAME\n"),
            (["--model", "a.py:m", "--evaluator", "exact"], "error: there is no evaluator 'exact' that works without"),
            (["--model", "a.py:m", "--prompt", "no.md"], "error: the prompt no.md cannot be read: No such file"),
            (["--model", "a.py:m", "--prompt", "a.py"], "error: a prompt is FILE:NAME, and 'a.py' has no name\n"),
            (["--model", "a.py:m", "--prompt", "a.py:m"], "error: a.py:m is not a PromptTemplate but int\n"),
            (["--model", "a.py:n"], "error: there is no 'n' in a.py\n"),
            (["--model", "a.py:m", "--dataset", "no.jsonl"], "error: there is no dataset file no.jsonl\n"),
            (["--model", "openai:a", "--model", "openai:a"], "error: the same --model was given twice\n"),
        ],
    )
    def test_what_is_wrong_with_it(
        self, cli: Cli, place: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "not-a-real-key")
        (place / "a.py").write_text("m = 3\n")
        done = cli(*self.WORDS, *words)
        assert done.code == 2
        assert done.err.startswith(said)


NO_KEY = (
    "error: OpenAIAdapter has no key: set OPENAI_API_KEY or pass api_key=... (a server that wants none takes any, such "
    'as api_key="none")\n'
)
TOO_MANY = "exit 4: 1 of 1 trial ended in an error, more than the allowed 10% (--max-error-share)\n"
AGAIN = "  once that is mended, try those again with --retry-errors\n"
WRONG_KEY = (
    f"{TOO_MANY}  1 x ModelAuthError: openai model 'gpt-5': The key is not valid. (status 401); the key comes from "
    f"api_key=... or OPENAI_API_KEY\n{AGAIN}"
)
SERVER_DOWN = (
    f"{TOO_MANY}  1 x ModelUnavailableError: openai model 'gpt-5' could not be reached at http://127.0.0.1:PORT/v1: "
    f"Connection refused\n{AGAIN}"
)


def test_a_missing_extra_is_named_with_the_line_that_installs_it(
    cli: Cli, evals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("run", "evals.py", "--quiet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = cli("export", "doubles", "--format", "parquet")
    assert (done.code, done.err) == (
        2,
        'error: exporting to Parquet needs an optional dependency: pip install "fairtrial[parquet]"\n',
    )


def test_a_queue_that_is_down(cli: Cli, evals: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = cli("fleet", "support", "--mailbox", f"redis://127.0.0.1:{port}")
    assert done.code == 2
    assert done.err.splitlines()[-1] == (
        "  see that the server runs and that --mailbox (or FAIRTRIAL_MAILBOX) names it, then run the same again"
    )


def test_a_lifespan_that_fails_is_the_users_own_and_is_named(cli: Cli, place: Path) -> None:
    (place / "evals.py").write_text(
        EVALS.replace("double, exact_match)", "double, exact_match, lifespan=opened)").replace(
            "suite =", "def opened():\n    raise RuntimeError('no database')\n\n\nsuite ="
        )
    )
    done = cli("run", "evals.py")
    line = (place / "evals.py").read_text().splitlines().index("    raise RuntimeError('no database')") + 1
    assert (done.code, done.err) == (
        2,
        f"error: evals.py:{line}: RuntimeError: no database\n"
        "  that is your own code; --debug shows the whole traceback\n",
    )


class TestOurOwnFaults:
    @pytest.fixture
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fairtrial.cli.settings.KNOWN", None)

    @pytest.mark.usefixtures("broken")
    def test_they_exit_70_and_say_how_to_report_them(self, cli: Cli) -> None:
        done = cli("config")
        assert done.code == 70
        assert done.err == (
            "error: AttributeError: 'NoneType' object has no attribute 'items'\n"
            "  this is a fault of Fairtrial's, not of yours: please report it, with what the same command and --debug "
            "print\n"
        )

    @pytest.mark.usefixtures("broken")
    def test_a_traceback_comes_with_debug_wherever_it_stands(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "Traceback" in cli("config", "--debug").err
        assert "Traceback" in cli("--debug", "config").err
        monkeypatch.setenv("FAIRTRIAL_DEBUG", "1")
        assert "Traceback" in cli("config").err

    def test_a_file_that_cannot_be_opened_is_named(self) -> None:
        told = faults.explain(PermissionError(13, "Permission denied", "out.csv"))
        assert (told.what, told.code) == ("out.csv: Permission denied", 2)


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 0)])
def test_what_ends_a_command_from_outside(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException], code: int
) -> None:
    def ends(*args: object, **options: object) -> None:
        raise raised

    done: Callable[..., object] = ends
    monkeypatch.setattr("fairtrial.cli.settings.load_settings", done)
    monkeypatch.setattr("os.dup2", lambda *numbers: 1)
    assert cli("config").code == code
    assert app is not None
