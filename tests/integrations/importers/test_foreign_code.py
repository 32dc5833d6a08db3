"""Text of an import never becomes code: the suite file has the statements of its template and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from fairtrial import open_store
from fairtrial.errors import DataError
from fairtrial.integrations.importers.openai_evals import OpenAIEvals
from fairtrial.integrations.importers.records import fill, literal, source_of
from fairtrial.integrations.model_server import HostedEvals
from fairtrial.runs.imported import store_run, write_suite
from fairtrial.suites.loading import load_suite
from tests.integrations.importers.project import CRITERIA, answers, eval_of, message, run_of, write_archive

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
                assert node.module in ("pathlib", "fairtrial", "fairtrial.models.judges", "fairtrial.models")
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
