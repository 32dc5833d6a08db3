"""Write a stored run as logs of Inspect, which `inspect view` opens. Inspect itself is not needed."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Hashable, Iterator, Mapping
from datetime import UTC, datetime
from math import fsum
from pathlib import Path
from typing import Any

from fairtrial.base.codec import dumps
from fairtrial.data.sample import Sample
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.integrations.importers.inspect_log import OWN_ENDING, OWN_RUN
from fairtrial.integrations.tracing.facts import trials_with_samples
from fairtrial.store.export import opened
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.store.records import weight_of
from fairtrial.store.totals import SampleSums, analysed_samples, sample_means
from fairtrial.trials.result import EvalResult

_ROLES = ("system", "user", "assistant", "tool")
_VALUE = "score"  # The score of a trial; its metrics are scores of their own.


def write_log(store: RunStore, run: RunRecord, target: Path) -> list[Path]:
    """Write a `.eval` file for every experiment, since a log has one model; return the files.

    A run with one experiment is written to `target`; with several, each file has the name of its experiment appended.
    """
    files: list[Path] = []
    for experiment in run.experiments:
        path = target if len(run.experiments) == 1 else target.with_stem(f"{target.stem}-{_file_part(experiment)}")
        with opened(path, binary=True) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            _ExperimentLog(store, run, experiment, archive).write()
        files.append(path)
    return files


class _ExperimentLog:
    """One experiment of a run on its way into a ZIP file."""

    def __init__(self, store: RunStore, run: RunRecord, experiment: str, archive: zipfile.ZipFile) -> None:
        self.store, self.run, self.experiment, self.archive = store, run, experiment, archive
        self.summaries: list[dict[str, Any]] = []
        self.values: dict[str, list[tuple[float, float]]] = {}  # With the weights of their samples.
        self.samples = SampleSums()
        self.weights: dict[Hashable, float] = {}
        self.ended = run.created_at
        parameters = run.params.get(experiment)
        named = parameters.get("model") if isinstance(parameters, Mapping) else None
        self.model = named if isinstance(named, str) and named else experiment

    def write(self) -> None:
        """Write the members in the order in which Inspect writes them."""
        spec, plan = self._spec(), {"name": "plan", "steps": [{"solver": "fairtrial", "params": {}}], "config": {}}
        self._add("_journal/start.json", {"version": 2, "eval": spec, "plan": plan})
        for result, sample in self._trials():
            self._add_sample(result, sample)
        self._add("summaries.json", self.summaries)
        spec["dataset"]["sample_ids"] = list(dict.fromkeys(entry["id"] for entry in self.summaries))
        self._add("header.json", {
            "version": 2,
            "status": "success" if self.run.status == "finished" else "cancelled",
            "eval": spec,
            "plan": plan,
            "results": self._results(),
            "stats": {"started_at": _iso(self.run.created_at), "completed_at": _iso(self.ended), "model_usage": {}},
        })  # fmt: skip

    def _add(self, name: str, content: Any) -> None:
        self.archive.writestr(name, json.dumps(content))

    def _trials(self) -> Iterator[tuple[EvalResult, Sample[Any, Any] | None]]:
        return trials_with_samples(self.store, self.run, content=True, experiment=self.experiment)

    def _spec(self) -> dict[str, Any]:
        return {
            "eval_id": f"{self.run.run_id}-{self.experiment}",
            "run_id": self.run.run_id,
            "created": _iso(self.run.created_at),
            "task": self.run.suite,
            "task_id": self.run.suite,
            "task_version": 0,
            "dataset": {"name": self.run.dataset_name, "samples": self.run.dataset_size},
            "model": self.model,
            "config": {"epochs": self.run.repeats},
            "packages": {},
            "metadata": {OWN_RUN: self.run.run_id, "fairtrial_experiment": self.experiment},
        }

    def _add_sample(self, result: EvalResult, sample: Sample[Any, Any] | None) -> None:
        scores = _scores(result)
        weight = self.weights[result.sample_id] = weight_of(result) or 1.0
        for name, score in scores.items():
            self.values.setdefault(name, []).append((score["value"], weight))
        if result.score is not None and self.run.split(result.ordinal)[0] < analysed_samples(self.run):
            self.samples.add(result.sample_id, result.score.passed, result.score.value, result.score.reward)
        self.ended = max(self.ended, result.started_at + result.latency_ms / 1000)
        given = None if sample is None else sample.input
        messages = [_message(message, place) for place, message in enumerate(result.trajectory.messages)]
        usage = {
            "input_tokens": result.usage.input_tokens - result.usage.cached_tokens,
            "output_tokens": result.usage.output_tokens,
            "total_tokens": result.usage.total_tokens,
            "input_tokens_cache_read": result.usage.cached_tokens,
        }
        seconds = result.latency_ms / 1000
        shared = {
            "id": result.sample_id,
            "epoch": result.repeat + 1,
            "input": _text(given),
            "target": "" if sample is None or sample.expected is None else _text(sample.expected),
            "scores": scores,
            "metadata": {} if sample is None else json.loads(dumps(sample.metadata)),
            "model_usage": {self.model: usage},
            "started_at": _iso(result.started_at),
            "completed_at": _iso(result.started_at + seconds),
            "total_time": seconds,
            "working_time": seconds,
            "uuid": f"{self.run.run_id}-{result.ordinal}",
        }
        answer = _text(result.output) if result.output is not None else ""
        choice = {"message": {"role": "assistant", "content": answer, "source": "generate"}, "stop_reason": "stop"}
        whole = {
            **shared,
            "messages": messages or [{"id": "m0", "role": "user", "content": _text(given)}],
            "output": {"model": self.model, "choices": [choice], "completion": answer},
            "store": {OWN_ENDING: [result.outcome, result.stage]},
            "events": [],
            "attachments": {},
        }
        summary = {**shared, "completed": True, "retries": 0, "message_count": len(messages)}
        if result.error is not None:
            whole["error"] = {"message": result.error, "traceback": result.error, "traceback_ansi": result.error}
            summary["error"] = result.error
        self._add(f"samples/{result.sample_id}_epoch_{result.repeat + 1}.json", whole)
        self.summaries.append(summary)

    def _results(self) -> dict[str, Any]:
        scored = self.values.get(_VALUE, [])
        scores = []
        for name, values in self.values.items():
            figures = {"mean": fsum(value * weight for value, weight in values) / fsum(weight for _, weight in values)}
            shares = self.samples.shares(self.weights.__getitem__)
            if name == _VALUE and (rate := sample_means(shares).pass_rate) is not None:
                figures["pass_rate"] = rate
            metrics = {key: {"name": key, "value": value, "params": {}} for key, value in figures.items()}
            scores.append({"name": name, "scorer": "fairtrial", "params": {}, "metrics": metrics})
        return {"total_samples": len(self.summaries), "completed_samples": len(scored), "scores": scores}


def _scores(result: EvalResult) -> dict[str, Any]:
    """Return the score of a trial, then its metrics by name."""
    score = result.score
    if score is None:
        return {}
    found: dict[str, Any] = {
        _VALUE: {
            "value": score.value,
            "answer": _text(result.output),
            "explanation": score.reason or None,
            "metadata": {"passed": score.passed},
        }
    }
    for metric in score.metrics:
        name = metric.name if metric.name != _VALUE else f"metric.{metric.name}"
        found[name] = {"value": metric.value, "explanation": metric.reason or None}
        if metric.passed is not None:
            found[name]["metadata"] = {"passed": metric.passed}
    return found


def _message(message: ChatMessage, place: int) -> dict[str, Any]:
    role = message.role if message.role in _ROLES else "system" if message.role == "developer" else "user"
    content: Any = message.text
    if message.reasoning:
        content = [{"type": "reasoning", "reasoning": message.reasoning}, {"type": "text", "text": message.text}]
    written: dict[str, Any] = {"id": f"m{place}", "role": role, "content": content}
    if role == "assistant" and message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id or f"m{place}-{number}",
                "function": call.name,
                "arguments": json.loads(dumps(call.arguments)),
                "type": "function",
            }
            for number, call in enumerate(message.tool_calls)
        ]
    if role == "tool" and message.name:
        written["tool_call_id"] = message.name
    return written


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat()


def _file_part(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
