"""The table of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from fairtrial.errors import FairtrialError, StoreError, UnknownRunError
from fairtrial.report.run_names import UnknownName
from fairtrial.viewer.guard import Guard
from fairtrial.viewer.links import segment
from fairtrial.viewer.pages.comparison import compare_page, pair_page
from fairtrial.viewer.pages.context import PageNotFound, Viewer
from fairtrial.viewer.pages.report import live_stream, report_page
from fairtrial.viewer.pages.runs import history_page, runs_page
from fairtrial.viewer.pages.trial import blob, trial_page
from fairtrial.viewer.pages.trials import export_trials, rates_of_question, trials_page

type PageFunction = Callable[[Viewer, Request], Awaitable[Response]]


def routes(viewer: Viewer) -> list[Route]:
    """Return all routes below the prefix."""
    pages: list[tuple[str, PageFunction]] = [
        ("/", runs_page),
        ("/login", login),
        ("/history", history_page),
        ("/compare", compare_page),
        ("/compare/sample", pair_page),
        ("/static/{hash}/{name}", static_file),
        ("/{run}", report_page),
        ("/{run}/live", live_stream),
        ("/{run}/trials", trials_page),
        ("/{run}/rates", rates_of_question),
        ("/{run}/trials.{form}", export_trials),
        ("/{run}/t/{experiment}/{sample}", trial_page),
        ("/{run}/t/{experiment}/{sample}/{repeat:int}", trial_page),
        ("/{run}/blob/{sha256}", blob),
    ]
    made = [Route(path, partial(_page, viewer, function), methods=["GET"]) for path, function in pages]
    made.insert(1, Route("/logout", partial(_page, viewer, logout), methods=["POST"]))
    return made


def make_app(viewer: Viewer) -> Any:
    """Return the application, with the guard before everything."""
    inside = Starlette(routes=[Mount(f"/{viewer.access.prefix}", routes=routes(viewer))])
    inside.router.redirect_slashes = False
    return Guard(inside, viewer.access)


async def _page(viewer: Viewer, function: PageFunction, request: Request) -> Response:
    """Call a page; errors become pages that say what to do."""
    try:
        return await function(viewer, request)
    except PageNotFound as error:
        return _problem(viewer, request, 404, str(error), "")
    except UnknownName as error:
        return _problem(viewer, request, 404, error.what, error.remedy)
    except UnknownRunError as error:
        return _problem(viewer, request, 404, str(error), "It may have been deleted meanwhile.")
    except StoreError as error:
        return _problem(viewer, request, 503, "The store cannot be read at the moment.", str(error))
    except FairtrialError as error:
        return _problem(viewer, request, 422, str(error), "")


def _problem(viewer: Viewer, request: Request, status: int, what: str, remedy: str) -> Response:
    return viewer.render(request, "problem.html", code=status, title=what, what=what, remedy=remedy)


async def login(viewer: Viewer, request: Request) -> Response:
    """Open a session for whoever has the token."""
    if not viewer.access.is_token(request.query_params.get("token", "")):
        return PlainTextResponse("wrong token: open the address that `fairtrial view` printed last\n", 401)
    run = request.query_params.get("run", "")
    headers = {
        "location": f"./{segment(run)}" if run else "./",
        "set-cookie": viewer.access.set_cookie(viewer.access.open_session()),
    }
    return Response(status_code=303, headers=headers)


async def logout(viewer: Viewer, request: Request) -> Response:
    """End all sessions of this browser."""
    viewer.access.sessions.pop(request.cookies.get(viewer.access.cookie, ""), None)
    return PlainTextResponse("The session has ended.\n", headers={"set-cookie": viewer.access.set_cookie("")})


async def static_file(viewer: Viewer, request: Request) -> Response:
    """Send the style sheet or a script."""
    found = viewer.static.get(request.path_params["name"])
    if found is None or request.path_params["hash"] != viewer.static_hash:
        return PlainTextResponse("not found\n", 404)
    headers = {"cache-control": "private, max-age=31536000, immutable"}
    return Response(found[1], media_type=f"{found[0]}; charset=utf-8", headers=headers)
