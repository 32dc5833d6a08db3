"""The middleware before every route: host, origin, session, limits, and the headers of every answer.

Threats are other pages in the same browser (forged requests, DNS rebinding, framing), other users of the machine, and
text that models and datasets wrote. The rules are pure functions of a request, so that a test can go through them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fairtrial.base.foreign import BODY_SECONDS
from fairtrial.viewer.access import Access, Visitor

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The content security policy of every answer: nothing inline, nothing from elsewhere, no exception."""
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # Without any, browsers would send forms with "Origin: null".
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
MAX_ADDRESS = 8_192
MAX_BODY = 1_048_576
MAX_SIGN_IN = 16_384
_SAFE = ("GET", "HEAD")


class GuardRefusal(NamedTuple):
    """The answer to a request that may not pass."""

    status: int
    text: str


def refusal(
    method: str, path: str, query: str, headers: Sequence[tuple[str, str]], access: Access
) -> GuardRefusal | None:
    """Return why a request is refused; None if it may pass.

    Args:
        method: The method, in upper case.
        path: The path as it was sent.
        query: The query string.
        headers: All headers, names in lower case; a name may occur more than once.
        access: The secrets of the server.
    """
    if len(path) + len(query) > MAX_ADDRESS:
        return GuardRefusal(414, f"an address may have at most {MAX_ADDRESS:,} characters")
    hosts = [value for name, value in headers if name == "host"]
    if len(hosts) != 1 or not access.accepts_host(hosts[0]):
        return GuardRefusal(421, "this server does not answer to this host name; add it with --trusted-host")
    values = dict(reversed(headers))  # The first of several counts; browsers send each of these once.
    if method in _SAFE:
        found = _refuse_foreign_read(values)
    elif method == "POST":
        found = _refuse_foreign_write(values, hosts[0], access)
    else:
        found = GuardRefusal(405, f"{method} is not allowed")
    if found is not None:
        return found
    root = f"/{access.prefix}/"
    if not path.startswith(root):
        return GuardRefusal(404, "not found: open the address that `fairtrial view` printed")
    if path == f"{root}login":
        too_long = method == "POST" and int(values["content-length"]) > MAX_SIGN_IN
        return GuardRefusal(413, f"a token has at most {MAX_SIGN_IN:,} bytes") if too_long else None
    if path.startswith(f"{root}static/") and method in _SAFE:
        return None  # The files of the package, for the page where people sign in.
    if not any(access.has_session(value) for value in _cookies(headers, access.cookie)):
        return GuardRefusal(401, "no session: sign in at the address that `fairtrial view` printed")
    return None


def _refuse_foreign_read(headers: Mapping[str, str]) -> GuardRefusal | None:
    """Other sites may link to a page, but not load, embed or fetch it. All ports of this host are one site."""
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return None
    if (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document"):
        return None
    return GuardRefusal(403, "requests of other sites are refused")


def _refuse_foreign_write(headers: Mapping[str, str], host: str, access: Access) -> GuardRefusal | None:
    scheme = "https" if access.secure else "http"
    if headers.get("sec-fetch-site", "same-origin") not in ("none", "same-origin"):
        return GuardRefusal(403, "requests of other sites are refused")
    if headers.get("origin", "").lower() != f"{scheme}://{host.lower()}":
        return GuardRefusal(403, "a change must come from one of this server's own pages")
    length = headers.get("content-length", "")
    if "transfer-encoding" in headers or not length.isdecimal() or int(length) > MAX_BODY:
        return GuardRefusal(413, f"a request must state its length, at most {MAX_BODY:,} bytes")
    return None


def _cookies(headers: Sequence[tuple[str, str]], wanted: str) -> list[str]:
    pairs = [part.strip().partition("=") for name, value in headers if name == "cookie" for part in value.split(";")]
    return [value for name, _, value in pairs if name == wanted]


class Guard:
    """ASGI middleware that applies the rules and adds the headers."""

    def __init__(self, app: Any, access: Access, sign_in: Any) -> None:
        self.app = app
        self.access = access
        self._sign_in = sign_in  # Shown instead of any other page without a session.

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a refused request; pass on any other."""
        if scope["type"] != "http":
            return  # No WebSocket is served, and there is nothing to start or stop.
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        found = refusal(scope["method"], path, scope.get("query_string", b"").decode("latin-1"), headers, self.access)
        asks_to_sign_in = found is not None and found.status == 401 and _is_for_people(scope["method"], headers)
        if found is not None and not asks_to_sign_in:
            await _answer(send, found)
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_missing(message.get("headers", ()))]
            await send(message)

        scope["fairtrial.data.session"] = self._session(headers)
        await (self._sign_in if asks_to_sign_in else self.app)(scope, _in_time(receive), send_guarded)

    def _session(self, headers: Sequence[tuple[str, str]]) -> tuple[Visitor, str] | None:
        """Return whose request it is, and the secret of the session; None for a request to sign in."""
        for value in _cookies(headers, self.access.cookie):
            if (visitor := self.access.visitor(value)) is not None:
                return visitor, value
        return None


class BodyTooLate(Exception):
    """The rest of a request did not arrive in time."""


def _in_time(receive: Any) -> Any:
    """Return `receive` with a time limit for the whole body."""
    loop = asyncio.get_running_loop()
    end, complete = loop.time() + BODY_SECONDS, False

    async def receive_in_time() -> Any:
        nonlocal complete
        if complete:
            return await receive()  # Waits until the client leaves.
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError:
            raise BodyTooLate from None
        complete = not message.get("more_body", False)
        return message

    return receive_in_time


def _is_for_people(method: str, headers: Sequence[tuple[str, str]]) -> bool:
    return method == "GET" and any(name == "accept" and "text/html" in value for name, value in headers)


def _missing(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers to add: policies add up, of the others one is enough."""
    names = {name.lower() for name, _ in headers}
    added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    if b"cache-control" not in names:
        added.append((b"cache-control", b"no-store"))
    return [(name, value) for name, value in added if name not in names or name == b"content-security-policy"]


async def _answer(send: Any, found: GuardRefusal) -> None:
    body = f"{found.text}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": found.status, "headers": [*headers, *_missing(headers)]})
    await send({"type": "http.response.body", "body": body})
