"""Who may see the pages: an address that cannot be guessed, a token for the first visit, and sessions."""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PREFIX = re.compile(r"[A-Za-z0-9]{10,40}")
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_MAX_SESSIONS = 256


@dataclass(slots=True)
class Access:
    """The secrets of one server and the sessions that were opened with them.

    Attributes:
        prefix: The first part of every address. A session cookie is bound to it, because cookies are shared by all
            ports of a host.
        token: Opens a session; new at each start.
        authorities: The values of `Host` that are accepted, in lower case. One without a port accepts every port.
        secure: Whether TLS ends in front of the server, so that cookies are sent over TLS only.
        sessions: The open sessions.
    """

    prefix: str
    token: str
    authorities: frozenset[str]
    secure: bool = False
    sessions: dict[str, None] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        *,
        port: int | None,
        trusted_hosts: Iterable[str] = (),
        prefix: str | None = None,
        secure: bool = False,
    ) -> Access:
        """Make the access of a server on a port of this machine; without a port, of a server on a Unix socket."""
        own = [name if port is None else f"{name}:{port}" for name in LOOPBACK]
        known = frozenset(name.lower() for name in (*own, *trusted_hosts))
        return cls(prefix or new_prefix(), secrets.token_urlsafe(24), known, secure)

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

    def open_session(self) -> str:
        """Open a session and return its secret."""
        made = secrets.token_urlsafe(24)
        self.sessions[made] = None
        while len(self.sessions) > _MAX_SESSIONS:
            del self.sessions[next(iter(self.sessions))]
        return made

    def has_session(self, text: str) -> bool:
        """Return whether this is the secret of an open session."""
        given = text.encode("utf-8", "replace")
        matches = [hmac.compare_digest(given, known.encode()) for known in self.sessions]
        return any(matches)

    def set_cookie(self, secret: str) -> str:
        """Return the header that gives a session to a browser; an empty secret takes it away."""
        kept = "" if secret else "; Max-Age=0"
        tls = "; Secure" if self.secure else ""
        return f"{self.cookie}={secret}; Path=/{self.prefix}/; HttpOnly; SameSite=Lax{tls}{kept}"


def new_prefix() -> str:
    """Return ten random characters."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(10))


def kept_prefix(folder: Path | None) -> str:
    """Return the prefix that this folder's `view.json` has, so that addresses stay valid; make it if there is none.

    The file can only be read by its owner. Where it cannot be written, addresses last until the server ends.
    """
    if folder is None:
        return new_prefix()
    path = folder / "view.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("prefix")
        if isinstance(found, str) and _PREFIX.fullmatch(found):
            return found
    except (OSError, ValueError, AttributeError):
        pass
    prefix = new_prefix()
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump({"prefix": prefix}, file)
        path.chmod(0o600)
    except OSError:
        pass
    return prefix


def _without_port(host: str) -> str:
    name, separator, port = host.rpartition(":")
    return name if separator and port.isdecimal() else host
