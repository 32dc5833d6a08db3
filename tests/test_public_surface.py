"""The public surface is small, pinned, and cheap to import."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import fairtrial
import fairtrial.fleet
import fairtrial.models
from fairtrial import errors

CHANGELOG = (Path(__file__).resolve().parent.parent / "CHANGELOG.md").read_text(encoding="utf-8")
EXPORTED = """
AnalysisPlan AnthropicAdapter Attachment ChatMessage ConfigurationError Dataset Environment EvalConfig EvalContext
EvalReport EvalResult EvalSuite Evaluator Experiment ExperimentReport FairtrialError GateRules Label Metric
OpenAIAdapter Outcome PromptExecuted Sample Score ScriptedAdapter Session SessionView StopWhen Task TokenUsage
ToolCall ToolInvoked Trajectory TrialContext TrialKey __version__ agent_task all_of any_of calibrate compare contains
current_trial evaluate evaluate_sync evaluator exact_match gate leaderboard llm_judge matches negate open_store plan
prompt_task task threshold tool_called weighted
"""


def _parent(kind: type[BaseException]) -> str | None:
    return None if kind is errors.FairtrialError else kind.__bases__[0].__name__


SOURCE = Path(fairtrial.__file__).parent
LAZY = sorted(
    ".".join(path.parent.relative_to(SOURCE.parent).parts)
    for path in SOURCE.rglob("__init__.py")
    if "lazy_names(" in path.read_text(encoding="utf-8")
)
HEAVY = ["numpy", "scipy", "sqlalchemy", "rich", "typer", "redis", "openai", "anthropic", "aiohttp", "pyarrow"]


def test_exactly_these_names_are_public() -> None:
    assert sorted(fairtrial.__all__) == EXPORTED.split()
    assert all(hasattr(fairtrial, name) for name in fairtrial.__all__)


def test_everything_public_says_what_it_is() -> None:
    undocumented = [
        name
        for name in fairtrial.__all__
        if not name.startswith("__")
        and name not in ("Evaluator", "SessionEvaluator")
        and not getattr(fairtrial, name).__doc__
    ]
    assert undocumented == []


def test_the_changelog_is_one_page_until_the_first_release_and_has_the_usual_categories_after_it() -> None:
    usual = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    versions = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]
    assert versions[0].startswith("Unreleased\n")
    for version in versions if len(versions) > 1 else ():
        before, *categories = re.split(r"^### ", version, flags=re.MULTILINE)
        found = [text.partition("\n")[0] for text in categories]
        assert found == [name for name in usual if name in found]
        assert not re.search(r"^- ", before, re.MULTILINE)


def test_importing_loads_nothing_heavy(child: Any) -> None:
    loaded = json.loads(child("import fairtrial, json, sys; print(json.dumps(sorted(sys.modules)))"))
    roots = {name.partition(".")[0] for name in loaded}
    assert roots.isdisjoint(HEAVY)
    assert "fairtrial" in roots


COUNTED = """
import builtins, json, sys

builtins.opened = 0

def count(event, given):
    builtins.opened += event == "open"

sys.addaudithook(count)
builtins.counts = lambda: print(json.dumps([sorted(sys.modules), builtins.opened]), flush=True)
from fairtrial.cli.app import invoke
invoke(sys.argv[1:])
counts()
"""
FIRST_TRIAL = """
import os
from fairtrial import Dataset, EvalSuite, exact_match

def answer(text):
    counts()
    os._exit(0)

suite = EvalSuite("first", Dataset.of({"a": "A"}), answer, exact_match)
"""
# What a command has loaded when it ends, or when its first trial starts: packages that must not be among it, the most
# modules in all, and the most files that may have been opened. A larger number needs a reason: users wait for each.
LOADED = {
    "--help": (("--help",), "anyio asyncio numpy pydantic rich sqlalchemy", 190, 190),
    "--version": (("--version",), "anyio asyncio numpy pydantic rich sqlalchemy", 190, 190),
    "run": (("run", "evals.py"), "aiohttp jinja2 numpy openai redis scipy starlette uvicorn", 680, 750),
}


@pytest.mark.measured
@pytest.mark.parametrize("name", LOADED)
def test_a_command_loads_no_more_than_it_needs(name: str, child: Any, tmp_path: Path) -> None:
    words, never, most_modules, most_opened = LOADED[name]
    (tmp_path / "evals.py").write_text(FIRST_TRIAL)
    loaded, opened = json.loads(child(COUNTED, *words).splitlines()[-1])
    assert {one.partition(".")[0] for one in loaded}.isdisjoint(never.split())
    assert len(loaded) <= most_modules
    assert opened <= most_opened


def test_the_list_of_runs_is_served_without_numpy_and_judges(child: Any) -> None:
    said = child("import fairtrial.viewer.serve, sys; print(*sorted(sys.modules))")
    assert {name.partition(".")[0] for name in said.split()}.isdisjoint(("numpy", "openai", "pydantic", "scipy"))
    assert "fairtrial.models" not in said.split()


def test_what_only_runs_need_is_loaded_when_it_is_asked_for(child: Any) -> None:
    said = child(
        "import sys, fairtrial\n"
        "before = 'fairtrial.runs' in sys.modules or 'fairtrial.store' in sys.modules\n"
        "from fairtrial import EvalSuite\n"
        "print(before, EvalSuite is fairtrial.EvalSuite)"
    )
    assert said == "False True"
    with pytest.raises(AttributeError, match="module 'fairtrial' has no attribute 'EvalSuit'"):
        fairtrial.EvalSuit  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", LAZY)
def test_a_lazy_module_lists_its_names_before_they_are_imported(module: str, child: Any) -> None:
    assert {"fairtrial", "fairtrial.mailbox", "fairtrial.models"} <= set(LAZY)
    said = child(
        f"import {module} as module\n"
        "names = dir(module)\n"
        "print(set(module.__all__) <= set(names), '__name__' in names, set(module.__all__) <= set(vars(module)))"
    )
    assert said == "True True False"
    loaded = import_module(module)
    assert [name for name in loaded.__all__ if getattr(loaded, name) is None] == []


@pytest.mark.parametrize("module", LAZY)
def test_an_unknown_name_of_a_lazy_module_is_an_import_error(module: str) -> None:
    with pytest.raises(ImportError, match="cannot import name 'NoSuchThing'"):
        exec(f"from {module} import NoSuchThing")


def test_everything_works_with_no_model_of_pydantics_in_sight(child: Any) -> None:
    said = child(
        "import sys\nfrom fairtrial import *\n"
        "data = Dataset.of({'a': 'b'})\nprint(exact_match(data[0].input, 'a').passed, data.fingerprint)\n"
        "assert 'pydantic' not in sys.modules"
    )
    assert said.startswith("True ")


class TestErrors:
    def test_every_error_is_in_the_tree_and_the_tree_in_the_docstring(self) -> None:
        drawn: list[tuple[str, str | None]] = []  # Each error with the one it hangs under, as the docstring has it.
        above: list[str] = []
        for line in str(errors.__doc__).splitlines():
            if found := re.match(r"    ((?:[│ ] {3})*)(?:[├└]── )?(\w+Error)\b", line):
                depth = len(found[1]) // 4 + (found[2] != "FairtrialError")
                del above[depth:]
                drawn.append((found[2], above[-1] if above else None))
                above.append(found[2])
        classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
        made = [(kind.__name__, _parent(kind)) for kind in classes]
        assert sorted(drawn, key=str) == sorted(made, key=str)

    @pytest.mark.proves("R6")
    def test_a_dataset_error_knows_its_place(self) -> None:
        error = errors.DatasetError("bad", path="a.jsonl", line=3)
        assert (str(error), error.path, error.line, error.problem) == ("a.jsonl:3: bad", "a.jsonl", 3, "bad")
        assert str(errors.DatasetError("bad", line=3)) == "line 3: bad"
        assert str(errors.DatasetError("bad")) == "bad"
        assert isinstance(error, ValueError)

    def test_a_codec_error_knows_its_path(self) -> None:
        error = errors.CodecError("bad").under("b").under(2).under("a")
        assert (str(error), error.path) == ("at $.a[2].b: bad", ("a", 2, "b"))

    def test_a_missing_extra_is_also_an_import_error(self) -> None:
        assert issubclass(errors.MissingExtraError, ImportError)
        assert errors.MissingExtraError("x", "data").extra == "data"
