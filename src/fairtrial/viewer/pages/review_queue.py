"""Review trial by trial: what reviewers see, and nothing of what they should not see.

The judge, the experiment, the run and what others said are not hidden by the page: they are not sent.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fairtrial.base.codec import to_json
from fairtrial.data.session.views import JUDGE
from fairtrial.reports.render.safe_text import envelopes, value_text
from fairtrial.trials.result import EvalResult
from fairtrial.viewer.events import Transcript, attachments_in, transcript
from fairtrial.viewer.pages.context import FormFields, PageNotFoundError, Viewer
from fairtrial.viewer.pages.reviews import OpenReview, all_reviews, find_review
from fairtrial.viewer.pages.trial import send_blob, text_block
from fairtrial.viewer.review import ANSWERS, KEYS, SKIP_REASONS, ReviewMember, answer_labels, next_member
from fairtrial.viewer.text import markdown

_SHOWN_LANES = ("message", "tool")  # Other events name models, which may tell the experiment.
_INSTRUCTIONS = ("system", "developer")


async def review_list(viewer: Viewer, request: Request) -> Response:
    """List the reviews that the visitor can take part in."""
    who = viewer.visitor(request).name
    found = await all_reviews(viewer)
    rows = [(opened, opened.state.progress(who)) for opened in found]
    return viewer.render(request, "review_list.html", title="Reviews", rows=rows, who=who)


async def review_queue(viewer: Viewer, request: Request) -> Response:
    """Show the next trial of a review, or the one that the address names."""
    opened = await find_review(viewer, request.path_params["code"])
    who = viewer.visitor(request).name
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
        "attachments": list(dict.fromkeys(attachments_in([to_json(sample.input), to_json(result.output)]))),
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
        if entry.lane in _SHOWN_LANES and (with_instructions or entry.label.partition(" ")[0] not in _INSTRUCTIONS)
    )
    return Transcript(entries, len(entries), found.attempts, (), found.seconds, 0)


async def answer_trial(viewer: Viewer, request: Request, form: FormFields) -> Response:
    """Store an answer or a skip. It is in the store before the reviewer is shown the next trial."""
    opened = await find_review(viewer, request.path_params["code"])
    member = _member(opened, form.get("id"))
    labels = answer_labels(
        opened.state, member, viewer.visitor(request).name, say=form.get("say"), skip=form.get("skip"),
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
    """Send an attachment of the input or the output of a drawn trial."""
    opened = await find_review(viewer, request.path_params["code"])
    member = _member(opened, request.query_params.get("id", ""))
    result = await viewer.read(_result, viewer, opened, member)
    trees = [to_json(result.sample.input), to_json(result.output)]
    return await send_blob(viewer, request.path_params["sha256"], trees)
