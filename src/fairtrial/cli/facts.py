"""What commands print as JSON about a trial; `fairtrial.render.run_json` has the same for runs.

Names here are a promise: they are added to, and changed only with a new schema.
"""

from __future__ import annotations

from typing import Any

from fairtrial.codec import to_json
from fairtrial.render.run_json import moment
from fairtrial.trials.result import EvalResult


def trial_facts(result: EvalResult, *, whole: bool = False) -> dict[str, Any]:
    """What is known about a trial; `whole` brings the sample and the session along."""
    score = result.score
    facts: dict[str, Any] = {
        "run_id": result.key.run_id,
        "experiment": result.experiment,
        "sample_id": result.sample_id,
        "repeat": result.repeat,
        "outcome": result.outcome,
        "passed": None if score is None else score.passed,
        "value": None if score is None else score.value,
        "reward": None if score is None else score.reward,
        "reason": None if score is None else score.reason,
        "metrics": {} if score is None else {metric.name: metric.value for metric in score.metrics},
        "criteria": []
        if score is None
        else [{"name": m.name, "value": m.value, "passed": m.passed, "reason": m.reason} for m in score.criteria],
        "error": result.error,
        "stage": result.stage,
        "redacted": list(result.redacted_parts),
        "output": to_json(result.output),
        "attempt": result.attempt,
        "started_at": moment(result.started_at) if result.started_at else None,
        "latency_ms": result.known_latency_ms,
        "tokens": {
            "input": result.usage.input_tokens,
            "output": result.usage.output_tokens,
            "cached": result.usage.cached_tokens,
        },
        "cost_usd": result.usage.cost_usd,
        "judge_cost_usd": result.judge_cost_usd,
        "cache_hits": result.cache_hits,
        "unpriced_calls": result.unpriced_calls + result.unpriced_judge_calls,
        "metadata": to_json(dict(result.metadata)),
    }
    if whole:
        sample = result.sample
        facts["sample"] = {
            "id": sample.id,
            "input": to_json(sample.input),
            "expected": to_json(sample.expected),
            "metadata": to_json(dict(sample.metadata)),
        }
        facts["events"] = [
            {
                "seq": event.seq,
                "time": event.time,
                "actor": event.actor,
                "attempt": event.attempt,
                "kind": event.kind,
                "data": to_json(event.data),
            }
            for event in envelopes(result)
        ]
    return facts


def envelopes(result: EvalResult) -> tuple[Any, ...]:
    """Everything recorded in a trial, judges included."""
    session: Any = result.session
    return tuple(session.everything().envelopes)
