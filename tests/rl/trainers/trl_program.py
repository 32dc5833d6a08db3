"""Train with TRL on a CPU: GRPO on suites, with tools and environments, then SFT, DPO and KTO on exports of its runs.

python trl_program.py FOLDER [STEPS]   prints a line of JSON; scripts/peers trainers makes the environment for it
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from fairtrial import ChatMessage, EvalReport, ToolCall, rl
from tests.rl.trainers import counter_suites, letter_suites, tiny_model
from tests.rl.trainers.checks import Checks

Counter = counter_suites.Counter


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


def train_grpo(checks: Checks, folder: Path, steps: int) -> None:
    """Train, and compare TRL's rewards with those of the suite."""
    from trl import GRPOConfig, GRPOTrainer

    words = tiny_model.tokenizer()
    training = rl.trl(letter_suites.suite)
    pickle.loads(pickle.dumps(training.reward_funcs))
    seen: list[tuple[list[Any], list[float | None]]] = []
    first = training.reward_funcs[0]

    def watched(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        found = first(prompts=prompts, completions=completions, **columns)
        seen.append((list(completions), found))
        return found

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
        reward_funcs=[watched], callbacks=[evaluation],
    )  # fmt: skip
    trainer.train()
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    before, after = sum(logged[:5]) / 5, sum(logged[-5:]) / 5
    checks.add("GRPO learns from a suite", after >= before + 0.3, f"mean reward {before:.3f} to {after:.3f}")
    texts = [(said[-1]["content"], value) for batch, values in seen for said, value in zip(batch, values, strict=True)]
    equal = sum(letter_suites.scored[text] == value for text, value in texts)
    checks.add("rewards equal Score.reward, digit for digit", equal == len(texts), f"{equal:,} of {len(texts):,}")
    means = [sum(value or 0.0 for value in values) / len(values) for _, values in seen]
    away = max(abs(mean - one) for mean, one in zip(means, logged, strict=True))
    checks.add("TRL logs their mean, to its 32 bits", away < 1e-6, f"at most {away:.1e} away")
    rewards = {step: report.mean_reward for step, report in evaluation.reports.items()}
    shown = ", ".join(f"step {step}: {mean:.3f}" for step, mean in rewards.items() if mean is not None)
    checks.add("evaluation in the loop is stored runs", list(rewards) == [0, steps // 2, steps], shown)


def train_by_metric(checks: Checks, folder: Path) -> None:
    """Train with a reward function for each metric; their weighted sum is the reward of the score."""
    from trl import GRPOConfig, GRPOTrainer

    words = tiny_model.tokenizer()
    training = rl.trl(letter_suites.suite, metrics={"letters": 2.0, "no_digits": 1.0})
    config = GRPOConfig(
        per_device_train_batch_size=8, num_generations=8, max_completion_length=8, max_steps=2, logging_steps=1,
        beta=0.0, seed=7, reward_weights=training.reward_weights, **common(folder),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=tiny_model.network(words), args=config, processing_class=words, train_dataset=training.train_dataset,
        reward_funcs=training.reward_funcs,
    )  # fmt: skip
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    sums = [2 / 3 * one["rewards/letters/mean"] + 1 / 3 * one["rewards/no_digits/mean"] for one in logs]
    away = max(abs(total - one["reward"]) for total, one in zip(sums, logs, strict=True))
    checks.add("one reward function for each metric", away < 1e-5, f"their sum is at most {away:.1e} away")


def train_exports(checks: Checks, folder: Path) -> None:
    """Train two steps each on the files of a stored run."""
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

    words = tiny_model.tokenizer()
    network = tiny_model.network(words)
    network.save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    report = EvalReport.load(str(folder / "runs.db"), "held-out@1")
    formats: tuple[tuple[Any, Any, Any], ...] = (
        ("sft", SFTConfig, SFTTrainer),
        ("dpo", DPOConfig, DPOTrainer),
        ("kto", KTOConfig, KTOTrainer),
    )
    for name, config, trainer in formats:
        file = folder / f"{name}.jsonl"
        counts = rl.export(report, file, name, truncated=True, min_reward=0.3)
        table = load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))
        settings = config(max_steps=2, per_device_train_batch_size=2, **common(folder))
        made = trainer(model=str(folder / "model"), args=settings, train_dataset=table, processing_class=words)
        loss = made.train().training_loss
        checks.add(f"{name.upper()} trains on an export", loss > 0, f"{counts.rows} rows, loss {loss:.3f}")


def train_in_environments(checks: Checks, folder: Path) -> None:
    """Train with TRL's own tool loop over our environments; the model's answers are scripted, its update is real."""
    from trl import GRPOConfig, GRPOTrainer

    words = tiny_model.tool_tokenizer()
    script = {
        0: '<tool_call>\n{"name": "add", "arguments": {"number": 5}}\n</tool_call><|im_end|>',
        1: '<tool_call>\n{"name": "add", "arguments": {"number": -1}}\n</tool_call><|im_end|>',
        2: "done<|im_end|>",
    }
    network = tiny_model.scripted_network(words, lambda text: script[min(text.count("<tool_response>"), 2)])
    training = rl.trl(counter_suites.suite)
    factory: Any = training.environment_factory
    pickle.loads(pickle.dumps(factory)).close()
    opened = Counter.opened
    config = GRPOConfig(
        per_device_train_batch_size=4, num_generations=4, max_completion_length=256, max_steps=2, logging_steps=1,
        beta=0.0, **common(folder),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=network, args=config, processing_class=words, train_dataset=training.train_dataset,
        reward_funcs=training.reward_funcs, environment_factory=factory,
    )  # fmt: skip
    tools = [tool.__name__ for tool in trainer.tools]
    checks.add("environment_factory: TRL finds the tools", tools == ["add"], ", ".join(tools))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    # Right for "five" (1 + 1) / 2, wrong for "six" (0 + 1) / 2; the second call failed and was shown to the model.
    rewards = sorted({round(one["reward"], 4) for one in logs})
    calls = {one["calls"] for one in logs}
    checks.add("environments are scored after TRL's tool loop", set(rewards) <= {0.5, 0.75, 1.0}, f"rewards {rewards}")
    checks.add("failed tool calls are recorded, too", calls == {2.0}, f"{calls} calls of a rollout")
    made, left = Counter.opened - opened, Counter.opened - Counter.closed
    checks.add("every environment is closed", left == 0 and made == 8, f"{made} opened, {left} open")
    abandoned = factory()
    abandoned.reset(sample_id="five")
    is_open = Counter.opened - Counter.closed
    factory.close()
    checks.add("also one that TRL has left open", (is_open, Counter.opened) == (1, Counter.closed), "closed by close()")


def train_with_rollouts(checks: Checks, folder: Path) -> None:
    """Train on rollouts of our own agent; kept log-probabilities are those that the model computes again."""
    from trl import GRPOConfig, GRPOTrainer

    words = tiny_model.tokenizer()
    network = tiny_model.network(words)
    training = rl.trl(counter_suites.suite)
    function = training.rollout_func(max_new_tokens=6, parse=parse_letters)
    config = GRPOConfig(
        per_device_train_batch_size=16, num_generations=8, max_completion_length=64, max_steps=8, learning_rate=3e-3,
        logging_steps=1, beta=0.0, seed=7, **common(folder),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=network, args=config, processing_class=words, train_dataset=training.rollout_dataset,
        reward_funcs=training.rollout_rewards, rollout_func=function,
    )  # fmt: skip
    prompts = [row["prompt"] for row in training.rollout_dataset] * 8
    made = function(prompts, trainer)
    away = recomputed(trainer.model, made)
    several = sum(0 in mask for mask in made["env_mask"])
    checks.add("rollout_func: kept log-probabilities are the model's", away < 1e-5, f"at most {away:.1e} away")
    checks.add("of conversations with tools", several > 0, f"{several} of {len(prompts)} rollouts have several turns")
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [round(one["reward"], 3) for one in logs]
    trained = len(rewards) == 8 and all(one["grad_norm"] > 0 for one in logs)
    checks.add("GRPO trains on rollouts of our agent", trained, f"rewards {rewards[0]} to {rewards[-1]}")
    counts = (Counter.opened, Counter.closed)
    checks.add("every environment is closed", counts[0] == counts[1], f"{counts[0]} opened, {counts[1]} closed")


def parse_letters(text: str) -> ChatMessage:
    """A text with a vowel is a call of the tool: a random model does not write JSON."""
    calls = (ToolCall("add", {"number": len(text)}, "c"),) if set(text) & set("aeiou") else ()
    return ChatMessage("assistant", text, calls)


def recomputed(network: Any, made: Any) -> float:
    """Return how far the kept log-probabilities are from those of a forward pass, at most."""
    import torch

    away = 0.0
    columns = (made[name] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask"))
    for prompt, completion, logprobs, mask in zip(*columns, strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
        rows = torch.log_softmax(logits, -1)
        for place, (token, kept, mine) in enumerate(zip(completion, logprobs, mask, strict=True)):
            away = max(away, abs(float(rows[place, token]) - kept) if mine else 0.0)
    return away


def main() -> int:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40
    checks = Checks()
    train_grpo(checks, folder, steps)
    train_by_metric(checks, folder)
    train_exports(checks, folder)
    train_in_environments(checks, folder)
    train_with_rollouts(checks, folder)
    return checks.finish()


if __name__ == "__main__":
    raise SystemExit(main())
