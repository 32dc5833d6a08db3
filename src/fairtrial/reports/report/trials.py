"""Trials shown: one in detail, many as a table, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, tee
from typing import TYPE_CHECKING, Any

from fairtrial.base import formatting
from fairtrial.base.codec import to_json
from fairtrial.reports.figures.error_groups import error_text, traceback_of
from fairtrial.reports.figures.metrics import ERRORS
from fairtrial.reports.render import document
from fairtrial.reports.render.pictures import attachments_of, pictures_of_page
from fairtrial.reports.render.safe_text import envelopes, sample_of, sample_title, session_lines, shown
from fairtrial.reports.report.run_json import moment, tokens_of
from fairtrial.scoring.score import Metric, Score
from fairtrial.store.export_columns import cell_text
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from fairtrial.reports.report.experiment import ExperimentReport
    from fairtrial.reports.report.results import TrialRows

_PAGE_CHARACTERS = 12_000_000
_PAGE_PICTURE_BYTES = 20 << 20
_SESSION_CUT = 20_000
_GLANCE = 160
_CUT = 4_000


def failed_trials(
    store: RunStore, run: RunRecord, parts: Sequence[ExperimentReport], limit: int
) -> list[document.Block]:
    """Return the errors and the trials that did not pass, up to a limit of each."""
    only = parts[0].name if len(parts) == 1 else None
    broken = sum(sum(part.errors.values()) for part in parts)
    failed = sum(part.successful - part.totals.passed for part in parts)
    errors = store.results(run.run_id, experiment=only, outcomes=ERRORS, limit=limit)
    failures = store.results(run.run_id, experiment=only, passed=False, limit=limit)
    blocks: list[document.Block] = []
    for name, total, results in (("Errors", broken, errors), ("Did not pass", failed, failures)):
        if total:
            showing = f", the first {limit:,} shown" if total > limit else ""
            caption = f"{name}: {formatting.count(total, 'trial')}{showing}"
            blocks.append(
                document.Cases(caption, total, min(limit, total), _read(results, run, several=len(parts) > 1))
            )
    return blocks


def all_trials(store: RunStore, run: RunRecord, parts: Sequence[ExperimentReport], limit: int) -> document.Block:
    """Return every trial, to read and filter, up to a limit: errors first, then those that did not pass."""
    only = parts[0].name if len(parts) == 1 else None
    results = chain(
        store.results(run.run_id, experiment=only, outcomes=ERRORS, limit=limit),
        store.results(run.run_id, experiment=only, passed=False, limit=limit),
        store.results(run.run_id, experiment=only, passed=True, limit=limit),
    )
    total = sum(part.total for part in parts)
    first = ": errors first, then trials that did not pass, then the others" if total > 1 else ""
    return document.Cases(
        f"Trials{first}",
        total,
        min(limit, total),
        _bounded(store, islice(results, limit), run, several=len(parts) > 1),
        filter=True,
        others=f"fairtrial export {run.name} --format jsonl has all of them.",
    )


def _bounded(
    store: RunStore, results: Iterable[EvalResult], run: RunRecord, *, several: bool
) -> Iterator[document.TrialDetails]:
    """Yield trials, with their pictures, until their texts reach the size limit of a page."""
    room, picture_room = _PAGE_CHARACTERS, _PAGE_PICTURE_BYTES
    first, second = tee(results)
    for result, details in zip(first, _read(second, run, several=several, whole=True), strict=True):
        room -= sum(len(text) for _, text in (*details.facts, *details.folded))
        if room < 0:
            return
        pictures = tuple(_pictures(store, result, picture_room))
        picture_room -= sum(len(picture.content) for picture in pictures)
        yield replace(details, pictures=pictures) if pictures else details


def _pictures(store: RunStore, result: EvalResult, room: int) -> Iterator[document.PictureFact]:
    for file, state, content in pictures_of_page(store, attachments_of(result)):
        name = file.name or file.sha256[:12]
        if state.picture is None:
            yield document.PictureFact(name, problem=state.problem)
        elif len(content) > room:
            yield document.PictureFact(name, problem="not shown: the page has too many pictures")
        else:
            room -= len(content)
            yield document.PictureFact(name, state.picture.media_type, content, state.problem)


def _read(
    results: Iterable[EvalResult], run: RunRecord, *, several: bool, whole: bool = False
) -> Iterator[document.TrialDetails]:
    for result in results:
        title = result.sample_id if whole else sample_title(result.sample_id, sample_of(result).input)
        if several:
            title = f"{result.experiment}: {title}"
        if run.repeats > 1:
            title = f"{title} (repeat {result.repeat})"
        yield case(result, title, whole=whole)


def criterion_text(metric: Metric) -> str:
    """Format a criterion: verdict, name, value unless it is 0 or 1, and reason."""
    verdict = "passed" if metric.passed else "failed"
    value = "" if metric.value == float(bool(metric.passed)) else f" with {metric.value:g}"
    return f"{verdict}{value}  {metric.name}{f': {metric.reason}' if metric.reason else ''}"


def repeats_criteria(why: str, score: Score) -> bool:
    """Return whether a reason only repeats the reasons of criteria, which are shown separately."""
    for metric in sorted(score.criteria, key=lambda metric: -len(metric.reason)) if len(score.criteria) > 1 else ():
        why = why.replace(f"{metric.name}: {metric.reason}", "") if metric.reason else why
    return not why.strip("; ")


def case(result: EvalResult, title: str, *, whole: bool = False) -> document.TrialDetails:
    """Return the details of a trial; with `whole`, also its metadata, session and traceback."""
    score = result.score
    sample = sample_of(result)
    facts = [("input", shown(sample.input)), ("expected", shown(sample.expected) if sample.has_expected else "")]
    tone: document.Tone = "bad"
    if score is None:
        facts.append(("error", error_text(result)))
        tone = "unsure"
        if result.output is not None:
            facts.append(("output", shown(result.output)))
        outcome = result_name = result.outcome.replace("_", " ")
    else:
        facts.append(("output", shown(result.output)))
        if not repeats_criteria(why := score.explain(), score):
            facts.append(("reason", why))
        if len(score.criteria) > 1:
            facts.append(("criteria", "\n".join(map(criterion_text, score.criteria))))
        tracked = [f"{m.name} {formatting.number(m.value)}" for m in score.metrics if m.passed is None]
        facts.append(("metrics", "\n".join(tracked)))
        if score.reward != score.value:
            facts.append(("reward", formatting.number(score.reward)))
        result_name, tone = ("passed", "good") if score.passed else ("failed", "bad")
        outcome = result_name if score.value == float(score.passed) else f"{result_name} with {score.value:.3g}"
    folded: list[tuple[str, str]] = []
    glance = None
    if whole:
        facts.append(("metadata", ", ".join(f"{key}={shown(text)}" for key, text in sample.metadata.items())))
        folded = [("session", _session(result)), ("traceback", traceback_of(result))]
        came = result.error or "" if score is None else shown(result.output)
        glance = (shown(sample.input)[:_GLANCE], came[:_GLANCE])
    return document.TrialDetails(
        title,
        outcome,
        tone,
        tuple((label, text[:_CUT]) for label, text in facts if text),
        result_name,
        result.experiment,
        glance,
        tuple((label, text[:_SESSION_CUT]) for label, text in folded if text),
    )


def _session(result: EvalResult) -> str:
    lines = []
    room = _SESSION_CUT
    for seconds, label, body, _ in session_lines(result):
        lines.append(f"{seconds:.2f} s  {label}  {body}")
        room -= len(body)
        if room < 0:
            break
    return "\n".join(lines)


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
        "tokens": tokens_of(result.usage),
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


_LONGEST = 400  # Of one text: no terminal shows more of it in a row.
_TEXTS, _LINES = ("input", "expected", "output", "error", "reason"), 4
_TITLES = {"sample_id": "sample", "outcome": "result"}
_FIGURES = ("value", "reward", "latency_ms", "tokens", "cost", "judge_cost", "repeat")


def trials_document(record: TrialRows) -> document.Document:
    """Return a table of the rows; `outcome` and `passed` are combined into one column."""
    columns = [name for name in record.columns if name != "passed" or "outcome" not in record.columns]
    table = document.Table(
        "",
        tuple(_column(name, at == 0) for at, name in enumerate(columns)),
        tuple(tuple(_cell(name, row) for name in columns) for row in record.rows),
    )
    more = (document.Remarks((f"Only the first {len(record.rows):,} are shown.",)),) if record.more else ()
    title = f"Trials of {record.run.name}"
    return document.Document(
        title, () if record.rows else ("no trial matches",), (*((table,) if record.rows else ()), *more)
    )


def _column(name: str, first: bool) -> document.Column:
    figure = name in _FIGURES or name.startswith("metrics.")
    title = _TITLES.get(name, name.removeprefix("metadata.").removeprefix("metrics."))
    return document.Column(
        title,
        "right" if figure else "left",
        name=not figure and name != "outcome",
        heading=first,
        shortest=8,
        lines=_LINES if name in _TEXTS else 1,
    )


def _cell(name: str, row: Any) -> document.Content:
    value = row[name]
    if name == "outcome" and "passed" in row:
        return _result(value, row["passed"])
    if value is None:
        return document.Cell("-", "dim")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join((cell_text(value) or "")[:_LONGEST].split())


def _result(outcome: str, passed: bool | None) -> document.Cell:
    tone: document.Tone = "unsure" if passed is None else "good" if passed else "bad"
    return document.Cell(outcome.replace("_", " ") if passed is None else "passed" if passed else "failed", tone)
