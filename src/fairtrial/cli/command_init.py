"""`fairtrial init`: create a small project."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError

# File in the package -> file in the project.
FILES = {
    "agent.py.txt": "agent.py",
    "evals.py.txt": "evals.py",
    "questions.jsonl": "questions.jsonl",
    "pyproject.toml.txt": "pyproject.toml",
    "gitignore.txt": ".gitignore",
}
_SHARED = ("pyproject.toml", ".gitignore")  # Not overwritten if the project already has them.


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("init")(init)


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Target folder, created if missing.")] = Path(),
    json: options.Json = False,
) -> int:
    """Create a small project that runs without a key or network.

    It has an agent with tools and a fake model, forty questions, an evaluator, and two experiments to compare.

    \b
    Examples:
      fairtrial init demo
      cd demo && fairtrial run
    """
    from importlib.resources import files

    from fairtrial.cli.screen import commands, out, print_json, sentence

    source = files("fairtrial.cli") / "demo"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder", "name a folder: fairtrial init demo")
    taken = [name for name in FILES.values() if (folder / name).exists() and name not in _SHARED]
    if taken:
        raise UserError(
            f"{_shown(folder)} already has {', '.join(taken)}; existing files are not overwritten",
            f"run it: {_cd(folder)}fairtrial run evals.py; or create another: fairtrial init demo2",
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for resource, name in FILES.items():
        target = folder / name
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
    commands(console, "next", [(run, "40 questions, 2 experiments")])
    return 0


def _shown(folder: Path) -> str:
    return "this folder" if folder == Path() else str(folder)


def _cd(folder: Path) -> str:
    return "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
