"""Find a review and read its state from the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fairtrial.errors import ConfigurationError
from fairtrial.reports.calibrate.review_sample import draw_trials
from fairtrial.store.notes import SKIP, ReviewNote
from fairtrial.store.protocol import Label, RunRecord
from fairtrial.viewer.pages.context import PageNotFound, Viewer
from fairtrial.viewer.review import COMMENT, LOOKED, ReviewMember, ReviewState, make_members, review_code
from fairtrial.viewer.run_columns import open_columns_of

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
        raise PageNotFound("there is no such review: its run may have been deleted")
    return await open_review(viewer, *found)


async def named_review(viewer: Viewer, run: RunRecord, name: str) -> OpenReview:
    """Find a review of a run by its name."""
    for review in run.noted.reviews:
        if review.name == name:
            return await open_review(viewer, run, review)
    raise PageNotFound(f"run {run.name} has no review {name!r}")


async def all_reviews(viewer: Viewer) -> list[OpenReview]:
    """Return the reviews of the newest runs."""

    def find() -> list[tuple[RunRecord, ReviewNote]]:
        runs = viewer.store.runs(limit=_SEARCHED_RUNS)
        return [(run, review) for run in runs if run.status != "running" for review in run.noted.reviews]

    return [await open_review(viewer, run, review) for run, review in await viewer.read(find)]
