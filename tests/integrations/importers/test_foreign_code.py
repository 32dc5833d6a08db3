"""Text of an import never becomes code: the suite file has the statements of its template and nothing else."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fairtrial import open_store
from fairtrial.errors import DataError
from fairtrial.integrations.importers.openai_evals import OpenAIEvals
from fairtrial.integrations.importers.records import fill, literal, source_of
from fairtrial.integrations.model_server import FaultRule, HalfSent, HostedEvals, ModelServer, RateLimited, ServerFailed
from fairtrial.integrations.model_server.faults import ConnectionReset, MalformedJson, NotAuthorised, WrongShape
from fairtrial.runs.imported import store_run, write_suite
from fairtrial.suites.loading import load_suite
from tests.doc_pages import ROOT
from tests.integrations.importers.project import (
    CRITERIA,
    answers,
    eval_of,
    item_of,
    large_project,
    message,
    run_of,
    small_project,
    write_archive,
)

STATEMENTS = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef)
ATTRIBUTES = {"casefold", "dumps", "expected", "input", "load", "passed", "with_name"}
NAMES = {
    "Dataset", "EvalSuite", "Experiment", "NOT_TRANSLATED", "NotImplementedError", "OpenAIAdapter", "PROMPT", "Path",
    "TrialContext", "__file__", "all_of", "answer", "contains", "context", "ctx", "evaluator", "exact_match",
    "expected", "fuzzy_match", "isinstance", "item", "item_of", "json", "label_judge", "numeric_judge", "output",
    "sample", "str", "suite", "text", "value",
}  # fmt: skip
FULL_WIDTH = "".join(chr(ord(letter) + 0xFEE0) for letter in "isinstance")  # Python reads it as `isinstance`.
PROMPT = message("Is {{sample.output_text}} right?")
SIMILAR = {"type": "text_similarity", "evaluation_metric": "fuzzy_match", "pass_threshold": 0.5,
           "input": "{{sample.output_text}}", "reference": "{{item.capital}}"}  # fmt: skip

MODULES = ("pathlib", "fairtrial", "fairtrial.scoring", "fairtrial.models", "fairtrial.models.judges")


def check_statements(text: str) -> None:
    """Fail if the code calls or reads anything that the template does not have."""
    tree = ast.parse(text)
    assert not [part for part in tree.body if not isinstance(part, STATEMENTS)], text
    (docstring, *_) = (part for part in tree.body if isinstance(part, ast.Expr))
    assert isinstance(docstring.value, ast.Constant)
    assert sum(isinstance(part, ast.Expr) for part in tree.body) == 1, text
    own = {part.name for part in tree.body if isinstance(part, ast.FunctionDef)}
    own |= {ast.unparse(part.targets[0]) for part in tree.body if isinstance(part, ast.Assign)}
    assert all(name in NAMES or (name == name.lower() and name.isidentifier()) for name in own), own
    for node in ast.walk(tree):
        match node:
            case ast.Name():
                assert node.id in NAMES | own, text
            case ast.Attribute():
                assert node.attr in ATTRIBUTES, text
            case ast.Call():
                called = ast.unparse(node.func)
                assert called in NAMES or isinstance(node.func, ast.Attribute) or called.startswith("fuzzy_match("), (
                    text
                )
            case ast.ImportFrom():
                assert node.module in MODULES
            case ast.Import():
                assert [alias.name for alias in node.names] == ["json"]


def hostile(tmp_path: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """A grader and a name of the eval for each attack; what is injected makes a file."""
    code = f"open({str(tmp_path / 'executed')!r}, 'w')"
    quoted = code.replace("'", '"')
    judge = {"type": "label_model", "model": "m", "input": PROMPT, "labels": ["a", "b"], "passing_labels": ["a"]}
    plain = CRITERIA[0]
    return {
        "type that ends a comment": ({"type": f"odd\n{code}\n"}, "quiz"),
        "threshold that is a format": ({**SIMILAR, "pass_threshold": "{0}", "input": f"', {quoted}, '"}, "quiz"),
        "threshold in other quotes": ({**SIMILAR, "pass_threshold": "{1}", "reference": f"x', {code}, 'y"}, "quiz"),
        "threshold that is code": ({**SIMILAR, "pass_threshold": code}, "quiz"),
        "name with quotes": ({**plain, "name": f"\"\"\"'''\n{code}\n"}, "quiz"),
        "title that ends its quotes": (plain, f'quiz"""\n{code}\n"""'),
        "title with a backslash": (plain, "quiz\\"),
        "operation": ({**plain, "operation": f"eq\n{code}"}, "quiz"),
        "operation of another type": ({**plain, "operation": [code]}, "quiz"),
        "model of a judge": ({**judge, "model": f"m\r{code}\n')"}, "quiz"),
        "labels that are objects": ({**judge, "labels": [{"a": f"\n{code}"}]}, "quiz"),
        "prompt of a judge": ({**judge, "input": message(f"'''\n{code}\n\"\"\"")}, "quiz"),
        "range": ({"type": "score_model", "model": "m", "input": PROMPT, "range": [code, f"\n{code}"]}, "quiz"),
        "field of a reference": ({**plain, "reference": "{{item.a'] + " + code + " + item['b}}"}, "quiz"),
        "name that Python reads as another": ({**plain, "name": FULL_WIDTH}, "quiz"),
        "name of a function of the file": ({**plain, "name": "item of"}, "quiz"),
    }


@pytest.mark.parametrize("attack", hostile(Path()))
def test_no_text_of_an_import_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    grader, name = hostile(tmp_path)[attack]
    items = answers("evalrun_a", {})[:2]
    criteria = [{"name": "odd", **grader, "id": "odd-1"}, {**CRITERIA[1], "name": "names"}]
    project = HostedEvals(
        evals=[eval_of("eval_capitals", name, criteria)],
        runs=[run_of("evalrun_a", items)],
        items={"evalrun_a": items},
    )
    (suite,) = OpenAIEvals().read(write_archive(project, tmp_path / "saved")).suites
    store = open_store("memory:")
    run = store_run(store, suite, suite.runs[0], "openai-evals").run
    module = write_suite(suite, tmp_path / "out")[1][0]
    check_statements(module.read_text())
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    loaded = load_suite(str(module))
    if "OpenAIAdapter" not in module.read_text():
        loaded.rescore_sync(run.run_id, store=store)
    assert not (tmp_path / "executed").exists()


def test_judges_of_several_models_use_their_own() -> None:
    from fairtrial.integrations.importers.openai_graders import suite_code, translate

    judge = {"type": "score_model", "input": PROMPT}
    criteria = {name: {**judge, "model": model} for name, model in (("a", "x"), ("b", "y"), ("c", "x"), ("judge", "z"))}
    text = suite_code("s", "S", "s.jsonl", translate(criteria, None), None, None, {"e": "m"})
    check_statements(text)
    found = dict(re.findall(r"(\w+) = numeric_judge\(\s*(\w+)", text))
    made = dict(re.findall(r"(\w+) = OpenAIAdapter\('(\w)'\)", text))
    assert {name: made[judge] for name, judge in found.items()} == {"a": "x", "b": "y", "c": "x", "judge_2": "z"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1 << 70, {1: 2}, object(), [[[[0] * 2] * 2]] * 2])
def test_only_json_of_ordinary_size_and_depth_is_a_literal(value: Any) -> None:
    if isinstance(value, list):
        for _ in range(20):
            value = [value]
    with pytest.raises(DataError, match="a literal"):
        literal(value)


@pytest.mark.parametrize("value", [-1, -0.5, -0.0, -1e308, [-1, {"a": -2.5}], 0, 0.0, 1])
def test_every_number_is_written_as_it_is_read(value: Any) -> None:
    text = source_of(fill("a = VALUE", VALUE=literal(value)))
    assert repr(ast.literal_eval(text.partition("= ")[2])) == repr(value)


def test_a_file_that_would_be_read_as_other_code_is_not_written() -> None:
    with pytest.raises(DataError, match="cannot be written"):
        source_of(fill("NAME = 1", NAME=ast.Name("a = b; c", ast.Store())))
    with pytest.raises(DataError, match="cannot be written"):
        source_of(fill("NAME = 1", NAME=ast.Name(FULL_WIDTH, ast.Store())))


def test_a_prompt_and_the_graders_that_are_left_can_be_read_and_have_short_lines() -> None:
    from fairtrial.integrations.importers.openai_graders import suite_code, translate

    prompt = [{"role": "developer", "content": "Answer with the name of the city, and nothing else."}, *PROMPT] * 3
    graders = translate({"odd": {"type": "telepathy"}, "exact": CRITERIA[0]}, "capital")
    text = suite_code("s", "S", "s.jsonl", graders, "capital", prompt, {"a": "x", "b": "y"})
    made: dict[str, Any] = {}
    exec(text.partition("def ")[0], made)
    assert made["PROMPT"] == prompt
    assert made["NOT_TRANSLATED"] == {"odd": "telepathy: graders of type 'telepathy' are not supported"}
    assert max(map(len, text.splitlines())) <= 110


# The save script of the documentation saves everything, even if the server fails or the script is killed.


SCRIPT = ROOT / "examples" / "save_openai_evals.py"
# Faults without Retry-After hit a request that has not failed before: the script's backoff stays short.
FAULTS = [
    FaultRule(RateLimited(0.02), every=5),
    FaultRule(RateLimited(0.03, "milliseconds"), every=7),
    FaultRule(ServerFailed(503, retry_after=0.01), numbers=(3, 9)),
    FaultRule(MalformedJson(), numbers=(12,)),
    FaultRule(WrongShape(), numbers=(17,)),
    FaultRule(HalfSent(), numbers=(23,)),
    FaultRule(ConnectionReset(), numbers=(27,)),
]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return Path(shutil.copy(SCRIPT, tmp_path))


def start(script: Path, server: ModelServer, **variables: str) -> subprocess.Popen[str]:
    environment = {
        "PATH": os.environ["PATH"], "OPENAI_API_KEY": "sk-test", "OPENAI_BASE_URL": f"{server.base_url}/v1", **variables
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, str(script), "saved"],
        cwd=script.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def save(script: Path, server: ModelServer, **variables: str) -> tuple[int, str, str]:
    process = start(script, server, **variables)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_all_saved(folder: Path, project: HostedEvals) -> None:
    """Everything is on disk, exactly as the server has it, once."""
    assert rows(folder / "evals.jsonl") == project.evals
    order = [one["id"] for one in project.evals]
    assert rows(folder / "runs.jsonl") == sorted(project.runs, key=lambda run: order.index(run["eval_id"]))
    assert {path.name for path in (folder / "items").iterdir()} == {f"{run['id']}.jsonl" for run in project.runs}
    for run in project.runs:
        assert rows(folder / "items" / f"{run['id']}.jsonl") == project.items[run["id"]]
    saved = {path.name: path.read_text() for path in folder.glob("files/*")}
    assert saved == project.files


def test_everything_is_saved_from_a_server_that_pages_limits_and_fails(script: Path) -> None:
    project = large_project()
    with ModelServer(evals=project, faults=FAULTS) as server:
        code, out, err = save(script, server)
        stats = server.stats()
    assert (code, err) == (0, "")
    assert_all_saved(script.parent / "saved", project)
    assert out.splitlines()[-1] == "saved in saved: evals 3, runs 4, output items 240, files 1"
    assert stats.by_fault.keys() == {rule.fault.kind for rule in FAULTS}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_script_killed_again_and_again_saves_everything_once(script: Path, seed: int) -> None:
    project = large_project()
    chance = random.Random(seed)
    folder = script.parent / "saved"
    kills = 0
    with ModelServer(evals=project, faults=FAULTS, latency=0.01) as server:
        while kills < 5:
            target = size_of(folder) + chance.randint(1, 60_000)
            process = start(script, server)
            while process.poll() is None and size_of(folder) < target:
                time.sleep(0.001)
            if process.poll() is not None:
                break
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=30)
            kills += 1
        code, out, err = save(script, server)
    assert kills >= 3
    assert (code, err) == (0, "")
    assert_all_saved(folder, project)
    assert "output items 240" in out


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue  # Renamed just now.
    return total


def test_a_second_run_changes_no_file_and_lists_no_items_again(script: Path) -> None:
    with ModelServer(evals=large_project()) as server:
        save(script, server)
        before = {path: path.read_bytes() for path in (script.parent / "saved").rglob("*") if path.is_file()}
        server.reset()
        assert save(script, server)[0] == 0
        asked = [request.last_user for request in server.requests()]
    assert {path: path.read_bytes() for path in before} == before
    assert asked
    assert not any("output_items" in path or "files" in path for path in asked)


def test_a_line_that_was_cut_off_is_fetched_again(script: Path) -> None:
    project = small_project()
    folder = script.parent / "saved"
    (folder / "items").mkdir(parents=True)
    lines = [json.dumps(item) + "\n" for item in project.items["evalrun_a"]]
    (folder / "items" / "evalrun_a.part").write_text("".join(lines[:3]) + lines[3][:40])
    (folder / "evals.jsonl").write_text('{"id": "eval_cap')
    with ModelServer(evals=project) as server:
        assert save(script, server)[0] == 0
        asked = [request.last_user for request in server.requests() if "evalrun_a" in request.last_user]
    assert_all_saved(folder, project)
    assert f"after={project.items['evalrun_a'][2]['id']}" in asked[0]


def test_a_run_that_goes_on_is_saved_so_far_and_completed_later(script: Path) -> None:
    project = small_project()
    run = run_of("evalrun_c", answers("evalrun_c", {}, count=3), status="in_progress")
    project.runs.append(run)
    project.items["evalrun_c"] = answers("evalrun_c", {}, count=3)
    project.items["evalrun_c"][2] |= {"status": "in_progress", "results": [], "sample": None}
    folder = script.parent / "saved"
    with ModelServer(evals=project) as server:
        code, out, _ = save(script, server)
        assert code == 1
        assert "missing: run evalrun_c: still in_progress; 3 items so far" in out
        assert rows(folder / "missing.jsonl")[0]["try_again"] is True
        assert len(rows(folder / "items" / "evalrun_c.unfinished")) == 3
        project.items["evalrun_c"] = answers("evalrun_c", {})
        project.runs[-1] = run_of("evalrun_c", project.items["evalrun_c"])
        code, out, _ = save(script, server)
    assert code == 0
    assert rows(folder / "items" / "evalrun_c.jsonl") == project.items["evalrun_c"]
    assert not (folder / "items" / "evalrun_c.unfinished").exists()
    assert [row["status"] for row in rows(folder / "runs.jsonl") if row["id"] == "evalrun_c"] == [
        "in_progress", "completed"
    ]  # fmt: skip


def test_what_is_deleted_meanwhile_is_named_and_what_was_saved_is_kept(script: Path) -> None:
    project = large_project()
    folder = script.parent / "saved"
    (folder / "items").mkdir(parents=True)
    (folder / "runs.jsonl").write_text(json.dumps(run_of("evalrun_old", [])) + "\n")
    (folder / "items" / "evalrun_old.part").write_text(json.dumps(item_of("evalrun_old", 0, "Paris")) + "\n")
    del project.files["file-rows"]
    with ModelServer(evals=project, faults=FaultRule(ServerFailed(500, 0.0), when="evalrun_3/output")) as server:
        code, out, _ = save(script, server)
    assert code == 1
    missing = [line for line in out.splitlines() if line.startswith("missing")]
    assert missing[0] == (
        "missing: run evalrun_2: data source: file file-rows was deleted; its rows are in the output items"
    )
    assert "missing: run evalrun_3: gave up after 8 attempts" in missing[1]
    assert "missing: run evalrun_old: deleted on the server before all of its items were saved" in missing[2]
    assert [row["try_again"] for row in rows(folder / "missing.jsonl")] == [False, True, False]
    assert len(rows(folder / "items" / "evalrun_old.part")) == 1
    assert len(rows(folder / "items" / "evalrun_2.jsonl")) == 60  # The others were saved all the same.


def test_a_run_deleted_while_its_items_are_listed_is_named(script: Path) -> None:
    project = small_project()

    class Deleted(dict[str, Any]):
        """The items of a run that is deleted when its second page is asked for."""

        def get(self, key: str, default: Any = None) -> Any:
            found = super().get(key, default)
            project.runs[:] = [run for run in project.runs if run["id"] != key]
            return found

    gone = HostedEvals(project.evals, project.runs, Deleted(project.items), {}, 4)
    with ModelServer(evals=gone) as server:
        code, out, _ = save(script, server)
    assert code == 0
    assert "missing: run evalrun_a: deleted on the server" in out
    assert len(rows(script.parent / "saved" / "items" / "evalrun_a.part")) == 4


def test_queries_and_lists_that_do_not_add_up_are_named(script: Path) -> None:
    project = small_project()
    project.runs[0]["data_source"] = {"type": "responses", "source": {"type": "responses", "model": "gpt-4.1"}}
    project.runs[1]["result_counts"]["total"] = 12
    with ModelServer(evals=project) as server:
        code, out, _ = save(script, server)
    assert code == 0
    assert "missing: run evalrun_a: data source: a query (responses), not a file" in out
    assert "missing: run evalrun_b: the server counts 12 items and lists 10" in out


def test_a_refused_key_and_no_key_end_with_code_2(script: Path) -> None:
    with ModelServer(evals=small_project(), faults=NotAuthorised()) as server:
        code, _, err = save(script, server)
        assert (code, err.partition(": ")[2][:44]) == (2, "OPENAI_API_KEY must be a key that may read t")
        code, _, err = save(script, server, OPENAI_API_KEY="")
        assert code == 2
