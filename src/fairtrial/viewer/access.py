"""Who may see a page: tokens, sessions, hosts, and the guard before every route."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from fairtrial.base.foreign import BODY_SECONDS
from fairtrial.errors import ConfigurationError

SESSION_SECONDS = 30 * 86_400
_MAX_SESSIONS = 256
_FILE = "view-sessions.json"


class Sessions:
    """The sessions that were opened with one token; with another token, none of them is valid.

    Only a digest of each session is kept, so that the file alone opens nothing. Servers of one store and one token
    share their sessions. Without a folder that can be written, sessions end with the server.
    """

    def __init__(self, token: str, folder: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._path = None if folder is None else folder / _FILE
        self._token = digest_of(token)
        self._clock = clock
        self._opened: dict[str, float] = {}
        self._seen = 0
        if self._path is not None and self._path.exists() and self._read() is None:
            self._change({})  # Of another token: none of its sessions may come back with it.

    def open(self) -> str:
        """Open a session and return its secret."""
        made = secrets.token_urlsafe(24)
        self._change({digest_of(made): self._clock()})
        return made

    def has(self, secret: str) -> bool:
        """Return whether this is the secret of an open session."""
        self._look()
        opened = self._opened.get(digest_of(secret))
        return opened is not None and self._clock() - opened < SESSION_SECONDS

    def end(self, secret: str) -> None:
        """End a session."""
        self._change({}, ended=digest_of(secret))

    def _look(self) -> None:
        """Read the file again if another server of this store has written it."""
        try:
            changed = 0 if self._path is None else self._path.stat().st_mtime_ns
        except OSError:
            return
        if changed != self._seen and (found := self._read()) is not None:
            self._opened, self._seen = found, changed

    def _change(self, opened: Mapping[str, float], ended: str = "") -> None:
        self._look()
        known = {**self._opened, **opened}
        known.pop(ended, None)
        valid = {one: at for one, at in known.items() if self._clock() - at < SESSION_SECONDS}
        self._opened = dict(sorted(valid.items(), key=lambda item: item[1])[-_MAX_SESSIONS:])
        if self._path is not None:
            write_private(self._path, {"token": self._token, "sessions": self._opened})

    def _read(self) -> dict[str, float] | None:
        """Return the sessions in the file; None if it has none of this token."""
        found = read_private(self._path)
        sessions = found.get("sessions")
        if found.get("token") != self._token or not isinstance(sessions, dict):
            return None
        return {name: float(at) for name, at in sessions.items() if isinstance(at, int | float)}


def digest_of(secret: str) -> str:
    """Return what may be kept of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def read_private(path: Path | None) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        found = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_private(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file that only its owner can read. Where that is not possible, what it says lasts as long as we do."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(content, file)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)


LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PREFIX = re.compile(r"[A-Za-z0-9]{10,40}")
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_INVITATION_SECONDS = 60.0
_SHORTEST_TOKEN = 16
_MAX_NAME = 60


type Permission = Literal["read", "review", "edit", "delete"]
type Role = Literal["viewer", "reviewer", "editor", "admin"]

PERMISSIONS_OF: Mapping[Role, tuple[Permission, ...]] = {
    "viewer": ("read",),
    "reviewer": ("review",),
    "editor": ("read", "review", "edit"),
    "admin": ("read", "review", "edit", "delete"),
}
"""What each role may do: read runs, answer reviews, make reviews and label, delete and keep runs."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Whose session it is, and what it may do.

    Attributes:
        name: The name that is shown.
        permissions: What this person may do.
        id: What labels are stored under, if people are known by more than their name.
        signs_out: Whether this server can end the session of somebody with an id.
    """

    name: str
    permissions: frozenset[Permission] = frozenset(PERMISSIONS_OF["editor"])
    id: str = ""
    signs_out: bool = False

    @property
    def annotator(self) -> str:
        """What labels are stored under."""
        return self.id or self.name

    @property
    def review_only(self) -> bool:
        """Whether reviews are all that this person sees."""
        return "read" not in self.permissions


def _reviewer(name: str) -> Visitor:
    return Visitor(name, frozenset(PERMISSIONS_OF["reviewer"]))


@dataclass(slots=True)
class Access:
    """The secrets of one server and the sessions that were opened with them.

    Attributes:
        prefix: The first part of every address. A session cookie is bound to it, because cookies are shared by all
            ports of a host.
        token: Opens a session of the user who started the server, on the page where people sign in.
        authorities: The values of `Host` that are accepted, in lower case. One without a port accepts every port.
        secure: Whether TLS ends in front of the server, so that cookies are sent over TLS only.
        sessions: The open sessions of that user.
        user: The name of that user, under which labels are stored.
        reviewers: The tokens of reviewers, by name. Their sessions follow from them and from the token of the server:
            they survive a restart, and end with another token.
        invitations: Secrets that open one session each, and when they end, by the monotonic clock.
    """

    prefix: str
    token: str
    authorities: frozenset[str]
    secure: bool = False
    sessions: Sessions = field(default_factory=lambda: Sessions(""))
    user: str = ""
    reviewers: Mapping[str, str] = field(default_factory=dict)
    invitations: dict[str, float] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        *,
        port: int | None,
        trusted_hosts: Iterable[str] = (),
        prefix: str | None = None,
        secure: bool = False,
        user: str = "",
        reviewers: Mapping[str, str] | None = None,
        token: str = "",
        folder: Path | None = None,
    ) -> Access:
        """Make the access of a server on a port of this machine; without a port, of a server on a Unix socket."""
        own = [name if port is None else f"{name}:{port}" for name in LOOPBACK]
        known = frozenset(name.lower() for name in (*own, *trusted_hosts))
        token = token or secrets.token_urlsafe(24)
        sessions = Sessions(token, folder)
        return cls(prefix or new_prefix(), token, known, secure, sessions, user, dict(reviewers or {}))

    @property
    def cookie(self) -> str:
        """The name of the session cookie."""
        return "__Secure-fairtrial" if self.secure else "fairtrial"

    @property
    def host_remedy(self) -> str:
        """What to do so that a host is answered."""
        return "add it with --trusted-host"

    def accepts_host(self, host: str) -> bool:
        """Return whether a request may name this host."""
        host = host.lower()
        return host in self.authorities or without_port(host) in self.authorities

    def is_token(self, text: str) -> bool:
        """Compare with the token in constant time."""
        return same_secret(text, self.token)

    def invite(self) -> str:
        """Return a secret for the browser that we open: it ends when it is used, and after a minute."""
        made = secrets.token_urlsafe(24)
        self.invitations[made] = time.monotonic() + _INVITATION_SECONDS
        return made

    def _use_up(self, text: str) -> bool:
        """Return whether this is a valid invitation, which is none from now on."""
        found = [known for known in self.invitations if same_secret(text, known)]
        return any(self.invitations.pop(known) > time.monotonic() for known in found)

    def sign_in(self, text: str, *, by_link: bool = False) -> tuple[Visitor, str] | None:
        """Return whose token this is, and the secret of a session; None if it is nobody's.

        A link may carry an invitation or the token of a reviewer. The token of the server is accepted from the page
        where people sign in only, so that it is in no address, command line or history.
        """
        matches = [name for name, token in self.reviewers.items() if same_secret(text, token)]
        if self._use_up(text) if by_link else self.is_token(text):
            return Visitor(self.user), self.sessions.open()
        return (_reviewer(matches[0]), self._reviewer_session(matches[0])) if matches else None

    def _reviewer_session(self, name: str) -> str:
        secrets_of_both = f"{self.reviewers[name]}\n{self.token}".encode()
        return hmac.digest(secrets_of_both, b"session", "sha256").hex()

    def visitor(self, text: str) -> Visitor | None:
        """Return whose session this is the secret of."""
        if self.sessions.has(text):
            return Visitor(self.user)
        matches = [name for name in self.reviewers if same_secret(text, self._reviewer_session(name))]
        return _reviewer(matches[0]) if matches else None

    @staticmethod
    def form_secret(session: str) -> str:
        """Return the value that every form of a session carries, which other sites cannot know."""
        return hmac.digest(session.encode("utf-8", "replace"), b"form", "sha256").hex()[:32]

    def set_cookie(self, secret: str) -> str:
        """Return the header that gives a session to a browser; an empty secret takes it away."""
        kept = f"; Max-Age={SESSION_SECONDS if secret else 0}"
        tls = "; Secure" if self.secure else ""
        return f"{self.cookie}={secret}; Path=/{self.prefix}/; HttpOnly; SameSite=Lax{tls}{kept}"


def new_prefix() -> str:
    """Return ten random characters."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(10))


class KeptSecrets(NamedTuple):
    """What stays the same when a server is started again."""

    prefix: str
    token: str
    reviewers: dict[str, str]


def kept_secrets(folder: Path | None, reviewers: Sequence[str] = ()) -> KeptSecrets:
    """Return the prefix and the tokens that this folder's `view.json` has; make what is missing.

    Addresses that were given away stay valid this way. The file can only be read by its owner. Where it cannot be
    written, addresses last until the server ends.
    """
    path = None if folder is None else folder / "view.json"
    kept = read_private(path)
    prefix, token, known = kept.get("prefix"), kept.get("token"), kept.get("reviewers")
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        prefix, token, known = new_prefix(), None, None
    if not isinstance(token, str) or len(token) < 32:
        token = secrets.token_urlsafe(24)
    tokens = {
        name: token
        for name, token in (known.items() if isinstance(known, dict) else ())
        if isinstance(token, str) and len(token) >= 32
    }
    made = {name: secrets.token_urlsafe(24) for name in reviewers if name not in tokens}
    content = {"prefix": prefix, "token": token} | ({"reviewers": tokens | made} if tokens or made else {})
    if path is not None and content != kept:
        write_private(path, content)
    return KeptSecrets(prefix, token, {name: (tokens | made)[name] for name in reviewers})


def check_token(text: str, origin: str) -> str:
    """Return a token that somebody chose, without the white space around it; raises `ConfigurationError`."""
    token = text.strip()
    if len(token) < _SHORTEST_TOKEN or not token.isprintable():
        raise ConfigurationError(f"the token in {origin} must be one line of at least {_SHORTEST_TOKEN} characters")
    return token


def same_secret(given: str, known: str) -> bool:
    """Compare two secrets in constant time; as bytes, because anything may be given."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), known.encode("utf-8", "surrogatepass"))


def check_reviewers(names: Sequence[str], user: str) -> tuple[str, ...]:
    """Return the names of reviewers. Raises `ConfigurationError` for names that cannot be told apart."""
    trimmed = tuple(name.strip() for name in names if name.strip())
    for name in trimmed:
        if len(name) > _MAX_NAME or not name.isprintable() or trimmed.count(name) > 1 or name == user:
            raise ConfigurationError(
                f"the name of a reviewer must be given once, have at most {_MAX_NAME} characters and differ from "
                f"your own, {user!r} (got {name!r})"
            )
    return trimmed


def without_port(host: str) -> str:
    """Return the name in a `Host` header."""
    name, separator, port = host.rpartition(":")
    return name if separator and port.isdecimal() else host


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


class Doorway(Protocol):
    """What of an access the rules for requests of other hosts and sites need."""

    @property
    def secure(self) -> bool:
        """Whether TLS ends in front of the server."""
        ...

    @property
    def host_remedy(self) -> str:
        """What to do so that a host is answered."""
        ...

    def accepts_host(self, host: str) -> bool:
        """Return whether a request may name this host."""
        ...


def foreign_refusal(
    method: str, path: str, query: str, headers: Sequence[tuple[str, str]], door: Doorway
) -> GuardRefusal | None:
    """Return why a request of anybody is refused: a host that is not ours, another site, or its form."""
    if len(path) + len(query) > MAX_ADDRESS:
        return GuardRefusal(414, f"an address may have at most {MAX_ADDRESS:,} characters")
    hosts = [value for name, value in headers if name == "host"]
    if len(hosts) != 1 or not door.accepts_host(hosts[0]):
        return GuardRefusal(421, f"this server does not answer to this host name; {door.host_remedy}")
    values = dict(reversed(headers))  # The first of several counts; browsers send each of these once.
    if method in _SAFE:
        return _refuse_foreign_read(values)
    if method == "POST":
        return _refuse_foreign_write(values, hosts[0], door)
    return GuardRefusal(405, f"{method} is not allowed")


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
    if (found := foreign_refusal(method, path, query, headers, access)) is not None:
        return found
    root = f"/{access.prefix}/"
    if not path.startswith(root):
        return GuardRefusal(404, "not found: open the address that `fairtrial view` printed")
    if path == f"{root}login":
        too_long = method == "POST" and int(dict(reversed(headers))["content-length"]) > MAX_SIGN_IN
        return GuardRefusal(413, f"a token has at most {MAX_SIGN_IN:,} bytes") if too_long else None
    if path.startswith(f"{root}static/") and method in _SAFE:
        return None  # The files of the package, for the page where people sign in.
    if not any(access.visitor(value) for value in cookies_of(headers, access.cookie)):
        return GuardRefusal(401, "no session: sign in at the address that `fairtrial view` printed")
    return None


def _refuse_foreign_read(headers: Mapping[str, str]) -> GuardRefusal | None:
    """Other sites may link to a page, but not load, embed or fetch it. All ports of this host are one site."""
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return None
    if (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document"):
        return None
    return GuardRefusal(403, "requests of other sites are refused")


def _refuse_foreign_write(headers: Mapping[str, str], host: str, door: Doorway) -> GuardRefusal | None:
    scheme = "https" if door.secure else "http"
    if headers.get("sec-fetch-site", "same-origin") not in ("none", "same-origin"):
        return GuardRefusal(403, "requests of other sites are refused")
    if headers.get("origin", "").lower() != f"{scheme}://{host.lower()}":
        return GuardRefusal(403, "a change must come from one of this server's own pages")
    length = headers.get("content-length", "")
    if "transfer-encoding" in headers or not length.isdecimal() or int(length) > MAX_BODY:
        return GuardRefusal(413, f"a request must state its length, at most {MAX_BODY:,} bytes")
    return None


def cookies_of(headers: Sequence[tuple[str, str]], wanted: str) -> list[str]:
    """Return the values of all cookies with a name."""
    pairs = [part.strip().partition("=") for name, value in headers if name == "cookie" for part in value.split(";")]
    return [value for name, _, value in pairs if name == wanted]


@dataclass(frozen=True, slots=True)
class Guard:
    """ASGI middleware that applies the rules and adds the headers."""

    app: Any
    access: Access
    sign_in: Any  # Shown instead of any other page without a session.

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a refused request; pass on any other."""
        if scope["type"] != "http":
            return  # No WebSocket is served, and there is nothing to start or stop.
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        found = refusal(scope["method"], path, scope.get("query_string", b"").decode("latin-1"), headers, self.access)
        asks_to_sign_in = found is not None and found.status == 401 and is_for_people(scope["method"], headers)
        if found is not None and not asks_to_sign_in:
            await answer_refusal(send, found)
            return

        scope["fairtrial.session"] = self._session(headers)
        await pass_guarded(self.sign_in if asks_to_sign_in else self.app, scope, receive, send)

    def _session(self, headers: Sequence[tuple[str, str]]) -> tuple[Visitor, str] | None:
        """Return whose request it is, and the secret of the session; None for a request to sign in."""
        for value in cookies_of(headers, self.access.cookie):
            if (visitor := self.access.visitor(value)) is not None:
                return visitor, value
        return None


async def pass_guarded(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Call an application with a time limit for the request's body, and with our headers on its answer."""

    async def send_guarded(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_missing(message.get("headers", ()))]
        await send(message)

    await app(scope, _in_time(receive), send_guarded)


class BodyTooLateError(Exception):
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
            raise BodyTooLateError from None
        complete = not message.get("more_body", False)
        return message

    return receive_in_time


def is_for_people(method: str, headers: Sequence[tuple[str, str]]) -> bool:
    """Return whether a person, not a program, asks for a page."""
    return method == "GET" and any(name == "accept" and "text/html" in value for name, value in headers)


def _missing(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers to add: policies add up, of the others one is enough."""
    names = {name.lower() for name, _ in headers}
    added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    if b"cache-control" not in names:
        added.append((b"cache-control", b"no-store"))
    return [(name, value) for name, value in added if name not in names or name == b"content-security-policy"]


async def answer_refusal(send: Any, found: GuardRefusal) -> None:
    """Answer a request that may not pass."""
    body = f"{found.text}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": found.status, "headers": [*headers, *_missing(headers)]})
    await send({"type": "http.response.body", "body": body})
