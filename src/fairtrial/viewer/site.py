"""A run as static pages in a zip file: made by the same templates, without scripts, to be sent or published."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fairtrial.errors import FairtrialError
from fairtrial.reports.render.pictures import attachments_of, pictures_of_page
from fairtrial.reports.run_names import rerun_command
from fairtrial.store.export import opened
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.result import EvalResult, Outcome
from fairtrial.viewer.pages.context import make_environment, static_files
from fairtrial.viewer.pages.runs import count_state, report_parts
from fairtrial.viewer.pages.trial import Neighbour, trial_values, verdict_of
from fairtrial.viewer.question import STATES, Links, Question
from fairtrial.viewer.work import Jobs

MOST_TRIALS = 2_000
"""Trials with a page of their own; failed ones come first."""
MOST_PICTURE_BYTES = 200 << 20
POLICY = "default-src 'none'; style-src 'self' file:; img-src 'self' file:; base-uri 'none'; form-action 'none'"
_ERRORS: tuple[Outcome, ...] = ("task_error", "scorer_error", "timeout", "dead_letter", "user_error")


class SiteLinks(Links):
    """Links between the files of a site. What needs a server has none."""

    def __init__(self, depth: int, pages: dict[tuple[str, str, int], str], pictures: Mapping[str, str]) -> None:
        super().__init__("")
        self.up = "../" * depth or "./"
        self._pages = pages
        self._pictures = pictures

    def static(self, name: str) -> str:
        """Return a file beside the pages."""
        return f"{self.up}{name}"

    def runs(self, **query: str) -> str:
        """There is one run only."""
        return ""

    def history(self, suite: str, query: Iterable[tuple[str, str]] = ()) -> str:
        """There is one run only."""
        return ""

    def run(self, run: RunRecord) -> str:
        """Return the report."""
        return f"{self.up}index.html"

    def trials(self, run: RunRecord, query: Iterable[tuple[str, str]] = ()) -> str:
        """Return the list of trials; a filter becomes the section of a state."""
        states = [value for name, value in query if name == "outcome"]
        return f"{self.up}trials.html" + (f"#{states[0]}" if len(states) == 1 else "")

    def trial(
        self, run: RunRecord, experiment: str, sample: str, repeat: int, query: Iterable[tuple[str, str]] = ()
    ) -> str | None:
        """Return the page of a trial that has one."""
        found = self._pages.get((experiment, sample, repeat))
        return None if found is None else f"{self.up}{found}"

    def blob(self, run: RunRecord, sha256: str, ordinal: int) -> str | None:
        """Return a picture; other attachments are not part of a site."""
        found = self._pictures.get(sha256)
        return None if found is None else f"{self.up}{found}"

    def live(self, run: RunRecord) -> str | None:
        """Nothing changes any more."""
        return None

    def reviews(self, run: RunRecord) -> str:
        """A review needs a server."""
        return ""

    def matrix(self, query: Iterable[tuple[str, str]]) -> str:
        """A matrix needs a server."""
        return ""

    def search(self, name: str, query: Iterable[tuple[str, str]] = ()) -> str:
        """There is one run only."""
        return ""

    def compare(self, baseline: str, candidate: str, query: Iterable[tuple[str, str]] = ()) -> str | None:
        """A comparison needs a server."""
        return None


def write_site(store: RunStore, run: RunRecord, path: Path) -> None:
    """Write the pages of a run into a zip file.

    Args:
        store: The store of the run.
        run: The run.
        path: The zip file, replaced when it is complete.
    """
    chosen = list(islice(_selected_trials(store, run), MOST_TRIALS))
    chosen.sort(key=lambda result: result.ordinal)
    pages = {
        (result.experiment, result.sample_id, result.repeat): f"t/{number:04}.html"
        for number, result in enumerate(chosen, 1)
    }
    with opened(path, binary=True) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _pages(store, run, chosen, pages):
            # The same content makes the same file.
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)


def _selected_trials(store: RunStore, run: RunRecord) -> Iterator[EvalResult]:
    """Yield the trials: failed ones, errors, then those that passed."""
    yield from store.results(run.run_id, passed=False)
    yield from store.results(run.run_id, outcomes=_ERRORS)
    yield from store.results(run.run_id, passed=True)


def _pages(
    store: RunStore, run: RunRecord, chosen: list[EvalResult], pages: dict[tuple[str, str, int], str]
) -> Iterator[tuple[str, str | bytes]]:
    environment = make_environment()
    pictures: dict[str, str] = {}  # Hash -> name of the file.
    room = MOST_PICTURE_BYTES

    def render(template: str, depth: int, **values: Any) -> str:
        links = SiteLinks(depth, pages, pictures)
        text = environment.get_template(template).render(
            links=links, scripts=(), store_name=run.suite, policy=POLICY, run=run, **values
        )
        return text.encode("utf-8", "replace").decode("utf-8")

    for name in ("view.css", "icon.svg"):
        yield name, static_files()[name][1]
    yield "index.html", _report(store, run, render, SiteLinks(0, pages, pictures))
    planned = [(state, [result for result in chosen if _state(result) == state]) for state in STATES]
    sections = [(state, [(result, *verdict_of(result)) for result in some]) for state, some in planned if some]
    stored = sum(sum(part.outcomes.values()) for part in store.totals(run.run_id))
    title, left_out = f"{run.name}: trials", stored - len(chosen)
    yield "trials.html", render("site_trials.html", 0, title=title, sections=sections, left_out=left_out, tab="trials")
    for place, result in enumerate(chosen):
        values = trial_values(run, result, {})
        values["pictures"] = shown = {}
        for picture, state, content in pictures_of_page(store, attachments_of(result)):
            shown[picture] = state
            if state.picture is not None and picture.sha256 not in pictures and len(content) <= room:
                room -= len(content)
                pictures[picture.sha256] = f"p/{picture.sha256}.{state.picture.media_type.removeprefix('image/')}"
                yield pictures[picture.sha256], content
        around = [chosen[at] if 0 <= at < len(chosen) else None for at in (place - 1, place + 1)]
        addresses = [
            None if one is None else f"../{pages[one.experiment, one.sample_id, one.repeat]}" for one in around
        ]
        others = [
            Neighbour(
                name, repeat, "" if (name, repeat) != (result.experiment, result.repeat) else values["verdict"],
                values["tone"],
                None if (name, repeat) == (result.experiment, result.repeat)
                else f"../{pages[name, result.sample_id, repeat]}",
            )
            for name in run.experiments
            for repeat in range(run.repeats)
            if (name, result.sample_id, repeat) in pages
        ]  # fmt: skip
        yield pages[result.experiment, result.sample_id, result.repeat], render(
            "trial.html", 1, title=f"{result.sample_id} {run.name}", result=result, others=others, question=Question(),
            previous=addresses[0], next=addresses[1], tab="trial", query={}, change=None, **values,
        )  # fmt: skip


def _report(store: RunStore, run: RunRecord, render: Any, links: SiteLinks) -> str:
    found = Jobs(store).answer({"job": "report", "run_id": run.run_id})
    if "error" in found:
        raise FairtrialError(found["error"])
    rows = [
        (
            part.experiment,
            [(name, count_state(part, name), links.trials(run, [("outcome", name)])) for name in STATES],
        )
        for part in store.totals(run.run_id)
    ]
    text: str = render(
        "report.html", 0, title=run.name, rows=rows, states=STATES, stored=0, others=[],
        **report_parts(found, run, links), problem="", computing=False, owner=None, resume="", tab="report",
        again="" if run.imported else rerun_command(run),
    )  # fmt: skip
    return text


def _state(result: EvalResult) -> str:
    return result.outcome if result.score is None else "passed" if result.score.passed else "failed"
