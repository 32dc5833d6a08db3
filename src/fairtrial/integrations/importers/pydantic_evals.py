"""Import reports of pydantic-evals, saved as JSON by `EvaluationReportAdapter.dump_json`.

A report becomes a run. Scores and assertions become scores, metrics become measurements, labels become metadata. A
trial passes if all its assertions hold; without assertions, if its first score is at least 0.5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairtrial.base.codec import digest
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.errors import DataError
from fairtrial.integrations.importers.records import (
    ScoreRanges,
    SourceScore,
    as_mapping,
    as_milliseconds,
    as_number,
    as_objects,
    as_text,
    experiment_name,
    file_hash,
    file_start,
    load_json_object,
    reference,
    suite_name,
    usage_of,
)
from fairtrial.runs.imported import Import, ImportedRun, ImportedSuite, ImportedTrial
from fairtrial.trials.result import Outcome, Stage


class PydanticEvals:
    """Reads one report."""

    def recognizes(self, path: Path) -> bool:
        """Return whether a file is a report."""
        if b'"cases"' not in file_start(path, ".json", 1 << 16):
            return False
        try:
            report = load_json_object(path)
        except DataError:
            return False
        listed = [*as_objects(report.get("cases")), *as_objects(report.get("failures"))]
        return isinstance(report.get("name"), str) and any("task_duration" in c or "error_message" in c for c in listed)

    def read(self, path: Path) -> Import:
        """Read a report."""
        report = load_json_object(path)
        if not isinstance(report.get("cases"), list):
            raise DataError(f"{path} must be a report of pydantic-evals (it has no list of cases)")
        return Import((_Report(path, report).suite(),))


class _Report:
    """A report with its cases and failures, in one list."""

    def __init__(self, path: Path, report: Mapping[str, Any]) -> None:
        self.path = path
        self.name = as_text(report.get("name")) or path.stem
        self.metadata = as_mapping(report.get("experiment_metadata"))
        self.cases = [*as_objects(report.get("cases")), *as_objects(report.get("failures"))]
        if not self.cases:
            raise DataError(f"{path} must have cases or failures (it has none)")
        self.ranges = ScoreRanges()
        samples: dict[str, Sample[Any, Any]] = {}
        repeats: Counter[str] = Counter()
        self.places: list[tuple[int, int]] = []  # Sample and repeat of every case.
        order: dict[str, int] = {}
        for case in self.cases:
            self.ranges.add(_scores(case))
            sample = _sample(case)
            if samples.setdefault(sample.id, sample) != sample:
                raise DataError(f"{path}: two cases with different inputs are both named {sample.id!r}")
            place = order.setdefault(sample.id, len(order))
            self.places.append((place, repeats[sample.id]))
            repeats[sample.id] += 1
        self.repeats = max(repeats.values())
        self.dataset: Dataset[Any, Any] = Dataset(samples.values(), name=suite_name(self.name))

    def suite(self) -> ImportedSuite:
        """Return the report as a suite with one run."""
        identity = file_hash(self.path)
        name = experiment_name(self.name)
        changed = self.path.stat().st_mtime  # Reports have no time of their own.
        run = ImportedRun(
            source_id=f"{self.name}:{identity[:12]}",
            name=self.name,
            experiments=(name,),
            params={name: dict(self.metadata)},
            dataset=self.dataset,
            repeats=self.repeats,
            rows=len(self.cases),
            trials=self._trials,
            content=identity,
            created_at=changed,
            finished_at=changed,
            origin={"report": self.name, "file": self.path.name},
            remarks=tuple(self._remarks()),
        )
        return ImportedSuite(suite_name(self.name), run.source_id, self.name, self.dataset, runs=(run,))

    def _remarks(self) -> Iterator[str]:
        outcomes = Counter(trial.outcome for trial in self._trials())
        if failures := outcomes["task_error"]:
            yield f"{failures:,} cases failed, which the source leaves out of its averages"
        if unscored := outcomes["scorer_error"]:
            yield f"{unscored:,} cases have no score"
        failed = sum(len(as_objects(case.get("evaluator_failures"))) for case in self.cases)
        if failed:
            yield f"{failed:,} evaluations failed at the source"
        yield from self.ranges.remarks()
        if not any(as_mapping(case.get("assertions")) for case in self.cases):
            yield "the source has no verdicts: a value of at least 0.5 passes"

    def _trials(self) -> Iterator[ImportedTrial]:
        for (sample, repeat), case in zip(self.places, self.cases, strict=True):
            yield self._trial(case, sample, repeat)

    def _trial(self, case: Mapping[str, Any], sample: int, repeat: int) -> ImportedTrial:
        score = None
        outcome: Outcome = "task_error"
        stage: Stage | None = "task"
        error = as_text(case.get("error_message")) or None
        if "error_message" not in case:
            found = (as_mapping(verdict).get("value") for verdict in as_mapping(case.get("assertions")).values())
            verdicts = [verdict for verdict in found if isinstance(verdict, bool)]
            score = self.ranges.score(_scores(case), passed=all(verdicts) if verdicts else None)
            outcome, stage = ("scored", None) if score is not None else ("scorer_error", "score")
            error = None if score is not None else _failure(case)
        metrics = as_mapping(case.get("metrics"))
        labels = {name: as_mapping(label).get("value") for name, label in as_mapping(case.get("labels")).items()}
        facts = {"case": as_text(case.get("name")), "labels": labels, "attributes": case.get("attributes")}
        return ImportedTrial(
            sample=sample,
            outcome=outcome,
            repeat=repeat,
            score=score,
            output=case.get("output"),
            error=error,
            stage=stage,
            usage=usage_of(metrics.get("input_tokens"), metrics.get("output_tokens"), cost_usd=metrics.get("cost")),
            latency_ms=as_milliseconds(case.get("task_duration"), 1000),
            metadata={name: value for name, value in facts.items() if value},
        )


def _scores(case: Mapping[str, Any]) -> list[SourceScore]:
    """Return scores, assertions and metrics. A second one of a name that another kind has used says its kind."""
    found: dict[str, SourceScore] = {}
    for kind in ("scores", "assertions", "metrics"):
        for name, entry in as_mapping(case.get(kind)).items():
            unique = name if name not in found else f"{name} ({kind[:-1]})"
            value = entry if kind == "metrics" else as_mapping(entry).get("value")
            reason = as_text(as_mapping(entry).get("reason"))
            if kind == "assertions" and isinstance(value, bool):
                found[unique] = SourceScore(unique, float(value), value, reason)
            else:
                found[unique] = SourceScore(unique, as_number(value), None, reason, None if kind == "metrics" else True)
    return list(found.values())


def _sample(case: Mapping[str, Any]) -> Sample[Any, Any]:
    # A repeated case is named "name [2/3]", and its source name is that of the dataset.
    name = as_text(case.get("source_case_name")) or as_text(case.get("name")) or digest(case.get("inputs"))[:16]
    metadata = case.get("metadata")
    given = metadata if isinstance(metadata, dict) else {} if metadata is None else {"metadata": metadata}
    return Sample(name, case.get("inputs"), reference(case.get("expected_output")), given)


def _failure(case: Mapping[str, Any]) -> str:
    failures = [
        f"{as_text(failure.get('name'))}: {as_text(failure.get('error_message'))}"
        for failure in as_objects(case.get("evaluator_failures"))
    ]
    return "; ".join(failures) or "the source has no score"
