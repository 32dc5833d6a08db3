"""The identity of evaluators, tasks and runs: equal in every process, different if behaviour differs."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, ScriptedAdapter, all_of, exact_match, llm_judge, negate, threshold
from fairtrial.base.codec import canonical
from fairtrial.runs.baseline import describe_code
from fairtrial.runs.callables import describe
from fairtrial.runs.code import project_root
from fairtrial.runs.identity import RunIdentity, describe_run, find_differences, identify
from fairtrial.scoring import any_of, matches, weighted
from fairtrial.store.protocol import RunRecord


def typed_in(code: str, **names: Any) -> Any:
    """The function `f` of some code that is in no file, as in a console or a notebook."""
    space: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(textwrap.dedent(code), "<stdin>", "exec"), space)
    return space["f"]


def passes_at(level: float) -> Callable[[float, float], bool]:
    def passes(output: float, expected: float) -> bool:
        return output >= level * expected

    return passes


class Near:
    def __init__(self, by: float, words: tuple[str, ...] = ()) -> None:
        self.by = by
        self._words = set(words)

    def __call__(self, output: float, expected: float) -> bool:
        return abs(output - expected) <= self.by


@dataclass
class Within:
    by: float

    def __call__(self, output: float, expected: float) -> bool:
        return abs(output - expected) <= self.by


def between(output: float, expected: float, *, low: float = 0.0, high: float = 1.0) -> bool:
    return low <= output - expected <= high


EVALUATORS: list[Callable[[], Any]] = [
    lambda: exact_match,
    lambda: matches("x"),
    lambda: matches("y"),
    lambda: all_of(exact_match, matches("x")),
    lambda: all_of(matches("x"), exact_match),
    lambda: any_of(exact_match, matches("x")),
    lambda: negate(exact_match),
    lambda: threshold(exact_match, 0.3),
    lambda: threshold(exact_match, 0.4),
    lambda: weighted((exact_match, 1), (matches("x"), 2)),
    lambda: weighted((exact_match, 2), (matches("x"), 1)),
    lambda: passes_at(0.5),
    lambda: passes_at(0.6),
    lambda: Near(0.1),
    lambda: Near(0.2),
    lambda: Near(0.1, ("a", "b", "c", "d")),
    lambda: Within(0.1),
    lambda: Within(0.2),
    lambda: functools.partial(between, low=0.1),
    lambda: functools.partial(between, low=0.1, high=0.2),
    lambda: between,
    lambda: Near(0.1).__call__,
    lambda: lambda output, expected: output == expected,
    lambda: lambda output, expected: output != expected,
    lambda: lambda output, expected: output in {"a", "b", "c"},
    lambda: functools.partial(re.fullmatch, re.compile("a+")),
    lambda: functools.partial(re.fullmatch, re.compile("a+", re.I)),
    lambda: llm_judge(ScriptedAdapter(["{}"]), "is it polite?"),
    lambda: llm_judge(ScriptedAdapter(["{}"]), "is it short?"),
    lambda: typed_in("def f(output, expected): return output == expected"),
    lambda: typed_in("def f(output, expected): return False"),
    lambda: typed_in("def f(output, expected): return output >= LEVEL", LEVEL=0.5),
    lambda: typed_in("def f(output, expected): return output >= LEVEL", LEVEL=0.6),
    lambda: typed_in("def g(x): return x\ndef f(output, expected): return g(output)"),
    lambda: typed_in("def g(x): return not x\ndef f(output, expected): return g(output)"),
    lambda: typed_in("class C:\n    def __call__(self, output, expected): return True\nf = C()"),
    lambda: typed_in("class C:\n    def __call__(self, output, expected): return False\nf = C()"),
]


def evaluator_digest(evaluator: Any) -> str:
    return describe_code("", "", "", {"evaluator": evaluator}).evaluator


def test_what_is_typed_in_below_an_installed_tool_is_no_part_of_that_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", pytest.__file__, raising=False)  # By `python -m`.
    one, other = (
        typed_in(f"class C:\n    def __call__(self, output, expected): return {verdict}\nf = C()")
        for verdict in (True, False)
    )
    assert evaluator_digest(one) != evaluator_digest(other)


def test_evaluators_that_behave_differently_have_different_identities_and_the_same_one_has_the_same() -> None:
    digests = [evaluator_digest(make()) for make in EVALUATORS]
    assert len(set(digests)) == len(digests)
    assert [evaluator_digest(make()) for make in EVALUATORS] == digests


def test_identities_are_the_same_in_every_process(tmp_path: Path) -> None:
    code = (
        "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); import tests.runs.test_identity as t; "
        "print(json.dumps([t.evaluator_digest(make()) for make in t.EVALUATORS]))"
    )
    root = Path(__file__).parents[2]
    path = json.dumps([str(root), str(root / "src"), *sys.path])
    made = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        made.append(json.loads(done.stdout))
    assert made[0] == made[1]
    assert len(set(made[0])) == len(EVALUATORS)


def test_comments_layout_and_the_place_in_the_file_do_not_identify_a_function(tmp_path: Path) -> None:
    texts = [
        "def f(output, expected):\n    return output == expected\n",
        "X = 1\n\n\ndef f(output, expected):  # As it should be.\n    return (\n        output == expected\n    )\n",
        "def f(output, expected):\n    return output != expected\n",
    ]
    made = []
    for number, text in enumerate(texts):
        file = tmp_path / f"place{number}" / "evals.py"
        file.parent.mkdir()
        file.write_text(text)
        space: dict[str, Any] = {"__name__": "evals"}
        exec(compile(text, str(file), "exec"), space)
        made.append(evaluator_digest(space["f"]))
    assert made[0] == made[1] != made[2]


def test_what_an_object_says_of_itself_takes_the_place_of_its_attributes() -> None:
    class Counted:
        calls = 0

        def __init__(self, name: str) -> None:
            self.name = name
            self.started = object()

        def __fairtrial_identity__(self) -> Any:
            return {"name": self.name}

        def __call__(self, output: Any, expected: Any) -> bool:
            self.calls += 1
            return True

    one = Counted("a")
    before = evaluator_digest(one)
    one(1, 1)
    assert evaluator_digest(one) == before != evaluator_digest(Counted("b"))


def test_a_description_has_no_addresses_and_survives_cycles() -> None:
    circle: list[Any] = [object(), open]
    circle.append(circle)
    found = canonical(describe({"task": functools.partial(print, circle)}).parts)
    assert b"0x" not in found
    assert b"again" in found


def test_a_global_with_the_name_of_an_attribute_is_no_dependency() -> None:
    space: dict[str, Any] = {}
    exec("read = 1\ndef task(x): return x.lower(read), [y for y in far], [x.strip() for x in x]", space)
    before = describe({"task": space["task"]})
    exec("lower = strip = 2", space)
    assert describe({"task": space["task"]}).parts == before.parts
    exec("far = 3", space)
    assert set(describe({"task": space["task"]}).parts) - set(before.parts) == {":far"}


def test_a_task_may_use_hundreds_of_globals() -> None:
    names = [f"g{number}" for number in range(300)]
    space: dict[str, Any] = dict.fromkeys(names, 1)
    exec(f"def task(x): return {' + '.join(names)}", space)
    assert {f":{name}" for name in names} < set(describe({"task": space["task"]}).parts)


def test_a_console_that_changes_its_folder_has_another_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").touch()
        monkeypatch.chdir(tmp_path / name)
        assert project_root("") == str(tmp_path / name)


def test_classes_of_a_script_are_its_own_under_a_profiler(tmp_path: Path) -> None:
    script = (
        "from fairtrial.runs.callables import describe\nclass Task:\n    prompt = {!r}\n    def __call__(self): pass\n"
        "print(describe({{'task': Task()}}).digests())\n"
    )

    def printed(prompt: str) -> str:
        (tmp_path / "script.py").write_text(script.format(prompt))
        command = [sys.executable, "-m", "cProfile", "-o", "figures", "script.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert printed("a") != printed("b")


def test_a_fingerprint_changes_with_what_decides_a_result_and_with_nothing_else() -> None:
    def fingerprint(evaluator: Any = exact_match, version: str = "1", count: int = 3, **config: Any) -> str:
        data = Dataset.of({number: number for number in range(count)}, name="d")
        suite = EvalSuite("s", data, abs, evaluator, version=version, config=EvalConfig(**config))
        return identify(suite.prepared(), samples=False).fingerprint

    same = fingerprint()
    assert same == fingerprint(max_concurrent=99, max_samples=3, max_cost_usd=1.0) == fingerprint(count=5)
    others = [fingerprint(version="2"), fingerprint(matches("x")), fingerprint(matches("y")), fingerprint(seed=1)]
    assert len({same, *others}) == 5


def test_a_resumed_run_does_not_mix_two_evaluators_typed_into_a_console(tmp_path: Path) -> None:
    session = """
        import warnings
        from fairtrial import *
        ds = Dataset([Sample(f"s{i}", i, i) for i in range(4)])
        n = {"c": 0}
        def t(x):
            n["c"] += 1
            if n["c"] == 3: raise RuntimeError("boom")
            return x

        def strict(o, e): return o == e

        def lenient(o, e): return False

        config = EvalConfig(stop_on_error=True, max_concurrent=1, max_retries=0)
        a = EvalSuite("s", ds, t, strict, config=config).run_sync()
        with warnings.catch_warnings(record=True) as said: b = EvalSuite("s", ds, t, lenient, config=config).run_sync()

        print(a.run_id != b.run_id, b.run.evaluator, b.total, [str(w.message) for w in said])
        same = EvalSuite("s", ds, t, strict, config=config).run_sync(resume=a.run_id)
        print(same.run_id == a.run_id, same.total)
    """
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=textwrap.dedent(session), capture_output=True, text=True, cwd=tmp_path,
        check=True,
    )  # fmt: skip
    first, second = (line for line in done.stdout.splitlines() if line.startswith(("True", "False")))
    assert first.startswith('True lenient 4 ["started run'), done.stderr
    assert "its evaluator was strict, now lenient" in first
    assert second == "True 4"


def record(**changes: Any) -> RunRecord:
    """A run with an identity of which some facts are others."""
    request = EvalSuite("s", Dataset.of({1: 1}, name="d"), abs, exact_match, version="1").prepared()
    identity = replace(
        identify(request), **{"packages": {"numpy": "1.0"}, "parts": {"a.py": "1", "b.py": "1"}, **changes}
    )
    return describe_run(identity, request.experiments, request.config, tags={"team": "search"})


def differences(**changes: Any) -> list[tuple[str, str]]:
    return [(each.part, each.text) for each in find_differences(record(), record(**changes))]


def test_versions_of_packages_are_a_difference_only_if_they_are_compared_strictly() -> None:
    newer = {"numpy": "2.0", "yaml": "6"}
    assert differences() == differences(packages=newer) == differences(strict_packages=True) == []
    assert differences(packages=newer, strict_packages=True) == [
        ("packages", "its packages were numpy 1.0, now 2.0; yaml not imported, now 6 (strict_packages)")
    ]
    unknown = find_differences(record(packages={}), record(packages=newer, strict_packages=True))
    assert unknown == []  # Nothing was recorded.
    two = find_differences(record(packages={"numpy": "1.0, 2.0"}), record(packages=newer, strict_packages=True))
    assert [each.text for each in two] == ["its packages were yaml not imported, now 6 (strict_packages)"]
    prints = [
        RunIdentity.read(record(packages=packages, strict_packages=strict).identity or {}).fingerprint
        for packages in ({"numpy": "1.0"}, newer)
        for strict in (False, True)
    ]
    assert prints[0] == prints[2]
    assert len(set(prints)) == 3
    assert {len(each) for each in prints} == {32}


def test_changed_code_is_named_by_its_parts() -> None:
    changed = {"a.py": "1", "b.py": "2", "c.py": "1"}
    assert differences(parts=changed) == []
    assert differences(parts=changed, code=("x",)) == [("code", "its code has changed (b.py, c.py)")]
    assert differences(parts={}, code=("x",)) == [("code", "its code has changed")]
    seven = {f"{place}.py": "1" for place in range(5)}
    assert differences(parts=seven, code=("x",))[0][1].endswith("(0.py, 1.py, 2.py, 3.py, 4.py, a.py and 1 more)")
    six = {f"{place}.py": "1" for place in range(4)}
    assert differences(parts=six, code=("x",))[0][1].endswith("(0.py, 1.py, 2.py, 3.py, a.py, b.py)")


def test_another_evaluator_is_named_with_what_changed_in_it() -> None:
    changed = {"a.py": "1", "b.py": "2"}
    same = record().identity or {}
    assert differences(evaluator=("other", "x")) == [("evaluator", "its evaluator was exact_match, now other")]
    assert differences(evaluator=("exact_match", "x"), parts=changed) == [
        ("evaluator", "its evaluator exact_match has changed (b.py)")
    ]
    assert differences(evaluator=("exact_match", "x"), parts=changed, code=("x",)) == [
        ("evaluator", "its evaluator exact_match has changed"),
        ("code", "its code has changed (b.py)"),
    ]
    assert same["format"] == 1


def test_the_record_of_a_run_has_what_identifies_it() -> None:
    run = record()
    assert (run.suite, run.dataset_name, run.dataset_size, run.experiments) == ("s", "d", 1, ("baseline",))
    assert (run.repeats, run.evaluator, dict(run.tags), len(run.run_id)) == (1, "exact_match", {"team": "search"}, 12)
    assert run.noted.once is None
    assert run.created_at > 0
    identity = RunIdentity.read(run.identity or {})
    assert [len(digest) for _, digest in (*identity.experiments, identity.evaluator)] == [32, 32]
