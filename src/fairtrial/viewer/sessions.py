"""The sessions of browsers that have signed in. The server keeps them, in a file that the next start reads."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
        self._token = _digest(token)
        self._clock = clock
        self._opened: dict[str, float] = {}
        self._seen = 0
        if self._path is not None and self._path.exists() and self._read() is None:
            self._change({})  # Of another token: none of its sessions may come back with it.

    def open(self) -> str:
        """Open a session and return its secret."""
        made = secrets.token_urlsafe(24)
        self._change({_digest(made): self._clock()})
        return made

    def has(self, secret: str) -> bool:
        """Return whether this is the secret of an open session."""
        self._look()
        opened = self._opened.get(_digest(secret))
        return opened is not None and self._clock() - opened < SESSION_SECONDS

    def end(self, secret: str) -> None:
        """End a session."""
        self._change({}, ended=_digest(secret))

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


def _digest(secret: str) -> str:
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
