"""Train with TRL on a CPU: GRPO on a suite, then SFT, DPO and KTO on exports of its runs.

python trl_program.py FOLDER [STEPS]   prints a line of JSON; scripts/trainers makes the environment for it
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from fairtrial import EvalReport, rl
from tests.rl.trainers import letter_suites, tiny_model


def common(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }


def train_grpo(folder: Path, steps: int, *, metrics: bool) -> dict[str, Any]:
    """Train, and compare TRL's rewards with those of the suite."""
    from trl import GRPOConfig, GRPOTrainer

    words = tiny_model.tokenizer()
    training = rl.trl(letter_suites.suite, metrics={"letters": 2.0, "no_digits": 1.0} if metrics else None)
    pickle.loads(pickle.dumps(training.reward_funcs))
    seen: list[tuple[list[Any], list[float | None]]] = []
    first = training.reward_funcs[0]

    def watched(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        found = first(prompts=prompts, completions=completions, **columns)
        seen.append((list(completions), found))
        return found

    watched.__name__ = str(getattr(first, "__name__", "reward"))
    evaluation = training.callback(
        letter_suites.held_out, every=max(steps // 2, 1), store=str(folder / "runs.db"), train="tiny", max_new_tokens=8
    )
    config = GRPOConfig(
        per_device_train_batch_size=16, num_generations=8, max_completion_length=8, max_steps=steps,
        learning_rate=3e-3, logging_steps=1, beta=0.0, seed=7, reward_weights=training.reward_weights,
        **common(folder),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=tiny_model.network(words), args=config, processing_class=words, train_dataset=training.train_dataset,
        reward_funcs=[watched, *training.reward_funcs[1:]], callbacks=[evaluation],
    )  # fmt: skip
    trainer.train()
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    texts = [(said[-1]["content"], value) for batch, values in seen for said, value in zip(batch, values, strict=True)]
    means = [sum(value or 0.0 for value in values) / len(values) for _, values in seen]
    ours = metrics or [round(mean, 5) for mean in means] == [round(one, 5) for one in logged]  # TRL has 32 bits.
    return {
        "first": sum(logged[:5]) / len(logged[:5]),
        "last": sum(logged[-5:]) / len(logged[-5:]),
        "equal": ours and all(letter_suites.scored[text] == value for text, value in texts if not metrics),
        "evaluated": {step: report.mean_reward for step, report in evaluation.reports.items()},
    }


def train_exports(folder: Path) -> dict[str, bool]:
    """Train two steps each on the files of a stored run."""
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

    words = tiny_model.tokenizer()
    network = tiny_model.network(words)
    network.save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    report = EvalReport.load(str(folder / "runs.db"), "held-out@1")
    done: dict[str, bool] = {}
    formats: tuple[tuple[Any, Any, Any], ...] = (
        ("sft", SFTConfig, SFTTrainer),
        ("dpo", DPOConfig, DPOTrainer),
        ("kto", KTOConfig, KTOTrainer),
    )
    for name, config, trainer in formats:
        file = folder / f"{name}.jsonl"
        rl.export(report, file, name, truncated=True, min_reward=0.3)
        table = load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))
        settings = config(max_steps=2, per_device_train_batch_size=2, **common(folder))
        made = trainer(model=str(folder / "model"), args=settings, train_dataset=table, processing_class=words)
        done[name] = made.train().training_loss > 0
    return done


def main() -> int:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40
    began = time.process_time()
    whole = train_grpo(folder, steps, metrics=False)
    by_metric = train_grpo(folder, 2, metrics=True)
    exports = train_exports(folder)
    found = {"grpo": whole, "grpo_by_metric": by_metric, "exports": exports, "cpu_seconds": time.process_time() - began}
    print(json.dumps(found))
    learned = whole["last"] >= whole["first"] + 0.3
    return int(not (learned and whole["equal"] and all(exports.values())))


if __name__ == "__main__":
    raise SystemExit(main())
