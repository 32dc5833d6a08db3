"""How large the project is, by room, and how large it was at another commit.

    python benchmarks/size.py [COMMIT]

Lines of code leave out blank lines, comments and docstrings; stubs (.pyi) count as code. "one importer" counts modules
that only one other module imports. With a commit, every figure of it comes first.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLANK = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@contextmanager
def tree(commit: str | None) -> Iterator[Path]:
    """The files of a commit in a temporary folder; None: those that are here."""
    if commit is None:
        yield ROOT
        return
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
        yield Path(folder)


def code_lines(text: str) -> int:
    """The number of lines that are neither blank nor only comment or docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def sources(folder: Path) -> list[Path]:
    """Python files and stubs below a folder."""
    return sorted(path for path in folder.rglob("*.py*") if path.suffix in (".py", ".pyi"))


def imported(path: Path) -> Iterator[str]:
    """The modules that a file may import, by their full names."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def one_importer(src: Path) -> int:
    """The number of modules that one other module imports."""
    modules = {".".join(path.relative_to(src).with_suffix("").parts): path for path in src.rglob("*.py")}
    users: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for target in imported(path):
            if target in modules and target != name:
                users[target].add(name)
    return sum(len(found) == 1 for found in users.values())


def words(files: Iterable[Path]) -> int:
    """The number of words of texts."""
    return sum(len(path.read_text("utf-8").split()) for path in files)


def surface(src: Path) -> tuple[int, int, int]:
    """The numbers of top-level names, of commands, and of options of `run`."""
    environment = os.environ | {"PYTHONPATH": str(src), "COLUMNS": "200", "NO_COLOR": "1"}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    names = run("-c", "import fairtrial; print(*fairtrial.__all__)").split()
    commands = re.findall(r"^  ([a-z]+)  ", run("-m", "fairtrial.cli", "--help").partition("Start:")[2], re.MULTILINE)
    screen = run("-m", "fairtrial.cli", "run", "--help").partition("Options:")[2]
    options = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", screen, re.MULTILINE)
    return len(names), len(commands), len(set(options) - {"--help"})


def figures(root: Path) -> dict[str, int]:
    """Every figure of a tree."""
    src, tests = root / "src", root / "tests"
    sizes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for path in sources(src):
        text = path.read_text("utf-8")
        parts = path.relative_to(src).parts
        sizes[parts[1] if len(parts) > 2 else "(top)"] += code_lines(text)
        for node in ast.walk(ast.parse(text)):
            if path.suffix == ".py" and isinstance(node, ast.ClassDef):
                kinds["classes"] += 1
                kinds["protocols"] += any(re.match(r"(\w+\.)?Protocol\b", ast.unparse(base)) for base in node.bases)
    names, commands, options = surface(src)
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return {
        **{f"src {room}": lines for room, lines in sorted(sizes.items())},
        "src": sizes.total(),
        "tests": sum(code_lines(path.read_text("utf-8")) for path in sources(tests)),
        "files of src": len(list(src.rglob("*.py"))),
        "classes": kinds["classes"],
        "protocols": kinds["protocols"],
        "modules with one importer": one_importer(src),
        "top-level names": names,
        "commands": commands,
        "options of run": options,
        "extras": len(project["optional-dependencies"]),
        "scripts": sum(path.is_file() for path in (root / "scripts").iterdir()),
        "words of documentation": words([*root.glob("*.md"), *(root / "docs").rglob("*.md")]),
    }


def main() -> None:
    """Print a table."""
    columns = []
    for commit in (*sys.argv[1:2], None):
        with contextlib.ExitStack() as stack:
            columns.append((commit or "here", figures(stack.enter_context(tree(commit)))))
    rooms = sorted({name for _, found in columns for name in found if name.startswith("src ")})
    rows = dict.fromkeys([*rooms, *columns[-1][1]])
    print(f"{'':28}" + "".join(f"{title[:10]:>10}" for title, _ in columns))
    for name in rows:
        cells = [found.get(name) for _, found in columns]
        text = "".join(f"{'-' if cell is None else f'{cell:,}':>10}" for cell in cells)
        change = f"{cells[-1] / cells[0] - 1:>+9.1%}" if len(cells) == 2 and all(cells) else ""  # type: ignore[operator]
        print(f"{name:28}{text}{change}")


if __name__ == "__main__":
    main()
