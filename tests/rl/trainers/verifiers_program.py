"""Evaluate a suite with `vf-eval` of verifiers against our model server.

python verifiers_program.py FOLDER   prints a line of JSON; scripts/peers trainers makes the environment for it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from fairtrial.integrations.model_server import spawn_model_server
from tests.rl.trainers import word_suites
from tests.rl.trainers.checks import Checks

PACKAGE = """
from fairtrial import rl
from tests.rl.trainers.word_suites import suite
Words = rl.verifiers_taskset(suite)
__all__ = ["Words"]
"""


# The harness of verifiers installs its own dependencies with uv, which are installed here already.
UV = """#!/bin/sh
case "$*" in
*--help*) echo --script ;;
sync*) ;;
*) echo {python} ;;
esac
"""


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rollouts that vf-eval wrote."""
    files = folder.rglob("traces.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def main() -> int:
    checks = Checks()
    folder = Path(sys.argv[1])
    (folder / "ft_words").mkdir()
    (folder / "ft_words" / "__init__.py").write_text(PACKAGE)
    root = Path(__file__).resolve().parents[3]
    (folder / "bin").mkdir()
    (folder / "bin" / "uv").write_text(UV.format(python=sys.executable))
    (folder / "bin" / "uv").chmod(0o755)
    with spawn_model_server() as server:
        env = {
            **os.environ,
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}{os.pathsep}{root}",
            "OPENAI_API_KEY": "none",
        }
        done = subprocess.run(
            [
                "vf-eval", "ft-words", "-n", "3", "-r", "2", "--model", "test-model",
                "--client.base-url", f"{server.base_url}/v1", "--client.api-key-var", "OPENAI_API_KEY",
                "--env.agent.harness.id", "null", "--output-dir", str(folder / "out"),
                "--no-push", "--no-rich", "--env.agent.runtime.type", "subprocess",
            ],
            cwd=folder, env=env, capture_output=True, text=True, timeout=1200,
        )  # fmt: skip
        asked = server.stats().requests
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-3000:], file=sys.stderr)
        return 1
    found = rows(folder / "out")
    rewards = {
        trace["task"]["key"]: sum(one["score"] * one["weight"] for one in trace["rewards"].values())
        for row in found
        for trace in row["traces"]
    }
    checks.add("vf-eval runs the samples of a suite", asked == 6, f"{asked} rollouts")
    checks.add("verifiers' rewards equal Score.reward", rewards == word_suites.REWARDS, rewards)
    return checks.finish()


if __name__ == "__main__":
    raise SystemExit(main())
