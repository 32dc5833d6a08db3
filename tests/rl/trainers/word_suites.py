"""A suite whose answer the echoing model server knows: it says what it is asked to say."""

from __future__ import annotations

from typing import Any

from fairtrial import Dataset, EvalSuite, Metric, Sample, Score, Trajectory
from fairtrial.models import ScriptedAdapter, agent_task


def score(trajectory: Trajectory, sample: Sample[Any, Any]) -> Score:
    said = trajectory.last_reply or ""
    return Score(
        metrics=(
            Metric("correct", float(str(sample.expected) in said), 3.0),
            Metric("brief", float(len(said) < 9), 1.0),
            Metric("length", len(said)),
        )
    )


data = Dataset([Sample(word, f"say {word}", word) for word in ("apple", "pear", "watermelon")], name="words")
suite = EvalSuite("words", data, agent_task(ScriptedAdapter(["hm"], repeat=True), system="Obey."), score)
REWARDS = {"apple": 0.75, "pear": 1.0, "watermelon": 0.75}
"""The rewards of an echo of the input."""
