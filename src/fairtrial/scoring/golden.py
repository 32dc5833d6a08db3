"""Golden sets: labelled cases for each metric that people look for by name, and what each metric cannot tell."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from fairtrial.base.codec import parse_json
from fairtrial.base.frozen import JSON
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import ToolInvoked
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import ConfigurationError

GOLDEN_RULES = ("json_correctness", "pii_leakage", "tool_correctness")
"""The metrics that are rules, of `fairtrial.scoring`; the others are judges, of `fairtrial.models.judges`."""

GOLDEN_SETS: Mapping[str, str] = {
    "json_correctness": "whether values are true, keys that occur twice, and `format` of a schema are not checked",
    "pii_leakage": "names, postal addresses, dates of birth and ids of other countries are not found; public contacts "
    "count unless they are allowed",
    "tool_correctness": "whether a call was needed, succeeded or was used is not checked; arguments must be equal, not "
    "equivalent",
    "answer_correctness": "the reference is taken as true and complete",
    "hallucination": "only the given context counts: what is true but not in it fails, and an error in it passes",
    "toxicity": "words are judged without the relation of the people; quoting, irony and reclaimed words are hard",
    "bias": "one output shows no pattern: unequal treatment across many outputs is not seen",
    "summarization": "which points are the main ones is the judge's opinion; very long sources may be read in part",
    "task_completion": "only the transcript is seen: what a tool did but did not report, and what it reported wrongly, "
    "are not",
    "goal_reached": "only the transcript is seen: the state of the system behind it is not checked",
    "kept_role": "the role is what the system message says of it: unwritten rules of a house are not known",
    "remembered": "details that no later turn needed are not tested, and all mistakes weigh the same",
}
"""The names of the golden sets, which are those of their metrics, with what the metric cannot tell."""


def golden_set(name: str) -> Dataset[Any, Any]:
    """Return the labelled cases of a metric: `golden_set("toxicity")`.

    The metadata of a sample has the `output` that is judged, the `label` ("pass" or "fail"), a `note` that says why,
    `kind` ("plain", "hard" or "adversarial") and `language`; where the metric needs it, `context` or `trajectory`. With
    `replay` as the task and the metric as the evaluator it is a suite.
    """
    if name not in GOLDEN_SETS:
        raise ConfigurationError(f"a golden set must be one of {', '.join(GOLDEN_SETS)} (got {name!r})")
    text = (files("fairtrial.scoring") / "golden_sets" / f"{name}.jsonl").read_text(encoding="utf-8")
    samples = [_sample(parse_json(line, unique_keys=True)) for line in text.splitlines()]
    return Dataset(samples, name=f"golden-{name}")


def _sample(row: dict[str, JSON]) -> Sample[Any, Any]:
    sample_id, given = str(row.pop("id")), row.pop("input")
    wanted: dict[str, Any] = {"expected": row.pop("expected")} if "expected" in row else {}
    return Sample(sample_id, given, metadata={"kind": "plain", "language": "en", **row}, **wanted)


def replay(input: Any, ctx: Any) -> Any:
    """The task of a suite on a golden set: record the case's transcript, and return its output."""
    case = ctx.sample.metadata
    for step in case.get("trajectory", ()):
        if "tool" in step:
            ctx.session.record(ToolInvoked(step["tool"], step.get("arguments", {}), step.get("result")))
        else:
            ctx.session.record(ChatMessage(step["role"], step["content"]))
    return case["output"]
