"""Import results of promptfoo, written by `promptfoo eval -o results.json` or `promptfoo export eval`.

An eval becomes a run. A provider with a prompt becomes an experiment, a test a sample, and the same test with the same
variables again a repeat. Score and verdict of a trial are the source's own; its assertions become criteria.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairtrial.base.codec import digest
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import PromptExecuted, TokenUsage
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import DataError
from fairtrial.integrations.importers.openai_graders import unused
from fairtrial.integrations.importers.records import (
    ScoreRanges,
    SourceScore,
    as_mapping,
    as_milliseconds,
    as_number,
    as_objects,
    as_text,
    as_time,
    experiment_name,
    file_hash,
    file_start,
    load_json_object,
    reference,
    suite_name,
    usage_of,
)
from fairtrial.runs.imported import Import, ImportedRun, ImportedSuite, ImportedTrial

type Row = dict[str, Any]

_ERROR = 2  # failureReason: 0 none, 1 an assertion failed, 2 an error.


class PromptfooResults:
    """Reads one file of results."""

    def recognizes(self, path: Path) -> bool:
        """Return whether a file has results of promptfoo."""
        start = file_start(path, ".json")
        return b'"evalId"' in start and b'"results"' in start

    def read(self, path: Path) -> Import:
        """Read a file."""
        document = load_json_object(path)
        results = as_mapping(document.get("results"))
        rows = as_objects(results.get("results"))
        if not rows:
            raise DataError(f"{path} must be results of promptfoo (it has no results.results, or they are empty)")
        return Import((_PromptfooEval(path, document, rows).suite(),))


class _PromptfooEval:
    """One eval: its rows, and their place in a plan of samples, experiments and repeats."""

    def __init__(self, path: Path, document: Mapping[str, Any], rows: list[Row]) -> None:
        self.path = path
        self.document = document
        self.results = as_mapping(document.get("results"))
        self.config = as_mapping(document.get("config"))
        # The source writes rows as they end; their numbers have the order of tests and prompts.
        self.rows = sorted(
            rows, key=lambda row: (as_number(row.get("testIdx")) or 0, as_number(row.get("promptIdx")) or 0)
        )
        self.wide = any(not 0.0 <= (as_number(row.get("score")) or 0.0) <= 1.0 for row in rows)
        self.ranges = ScoreRanges()
        self.experiments = _experiments(self.rows)
        self.samples: dict[str, Sample[Any, Any]] = {}
        self.places: list[tuple[int, int, int]] = []  # Sample, experiment and repeat of every row.
        order = {key: place for place, key in enumerate(self.experiments)}
        identities: dict[str, int] = {}
        seen: Counter[tuple[int, int]] = Counter()
        for row in self.rows:
            self.ranges.add(_scores(row))
            sample = identities.setdefault(_identity(row), len(identities))
            if sample == len(self.samples):
                self.samples[str(sample)] = _sample(str(sample), row)
            experiment = order[_experiment(row)]
            self.places.append((sample, experiment, seen[sample, experiment]))
            seen[sample, experiment] += 1
        self.repeats = max(seen.values())

    def suite(self) -> ImportedSuite:
        """Return the eval as a suite with one run."""
        title = as_text(self.config.get("description")) or self.path.stem
        name = suite_name(title)
        dataset: Dataset[Any, Any] = Dataset(self.samples.values(), name=name)
        source_id = as_text(self.document.get("evalId")) or self.path.name
        created = as_time(self.results.get("timestamp"))
        duration = as_number(as_mapping(self.results.get("stats")).get("durationMs")) or 0.0
        run = ImportedRun(
            source_id=source_id,
            name=self.path.name,
            experiments=tuple(self.experiments.values()),
            params={self.experiments[key]: _parameters(key) for key in self.experiments},
            dataset=dataset,
            repeats=self.repeats,
            rows=len(self.rows),
            trials=self._trials,
            content=file_hash(self.path),
            created_at=created,
            finished_at=created + duration / 1000,
            origin={
                "eval": source_id,
                "file": self.path.name,
                "description": as_text(self.config.get("description")),
                "reported": _reported(self.results),
                "version": as_text(as_mapping(self.document.get("metadata")).get("promptfooVersion")),
            },
            remarks=tuple(self._remarks()),
        )
        return ImportedSuite(name, source_id, title, dataset, runs=(run,))

    def _remarks(self) -> Iterator[str]:
        if errors := sum(_is_error(row) for row in self.rows):
            yield f"{errors:,} tests ended with an error, which the source counts with a score of 0"
        if self.wide:
            yield "some scores of tests are not from 0 to 1: their verdicts are the values, and `score` is a metric"
        if wide := [name for name in self.ranges.names if name in self.ranges.wide]:
            yield f"imported as metrics only, as not from 0 to 1: {', '.join(wide)}"

    def _trials(self) -> Iterator[ImportedTrial]:
        for (sample, experiment, repeat), row in zip(self.places, self.rows, strict=True):
            yield self._trial(row, sample, experiment, repeat)

    def _trial(self, row: Row, sample: int, experiment: int, repeat: int) -> ImportedTrial:
        response = as_mapping(row.get("response"))
        failed = _is_error(row)
        error = as_text(row.get("error")) or as_text(response.get("error")) or "the source recorded no message"
        usage = _usage(row)
        return ImportedTrial(
            sample=sample,
            outcome="task_error" if failed else "scored",
            experiment=experiment,
            repeat=repeat,
            score=None if failed else self._score(row),
            output=response.get("output"),
            error=error if failed else None,
            stage="task" if failed else None,
            usage=usage,
            latency_ms=as_milliseconds(row.get("latencyMs")),
            metadata={"row": as_text(row.get("id"))} if as_text(row.get("id")) else {},
            events=_events(row, usage),
        )

    def _score(self, row: Row) -> Any:
        value, passed = as_number(row.get("score")), row.get("success") is True
        scores = _scores(row)
        if self.wide:  # The score of every test, as the source has it.
            scores.append(SourceScore("score", value, higher_is_better=None))
        within = value is not None and 0.0 <= value <= 1.0
        # Without a score from 0 to 1, the verdict is the value.
        return self.ranges.score(scores, value=value if within else float(passed), passed=passed)


def _is_error(row: Row) -> bool:
    if "failureReason" in row:
        return bool(row["failureReason"] == _ERROR)
    return bool(as_mapping(row.get("response")).get("error"))


def _identity(row: Row) -> str:
    """Return what is the same for a test that is repeated."""
    test = as_mapping(row.get("testCase"))
    return digest([row.get("vars"), test.get("description"), test.get("assert")])


def _sample(sample_id: str, row: Row) -> Sample[Any, Any]:
    test = as_mapping(row.get("testCase"))
    asserted = as_objects(test.get("assert"))
    equal = [one["value"] for one in asserted if one.get("type") == "equals" and "value" in one]
    metadata = dict(as_mapping(test.get("metadata")))
    if as_text(test.get("description")):
        metadata["description"] = test["description"]
    return Sample(sample_id, row.get("vars"), reference(equal[0] if len(equal) == 1 else None), metadata)


def _experiment(row: Row) -> tuple[str, str]:
    """Return provider and prompt of a row."""
    provider, prompt = row.get("provider"), as_mapping(row.get("prompt"))
    name = as_text(as_mapping(provider).get("label")) or as_text(as_mapping(provider).get("id")) or as_text(provider)
    return name, as_text(prompt.get("label")) or as_text(prompt.get("raw")) or str(row.get("promptIdx"))


def _experiments(rows: list[Row]) -> dict[tuple[str, str], str]:
    """Return a name for every provider with a prompt; prompts are named only if there are several."""
    keys = list(dict.fromkeys(map(_experiment, rows)))
    several = len({prompt for _, prompt in keys}) > 1
    used: set[str] = set()
    return {
        (provider, prompt): unused(experiment_name(f"{provider} {prompt}" if several else provider), used)
        for provider, prompt in keys
    }


def _parameters(key: tuple[str, str]) -> dict[str, Any]:
    provider, prompt = key
    return {"provider": provider, "prompt": prompt}


def _scores(row: Row) -> list[SourceScore]:
    """Return the assertions of a row, and the named scores that promptfoo computes from them."""
    found: list[SourceScore] = []
    used: set[str] = set()
    named = as_mapping(row.get("namedScores"))
    for part in as_objects(as_mapping(row.get("gradingResult")).get("componentResults")):
        assertion = as_mapping(part.get("assertion"))
        name = as_text(assertion.get("metric")) or as_text(assertion.get("type")) or "assertion"
        verdict = part.get("pass")
        passed = verdict if isinstance(verdict, bool) else None
        unique = f"{name}.{as_text(assertion.get('type')) or 'assertion'}" if name in named else name
        found.append(SourceScore(unused(unique, used, "#"), as_number(part.get("score")), passed,
                                 as_text(part.get("reason"))))  # fmt: skip
    found += [SourceScore(unused(name, used, "#"), as_number(value)) for name, value in named.items()]
    return found


def _usage(row: Row) -> TokenUsage:
    response = as_mapping(row.get("response"))
    tokens = as_mapping(response.get("tokenUsage")) or as_mapping(row.get("tokenUsage"))
    cost = row.get("cost") if row.get("cost") else response.get("cost")
    return usage_of(tokens.get("prompt"), tokens.get("completion"), tokens.get("cached"), cost)


def _events(row: Row, usage: TokenUsage) -> tuple[object, ...]:
    response = as_mapping(row.get("response"))
    provider, _ = _experiment(row)
    cached = response.get("cached") is True
    events: list[object] = [ChatMessage("user", as_text(as_mapping(row.get("prompt")).get("raw")))]
    events.append(PromptExecuted(adapter="promptfoo", model=provider, usage=usage, cached=cached))
    if isinstance(response.get("output"), str):
        events.append(ChatMessage("assistant", response["output"]))
    return tuple(events)


def _reported(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what promptfoo counts for every provider with a prompt."""
    names = ("score", "testPassCount", "testFailCount", "testErrorCount", "namedScores", "namedScoresCount")
    return [
        {
            "provider": as_text(prompt.get("provider")),
            "prompt": as_text(prompt.get("label")),
            **{name: metrics[name] for name in names if name in (metrics := as_mapping(prompt.get("metrics")))},
        }
        for prompt in as_objects(results.get("prompts"))
    ]
