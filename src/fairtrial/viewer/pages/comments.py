"""Comments of people on trials and on runs.

They are stored as labels, which are only added: people who write at the same moment lose nothing of one another.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from fairtrial.errors import ConfigurationError
from fairtrial.store.protocol import Label, RunRecord, RunStore
from fairtrial.store.redact import current
from fairtrial.trials.context import TrialKey
from fairtrial.viewer.pages.context import FormFields, PageNotFoundError, Viewer
from fairtrial.viewer.review import COMMENT, MAX_TEXT
from fairtrial.viewer.text import shown

TRIAL_COMMENT, RUN_COMMENT = "~comment", "~run-comment"
"""Names of labels with the id of a comment and its text; None withdraws it."""


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment. `id` is empty, and `review` is not, if it was made in a review."""

    id: str
    text: str
    annotator: str
    at: float
    key: TrialKey
    review: str = ""

    @property
    def when(self) -> str:
        """The time, to the minute; empty if it is damaged."""
        try:
            return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.at))
        except (OverflowError, ValueError, OSError):
            return ""


def read_comments(store: RunStore, run: RunRecord, names: Iterable[str]) -> list[Comment]:
    """Return the comments in labels of these names, the oldest first."""
    found: dict[tuple[str, TrialKey, str, str], Comment] = {}
    for name in names:
        for label in store.labels(run.run_id, name=name):
            id, text = _content(label)
            same = (name, label.key, label.annotator, id)  # Nobody withdraws a comment of somebody else.
            found.pop(same, None)
            if isinstance(text, str) and text:
                review = name.removeprefix(COMMENT) if name.startswith(COMMENT) else ""
                found[same] = Comment(id, text, label.annotator, label.at, label.key, review)
    return sorted(found.values(), key=lambda comment: comment.at)


def _content(label: Label) -> tuple[str, object]:
    """Return the id of the comment in a label, and its text."""
    if label.name.startswith(COMMENT):
        return "", label.value
    value = label.value if isinstance(label.value, Mapping) else {}
    return str(value.get("id", "")), value.get("text")


def comments_of_trial(store: RunStore, run: RunRecord, key: TrialKey) -> list[Comment]:
    """Return the comments on a trial, also those of reviews."""
    names = (TRIAL_COMMENT, *(COMMENT + review.name for review in run.noted.reviews))
    return [comment for comment in read_comments(store, run, names) if comment.key == key]


async def change_comments(viewer: Viewer, request: Request, form: FormFields) -> Response:
    """Add a comment on a run or, with its ordinal, on a trial; or withdraw one's own."""
    run = (await viewer.find_run(request.path_params["run"])).run
    if form.get("run") != run.run_id:  # Another run may have the name of one that was deleted.
        raise PageNotFoundError(f"the run of this form is no longer {run.name}: it may have been deleted meanwhile")
    links, who = viewer.links(request), viewer.visitor(request).annotator
    name, key, page, part = RUN_COMMENT, TrialKey(run.run_id, run.experiments[0], "", 0), links.run(run), ""
    if form.has("o"):
        name, key = TRIAL_COMMENT, (await viewer.find_trial(run, form)).key
        query = request.query_params.multi_items()
        page = str(links.trial(run, key.experiment, key.sample_id, key.repeat, query))
        part = f" {key.experiment}/{key.sample_id}/{key.repeat}"
    if id := form.get("withdraw"):
        known = await viewer.read(read_comments, viewer.store, run, [name])
        if not any((comment.id, comment.annotator, comment.key) == (id, who, key) for comment in known):
            raise ConfigurationError("a comment can be withdrawn only by who wrote it")
        value: dict[str, str | None] = {"id": id, "text": None}
    else:
        value = {"id": secrets.token_hex(8), "text": _checked_text(form.get("text"))}
    await viewer.record_change(request, "withdrew a comment" if id else "commented", run, part)
    await viewer.read(viewer.store.label, Label(key, name, value, who))
    return Response(status_code=303, headers={"location": f"{page}#comments"})


def _checked_text(text: str) -> str:
    text = text.replace("\r\n", "\n").strip()  # What browsers make of the end of a line.
    if not shown(text).text.strip() or len(text) > MAX_TEXT:
        raise ConfigurationError(f"a comment must have 1 to {MAX_TEXT:,} characters (got {len(text):,})")
    return current().text(text)
