"""What ran: every change of what a suite depends on is a new run or is named, and nothing else is.

`KINDS` and `STABLE` of `identity_kinds` are the two tables; `pytest -s -k table` prints their sizes.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, GateRules, Sample, compare, exact_match, gate, open_store
from fairtrial.reports.figures.metrics import code_versions
from fairtrial.runs.baseline import SuiteCode
from fairtrial.runs.events import ResumeWarning
from fairtrial.runs.identity import RunIdentity, identify
from fairtrial.store import RunStore
from tests.notebooks import execute, printed, start_kernel
from tests.runs.identity_kinds import KINDS, STABLE, identities

ROOT = Path(__file__).parents[2]
KEYS = [
    {"KINDS_RENEWED": "sk-first-9f8e7d6c5b4a", "KINDS_API_KEY": "first-0123456789abcdef"},
    {"KINDS_RENEWED": "sk-other-1a2b3c4d5e6f", "KINDS_API_KEY": "other-fedcba9876543210"},
]
type Identities = dict[str, list[Any]]


def in_process(folder: Path, *given: str, cwd: Path, number: int) -> Identities:
    """What another process finds, with another hash seed and another key."""
    code = "import sys; sys.path.insert(0, sys.argv.pop()); from tests.runs.identity_kinds import main; main()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder), *given, str(ROOT)],
        env={**os.environ, **KEYS[number], "PYTHONHASHSEED": str(number)},
        cwd=cwd, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def check_changes(found: Identities) -> None:
    """Every change is a new run, or is named."""
    missed = []
    for name, kind in KINDS.items():
        before, after = found[name]
        named = [*after["unknown"], *(key for key, read in after["reads"].items() if before["reads"].get(key) != read)]
        if kind.named:
            if not any(kind.named in line for line in named):
                missed.append(name)
        elif before["identity"] == after["identity"]:
            missed.append(name)
    assert missed == []


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS[0].items():
        monkeypatch.setenv(name, value)
    for name in ("KINDS_WORD", "KINDS_FOLDER"):
        monkeypatch.setenv(name, "")


def test_the_tables_are_large_enough() -> None:
    print(f"{len(KINDS)} kinds of dependency, {len(STABLE)} kinds of state")
    assert len(KINDS) >= 60
    assert len(STABLE) >= 40


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("form", ["typed", "module"])
def test_every_change_starts_a_new_run_or_is_named(form: str, tmp_path: Path, keys: None) -> None:
    check_changes(identities(tmp_path / "project", form))


@pytest.mark.long
def test_unchanged_suites_have_one_identity_in_every_process_and_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    one = in_process(tmp_path / "one" / "project", "script", cwd=tmp_path, number=0)
    other = in_process(tmp_path / "other" / "checkout", "script", cwd=tmp_path / "elsewhere", number=1)
    check_changes(one)
    check_changes(other)
    different = [name for name in one if [i["identity"] for i in one[name]] != [i["identity"] for i in other[name]]]
    assert different == []
    unknown = {name: one[f"stable: {name}"][0]["unknown"] for name in STABLE}
    assert [name for name, found in unknown.items() if found] == ["random generator"]
    text = json.dumps([one, other])
    assert not any(secret in text for keys in KEYS for secret in keys.values())


@pytest.mark.long
def test_interrupted_runs_of_unchanged_suites_are_resumed_by_another_process_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    given = "script", f"sqlite:///{tmp_path / 'runs.db'}"
    first = in_process(tmp_path / "one" / "project", *given, "interrupt", cwd=tmp_path, number=0)
    second = in_process(tmp_path / "other" / "checkout", *given, "resume", cwd=tmp_path / "elsewhere", number=1)
    for name in STABLE:
        (number, status, started, stored), (again, ended, executed, kept) = first[name], second[name]
        assert (number, status, len(started), list(stored)) == (1, "interrupted", 2, started[:1]), name
        assert (again, ended) == (1, "finished"), name
        assert set(executed).isdisjoint(stored), name
        assert (len(executed), len(kept), kept | stored) == (2, 3, kept), name


@pytest.mark.long
def test_what_is_executed_in_cells_of_a_notebook_is_compared_too(tmp_path: Path) -> None:
    code = f"""
        import json, sys, warnings
        warnings.simplefilter("ignore")
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from tests.runs.identity_kinds import identities
        print(json.dumps([identities(Path({str(tmp_path)!r}, name, "project"), "cell") for name in ("one", "two")]))
    """
    with start_kernel(tmp_path, env={**os.environ, **KEYS[0]}) as kernel:
        one, other = json.loads(printed(execute(kernel, textwrap.dedent(code))))
    check_changes(one)
    different = [name for name in one if [i["identity"] for i in one[name]] != [i["identity"] for i in other[name]]]
    assert different == []


@pytest.mark.long
def test_what_is_typed_into_a_console_is_compared_too(tmp_path: Path) -> None:
    session = f"""
        import json, sys, warnings
        warnings.simplefilter("ignore")
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from tests.runs.identity_kinds import identities
        print(json.dumps(identities(Path({str(tmp_path / "project")!r}), "typed")))
    """
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=textwrap.dedent(session), env={**os.environ, **KEYS[0]},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.lstrip("> .").startswith("{")), None)
    assert line is not None, done.stderr
    check_changes(json.loads(line.lstrip("> .")))


# ---- files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """Write a module and import it; a second call writes and imports it again."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(name: str, text: str) -> Any:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


SUITE = (
    "from fairtrial import *\ndef task(x): return {!r}\n"
    "suite = EvalSuite('s', Dataset.of({{1: 1}}), task, exact_match)\n"
)


def code_of(suite: EvalSuite) -> SuiteCode:
    code = suite.prepared().code
    assert code is not None
    return code


def test_a_file_edited_after_its_import_keeps_the_code_that_is_executed(
    loaded: Callable[[str, str], Any], tmp_path: Path
) -> None:
    module = loaded("edited_suite", SUITE.format("old"))
    before = code_of(module.suite)
    (tmp_path / "edited_suite.py").write_text(SUITE.format("new, and longer"))
    after = code_of(module.suite)
    assert (module.task(1), after.code) == ("old", before.code)
    assert after.unknown == ("edited_suite.py (edited after it was imported)",)
    again = code_of(loaded("edited_suite", SUITE.format("new, and longer")).suite)
    assert (again.code != before.code, again.unknown) == (True, ())


def test_a_file_edited_before_its_suite_is_made_is_not_taken_for_what_is_executed(
    loaded: Callable[[str, str], Any], tmp_path: Path
) -> None:
    module = loaded("edited_helper", "def task(x): return 'old'\n")
    (tmp_path / "edited_helper.py").write_text("def task(x): return 'new, and longer'\n")
    stale = code_of(EvalSuite("s", Dataset.of({1: 1}), module.task, exact_match))
    assert any("edited_helper.py (edited after it was imported)" in name for name in stale.unknown)
    fresh = loaded("edited_helper", "def task(x): return 'new, and longer'\n")
    assert code_of(EvalSuite("s", Dataset.of({1: 1}), fresh.task, exact_match)).code != stale.code


@pytest.mark.long
def test_an_interrupted_run_is_resumed_from_another_folder(tmp_path: Path) -> None:
    evals = tmp_path / "evals"
    evals.mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "agentlib.py").write_text("def answer(x): return helper(x)\ndef helper(x): return x\n")
    (evals / "suite_q.py").write_text(
        "import sys; sys.path.insert(0, __file__.rsplit('/', 2)[0] + '/src')\n"
        "import agentlib, os, pathlib\nfrom fairtrial import *\nhere = pathlib.Path(__file__).parent\n"
        "def task(x):\n"
        "    if x == '3' and (here / 'stop').exists(): raise ValueError\n"
        "    return agentlib.answer(x)\n"
        "config = EvalConfig(max_concurrent=1, stop_on_error=(here / 'stop').exists())\n"
        "suite = EvalSuite('q', Dataset.of([(str(i), str(i)) for i in range(6)]), task, exact_match, config=config)\n"
        "report = suite.run_sync(store=str(here / 'q.db'))\nprint(report.run.status, report.run.number)\n"
    )

    def run(folder: Path, file: str) -> str:
        done = subprocess.run([sys.executable, file], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip() + " ".join(line for line in done.stderr.splitlines() if "ResumeWarning" in line)

    (evals / "stop").touch()
    assert run(tmp_path, "evals/suite_q.py") == "interrupted 1"
    (evals / "stop").unlink()
    assert run(evals, "suite_q.py") == "finished 1"
    (evals / "stop").touch()
    assert run(evals, "suite_q.py") == "interrupted 2"
    (evals / "stop").unlink()
    (tmp_path / "src" / "agentlib.py").write_text("def answer(x): return helper(x)\ndef helper(x): return x + '!'\n")
    changed = run(tmp_path, "evals/suite_q.py")
    assert changed.startswith("finished 3")
    assert "its code has changed (" in changed
    assert "agentlib.py" in changed


# ---- changes in one process ----------------------------------------------------------------------------------------


class Stopping:
    """Fails at its third call, and counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.prompt = "a"

    def __call__(self, given: int) -> str:
        self.calls += 1
        if self.calls == 3:
            raise ValueError
        return self.prompt


STOPPING = EvalConfig(stop_on_error=True, max_concurrent=1)
DATA = Dataset([Sample(f"s{i}", i, "a") for i in range(6)])


def test_what_trials_count_is_state_and_is_named_when_their_run_is_resumed(store: RunStore) -> None:
    task = Stopping()
    suite = EvalSuite("counted", DATA, task, exact_match, config=STOPPING)
    first = suite.run_sync(store=store)
    assert first.status == "interrupted"
    with pytest.warns(ResumeWarning, match=r"resumed although trials have changed task\.calls$"):
        second = suite.run_sync(store=store)
    assert (second.run_id, second.status) == (first.run_id, "finished")
    # The next run begins with what a new process would begin with.
    third = suite.run_sync(store=store)
    assert third.run.identity is not None
    assert third.run.identity["code"] == second.run.identity["code"]  # type: ignore[index]
    assert code_of(EvalSuite("counted", DATA, Stopping(), exact_match)).code == third.run.code_hash


def test_what_is_assigned_between_two_runs_starts_a_new_one(store: RunStore) -> None:
    task = Stopping()
    suite = EvalSuite("assigned", DATA, task, exact_match, config=STOPPING)
    first = suite.run_sync(store=store)
    task.prompt = "b"
    with pytest.warns(ResumeWarning, match=r"its code has changed \(task\.prompt\)"):
        second = suite.run_sync(store=store)
    assert (first.run_id != second.run_id, second.status) == (True, "finished")


def test_an_evaluator_that_is_changed_between_two_runs_is_another_one() -> None:
    class Near:
        by = 0

        def __init__(self) -> None:
            self.words = ["a"]

        def __call__(self, output: str, expected: str) -> bool:
            return output in self.words

    near = Near()
    suite = EvalSuite("evaluated", DATA, Stopping(), near, config=STOPPING)
    first = identify(suite.prepared())
    near.words.append("b")
    assert identify(suite.prepared()).evaluator != first.evaluator


def test_a_change_that_trials_of_another_suite_may_have_made_is_named(store: RunStore) -> None:
    shared = {"prompt": "a"}

    def task(given: int) -> str:
        if given == 3 and not go_on.is_set():
            raise ValueError
        return shared["prompt"]

    go_on = threading.Event()
    suite = EvalSuite("one", DATA, task, exact_match, config=STOPPING)
    first = suite.run_sync(store=store)
    EvalSuite("other", DATA, lambda x: shared.update(prompt="b"), exact_match).run_sync(store=store)
    go_on.set()
    with pytest.warns(ResumeWarning, match="trials have changed .*shared"):
        second = suite.run_sync(store=store)
    assert second.run_id == first.run_id


# ---- packages ------------------------------------------------------------------------------------------------------


def _stored_with(store: Any, run_id: str, **packages: str) -> None:
    run = store.get_run(run_id)
    identity = dict(run.identity)
    identity["packages"] = {**identity["packages"], **packages}
    store.update_run(run_id, identity=identity)


@pytest.mark.parametrize("strict", [False, True])
def test_another_version_of_a_package_is_named_and_starts_a_new_run_only_if_asked(strict: bool) -> None:
    store = open_store("memory:")
    go_on = threading.Event()

    def task(given: int) -> str:
        if given == 3 and not go_on.is_set():
            raise ValueError
        return "a"

    config = EvalConfig(stop_on_error=True, max_concurrent=1, strict_packages=strict)
    suite = EvalSuite("packages", DATA, task, exact_match, config=config)
    first = suite.run_sync(store=store)
    used = first.run.identity["packages"]  # type: ignore[index]
    assert isinstance(used, dict)
    assert re.fullmatch(r"[\d.]+", used["pytest"])
    _stored_with(store, first.run_id, pytest="0.1")
    go_on.set()
    with pytest.warns(ResumeWarning, match=rf"pytest 0\.1, now {used['pytest']}"):
        second = suite.run_sync(store=store)
    assert (second.run_id != first.run_id) == strict
    if strict:
        return
    assert store.get_run(first.run_id).identity["packages"]["pytest"] == f"0.1, {used['pytest']}"  # type: ignore[index,call-overload]
    third = suite.run_sync(store=store)
    caveat = f"different versions of packages: pytest 0.1, {used['pytest']} and {used['pytest']}."
    assert caveat in " ".join(str(compare(second.refresh(), third)).split())


def test_a_fleet_compares_packages_only_if_asked() -> None:
    one, other = (
        RunIdentity("s", {}, (), 1, ("e", "1"), {}, ("c",), packages={"openai": version}) for version in ("1.0", "1.1")
    )
    assert one.fingerprint == other.fingerprint

    def strict(identity: RunIdentity) -> str:
        from dataclasses import replace

        return replace(identity, strict_packages=True).fingerprint

    assert strict(one) != strict(other)


# ---- two code versions ---------------------------------------------------------------------------------------------


def test_a_run_whose_old_results_were_all_replaced_has_one_code_version(store: RunStore) -> None:

    def broken(given: int) -> str:
        raise AttributeError("typo")

    data = Dataset([Sample(f"s{i}", i, "a") for i in range(3)])
    EvalSuite("s", data, broken, exact_match, version="1").run_sync(store=store)
    fixed = EvalSuite("s", data, lambda x: "a", exact_match, version="2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fixed.run_sync(store=store, resume="errors")
    assert (report.run.number, [result.code for result in report.results]) == (1, [1, 1, 1])
    assert code_versions(store, report.run) == 1
    other = fixed.run_sync(store=store)
    gated = gate(other, GateRules(margin=0.5), baseline=report)
    shown = [str(report), str(compare(report, other)), str(gated), json.dumps(report.to_json())]
    assert not any("code versions" in text for text in shown)
    assert '"code_versions": 1' in shown[-1]
