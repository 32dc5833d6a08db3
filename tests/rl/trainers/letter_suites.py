"""The suites that models of the trainers' programs learn."""

from __future__ import annotations

from typing import Any

from fairtrial import Dataset, EvalConfig, EvalSuite, Metric, Sample, Score
from fairtrial.models import agent_task

scored: dict[str, float] = {}


def score(output: str, sample: Sample[Any, Any]) -> Score:
    """Reward lower-case letters, and no digits."""
    letters = sum(map(str.islower, output)) / max(len(output), 1)
    digits = sum(map(str.isdigit, output)) / max(len(output), 1)
    made = Score(
        metrics=(Metric("letters", letters, 2.0), Metric("no_digits", 1 - digits, 1.0), Metric("length", len(output)))
    )
    scored[output] = made.reward
    return made


data = Dataset([Sample(letter, f"say {letter}", letter) for letter in "abcd"], name="letters")
suite = EvalSuite("letters", data, str, score)


def held_out(adapter: Any) -> EvalSuite:
    """The suite that is run during training."""
    config = EvalConfig(repeats=4, max_concurrent=1)
    return EvalSuite("held-out", data, agent_task(adapter), score, config=config, version="1")
