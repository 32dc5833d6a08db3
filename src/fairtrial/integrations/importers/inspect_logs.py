"""Import logs of Inspect: a log becomes a run, its model the experiment, its epochs the repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.errors import DataError
from fairtrial.integrations.importers.inspect_log import (
    OWN_ENDING,
    OWN_RUN,
    InspectLog,
    input_of,
    sample_usage,
    scores_of,
    session_of,
    text_of,
)
from fairtrial.integrations.importers.records import Import, ImportedRun, ImportedSuite, ImportedTrial
from fairtrial.integrations.importers.scores import ScoreRanges, SourceScore
from fairtrial.integrations.importers.values import (
    as_mapping,
    as_milliseconds,
    as_number,
    as_objects,
    as_text,
    as_time,
    experiment_name,
    file_hash,
    file_start,
    files_in,
    reference,
    suite_name,
)
from fairtrial.trials.result import Outcome, Stage

_ERRORS = ("task_error", "scorer_error", "timeout", "dead_letter")


class InspectLogs:
    """Reads `.eval` and `.json` logs, or a folder of them."""

    def recognizes(self, path: Path) -> bool:
        """Return whether a file is a log, or a folder has logs."""
        if path.is_dir():
            return any(path.glob("*.eval"))
        if path.suffix.lower() == ".eval":
            return file_start(path, ".eval").startswith(b"PK")
        start = file_start(path, ".json")
        return b'"status"' in start and b'"eval"' in start and b'"version"' in start

    def read(self, path: Path) -> Import:
        """Read a log, or all logs of a folder."""
        if path.is_dir():
            logs = sorted(file for file in files_in(path) if self.recognizes(file))
            if not logs:
                raise DataError(f"{path} must have logs of Inspect (it has no .eval file)")
        else:
            logs = [path]
        left_out: list[str] = []
        suites: list[ImportedSuite] = []
        for file in logs:
            run = _LoggedRun(InspectLog(file))
            if run.dataset:
                suites.append(run.suite())
            else:
                left_out.append(f"{file.name}: it has no samples ({run.status})")
        return Import(tuple(suites), tuple(left_out))


class _LoggedRun:
    """One log. It is read twice: once for ids and the range of scores, once to store its trials."""

    def __init__(self, log: InspectLog) -> None:
        self.log = log
        self.header = log.header
        self.eval = as_mapping(self.header.get("eval"))
        self.status = as_text(self.header.get("status")) or "unknown"
        if not as_text(self.eval.get("task")):
            raise DataError(f"{log.path} must be a log of Inspect (its header names no task)")
        self.own = OWN_RUN in as_mapping(self.eval.get("metadata"))
        self.ranges = ScoreRanges()
        self.places: dict[str, int] = {}
        self.epochs = 1
        self.tally: Counter[str] = Counter()
        samples: list[Sample[Any, Any]] = []
        for sample in log.samples():
            self.ranges.add(scores_of(sample, own=self.own))
            self.epochs = max(self.epochs, sample["epoch"])
            sample_id = str(sample["id"])
            if sample_id not in self.places:
                self.places[sample_id] = len(samples)
                metadata = as_mapping(sample.get("metadata"))
                samples.append(Sample(sample_id, input_of(sample), reference(sample.get("target")), metadata))
        for sample in log.samples():
            outcome = self._outcome(sample, scores_of(sample, own=self.own))[0]
            self.tally[outcome] += 1
        name = as_text(as_mapping(self.eval.get("dataset")).get("name")) or suite_name(self._task)
        self.dataset: Dataset[Any, Any] = Dataset(samples, name=name)

    @property
    def _task(self) -> str:
        return str(self.eval["task"]).rpartition("/")[2]

    def suite(self) -> ImportedSuite:
        """Return the task of the log with its run."""
        run = self._run()
        return ImportedSuite(suite_name(self._task), run.source_id, self._task, self.dataset, runs=(run,))

    def _run(self) -> ImportedRun:
        model = as_text(self.eval.get("model")) or "none"
        stats = as_mapping(self.header.get("stats"))
        created = as_time(stats.get("started_at")) or as_time(self.eval.get("created"))
        finished = self.status == "success"
        source_id = as_text(self.eval.get("eval_id")) or as_text(self.eval.get("task_id")) or self.log.path.name
        parameters = {"model": model, **_arguments(self.eval)}
        return ImportedRun(
            source_id=source_id,
            name=self.log.path.name,
            experiments=(experiment_name(model),),
            params={experiment_name(model): parameters},
            dataset=self.dataset,
            repeats=self.epochs,
            rows=self.tally.total(),
            trials=self._trials,
            content=file_hash(self.log.path),
            created_at=created,
            finished_at=as_time(stats.get("completed_at")) or created,
            status="finished" if finished else "stopped",
            stopped=None if finished else f"{self.status} at the source",
            tags={"task": self._task},
            origin={
                "task": as_text(self.eval.get("task")),
                "model": model,
                "file": self.log.path.name,
                "status": self.status,
                "reported": reported_metrics(self.header),
                "packages": dict(as_mapping(self.eval.get("packages"))),
            },
            remarks=tuple(self._remarks()),
        )

    def _remarks(self) -> Iterator[str]:
        results = as_mapping(self.header.get("results"))
        if errors := self.tally["task_error"]:
            yield f"{errors:,} samples ended with an error, which the source leaves out of its figures"
        if unscored := self.tally["scorer_error"]:
            yield f"{unscored:,} samples have no score of {self.ranges.headline or 'any scorer'} (NaN or missing)"
        planned = as_number(results.get("total_samples"))
        present = self.tally.total()
        if planned is not None and planned > present:
            yield f"the source planned {planned:,.0f} samples, and the log has {present:,}"
        reducers = {as_text(score.get("reducer")) for score in as_objects(results.get("scores"))} - {"", "mean"}
        if self.epochs > 1 and reducers:
            yield f"the source reduces epochs by {', '.join(sorted(reducers))}; here every epoch is a trial"
        yield from self.ranges.remarks()
        if not self.own:
            yield "the source has no verdicts: a value of at least 0.5 passes"

    def _trials(self) -> Iterator[ImportedTrial]:
        for sample in self.log.samples():
            yield self._trial(sample)

    def _outcome(self, sample: Mapping[str, Any], scores: list[SourceScore]) -> tuple[Outcome, Stage | None, str]:
        error = as_text(as_mapping(sample.get("error")).get("message")) or as_text(sample.get("error"))
        ending = as_mapping(sample.get("store")).get(OWN_ENDING) if self.own else None
        if isinstance(ending, list) and len(ending) == 2 and ending[0] in _ERRORS:
            return ending[0], ending[1], error
        if error or sample.get("error"):
            return "task_error", "task", error or "the source recorded an error and no message"
        if self.ranges.score(scores) is None:
            return "scorer_error", "score", f"the source has no score of {self.ranges.headline or 'any scorer'}"
        return "scored", None, ""

    def _trial(self, sample: Mapping[str, Any]) -> ImportedTrial:
        scores = scores_of(sample, own=self.own)
        outcome, stage, error = self._outcome(sample, scores)
        facts: dict[str, Any] = {"uuid": as_text(sample.get("uuid"))}
        if limit := as_mapping(sample.get("limit")):
            facts["limit"] = as_text(limit.get("type"))
        if outcome != "scored" and scores:
            facts["scores"] = {score.name: score.value for score in scores}
        output = as_mapping(sample.get("output"))
        return ImportedTrial(
            sample=self.places[str(sample["id"])],
            outcome=outcome,
            repeat=max(sample["epoch"] - 1, 0),
            score=self.ranges.score(scores) if outcome == "scored" else None,
            output=as_text(output.get("completion")) or _last_answer(output),
            error=error or None,
            stage=stage,
            usage=sample_usage(sample),
            latency_ms=as_milliseconds(sample.get("total_time"), 1000),
            started_at=as_time(sample.get("started_at")),
            metadata=facts,
            events=session_of(sample),
        )


def reported_metrics(header: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that the source reports, as "scorer/metric"."""
    return {
        f"{as_text(score.get('name'))}/{name}": value
        for score in as_objects(as_mapping(header.get("results")).get("scores"))
        for name, metric in as_mapping(score.get("metrics")).items()
        if (value := as_number(as_mapping(metric).get("value"))) is not None
    }


def _arguments(eval: Mapping[str, Any]) -> dict[str, Any]:
    arguments = as_mapping(eval.get("task_args"))
    return {"task_args": dict(arguments)} if arguments else {}


def _last_answer(output: Mapping[str, Any]) -> str | None:
    choices = as_objects(output.get("choices"))
    return text_of(as_mapping(choices[0].get("message"))) or None if choices else None
