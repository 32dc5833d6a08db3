"""One trial: input, output, score, transcript, timing, and the command that runs it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fairtrial.base.codec import to_json
from fairtrial.base.formatting import cost, count, duration
from fairtrial.errors import FairtrialError
from fairtrial.models.judges.checks import rebuild_prompt
from fairtrial.reports.figures.error_groups import error_text, traceback_of
from fairtrial.reports.render.pictures import (
    AttachmentShown,
    PictureState,
    attachments_in,
    attachments_of,
    picture_state,
    pictures_of_page,
)
from fairtrial.reports.render.safe_text import REPEATED_KEYS, envelopes, executions_text, value_text
from fairtrial.reports.report.trials import trial_record
from fairtrial.reports.run_names import rerun_command
from fairtrial.scoring.score import Metric
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.result import EvalResult
from fairtrial.viewer.events import Transcript, transcript
from fairtrial.viewer.pages.comments import comments_of_trial
from fairtrial.viewer.pages.context import PageNotFoundError, Viewer, wants_json
from fairtrial.viewer.question import Question, from_segment, read_question
from fairtrial.viewer.review import ANSWERS, PICKED
from fairtrial.viewer.text import Html, json_text, markdown, shown
from fairtrial.viewer.trial_table import neighbours, open_columns_of

_OWN_FACTS = ("traceback", "user", *REPEATED_KEYS)
LANES = ("message", "tool", "model", "user", "judge", "other")
FORMS = ("text", "markdown", "raw")


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A labelled text: as text, or as HTML made from Markdown."""

    label: str
    text: str
    cut: int = 0
    invisible: int = 0
    html: Html | None = None


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another trial of the same sample."""

    experiment: str
    repeat: int
    verdict: str
    tone: str
    address: str | None


def verdict_of(result: EvalResult) -> tuple[str, str]:
    """Return what came of a trial, and its tone."""
    if result.score is None:
        return result.outcome.replace("_", " "), "unsure"
    word = "passed" if result.score.passed else "failed"
    return f"{word}, score {result.score.value:.3f}", "good" if result.score.passed else "bad"


async def trial_page(viewer: Viewer, request: Request) -> Response:
    """Show one trial."""
    named = await viewer.find_run(request.path_params["run"])
    run = named.run
    experiment, sample_id = (from_segment(request.path_params[name]) for name in ("experiment", "sample"))
    repeat = int(request.path_params.get("repeat", 0))
    hint = request.query_params.get("o", "")
    result = await viewer.read(_find, viewer, run, experiment, sample_id, repeat, hint)
    if wants_json(request):
        facts = await viewer.read(trial_record, result, whole=True)
        return JSONResponse({"format": "fairtrial.trials/1", "trials": [facts]})
    values = await viewer.read(trial_values, run, result, dict(request.query_params))
    values["pictures"] = await viewer.read(page_pictures, viewer.store, values["attachments"], values["events"])
    values["picks"] = (
        await viewer.read(_picks, viewer, run, result, viewer.may(request, "edit")) if run.noted.reviews else ()
    )
    comments = await viewer.read(comments_of_trial, viewer.store, run, result.key)
    links = viewer.links(request)
    question, _ = read_question(parse_qsl(request.query_params.get("q", ""), keep_blank_values=True))
    await viewer.prepare_columns(run)
    addresses = await viewer.read(_addresses, viewer, links, run, result, question)
    others = await viewer.read(_others, viewer, links, run, result)
    return viewer.render(
        request, "trial.html", title=f"{sample_id} {run.name}", run=run, result=result, others=others,
        question=question, comments=comments,
        previous=addresses[0], next=addresses[1], tab="trial", query=dict(request.query_params),
        change=lambda **changes: "?" + urlencode(_changed(dict(request.query_params), changes)), **values,
    )  # fmt: skip


def _changed(query: dict[str, str], changes: dict[str, str]) -> dict[str, str]:
    merged = {**query, **changes}
    return {name: value for name, value in merged.items() if value and (name, value) != ("form", "text")}


def trial_values(run: RunRecord, result: EvalResult, query: dict[str, str]) -> dict[str, Any]:
    """Return the values of the template: everything that is read from the store."""
    form = query.get("form", "text")
    form = form if form in FORMS else "text"
    lane = query.get("lane", "")
    numbers = (query.get("attempt", ""), query.get("from", ""))
    attempt, start = (int(text) if text.isdecimal() and len(text) < 9 else None for text in numbers)
    named = query.get("invisible") == "1"
    whole = query.get("whole") == "1"
    events = transcript(
        envelopes(result), lane=lane if lane in LANES else "", attempt=attempt, start=start or 0, raw=form == "raw"
    )
    sample = result.sample
    blocks = [text_block("input", sample.input, form, named, whole)]
    if sample.has_expected:
        blocks.append(text_block("expected", sample.expected, form, named, whole))
    if result.output is not None or result.outcome in ("scored", "scorer_error", "user_error"):
        blocks.append(text_block("output", result.output, form, named, whole))
    if result.error:
        blocks.append(text_block("error", error_text(result), "text", named, whole))
        if calls := traceback_of(result):
            blocks.append(text_block("traceback", calls, "text", named, whole))
    verdict, tone = verdict_of(result)
    refers = dict.fromkeys(attachments_in([to_json(sample.input), to_json(sample.expected), to_json(result.output)]))
    return {
        "blocks": blocks, "events": events, "form": form, "forms": FORMS, "lane": lane, "lanes": LANES,
        "verdict": verdict, "tone": tone, "facts": _facts(run, result), "criteria": _criteria(result),
        "attachments": list(refers),
        "again": "" if run.imported else rerun_command(run, sample=result.sample_id, experiment=result.experiment),
        "attempt": attempt, "start": start or 0, "named": named, "markdown": markdown, "judge": _judge(run, result),
        "picks": (),
    }  # fmt: skip


def page_pictures(
    store: RunStore, files: Iterable[AttachmentShown], events: Transcript | None
) -> dict[AttachmentShown, PictureState]:
    """Return what pages show of the pictures of a trial's texts and of its transcript."""
    entries = () if events is None else events.entries
    named = chain(files, chain.from_iterable(entry.attachments for entry in entries))
    return {file: state for file, state, _ in pictures_of_page(store, named)}


def text_block(label: str, value: Any, form: str, named: bool, whole: bool) -> TextBlock:
    """Return a labelled text in one of `FORMS`; `named` shows invisible characters, `whole` cuts nothing off."""
    text = json_text(value) if form == "raw" else value_text(value)
    found = shown(text, named=named) if not whole else shown(text, limit=16_000_000, named=named)
    as_html = markdown(text) if form == "markdown" and isinstance(value, str) else None
    return TextBlock(label, found.text, found.cut, found.invisible, as_html)


def _facts(run: RunRecord, result: EvalResult) -> list[tuple[str, str]]:
    latency = result.known_latency_ms
    usage, user = result.usage, result.own_metadata.get("user")
    priced = usage.cost_usd is not None or result.unpriced_calls
    judged = result.judge_cost_usd is not None or result.unpriced_judge_calls
    facts = {
        "latency": "not known" if latency is None else duration(latency),
        "tokens": f"{usage.input_tokens:,} + {usage.output_tokens:,}" if usage.total_tokens else "",
        "cost": cost(usage.cost_usd, result.unpriced_calls) if priced else "",
        "judge and user cost" if "user" in result.own_metadata else "judge cost": cost(
            result.judge_cost_usd, result.unpriced_judge_calls
        )
        if judged
        else "",
        "user tokens": f"{user.get('tokens', 0):,}" if isinstance(user, Mapping) else "",
        "attempt": str(result.attempt) if result.attempt > 1 else "",
        "repeated": executions_text(result),
        "stage": result.stage,
        "response cache": count(result.cache_hits, "call") if result.cache_hits else "",
        "redacted": ", ".join(result.redacted_parts),
    }
    known = [(name, text) for name, text in facts.items() if text]
    known += [(key, value_text(value)) for key, value in result.sample.metadata.items()]
    own = {key: value for key, value in result.own_metadata.items() if key not in _OWN_FACTS}
    return known + [(f"trial: {key}", value_text(value)) for key, value in own.items()]


def _criteria(result: EvalResult) -> list[tuple[str, str, str, str]]:
    """Return (name, value, tone, reason) of the score and of each metric."""
    if result.score is None:
        return []
    score = result.score
    tone = "good" if score.passed else "bad"
    rows = [(score.name or "score", f"{score.value:.3f}", tone, score.reason or "")]
    for metric in score.metrics:
        if (metric.name, metric.value, metric.reason) == (score.name, score.value, score.reason):
            continue
        marked = "" if metric.passed is None else "good" if metric.passed else "bad"
        rows.append((metric.name, f"{metric.value:.3f}", marked, metric.reason or ""))
    return rows


def _picks(
    viewer: Viewer, run: RunRecord, result: EvalResult, may_label: bool
) -> list[tuple[str, list[str], list[tuple[str, str]]]]:
    """Return for each review its name, its answers, and what was said of this trial outside of the sample."""
    made = []
    for review in run.noted.reviews:
        labels = {
            label.annotator: label.value
            for label in viewer.store.labels(run.run_id, name=PICKED + review.name)
            if label.key == result.key
        }
        answers = ANSWERS[review.scale]
        words = [
            (who, next((word for word, known in answers.items() if known == value), str(value)))
            for who, value in labels.items()
        ]
        made.append((review.name, list(answers) if may_label else [], words))
    return made


@dataclass(frozen=True, slots=True)
class JudgeShown:
    """What a judge stored with its verdict. `asked` is its prompt; None if it cannot be rebuilt."""

    name: str
    kept: tuple[tuple[str, str], ...]
    asked: tuple[tuple[str, str], ...] | None
    has_digest: bool


def _judge(run: RunRecord, result: EvalResult) -> list[JudgeShown]:
    """Return what judges stored with their verdicts, and what they were asked if its hash agrees."""
    if result.score is None:
        return []
    return [_judge_shown(run, result, metric) for metric in result.score.metrics if "judge_model" in metric.metadata]


def _judge_shown(run: RunRecord, result: EvalResult, metric: Metric) -> JudgeShown:
    kept = tuple((key, value_text(value)) for key, value in metric.metadata.items())
    sha256 = metric.metadata.get("prompt_sha256")
    found = None
    if isinstance(sha256, str):
        found = rebuild_prompt(run.noted.judges, result.sample, result.output, sha256)
    asked = None if found is None else tuple((message.role, message.text) for message in found)
    return JudgeShown(metric.name, kept, asked, isinstance(sha256, str))


def _find(viewer: Viewer, run: RunRecord, experiment: str, sample_id: str, repeat: int, hint: str) -> EvalResult:
    """Find a trial by its key; the ordinal that a link carries saves looking for the sample."""
    if hint.isdecimal() and len(hint) <= 12:
        for result in viewer.store.results(run.run_id, ordinals=[int(hint)]):
            if (result.experiment, result.sample_id, result.repeat) == (experiment, sample_id, repeat):
                return result
    if experiment in run.experiments:
        for result in viewer.store.results(run.run_id, experiment=experiment, sample_ids=[sample_id]):
            if result.repeat == repeat:
                return result
    raise PageNotFoundError(f"run {run.name} has no result for sample {sample_id!r} of {experiment!r}, repeat {repeat}")


def _addresses(viewer: Viewer, links: Any, run: RunRecord, result: EvalResult, question: Question) -> list[str | None]:
    """Return the addresses of the trials before and after this one, in the order of the question."""
    columns = open_columns_of(viewer.store, run)
    more = [("q", urlencode(question.first_page.pairs()))] if question.pairs() else []
    made: list[str | None] = []
    for ordinal in neighbours(columns, replace(question.first_page, text=""), result.ordinal):
        if ordinal is None:
            made.append(None)
            continue
        _, experiment, repeat = run.split(ordinal)
        (sample_id,) = columns.sample_ids([ordinal])
        query = [("o", str(ordinal)), *more]
        made.append(links.trial(run, run.experiments[experiment], sample_id, repeat, query))
    return made


def _others(viewer: Viewer, links: Any, run: RunRecord, result: EvalResult) -> list[Neighbour]:
    """Return the other trials of the same sample."""
    place = run.split(result.ordinal)[0]
    each = len(run.experiments) * run.repeats
    ordinals = range(place * each, (place + 1) * each)[:60]
    made = []
    for found in viewer.store.previews(run.run_id, ordinals, size=1):
        _, experiment, repeat = run.split(found.ordinal)
        word = found.outcome.replace("_", " ") if found.passed is None else "passed" if found.passed else "failed"
        tone = "unsure" if found.passed is None else "good" if found.passed else "bad"
        same = found.ordinal == result.ordinal
        name = run.experiments[experiment]
        address = None if same else links.trial(run, name, found.sample_id, repeat, [("o", str(found.ordinal))])
        made.append(Neighbour(name, repeat, word, tone, address))
    return made


async def blob(viewer: Viewer, request: Request) -> Response:
    """Send an attachment of a trial."""
    named = await viewer.find_run(request.path_params["run"])
    hint = request.query_params.get("o", "")
    if not hint.isdecimal() or len(hint) > 12:
        raise PageNotFoundError("there is no such attachment")

    def read() -> list[AttachmentShown]:
        found = viewer.store.results(named.run.run_id, ordinals=[int(hint)])
        return [file for result in found for file in attachments_of(result)]

    return await send_blob(viewer, request.path_params["sha256"], await viewer.read(read))


async def send_blob(viewer: Viewer, sha256: str, files: Iterable[AttachmentShown]) -> Response:
    """Send one of these attachments: pictures and plain text to be shown, anything else to be saved."""
    found = next((file for file in files if file.sha256 == sha256), None)
    if found is None:
        raise PageNotFoundError("no trial of this run refers to this attachment")
    try:
        content = await viewer.read(viewer.store.get_blob, sha256)
    except FairtrialError:
        raise PageNotFoundError("the store does not have this attachment") from None
    picture = picture_state(content).picture
    kind = "text/plain; charset=utf-8" if found.media_type == "text/plain" else picture and picture.media_type
    headers = {
        "content-security-policy": "sandbox",
        "content-disposition": f'{"inline" if kind else "attachment"}; filename="{sha256[:12]}"',
    }
    return Response(content, headers=headers, media_type=kind or "application/octet-stream")
