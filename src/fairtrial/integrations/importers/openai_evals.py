"""Import hosted OpenAI Evals, saved by the script in docs/how-to/coming-from-openai-evals.md.

A run of the source becomes a run, and its model becomes the experiment. A row of its data source becomes a sample;
several output items of one row become repeats. The scores of criteria are not rescaled: scores outside 0 to 1 become
metrics, and only whether such a criterion passed counts towards the value of a trial.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairtrial.base.codec import digest, parse_foreign_json
from fairtrial.base.foreign import inside
from fairtrial.data.dataset import Dataset
from fairtrial.data.index import placed, read_lines
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import PromptExecuted, TokenUsage
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import CodecError, DataError, DatasetError
from fairtrial.integrations.importers.openai_graders import reference_key, suite_code, translate, unused
from fairtrial.integrations.importers.records import (
    as_mapping,
    as_number,
    as_objects,
    as_text,
    experiment_name,
    file_hash,
    reference,
    suite_name,
    usage_of,
)
from fairtrial.runs.imported import Import, ImportedRun, ImportedSuite, ImportedTrial
from fairtrial.scoring.score import Metric, Score, mean_value, merge
from fairtrial.trials.result import Outcome, Stage

type Row = dict[str, Any]

_VERDICTS = {"pass": True, "passed": True, "fail": False, "failed": False}
_ERRORS = ("error", "errored")
_UNFINISHED = ("queued", "pending", "in_progress", "running")
_GENERATED_SUFFIX = re.compile(r"-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
_LONGEST_REASON = 4_000


class OpenAIEvals:
    """The importer of OpenAI Evals. It reads evals.jsonl, runs.jsonl, items/ and files/."""

    def recognizes(self, path: Path) -> bool:
        """Return whether a folder was made by the script."""
        return (path / "evals.jsonl").is_file() and (path / "runs.jsonl").is_file()

    def read(self, path: Path) -> Import:
        """Read everything in the folder."""
        for name in ("evals.jsonl", "runs.jsonl"):
            if not inside(path, name).is_file():
                error = DataError(f"{path} must be a folder saved from OpenAI Evals (it has no {name})")
                error.add_note("docs/how-to/coming-from-openai-evals.md has the script that saves one")
                raise error
        runs = list(_latest(path / "runs.jsonl", "eval_id"))
        left_out: list[str] = []
        suites: list[ImportedSuite] = []
        names: set[str] = set()
        for one in _latest(path / "evals.jsonl"):
            name = unused(suite_name(as_text(one.get("name")) or one["id"]), names)
            mine = sorted((run for run in runs if run["eval_id"] == one["id"]), key=lambda run: _moment(run))
            suites.append(_Eval(path, one, name, mine, left_out).suite())
        known = {suite.source_id for suite in suites}
        left_out += [f"run {run['id']}: its eval {run['eval_id']} is not in evals.jsonl" for run in runs
                     if run["eval_id"] not in known]  # fmt: skip
        return Import(tuple(suites), tuple(left_out))


def _latest(path: Path, *fields: str) -> Iterator[Row]:
    """Yield the objects of a file. Of several lines with one id, the last is used, at the place of the first."""
    found: dict[str, Row] = {}
    for number, row in _rows(path):
        for name in ("id", *fields):
            if not isinstance(row.get(name), str) or not row[name]:
                raise DatasetError(f"{name!r} must be a non-empty string (got {row.get(name)!r})",
                                   path=path, line=number)  # fmt: skip
        found[row["id"]] = row
    yield from found.values()


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    for number, _, line in read_lines(path):
        try:
            row = parse_foreign_json(line)
            if not isinstance(row, dict):
                raise CodecError("a row must be a JSON object")
        except CodecError as error:
            wrong = placed(error, path, number)
            if not line.endswith(b"\n"):
                wrong.add_note("the last line was cut off: run the save script again, which fetches what is missing")
            raise wrong from None
        yield number, row


@dataclass(slots=True)
class _SourceRun:
    """A run of the source and the file with its output items."""

    record: Row
    items: Path
    complete: bool
    ids: dict[Any, str] = field(default_factory=dict)  # Number of a data source item -> id of the sample.
    repeats: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0
    unscored: int = 0  # Grader results without a score.
    last_at: float = 0.0

    @property
    def id(self) -> str:
        return str(self.record["id"])

    @property
    def model(self) -> str:
        return as_text(self.record.get("model"))

    @property
    def experiment(self) -> str:
        name = self.model or as_text(self.record.get("name"))
        return experiment_name(name)

    def read(self) -> Iterator[Row]:
        """Yield the output items of the run."""
        for item in _latest(self.items):
            row = item.get("datasource_item")
            if not isinstance(row, dict):
                raise DatasetError(
                    f"'datasource_item' of {item['id']} must be an object (got {row!r})", path=self.items
                )
            yield item


class _Eval:
    """One eval with its runs. Every file is read twice: once for ids and score ranges, once to store its run."""

    def __init__(self, path: Path, record: Row, name: str, runs: Sequence[Row], left_out: list[str]) -> None:
        self.path = path
        self.record = record
        self.name = name
        self.left_out = left_out
        self.criteria: list[Row] = as_objects(record.get("testing_criteria"))
        used: set[str] = set()
        self.names = {_key(one): unused(as_text(one.get("name")) or "grader", used) for one in self.criteria}
        self.expected = reference_key(self.criteria)
        self.wide = {
            self.names[_key(one)] for one in self.criteria if not _within(one.get("range") or (0, 1))
        }  # Criteria with scores outside 0 to 1.
        self.samples: dict[str, Row] = {}
        self.runs = [found for run in runs if (found := self._find(run)) is not None]

    def _find(self, record: Row) -> _SourceRun | None:
        """Return the run with its items. If there are none, report the reason and return None."""
        for suffix in (".jsonl", ".part", ".unfinished"):
            items = inside(inside(self.path, "items"), f"{record['id']}{suffix}")
            if items.is_file() and items.stat().st_size:
                return _SourceRun(record, items, suffix == ".jsonl")
        error = _error_text(record.get("error"))
        why = f"{as_text(record.get('status')) or 'unknown'}{f', {error}' if error else ''}"
        self.left_out.append(f"run {record['id']} of {self.name}: it has no output items ({why})")
        return None

    def suite(self) -> ImportedSuite:
        """Return the eval as a suite."""
        self._look()
        runs = tuple(self._run(run) for run in self.runs)
        everything = Dataset([self._sample(*one) for one in self.samples.items()], name=self.name)
        graders = translate({self.names[_key(one)]: one for one in self.criteria}, self.expected)
        code = None
        if any(grader.evaluator for grader in graders):
            prompt = next((p for run in reversed(self.runs) if (p := _prompt(run.record))), None)
            title = f"{as_text(self.record.get('name')) or self.name} ({self.record['id']})"

            def code(data: str) -> str:
                models = {run.experiment: run.model for run in self.runs} or {"baseline": ""}
                return suite_code(self.name, title, data, graders, self.expected, prompt, models)

        return ImportedSuite(
            name=self.name,
            source_id=self.record["id"],
            title=as_text(self.record.get("name")) or self.name,
            dataset=everything,
            graders=tuple(grader.record for grader in graders),
            runs=runs,
            code=code,
        )

    def _look(self) -> None:
        """Collect the rows of all runs and the criteria with scores outside 0 to 1."""
        rows: dict[Any, str] = {}
        numbered = True
        for run in self.runs:
            for item in run.read():
                number, content = item.get("datasource_item_id"), digest(_row(item))
                numbered = numbered and isinstance(number, int) and rows.setdefault(number, content) == content
                for name, score, _ in self._results(item):
                    if score is not None and not 0.0 <= score <= 1.0:
                        self.wide.add(name)
        for run in self.runs:
            used: set[str] = set()
            for item in run.read():
                number = _number(item)
                if number not in run.ids:
                    # If a number means different rows in different runs, samples are identified by their content.
                    run.ids[number] = str(number) if numbered else unused(digest(_row(item))[:12], used)
                    self.samples.setdefault(run.ids[number], _row(item))

    def _sample(self, sample_id: str, row: Row) -> Sample[Any, Any]:
        if self.expected is None or self.expected not in row:
            return Sample(sample_id, row)
        return Sample(sample_id, {k: v for k, v in row.items() if k != self.expected}, reference(row[self.expected]))

    def _rows_not_run(self, run: _SourceRun) -> list[str]:
        """Add samples for rows of the data source without an output item, if the two can be matched."""
        rows = self._source_rows(run.record)
        if rows is None:
            return []
        used = {name: digest(self.samples[name]) for name in run.ids.values()}
        left = Counter(used.values())
        missing = [row for row in rows if not _take(left, digest(row))]
        if left.total():
            return []  # Some output items have rows that are not in the source, so they cannot be matched.
        names: list[str] = []
        for row in missing:
            content = digest(row)
            known = (n for n, r in self.samples.items() if n not in used and digest(r) == content)
            name = next(known, None) or unused(f"row-{content[:12]}", set(self.samples))
            self.samples.setdefault(name, row)
            used[name] = content
            names.append(name)
        return names

    def _source_rows(self, record: Row) -> list[Row] | None:
        source = as_mapping(as_mapping(record.get("data_source")).get("source"))
        if source.get("type") == "file_content" and isinstance(source.get("content"), list):
            rows: list[Any] = source["content"]
        elif source.get("type") == "file_id" and (name := as_text(source.get("id"))):
            path = inside(inside(self.path, "files"), name)
            if not path.is_file():
                return None
            rows = [row for _, row in _rows(path)]
        else:
            return None
        items = [row["item"] for row in rows if isinstance(row, dict) and isinstance(row.get("item"), dict)]
        return items if len(items) == len(rows) else None

    def _run(self, run: _SourceRun) -> ImportedRun:
        record, counts = run.record, as_mapping(run.record.get("result_counts"))
        not_run = self._rows_not_run(run)
        present = {*run.ids.values(), *not_run}
        order = [name for name in self.samples if name in present]
        tally: Counter[str] = Counter()
        for trial in self._trials(run, {name: place for place, name in enumerate(order)}):
            tally[trial.outcome] += 1
            tally["passed"] += trial.score is not None and trial.score.passed
        status, items = as_text(record.get("status")) or "unknown", sum(run.repeats.values())
        remarks = list(self._remarks(run, counts, tally, len(not_run), items))
        return ImportedRun(
            source_id=run.id,
            name=as_text(record.get("name")) or run.id,
            experiments=(run.experiment,),
            params={run.experiment: {"model": run.model}},
            dataset=Dataset([self._sample(name, self.samples[name]) for name in order], name=self.name),
            repeats=max(run.repeats.values(), default=1),
            rows=max(run.repeats.total(), len(order)),
            trials=lambda: self._trials(run, {name: place for place, name in enumerate(order)}),
            content=file_hash(run.items),
            created_at=_moment(record),
            finished_at=max(run.last_at, _moment(record)),
            status="finished" if status == "completed" and run.complete else "stopped",
            stopped=None if status == "completed" and run.complete else _why_stopped(status, run),
            tags={"eval": self.record["id"], "run": run.id},
            origin={
                "eval": self.record["id"],
                "eval_name": as_text(self.record.get("name")),
                "run": run.id,
                "run_name": as_text(record.get("name")),
                "status": status,
                "counts": {name: value for name, value in counts.items() if isinstance(value, int)},
                "metadata": dict(as_mapping(record.get("metadata"))),
                "report_url": as_text(record.get("report_url")),
                "items_without_output": max(int(as_number(counts.get("total")) or 0) - items, len(not_run), 0),
            },
            remarks=tuple(remarks),
        )

    def _remarks(
        self, run: _SourceRun, counts: Mapping[str, Any], tally: Counter[str], rows: int, items: int
    ) -> Iterator[str]:
        if rows:
            yield f"{rows:,} rows of the data source have no output item"
        total = counts.get("total")
        if isinstance(total, int) and total > items + run.unfinished:
            yield f"the source counts {total:,} output items, and {items + run.unfinished:,} were saved"
        if run.unfinished:
            yield f"{run.unfinished:,} output items were not finished"
        if run.unscored:
            yield f"{run.unscored:,} grader results have no score"
        ours = {"passed": tally["passed"], "failed": tally["scored"] - tally["passed"],
                "errored": tally["task_error"] + tally["scorer_error"]}  # fmt: skip
        if run.complete and any(isinstance(counts.get(name), int) and counts[name] != n for name, n in ours.items()):
            theirs = ", ".join(f"{counts.get(name)} {name}" for name in ours)
            yield f"the source counts {theirs}; its output items say " + ", ".join(f"{n} {k}" for k, n in ours.items())

    def _trials(self, run: _SourceRun, places: Mapping[str, int]) -> Iterator[ImportedTrial]:
        run.repeats = Counter()
        run.unfinished = run.unscored = 0
        for item in run.read():
            name = run.ids[_number(item)]
            run.last_at = max(run.last_at, _moment(item))
            if as_text(item.get("status")) in _UNFINISHED:
                run.unfinished += 1
                continue
            yield self._trial(run, item, places[name], run.repeats[name])
            run.repeats[name] += 1

    def _trial(self, run: _SourceRun, item: Row, sample: int, repeat: int) -> ImportedTrial:
        answer = as_mapping(item.get("sample"))
        results = self._results(item)
        facts: dict[str, Any] = {"output_item": item["id"]}
        error = _error_text(answer.get("error")) or _error_text(item.get("error"))
        failed_graders = [f"{name}: {text}" for name, score, raw in results
                          if score is None and (text := _grader_error(raw))]  # fmt: skip
        status = as_text(item.get("status"))
        outcome: Outcome = "scored"
        stage: Stage | None = None
        output, score = _output(answer), None
        if error:
            outcome, stage = "task_error", "task"
        elif failed_graders or status not in _VERDICTS:
            unknown = "" if status in _ERRORS else f"status {status!r} without a verdict"
            sampled = output is not None or bool(results)
            outcome, stage = ("scorer_error", "score") if sampled else ("task_error", "task")
            error = "; ".join(failed_graders) or unknown or "the source recorded an error and no message"
        else:
            run.unscored += sum(value is None for _, value, _ in results)
            score = self._score(_VERDICTS[status], results)
        if outcome != "scored" and results:
            facts["results"] = [raw for _, _, raw in results]
        counts = as_mapping(answer.get("usage"))
        usage = usage_of(*(counts.get(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")))
        return ImportedTrial(
            sample=sample, outcome=outcome, repeat=repeat, score=score, output=output, error=error or None,
            stage=stage, usage=usage, started_at=_moment(item), metadata=facts, events=_events(answer, usage),
        )  # fmt: skip

    def _results(self, item: Row) -> list[tuple[str, float | None, Row]]:
        """Return (name of the criterion, score or None, original result) for every grader result."""
        return [
            (self._criterion(as_text(one.get("name"))), as_number(one.get("score")), one)
            for one in as_objects(item.get("results"))
        ]

    def _criterion(self, name: str) -> str:
        """Return the name of a criterion without the suffix that is generated for results."""
        plain = _GENERATED_SUFFIX.sub("", name) or "grader"
        by_name = {as_text(one.get("name")): self.names[_key(one)] for one in reversed(self.criteria)}
        return self.names.get(name) or by_name.get(name) or by_name.get(plain) or plain

    def _score(self, passed: bool, results: Sequence[tuple[str, float | None, Row]]) -> Score:
        """Return the score of an item. Results without a score are left out instead of counting as 0."""
        parts: list[tuple[str, Score]] = []
        for name, score, raw in results:
            if score is None:
                continue
            verdict = raw["passed"] if isinstance(raw.get("passed"), bool) else passed
            reason = _grader_text(raw)
            wide = name in self.wide
            part = Score(float(verdict) if wide else score, verdict, reason, [Metric("score", score)] if wide else ())
            parts.append((name, part))
        return merge(parts, value=mean_value(parts) if parts else float(passed), passed=passed)


def _number(item: Row) -> int | str:
    """Return the number of an item's row in the data source; the item's own id if it has none."""
    number = item.get("datasource_item_id")
    return number if isinstance(number, int | str) else str(item["id"])


def _key(criterion: Row) -> str:
    return as_text(criterion.get("id")) or as_text(criterion.get("name"))


def _row(item: Row) -> Row:
    """Return the data source item of an output item. Some are wrapped in `item`, like the rows of uploaded files."""
    row: Row = item["datasource_item"]
    inner = row.get("item")
    return inner if isinstance(inner, dict) and row.keys() <= {"item", "sample"} else row


def _take(left: Counter[str], content: str) -> bool:
    if not left[content]:
        return False
    left[content] -= 1
    return True


def _within(bounds: Any) -> bool:
    numbers = [as_number(bound) for bound in bounds] if isinstance(bounds, Sequence) else []
    return all(number is not None and 0.0 <= number <= 1.0 for number in numbers)


def _moment(record: Row) -> float:
    return as_number(record.get("created_at")) or 0.0


def _error_text(error: Any) -> str:
    found = as_mapping(error)
    return ": ".join(part for part in (as_text(found.get("code")), as_text(found.get("message"))) if part)


def _grader_error(result: Row) -> str:
    return _error_text(result.get("error")) or _error_text(as_mapping(result.get("sample")).get("error"))


def _grader_text(result: Row) -> str:
    """Return the text that the model of a grader replied."""
    return as_text(_output(as_mapping(result.get("sample"))))[:_LONGEST_REASON]


def _why_stopped(status: str, run: _SourceRun) -> str:
    if not run.complete and status == "completed":
        return "only some of its output items were saved"
    return f"{status} at the source"


def _messages(answer: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    usual = "assistant" if name == "output" else "user"
    return [(as_text(one.get("role")) or usual, _content(one.get("content"))) for one in as_objects(answer.get(name))]


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_content(part) for part in content)
    return as_text(as_mapping(content).get("text")) or as_text(content)


def _output(answer: Mapping[str, Any]) -> str | None:
    texts = [text for role, text in _messages(answer, "output") if role == "assistant"]
    return texts[-1] if texts else as_text(answer.get("output_text")) or None


def _events(answer: Mapping[str, Any], usage: TokenUsage) -> tuple[object, ...]:
    events: list[object] = [ChatMessage(role, text) for role, text in _messages(answer, "input")]
    if answer.get("model"):
        call = PromptExecuted(
            model=as_text(answer["model"]), usage=usage, finish_reason=as_text(answer.get("finish_reason")) or None
        )
        events.append(call)
    events += [ChatMessage(role, text) for role, text in _messages(answer, "output")]
    return tuple(events)


def _prompt(record: Row) -> list[Row] | None:
    """Return the message templates that a run sent to its model."""
    messages = as_mapping(as_mapping(record.get("data_source")).get("input_messages")).get("template")
    return [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else None
