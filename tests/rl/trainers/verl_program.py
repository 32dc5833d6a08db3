"""Score with verl's own reward manager, and compare advantages with its own functions.

python verl_program.py FOLDER   prints a line of JSON; scripts/peers trainers makes the environment for it
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.update(RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# A dependency of verl installs a package `tests`, which would be found instead of ours.
OURS = ModuleType("tests")
OURS.__path__ = [str(Path(__file__).resolve().parents[2])]
sys.modules["tests"] = OURS

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_rloo_outcome_advantage
from verl.trainer.ppo.reward import load_reward_manager

from fairtrial import rl
from tests.rl.trainers import tiny_model, word_suites
from tests.rl.trainers.checks import Checks

FUNCTION = """
from fairtrial import rl
from tests.rl.trainers.word_suites import suite
compute_score = rl.verl_reward(suite, metrics=["correct", "length"])
"""


def check_rewards(checks: Checks, folder: Path) -> None:
    """Score answers as verl does during training: with tokens in, through its reward manager."""
    words = tiny_model.tokenizer()
    file = folder / "compute_score.py"
    file.write_text(FUNCTION)
    custom = {"path": str(file), "name": "compute_score", "reward_kwargs": {}}
    manager = {"source": "register", "name": "naive", "module": None}
    settings = {"reward": {"custom_reward_function": custom, "reward_manager": manager, "sandbox_fusion": None}}
    loaded = load_reward_manager(OmegaConf.create(settings), words)
    rl.write_prompts(word_suites.suite, folder / "train.jsonl", "verl")
    rewards, metrics = {}, {}
    for line in (folder / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = words.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        answer = words(row["prompt"][-1]["content"], add_special_tokens=False)["input_ids"] + [words.eos_token_id]
        mask = torch.ones(1, len(prompt) + len(answer), dtype=torch.long)
        tensors = {"prompts": torch.tensor([prompt]), "responses": torch.tensor([answer]), "attention_mask": mask}
        columns = {name: np.array([row[name]], dtype=object) for name in ("data_source", "reward_model", "extra_info")}
        given = DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=columns)
        found = loaded.loop.run_until_complete(loaded.run_single(given))
        rewards[row["extra_info"]["sample_id"]] = found["reward_score"]
        metrics = found["reward_extra_info"]
    checks.add("verl's reward manager: rewards equal Score.reward", rewards == word_suites.REWARDS, rewards)
    checks.add("and it reports the metrics", {"correct", "length"} <= set(metrics), dict(metrics))


def check_advantages(checks: Checks) -> None:
    """Compare advantages with verl's own functions on random groups, some of one member and some of equal rewards."""
    rng = random.Random(1)
    functions: dict[str, Any] = {
        "grpo": lambda *given: compute_grpo_outcome_advantage(*given)[0],
        "dr_grpo": lambda *given: compute_grpo_outcome_advantage(*given, norm_adv_by_std_in_grpo=False)[0],
        "rloo": lambda *given: compute_rloo_outcome_advantage(*given)[0],
    }
    for kind, function in functions.items():
        away = 0.0
        for _ in range(200):
            groups = [f"g{place}" for place in range(4) for _ in range(rng.choice([1, 2, 4, 8]))]
            rewards = [rng.choice([0.0, 0.5, 1.0, rng.random()]) for _ in groups]
            tokens = torch.tensor([[0.0, reward] for reward in rewards], dtype=torch.float64)
            theirs = function(tokens, torch.ones_like(tokens), np.array(groups, dtype=object))[:, 0].tolist()
            ours = rl.advantages(rewards, groups, kind=kind, convention="verl")  # type: ignore[arg-type]
            away = max(away, *(abs(one - (other or 0.0)) for one, other in zip(theirs, ours, strict=True)))
        checks.add(f"advantages {kind} equal verl's", away < 1e-6, f"200 batches, at most {away:.1e} away")


def main() -> int:
    checks = Checks()
    check_rewards(checks, Path(sys.argv[1]))
    check_advantages(checks)
    return checks.finish()


if __name__ == "__main__":
    raise SystemExit(main())
