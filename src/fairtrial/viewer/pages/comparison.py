"""Two experiments against each other: the verdict first, then the samples that flipped, then texts side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fairtrial.base.formatting import rate
from fairtrial.data.session.events import ToolInvoked
from fairtrial.errors import FairtrialError
from fairtrial.reports.render.safe_text import value_text
from fairtrial.reports.run_names import RunName
from fairtrial.trials.result import EvalResult
from fairtrial.viewer.pages.context import PageNotFoundError, Viewer, wants_json
from fairtrial.viewer.pages.trial import verdict_of
from fairtrial.viewer.text import SHOWN, DiffPart, Html, differences, shown
from fairtrial.viewer.trial_table import open_columns_of
from fairtrial.viewer.work import CHANGES

_ON_A_PAGE = 50
_PREVIEW = 600


@dataclass(frozen=True, slots=True)
class FlipShown:
    """A sample whose result changed, with the beginnings of both outputs."""

    id: str
    kind: str
    before: str
    after: str
    outputs: tuple[list[DiffPart], list[DiffPart]]
    address: str | None


@dataclass(frozen=True, slots=True)
class SideShown:
    """One side of a sample: its trials, its first output and its tools."""

    name: str
    trials: list[tuple[str, str, str | None]]
    output: list[DiffPart]
    reason: str
    tools: list[str]


async def compare_page(viewer: Viewer, request: Request) -> Response:
    """Show the comparison of two experiments."""
    baseline, candidate = await _sides(viewer, request)
    by, kind = request.query_params.get("by", ""), request.query_params.get("kind", "")
    other_users = request.query_params.get("other_users") == "1"
    kept = [("other_users", "1")] if other_users else []
    job = {
        "job": "compare", "a": baseline.run.run_id, "a_experiment": baseline.experiment, "b": candidate.run.run_id,
        "b_experiment": candidate.experiment, "by": by, "other_users": other_users,
    }  # fmt: skip
    state = (await viewer.state_of(baseline.run), await viewer.state_of(candidate.run))
    found = await viewer.workbench.answer(job, state)
    if wants_json(request):
        return JSONResponse(found["json"])
    kind = kind if kind in CHANGES else next((name for name in CHANGES if found["counts"][name]), "lost")
    flips = [flip for flip in found["flips"] if flip["kind"] == kind]
    start = _start(request.query_params.get("from", ""))
    page = flips[start : start + _ON_A_PAGE]
    outputs = [
        await viewer.read(_outputs, viewer, side, {flip["samples"][place]: flip["id"] for flip in page})
        for place, side in enumerate((baseline, candidate))
    ]
    links = viewer.links(request)
    names = (str(baseline), str(candidate))
    addresses = [links.pair(*names, flip["id"]) for flip in page]
    # In a thread: comparing the words of many outputs takes a while.
    rows = await viewer.read(lambda: [_flip(*one, outputs) for one in zip(page, addresses, strict=True)])
    await viewer.prepare_columns(baseline.run)
    keys = (await viewer.read(open_columns_of, viewer.store, baseline.run)).metadata
    return viewer.render(
        request, "compare.html", title=found["title"], about=found["about"], report=Html(found["html"]), rows=rows,
        counts=found["counts"], kind=kind, kinds=CHANGES, names=names, by=by, keys=keys, start=start,
        following=start + _ON_A_PAGE if start + _ON_A_PAGE < len(flips) else 0,
        swapped=links.compare(names[1], names[0], kept), kept=kept, runs=(baseline.run, candidate.run),
    )  # fmt: skip


def _start(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 9 else 0


async def _sides(viewer: Viewer, request: Request) -> tuple[RunName, RunName]:
    named = []
    for letter in ("a", "b"):
        text = request.query_params.get(letter, "")
        if not text:
            raise PageNotFoundError("a comparison needs two sides: compare?a=support@3:baseline&b=support@4:careful")
        named.append(await viewer.find_run(text))
    first, second = named
    if first.experiment is None:
        first = RunName(first.run, _same(second.experiment, first.run.experiments, 0))
    if second.experiment is None:
        taken = first.experiment if first.run.run_id == second.run.run_id else None
        others = [name for name in second.run.experiments if name != taken] or list(second.run.experiments)
        second = RunName(second.run, _same(None if taken else first.experiment, others, 0))
    return first, second


def _same(name: str | None, names: Any, otherwise: int) -> str:
    return str(name if name in names else names[otherwise])


def _outputs(viewer: Viewer, side: RunName, samples: dict[int, str]) -> dict[str, str]:
    """Return the beginning of the first output of each sample, by its id; `samples` has their places in the run."""
    run = side.run
    experiment = run.experiments.index(side.experiment or "")
    ordinals = [run.ordinal(place, experiment, repeat) for place in samples for repeat in range(run.repeats)]
    found: dict[str, str] = {}
    for preview in viewer.store.previews(run.run_id, ordinals, size=_PREVIEW):
        text = preview.output if preview.outcome == "scored" else preview.note
        found.setdefault(samples[run.split(preview.ordinal)[0]], text)
    return found


def _flip(flip: dict[str, Any], address: str | None, outputs: list[dict[str, str]]) -> FlipShown:
    left, right, _ = differences(*(shown(side.get(flip["id"], "")).text for side in outputs))
    before, after = (_in_words(*flip[letter]) for letter in ("a", "b"))
    return FlipShown(flip["id"], flip["kind"], before, after, (left, right), address)


def _in_words(passed: float, value: float) -> str:
    word = "passed" if passed == 1 else "failed" if passed == 0 else f"passed {rate(passed)} of repeats"
    return f"{word}, {value:.3f}"


async def pair_page(viewer: Viewer, request: Request) -> Response:
    """Show one sample of both sides, with what differs in the outputs marked."""
    sides = await _sides(viewer, request)
    sample_id = request.query_params.get("id", "")
    results = [await viewer.read(_results, viewer, side, sample_id) for side in sides]
    if not all(results):
        raise PageNotFoundError(f"sample {sample_id!r} has no result on both sides")
    texts = [shown(_text(found[0])).text[:SHOWN] for found in results]
    left, right, remark = await viewer.read(differences, *texts)
    links = viewer.links(request)
    made = []
    for side, found, parts in zip(sides, results, (left, right), strict=True):
        trials = [
            (f"repeat {one.repeat}: {verdict_of(one)[0]}" if side.run.repeats > 1 else verdict_of(one)[0],
             verdict_of(one)[1],
             links.trial(side.run, one.experiment, one.sample_id, one.repeat, [("o", str(one.ordinal))]))
            for one in found
        ]  # fmt: skip
        reason = "" if found[0].score is None else found[0].score.reason or ""
        tools = await viewer.read(_tools, found[0])
        made.append(SideShown(str(side), trials, parts, reason, tools))
    sample = await viewer.read(lambda: results[0][0].sample)
    return viewer.render(
        request, "pair.html", title=f"{sample_id}: {sides[1]} against {sides[0]}", sides=made, remark=remark,
        sample_id=sample_id, input=shown(value_text(sample.input)).text,
        expected=None if not sample.has_expected else shown(value_text(sample.expected)).text,
        back=links.compare(str(sides[0]), str(sides[1])), tools_differ=made[0].tools != made[1].tools,
    )  # fmt: skip


def _results(viewer: Viewer, side: RunName, sample_id: str) -> list[EvalResult]:
    return list(viewer.store.results(side.run.run_id, experiment=side.experiment, sample_ids=[sample_id]))


def _text(result: EvalResult) -> str:
    return value_text(result.output) if result.error is None else result.error


def _tools(result: EvalResult) -> list[str]:
    try:
        return [call.name for call in result.session[ToolInvoked].all()]
    except FairtrialError:
        return []
