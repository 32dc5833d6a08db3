"""The table of routes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import quote, unquote

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from fairtrial.errors import FairtrialError, StoreError, UnknownRunError
from fairtrial.reports.run_names import UnknownNameError
from fairtrial.viewer.access import BodyTooLateError, Guard, Permission, Visitor, same_secret
from fairtrial.viewer.pages.comments import change_comments
from fairtrial.viewer.pages.context import PageNotFoundError, Viewer, read_form
from fairtrial.viewer.pages.runs import delete_run, keep_run, live_stream, report_page, runs_page
from fairtrial.viewer.question import segment

_WRONG_TOKEN_SECONDS = 0.5
_IN_ADDRESS = "%/?&=@:+~,;!$'()*"
_STEP = frozenset((".", ".."))

type PageFunction = Callable[[Viewer, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Later:
    """A page whose module is loaded when it is first asked for: most need numpy, which the list of runs does not."""

    module: str
    name: str

    async def __call__(self, *given: Any) -> Response:
        """Show the page, or make the change."""
        page = getattr(import_module(f"fairtrial.viewer.pages.{self.module}"), self.name)
        found: Response = await page(*given)
        return found


@dataclass(frozen=True, slots=True)
class RouteRule:
    """A route, what it needs, and what the audit of a team calls its use.

    Attributes:
        path: The path below the prefix.
        function: The page, or the change.
        needs: What a visitor must be allowed to do.
        needs_too: What else; None for nothing.
        action: Its name in the audit; empty for pages that show no text of a trial, and changes that record themselves.
    """

    path: str
    function: Any
    needs: Permission
    action: str = ""
    needs_too: Permission | None = None


_READ, _LISTED, _EXPORTED = "read transcript", "read trials", "exported"
PAGES = (
    RouteRule("/", runs_page, "read"),
    RouteRule("/history", _Later("history", "history_page"), "read"),
    RouteRule("/compare", _Later("comparison", "compare_page"), "read"),
    RouteRule("/compare/sample", _Later("comparison", "pair_page"), "read", _READ),
    RouteRule("/matrix", _Later("matrix", "matrix_page"), "read", _LISTED),
    RouteRule("/search", _Later("search", "search_page"), "read"),
    RouteRule("/review", _Later("reviews", "review_list"), "review"),
    RouteRule("/review/{code}", _Later("reviews", "review_queue"), "review", _READ),
    RouteRule("/review/{code}/blob/{sha256}", _Later("reviews", "review_blob"), "review", _READ),
    RouteRule("/{run}", report_page, "read"),
    RouteRule("/{run}/live", live_stream, "read"),
    RouteRule("/{run}/trials", _Later("trials", "trials_page"), "read", _LISTED),
    RouteRule("/{run}/rates", _Later("trials", "rates_of_question"), "read"),
    RouteRule("/{run}/trials.{form}", _Later("trials", "export_trials"), "read", _EXPORTED),
    RouteRule("/{run}/review", _Later("reviews", "reviews_page"), "read"),
    RouteRule("/{run}/review/{name}", _Later("reviews", "review_page"), "read"),
    RouteRule("/{run}/review/{name}/labels.{form}", _Later("reviews", "export_labels"), "read", _EXPORTED),
    RouteRule("/{run}/calibration", _Later("reviews", "calibration_page"), "read"),
    RouteRule("/{run}/t/{experiment}/{sample}", _Later("trial", "trial_page"), "read", _READ),
    RouteRule("/{run}/t/{experiment}/{sample}/{repeat:int}", _Later("trial", "trial_page"), "read", _READ),
    RouteRule("/{run}/blob/{sha256}", _Later("trial", "blob"), "read", _READ),
)
"""What can be looked at. Everything else is refused."""
CHANGES = (
    RouteRule("/review/{code}", _Later("reviews", "answer_trial"), "review", "reviewed"),
    RouteRule("/{run}/review", _Later("reviews", "make_review"), "edit", "made a review"),
    RouteRule("/{run}/review/{name}", _Later("reviews", "extend_review"), "edit", "extended a review"),
    RouteRule("/{run}/picked", _Later("reviews", "pick_trial"), "edit", "labelled"),
    RouteRule("/{run}/comment", change_comments, "review", needs_too="read"),
)
"""What forms can change."""
TEAM_CHANGES = (
    RouteRule("/{run}/delete", delete_run, "delete"),
    RouteRule("/{run}/keep", keep_run, "delete"),
)
"""What the forms of a team's projects can change besides."""


def routes(viewer: Viewer) -> list[Route]:
    """Return the routes of one person's server below the prefix."""
    made = [Route("/login", partial(_open, viewer, open_link), methods=["GET"]),
            Route("/login", partial(_open, viewer, sign_in), methods=["POST"]),
            Route("/logout", partial(_open, viewer, logout), methods=["POST"])]  # fmt: skip
    return made + ruled_routes(viewer, () if viewer.read_only else CHANGES)


def ruled_routes(viewer: Viewer, changes: Iterable[RouteRule]) -> list[Route]:
    """Return the routes that are in the table, and the files of the package."""
    made = [Route("/static/{hash}/{name}", partial(_open, viewer, static_file), methods=["GET"])]
    made += [Route(rule.path, partial(_page, viewer, rule, rule.function), methods=["GET"]) for rule in PAGES]
    return made + [Route(rule.path, partial(_change, viewer, rule), methods=["POST"]) for rule in changes]


def make_inside(viewer: Viewer, routes: list[Route]) -> Starlette:
    """Return the application below a prefix; who may use it is decided in front of it."""

    async def unknown_page(request: Request, _error: Exception) -> Response:
        if request.scope["fairtrial.session"] is None or viewer.visitor(request).review_only:
            return PlainTextResponse("not found\n", 404)
        return _problem(viewer, request, 404, "There is no such page.", "The list of runs leads to all pages.")

    mount = Mount(f"/{viewer.access.prefix}", routes=routes)
    inside = Starlette(routes=[mount], exception_handlers={404: unknown_page})
    inside.router.redirect_slashes = False
    return inside


def make_app(viewer: Viewer) -> Any:
    """Return the application, with the guard before everything."""

    async def without_session(scope: Any, receive: Any, send: Any) -> None:
        await _sign_in_page(viewer, Request(scope, receive), _requested_address(viewer, scope))(scope, receive, send)

    return Guard(make_inside(viewer, routes(viewer)), viewer.access, without_session)


async def _change(viewer: Viewer, rule: RouteRule, request: Request) -> Response:
    """Call what a form asks for, if the form is of this session; the audit has it before the store."""
    record, recorded = viewer.record, False

    async def change(viewer: Viewer, request: Request) -> Response:
        nonlocal recorded
        form = await read_form(request)
        if form is None or not same_secret(form.get("form_secret"), viewer.form_secret(request)):
            return PlainTextResponse("this form is of another session: load its page again\n", 403)
        if rule.action and record is not None:
            if "run" in request.path_params:  # What names no run and no review may be anything.
                await viewer.find_run(request.path_params["run"])
            elif "code" in request.path_params:
                await _Later("reviews", "find_review")(viewer, request.path_params["code"])
            await record(request, rule.action)
            recorded = True
        found: Response = await rule.function(viewer, request, form)
        return found

    answer = await _page(viewer, replace(rule, action=""), change, request)
    if recorded and record is not None and answer.status_code >= 400:
        await record(request, f"{rule.action} (failed)")
    return answer


async def _page(viewer: Viewer, rule: RouteRule, function: PageFunction, request: Request) -> Response:
    """Call what a rule allows this visitor; the audit has what was read before it is sent."""
    allowed = viewer.visitor(request).permissions
    missing = {rule.needs, rule.needs_too or rule.needs} - allowed
    if missing:
        what = "this session is for reviews only" if "read" not in allowed else f"this session may not {missing.pop()}"
        return PlainTextResponse(f"{what}\n", 403)

    async def recorded(viewer: Viewer, request: Request) -> Response:
        answer = await function(viewer, request)
        if rule.action and viewer.record is not None and answer.status_code < 400:
            await viewer.record(request, rule.action)
        return answer

    return await _open(viewer, recorded, request)


async def _open(viewer: Viewer, function: PageFunction, request: Request) -> Response:
    """Call a page; errors become pages that say what to do."""
    try:
        return await function(viewer, request)
    except ClientDisconnect:
        return Response(status_code=400)  # Nobody reads it.
    except BodyTooLateError:
        return PlainTextResponse("the request did not arrive in time\n", 408)
    except PageNotFoundError as error:
        return _problem(viewer, request, 404, str(error), "")
    except UnknownNameError as error:
        return _problem(viewer, request, 404, error.what, error.remedy)
    except UnknownRunError as error:
        return _problem(viewer, request, 404, str(error), "It may have been deleted meanwhile.")
    except StoreError as error:
        return _problem(viewer, request, 503, "The store cannot be read at the moment.", str(error))
    except FairtrialError as error:
        what, _, remedy = str(error).partition("\n")
        return _problem(viewer, request, 422, what, remedy)


def _problem(viewer: Viewer, request: Request, status: int, what: str, remedy: str) -> Response:
    return viewer.render(request, "problem.html", code=status, title=what, what=what, remedy=remedy)


async def open_link(viewer: Viewer, request: Request) -> Response:
    """Open a session for the browser that we opened, or for a reviewer; without a token, ask for one."""
    token = request.query_params.get("token", "")
    run = request.query_params.get("run", "")
    found = viewer.access.sign_in(token, by_link=True)
    if found is None:
        problem = "This link has been used already, or it has expired." if token else ""
        return _sign_in_page(viewer, request, segment(run) if run else "", problem)
    return _signed_in(viewer, found, segment(run) if run else "")


async def sign_in(viewer: Viewer, request: Request) -> Response:
    """Open a session with a typed token."""
    form = await read_form(request)
    to = "" if form is None else form.get("to")
    found = None if form is None else viewer.access.sign_in(form.get("token").strip())
    if found is None:
        await asyncio.sleep(_WRONG_TOKEN_SECONDS)
        return _sign_in_page(viewer, request, to, "That is not the token.")
    return _signed_in(viewer, found, to)


def _signed_in(viewer: Viewer, found: tuple[Visitor, str], to: str) -> Response:
    """Return the answer that gives a browser its session and leads to the page that was asked for."""
    visitor, session = found
    to = address_below(to)
    if visitor.review_only and not to.startswith("review"):
        to = "review"
    location = f"./{to}"  # Of this server, whatever it says.
    headers = {"location": location, "set-cookie": viewer.access.set_cookie(session), "referrer-policy": "no-referrer"}
    return Response(status_code=303, headers=headers)


def address_below(to: str) -> str:
    """Return the address of a page below the one that leads to it; empty if it is out of there."""
    if not _STEP.isdisjoint(re.split(r"[/\\]", unquote(re.split("[?#]", to)[0]))):
        return ""  # Where another server may be.
    return quote(to, safe=_IN_ADDRESS, errors="replace")


def _sign_in_page(viewer: Viewer, request: Request, to: str, problem: str = "") -> Response:
    return viewer.render(request, "sign_in.html", code=401, to=to, problem=problem)


def _requested_address(viewer: Viewer, scope: Any) -> str:
    """Return the address of a page below the prefix, as it was sent."""
    path = scope["raw_path"].decode("latin-1").removeprefix(f"/{viewer.access.prefix}/")
    query = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


async def logout(viewer: Viewer, request: Request) -> Response:
    """End the session of this browser."""
    _, session = request.scope["fairtrial.session"]  # Of several cookies, the one that let this request pass.
    viewer.access.sessions.end(session)
    return PlainTextResponse("The session has ended.\n", headers={"set-cookie": viewer.access.set_cookie("")})


async def static_file(viewer: Viewer, request: Request) -> Response:
    """Send the style sheet or a script."""
    found = viewer.static.get(request.path_params["name"])
    if found is None or request.path_params["hash"] != viewer.static_hash:
        return PlainTextResponse("not found\n", 404)
    headers = {"cache-control": "private, max-age=31536000, immutable"}
    return Response(found[1], media_type=f"{found[0]}; charset=utf-8", headers=headers)
