"""The documentation as a reader would follow it: its blocks run in order, in one folder, and say what it says they say.

    ```python      runs; a ```text block right after it is what it prints
    ```console     lines with `$ ` are commands, the lines below each what it prints; `...` stands for lines left out
    ```toml ...    are not run, but parsed

A comment before a block changes that: `<!-- file: NAME -->` writes the block into a file, and `<!-- not run: why -->`
leaves it alone, except that the commands in it must exist, with their options. `<!-- given: NAME from PATH -->` copies
a file or folder of this repository, which a reader would have from elsewhere. Output is compared without regard to
spaces and empty lines; ids, times, durations and sizes in bytes differ from run to run and are masked.

`python -m tests.doc_pages PAGE` follows one page with the installed `fairtrial`; scripts/release does so.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fairtrial.cli.app import command_tree, invoke
from fairtrial.integrations.model_server import ParsedRequest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(
    r"^(?:<!-- (?P<note>(?:file|not run): .*?) -->\n+)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
GIVEN = re.compile(r"^<!-- given: (?P<name>\S+) from (?P<path>\S+) -->$", re.M)
MASKS = [
    (re.compile(r"\b[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)"), "<time>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d\b"), "<date>"),
    (re.compile(r"\b\d[\d,.]* ?(?:us|ms|s|min)\b"), "<duration>"),
    (re.compile(r"\b[\d,]+ bytes\b"), "<size>"),
]
COMMAND = re.compile(r"(?:^|\$ |&& |run: )(?:[A-Z_]+=\S+ )*(fairtrial (?:[^#\n]|(?<=\S)#)*)", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text, the line it starts on, and what the comment before it says."""

    kind: str
    text: str
    line: int
    note: str
    start: int
    end: int

    @property
    def file(self) -> str | None:
        return self.note.removeprefix("file: ") if self.note.startswith("file: ") else None

    @property
    def not_run(self) -> bool:
        return self.note.startswith("not run: ")


@dataclass(frozen=True, slots=True)
class Step:
    """A command in a console block, and what it is said to print; nothing said is nothing checked."""

    command: str
    shown: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(found["kind"], found["text"], text.count("\n", 0, found.start("text")), found["note"] or "",
              found.start(), found.end())
        for found in FENCE.finditer(text)
    ]  # fmt: skip


def steps(block: Block) -> Iterator[Step]:
    """The commands of a console block."""
    assert block.text.startswith("$ "), f"line {block.line}: a console block starts with a command"
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        lines = part.splitlines()
        taken = 1
        while lines[taken - 1].endswith("\\"):
            taken += 1
        command = " ".join(line.removesuffix("\\").strip() for line in lines[:taken])
        yield Step(command, "\n".join(lines[taken:]).strip("\n"))


def masked(text: str) -> list[str]:
    """Lines with what differs from run to run taken out."""
    for pattern, name in MASKS:
        text = pattern.sub(name, text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def differs(shown: str, printed: str) -> str | None:
    """Where what was printed leaves what is shown; None if it does not."""
    wanted, lines = masked(shown), masked(printed)
    at, skipping = 0, False
    for line in wanted:
        if line == "...":
            skipping = True
            continue
        if skipping:
            while at < len(lines) and lines[at] != line:
                at += 1
            skipping = False
        if at >= len(lines) or lines[at] != line:
            found = lines[at] if at < len(lines) else "the end"
            return f"shown:   {line}\nprinted: {found}\nin:\n{printed}"
        at += 1
    if not skipping and at < len(lines):
        return f"shown:   the end\nprinted: {lines[at]}\nin:\n{printed}"
    return None


def commands(text: str) -> list[str]:
    """Every `fairtrial ...` in a block, without remarks."""
    return [found[1].strip() for found in COMMAND.finditer(text.replace("\\\n", " "))]


def unknown_in(command: str) -> list[str]:
    """What a command says that the command line does not know."""
    meant: Any = command_tree()
    words = shlex.split(command)[1:]
    path = []
    while words and words[0] in getattr(meant, "commands", {}):
        path.append(words[0])
        meant = meant.commands[words.pop(0)]
    meant = getattr(meant, "commands", {}).get("status", meant)  # The default command of a group.
    if not path and not all(word.startswith("-") for word in words):
        return [words[0]]
    known = {option for parameter in meant.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h", "--debug", "--install-completion", "--show-completion"}
    return [word for word in words if word.startswith("-") and word != "-" and word.partition("=")[0] not in known]


@dataclass(slots=True)
class Reader:
    """Somebody who types in everything on one page, in a folder of their own."""

    page: Path
    home: Path
    module: ModuleType
    code: int = 0
    printed: str = ""

    def follow(self) -> None:
        """Do it all."""
        before: Block | None = None
        text = self.page.read_text(encoding="utf-8")
        for found in GIVEN.finditer(text):
            source, target = ROOT / found["path"], Path(found["name"])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        for block in blocks(text):
            where = f"{self.page.name}:{block.line + 1}"
            for command in commands(block.text) if block.kind != "python" else ():
                assert not unknown_in(command), f"{where}: {command}: there is no {unknown_in(command)}"
            if block.not_run:
                pass
            elif block.file is not None:
                path = Path(block.file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.kind == "python":
                self.printed = self.python(block)
            elif block.kind == "console":
                self.console(block, where)
            elif block.kind == "toml":
                tomllib.loads(block.text)
            elif block.kind == "text":
                follows = before is not None and before.kind == "python" and not text[before.end : block.start].strip()
                assert follows, f"{where}: a text block is what the python block right above it prints"
                wrong = differs(block.text, self.printed)
                assert wrong is None, f"{where}\n{wrong}"
            else:
                raise AssertionError(f"{where}: nobody checks a block of {block.kind or 'no language'!r}")
            before = block

    def python(self, block: Block) -> str:
        self.forget()
        with captured() as printed:
            exec(compile("\n" * block.line + block.text, str(self.page), "exec"), self.module.__dict__)
        return printed.getvalue()

    def console(self, block: Block, where: str) -> None:
        todo = list(steps(block))
        for at, step in enumerate(todo):
            told = at + 1 < len(todo) and todo[at + 1].command == "echo $?"
            printed = self.run(step.command)
            wrong = differs(step.shown, printed) if step.shown else None
            assert wrong is None, f"{where}: $ {step.command}\n{wrong}"
            assert told or self.code == 0, f"{where}: $ {step.command}\nexits with {self.code}\n{printed}"

    def run(self, line: str) -> str:
        """What one line prints; `self.code` is how it ended."""
        printed = ""
        for command in line.split(" && "):
            words = shlex.split(command, comments=True)
            if words[0] == "cd":
                os.chdir(words[1])
                assert Path.cwd().is_relative_to(self.home)
            elif words == ["echo", "$?"]:
                printed, self.code = printed + f"{self.code}\n", 0
            elif words[0] == "fairtrial":
                printed += self.fairtrial(words[1:])
            elif words[0] == "cat":
                printed += Path(words[1]).read_text(encoding="utf-8")
            elif words[0] == "pytest":
                printed += self.pytest(words[1:])
            elif words[0] == "python":
                printed += self.process([sys.executable, *words[1:]], dict(os.environ))
            else:
                raise AssertionError(f"nobody runs {command!r}")
            if self.code and len(line.split(" && ")) > 1:
                break
        return printed

    def fairtrial(self, words: list[str]) -> str:
        self.forget()
        with captured() as said:
            self.code = invoke(words)
        return said.getvalue()

    def pytest(self, words: list[str]) -> str:
        path = os.pathsep.join([str(ROOT / "src"), *(entry for entry in sys.path if entry)])
        return self.process(
            [sys.executable, "-m", "pytest", "-p", "pytest_fairtrial", "-p", "no:cacheprovider", *words],
            {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )

    def process(self, words: list[str], environment: dict[str, str]) -> str:
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False, timeout=120)
        self.code = done.returncode
        return done.stdout + done.stderr

    def forget(self) -> None:
        """A command is a process of its own: it has imported nothing yet."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(self.home)):
                del sys.modules[name]


class User(Reader):
    """A reader who starts the program that is installed."""

    def fairtrial(self, words: list[str]) -> str:
        return self.process(["fairtrial", *words], dict(os.environ))


def routed(request: ParsedRequest) -> str:
    """Stands for a model that names a team; told which teams there are, it is wrong less often."""
    told, text = "billing" in request.system, request.last_user.lower()
    hints = {"billing": "invoice|charged|refund|price", "delivery": "parcel|arrive|tracking|delivery"}
    found = next((team for team, words in hints.items() if re.search(words, text)), "")
    if not told:
        return found or "The account team."
    return found or ("account" if re.search("password|log in", text) else "other")


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """What a terminal would show: both streams, in order."""
    both = io.StringIO()
    with contextlib.redirect_stdout(both), contextlib.redirect_stderr(both):
        yield both


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        page = Path(sys.argv[1])
        sys.modules[page.stem] = ModuleType(page.stem)
        User(page, Path(folder).resolve(), sys.modules[page.stem]).follow()
