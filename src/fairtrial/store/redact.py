"""Secrets stay out of the store and out of the logs.

A secret is the value of an environment variable whose name speaks of a key, token, secret or password, the password
in a URL, or a value that was registered. Whoever holds one in code, such as a model adapter, registers it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from fairtrial.codec.escape import escape_text

REDACTED = "[redacted]"

# Shorter values are words like "test" or "none": blanking them everywhere would destroy what people read.
MIN_LENGTH = 8

_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"""(://[^\s/:@"'\\]*:)([^\s/@"'\\]+)(?=@)""")
_URL_PASSWORD_BYTES = re.compile(rb"""://[^\s/:@"'\\]*:([^\s/@"'\\]+)@""")
_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_registered: set[str] = set()
_lock = threading.Lock()


def register_secret(value: str) -> None:
    """Keep this value out of every store and log of this process. Values under 8 characters are not taken."""
    if len(value) >= MIN_LENGTH:
        with _lock:
            _registered.add(value)


class Redactor:
    """Replaces the secrets it was made with, and passwords in URLs, wherever they stand in text."""

    __slots__ = ("_encoded", "_needles")

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        forms = {form for secret in secrets if len(secret) >= MIN_LENGTH for form in _forms(secret)}
        # The longest first: a secret inside another one must not leave half of it standing.
        self._needles = tuple(sorted(forms, key=lambda form: (-len(form), form)))
        self._encoded = tuple(needle.encode("utf-8", "surrogatepass") for needle in self._needles)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] | None = None) -> Redactor:
        """The secrets of an environment (this process's unless given), and those that were registered."""
        with _lock:
            registered = tuple(_registered)
        return cls({*registered, *_environment_secrets(os.environ if environ is None else environ)})

    def text(self, text: str) -> str:
        """`text` without secrets."""
        for needle in self._needles:
            if needle in text:
                text = text.replace(needle, REDACTED)
        if "@" in text and "://" in text:  # The rarer one first.
            text = _URL_PASSWORD.sub(rf"\1{REDACTED}", text)
        return text

    def json(self, text: str) -> str:
        """JSON text without secrets, and still JSON."""
        redacted = self.text(text)
        if redacted == text:  # Almost always.
            return text
        # A secret may be a number, or reach beyond one string: replacing text would break the JSON around it.
        try:
            careful = _text(self._tree(json.loads(text)))
        except ValueError:
            return redacted  # It was no JSON to begin with.
        return careful if self.text(careful) == careful else _text(REDACTED)

    def data(self, data: bytes) -> bytes:
        """Bytes without secrets; JSON stays JSON."""
        for needle in self._encoded:
            if needle in data:
                break
        else:
            if b"@" not in data or not _URL_PASSWORD_BYTES.search(data):
                return data
        try:
            text = data.decode("utf-8")
            json.loads(text)
        except ValueError:
            for needle in self._encoded:
                data = data.replace(needle, REDACTED.encode())
            return _URL_PASSWORD_BYTES.sub(_blank_password, data)
        return self.json(text).encode("utf-8")

    def _tree(self, tree: Any) -> Any:
        if isinstance(tree, str):
            return self.text(tree)
        if isinstance(tree, list):
            return [self._tree(item) for item in tree]
        if isinstance(tree, dict):
            return {self.text(key): self._tree(item) for key, item in tree.items()}
        if isinstance(tree, int | float) and not isinstance(tree, bool) and self.text(_text(tree)) != _text(tree):
            return REDACTED
        return tree


class RedactingFilter(logging.Filter):
    """Put on a logging handler, keeps secrets out of messages and tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the record in place; nothing is held back."""
        redactor = current()
        message = record.getMessage()
        redacted = redactor.text(message)
        if redacted != message:
            record.msg, record.args = redacted, ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redactor.text(record.exc_text)
        if record.stack_info:
            record.stack_info = redactor.text(record.stack_info)
        return True


_current: tuple[tuple[frozenset[str], frozenset[str]], Redactor] | None = None


def current() -> Redactor:
    """The redactor for the secrets this process has now; made again only when they have changed."""
    global _current
    with _lock:
        registered = frozenset(_registered)
    found = (registered, frozenset(_environment_secrets(os.environ)))
    known = _current
    if known is None or known[0] != found:
        known = _current = (found, Redactor(registered | found[1]))
    return known[1]


def _environment_secrets(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in environ.items():
        if len(value) < MIN_LENGTH:
            continue
        if _NAME.search(name):
            yield value
        if "://" in value:
            for found in _URL_PASSWORD.finditer(value):
                yield found[2]
                yield unquote(found[2])


def _forms(secret: str) -> set[str]:
    """A secret as it may stand in text: itself, and inside JSON strings, also JSON within JSON."""
    forms = {secret, escape_text(secret)}
    fresh = forms
    for _depth in range(3):
        fresh = {
            form
            for text in fresh
            for form in (_text(text)[1:-1], json.dumps(text)[1:-1], _text(text)[1:-1].replace("/", "\\/"))
        } - forms
        forms |= fresh
    return forms


def _blank_password(found: re.Match[bytes]) -> bytes:
    start = found.start(1) - found.start()
    return found[0][:start] + REDACTED.encode() + b"@"
