"""What every page knows: the store, the run, live updates."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl

import jinja2
from anyio import CapacityLimiter, to_thread
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from fairtrial.base import formatting
from fairtrial.base.codec import digest
from fairtrial.base.frozen import LruCache
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.metrics import run_totals
from fairtrial.reports.render.html import page_style
from fairtrial.reports.render.safe_text import plain
from fairtrial.reports.run_names import RunName, find_run
from fairtrial.reports.search.search import search_of
from fairtrial.runs.run_lease import with_current_status
from fairtrial.store.numbers import NumberStore
from fairtrial.store.protocol import RunRecord, RunStore, Totals
from fairtrial.trials.result import EvalResult
from fairtrial.viewer.access import Access, Permission, Visitor
from fairtrial.viewer.question import Links, Question, from_segment
from fairtrial.viewer.review import Reservations, ReviewMember
from fairtrial.viewer.text import shown
from fairtrial.viewer.working import Workbench

if TYPE_CHECKING:
    from fairtrial.reports.figures.trial_columns import TrialColumns
    from fairtrial.viewer.trial_table import TableCounts, TablePage

MAX_STREAMS = 20
INTERVAL_SECONDS = 1.0
_COMMENT_SECONDS = 15.0
_SHARE = 20  # Reading takes at most a twentieth of the time.


class LiveStreams:
    """Counts the open streams, and ends them when the server ends.

    Args:
        longest: The seconds after which a browser must ask again: its session may have ended, or its role.
    """

    def __init__(self, longest: float = 60.0) -> None:
        self.open = 0
        self._longest = longest
        self._closed = asyncio.Event()

    @property
    def full(self) -> bool:
        """True if no further stream may be opened."""
        return self.open >= MAX_STREAMS

    def close(self) -> None:
        """End all streams."""
        self._closed.set()

    async def follow(self, read: Callable[[], Awaitable[dict[str, Any] | None]]) -> AsyncIterator[bytes]:
        """Yield an event whenever what `read` returns has changed; ends after a status other than "running"."""
        self.open += 1
        last, quiet_since = "", time.monotonic()
        end = quiet_since + self._longest
        try:
            yield b"retry: 2000\n\n"
            while not self._closed.is_set() and time.monotonic() < end:
                began = time.monotonic()
                state = await read()
                took = time.monotonic() - began
                if state is None:
                    yield b"event: gone\ndata: {}\n\n"
                    return
                text = json.dumps(state)
                if text != last:
                    last, quiet_since = text, time.monotonic()
                    yield f"event: progress\ndata: {text}\n\n".encode()
                elif time.monotonic() - quiet_since > _COMMENT_SECONDS:
                    quiet_since = time.monotonic()
                    yield b": still here\n\n"
                if state["status"] != "running":
                    yield b"event: ended\ndata: {}\n\n"
                    return
                try:
                    await asyncio.wait_for(self._closed.wait(), max(INTERVAL_SECONDS, _SHARE * took))
                except TimeoutError:
                    pass
        finally:
            self.open -= 1


_THREADS = 4
_KEPT_TOTALS = 200
_KEPT_COUNTS = 200
_KEPT_REVIEWS = 50
SHOWN_COMMENTS = 200
"""How many comments a page shows, the last ones."""
SCRIPTS = ("review.js", "keys.js", "live.js", "table.js", "copy.js")


def static_files() -> dict[str, tuple[str, bytes]]:
    """Return the style sheet and the scripts: name -> (media type, content)."""
    folder = files("fairtrial.viewer") / "static"
    found = {name: ("text/javascript", (folder / name).read_bytes()) for name in SCRIPTS}
    style = page_style() + (folder / "view.css").read_text(encoding="utf-8")
    icon = ("image/svg+xml", (folder / "icon.svg").read_bytes())
    return {"view.css": ("text/css", style.encode()), "icon.svg": icon, **found}


def make_environment() -> jinja2.Environment:
    """Return the templates. Everything is escaped, and an unknown name is an error."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.PackageLoader("fairtrial.viewer", "templates"),
    )
    environment.filters["quoted"] = shlex.quote
    environment.globals.update(
        rate=formatting.rate,
        number=formatting.number,
        duration=formatting.duration,
        money=formatting.money,
        cost=formatting.cost,
        count=formatting.count,
        ago=formatting.ago,
        shown=shown,
        plain=plain,
        search_of=search_of,
        visitor=Visitor(""),
        name_of=str,
        may_delete=False,
        may_comment=False,
        comments=None,
        shown_comments=SHOWN_COMMENTS,
        form_secret="",
        exports=("csv", "jsonl", *(["parquet"] if find_spec("pyarrow") else [])),
    )
    return environment


class ReviewDesk:
    """What the server remembers of reviews: everything that matters is in the store.

    Attributes:
        runs: The run of each review, by the code of the review.
        members: The drawn trials and the number of trials they were drawn from, by the state of the run.
        reservations: What reviewers are looking at.
        lock: Held while the notes of a run are changed.
    """

    def __init__(self) -> None:
        self.runs: dict[str, str] = {}
        self.members: LruCache[Any, tuple[list[ReviewMember], int]] = LruCache(_KEPT_REVIEWS)
        self.reservations = Reservations()
        self.lock = asyncio.Lock()


class Recorder(Protocol):
    """Adds to an audit what was done with a request."""

    async def __call__(self, request: Request, action: str, object: str = "") -> None:
        """Add an entry, by default about the address of the request."""
        ...


class PageNotFoundError(Exception):
    """There is no such page; the message says what is missing and what to do."""


class Viewer:
    """The state of one server."""

    def __init__(
        self, store: RunStore, workbench: Workbench, access: Access, *, store_name: str, read_only: bool
    ) -> None:
        self.store = store
        self.workbench = workbench
        self.access = access
        self.store_name = store_name
        self.read_only = read_only
        self.streams = LiveStreams()
        self.static = static_files()
        self.static_hash = hashlib.sha256(b"".join(content for _, content in self.static.values())).hexdigest()[:16]
        self._environment = make_environment()
        self._limiter: CapacityLimiter | None = None
        self._totals: dict[Any, list[Totals]] = {}
        self._counts: LruCache[Any, TableCounts] = LruCache(_KEPT_COUNTS)
        self._complete: LruCache[Any, bool] = LruCache(_KEPT_TOTALS)  # Runs that have all samples of their dataset.
        self.reviews = ReviewDesk()
        self.name_of: Callable[[str], str] = str  # The name of who gave a label.
        self.record: Recorder | None = None  # The audit, where there is one.

    async def record_change(self, request: Request, action: str, run: RunRecord, part: str = "") -> None:
        """Tell the audit before a change that nobody could trace afterwards, and of which run: names move on."""
        if self.record is not None:
            await self.record(request, action, f"{run.name} ({run.run_id}){part}")

    async def read[T](self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a function that reads the store in one of a few threads."""
        if self._limiter is None:
            self._limiter = CapacityLimiter(_THREADS)
        return await to_thread.run_sync(partial(function, *args, **options), limiter=self._limiter)

    async def find_run(self, text: str) -> RunName:
        """Find a run by its name in an address."""

        def find() -> RunName:
            named = find_run(self.store, from_segment(text))
            return RunName(with_current_status(self.store, named.run), named.experiment)

        return await self.read(find)

    async def find_trial(self, run: RunRecord, form: FormFields) -> EvalResult:
        """Find the trial whose ordinal a form carries."""
        ordinal = form.number("o")
        for result in await self.read(lambda: list(self.store.results(run.run_id, ordinals=[ordinal]))):
            return result
        raise PageNotFoundError("there is no such trial")

    def totals(self, run: RunRecord) -> list[Totals]:
        """Return the sums of a run; those of finished runs are kept."""
        if run.finished_at is None or run.status == "running":
            return self.store.totals(run.run_id)
        key = (run.run_id, run.finished_at, run.revision)
        if key not in self._totals:
            self._totals[key] = run_totals(self.store, run)
            while len(self._totals) > _KEPT_TOTALS:
                self._totals.pop(next(iter(self._totals)))
        return self._totals[key]

    async def prepare_columns(self, run: RunRecord) -> None:
        """Have the columns of a large run built by a child, if that has not been done yet."""
        from fairtrial.viewer.trial_table import needs_building  # numpy takes longer to load than a list of runs.

        if await self.read(needs_building, self.store, run):
            await self.workbench.answer({"job": "columns", "run_id": run.run_id}, await self.state_of(run))

    async def counts(self, run: RunRecord, columns: TrialColumns, question: Question) -> TableCounts:
        """Return the counts of what is filtered; pages of one filter share them."""
        from fairtrial.viewer.trial_table import count_trials

        filters = _filters(question)
        key = (await self.state_of(run), filters)
        if (known := self._counts.get(key)) is None:
            known = await self.read(count_trials, columns, filters)
            self._counts.put(key, known)
        return known

    async def table(self, run: RunRecord, columns: TrialColumns, question: Question) -> tuple[TableCounts, TablePage]:
        """Return the counts of what is filtered, and the rows of one page."""
        from fairtrial.viewer.trial_table import count_and_find, find_page

        key = (await self.state_of(run), _filters(question))
        if (known := self._counts.get(key)) is not None:
            return known, await self.read(find_page, columns, question)
        counts, page = await self.read(count_and_find, columns, question)
        self._counts.put(key, counts)
        return counts, page

    def may(self, request: Request, needed: Permission) -> bool:
        """Return whether a form that needs this permission is of use to a visitor."""
        return not self.read_only and needed in self.visitor(request).permissions

    @staticmethod
    def visitor(request: Request) -> Visitor:
        """Return whose request it is."""
        found = request.scope.get("fairtrial.session")
        return Visitor("") if found is None else found[0]

    @staticmethod
    def form_secret(request: Request) -> str:
        """Return the value that the forms of this session carry."""
        found = request.scope.get("fairtrial.session")
        return Access.form_secret("" if found is None else found[1])

    async def state_of(self, run: RunRecord) -> tuple[Any, ...]:
        """Return what changes whenever the results of a run change."""
        return await self.read(self._state_of, run)

    async def state_of_all(self, runs: Iterable[RunRecord]) -> tuple[Any, ...]:
        """Return what changes whenever the results of some run change."""
        return await self.read(lambda: tuple(map(self._state_of, runs)))

    def _state_of(self, run: RunRecord) -> tuple[Any, ...]:
        key = (run.run_id, run.revision)
        state = _stored_state(self.store, run, samples=self._complete.get(key) is None)
        if state[-1] == (run.dataset_size, run.dataset_size):
            self._complete.put(key, True)
        return state[:-1] if self._complete.get(key) else state

    def links(self, request: Request) -> Links:
        """Return the links of a page."""
        raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
        path = raw.decode("latin-1").removeprefix(f"/{self.access.prefix}/")
        return Links(path, self.static_hash)

    def render(self, request: Request, template: str, *, code: int = 200, **values: Any) -> Response:
        """Return a page."""
        values |= {"visitor": self.visitor(request), "form_secret": self.form_secret(request), "name_of": self.name_of}
        values.setdefault("may_comment", self.may(request, "review"))
        text = self.render_text(template, links=self.links(request), scripts=SCRIPTS, **values)
        return HTMLResponse(text, code)

    def render_text(self, template: str, **values: Any) -> str:
        """Return the text of a page."""
        page = self._environment.get_template(template).render(store_name=self.store_name, policy="", **values)
        return page.encode("utf-8", "replace").decode("utf-8")


def _stored_state(store: RunStore, run: RunRecord, *, samples: bool) -> tuple[Any, ...]:
    """Return what changes whenever the results of a run change, or what its pages say of it.

    The last part is how many samples are stored, which runs of the same dataset share; None without `samples`.
    """
    # Until its end, a run gets more results without a new revision.
    totals = () if run.finished_at is not None else store.totals(run.run_id)
    stored = tuple(tuple(sorted(part.outcomes.items())) for part in totals)
    known = tuple(store.sample_state(run.run_id)) if samples and isinstance(store, NumberStore) else None
    return run.run_id, run.revision, run.finished_at, run.status, digest(dict(run.notes)), stored, known


def _filters(question: Question) -> Question:
    """Return the question without what changes no count."""
    return replace(question.first_page, sort="ordinal", descending=False, text="")


class FormFields:
    """The fields of a form that was sent."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self._pairs = pairs

    def get(self, name: str) -> str:
        """Return a field; empty if the form does not have it."""
        return next((value for known, value in self._pairs if known == name), "")

    def has(self, name: str) -> bool:
        """Return whether the form has a field."""
        return any(known == name for known, _ in self._pairs)

    def every(self, name: str) -> list[str]:
        """Return all values of a field that can be chosen more than once."""
        return [value for known, value in self._pairs if known == name]

    def number(self, name: str) -> int:
        """Return a field that must be a whole number; raises `ConfigurationError`."""
        text = self.get(name).strip()
        if not text.isdecimal() or len(text) > 9:
            raise ConfigurationError(f"{name} must be a whole number (got {text!r})")
        return int(text)


async def read_form(request: Request) -> FormFields | None:
    """Return the fields of a form; None if the request has no form."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        return None
    try:
        pairs = parse_qsl((await request.body()).decode(), keep_blank_values=True, max_num_fields=1_000)
    except ValueError:
        return None
    return FormFields(pairs)


def wants_json(request: Request) -> bool:
    """Return whether a program asks, which gets the figures as JSON."""
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and "text/html" not in accepted
