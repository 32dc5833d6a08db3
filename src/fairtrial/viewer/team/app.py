"""The application of a team: who asks, which project, and what they may do there."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from fairtrial.base.formatting import count
from fairtrial.base.metrics import Histogram, Measure
from fairtrial.errors import FairtrialError, StoreError
from fairtrial.runs.events import log
from fairtrial.viewer.access import (
    Access,
    BodyTooLateError,
    GuardRefusal,
    Permission,
    Visitor,
    answer_refusal,
    digest_of,
    foreign_refusal,
    is_for_people,
    pass_guarded,
    same_secret,
)
from fairtrial.viewer.app import CHANGES, TEAM_CHANGES, address_below, make_inside, ruled_routes
from fairtrial.viewer.pages.context import SCRIPTS, Viewer, make_environment, read_form, static_files
from fairtrial.viewer.pages.reviews import all_reviews
from fairtrial.viewer.question import Links
from fairtrial.viewer.team.config import ProjectSettings, TeamSettings
from fairtrial.viewer.team.database import SIGN_IN_SECONDS, Person, TeamDatabase
from fairtrial.viewer.team.identity import IdentitySource, OidcIdentity, SignInRefusedError

_PROJECT = re.compile(r"/p/([a-z0-9_-]+)(?:/|$)")
AGAIN_SECONDS = 10
"""How often a store that cannot be opened is tried again."""
REQUEST_SECONDS = Histogram("fairtrial_serve_request_duration_seconds", "From a request to its answer.", "status")
SIGN_INS = Measure("fairtrial_serve_sign_ins_total", "counter", "Sign-ins by their result.", "result")
_PATIENCE_SECONDS = 5.0
_NAMES_SECONDS = 60.0
_REFUSALS_A_MINUTE = 100
_NOT_FOUND = GuardRefusal(404, "not found, or not yours to see")


@dataclass(slots=True)
class Project:
    """A project with the viewer of its store; without one while the store cannot be opened."""

    name: str
    settings: ProjectSettings
    viewer: Viewer | None = None
    app: Any = None


@dataclass(frozen=True, slots=True)
class ReviewListed:
    """A review on the page of projects."""

    name: str
    run: str
    address: str
    open: int


@dataclass(frozen=True, slots=True)
class ProjectListed:
    """A project on the page of projects; `reviews` is None if they could not be read in time."""

    title: str
    address: str
    may: str
    reviews: Sequence[ReviewListed] | None


class TeamApp:
    """The ASGI application in front of the projects. What it does not let pass reaches none of them."""

    def __init__(self, settings: TeamSettings, identity: IdentitySource, database: TeamDatabase) -> None:
        self._settings = settings
        self._identity = identity
        self._database = database
        self._host = settings.host
        self._environment = make_environment()
        self._names: dict[str, str] = {}
        self._names_at = float("-inf")
        self._refusals: deque[float] = deque()
        self.projects = {name: Project(name, found) for name, found in settings.projects.items()}
        self._static = static_files()
        self._static_hash = digest_of(repr(self._static))[:16]

    @property
    def away(self) -> list[str]:
        """The projects whose stores could not be opened yet."""
        return [one.name for one in self.projects.values() if one.viewer is None]

    def open_project(self, name: str, viewer: Viewer) -> None:
        """Serve a project from now on."""

        async def record(request: Request, action: str, object: str = "") -> None:
            person: Person = request.scope["fairtrial.person"]
            path, query = request.url.path.removeprefix(f"/p/{name}/"), request.url.query
            what = object or (f"{path}?{query}" if query else path)
            await self._record(request.scope, action, person, name, what)

        viewer.name_of = lambda who: self._names.get(who, who)
        viewer.record = record
        routes = ruled_routes(viewer, () if viewer.read_only else (*CHANGES, *TEAM_CHANGES))
        project = self.projects[name]
        project.app = make_inside(viewer, routes)
        project.viewer = viewer

    @property
    def secure(self) -> bool:
        """Whether people reach the server over TLS."""
        return self._settings.secure

    @property
    def host_remedy(self) -> str:
        """What to do so that a host is answered."""
        return "people open the one that url in team.toml names"

    def accepts_host(self, host: str) -> bool:
        """Return whether a request may name this host: the configured one, and no other."""
        return host.lower() == self._host

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, and count it when its answer begins."""
        if scope["type"] != "http":
            return
        began = time.perf_counter()

        async def send_counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                REQUEST_SECONDS.observe(time.perf_counter() - began, f"{message['status'] // 100}xx")
            await send(message)

        await self._respond(scope, receive, send_counted)

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        scope["fairtrial.session"] = None
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        raw = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        method, query = scope["method"], scope.get("query_string", b"").decode("latin-1")
        if raw == "/healthz" and method in ("GET", "HEAD"):
            await pass_guarded(PlainTextResponse(self._health()), scope, receive, send)
            return
        if (found := foreign_refusal(method, raw, query, headers, self)) is not None:
            await answer_refusal(send, found)
            return
        try:
            answer = await self._answer_or_refuse(scope, receive, headers, raw, query)
        except ClientDisconnect:
            answer = GuardRefusal(400, "the request ended early")  # Nobody reads it.
        except BodyTooLateError:
            answer = GuardRefusal(408, "the request did not arrive in time")
        except StoreError as error:
            log.warning("a request could not be answered: %s", error)
            answer = GuardRefusal(503, "the server cannot answer at the moment")
        if isinstance(answer, GuardRefusal):
            await answer_refusal(send, answer)
        else:
            await pass_guarded(answer, scope, receive, send)

    def _health(self) -> str:
        """Return that the server lives, for anybody: it names no project."""
        away, known = len(self.away), count(len(self.projects), "project")
        return f"ok\n{away} of {known} {'is' if away == 1 else 'are'} away\n" if away else "ok\n"

    async def _answer_or_refuse(
        self, scope: Any, receive: Any, headers: Sequence[tuple[str, str]], raw: str, query: str
    ) -> Any:
        try:
            return await self._answer(scope, receive, headers, raw, query)
        except SignInRefusedError as error:
            SIGN_INS.add(1, "refused")
            await self._record_refusal(scope, str(error))
            return self._page("team_refused.html", 403, raw, reason=str(error), again=self._can_sign_in)

    @property
    def _can_sign_in(self) -> bool:
        return isinstance(self._identity, OidcIdentity)

    async def _answer(self, scope: Any, receive: Any, headers: Sequence[tuple[str, str]], raw: str, query: str) -> Any:
        """Return what answers a request: an application, or a refusal."""
        request, reads = Request(scope, receive), scope["method"] in ("GET", "HEAD")
        if raw.startswith("/static/") and reads:
            return self._file(raw)
        if isinstance(self._identity, OidcIdentity) and scope["method"] == "GET":
            if raw == "/login":
                return await self._begin(self._identity, headers, request.query_params.get("to", ""))
            if raw == "/callback":
                return await self._complete(self._identity, scope, headers, dict(request.query_params))
        person = await self._identity.person(headers)
        if person is None:
            if self._can_sign_in and is_for_people(scope["method"], headers):
                to = urlencode({"to": f"{raw}?{query}" if query else raw})
                return RedirectResponse(f"{self._settings.origin}/login?{to}", 303)
            return GuardRefusal(401, "nobody is signed in")
        await self._refresh_names(person)
        if raw == "/" and reads:
            return await self._home(person)
        if raw == "/logout" and not reads:
            return await self._logout(scope, receive, person)
        match = _PROJECT.match(raw)
        project = None if match is None else self.projects.get(match[1])
        permissions = None if project is None else project.settings.permissions(person.groups)
        if project is None or not permissions:
            return _NOT_FOUND
        if project.app is None:
            text = f"the store of project {project.name} cannot be opened; it is tried again every"
            return PlainTextResponse(f"{text} {AGAIN_SECONDS} seconds\n", 503, {"retry-after": str(AGAIN_SECONDS)})
        if raw == f"/p/{project.name}":
            return RedirectResponse(f"{self._settings.origin}/p/{project.name}/", 303)
        if raw == f"/p/{project.name}/" and "read" not in permissions:
            return RedirectResponse(f"{self._settings.origin}/p/{project.name}/review", 303)
        scope["fairtrial.person"] = person
        scope["fairtrial.session"] = self._visitor(person, permissions), person.secret
        return project.app

    async def _begin(self, identity: OidcIdentity, headers: Sequence[tuple[str, str]], to: str) -> Response:
        inside = to.lstrip("/") if to.startswith("/p/") and "\\" not in to else ""
        found = await identity.begin(headers, inside)
        cookie = self._cookie(identity.browser_cookie, found.browser, int(SIGN_IN_SECONDS))
        return Response(status_code=303, headers={"location": found.address, "set-cookie": cookie})

    async def _complete(
        self, identity: OidcIdentity, scope: Any, headers: Sequence[tuple[str, str]], answer: Mapping[str, str]
    ) -> Response:
        claims, session, started = await identity.complete(headers, answer)
        person = Person(claims.id, claims.name, claims.groups or (), session)
        self._names[person.id] = person.name
        await self._record(scope, "signed in", person)
        SIGN_INS.add(1, "signed in")
        location = f"{self._settings.origin}/{address_below(started.to)}"
        cookie = self._cookie(identity.cookie, session)
        return Response(status_code=303, headers={"location": location, "set-cookie": cookie})

    async def _logout(self, scope: Any, receive: Any, person: Person) -> Any:
        form = await read_form(Request(scope, receive))
        secret = Access.form_secret(person.secret)
        if form is None or not same_secret(form.get("form_secret"), secret):
            return GuardRefusal(403, "this form is of another session: load its page again")
        if not isinstance(self._identity, OidcIdentity):
            return GuardRefusal(404, "the proxy in front of this server signs people out")
        await to_thread.run_sync(self._database.end_session, person.secret)
        await self._record(scope, "signed out", person)
        answer = self._page("team_refused.html", 200, "/logout", reason="You have signed out.", again=True)
        answer.headers["set-cookie"] = self._cookie(self._identity.cookie, "", 0)
        return answer

    async def _home(self, person: Person) -> Response:
        """Show the projects of a person, and what waits there for their review."""
        mine = [
            (one, allowed) for one in self.projects.values() if (allowed := one.settings.permissions(person.groups))
        ]
        rows = await asyncio.gather(*(self._listed(one, allowed, person) for one, allowed in mine))
        visitor = self._visitor(person, frozenset(("read",)))
        secret = Access.form_secret(person.secret)
        return self._page("team.html", 200, "/", rows=rows, visitor=visitor, form_secret=secret)

    def _visitor(self, person: Person, permissions: frozenset[Permission]) -> Visitor:
        return Visitor(person.name, permissions, person.id, signs_out=self._can_sign_in)

    async def _listed(self, project: Project, allowed: frozenset[str], person: Person) -> ProjectListed:
        reviews: list[ReviewListed] | None = []
        if project.viewer is None:
            reviews = None
        elif "review" in allowed:
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    reviews = await self._reviews(project.name, project.viewer, person)
            except (TimeoutError, FairtrialError):
                reviews = None
        words = ", ".join(one for one in ("read", "review", "edit", "delete") if one in allowed)
        title = project.settings.title or project.name
        return ProjectListed(title, f"p/{project.name}/{'' if 'read' in allowed else 'review'}", words, reviews)

    @staticmethod
    async def _reviews(project: str, viewer: Viewer, person: Person) -> list[ReviewListed]:
        listed = []
        for opened in await all_reviews(viewer):
            if waiting := opened.state.progress(person.id).open:
                address = f"p/{project}/review/{opened.code}"
                listed.append(ReviewListed(opened.review.name, opened.run.name, address, waiting))
        return listed

    def _file(self, path: str) -> Any:
        _, _, given, name = path.split("/", 3) if path.count("/") == 3 else ("", "", "", "")
        found = self._static.get(name)
        if found is None or given != self._static_hash:
            return _NOT_FOUND
        headers = {"cache-control": "private, max-age=31536000, immutable"}
        return Response(found[1], media_type=f"{found[0]}; charset=utf-8", headers=headers)

    def _page(self, template: str, code: int, path: str, **values: Any) -> Response:
        links = Links(path.removeprefix("/"), self._static_hash)
        page = self._environment.get_template(template).render(
            links=links, store_name="", policy="", scripts=SCRIPTS, title="Projects", **values
        )
        return Response(page.encode("utf-8", "replace"), code, media_type="text/html")

    def _cookie(self, name: str, secret: str, age: int | None = None) -> str:
        """Return the header that gives a secret to a browser, for no script and no other site."""
        kept = "" if age is None else f"; Max-Age={age}"
        return f"{name}={quote(secret)}; Path=/; HttpOnly; SameSite=Lax{'; Secure' if self.secure else ''}{kept}"

    async def _refresh_names(self, person: Person) -> None:
        self._names[person.id] = person.name
        if time.monotonic() - self._names_at > _NAMES_SECONDS:
            self._names_at = time.monotonic()
            self._names = await to_thread.run_sync(self._database.names) | {person.id: person.name}

    async def _record_refusal(self, scope: Any, reason: str) -> None:
        """Record that nobody was signed in; of many in a minute, which anybody can cause, the first."""
        now = time.monotonic()
        while self._refusals and self._refusals[0] < now - 60.0:
            self._refusals.popleft()
        if len(self._refusals) < _REFUSALS_A_MINUTE:
            self._refusals.append(now)
            await self._record(scope, "sign-in refused", None, object=reason)
        else:
            log.warning("a sign-in was refused, and is not in the audit as one of many: %s", reason)

    async def _record(
        self, scope: Any, action: str, person: Person | None, project: str = "", object: str = ""
    ) -> None:
        client = scope.get("client")
        id, name = (person.id, person.name) if person is not None else ("", "")
        address = client[0] if client else ""
        await to_thread.run_sync(self._database.record, action, id, name, project, object, address)
