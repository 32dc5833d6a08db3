"""What commands print as JSON. Names here are a promise: they are added to, and changed only with a new schema."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from fairtrial.codec import to_json
from fairtrial.store.protocol import RunRecord, Totals
from fairtrial.trials.result import EvalResult


def moment(seconds: float | None) -> str | None:
    """A time as ISO 8601 in UTC."""
    if seconds is None:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def run_facts(run: RunRecord, totals: Iterable[Totals]) -> dict[str, Any]:
    """What is known about a run."""
    return {
        "run_id": run.run_id,
        "name": f"{run.suite}@{run.number}",
        "suite": run.suite,
        "number": run.number,
        "status": run.status,
        "created_at": moment(run.created_at),
        "finished_at": moment(run.finished_at),
        "dataset": {
            "name": run.dataset_name,
            "version": run.dataset_version,
            "fingerprint": run.dataset_fingerprint,
            "samples": run.dataset_size,
        },
        "evaluator": run.evaluator,
        "repeats": run.repeats,
        "planned": run.planned,
        "tags": dict(run.tags),
        "parent_run": run.parent_run,
        "notes": to_json(dict(run.notes)),
        "experiments": [totals_facts(part, to_json(run.params.get(part.experiment))) for part in totals],
    }


def totals_facts(totals: Totals, params: Any = None) -> dict[str, Any]:
    """The figures of one experiment; undefined ones are null, never 0."""
    outcomes: Mapping[Any, int] = totals.outcomes
    scored = outcomes.get("scored", 0)
    total = sum(outcomes.values()) - outcomes.get("not_run", 0)
    return {
        "experiment": totals.experiment,
        "params": params or {},
        "trials": total,
        "scored": scored,
        "passed": totals.passed,
        "errors": {name: count for name, count in outcomes.items() if name not in ("scored", "not_run") and count},
        "pass_rate": totals.passed / scored if scored else None,
        "pass_rate_all": totals.passed / total if total else None,
        "mean_score": totals.value_sum / scored if scored else None,
        "mean_reward": totals.reward_sum / scored if scored else None,
        "mean_latency_ms": totals.latency_sum / totals.timed if totals.timed else None,
        "tokens": {
            "input": totals.input_tokens,
            "output": totals.output_tokens,
            "cached": totals.cached_tokens,
        },
        "cost_usd": totals.cost_usd,
        "judge_cost_usd": totals.judge_cost_usd,
        "cache_hits": totals.cache_hits,
        "unpriced_calls": totals.unpriced_calls + totals.unpriced_judge_calls,
    }


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
