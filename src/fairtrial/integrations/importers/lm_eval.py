"""Import samples of lm-evaluation-harness, written with `--log_samples`.

`samples_<task>_<time>.jsonl` becomes a run: the task is the suite, a document a sample, the model the experiment. The
model, and which way its metrics are better, are in `results_<time>.json` beside it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fairtrial.base.codec import parse_foreign_json
from fairtrial.base.foreign import inside
from fairtrial.data.dataset import Dataset
from fairtrial.data.index import placed, read_lines
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, DataError, DatasetError
from fairtrial.integrations.importers.records import (
    ScoreRanges,
    SourceScore,
    as_mapping,
    as_number,
    as_text,
    experiment_name,
    file_hash,
    files_in,
    is_id,
    load_json_object,
    reference,
    suite_name,
)
from fairtrial.runs.imported import Import, ImportedRun, ImportedSuite, ImportedTrial

type Row = dict[str, Any]

_FILE = re.compile(r"samples_(?P<task>.+)_(?P<time>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.jsonl")


class LmEvalSamples:
    """Reads a file of samples, or a folder of them."""

    def recognizes(self, path: Path) -> bool:
        """Return whether a file, or a file in a folder, has the name that the harness gives to samples."""
        return bool(_files(path))

    def read(self, path: Path) -> Import:
        """Read a file, or all files of a folder."""
        files = _files(path) or ([path] if path.is_file() else [])
        if not files:
            raise DataError(f"{path} must have samples of lm-evaluation-harness (it has no samples_TASK_TIME.jsonl)")
        return Import(tuple(_TaskSamples(file).suite() for file in files))


def _files(path: Path) -> list[Path]:
    found = sorted(files_in(path, "**/samples_*.jsonl")) if path.is_dir() else [path]
    return [file for file in found if _FILE.fullmatch(file.name)]


class _TaskSamples:
    """One file of samples. A document has a row for each filter of its answers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        named = _FILE.fullmatch(path.name)
        self.task, self.time = (named["task"], named["time"]) if named else (path.stem, "")
        self.ranges = ScoreRanges()
        self.unusable: set[str] = set()  # Metrics whose values are no numbers, as those of a whole corpus.
        samples: list[Sample[Any, Any]] = []
        for rows in self._documents():
            self.ranges.add(self._scores(rows))
            samples.append(_sample(rows[0]))
        if not samples:
            raise DataError(f"{path} must have samples (it has none)")
        self.dataset: Dataset[Any, Any] = Dataset(samples, name=self.task)

    @cached_property
    def results(self) -> Mapping[str, Any]:
        """The results of the same run, which are in a file beside the samples; empty if there is none."""
        file = inside(self.path.parent, f"results_{self.time}.json")
        return load_json_object(file) if file.is_file() else {}

    def _rows(self) -> Iterator[Row]:
        for number, _, line in read_lines(self.path):
            try:
                row = parse_foreign_json(line)  # The harness writes NaN, which is no JSON.
            except CodecError as error:
                raise placed(error, self.path, number) from None
            fields = as_mapping(row)
            metrics = fields.get("metrics")
            named = isinstance(metrics, list) and all(isinstance(metric, str) for metric in metrics)
            if not is_id(fields.get("doc_id")) or not named:
                problem = "a sample must have 'doc_id' and a list 'metrics' of names"
                raise DatasetError(problem, path=self.path, line=number)
            yield row

    def _documents(self) -> Iterator[list[Row]]:
        grouped: dict[str, list[Row]] = {}
        for row in self._rows():
            grouped.setdefault(str(row["doc_id"]), []).append(row)
        yield from grouped.values()

    def _scores(self, rows: list[Row]) -> list[SourceScore]:
        found: list[SourceScore] = []
        directions = as_mapping(as_mapping(self.results.get("higher_is_better")).get(self.task))
        for row in rows:
            filter = as_text(row.get("filter")) or "none"
            for metric in row["metrics"]:
                value = row.get(metric)
                number = float(value) if isinstance(value, bool) else as_number(value)
                if number is None and value is not None and not isinstance(value, float):
                    self.unusable.add(metric)
                better = directions.get(metric)
                name = metric if filter == "none" else f"{metric},{filter}"
                found.append(SourceScore(name, number, higher_is_better=better is not False))
        return found

    def suite(self) -> ImportedSuite:
        """Return the task as a suite with one run."""
        model = as_text(self.results.get("model_name")) or as_text(self.results.get("model_source")) or "model"
        created = as_number(self.results.get("date")) or self.path.stat().st_mtime
        seconds = as_number(_seconds(self.results.get("total_evaluation_time_seconds"))) or 0.0
        identity = file_hash(self.path)
        name = experiment_name(model)
        run = ImportedRun(
            source_id=f"{self.path.name}:{identity[:12]}",
            name=self.path.name,
            experiments=(name,),
            params={name: {"model": model}},
            dataset=self.dataset,
            repeats=1,
            rows=len(self.dataset),
            trials=self._trials,
            content=identity,
            created_at=created,
            finished_at=created + seconds,
            tags={"task": self.task},
            origin={
                "task": self.task,
                "model": model,
                "file": self.path.name,
                "reported": _reported(as_mapping(as_mapping(self.results.get("results")).get(self.task))),
            },
            remarks=tuple(self._remarks()),
        )
        return ImportedSuite(suite_name(self.task), run.source_id, self.task, self.dataset, runs=(run,))

    def _remarks(self) -> Iterator[str]:
        if not self.results:
            yield f"there is no results_{self.time}.json beside it: the name of the model is unknown"
        if self.unusable:
            yield f"{', '.join(sorted(self.unusable))}: not one number per document, so not imported"
        outcomes = Counter(trial.outcome for trial in self._trials())
        if outcomes["scorer_error"]:
            yield f"{outcomes['scorer_error']:,} documents have no score"
        yield from self.ranges.remarks()
        yield "the source has no verdicts: a value of at least 0.5 passes"

    def _trials(self) -> Iterator[ImportedTrial]:
        for place, rows in enumerate(self._documents()):
            score = self.ranges.score(self._scores(rows))
            facts = {name: rows[0][name] for name in ("doc_hash", "prompt_hash", "target_hash") if rows[0].get(name)}
            yield ImportedTrial(
                sample=place,
                outcome="scorer_error" if score is None else "scored",
                score=score,
                output=_output(rows),
                error="the source has no score" if score is None else None,
                stage="score" if score is None else None,
                metadata=facts,
            )


def _sample(row: Row) -> Sample[Any, Any]:
    return Sample(str(row["doc_id"]), row.get("doc"), reference(row.get("target")))


def _output(rows: list[Row]) -> Any:
    """Return the answer after the filter, or one for every filter; of a list with one answer, that one."""
    answers = {as_text(row.get("filter")) or "none": _only(row.get("filtered_resps")) for row in rows}
    return next(iter(answers.values())) if len(answers) == 1 else answers


def _only(answers: Any) -> Any:
    return answers[0] if isinstance(answers, list) and len(answers) == 1 else answers


def _seconds(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _reported(results: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: number
        for name, value in results.items()
        if (number := as_number(value)) is not None and "_stderr" not in name
    }
