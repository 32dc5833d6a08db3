"""Logs of Inspect."""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fairtrial.base.foreign import ExpansionBudget, Method, check_limit, expand, limit_factor
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import PromptExecuted, TokenUsage, ToolInvoked
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.errors import DataError
from fairtrial.integrations.importers.records import (
    ScoreRanges,
    SourceScore,
    as_document,
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
    is_id,
    load_json_object,
    reference,
    suite_name,
    usage_of,
)
from fairtrial.runs.imported import Import, ImportedRun, ImportedSuite, ImportedTrial
from fairtrial.trials.result import Outcome, Stage

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_METHODS: dict[int, Method] = {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflate", 93: "zstd"}
_MAX_MEMBERS = 100_000
# JSON takes up to twenty times its size in memory. Small members may expand further than the ratio allows.
_MEMBER_BYTES, _SMALL_BYTES, _MEMBER_RATIO = 128 << 20, 16 << 20, 200
_FILE_BYTES, _FILE_RATIO = 1 << 30, 20


class ZipMembers:
    """The members of a ZIP file: stored, deflated or Zstandard. What they may expand to is limited."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                # Of two members with one name, the last was written last and replaces the other.
                self._members = {member.filename: member for member in archive.infolist()}
        except (zipfile.BadZipFile, OSError) as error:
            raise DataError(f"{path} must be a complete ZIP file ({error})") from None
        check_limit(str(path), "members", len(self._members), _MAX_MEMBERS)
        self._expanded: dict[str, int] = {}  # By name: members are read several times.
        self._total = 0
        self._size = path.stat().st_size
        self._max_bytes = max(_FILE_BYTES, _FILE_RATIO * self._size)

    @property
    def names(self) -> list[str]:
        """The names of the members, in the order of the file."""
        return list(self._members)

    def read(self, name: str) -> bytes:
        """Return the content of a member."""
        member = self._members[name]
        # The directory of the file is foreign, too: places outside, and sizes that nothing could hold.
        if not 0 <= member.header_offset < self._size or member.compress_size > self._size:
            raise DataError(f"{self.path}: {name} cannot be read: it is not in the file")
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
                raise DataError(f"{self.path}: {name} cannot be read: its header is damaged")
            _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            file.seek(name_length + extra_length, 1)
            content = file.read(member.compress_size)
        plain = self._expand(name, content, member.compress_type)
        if zlib.crc32(plain) != member.CRC:
            raise DataError(f"{self.path}: {name} cannot be read: its checksum differs")
        return plain

    def _expand(self, name: str, content: bytes, compress_type: int) -> bytes:
        if compress_type not in _METHODS:
            problem = f"compression method {compress_type} is not supported"
            raise DataError(f"{self.path}: {name} cannot be read: {problem}")
        largest = min(_MEMBER_BYTES, max(_SMALL_BYTES, _MEMBER_RATIO * len(content)))
        budget = ExpansionBudget(f"{self.path}: {name}", int(largest * limit_factor()))
        plain = expand(content, _METHODS[compress_type], budget)
        self._total += len(plain) - self._expanded.get(name, 0)
        self._expanded[name] = len(plain)
        check_limit(str(self.path), "bytes when it is expanded", self._total, self._max_bytes)
        return plain


# The values that `value_to_float` of Inspect gives to letters and words.
_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_ATTACHMENT = re.compile(r"attachment://([0-9a-f]{32,})")
OWN_RUN = "fairtrial_run"
"""The key of the metadata of logs that Fairtrial wrote."""
OWN_ENDING = "fairtrial_ending"
"""The key of the outcome and the stage of a trial, in the store of its sample."""
_ATTACHED_BYTES = 32 << 20  # In one sample.
_START, _HEADER, _SAMPLES = "_journal/start.json", "header.json", "samples/"


@dataclass(frozen=True)
class InspectLog:
    """A log: its header, and its samples one by one."""

    path: Path

    @cached_property
    def _members(self) -> ZipMembers:
        return ZipMembers(self.path)

    @property
    def _is_zip(self) -> bool:
        return self.path.suffix.lower() == ".eval"

    @cached_property
    def header(self) -> dict[str, Any]:
        """The log without its samples. A log that is still being written has no results."""
        if not self._is_zip:
            document = load_json_object(self.path)
            return {name: value for name, value in document.items() if name != "samples"}
        for name in (_HEADER, _START):
            if name in self._members.names:
                return {"status": "started", **self._load(name)}
        raise DataError(f"{self.path} must be a log of Inspect (it has neither {_HEADER} nor {_START})")

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield the samples with their attachments in place."""
        if self._is_zip:
            names = [name for name in self._members.names if name.startswith(_SAMPLES) and name.endswith(".json")]
            found: Iterator[dict[str, Any]] = map(self._load, names)
        else:
            found = iter(as_objects(load_json_object(self.path).get("samples")))
        for sample in found:
            if not is_id(sample.get("id")) or not isinstance(sample.get("epoch"), int):
                raise DataError(f"{self.path}: every sample must have an id and an epoch (got {list(sample)[:8]})")
            attachments = as_mapping(sample.get("attachments"))
            if attachments:
                source = f"{self.path}: the attachments of sample {str(sample['id'])[:100]}"
                budget = ExpansionBudget(source, int(_ATTACHED_BYTES * limit_factor()))
                sample = with_attachments(_without_inputs(sample), attachments, budget)
            yield sample

    def _load(self, name: str) -> dict[str, Any]:
        return as_document(self._members.read(name), f"{self.path}: {name}")


def _without_inputs(sample: dict[str, Any]) -> dict[str, Any]:
    """Leave out what model calls were sent: it repeats the messages, with all that is attached to them."""
    unused = ("input", "call", "attachments")
    events = [{name: event[name] for name in event if name not in unused} for event in as_objects(sample.get("events"))]
    return {**sample, "events": events}


def with_attachments(value: Any, attachments: Mapping[str, Any], budget: ExpansionBudget) -> Any:
    """Replace references to attachments, which stand for long texts, by what they refer to."""
    if isinstance(value, str):
        if "attachment://" not in value:
            return value

        def attached(found: re.Match[str]) -> str:
            text = as_text(attachments.get(found[1])) or found[0]
            budget.take(len(text))  # A text may be referred to any number of times.
            return text

        return _ATTACHMENT.sub(attached, value)
    if isinstance(value, list):
        return [with_attachments(item, attachments, budget) for item in value]
    if isinstance(value, dict):
        return {
            name: with_attachments(item, attachments, budget) for name, item in value.items() if name != "attachments"
        }
    return value


def number_of(value: Any) -> float | None:
    """Return a value of Inspect as a number; None for NaN and for what Inspect has no number for."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        if value in _GRADES or value.lower() in _GRADES:
            return _GRADES.get(value, _GRADES.get(value.lower()))
        try:
            return as_number(float(value))
        except ValueError:
            return None
    return as_number(value)


def scores_of(sample: Mapping[str, Any], *, own: bool = False) -> list[SourceScore]:
    """Return the scores of a sample. The parts of a score that is an object are scores of their own.

    In logs that Fairtrial wrote (`own`), the metadata of a score say whether it passed.
    """
    found: list[SourceScore] = []
    for name, score in as_mapping(sample.get("scores")).items():
        value = as_mapping(score).get("value")
        reason = as_text(as_mapping(score).get("explanation"))
        if isinstance(value, dict):
            found += [SourceScore(f"{name}.{part}", number_of(number), None, reason) for part, number in value.items()]
        else:
            passed = as_mapping(as_mapping(score).get("metadata")).get("passed") if own else None
            found.append(SourceScore(name, number_of(value), passed if isinstance(passed, bool) else None, reason))
    return found


def input_of(sample: Mapping[str, Any]) -> Any:
    """Return the input of a sample: text, or the messages without what only Inspect needs."""
    given = sample.get("input")
    if not isinstance(given, list):
        return given
    return [{"role": as_text(message.get("role")), "content": message_text(message)} for message in as_objects(given)]


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may have parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(as_text(part.get("text")) for part in as_objects(content))
    return as_text(content)


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning in a message."""
    return "".join(as_text(part.get("reasoning")) for part in as_objects(message.get("content")))


def sample_usage(sample: Mapping[str, Any]) -> TokenUsage:
    """Return the usage of all models of a sample."""
    total = TokenUsage()
    for usage in as_mapping(sample.get("model_usage")).values():
        total += _usage(as_mapping(usage))
    return total


def session_events(sample: Mapping[str, Any]) -> tuple[object, ...]:
    """Return messages, model calls and tool calls, in order."""
    events = as_objects(sample.get("events"))
    calls = [_model_call(event) for event in events if event.get("event") == "model"]
    tools = {as_text(event.get("id")): event for event in events if event.get("event") == "tool"}
    recorded: list[object] = []
    for message in as_objects(sample.get("messages")):
        role = as_text(message.get("role")) or "user"
        tool = tools.pop(as_text(message.get("tool_call_id")), None) if role == "tool" else None
        if role == "assistant" and calls:
            recorded.append(calls.pop(0))
        if tool is not None:
            recorded.append(_tool_call(tool))
        requested = tuple(
            ToolCall(as_text(call.get("function")), as_mapping(call.get("arguments")), as_text(call.get("id")))
            for call in as_objects(message.get("tool_calls"))
        )
        name = as_text(message.get("tool_call_id")) if role == "tool" else ""
        recorded.append(ChatMessage(role, message_text(message), requested, name, reasoning_of(message)))
    return (*recorded, *calls, *map(_tool_call, tools.values()))


def _usage(usage: Mapping[str, Any]) -> TokenUsage:
    read, written = usage.get("input_tokens_cache_read"), usage.get("input_tokens_cache_write")
    # Inspect counts what came from a cache beside the other input, we count it as part of the input.
    whole = sum(as_number(count) or 0 for count in (usage.get("input_tokens"), read, written))
    return usage_of(whole, usage.get("output_tokens"), read, usage.get("total_cost"))


def _model_call(event: Mapping[str, Any]) -> PromptExecuted:
    output = as_mapping(event.get("output"))
    choices = as_objects(output.get("choices"))
    seconds = as_number(output.get("time"))
    return PromptExecuted(
        adapter="inspect",
        model=as_text(event.get("model")),
        usage=_usage(as_mapping(output.get("usage"))),
        finish_reason=(as_text(choices[0].get("stop_reason")) or None) if choices else None,
        cached=event.get("cache") == "read",
        duration_ms=None if seconds is None else seconds * 1000,
    )


def _tool_call(event: Mapping[str, Any]) -> ToolInvoked:
    error = as_text(as_mapping(event.get("error")).get("message"))
    return ToolInvoked(
        as_text(event.get("function")),
        as_mapping(event.get("arguments")),
        event.get("result"),
        not error,
        error or None,
        adapter="inspect",
        call_id=as_text(event.get("id")),
    )


_ERRORS = ("task_error", "scorer_error", "timeout", "dead_letter", "user_error")


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
            events=session_events(sample),
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
    return message_text(as_mapping(choices[0].get("message"))) or None if choices else None
