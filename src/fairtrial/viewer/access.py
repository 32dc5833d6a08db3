"""Who may see the pages: an address that cannot be guessed, a token to sign in with, and sessions."""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fairtrial.errors import ConfigurationError
from fairtrial.viewer.sessions import SESSION_SECONDS, Sessions, read_private, write_private

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PREFIX = re.compile(r"[A-Za-z0-9]{10,40}")
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_INVITATION_SECONDS = 60.0
_SHORTEST_TOKEN = 16
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

    def accepts_host(self, host: str) -> bool:
        """Return whether a request may name this host."""
        host = host.lower()
        return host in self.authorities or _without_port(host) in self.authorities

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
        return (Visitor(matches[0], review_only=True), self._reviewer_session(matches[0])) if matches else None

    def _reviewer_session(self, name: str) -> str:
        secrets_of_both = f"{self.reviewers[name]}\n{self.token}".encode()
        return hmac.digest(secrets_of_both, b"session", "sha256").hex()

    def visitor(self, text: str) -> Visitor | None:
        """Return whose session this is the secret of."""
        if self.sessions.has(text):
            return Visitor(self.user)
        matches = [name for name in self.reviewers if same_secret(text, self._reviewer_session(name))]
        return Visitor(matches[0], review_only=True) if matches else None

    @staticmethod
    def form_secret(session: str) -> str:
        """Return the value that every form of a session carries, which other sites cannot know."""
        return hmac.digest(session.encode("utf-8", "replace"), b"form", "sha256").hex()[:32]

    def has_session(self, text: str) -> bool:
        """Return whether this is the secret of an open session."""
        return self.visitor(text) is not None

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


def _without_port(host: str) -> str:
    name, separator, port = host.rpartition(":")
    return name if separator and port.isdecimal() else host
