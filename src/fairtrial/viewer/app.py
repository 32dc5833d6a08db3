"""The table of routes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
from fairtrial.viewer.access import BodyTooLateError, Guard, Visitor, same_secret
from fairtrial.viewer.pages.context import FormFields, PageNotFoundError, Viewer, read_form
from fairtrial.viewer.pages.runs import history_page, live_stream, report_page, runs_page
from fairtrial.viewer.question import segment

_WRONG_TOKEN_SECONDS = 0.5
_IN_ADDRESS = "%/?&=@:+~,;!$'()*"
_STEP = frozenset((".", ".."))

type PageFunction = Callable[[Viewer, Request], Awaitable[Response]]
type ChangeFunction = Callable[[Viewer, Request, FormFields], Awaitable[Response]]


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


def routes(viewer: Viewer) -> list[Route]:
    """Return all routes below the prefix."""
    pages: list[tuple[str, PageFunction]] = [
        ("/", runs_page),
        ("/login", open_link),
        ("/history", history_page),
        ("/compare", _Later("comparison", "compare_page")),
        ("/compare/sample", _Later("comparison", "pair_page")),
        ("/matrix", _Later("matrix", "matrix_page")),
        ("/review", _Later("reviews", "review_list")),
        ("/review/{code}", _Later("reviews", "review_queue")),
        ("/review/{code}/blob/{sha256}", _Later("reviews", "review_blob")),
        ("/static/{hash}/{name}", static_file),
        ("/{run}", report_page),
        ("/{run}/live", live_stream),
        ("/{run}/trials", _Later("trials", "trials_page")),
        ("/{run}/rates", _Later("trials", "rates_of_question")),
        ("/{run}/trials.{form}", _Later("trials", "export_trials")),
        ("/{run}/review", _Later("reviews", "reviews_page")),
        ("/{run}/review/{name}", _Later("reviews", "review_page")),
        ("/{run}/review/{name}/labels.{form}", _Later("reviews", "export_labels")),
        ("/{run}/calibration", _Later("reviews", "calibration_page")),
        ("/{run}/t/{experiment}/{sample}", _Later("trial", "trial_page")),
        ("/{run}/t/{experiment}/{sample}/{repeat:int}", _Later("trial", "trial_page")),
        ("/{run}/blob/{sha256}", _Later("trial", "blob")),
    ]
    changes: list[tuple[str, ChangeFunction]] = [
        ("/review/{code}", _Later("reviews", "answer_trial")),
        ("/{run}/review", _Later("reviews", "make_review")),
        ("/{run}/review/{name}", _Later("reviews", "extend_review")),
        ("/{run}/picked", _Later("reviews", "pick_trial")),
    ]
    made = [Route(path, partial(_page, viewer, function), methods=["GET"]) for path, function in pages]
    made.insert(1, Route("/login", partial(_page, viewer, sign_in), methods=["POST"]))
    made.insert(2, Route("/logout", partial(_page, viewer, logout), methods=["POST"]))
    if not viewer.read_only:
        made += [Route(path, partial(_change, viewer, function), methods=["POST"]) for path, function in changes]
    return made


def make_app(viewer: Viewer) -> Any:
    """Return the application, with the guard before everything."""

    async def unknown_page(request: Request, _error: Exception) -> Response:
        if request.scope["fairtrial.session"] is None or viewer.visitor(request).review_only:
            return PlainTextResponse("not found\n", 404)
        return _problem(viewer, request, 404, "There is no such page.", "The list of runs leads to all pages.")

    mount = Mount(f"/{viewer.access.prefix}", routes=routes(viewer))
    inside = Starlette(routes=[mount], exception_handlers={404: unknown_page})
    inside.router.redirect_slashes = False

    async def without_session(scope: Any, receive: Any, send: Any) -> None:
        await _sign_in_page(viewer, Request(scope, receive), _requested_address(viewer, scope))(scope, receive, send)

    return Guard(inside, viewer.access, without_session)


async def _change(viewer: Viewer, function: ChangeFunction, request: Request) -> Response:
    """Call what a form asks for, if the form is of this session."""

    async def change(viewer: Viewer, request: Request) -> Response:
        form = await read_form(request)
        if form is None or not same_secret(form.get("form_secret"), viewer.form_secret(request)):
            return PlainTextResponse("this form is of another session: load its page again\n", 403)
        return await function(viewer, request, form)

    return await _page(viewer, change, request, function in FOR_REVIEWERS)


async def _page(
    viewer: Viewer, function: PageFunction, request: Request, for_reviewers: bool | None = None
) -> Response:
    """Call a page; errors become pages that say what to do."""
    allowed = function in FOR_REVIEWERS if for_reviewers is None else for_reviewers
    if viewer.visitor(request).review_only and not allowed:
        return PlainTextResponse("this session is for reviews only\n", 403)
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
        return _problem(viewer, request, 422, str(error), "")


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
    if not _STEP.isdisjoint(re.split(r"[/\\]", unquote(re.split("[?#]", to)[0]))):
        to = ""  # Out of the prefix, where another server may be.
    if visitor.review_only and not to.startswith("review"):
        to = "review"
    location = "./" + quote(to, safe=_IN_ADDRESS, errors="replace")  # Of this server, whatever it says.
    headers = {"location": location, "set-cookie": viewer.access.set_cookie(session), "referrer-policy": "no-referrer"}
    return Response(status_code=303, headers=headers)


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


FOR_REVIEWERS: frozenset[PageFunction | ChangeFunction] = frozenset(
    (
        *(open_link, sign_in, logout, static_file),
        *(_Later("reviews", name) for name in ("review_list", "review_queue", "review_blob", "answer_trial")),
    )
)
"""What sessions of reviewers may see and do; everything else is refused."""
