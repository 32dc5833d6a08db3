"""`fairtrial init`: create a small project."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from fairtrial.base.foreign import inside
from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError

# Not overwritten if the project already has them.
_SHARED_FILES = {"demo/pyproject.toml.txt": "pyproject.toml", "demo/gitignore.txt": ".gitignore"}


class Template(StrEnum):
    """The kinds of projects."""

    AGENT = "agent"
    RAG = "rag"
    BENCHMARK = "benchmark"
    JUDGE = "judge"
    PAIRWISE = "pairwise"


class _Project(NamedTuple):
    """A file in the package -> a file in the project, and what its first run does."""

    files: dict[str, str]
    first_run: str


_PROJECTS = {
    Template.AGENT: _Project(
        {
            "demo/agent.py.txt": "agent.py",
            "demo/evals.py.txt": "evals.py",
            "demo/questions.jsonl": "questions.jsonl",
        },
        "40 questions, 2 experiments",
    ),
    Template.RAG: _Project(
        {
            "templates/rag/evals.py.txt": "evals.py",
            "templates/rag/pages.jsonl": "pages.jsonl",
            "templates/rag/questions.jsonl": "questions.jsonl",
        },
        "16 questions, 2 experiments",
    ),
    Template.BENCHMARK: _Project(
        {
            "templates/benchmark/evals.py.txt": "evals.py",
            "templates/benchmark/questions.jsonl": "questions.jsonl",
        },
        "40 questions, 2 experiments, 3 repeats",
    ),
    Template.JUDGE: _Project(
        {"templates/judge/evals.py.txt": "evals.py", "templates/judge/complaints.jsonl": "complaints.jsonl"},
        "24 complaints, 2 experiments",
    ),
    Template.PAIRWISE: _Project(
        {"templates/pairwise/evals.py.txt": "evals.py", "templates/pairwise/texts.jsonl": "texts.jsonl"},
        "24 texts, 2 experiments",
    ),
}


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Target folder, created if missing.")] = Path(),
    template: Annotated[
        Template,
        typer.Option(
            "--template",
            metavar="NAME",
            help="agent: tools; rag: retrieval; benchmark: multiple choice; judge: ratings; pairwise: preferences.",
        ),
    ] = Template.AGENT,
    json: options.Json = False,
) -> int:
    """Create a small project that runs without a key or network.

    By default it has an agent with tools and a fake model, forty questions, an evaluator, and two experiments to
    compare. Other templates start other kinds of projects.

    \b
    Examples:
      fairtrial init demo
      cd demo && fairtrial run
      fairtrial init search --template rag
    """
    from importlib.resources import files

    from fairtrial.cli.screen import commands, out, print_json, sentence

    source = files("fairtrial.cli")
    project = _PROJECTS[template]
    wanted = project.files | _SHARED_FILES
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder", "name a folder: fairtrial init demo")
    taken = [name for name in project.files.values() if (folder / name).exists()]
    if taken:
        raise UserError(
            f"{_shown(folder)} already has {', '.join(taken)}; existing files are not overwritten",
            f"run it: {_cd(folder)}fairtrial run evals.py; or create another: fairtrial init demo2",
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for resource, name in wanted.items():
        target = inside(folder, name)
        if not target.exists():
            target.write_text((source / resource).read_text(encoding="utf-8"), encoding="utf-8")
            made.append(name)
    has_settings = "pyproject.toml" in made
    if json:
        print_json({"format": "fairtrial.init/1", "folder": str(folder), "files": made})
        return 0
    console = out()
    sentence(console, f"created {', '.join(made)} in {_shown(folder)}")
    if not has_settings:
        sentence(
            console,
            'to run it with just `fairtrial run`, add to your pyproject.toml: [tool.fairtrial] suites = ["evals.py"]',
        )
    console.print()
    run = f"{_cd(folder)}fairtrial run{'' if has_settings else ' evals.py'}"
    commands(console, "next", [(run, project.first_run)])
    return 0


def _shown(folder: Path) -> str:
    return "this folder" if folder == Path() else str(folder)


def _cd(folder: Path) -> str:
    return "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
