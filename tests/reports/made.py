"""Reports of made-up runs, the same every time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fairtrial import EvalReport, EvalResult, Metric, Outcome, Sample, Score, TokenUsage, TrialKey, open_store
from fairtrial.store import RunRecord

HOSTILE = (
    "<script>document.title='owned'</script><img src=http://evil.example/x onerror=alert(1)> "
    "[bold red]markup[/] \x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07link\x1b]8;;\x07 \x9b31m \x00 \ud800 "
    "@everyone #123 ![img](http://evil.example/i.png) [a](javascript:alert(1)) | pipe `tick` ]]> &amp; "
    "https://evil.example www.evil.example \u202egnp.exe \r\n# heading\n<svg onload=alert(1)>\n</pre></td></details>"
)
"""Everything a model might say to a terminal, a browser, a forge or a parser of XML."""


@dataclass(frozen=True, slots=True)
class Made:
    """What came of one trial, in brief."""

    value: float | None = 1.0
    outcome: Outcome = "scored"
    reason: str = ""
    error: str | None = None
    output: Any = "an answer"
    metrics: tuple[Metric, ...] = ()
    latency_ms: int = 100
    passed: bool | None = None
    usage: TokenUsage = field(default_factory=TokenUsage)


PASS, FAIL = Made(1.0), Made(0.0, reason="not the same")
TASK_ERROR = Made(None, "task_error", error="ValueError: no")


def made_report(
    trial: Callable[[int, str, int], Made | None],
    *,
    samples: int = 10,
    repeats: int = 1,
    experiments: tuple[str, ...] = ("baseline",),
    metadata: Callable[[int], dict[str, Any]] = lambda _: {},
    name: Callable[[int], str] = "sample-{:02d}".format,
    text: Any = "a question",
    store: Any = None,
    **changes: Any,
) -> EvalReport:
    """The report of a run in which `trial(sample, experiment, repeat)` is what came of each trial (None: not run)."""
    facts: dict[str, Any] = {
        "run_id": "run0000001", "suite": "support", "dataset_name": "tickets", "dataset_version": "1.0",
        "dataset_fingerprint": "f" * 32, "dataset_size": samples, "experiments": experiments, "repeats": repeats,
        "evaluator": "exact_match", "created_at": 1000.0,
    }  # fmt: skip
    run = RunRecord(**{**facts, **changes})
    store = open_store("memory:") if store is None else store
    store.create_run(run)
    data = {place: Sample(name(place), text, "the answer", metadata(place)) for place in range(samples)}
    batch: list[EvalResult] = []
    for result in _results(run, trial, name):
        batch.append(result)
        if len(batch) == 5_000:
            store.commit(run.run_id, batch, data)
            batch.clear()
            data = {}
    store.commit(run.run_id, batch, data)
    store.update_run(run.run_id, status=changes.get("status", "finished"), finished_at=1002.5)
    return EvalReport(store, store.get_run(run.run_id))


def _results(
    run: RunRecord, trial: Callable[[int, str, int], Made | None], name: Callable[[int], str]
) -> Iterable[EvalResult]:
    for ordinal in range(run.planned):
        place, experiment, repeat = run.split(ordinal)
        made = trial(place, run.experiments[experiment], repeat)
        if made is None:
            continue
        score = None if made.value is None else Score(made.value, made.passed, made.reason, made.metrics)
        yield EvalResult(
            key=TrialKey(run.run_id, run.experiments[experiment], name(place), repeat),
            ordinal=ordinal,
            outcome=made.outcome,
            score=score,
            output=made.output if score is not None else None,
            latency_ms=made.latency_ms,
            usage=made.usage,
            error=made.error,
            stage=None if score is not None else "task",
            execution=ordinal + 1,
            started_at=1000.0,
        )


def hostile_report(**changes: Any) -> EvalReport:
    """A report in which every text that someone else wrote is hostile."""

    def trial(place: int, experiment: str, repeat: int) -> Made:
        if place == 0:
            return Made(None, "task_error", error=HOSTILE)
        return Made(place % 2, reason=HOSTILE, output=HOSTILE, metrics=(Metric(HOSTILE[:200], 0.5),))

    options: dict[str, Any] = {
        "samples": 6, "experiments": (HOSTILE[:120], "b | c"), "name": lambda place: f"{place} {HOSTILE}",
        "metadata": lambda place: {"topic": HOSTILE}, "text": {"ask": HOSTILE}, "suite": HOSTILE,
        "dataset_name": HOSTILE, "evaluator": HOSTILE, "notes": {"stopped": HOSTILE},
    }  # fmt: skip
    return made_report(trial, **{**options, **changes})
