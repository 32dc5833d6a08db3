"""`fairtrial init`: a small project that runs at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairtrial.cli import options

# In the package -> in the project.
FILES = {
    "agent.py.txt": "agent.py",
    "evals.py.txt": "evals.py",
    "questions.jsonl": "questions.jsonl",
    "pyproject.toml.txt": "pyproject.toml",
    "gitignore.txt": ".gitignore",
}
_SHARED = ("pyproject.toml", ".gitignore")  # A project may have these already; they are then left alone.


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("init")(init)


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where; made if it is not there.")] = Path(),
    json: options.Json = False,
) -> int:
    """Make a small project that runs at once: no key, no network.

    An agent with tools and a pretended model, forty questions, an evaluator, and two experiments to compare.

    \b
    Examples:
      fairtrial init demo
      cd demo && fairtrial run
    """
    from importlib.resources import files

    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.screen import commands, out, print_json, sentence

    source = files("fairtrial.cli") / "demo"
    if folder.exists() and not folder.is_dir():
        raise Mistake(f"{folder} is a file, not a folder", "name a folder: fairtrial init demo")
    taken = [name for name in FILES.values() if (folder / name).exists() and name not in _SHARED]
    if taken:
        raise Mistake(
            f"{_shown(folder)} already has {', '.join(taken)}, and nothing of yours is overwritten",
            f"run what is there: {_cd(folder)}fairtrial run evals.py; or make another one: fairtrial init demo2",
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for resource, name in FILES.items():
        target = folder / name
        if not target.exists():
            target.write_text((source / resource).read_text(encoding="utf-8"), encoding="utf-8")
            made.append(name)
    settled = "pyproject.toml" in made
    if json:
        print_json({"format": "fairtrial.init/1", "folder": str(folder), "files": made})
        return 0
    console = out()
    sentence(console, f"made {', '.join(made)} in {_shown(folder)}")
    if not settled:
        sentence(
            console,
            'to run it by `fairtrial run` alone, add to your pyproject.toml: [tool.fairtrial] suites = ["evals.py"]',
        )
    console.print()
    run = f"{_cd(folder)}fairtrial run{'' if settled else ' evals.py'}"
    commands(console, "next", [(run, "40 questions, 2 experiments")])
    return 0


def _shown(folder: Path) -> str:
    return "this folder" if folder == Path() else str(folder)


def _cd(folder: Path) -> str:
    import shlex

    return "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
