"""`fairtrial init`: a suite for what a folder has, or a small project."""

from __future__ import annotations

import os
import shlex
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.base.foreign import inside
from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from fairtrial.cli.detect import Found

# Not overwritten if the project already has them.
_SHARED_FILES = {"pyproject.toml.txt": "pyproject.toml", "gitignore.txt": ".gitignore"}
_OPTIONAL = frozenset({"README.md", "test_evals.py", *_SHARED_FILES.values()})
_SETTINGS = '[tool.fairtrial]\nsuites = ["evals.py"]\n'
_MANY = 100  # A first run with more samples is offered with some of them.


class Template(StrEnum):
    """The kinds of projects. Each is a folder of `templates`."""

    AGENT = "agent"
    RAG = "rag"
    CLASSIFICATION = "classification"
    CODE = "code"
    JUDGE = "judge"
    BENCHMARK = "benchmark"
    PAIRWISE = "pairwise"
    MCP = "mcp"


_FIRST_RUN = {
    Template.AGENT: "40 questions, 2 experiments",
    Template.RAG: "16 questions, 2 experiments",
    Template.CLASSIFICATION: "40 messages, 2 experiments",
    Template.CODE: "8 problems, 2 experiments, 3 repeats",
    Template.JUDGE: "24 complaints, 2 experiments",
    Template.BENCHMARK: "40 questions, 2 experiments, 3 repeats",
    Template.PAIRWISE: "24 texts, 2 experiments",
    Template.MCP: "12 questions, 2 experiments, 5 repeats",
}


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Target folder, created if missing.")] = Path(),
    template: Annotated[
        Template | None,
        typer.Option(
            "--template",
            metavar="NAME",
            help="Start from an example: agent (tools), rag, classification, code, judge, benchmark (multiple choice), "
            "pairwise (preferences), mcp (the tools of a server).",
            show_default=False,
        ),
    ] = None,
    json: options.Json = False,
) -> int:
    """Write a suite for what a folder has, or a small project.

    It looks for the SDKs of OpenAI and Anthropic, a FastAPI application, pytest, and a CSV or JSONL with inputs, and
    writes evals.py for them. Your code is read, not executed, and no file is overwritten. In an empty folder, and
    with --template, it creates a project that runs without a key or network.

    \b
    Examples:
      fairtrial init                       in the folder of your application
      fairtrial init demo                  an agent with tools, forty questions
      fairtrial init search --template rag
    """
    from fairtrial.cli.detect import detect
    from fairtrial.cli.screen import out, sentence

    if os.path.lexists(folder) and not folder.is_dir():
        what = "a file" if folder.exists() else "a link that leads nowhere"
        raise UserError(f"{folder} is {what}, not a folder", "name a folder: fairtrial init demo")
    found = detect(folder) if template is None and folder.exists() else None
    if found is not None and found.anything:
        return _own_suite(folder, found, json=json)
    beside = found is not None and any(folder.iterdir())
    template = template or Template.AGENT
    made = _write(folder, {**_files(template.value), **_shared()})
    has_settings = "pyproject.toml" in made or _add_settings(folder)
    rows = [(f"{_cd(folder)}fairtrial run{'' if has_settings else ' evals.py'}", _FIRST_RUN[template])]
    if beside and not json:
        sentence(out(), f"found nothing to evaluate in {_shown(folder)}: this is an example")
    return _tell(folder, made, rows, has_settings=has_settings, json=json)


def _own_suite(folder: Path, found: Found, *, json: bool) -> int:
    from fairtrial.cli.own_suite import TEST, described, keys_of, suite_name, suite_text

    tests = {"test_evals.py": TEST} if found.pytest else {}
    made = _write(folder, {"evals.py": suite_text(found), **tests, **_shared()})
    has_settings = "pyproject.toml" in made or _add_settings(folder)
    many = found.table is not None and found.table.samples > _MANY
    run = f"{_cd(folder)}fairtrial run{'' if has_settings else ' evals.py'}{' --max-samples 20' if many else ''}"
    needs = f"calls your model: needs {keys_of(found)}" if found.sdks and found.call else "runs evals.py"
    rows = [(run, needs), (f"fairtrial trials {suite_name(found)} --failed", "outputs that failed, and why")]
    if "test_evals.py" in made:
        rows.append(("EVALS=1 pytest test_evals.py", "the suite as a test"))
    return _tell(folder, made, rows, has_settings=has_settings, json=json, found=described(found))


def _files(name: str) -> dict[str, str]:
    """Return the files of a template: a name in the project -> its content."""
    from importlib.resources import files

    parts = sorted((files("fairtrial.cli") / "templates" / name).iterdir(), key=lambda part: part.name)
    return {part.name.removesuffix(".txt"): part.read_text(encoding="utf-8") for part in parts}


def _shared() -> dict[str, str]:
    from importlib.resources import files

    source = files("fairtrial.cli") / "templates"
    return {name: (source / resource).read_text(encoding="utf-8") for resource, name in _SHARED_FILES.items()}


def _write(folder: Path, wanted: dict[str, str]) -> list[str]:
    """Write the files that do not exist yet. Refuses to start where one exists that cannot be left out."""
    taken = [name for name in wanted if name not in _OPTIONAL and os.path.lexists(folder / name)]
    if taken:
        raise UserError(
            f"{_shown(folder)} already has {', '.join(taken)}; existing files are not overwritten",
            f"run it: {_cd(folder)}fairtrial run evals.py; or create another: fairtrial init demo2",
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = [name for name in wanted if not os.path.lexists(folder / name)]
    for name in made:
        with inside(folder, name).open("x", encoding="utf-8", newline="\n") as file:
            file.write(wanted[name])
    return made


def _add_settings(folder: Path) -> bool:
    """Append the table of settings to a pyproject.toml, if the file is the same with it otherwise."""
    file = folder / "pyproject.toml"
    try:
        if not file.is_file():
            return False
        before = file.read_bytes()
        end = b"" if before.endswith(b"\n") or not before else b"\n"
        added = end + b"\n" + _SETTINGS.encode()
        added = added.replace(b"\n", b"\r\n") if b"\r\n" in before else added
        tree = _parsed(before)
        tools = tree.get("tool", {})
        wanted = {**tree, "tool": {**tools, "fairtrial": {"suites": ["evals.py"]}}}
        if "fairtrial" in tools or file.is_symlink() or _parsed(before + added) != wanted:
            return False
        with file.open("ab") as stream:
            stream.write(added)
    except (OSError, ValueError, TypeError, RecursionError):
        return False
    return True


def _parsed(content: bytes) -> dict[str, Any]:
    return tomllib.loads(content.decode("utf-8"))


def _tell(
    folder: Path,
    made: list[str],
    rows: list[tuple[str, str]],
    *,
    has_settings: bool,
    json: bool,
    found: list[tuple[str, str]] | None = None,
) -> int:
    from fairtrial.cli.screen import commands, out, print_json, sentence

    added = has_settings and "pyproject.toml" not in made
    if json:
        facts = {"folder": str(folder), "files": made, "settings_added": added}
        texts = {name: "; ".join(text for other, text in found or () if other == name) for name, _ in found or ()}
        print_json({"format": "fairtrial.init/1", **facts, **({} if found is None else {"found": texts})})
        return 0
    console = out()
    if found is not None:
        sentence(console, f"found in {_shown(folder)}, without executing anything")
        widest = max(len(name) for name, _ in found)
        for name, text in found:
            sentence(console, f"  {name:<{widest}}  {text}")
        console.print()
    sentence(console, f"created {', '.join(made)} in {_shown(folder)}")
    if added:
        sentence(console, "added [tool.fairtrial] to pyproject.toml")
    if not has_settings:
        sentence(
            console,
            'to run it with just `fairtrial run`, add to your pyproject.toml: [tool.fairtrial] suites = ["evals.py"]',
        )
    console.print()
    commands(console, "next", rows)
    return 0


def _shown(folder: Path) -> str:
    return "this folder" if folder == Path() else str(folder)


def _cd(folder: Path) -> str:
    return "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
