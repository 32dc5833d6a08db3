"""Run single episodes behind the gateway of Agent Lightning, which keeps tokens and rewards for training.

python agentlightning_program.py FOLDER   prints a line of JSON; scripts/peers trainers makes the environment for it
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import uvicorn
from agentlightning.server.app import create_app

from fairtrial.integrations.model_server import ModelServer
from tests.rl.trainers import word_suites
from tests.rl.trainers.checks import Checks

ROOT = Path(__file__).resolve().parents[3]


def call(url: str, body: Any = None) -> Any:
    """Send JSON and return what comes back."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"content-type": "application/json"})) as response:
        return json.loads(response.read())


def start_gateway() -> str:
    """Start the gateway in a thread; returns its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    modes = {"train": {"temperature": 1}, "val": {"temperature": 0.7}}
    app = create_app({"key": "", "default_proxy": {"model_name": "policy", "include_log_probs": True, **modes}})
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    return f"http://127.0.0.1:{port}"


def main() -> int:
    checks = Checks()
    gateway = start_gateway()
    with ModelServer(token_ids="vllm") as server:
        call(f"{gateway}/api/models", [{"model": "policy", "endpoint": f"{server.base_url}/v1"}])
        rewards, triplets = {}, []
        for sample_id in word_suites.REWARDS:
            made = call(f"{gateway}/api/rollouts", [{"input": {"sample_id": sample_id}}])
            first = made[0] if isinstance(made, list) else made
            rollout = first.get("rollout_id") or first["rollout"]["rollout_id"]
            env = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "AGL_OPENAI_BASE_URL": f"{gateway}/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1",
                "AGL_EVENT_URL": f"{gateway}/api/rollouts/{rollout}/attempt/0/events",
                "AGL_KEY": "none",
            }
            command = [sys.executable, "-m", "fairtrial.cli.episode", "tests/rl/trainers/word_suites.py:suite"]
            done = subprocess.run(
                [*command, "--sample", sample_id, "--json"], cwd=ROOT, env=env, capture_output=True, text=True
            )
            if done.returncode:
                print(done.stdout, done.stderr, file=sys.stderr)
                return 1
            rewards[sample_id] = json.loads(done.stdout)["reward"]
            triplets.append(json.dumps(call(f"{gateway}/api/rollouts/{rollout}/events?format=triplet")))
        asked = [request.body for request in server.requests()]
    checks.add("Agent Lightning: rewards equal Score.reward", rewards == word_suites.REWARDS, rewards)
    kept = sum(str(reward) in text for reward, text in zip(rewards.values(), triplets, strict=True))
    checks.add("its gateway has the rewards", kept == 3, f"{kept} of 3")
    tokens = sum("token_ids" in text or "response" in text for text in triplets)
    wanted = all(body.get("return_token_ids") for body in asked)
    checks.add("and the tokens that it asked the engine for", wanted and tokens == 3, f"{tokens} triplets")
    return checks.finish()


if __name__ == "__main__":
    raise SystemExit(main())
