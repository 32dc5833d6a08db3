"""Who may see the pages: an address that cannot be guessed, a token for the first visit, and sessions."""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairtrial.errors import ConfigurationError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PREFIX = re.compile(r"[A-Za-z0-9]{10,40}")
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_MAX_SESSIONS = 256
_MAX_NAME = 60


@dataclass(frozen=True, slots=True)
class Visitor:
    """Whose session it is. `review_only` visitors see reviews and nothing else."""

    name: str
    review_only: bool = False


@dataclass(slots=True)
class Access:
    """The secrets of one server and the sessions that were opened with them.

    Attributes:
        prefix: The first part of every address. A session cookie is bound to it, because cookies are shared by all
            ports of a host.
        token: Opens a session; new at each start.
        authorities: The values of `Host` that are accepted, in lower case. One without a port accepts every port.
        secure: Whether TLS ends in front of the server, so that cookies are sent over TLS only.
        sessions: The open sessions of the user who started the server.
        user: The name of that user, under which labels are stored.
        reviewers: The tokens of reviewers, by name. Their sessions follow from them and survive a restart, so that
            nobody who reviews has to sign in again.
    """

    prefix: str
    token: str
    authorities: frozenset[str]
    secure: bool = False
    sessions: dict[str, None] = field(default_factory=dict)
    user: str = ""
    reviewers: Mapping[str, str] = field(default_factory=dict)

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
    ) -> Access:
        """Make the access of a server on a port of this machine; without a port, of a server on a Unix socket."""
        own = [name if port is None else f"{name}:{port}" for name in LOOPBACK]
        known = frozenset(name.lower() for name in (*own, *trusted_hosts))
        made = cls(prefix or new_prefix(), secrets.token_urlsafe(24), known, secure, user=user)
        made.reviewers = dict(reviewers or {})
        return made

    @property
    def cookie(self) -> str:
        """The name of the session cookie."""
        return "__Secure-fairtrial" if self.secure else "fairtrial"

    def accepts_host(self, host: str) -> bool:
        """Return whether a request may name this host."""
        host = host.lower()
        return host in self.authorities or _without_port(host) in self.authorities

    def is_token(self, text: str) -> bool:
        """Compare with the token in constant time."""
        return hmac.compare_digest(text.encode("utf-8", "replace"), self.token.encode())

    def sign_in(self, text: str) -> tuple[Visitor, str] | None:
        """Return whose token this is, and the secret of a session; None if it is nobody's."""
        given = text.encode("utf-8", "replace")
        matches = [name for name, token in self.reviewers.items() if hmac.compare_digest(given, token.encode())]
        if self.is_token(text):
            return Visitor(self.user), self.open_session()
        return (Visitor(matches[0], review_only=True), self._reviewer_session(matches[0])) if matches else None

    def _reviewer_session(self, name: str) -> str:
        return hmac.digest(self.reviewers[name].encode(), b"session", "sha256").hex()

    def visitor(self, text: str) -> Visitor | None:
        """Return whose session this is the secret of."""
        given = text.encode("utf-8", "replace")
        owned = [hmac.compare_digest(given, known.encode()) for known in self.sessions]
        if any(owned):
            return Visitor(self.user)
        matches = [name for name in self.reviewers if hmac.compare_digest(given, self._reviewer_session(name).encode())]
        return Visitor(matches[0], review_only=True) if matches else None

    @staticmethod
    def form_secret(session: str) -> str:
        """Return the value that every form of a session carries, which other sites cannot know."""
        return hmac.digest(session.encode("utf-8", "replace"), b"form", "sha256").hex()[:32]

    def open_session(self) -> str:
        """Open a session and return its secret."""
        made = secrets.token_urlsafe(24)
        self.sessions[made] = None
        while len(self.sessions) > _MAX_SESSIONS:
            del self.sessions[next(iter(self.sessions))]
        return made

    def has_session(self, text: str) -> bool:
        """Return whether this is the secret of an open session."""
        return self.visitor(text) is not None

    def set_cookie(self, secret: str) -> str:
        """Return the header that gives a session to a browser; an empty secret takes it away."""
        kept = "" if secret else "; Max-Age=0"
        tls = "; Secure" if self.secure else ""
        return f"{self.cookie}={secret}; Path=/{self.prefix}/; HttpOnly; SameSite=Lax{tls}{kept}"


def new_prefix() -> str:
    """Return ten random characters."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(10))


def kept_prefix(folder: Path | None) -> str:
    """Return the prefix that this folder's `view.json` has, so that addresses stay valid; make it if there is none."""
    return kept_secrets(folder)[0]


def kept_secrets(folder: Path | None, reviewers: Sequence[str] = ()) -> tuple[str, dict[str, str]]:
    """Return the prefix and the tokens of reviewers that this folder's `view.json` has; make what is missing.

    Addresses that were given away stay valid this way. The file can only be read by its owner. Where it cannot be
    written, addresses last until the server ends.
    """
    path = None if folder is None else folder / "view.json"
    kept = _read_kept(path)
    prefix = kept.get("prefix")
    known = kept.get("reviewers")
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        prefix, known = new_prefix(), None
    tokens = {
        name: token
        for name, token in (known.items() if isinstance(known, dict) else ())
        if isinstance(token, str) and len(token) >= 32
    }
    made = {name: secrets.token_urlsafe(24) for name in reviewers if name not in tokens}
    content = {"prefix": prefix} | ({"reviewers": tokens | made} if tokens or made else {})
    if path is not None and content != kept:
        _write_kept(path, content)
    return prefix, {name: (tokens | made)[name] for name in reviewers}


def _read_kept(path: Path | None) -> dict[str, Any]:
    try:
        found = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_kept(path: Path, content: Mapping[str, Any]) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(content, file)
        path.chmod(0o600)
    except OSError:
        pass


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


def _without_port(host: str) -> str:
    name, separator, port = host.rpartition(":")
    return name if separator and port.isdecimal() else host
