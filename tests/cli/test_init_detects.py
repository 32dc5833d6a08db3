"""`fairtrial init` in the folder of an application: it finds what is there, executes nothing, and its suite runs."""

from __future__ import annotations

import ast
import builtins
import csv
import io
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import open_store
from fairtrial.cli.app import invoke
from fairtrial.cli.detect import Found, FunctionCall, SampleFile, detect
from fairtrial.cli.own_suite import suite_text
from fairtrial.integrations.model_server import ModelServer, Rule
from tests.cli.conftest import Cli
from tests.doc_pages import ROOT, captured

# Stands for the installed package: its decorators return the function, as those of FastAPI do.
FASTAPI = """
class FastAPI:
    def post(self, path):
        return lambda function: function
    get = post
"""
OPENAI = """
from openai import OpenAI

client = OpenAI()


def complete(prompt: str) -> str:
    return client.responses.create(model="m", input=prompt).output_text


def reply(question: str, tone: str = "kind") -> str:
    return complete(f"{tone}: {question}")
"""
ASYNC_APP = """
from fastapi import FastAPI
from openai import AsyncOpenAI
from schemas import Question

app = FastAPI()
client = AsyncOpenAI()


@app.get("/health")
def health():
    return {"status": "ok"}


@app.post("/ask")
async def ask(body: Question):
    done = await client.responses.create(model="m", input=body.question)
    return {"answer": done.output_text, "tokens": done.usage.total_tokens}


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app)
"""
SCHEMAS = """
from pydantic import BaseModel, Field


class Question(BaseModel):
    question: str = Field(min_length=1)
    language: str = "en"
"""
ANTHROPIC = """
import anthropic

client = anthropic.Anthropic()


def classify(text):
    reply = client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": text}])
    return reply.content[0].text
"""
CAPITALS = "question,answer,continent\nThe capital of France?,Paris,Europe\nThe capital of Peru?,Lima,America\n"
LABELS = "text,label\n" + "".join(f"message {n},{'spam' if n % 2 else 'ham'}\n" for n in range(8))


FORK = """
import os, sys
from fairtrial.cli.app import invoke
import fairtrial.suites, fairtrial.integrations.tracing, openai, anthropic
for folder in sys.argv[1:]:
    if not (child := os.fork()):
        os.chdir(folder)
        sys.path.insert(0, "")
        code = invoke(["run"])
        sys.stdout.flush()
        os._exit(code)
    os.waitpid(child, 0)
"""


class Project(NamedTuple):
    """The folder of a case, what `init` said, and what was there before."""

    folder: Path
    said: str
    before: dict[str, str]
    requests: int


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Project]:
    """All cases, each run in a process of its own that has imported the SDKs already."""
    answers = [Rule("France", "It is Paris."), Rule("[13579]$", "spam"), Rule("message", "ham"), Rule("", "no")]
    made: dict[str, Project] = {}
    with ModelServer(answers) as server:
        environment = {
            **os.environ, "OPENAI_BASE_URL": f"{server.base_url}/v1", "OPENAI_API_KEY": "sk-local",
            "ANTHROPIC_BASE_URL": server.base_url, "ANTHROPIC_API_KEY": "sk-local",
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }  # fmt: skip
        for case, (files, *_) in CASES.items():
            folder = tmp_path_factory.mktemp("application")
            write(folder, files)
            with captured() as said:
                assert invoke(["init", str(folder)]) == 0
            made[case] = Project(folder, " ".join(said.getvalue().split()), files, len(server.requests()))
        folders = [str(project.folder) for project in made.values()]
        done = subprocess.run(
            [sys.executable, "-c", FORK, *folders], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
    assert len(server.requests()) == sum(samples for _, _, _, (_, samples), calls in CASES.values() if calls)
    return made


def write(place: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)


# Files -> what is said of the function and the data, samples passed of how many, and whether a model was called.
CASES: dict[str, tuple[dict[str, str], str, str, tuple[int, int], bool]] = {
    "a function with the OpenAI SDK, and a CSV": (
        {"requirements.txt": "openai>=1\n", "bot.py": OPENAI, "data/capitals.csv": CAPITALS},
        "reply() of bot.py",
        "data/capitals.csv: 2 samples, input = question, expected = answer",
        (1, 2),
        True,
    ),
    "an async FastAPI application, its models elsewhere": (
        {"fastapi.py": FASTAPI, "app.py": ASYNC_APP, "schemas.py": SCHEMAS,
         "q.jsonl": '{"question": "France?", "expected": "Paris"}\n'},
        "ask() of app.py, POST /ask",
        "q.jsonl: 1 sample, input = question, expected = expected",
        (1, 1),
        True,
    ),
    "a classifier with the Anthropic SDK in a package under src": (
        {"src/mail/__init__.py": "", "src/mail/filter.py": ANTHROPIC, "labels.csv": LABELS},
        "classify() of src/mail/filter.py",
        "labels.csv: 8 samples, input = text, expected = label",
        (8, 8),
        True,
    ),
    "a plain function and a JSONL": (
        {"shop.py": "def price(question: str) -> str:\n    return '4 euros'\n",
         "cases.jsonl": '{"input": "tea?", "expected": "4"}\n{"input": "cake?", "expected": "none"}\n'},
        "price() of shop.py",
        "cases.jsonl: 2 samples, input = input, expected = expected",
        (1, 2),
        False,
    ),
    "a dependency alone": (
        {"pyproject.toml": '[project]\nname = "mine"\nversion = "1"\ndependencies = ["openai>=1"]\n'},
        "none that is safe to guess",
        "no CSV or JSONL with inputs",
        (0, 2),
        False,
    ),
    "a program that would start when it is imported": (
        {"main.py": OPENAI + "\n\nwhile True:\n    print(reply(input()))\n", "q.csv": CAPITALS},
        "none that is safe to guess",
        "q.csv: 2 samples, input = question, expected = answer",
        (0, 2),
        False,
    ),
    "inputs that are not text, without expected answers": (
        {"bot.py": OPENAI, "q.jsonl": '{"query": {"city": "Oslo"}}\n'},
        "reply() of bot.py",
        "q.jsonl: 1 sample, input = query, without expected answers",
        (1, 1),
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_found_becomes_a_suite_that_runs(case: str, projects: dict[str, Project]) -> None:
    _, function, data, (passed, samples), calls = CASES[case]
    project = projects[case]
    assert f"function {function}" in project.said
    assert f"data {data}" in project.said
    assert project.requests == 0
    for name, text in project.before.items():
        assert (project.folder / name).read_text().startswith(text)
    store = open_store(str(project.folder / ".fairtrial" / "runs.db"))
    (totals,) = store.totals(store.runs()[0].run_id)
    assert (totals.passed, totals.outcomes) == (passed, {"scored": samples})
    assert (totals.input_tokens > 0) == calls


def test_nothing_is_imported_or_executed(cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = "import openai\nopen('executed', 'w')\n\ndef ask(question: str) -> str:\n    return question\n"
    write(place, dict.fromkeys(("app.py", "setup.py", "conftest.py", "sitecustomize.py", "pkg/__init__.py"), trap))
    compiled: list[Any] = []
    monkeypatch.setattr(builtins, "exec", lambda *args: compiled.append(args))
    assert cli("init").code == 0
    assert not (place / "executed").exists()
    assert compiled == []
    assert not {"app", "conftest", "pkg"} & set(sys.modules)


def test_a_suite_is_added_to_the_settings_without_changing_the_rest(cli: Cli, place: Path) -> None:
    before = b'# mine\r\n[project]\r\nname = "mine"\r\ndependencies = ["openai"]\r\n[tool.ruff]\r\nline-length = 99'
    (place / "pyproject.toml").write_bytes(before)
    assert "added [tool.fairtrial] to pyproject.toml" in cli("init").out
    after = (place / "pyproject.toml").read_bytes()
    assert after.startswith(before)
    assert tomllib.loads(after.decode())["tool"] == {"ruff": {"line-length": 99}, "fairtrial": {"suites": ["evals.py"]}}


@pytest.mark.parametrize(
    "settings",
    [
        'tool = {ruff = {line-length = 99}}\n',
        '[tool.fairtrial]\nsuites = ["others.py"]\n',
        '[tool]\nfairtrial.store = "x.db"\n',
        "[tool.ruff\n",
        "tool = 3\n",
    ],
)  # fmt: skip
def test_settings_that_cannot_be_added_to_are_left_alone(settings: str, cli: Cli, place: Path) -> None:
    write(place, {"pyproject.toml": settings, "q.csv": CAPITALS})
    done = cli("init")
    assert done.code == 0, done.err
    assert (place / "pyproject.toml").read_text() == settings
    assert "add to your pyproject.toml" in done.out
    assert "fairtrial run evals.py" in done.out


def test_no_file_is_overwritten(cli: Cli, place: Path) -> None:
    write(place, {"q.csv": CAPITALS, "evals.py": "# mine\n"})
    done = cli("init")
    assert done.code == 2
    assert "this folder already has evals.py; existing files are not overwritten" in done.err
    assert sorted(path.name for path in place.iterdir()) == ["evals.py", "q.csv"]
    (place / "evals.py").unlink()
    write(place, {"test_evals.py": "# mine\n", ".gitignore": "# mine\n"})
    assert cli("init").code == 0
    assert (place / "test_evals.py").read_text() == (place / ".gitignore").read_text() == "# mine\n"


def test_a_project_with_pytest_gets_a_test_that_runs_when_asked(cli: Cli, place: Path) -> None:
    write(place, {"shop.py": "def price(question: str) -> str:\n    return '4 euros'\n",
                  "requirements-dev.txt": "pytest==9\n",
                  "q.csv": "input,expected\n" + "".join(f"tea {n}?,4\n" for n in range(5))})  # fmt: skip
    assert "EVALS=1 pytest test_evals.py" in cli("init").out
    for wanted, outcome in (("", "1 skipped"), ("1", "1 passed")):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "pytest_fairtrial",
            "-p",
            "no:cacheprovider",
            "test_evals.py",
        ]
        path = os.pathsep.join([str(ROOT / "src"), *(entry for entry in sys.path if entry)])
        environment = {**os.environ, "EVALS": wanted, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=place, check=False)
        assert outcome in done.stdout, done.stdout + done.stderr


def test_facts_say_what_was_found(cli: Cli, place: Path) -> None:
    write(place, {"requirements.txt": "anthropic\n", "q.csv": CAPITALS})
    facts = cli("init", "--json").json
    assert facts["files"] == ["evals.py", "pyproject.toml", ".gitignore"]
    assert facts["found"]["Anthropic SDK"] == "requirements.txt; its calls are recorded"
    assert not facts["settings_added"]


def test_a_large_dataset_is_not_run_whole_at_first(cli: Cli, place: Path) -> None:
    write(place, {"bot.py": OPENAI, "q.csv": "question\n" + "".join(f"number {n}\n" for n in range(101))})
    assert "fairtrial run --max-samples 20" in cli("init").out


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("@app.post('/a')\ndef a(question: str, user=Depends(who)):\n    return create(question)\n", "Depends"),
        ("@app.post('/a')\ndef a(request: Request):\n    return create('')\n", "a request"),
        ("@app.post('/a')\ndef a(question: str, n: int):\n    return create(question)\n", "two arguments"),
        ("@app.post('/a')\ndef a(question: str):\n    yield create(question)\n", "a stream"),
        ("@cached\ndef a(question: str):\n    return create(question)\n", "an unknown decorator"),
        ("def a(question: str):\n    return create(question)\n\nmain()\n", "a call at the top"),
        ("x = input()\n\ndef a(question: str):\n    return create(question)\n", "a question at the top"),
    ],
)
def test_what_cannot_be_called_with_one_text_is_not_guessed(source: str, why: str, place: Path) -> None:
    helper = "import openai\n\ndef _create(messages):\n    return openai.chat.completions.create(messages=messages)\n"
    write(place, {"app.py": helper.replace("_create", "create").replace("(messages)", "(*, messages, model)") + source})
    assert detect(place).call is None, why


@pytest.mark.parametrize("name", ["csv.py", "json/ask.py", "evals/ask.py", "fairtrial.py", "__main__.py",
                                  "hypothesis.py", "src/pluggy/ask.py"])  # fmt: skip
def test_a_module_that_a_suite_cannot_import_by_its_name_is_not_called(name: str, place: Path) -> None:
    write(place, {"q.csv": CAPITALS, name: "def ask(question: str) -> str:\n    return question\n"})
    assert detect(place).call is None


def test_folders_that_cannot_be_read_are_passed_over(place: Path) -> None:
    write(place, {"q.csv": CAPITALS, "data/x.csv": CAPITALS, "tests/conftest.py": "", "volume/a.py": ""})
    closed = [place / "data", place / "tests", place / "volume"]
    for folder in closed:
        folder.chmod(0)
    place.chmod(0o755)
    script = "import os, sys; from pathlib import Path; import fairtrial.cli.detect as d\n"
    script += "d.detect(Path(sys.argv[2])); os.getuid() or os.setuid(65534); print(d.detect(Path(sys.argv[1])))"
    write(place / "open", {"q.csv": CAPITALS})  # Read first, by which every module is loaded.
    try:
        for folder in place.parents:
            if folder.stat().st_uid == os.getuid() and folder.is_relative_to("/tmp"):
                folder.chmod(folder.stat().st_mode | 0o055)
        words = [sys.executable, "-c", script, str(place), str(place / "open")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    finally:
        for folder in closed:
            folder.chmod(0o755)
    assert "path='q.csv'" in done.stdout, done.stderr


@pytest.mark.parametrize("answer", ["null", "3", '["x", "y"]'])
def test_references_that_are_not_text_are_not_searched_for(answer: str, cli: Cli, place: Path) -> None:
    write(place, {"q.jsonl": f'{{"question": "a", "answer": "x"}}\n{{"question": "b", "answer": {answer}}}\n'})
    assert "q.jsonl: 2 samples, input = question; answer is not always text" in cli("init").out
    assert cli("run", "--quiet").code in (0, 1)  # No trial ends in an error.


def test_inputs_are_used_although_some_rows_have_no_reference(cli: Cli, place: Path) -> None:
    write(place, {"q.jsonl": '{"question": "a", "answer": "x"}\n{"question": "b"}\n'})
    assert "q.jsonl: 2 samples, input = question, without expected answers" in cli("init").out
    assert cli("run", "--quiet").code in (0, 1)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("q.csv", b"question,answer\na,b\na,b\n", "line 3: the same input"),
        ("data/q.csv", b"id,question\n1,a\n1,b\n", "line 3: duplicate id '1'"),
        ("q.csv", CAPITALS.encode("utf-16"), "line 1: not UTF-8"),
        ("q.csv", b"question,question\na,b\n", "line 1: two columns are both named 'question'"),
        ("q.csv", b"frage,antwort\na,b\n", "no column is named input, question, prompt or the like (frage, antwort)"),
        ("q.tsv", b"question\tanswer\n", "it has no rows"),
        ("q.jsonl", b"{question: 1}\n", "line 1: not JSON"),
        ("q.csv", b"question\n" + b"x" * 20_000_001, "it is larger than 20 MB"),
        ("q.csv", None, "it is not a file"),
    ],
)
def test_data_that_cannot_be_used_is_named_and_gets_a_place_to_fill_in(
    name: str, content: bytes | None, reason: str, cli: Cli, place: Path
) -> None:
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).mkdir() if content is None else (place / name).write_bytes(content)
    done = cli("init")
    assert f"  data      {name} is not used: {reason}" in done.out
    assert "created evals.py, pyproject.toml, .gitignore in this folder" in done.out
    assert (place / "evals.py").read_text().count("TODO") == 2
    assert cli("run", "--quiet").code in (0, 1)


def test_data_that_cannot_be_used_is_named_beside_data_that_is(cli: Cli, place: Path) -> None:
    write(place, {"q.csv": CAPITALS, **{f"data/{n}.csv": f"x{n}\n1\n" for n in range(5)}})
    said = cli("init", "--json").json["found"]["data"].split("; ")
    assert said[0].startswith("q.csv: 2 samples")
    assert [part.partition(" is ")[0] for part in said[1:4]] == ["data/0.csv", "data/1.csv", "data/2.csv"]
    assert said[4:] == ["2 more files not used"]


def test_an_example_beside_other_files_is_called_one(cli: Cli, place: Path) -> None:
    write(place, {"notes.txt": "mine\n"})
    assert cli("init").out.startswith("found nothing to evaluate in this folder: this is an example\n")


def test_pipes_are_not_opened(place: Path) -> None:
    names = ["requirements.txt", "pyproject.toml", "x.py", "a.csv", "data/b.jsonl", ".gitignore", "pytest.ini"]
    (place / "data").mkdir()
    for name in names:
        os.mkfifo(place / name)
    words = [sys.executable, "-m", "fairtrial.cli", "init"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=place, check=False, timeout=60)
    assert "a.csv is not used: it is not a file" in done.stdout, done.stderr
    assert "created evals.py in this folder" in done.stdout


@pytest.mark.parametrize("target", ["nowhere", "/etc/hostname"])
def test_links_are_names_that_are_taken(target: str, cli: Cli, place: Path) -> None:
    write(place, {"q.csv": CAPITALS})
    for name in (".gitignore", "pyproject.toml"):
        (place / name).symlink_to(target)
    done = cli("init")
    assert done.code == 0, done.err
    assert "created evals.py in this folder" in done.out
    (place / "evals.py").unlink()
    (place / "evals.py").symlink_to(target)
    assert "already has evals.py" in cli("init").err
    (place / "link").symlink_to("nowhere")
    assert "link is a link that leads nowhere, not a folder" in cli("init", "link").err


def test_only_some_folders_are_visited(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place, {"bot.py": OPENAI, "q.csv": CAPITALS})
    for wide in range(11):
        for deep in range(111):
            (place / f"part{wide}" / f"n{deep}").mkdir(parents=True)
    listed: list[Any] = []
    scandir = os.scandir

    def noted(path: Any) -> Any:
        listed.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", noted)
    found = detect(place)
    assert found.call is not None
    assert 100 < len(listed) <= 1_010


def test_the_outermost_function_is_chosen_over_its_helpers(place: Path) -> None:
    write(place, {"bot.py": OPENAI, "q.csv": CAPITALS})
    call = detect(place).call
    assert call is not None
    assert call.function == "reply"


def test_links_that_lead_out_of_the_folder_are_not_read(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "q.csv"
    elsewhere.write_text(CAPITALS)
    (place / "q.csv").symlink_to(elsewhere)
    found = detect(place)
    assert (found.table, list(found.unused)) == (None, ["q.csv"])


@pytest.mark.parametrize("name", ["binary.py", "deep.py", "huge.py"])
def test_sources_that_cannot_be_parsed_are_passed_over(name: str, place: Path) -> None:
    contents = {"binary.py": b"\x00\xff", "deep.py": b"(" * 100_000, "huge.py": b"import openai\n" * 99_999}
    (place / name).write_bytes(contents[name])
    assert not detect(place).anything


HOSTILE = [
    '"',
    "'''",
    '"""',
    "\\",
    "\n",
    "\r",
    "{value}",
    "{0}",
    "%s",
    "$x",
    "\u2028",
    "\u202e",
    "#",
    "\x00",
    "\ud800",
    "é",
    "😀",
]
AWKWARD = st.lists(st.sampled_from([*HOSTILE, "a", " ", ";", "()", "import os"]), min_size=1, max_size=6).map("".join)


@given(column=AWKWARD, path=AWKWARD)
def test_names_of_files_and_columns_stay_text(column: str, path: str) -> None:
    call = FunctionCall(
        "app.py", "app", "ask", is_async=False, argument="application.Q(question={value})", result="", text=True
    )
    table = SampleFile(path, {"input": column}, 3, typed=True, expected=True, labels=False)
    text = suite_text(Found({"openai": path}, path, path, table, call))
    tree = ast.parse(text.encode("utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert {column, path} <= set(texts)
    plain = suite_text(Found({"openai": "x"}, "x", "x", replace(table, path="x", columns={"input": "x"}), call))

    def shape(source: str) -> list[str]:
        return [type(node).__name__ for node in ast.walk(ast.parse(source.encode("utf-8")))]

    assert shape(text) == shape(plain)


def test_a_table_with_awkward_names_is_used_as_it_is(cli: Cli, place: Path) -> None:
    columns = ['"Question"\n', "Expected: '{}"]
    buffer = io.StringIO()
    csv.writer(buffer).writerows([columns, ["France?", "Paris"]])
    (place / "q'\"{x}.csv").write_text(buffer.getvalue())
    write(place, {"shop.py": "def ask(question: str) -> str:\n    return 'Paris'\n"})
    found = detect(place).table
    assert found is not None
    assert list(found.columns.values()) == columns
    assert cli("init").code == 0
    assert cli("run").code == 0
    store = open_store()
    assert [part.passed for part in store.totals(store.runs()[0].run_id)] == [1]
