"""The files of a project: which ones a suite uses, what they import and read, and their names on every machine."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import textwrap
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest

import fairtrial
from fairtrial.runs.code import (
    file_name,
    is_library,
    package_versions,
    project_code,
    project_files,
    project_root,
    source_file,
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project that nothing was imported from."""
    root = tmp_path.resolve() / "project"
    root.mkdir()
    (root / "pyproject.toml").touch()
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return root


def write(root: Path, **files: str) -> None:
    """Write modules; two underscores stand for a slash."""
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("loaded", [False, True])
def test_a_suite_uses_what_its_files_import_wherever_that_is_done(project: Path, loaded: bool) -> None:
    write(
        project,
        suite="""
            import plain, pack.inner
            from typing import TYPE_CHECKING
            from named import member
            from pack import other
            if TYPE_CHECKING:
                import only_types
            else:
                import at_run_time
            def task(given):
                import late
                return __import__("by_name"), importlib.import_module("by_text", "anchor"), import_module(".relative")
        """,
        plain="",
        named="from pack.deep import leaf",
        at_run_time="",
        late="import numpy.linalg, no_such_module, os.path",
        by_name="",
        by_text="",
        anchor="",
        only_types="",
        unused="",
        pack__inner="from . import sibling\nfrom .deep.leaf import value",
        pack__other="",
        pack__sibling="from .deep import *",
        pack__unused="",
        pack__deep__leaf="from ..further import value",
        pack__further="value = 1",
    )
    (project / "pack" / "__init__.py").touch()
    (project / "pack" / "deep" / "__init__.py").touch()
    if loaded:
        importlib.import_module("pack.inner")
    found = project_code(str(project / "suite.py"))
    assert set(found.files) == {
        "suite.py", "plain.py", "named.py", "at_run_time.py", "late.py", "by_name.py", "by_text.py", "pack/__init__.py",
        "pack/inner.py", "pack/other.py", "pack/sibling.py", "pack/deep/__init__.py", "pack/deep/leaf.py",
        "pack/further.py",
    }  # fmt: skip
    assert found.files["plain.py"] == digest(project / "plain.py")
    assert found.paths == tuple(sorted(str(project / name) for name in found.files))
    assert found.packages == {"numpy"}
    assert found.edited == ()
    assert found.unknown == ("suite.py:12 (a module imported by a computed name)",)
    assert project_files(str(project / "suite.py")) == list(found.paths)


def test_files_with_syntax_errors_are_part_of_a_project_by_their_content(project: Path) -> None:
    write(project, suite="import broken", broken="import suite\ndef (")
    assert set(project_code(str(project / "suite.py")).files) == {"suite.py", "broken.py"}


def test_line_endings_do_not_identify_a_file(project: Path) -> None:
    digests = []
    for folder, content in (("a", b"x = 1\n"), ("b", b"x = 1\r\n"), ("c", b"x = 2\n")):
        path = project / folder / "suite.py"
        path.parent.mkdir()
        path.write_bytes(content)
        (found,) = project_code(str(path)).files.values()
        digests.append(found)
    assert digests[0] == digests[1] != digests[2]


def test_a_project_reads_the_variables_and_texts_that_its_code_names(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        project,
        inner__suite="""
            import os
            a = os.environ["SET_ONE"], os.environ.get("SET_TWO", "SET_OTHER")
            b = os.getenv("SET_THREE"), os.getenv("UNSET"), os.environ["SOME_API_KEY"], os.environ["HOME"], "SET_FOUR"
            c = "prompt.txt", "root.md", "missing.txt", "x.md", "huge.json", "prompt.csv", "folder.txt"
        """,
    )
    for name in ("SET_ONE", "SET_TWO", "SET_THREE", "SET_FOUR", "SET_OTHER", "SOME_API_KEY"):
        monkeypatch.setenv(name, "value")
    inner = project / "inner"
    (inner / "prompt.txt").write_text("inner")
    (inner / "folder.txt").mkdir()
    for name in ("prompt.txt", "root.md", "x.md", "prompt.csv"):
        (project / name).write_text(name)
    for name, size in (("huge.json", 4 * 1024 * 1024 + 1), ("large.json", 4 * 1024 * 1024)):
        (project / name).write_bytes(b" " * size)
    value = hashlib.sha256(b"value").hexdigest()
    reads = project_code(str(inner / "suite.py")).reads
    assert reads == {
        "$SET_ONE": value,
        "$SET_TWO": value,
        "$SET_THREE": value,
        "inner/prompt.txt": hashlib.sha256(b"inner").hexdigest(),
        "root.md": hashlib.sha256(b"root.md").hexdigest(),
        "huge.json": "4194305 bytes",
    }
    (inner / "suite.py").write_text("'large.json'")
    os.utime(inner / "suite.py", (1, 1))
    assert project_code(str(inner / "suite.py")).reads == {"large.json": digest(project / "large.json")}


def test_code_that_is_in_no_file_imports_and_reads_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_ONE", "value")
    (project / "prompt.txt").write_text("p")
    write(project, plain="", named="", by_name="", unused="")

    def typed(text: str) -> CodeType:
        code: Any = compile(textwrap.dedent(text), "<stdin>", "exec")
        return code  # type: ignore[no-any-return]

    found = project_code("", typed=[typed("def f():\n import plain, numpy\n from named import x\n open('prompt.txt')")])
    assert set(found.files) == {"plain.py", "named.py"}
    assert found.packages == {"numpy"}
    assert (found.unknown, set(found.reads)) == ((), {"prompt.txt"})
    found = project_code("", typed=[typed("import os\nos.getenv('SET_ONE')\n__import__('by_name')")])
    assert (set(found.files), found.unknown, set(found.reads)) == ({"by_name.py"}, (), {"$SET_ONE"})
    found = project_code("", typed=[typed("__import__(name)"), typed("import_module(name)")])
    assert found.unknown == ("a module imported by a computed name",)
    assert project_code("", typed=[typed("'SET_ONE', 'unused'")]).reads == {}


def test_files_have_the_same_name_on_every_machine(project: Path, tmp_path: Path) -> None:
    root = str(project)
    assert file_name(str(project / "a" / "b.py"), root) == "a/b.py"
    outside = str(tmp_path / "elsewhere" / "c.py")
    assert file_name(outside, root) == "c.py"
    assert file_name(outside, root, "package.c") == "package/c.py"
    assert file_name(outside, root, "__main__") == "c.py"
    assert file_name(f"{root}-other/c.py", root) == "c.py"


def test_the_root_of_a_project_is_the_nearest_folder_that_is_marked(project: Path, tmp_path: Path) -> None:
    inner = project / "one" / "two"
    inner.mkdir(parents=True)
    assert project_root(str(inner / "suite.py")) == str(project)
    (project / "one" / ".git").mkdir()
    assert project_root(str(project / "one" / "three" / "suite.py")) == str(project / "one")


def test_what_is_installed_is_no_part_of_a_project(tmp_path: Path) -> None:
    libraries = ["<frozen importlib._bootstrap>", os.__file__, np.__file__, fairtrial.__file__]
    libraries += [str(tmp_path / "site-packages" / "x.py"), str(tmp_path / "dist-packages" / "x.py")]
    assert all(map(is_library, libraries))
    assert not any(map(is_library, [__file__, str(tmp_path / "x.py"), "<stdin>"]))


def test_a_file_keeps_the_content_that_was_imported(project: Path) -> None:
    path = project / "edited.py"
    path.write_text("def f(): return 1\n")
    module = importlib.import_module("edited")
    first = source_file(str(path), module)
    assert first is not None
    assert (first.edited, first.certain, first.digest) == (False, True, digest(path))
    code = module.f.__code__
    source = first.source_digest(code)
    path.write_text("# A comment that changes nothing.\ndef f():\n    return 22\n")
    again = source_file(str(path), module)
    assert again is first
    assert (first.edited, first.source_digest(code)) == (True, source)
    path.unlink()
    assert source_file(str(path), module) is first
    assert source_file(str(project / "no_such_file.py")) is None


def test_a_module_that_is_loaded_again_has_its_new_content(project: Path) -> None:
    path = project / "reloaded.py"
    path.write_text("def f(): return 1\n")
    module = importlib.import_module("reloaded")
    first = source_file(str(path), module)
    path.write_text("def f(): return 23456\n")
    importlib.invalidate_caches()
    importlib.reload(module)
    second = source_file(str(path), module)
    assert first is not None
    assert second is not None
    assert (second.edited, second.digest) == (False, digest(path))
    assert first.digest != second.digest


def test_a_function_is_identified_without_its_comments_and_decorators(project: Path) -> None:
    texts = {
        "one": "def f(x):\n    return x\n",
        "two": "import functools\n\n@functools.cache\ndef f(x):  # Same.\n\n    return (x)\n",
        "three": "def f(x):\n    return not x\n",
        "four": "f = lambda x: x; g = lambda x: not x\n",
    }
    digests = []
    for name, text in texts.items():
        (project / f"{name}.py").write_text(text)
        module = importlib.import_module(name)
        file = source_file(str(project / f"{name}.py"), module)
        assert file is not None
        digests.append(file.source_digest(getattr(module.f, "__wrapped__", module.f).__code__))
    assert digests[0] == digests[1] != digests[2]
    assert len(str(digests[0])) == 32
    assert digests[3] is None  # Two functions of one line cannot be told apart.


def test_versions_of_packages_are_those_of_their_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = package_versions(["numpy", "yaml", "no_such_package"])
    assert set(found) == {"python", "fairtrial", "numpy", "yaml"}
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert (found["fairtrial"], found["numpy"]) == (fairtrial.__version__, np.__version__)


def test_a_json_file_is_read_by_its_name_without_regard_to_case(project: Path) -> None:
    (project / "SETTINGS.JSON").write_text(json.dumps({}))
    write(project, suite="'SETTINGS.JSON'")
    assert set(project_code(str(project / "suite.py")).reads) == {"SETTINGS.JSON"}
