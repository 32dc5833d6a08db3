"""Play suites as environments of SkyRL-Gym.

python skyrl_program.py FOLDER   prints a line of JSON; scripts/peers trainers makes the environment for it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import skyrl_gym

from fairtrial import rl
from tests.rl.trainers import counter_suites, word_suites
from tests.rl.trainers.checks import Checks

Counter = counter_suites.Counter


def main() -> int:
    checks = Checks()
    folder = Path(sys.argv[1])
    skyrl_gym.register(id="words", entry_point=rl.skyrl_env(word_suites.suite))
    skyrl_gym.register(id="counter", entry_point=rl.skyrl_env(counter_suites.suite))
    rl.write_prompts(word_suites.suite, folder / "train.jsonl", "skyrl")
    rewards = {}
    for line in (folder / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        game = skyrl_gym.make(row["env_class"], env_config=None, extras=row)
        prompt, _ = game.init(row["prompt"])
        taken = game.step(prompt[-1]["content"])
        rewards[row["extra_info"]["sample_id"]] = taken["reward"]
        checks.add("an answer ends the episode", taken["done"] and game.get_metrics()["correct"] == 1.0)
        game.close()
    checks.add("SkyRL-Gym: rewards equal Score.reward", rewards == word_suites.REWARDS, rewards)
    game = skyrl_gym.make("counter", env_config=None, extras={"sample_id": "six"})
    game.init([{"role": "user", "content": "Count to six."}])
    call = '<tool_call>{"name": "add", "arguments": {"number": 6}}</tool_call>'
    first = game.step(call)
    last = game.step("done")
    shown = f"{first['observations'][0]['content']}, then reward {last['reward']}"
    checks.add("tools and environment over two turns", not first["done"] and last["reward"] == 1.0, shown)
    game.close()
    left = skyrl_gym.make("counter", env_config=None, extras={"sample_id": "five"})
    left.close()
    checks.add("every environment is closed", Counter.opened == Counter.closed == 2, f"{Counter.closed} closed")
    return checks.finish()


if __name__ == "__main__":
    raise SystemExit(main())
