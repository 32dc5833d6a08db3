"""Train with real trainers on a CPU: a virtual environment for each, its program, and one table of the results.

python scripts/peers trainers                          all of them, in a temporary folder that is deleted
python scripts/peers trainers trl verifiers            only these
python scripts/peers trainers --keep FOLDER [NAME ...] keep the environments in a folder, and use those that are there

A trainer takes 0.3 to 7 GB. A build of torch without CUDA is enough: TORCH=2.15.0+cpu chooses it where pip finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "rl" / "trainers"
TORCH = "torch" + (f"=={os.environ['TORCH']}" if os.environ.get("TORCH") else "")
# For each trainer: what is installed, in this order, the extras of Fairtrial, and the package whose version is shown.
TRAINERS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "trl": ((TORCH, "trl"), "", "trl"),
    "verl": ((TORCH, "verl"), "", "verl"),
    "verifiers": (("verifiers",), "models,testing", "verifiers"),
    "agentlightning": (("agentlightning",), "models,testing", "agentlightning"),
    "openenv": (("openenv",), "", "openenv"),
    "skyrl": (("skyrl-gym",), "", "skyrl-gym"),
}


def quiet(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command; raises with the end of its output if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def environment(folder: Path, name: str) -> Path:
    """Return the Python of the environment of a trainer, which is made if it does not exist."""
    packages, extras, _ = TRAINERS[name]
    python = folder / name / "bin" / "python"
    install = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    ready = folder / name / "ready"
    if not ready.exists():
        shutil.rmtree(folder / name, ignore_errors=True)
        own = ROOT / ".venv" / "bin" / "python"
        quiet(os.environ.get("PYTHON") or (own if own.exists() else sys.executable), "-m", "venv", folder / name)
        for package in packages:
            quiet(*install, package)
        ready.touch()
    quiet(*install, f"{ROOT}[{extras}]" if extras else ROOT)
    return python


def results(folder: Path, name: str) -> list[tuple[str, str, str, str]]:
    """Run the program of a trainer; returns rows of what was tried, the result, and whether it is right."""
    try:
        python = environment(folder, name)
        version = quiet(python, "-c", f"from importlib.metadata import version; print(version('{TRAINERS[name][2]}'))")
        with tempfile.TemporaryDirectory() as work:
            env = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
            said = quiet(python, PROGRAMS / f"{name}_program.py", work, env=env)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return [(name, "", str(error).splitlines()[-1][:80], "FAILED")]
    shown = f"{name} {version.strip()}"
    checks = json.loads(said.strip().splitlines()[-1])
    return [(shown, one["what"], one["result"], "ok" if one["passed"] else "FAILED") for one in checks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(TRAINERS)}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the environments in this folder")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in TRAINERS]
    if unknown:
        parser.error(f"the trainers are {', '.join(TRAINERS)} (got {', '.join(unknown)})")
    folder = chosen.keep.resolve() if chosen.keep else Path(tempfile.mkdtemp(prefix="trainers-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str, str, str]] = []
    try:
        for name in chosen.names or TRAINERS:
            began = time.monotonic()
            rows += results(folder, name)
            print(f"== {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if not chosen.keep:
                shutil.rmtree(folder / name, ignore_errors=True)
    finally:
        if not chosen.keep:
            shutil.rmtree(folder, ignore_errors=True)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))
    return int(any(row[3] != "ok" for row in rows))
