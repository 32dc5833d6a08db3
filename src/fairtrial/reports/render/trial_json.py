"""The JSON of a trial in commands; `fairtrial.reports.render.run_json` does the same for runs.

The field names are stable: fields may be added; other changes need a new format version.
"""

from __future__ import annotations

from typing import Any

from fairtrial.base.codec import to_json
from fairtrial.reports.render.run_json import moment
from fairtrial.reports.render.session_text import envelopes
from fairtrial.trials.result import EvalResult


def trial_record(result: EvalResult, *, whole: bool = False) -> dict[str, Any]:
    """Return the JSON of a trial; with `whole`, also its sample and session."""
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
            "cache_write": result.usage.cache_write_tokens,
            "reasoning": result.usage.reasoning_tokens,
        },
        "cost_usd": result.usage.cost_usd,
        "judge_cost_usd": result.judge_cost_usd,
        "cache_hits": result.cache_hits,
        "unpriced_calls": result.unpriced_calls + result.unpriced_judge_calls,
        "cut_off_calls": result.cut_off_calls,
        "refused_calls": result.refused_calls,
        "unknown_endings": dict(result.unknown_endings),
        "metadata": to_json(result.own_metadata),
    }
    if whole:
        sample = result.sample
        facts["sample"] = {
            "id": sample.id,
            "input": to_json(sample.input),
            **({"expected": to_json(sample.expected)} if sample.has_expected else {}),
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
