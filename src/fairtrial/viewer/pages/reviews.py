"""Pages of reviews, for owners and reviewers."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from fairtrial.base.codec import to_json
from fairtrial.base.rates import Z_95, wilson_bounds
from fairtrial.data.session.views import JUDGE
from fairtrial.errors import ConfigurationError
from fairtrial.reports.render.pictures import AttachmentShown, attachments_in
from fairtrial.reports.render.safe_text import envelopes, value_text
from fairtrial.reports.run_names import RunName
from fairtrial.store.notes import MANY_SKIPS, SKIP, ReviewNote, ReviewScale, write_notes
from fairtrial.store.protocol import Label, RunRecord
from fairtrial.trials.result import EvalResult
from fairtrial.viewer.events import Transcript, transcript
from fairtrial.viewer.pages.context import FormFields, PageNotFoundError, Viewer, wants_json
from fairtrial.viewer.pages.trial import page_pictures, send_blob, text_block
from fairtrial.viewer.pages.trials import cell_text
from fairtrial.viewer.question import from_segment
from fairtrial.viewer.review import (
    ANSWERS,
    COMMENT,
    KEYS,
    LOOKED,
    MAX_SIZE,
    PICKED,
    SKIP_REASONS,
    ReviewMember,
    ReviewState,
    answer_labels,
    make_members,
    new_review,
    next_member,
    passes,
    review_code,
)
from fairtrial.viewer.text import Html, markdown
from fairtrial.viewer.trial_table import open_columns_of

_SEARCHED_RUNS = 1_000


@dataclass(frozen=True, slots=True)
class OpenReview:
    """A review with its run and its state. `judged` counts the trials from which its trials were drawn."""

    run: RunRecord
    review: ReviewNote
    code: str
    state: ReviewState
    judged: int


async def open_review(viewer: Viewer, run: RunRecord, review: ReviewNote) -> OpenReview:
    """Read the state of a review."""
    if run.status == "running":
        raise ConfigurationError(f"run {run.name} is still going on: it can be reviewed when it has ended")
    key = (await viewer.state_of(run), review.name, review.seed, review.size)
    desk = viewer.reviews
    if (drawn := desk.members.get(key)) is None:
        await viewer.prepare_columns(run)
        drawn = await viewer.read(_draw, viewer, run, review)
        desk.members.put(key, drawn)
    members, judged = drawn
    code = review_code(run.run_id, review)
    desk.runs[code] = run.run_id
    state = await viewer.read(lambda: ReviewState.of(review, members, _labels(viewer, run, review)))
    return OpenReview(run, review, code, state, judged)


def _draw(viewer: Viewer, run: RunRecord, review: ReviewNote) -> tuple[list[ReviewMember], int]:
    columns = open_columns_of(viewer.store, run)
    from fairtrial.reports.figures.labels import draw_trials  # Loads scipy.

    drawn = draw_trials(columns, review)
    return make_members(run, review, drawn.ordinals, columns.sample_ids(drawn.ordinals)), drawn.judged


def _labels(viewer: Viewer, run: RunRecord, review: ReviewNote) -> Iterator[Label]:
    """Yield the labels of a review. Those of each name are in order, and names do not depend on one another."""
    for prefix in ("", SKIP, COMMENT, LOOKED):
        yield from viewer.store.labels(run.run_id, name=prefix + review.name)


async def find_review(viewer: Viewer, code: str) -> OpenReview:
    """Find a review by the code in its address."""

    def find() -> tuple[RunRecord, ReviewNote] | None:
        known = viewer.reviews.runs.get(code)
        runs = [viewer.store.get_run(known)] if known else viewer.store.runs(limit=_SEARCHED_RUNS)
        for run in runs:
            for review in run.noted.reviews:
                if review_code(run.run_id, review) == code:
                    return run, review
        return None

    found = await viewer.read(find)
    if found is None:
        raise PageNotFoundError("there is no such review: its run may have been deleted")
    return await open_review(viewer, *found)


async def named_review(viewer: Viewer, run: RunRecord, name: str) -> OpenReview:
    """Find a review of a run by its name."""
    for review in run.noted.reviews:
        if review.name == name:
            return await open_review(viewer, run, review)
    raise PageNotFoundError(f"run {run.name} has no review {name!r}")


async def all_reviews(viewer: Viewer) -> list[OpenReview]:
    """Return the reviews of the newest runs."""

    def find() -> list[tuple[RunRecord, ReviewNote]]:
        runs = viewer.store.runs(limit=_SEARCHED_RUNS)
        return [(run, review) for run in runs if run.status != "running" for review in run.noted.reviews]

    return [await open_review(viewer, run, review) for run, review in await viewer.read(find)]


_SIZES = (50, 100, 200, 400)
_LISTED = 200


async def reviews_page(viewer: Viewer, request: Request) -> Response:
    """List the reviews of a run, with the form that makes one."""
    run = (await viewer.find_run(request.path_params["run"])).run
    return await _reviews(viewer, request, run)


async def _reviews(
    viewer: Viewer, request: Request, run: RunRecord, problem: str = "", form: FormFields | None = None
) -> Response:
    running = run.status == "running"
    opened = [] if running else [await open_review(viewer, run, review) for review in run.noted.reviews]
    keys: list[str] = []
    if not running:
        await viewer.prepare_columns(run)
        columns = await viewer.read(open_columns_of, viewer.store, run)
        keys = list(columns.metadata)[:20]
    return viewer.render(
        request, "reviews.html", code=422 if problem else 200, title=f"{run.name}: reviews", run=run, tab="review",
        reviews=opened, keys=keys, problem=problem, sent=form or FormFields([]), running=running,
        widths=[(size, _half_width(size)) for size in _SIZES], largest=MAX_SIZE,
        read_only=not viewer.may(request, "edit"), has_users=bool(run.noted.users),
    )  # fmt: skip


def _half_width(labels: int) -> float:
    """Return the half width of the interval of a rate of 0.5 from `labels` labels, without help of the judge."""
    low, high = wilson_bounds(0.5, labels, Z_95)
    return (high - low) / 2


async def make_review(viewer: Viewer, request: Request, form: FormFields) -> Response:
    """Make a review."""
    run = (await viewer.find_run(request.path_params["run"])).run
    try:
        made = new_review(
            run, name=form.get("name"), question=form.get("question"), guidelines=form.get("guidelines"),
            experiments=form.every("experiment"), scale=cast(ReviewScale, form.get("scale")), size=form.number("size"),
            votes=form.number("votes"), shows=form.every("shows"), created_by=viewer.visitor(request).annotator,
            outcome="user_error" if form.get("outcome") == "user_error" else "scored",
        )  # fmt: skip
        if run.status == "running":
            raise ConfigurationError(f"run {run.name} is still going on: it can be reviewed when it has ended")
        await viewer.read(_refuse_used_name, viewer, run, made.name)
    except ConfigurationError as error:
        return await _reviews(viewer, request, run, str(error), form)
    async with viewer.reviews.lock:
        known = (await viewer.read(viewer.store.get_run, run.run_id)).noted.reviews
        await viewer.read(viewer.store.update_run, run.run_id, notes=write_notes(reviews=(*known, made)))
    return Response(status_code=303, headers={"location": viewer.links(request).review(run, made.name)})


def _refuse_used_name(viewer: Viewer, run: RunRecord, name: str) -> None:
    """Labels that were not drawn at random must not be counted with those of a review."""
    for run_id in filter(None, (run.parent_run, run.run_id)):
        if next(iter(viewer.store.labels(run_id, name=name)), None) is not None:
            raise ConfigurationError(
                f"run {run.name} already has labels named {name!r} that are not of a review: choose another name"
            )


async def extend_review(viewer: Viewer, request: Request, form: FormFields) -> Response:
    """Draw more trials. Those that were drawn before stay."""
    run = (await viewer.find_run(request.path_params["run"])).run
    name, more = from_segment(request.path_params["name"]), form.number("more")
    async with viewer.reviews.lock:
        known = (await viewer.read(viewer.store.get_run, run.run_id)).noted.reviews
        if not any(review.name == name for review in known):
            raise PageNotFoundError(f"run {run.name} has no review {name!r}")
        changed = [
            replace(review, size=min(review.size + more, MAX_SIZE)) if review.name == name else review
            for review in known
        ]
        await viewer.read(viewer.store.update_run, run.run_id, notes=write_notes(reviews=changed))
    return Response(status_code=303, headers={"location": viewer.links(request).review(run, name)})


async def review_page(viewer: Viewer, request: Request) -> Response:
    """Show how far a review is, how far people agree, and where they do not."""
    run = (await viewer.find_run(request.path_params["run"])).run
    opened = await named_review(viewer, run, from_segment(request.path_params["name"]))
    state, who = opened.state, viewer.visitor(request).annotator
    if wants_json(request):
        return JSONResponse(_facts(opened))
    calibrations = [
        (experiment, found)
        for experiment in opened.review.experiments
        if (found := await _calibration(viewer, opened, experiment, "passed")) is not None
    ]
    links = viewer.links(request)
    people = sorted({*state.annotators, *viewer.access.reviewers}, key=viewer.name_of)
    return viewer.render(
        request, "review.html", title=f"{run.name}: review {opened.review.name}", run=run, tab="review",
        opened=opened, review=opened.review, state=state, progress=[state.progress(name) for name in people],
        mine=state.progress(who), disputed=_rows(viewer, links, opened, state.disputed),
        skipped=_rows(viewer, links, opened, state.skipped), comments=_comments(links, opened),
        wrong=await viewer.read(_judge_errors, viewer, links, opened) if state.is_complete else None,
        many_skips=len(state.skipped) > MANY_SKIPS * len(state.members), calibrations=calibrations,
        guidelines=markdown(opened.review.guidelines) if opened.review.guidelines else None,
        read_only=not viewer.may(request, "edit"), half_width=_half_width(max(state.answered, 1)),
    )  # fmt: skip


def _facts(opened: OpenReview) -> dict[str, Any]:
    """Return the state of a review as JSON."""
    state = opened.state
    return {
        "format": "fairtrial.review/1",
        "run_id": opened.run.run_id,
        "name": opened.review.name,
        "trials": len(state.members),
        "judged": opened.judged,
        "answered": state.answered,
        "skipped": len(state.skipped),
        "disputed": len(state.disputed),
        "tied": len(state.tied),
        "complete": state.is_complete,
        "annotators": {name: state.progress(name).answered for name in state.annotators},
    }


def _trial_link(links: Any, run: RunRecord, member: ReviewMember) -> str:
    key = member.key
    return str(links.trial(run, key.experiment, key.sample_id, key.repeat, [("o", str(member.ordinal))]))


def _rows(viewer: Viewer, links: Any, opened: OpenReview, members: list[ReviewMember]) -> list[dict[str, Any]]:
    state = opened.state
    return [
        {
            "key": member.key,
            "address": _trial_link(links, opened.run, member),
            "votes": sorted(
                (who, _word(opened, value)) for who, value in state.answers.get(member.ordinal, {}).items()
            ),
            "skips": sorted(state.skips.get(member.ordinal, {}).items()),
            "tied": state.is_tied(member),
        }
        for member in members[:_LISTED]
    ]


def _word(opened: OpenReview, value: Any) -> str:
    """Return an answer as it was given."""
    answers = ANSWERS[opened.review.scale]
    return next((word for word, known in answers.items() if known == value and type(known) is type(value)), str(value))


def _comments(links: Any, opened: OpenReview) -> list[tuple[str, str, str, str]]:
    """Return (sample, address, who, comment) of every comment."""
    found = [(member, opened.state.comments.get(member.ordinal, {})) for member in opened.state.members]
    return [
        (member.key.sample_id, _trial_link(links, opened.run, member), who, text)
        for member, comments in found
        for who, text in sorted(comments.items())
    ][:_LISTED]


def _judge_errors(viewer: Viewer, links: Any, opened: OpenReview) -> dict[str, list[dict[str, Any]]]:
    """Return the trials on which the judge and most people disagree."""
    state, run = opened.state, opened.run
    asked = {member.ordinal: member for member in state.members if state.majority(member) is not None}
    passing: list[ReviewMember] = []
    failing: list[ReviewMember] = []
    for preview in viewer.store.previews(run.run_id, list(asked), size=1):
        member = asked[preview.ordinal]
        if preview.passed is not None and preview.passed != state.majority(member):
            (passing if preview.passed else failing).append(member)
    return {
        "passed by the judge, failed by people": _rows(viewer, links, opened, passing),
        "failed by the judge, passed by people": _rows(viewer, links, opened, failing),
    }


async def _calibration(viewer: Viewer, opened: OpenReview, experiment: str, metric: str) -> dict[str, Any] | None:
    """Return what the labels say about the judge; None without labels."""
    if not opened.state.answered:
        return None
    job = {
        "job": "calibration", "run_id": opened.run.run_id, "experiment": experiment, "name": opened.review.name,
        "metric": metric,
    }  # fmt: skip
    answers = sorted((at, sorted(map(str, votes.items()))) for at, votes in opened.state.answers.items())
    return await viewer.workbench.answer(job, (await viewer.state_of(opened.run), json.dumps(answers)))


async def calibration_page(viewer: Viewer, request: Request) -> Response:
    """Say what people would say of all trials, and how far the judge is off."""
    named = await viewer.find_run(request.path_params["run"])
    run, asked = named.run, request.query_params
    if not run.noted.reviews:
        raise PageNotFoundError(f"run {run.name} has no review: make one first")
    opened = await named_review(viewer, run, asked.get("name") or run.noted.reviews[-1].name)
    experiment = _experiment(named, opened, asked.get("e", ""))
    metric = asked.get("metric") or "passed"
    early = asked.get("early") == "1"
    found = None
    if opened.state.is_complete or early:
        found = await _calibration(viewer, opened, experiment, metric)
    if wants_json(request):
        if found is None:
            raise ConfigurationError("the review is not complete: add early=1 to the address for its figures so far")
        return JSONResponse(found["json"])
    columns = await viewer.read(open_columns_of, viewer.store, run)
    return viewer.render(
        request, "calibration.html", title=f"{run.name}: judge and people", run=run, tab="review", opened=opened,
        review=opened.review, state=opened.state, experiment=experiment, metric=metric, found=found, early=early,
        metrics=["passed", "value", *columns.metrics], document=Html("" if found is None else found["html"]),
        half_width=_half_width(max(opened.state.answered, 1)),
    )  # fmt: skip


def _experiment(named: RunName, opened: OpenReview, wanted: str) -> str:
    wanted = wanted or named.experiment or opened.review.experiments[0]
    if wanted not in opened.review.experiments:
        raise PageNotFoundError(f"the review {opened.review.name!r} has no trials of experiment {wanted!r}")
    return wanted


async def pick_trial(viewer: Viewer, request: Request, form: FormFields) -> Response:
    """Store what somebody says of a trial that they chose themselves. It is never part of an estimate."""
    run = (await viewer.find_run(request.path_params["run"])).run
    name, say = form.get("name"), form.get("say")
    if name not in [review.name for review in run.noted.reviews] or not any(
        say in answers for answers in ANSWERS.values()
    ):
        raise ConfigurationError(f"the answer must be on the scale of a review (got {say!r} for {name!r})")
    value = next(answers[say] for answers in ANSWERS.values() if say in answers)
    key = (await viewer.find_trial(run, form)).key
    await viewer.read(viewer.store.label, Label(key, PICKED + name, value, viewer.visitor(request).annotator))
    address = viewer.links(request).trial(run, key.experiment, key.sample_id, key.repeat, [("o", form.get("o"))])
    return Response(status_code=303, headers={"location": str(address)})


async def export_labels(viewer: Viewer, request: Request) -> Response:
    """Send the answers of a review as CSV or JSON lines; `fairtrial calibrate --labels` reads both."""
    run = (await viewer.find_run(request.path_params["run"])).run
    form = request.path_params["form"]
    if form not in ("csv", "jsonl"):
        raise PageNotFoundError("labels can be exported as labels.csv and labels.jsonl")
    opened = await named_review(viewer, run, from_segment(request.path_params["name"]))
    name = "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in f"{run.name}-{opened.review.name}")
    headers = {"content-disposition": f'attachment; filename="{name}-labels.{form}"'}
    kind = "text/csv" if form == "csv" else "application/jsonl"
    return StreamingResponse(_exported(opened, form), media_type=f"{kind}; charset=utf-8", headers=headers)


def _exported(opened: OpenReview, form: str) -> Iterator[str]:
    state: ReviewState = opened.state
    buffer = io.StringIO()
    head = ("id", "experiment", "repeat", "label", "annotator", "comment", "review")
    writer = csv.writer(buffer)
    if form == "csv":
        writer.writerow(head)
    for member in state.members:
        for who, value in sorted(state.answers.get(member.ordinal, {}).items()):
            label = value if isinstance(value, str) else "pass" if passes(value) else "fail"
            comment = state.comments.get(member.ordinal, {}).get(who, "")
            key = member.key
            row = (key.sample_id, key.experiment, key.repeat, label, who, comment, opened.review.name)
            if form == "csv":
                writer.writerow([cell_text(value, raw=False) for value in row])
            else:
                facts = json.dumps(dict(zip(head, row, strict=True)), ensure_ascii=False)
                buffer.write(facts.encode("utf-8", "replace").decode() + "\n")
    yield buffer.getvalue()


_SHOWN_LANES = ("message", "tool")  # Other events name models, which may tell the experiment.
_ABOUT_USERS = ("brief", "conversation")  # What a simulated user was told, and how it ended.
_INSTRUCTIONS = ("system", "developer")


async def review_list(viewer: Viewer, request: Request) -> Response:
    """List the reviews that the visitor can take part in."""
    who = viewer.visitor(request).annotator
    found = await all_reviews(viewer)
    rows = [(opened, opened.state.progress(who)) for opened in found]
    return viewer.render(request, "review_list.html", title="Reviews", rows=rows, who=who)


async def review_queue(viewer: Viewer, request: Request) -> Response:
    """Show the next trial of a review, or the one that the address names."""
    opened = await find_review(viewer, request.path_params["code"])
    who = viewer.visitor(request).annotator
    wanted = request.query_params.get("id", "")
    member = _member(opened, wanted) if wanted else _next(viewer, opened, who)
    progress = opened.state.progress(who)
    values: dict[str, Any] = {
        "title": f"Review {opened.review.name}", "opened": opened, "review": opened.review, "who": who,
        "progress": progress, "wanted": wanted, "member": member, "last": opened.state.last.get(who),
        "read_only": viewer.read_only,
    }  # fmt: skip
    if member is None:
        return viewer.render(request, "review_done.html", **values)
    result = await viewer.read(_result, viewer, opened, member)
    shows = request.query_params
    form = "markdown" if shows.get("form") == "markdown" else "text"
    values |= await viewer.read(blind_values, opened, member, result, who, form=form, more=dict(shows))
    values["pictures"] = await viewer.read(page_pictures, viewer.store, values["attachments"], values["events"])
    change = _changer(dict(shows), member)
    return viewer.render(request, "review_queue.html", change=change, form=form, **values)


def _changer(query: dict[str, str], member: ReviewMember) -> Any:
    """Return a function that makes the address of the same trial, shown otherwise."""

    def change(**changes: str) -> str:
        merged = {**query, "id": member.code, **changes}
        return "?" + urlencode({name: value for name, value in merged.items() if value})

    return change


def _member(opened: OpenReview, code: str) -> ReviewMember:
    found = opened.state.member(code)
    if found is None:
        raise PageNotFoundError("this trial is not part of the review")
    return found


def _next(viewer: Viewer, opened: OpenReview, who: str) -> ReviewMember | None:
    return next_member(opened.state, opened.code, who, viewer.reviews.reservations, time.monotonic())


def _result(viewer: Viewer, opened: OpenReview, member: ReviewMember) -> EvalResult:
    for result in viewer.store.results(opened.run.run_id, ordinals=[member.ordinal]):
        return result
    raise PageNotFoundError("this trial is no longer in the store")


def blind_values(
    opened: OpenReview, member: ReviewMember, result: EvalResult, who: str, *, form: str, more: dict[str, str]
) -> dict[str, Any]:
    """Return what a reviewer is shown of a trial: input, output, what the review shows, and their own words."""
    review, sample = opened.review, result.sample
    whole = more.get("whole") == "1"
    blocks = [text_block("input", sample.input, form, False, whole)]
    has_expected = sample.has_expected
    shows_expected = has_expected and ("expected" in review.shows or more.get("expected") == "1")
    blocks.append(text_block("output", result.output, form, False, whole))
    if shows_expected:
        blocks.append(text_block("expected", sample.expected, form, False, whole))
    facts = [("experiment", result.experiment)] if "experiment" in review.shows else []
    keys = [name.removeprefix("m.") for name in review.shows if name.startswith("m.")]
    facts += [(key, value_text(sample.metadata[key])) for key in keys if key in sample.metadata]
    shows_transcript = more.get("transcript") == "1"
    events = _task_transcript(result, with_instructions="experiment" in review.shows)
    own = opened.state.answers.get(member.ordinal, {}).get(who)
    own_answer = next((word for word, value in ANSWERS[review.scale].items() if value == own), "")
    return {
        "blocks": blocks, "facts": facts, "events": events if shows_transcript else None,
        "has_transcript": bool(events.entries), "has_expected": has_expected and "expected" not in review.shows,
        "shows_expected": shows_expected, "answers": [(word, KEYS[word]) for word in ANSWERS[review.scale]],
        "skip_reasons": SKIP_REASONS, "said": own_answer, "markdown": markdown,
        "skipped": opened.state.skips.get(member.ordinal, {}).get(who, ""),
        "comment": opened.state.comments.get(member.ordinal, {}).get(who, ""),
        "guidelines": markdown(review.guidelines) if review.guidelines else None,
        "attachments": _files(result),
    }  # fmt: skip


def _task_transcript(result: EvalResult, *, with_instructions: bool) -> Transcript:
    """Return the messages and tool calls of the task; nothing of judges, models and the framework.

    Instructions of the system are left out where the experiment is: a prompt often is the experiment.
    """
    own = [event for event in envelopes(result) if event.actor != JUDGE]
    found = transcript(own)
    entries = tuple(
        entry
        for entry in found.entries
        if (entry.lane in _SHOWN_LANES or entry.label in _ABOUT_USERS)
        and (with_instructions or entry.label.partition(" ")[0] not in _INSTRUCTIONS)
    )
    return Transcript(entries, len(entries), found.attempts, (), found.seconds, 0)


async def answer_trial(viewer: Viewer, request: Request, form: FormFields) -> Response:
    """Store an answer or a skip. It is in the store before the reviewer is shown the next trial."""
    opened = await find_review(viewer, request.path_params["code"])
    member = _member(opened, form.get("id"))
    labels = answer_labels(
        opened.state, member, viewer.visitor(request).annotator, say=form.get("say"), skip=form.get("skip"),
        comment=form.get("comment") if form.has("comment") else None, looked=form.get("looked") == "1",
    )  # fmt: skip
    for label in labels:
        await viewer.read(viewer.store.label, label)
    query = [("form", "markdown")] if form.get("form") == "markdown" else []
    following = viewer.links(request).queue(opened.code, query)
    if "application/json" in request.headers.get("accept", ""):
        return JSONResponse({"next": following})
    return Response(status_code=303, headers={"location": following})


async def review_blob(viewer: Viewer, request: Request) -> Response:
    """Send an attachment of a drawn trial, if its page can show it: of input, output, or transcript."""
    opened = await find_review(viewer, request.path_params["code"])
    member = _member(opened, request.query_params.get("id", ""))
    result = await viewer.read(_result, viewer, opened, member)
    events = _task_transcript(result, with_instructions="experiment" in opened.review.shows)
    files = chain(_files(result), chain.from_iterable(entry.attachments for entry in events.entries))
    return await send_blob(viewer, request.path_params["sha256"], files)


def _files(result: EvalResult) -> list[AttachmentShown]:
    return list(dict.fromkeys(attachments_in([to_json(result.sample.input), to_json(result.output)])))
