"""Makes the files of other tools that the tests of importers read, with the tools themselves.

python scripts/peers files [NAME]... [--folder DIR] [--newest]

The names are inspect, promptfoo, lm-eval and pydantic-evals (default: all).

Each tool is installed by pip or npm into an environment of its own below DIR (default: a folder for temporary files).
It runs a program of tests/integrations/importers/peers without a network. Its files replace those in
tests/integrations/importers/files, without the paths of this machine. --newest installs the newest releases instead of
the pinned ones and leaves the files as they are: then the tests of the importers run on what the newest releases wrote.

With inspect, a run of ours is also read by Inspect and served by `inspect view`, and tasks of Inspect and of
inspect_evals run here with the scores of Inspect's own runner. That needs redis-server.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from environments import python_environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "integrations" / "importers" / "peers"
FILES = ROOT / "tests" / "integrations" / "importers" / "files"
QUIET = {
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "PROMPTFOO_DISABLE_UPDATE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "INSPECT_DISPLAY": "none",
}


class Peer(NamedTuple):
    """A tool: its packages, the newest release of them, how its files are made and which of them are kept."""

    packages: tuple[str, ...]
    make: Callable[[Path, Path, Path], None]  # Environment, folder with the programs, folder for the files.
    kept: tuple[str, ...]


def run(*command: Path | str, folder: Path, **variables: str) -> None:
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, **QUIET, **variables})


def python_program(name: str) -> Callable[[Path, Path, Path], None]:
    def make(environment: Path, programs: Path, output: Path) -> None:
        run(environment / "bin" / "python", programs / name, output, folder=programs, HF_HOME=str(output / "cache"))

    return make


def make_promptfoo(environment: Path, programs: Path, output: Path) -> None:
    run(
        environment / "node_modules" / ".bin" / "promptfoo", "eval", "--repeat", "2", "--no-cache", "--no-table",
        "--no-progress-bar", "-o", output / "results.json",
        folder=programs / "promptfoo", PROMPTFOO_CONFIG_DIR=str(environment / "config"),
        PROMPTFOO_FAILED_TEST_EXIT_CODE="0",
    )  # fmt: skip


PEERS = {
    "inspect": Peer(
        ("inspect-ai==0.3.285", "inspect-evals==0.26.0", "openai"),
        python_program("inspect_files.py"),
        ("forecast.eval", "short.json", "reported.json"),
    ),
    "promptfoo": Peer(("promptfoo@0.121.20",), make_promptfoo, ("results.json",)),
    "lm-eval": Peer(("lm-eval==0.4.13",), python_program("lm_eval_files.py"), ("samples_*.jsonl", "results_*.json")),
    "pydantic-evals": Peer(
        ("pydantic-evals", "pyyaml"),
        python_program("pydantic_evals_files.py"),
        ("report.json", "reported.json", "dataset.yaml"),
    ),
}


def install(name: str, packages: tuple[str, ...], environment: Path) -> None:
    if name != "promptfoo":
        python_environment(environment, *packages)
    elif not (environment / "node_modules").exists():  # The newest release needs a newer Node.js than the pinned one.
        environment.mkdir(parents=True, exist_ok=True)
        run("npm", "install", "--no-audit", "--no-fund", "--prefix", environment, *packages, folder=environment)


def make_files(name: str, folder: Path, *, newest: bool) -> Path:
    """Install a tool, run its program and return the folder with the files to keep."""
    peer = PEERS[name]
    packages = tuple(package.partition("==")[0] for package in peer.packages) if newest else peer.packages
    environment = folder / f"{name}{'-newest' if newest else ''}"
    install(name, packages, environment)
    programs, output = folder / "programs", folder / f"{name}-output"
    kept = folder / "files" / name
    for old in (programs, output, kept):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(PROGRAMS, programs)
    output.mkdir(parents=True)
    kept.mkdir(parents=True)
    peer.make(environment, programs, output)
    for pattern in peer.kept:
        for file in output.glob(pattern):
            shutil.copy(file, kept / file.name)
            if file.suffix != ".eval":  # A ZIP file; its program has removed them.
                text = file.read_text()
                for path, name in ((environment, "/environment"), (folder, "/project"), (sys.base_prefix, "/python")):
                    text = text.replace(str(path), name)
                (kept / file.name).write_text(text)
    return kept


def check_log(environment: Path, folder: Path) -> None:
    """Write a run as a log of Inspect and require that Inspect reads it, and `inspect view` serves it, as it is."""
    sys.path.insert(0, str(ROOT))
    from fairtrial.integrations.inspect import write_log
    from tests.integrations.inspect.test_inspect_log import report_of

    report = report_of()
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    (path,) = write_log(report.store, report.run, logs / "letters.eval")
    command = (environment / "bin" / "python", PROGRAMS / "inspect_reads.py", path)
    read = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    stored = {
        (one.sample_id, one.repeat + 1): None if one.score is None else one.score.value
        for one in report.store.results(report.run.run_id)
    }
    theirs = {(one[0], one[1]): one[3].get("score") for one in read["samples"]}
    if stored != theirs or read["listed"] != ["letters.eval"] or read["served"] != "letters" or not read["page"]:
        raise SystemExit(f"Inspect reads something else than was written: {read}")
    print(f"inspect: read_eval_log and inspect view have the {len(stored)} trials of our log")


def check_tasks(environment: Path, folder: Path) -> None:
    """Run tasks of Inspect here and require the scores of Inspect's own runner: killed and resumed, and on a fleet."""
    run(environment / "bin" / "pip", "install", "--quiet", "-e", f"{ROOT}[redis]", folder=folder)
    work = folder / "inspect-tasks"
    shutil.rmtree(work, ignore_errors=True)
    run(
        environment / "bin" / "python",
        ROOT / "tests" / "integrations" / "inspect" / "inspect_program.py",
        work,
        folder=folder,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PEERS)}")
    parser.add_argument("--folder", type=Path, help="where the environments are kept")
    parser.add_argument("--newest", action="store_true", help="try the newest releases, and keep the files as they are")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PEERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="peer-files-"))).resolve()
    for name in options.names or PEERS:
        kept = make_files(name, folder, newest=options.newest)
        print(f"{name}: {', '.join(sorted(file.name for file in kept.iterdir()))}")
        if name == "inspect":
            environment = folder / f"inspect{'-newest' if options.newest else ''}"
            check_log(environment, folder)
            check_tasks(environment, folder)
        if not options.newest:
            shutil.rmtree(FILES / name, ignore_errors=True)
            shutil.copytree(kept, FILES / name)
    tested = {"FAIRTRIAL_PEER_FILES": str(folder / "files")} if options.newest else {}
    command = (sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/integrations/importers/test_peer_files.py")
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **tested}, check=False).returncode
