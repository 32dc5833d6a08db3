"""Mistakes of users and the exact error messages: the place and the remedy, without a traceback."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fairtrial
from fairtrial.cli import user_errors
from fairtrial.cli.user_errors import ExitCode
from fairtrial.integrations.model_server import FaultRule, ModelServer, NotAuthorised
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
        "error: no suite is given, and no pyproject.toml here or in a parent folder lists any\n"
        '  give one, as in: fairtrial run evals.py; or set suites = ["evals.py"] under [tool.fairtrial]\n',
    ),
    "a file that is not there": (
        {},
        ["run", "missing.py"],
        "error: there is no file missing.py (looked from the folder 'HERE')\n",
    ),
    "a folder": (
        {"evals/a.py": ""},
        ["run", "evals/"],
        "error: evals/ is a folder: name the file of the suite in it, as in evals/a.py\n",
    ),
    "a folder without a slash": (
        {"cases/agent.py": "", "cases/my_evals.py": ""},
        ["run", "cases"],
        "error: cases is a folder: name the file of the suite in it, as in cases/my_evals.py\n",
    ),
    "a misspelt file": (
        {"evals.py": EVALS},
        ["run", "eval.py"],
        "error: there is no file eval.py (looked from the folder 'HERE'); did you mean evals.py?\n",
    ),
    "a file of another name": (
        {"evals.py": EVALS, "agent.py": ""},
        ["run", "something_else.py"],
        "error: there is no file something_else.py (looked from the folder 'HERE'); there is evals.py, agent.py\n",
    ),
    "a module whose neighbours cannot be imported": (
        {"cases/evals.py": "import neighbour\n", "cases/neighbour.py": ""},
        ["run", "cases.evals"],
        "error: cases/evals.py:1: ModuleNotFoundError: No module named 'neighbour'\n"
        "  name the suite by its path, so that files beside it are found: cases/evals.py\n",
    ),
    "a line of a dataset that is no JSON": (
        {"evals.py": LOADS, "q.jsonl": rows().replace('"s7"', '"s7')},
        ["run", "evals.py"],
        "error: q.jsonl:8: not JSON: Expecting ',' delimiter at column 14\n",
    ),
    "settings that are no TOML": (
        {"pyproject.toml": "[tool.fairtrial\n"},
        ["run"],
        "error: pyproject.toml is not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 16)"
        "\n  correct that line\n",
    ),
    "a setting that does not exist": (
        {"pyproject.toml": '[tool.fairtrial]\nsuite = ["evals.py"]\n'},
        ["run"],
        "error: pyproject.toml: [tool.fairtrial] has no setting 'suite'\n  did you mean suites?\n",
    ),
    "a setting of the wrong type": (
        {"pyproject.toml": '[tool.fairtrial]\nconcurrency = "many"\n'},
        ["run"],
        "error: pyproject.toml [tool.fairtrial] concurrency must be a whole number (got 'many')\n"
        "  `fairtrial doctor --settings` lists every setting\n",
    ),
    "a file that is no store": (
        {"evals.py": EVALS, "notes.db": "these are my notes, and nothing that a database would write\n" * 9},
        ["run", "evals.py", "--store", "notes.db"],
        "error: notes.db exists but is not a Fairtrial database\n"
        "  move it, or choose another with --store or FAIRTRIAL_STORE\n",
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
        "  install the package that provides no_such_package, or correct the name; files beside the suite and in this "
        "folder can be imported\n",
    ),
    "a name that does not exist": (
        {"evals.py": "from fairtrial import exact_mach\n"},
        ["run", "evals.py"],
        "error: evals.py:1: ImportError: cannot import name 'exact_mach' from 'fairtrial' (INIT)\n"
        "  correct the name that is imported; --debug shows the full traceback\n",
    ),
    "a line that is no Python": (
        {"evals.py": HEAD + "suite = EvalSuite(\n"},
        ["run", "evals.py"],
        "error: evals.py:2: SyntaxError: '(' was never closed\n  correct this line; nothing was run\n",
    ),
    "a file that fails": (
        {"evals.py": "def work():\n    return 1 / 0\n\n\nwork()\n"},
        ["run", "evals.py"],
        "error: evals.py:2: ZeroDivisionError: division by zero\n"
        "  the suite's file itself fails; --debug shows the full traceback\n",
    ),
    "no suite in the file": (
        {"evals.py": "x = 1\n"},
        ["run", "evals.py"],
        "error: evals.py must define an EvalSuite at the top level, as in `suite = EvalSuite(...)` (it has none)\n",
    ),
    "a misspelt suite": (
        {"evals.py": EVALS},
        ["run", "evals.py:suit"],
        "error: there is no 'suit' in evals.py; its suites are: suite\n",
    ),
    "two suites in the file": (
        {"evals.py": EVALS + 'other = EvalSuite("others", Dataset(samples), double, exact_match)\n'},
        ["run", "evals.py"],
        "error: evals.py has 2 suites; name one of them: evals.py:suite, evals.py:other\n",
    ),
    "a suite without an evaluator": (
        {"evals.py": HEAD + '\nsuite = EvalSuite("s", Dataset([]), print)\n'},
        ["run", "evals.py"],
        "error: evals.py:3: suite 's' must have an evaluator, such as evaluator=exact_match\n",
    ),
    "a task that cannot be called": (
        {"evals.py": HEAD + '\n\nsuite = EvalSuite("s", Dataset([]), "task", exact_match)\n'},
        ["run", "evals.py"],
        "error: evals.py:4: a task must be callable (got 'task'): pass the function itself\n",
    ),
    "a setting out of range": (
        {"evals.py": HEAD + "\nconfig = EvalConfig(repeats=0)\n"},
        ["run", "evals.py"],
        "error: evals.py:3: EvalConfig.repeats must be a whole number of at least 1 (got 0)\n",
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
        "error: --set must be KEY=VALUE (got 'style')\n  as in: --set style=terse\n",
    ),
    "no store": (
        {},
        ["show", "support"],
        "error: there is no store at .fairtrial/runs.db\n  create one with: fairtrial run SUITE, or "
        "choose another with --store; `fairtrial doctor --settings` shows where this path comes from\n",
    ),
    "an address that is no store": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--store", "mysql://db/evals"],
        "error: invalid store URL: use sqlite:///path, a path that ends in .db or .sqlite, "
        "postgresql://host/database, or memory:\n",
    ),
    "a cache policy that does not exist": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--cache", "always"],
        "error: a cache policy must be one of off, read, read-write, refresh (got 'always')\n",
    ),
    "a part of a suite for a fleet": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--mailbox", "redis://127.0.0.1:1", "--sample", "one", "--set", "a=1"],
        "error: --sample and --set cannot be used with a fleet: workers run the suite as its file defines it\n"
        "  omit --mailbox to run locally\n",
    ),
    "no queue": (
        {},
        ["fleet", "support"],
        "error: no queue is configured\n  set --mailbox redis://host:6379, FAIRTRIAL_MAILBOX, or "
        'mailbox = "..." under [tool.fairtrial]\n',
    ),
    "half of an ad-hoc run": (
        {},
        ["try", "ask.md", "--dataset", "q.jsonl", "--model", "openai:gpt-5"],
        "error: missing option '--evaluator'.\n  see: fairtrial try --help\n",
    ),
    "a suite and a prompt": (
        {"evals.py": EVALS},
        ["run", "evals.py", "--prompt", "ask.md"],
        "error: no such option: --prompt\n  use: fairtrial try FILE:NAME --dataset FILE --evaluator NAME "
        "--model NAME --model NAME\n  see: fairtrial run --help\n",
    ),
    "an option that does not exist": (
        {},
        ["run", "--concurency", "3"],
        "error: no such option: --concurency; did you mean --concurrency?\n  see: fairtrial run --help\n",
    ),
    "an option whose work another command does": (
        {},
        ["compare", "--prompt", "qa", "--models", "a", "b"],
        "error: no such option: --prompt\n  use: fairtrial try FILE:NAME --dataset FILE --evaluator NAME "
        "--model NAME --model NAME\n  see: fairtrial compare --help\n",
    ),
    "a run that is named by an option": (
        {},
        ["export", "--run-id", "abc123", "--format", "csv"],
        "error: no such option: --run-id\n  use: fairtrial export RUN --format csv\n  see: fairtrial export --help\n",
    ),
    "a command that does not exist": (
        {},
        ["comparre"],
        "error: no such command 'comparre'. Did you mean 'compare'?\n  see: fairtrial --help\n",
    ),
    "a number that is none": (
        {},
        ["run", "--repeats", "many"],
        "error: --repeats must be a whole number (got 'many')\n  see: fairtrial run --help\n",
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


# (words, what is said) where `doubles` has been run once, with the experiments plain and triple.
AFTER_A_RUN: dict[str, tuple[list[str], str]] = {
    "a misspelt run": (
        ["show", "dubles"],
        "error: there is no run 'dubles'\n  did you mean doubles? See: fairtrial runs\n",
    ),
    "a number that no run has": (
        ["trials", "doubles@7", "--failed"],
        "error: suite 'doubles' has no run 7\n  there is doubles@1; see: fairtrial runs\n",
    ),
    "an experiment the run does not have": (
        ["show", "doubles:tripel"],
        "error: run doubles@1 has no experiment 'tripel'\n  did you mean doubles@1:triple?\n",
    ),
    "a sample the run does not have": (
        ["show", "doubles", "--sample", "thee"],
        "error: run doubles@1 has no result for sample 'thee'\n  did you mean three?\n",
    ),
    "a slice by a key nobody has": (
        ["show", "doubles", "--by", "levl"],
        "error: no sample of run doubles@1 has metadata 'levl'\n  it has level, rank\n",
    ),
    "a comparison of one": (
        ["compare", "doubles:plain"],
        "error: a comparison needs two experiments (got doubles:plain)\n"
        "  as in: fairtrial compare doubles@1:plain doubles@1:triple\n",
    ),
    "a gate for two experiments": (
        ["gate", "doubles", "--floor", "passed=0.5"],
        "error: doubles has 2 experiments\n  choose one: doubles@1:plain or doubles@1:triple\n",
    ),
    "a gate without rules": (
        ["gate", "doubles:plain"],
        "error: the gate has no rules\n"
        "  give --floor passed=RATE, or --margin with --baseline, or rules in [tool.fairtrial.gate]\n",
    ),
    "percent where a share is meant": (
        ["gate", "doubles:plain", "--floor", "passed=80"],
        "error: the gate rules: min_pass_rate must be between 0 and 1, such as 0.8, for 80% (got 80)\n",
    ),
    "a floor without a number": (
        ["gate", "doubles:plain", "--floor", "value"],
        "error: --floor must be KEY=VALUE (got 'value')\n  as in: --floor value=0.7\n",
    ),
    "a judge that nobody labelled": (
        ["calibrate", "doubles:plain"],
        "error: no trial of doubles@1:plain has a label\n"
        "  label a random sample of its trials and pass the file: --labels labels.csv, with the columns id "
        "and label (pass or fail)\n",
    ),
    "labels of something else": (
        ["calibrate", "doubles:plain", "--labels", "labels.csv"],
        "error: no label in labels.csv is for a judged trial of doubles@1:plain\n  the ids of samples go under id\n",
    ),
    "a format that does not exist": (
        ["export", "doubles", "--format", "cvs"],
        "error: unknown export format 'cvs'\n  did you mean csv?\n",
    ),
    "an export into a folder that is not there": (
        ["export", "doubles", "-o", "out/doubles.csv"],
        "error: there is no folder out\n  make it first, or name another file with --output\n",
    ),
}


@pytest.mark.parametrize("name", AFTER_A_RUN)
def test_a_mistake_about_a_run_is_told_with_what_there_is(cli: Cli, two: Path, name: str) -> None:
    two.with_name("labels.csv").write_text("id,label\nelse,pass\n")
    cli("run", "evals.py", "--quiet")
    words, said = AFTER_A_RUN[name]
    done = cli(*words)
    assert (done.code, done.out, done.err) == (2, "", said)


class TestModels:
    WORDS = ("try", "ask.md", "--dataset", "q.jsonl", "--evaluator", "exact_match", "--quiet")

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
        ("prompt", "said"),
        [
            ("no.md", "error: the prompt no.md cannot be read: No such file or directory\n  name a text file\n"),
            ("a.py", "error: a prompt must be FILE:NAME (got 'a.py')\n  as in: a.py:prompt\n"),
            ("a.py:m", "error: a.py:m must be a PromptTemplate (got int)\n"),
        ],
    )
    def test_what_is_no_prompt(self, cli: Cli, place: Path, prompt: str, said: str) -> None:
        (place / "a.py").write_text("m = 1\n")
        done = cli("try", prompt, *self.WORDS[2:], "--model", "a.py:m")
        assert (done.code, done.err) == (2, said)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--model", "opnai:gpt"], "error: there is no provider 'opnai'\n  did you mean --model openai:gpt?\n"),
            (
                ["--model", "mine"],
                "error: there is no provider 'mine'\n  use PROVIDER:NAME (openai, anthropic, azure, google, "
                "gemini, vertex, bedrock, bedrock-runtime, mistral, openrouter, ollama, vllm) or file.py:adapter\n",
            ),
            (
                ["--model", "openai"],
                "error: --model must be PROVIDER:NAME (got 'openai')\n  as in: --model openai:NAME\n",
            ),
            (
                ["--model", "a.py:m", "--evaluator", "exact"],
                "error: there is no evaluator 'exact' that works without parameters\n  did you mean exact_match?\n",
            ),
            (["--model", "a.py:n"], "error: there is no 'n' in a.py\n"),
            (
                ["--model", "a.py:m", "--dataset", "no.jsonl"],
                "error: there is no dataset file no.jsonl\n  --dataset takes a .jsonl, .json, .csv or .parquet\n",
            ),
            (
                ["--model", "openai:a", "--model", "openai:a"],
                "error: the same --model was given twice\n  to run samples several times, use --repeats\n",
            ),
        ],
    )
    def test_an_invalid_ad_hoc_run_is_refused_with_the_remedy(
        self, cli: Cli, place: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "not-a-real-key")
        (place / "a.py").write_text("m = 3\n")
        done = cli(*self.WORDS, *words)
        assert (done.code, done.err) == (2, said)


NO_KEY = (
    "error: OpenAIAdapter has no key: set OPENAI_API_KEY or pass api_key=... (for a server without keys, pass any "
    'text, such as api_key="none")\n'
)
TOO_MANY = "exit 4: 1 of 1 trial ended in an error, more than the allowed 10% (--max-error-share)\n"
AGAIN = "  once that is fixed, retry them with --resume errors\n"
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
        'error: exporting to Parquet needs an optional dependency: pip install "fairtrial[data]"\n',
    )


def test_a_queue_that_is_down(cli: Cli, evals: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = cli("fleet", "support", "--mailbox", f"redis://127.0.0.1:{port}")
    assert (done.code, done.err) == (
        2,
        f"error: reading support.requests: cannot connect to 127.0.0.1:{port}: Connection refused\n"
        "  check that the server is running and that --mailbox (or FAIRTRIAL_MAILBOX) is correct, then retry\n",
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
        "  the error is in your code; --debug shows the full traceback\n",
    )


class TestOurOwnFaults:
    @pytest.fixture
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fairtrial.cli.settings.KNOWN", None)

    @pytest.mark.usefixtures("broken")
    def test_internal_errors_exit_70_with_how_to_report_them(self, cli: Cli) -> None:
        done = cli("doctor", "--settings")
        assert done.code == 70
        assert done.err == (
            "error: AttributeError: 'NoneType' object has no attribute 'items'\n"
            "  this is a bug in Fairtrial: please report it with the output of the same command with --debug\n"
        )

    @pytest.mark.usefixtures("broken")
    def test_a_traceback_comes_with_debug_wherever_it_stands(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "Traceback" in cli("doctor", "--settings", "--debug").err
        assert "Traceback" in cli("--debug", "doctor", "--settings").err
        monkeypatch.setenv("FAIRTRIAL_DEBUG", "1")
        assert "Traceback" in cli("doctor", "--settings").err

    def test_a_file_that_cannot_be_opened_is_named(self) -> None:
        told = user_errors.explain(PermissionError(13, "Permission denied", "out.csv"))
        assert (told.what, told.code) == ("out.csv: Permission denied", 2)

    def test_an_error_in_fairtrial_that_a_users_file_called_is_not_blamed_on_the_user(self) -> None:
        not_an_error: Any = 3
        with pytest.raises(AttributeError) as ours:
            user_errors.location_of(not_an_error)
        told = user_errors.explain(ours.value)
        assert "test_mistakes.py:" in (user_errors.location_of(ours.value) or "")
        assert (told.where, told.code) == (None, ExitCode.INTERNAL_ERROR)
        assert "bug in Fairtrial" in told.remedy

    def test_a_syntax_error_is_the_users_also_if_fairtrial_reads_the_file(self, tmp_path: Path) -> None:
        file = str(tmp_path / "evals.py")
        with pytest.raises(SyntaxError) as theirs:
            exec(compile("compile('task = (', file, 'exec')", user_errors.__file__, "exec"), {"file": file})
        told = user_errors.explain(theirs.value)
        assert ((told.where or "").rpartition("/")[2], told.code) == ("evals.py:1", ExitCode.USAGE)
        assert "in your code" in told.remedy


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 0)])
def test_a_command_that_is_interrupted_or_whose_pipe_closes_has_its_exit_code(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException], code: int
) -> None:
    def ends(*args: object, **options: object) -> None:
        raise raised

    done: Callable[..., object] = ends
    monkeypatch.setattr("fairtrial.cli.command_doctor.load_settings", done)
    monkeypatch.setattr("os.dup2", lambda *numbers: 1)
    assert cli("doctor", "--settings").code == code
