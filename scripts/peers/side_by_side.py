"""Does one small task in several tools: 30 rows, exact match, one row crashes the function, 21 are right.

python scripts/peers side_by_side [NAME]... [--folder DIR]

The names are fairtrial, pydantic-evals, inspect, deepeval and promptfoo (default: all). Each tool is installed by pip
or npm into an environment of its own below DIR (default: a folder for temporary files), and runs without a network
where a network namespace is allowed. It prints lines of code, size of the installation, CPU seconds, exit code and
the end of what the tool shows. A tool that cannot be installed or run is named with the reason. Fairtrial is this tree.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from environments import python_environment

ROOT = Path(__file__).resolve().parents[2]
QUIET = {
    "COLUMNS": "100",
    "DEEPEVAL_TELEMETRY_OPT_OUT": "YES",
    "INSPECT_DISPLAY": "plain",
    "LANG": "C.UTF-8",
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "PROMPTFOO_DISABLE_UPDATE": "1",
    "PROMPTFOO_SELF_HOSTED": "1",
}
ANSWERS = """
def answer(text):
    number = int(text)
    if number == 7:
        raise KeyError("no such row")
    return str(2 * number) if number % 15 < 11 else "unknown"
"""
FAIRTRIAL = """
from answers import answer
from fairtrial import Dataset, EvalSuite, exact_match
suite = EvalSuite("small", Dataset.load("rows.csv", str, str), answer, exact_match)
"""
PYDANTIC_EVALS = """
import csv
from answers import answer
from pydantic_evals import Case, Dataset
from pydantic_evals.evaluators import EqualsExpected
rows = csv.DictReader(open("rows.csv"))
cases = [Case(name=row["id"], inputs=row["input"], expected_output=row["expected"]) for row in rows]
Dataset(name="small", cases=cases, evaluators=[EqualsExpected()]).evaluate_sync(answer).print()
"""
INSPECT = """
from answers import answer
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, csv_dataset
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import exact
from inspect_ai.solver import solver
@solver
def application():
    async def solve(state, generate):
        state.output = ModelOutput.from_content("application", answer(state.input_text))
        return state
    return solve
@task
def small():
    rows = csv_dataset("rows.csv", FieldSpec(input="input", target="expected", id="id"))
    return Task(dataset=rows, solver=application(), scorer=exact())
"""
DEEPEVAL = """
import csv
from answers import answer
from deepeval import evaluate
from deepeval.metrics import ExactMatchMetric
from deepeval.test_case import LLMTestCase
def attempt(text):
    try:
        return answer(text)
    except KeyError as error:
        return repr(error)
rows = csv.DictReader(open("rows.csv"))
triples = [(row["input"], attempt(row["input"]), row["expected"]) for row in rows]
cases = [LLMTestCase(input=one, actual_output=two, expected_output=three) for one, two, three in triples]
evaluate(test_cases=cases, metrics=[ExactMatchMetric()])
"""
PROMPTFOO = """
prompts: ["{{input}}"]
providers: ["file://provider.py"]
tests: file://rows-promptfoo.csv
"""
PROVIDER = """
from answers import answer
def call_api(prompt, options, context):
    return {"output": answer(prompt)}
"""


class Tool(NamedTuple):
    """What is installed, the files that its user writes, and the command."""

    packages: tuple[str, ...]
    files: dict[str, str]
    command: tuple[str, ...]


TOOLS = {
    "fairtrial": Tool((str(ROOT),), {"evals.py": FAIRTRIAL}, ("bin/fairtrial", "run", "evals.py")),
    "pydantic-evals": Tool(("pydantic-evals",), {"evals.py": PYDANTIC_EVALS}, ("bin/python", "evals.py")),
    "inspect": Tool(
        ("inspect-ai",), {"evals.py": INSPECT}, ("bin/inspect", "eval", "evals.py", "--model", "mockllm/model")
    ),
    "deepeval": Tool(("deepeval",), {"evals.py": DEEPEVAL}, ("bin/python", "evals.py")),
    "promptfoo": Tool(
        ("promptfoo@0.121.20",),
        {"promptfooconfig.yaml": PROMPTFOO, "provider.py": PROVIDER},
        ("node_modules/.bin/promptfoo", "eval", "--no-cache", "--no-progress-bar"),
    ),
}


def install(name: str, environment: Path) -> None:
    packages = TOOLS[name].packages
    if name != "promptfoo":
        python_environment(environment, *packages)
    elif not (environment / "node_modules" / ".bin" / "promptfoo").exists():
        environment.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", *packages], cwd=environment, check=True)


def size_mb(environment: Path) -> float:
    """Megabytes of the files, without pip and without compiled copies."""
    files = (path for path in environment.rglob("*") if path.is_file() and not path.is_symlink())
    skipped = ("__pycache__", "site-packages/pip")
    return sum(path.stat().st_size for path in files if not any(part in str(path) for part in skipped)) / 1e6


def write_files(folder: Path, files: dict[str, str]) -> int:
    """Write the rows, the function and the files of the tool; returns the lines of the latter."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = [(f"q{number}", str(number), str(2 * number)) for number in range(1, 31)]
    for name, head in (("rows.csv", "expected"), ("rows-promptfoo.csv", "__expected")):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([("id", "input", head), *rows])
    for name, text in {"answers.py": ANSWERS, **files}.items():
        (folder / name).write_text(text.lstrip("\n"))
    return sum(bool(line.strip()) for text in files.values() for line in text.splitlines())


def without_network() -> list[str]:
    """The words that start a command without a network but with loopback; none where that is not allowed."""
    words = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    works = subprocess.run([*words, "true"], check=False, capture_output=True).returncode == 0
    return words if works else []


def measure(name: str, folder: Path) -> None:
    environment, work = folder / name, folder / f"{name}-work"
    install(name, environment)
    lines = write_files(work, TOOLS[name].files)
    program, *arguments = TOOLS[name].command
    command = [*without_network(), str(environment / program), *arguments]
    variables = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "HOME": str(work), **QUIET}
    for attempt in ("first", "second"):  # The first one compiles.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, cwd=work, env=variables, check=False, capture_output=True, text=True, timeout=900
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{name}, {attempt} time: {cpu:.1f} CPU seconds, exit code {done.returncode}")
    print(f"{name}: {lines} lines, {size_mb(environment):.0f} MB")
    print("\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines()[-45:]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(TOOLS)}")
    parser.add_argument("--folder", type=Path, help="where the environments are kept")
    options = parser.parse_args()
    if unknown := set(options.names) - set(TOOLS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="side-by-side-"))).resolve()
    failed = 0
    for name in options.names or TOOLS:
        try:
            measure(name, folder)
        except (OSError, subprocess.SubprocessError) as error:
            failed += 1
            print(f"{name}: not run: {error}", file=sys.stderr)
    return 1 if failed else 0
