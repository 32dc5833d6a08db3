"""Redacts secrets in the store, the logs and the terminal. docs/reference/redaction.md has the exact rules.

Two kinds of text are replaced by `[redacted]` in what tasks, models and evaluators produce (outputs, transcripts,
errors, reasons): known secrets, that is registered values and the values of environment variables that hold
credentials, and text in the shape of a credential. What people provide (ids, names, parameters, metadata, inputs,
expected values) is never changed: a known secret in it raises `SecretInDataError`.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import quote, quote_plus, unquote

from fairtrial.base.codec.escape import escape_text
from fairtrial.base.isolation.child import SecretKeeper, keep_secrets
from fairtrial.errors import SecretInDataError
from fairtrial.store.credential_formats import (
    find_credentials,
    find_url_passwords,
    hide_credential_bytes,
    hide_credentials,
)

REDACTED = "[redacted]"

# Shorter values are words like "test" or "none", which must not be replaced everywhere.
MIN_LENGTH = 8

_SHORT = 40
_MAX_CLEAN = 1000

SECRET_VARIABLES = "FAIRTRIAL_SECRETS"  # noqa: S105 - a name
"""Names further environment variables whose values are secrets, separated by commas."""

NOT_SECRET_VARIABLES = "FAIRTRIAL_NOT_SECRET"  # noqa: S105 - a name
"""Names environment variables whose values are not secrets, separated by commas."""

type SecretKind = Literal["key", "password"]

# The last word of a variable's name, without a number or a stage behind it, that makes its value a secret.
_KEY_WORDS = frozenset(
    ("KEY", "APIKEY", "TOKEN", "SECRET", "PAT", "CREDENTIAL", "CREDENTIALS", "COOKIE", "BEARER", "AUTH", "WEBHOOK")
)
_PASSWORD_WORDS = frozenset(("PASSWORD", "PASSWD", "PASS", "PWD", "PASSPHRASE"))
_KEY_ENDINGS = ("TOKEN", "SECRET", "APIKEY")  # As in GITHUBTOKEN.
_PASSWORD_ENDINGS = ("PASSWORD", "PASSWD", "PASSPHRASE")  # As in PGPASSWORD.
_STAGES = frozenset(("PROD", "PRODUCTION", "STAGING", "TEST", "DEV", "LIVE"))
# Words before KEY or TOKEN that make it something else: a database key, a tokenizer's special token.
_HARMLESS = frozenset(
    (
        "PUBLIC", "PUBLISHABLE", "PRIMARY", "FOREIGN", "SORT", "PARTITION", "CACHE", "INDEX", "ROUTING",
        "EOS", "BOS", "PAD", "UNK", "MASK", "SEP", "CLS", "STOP", "START", "END",
    )
)  # fmt: skip
_NEVER = frozenset(("PWD", "OLDPWD", NOT_SECRET_VARIABLES))

_WORDS = re.compile(r"[A-Za-z]+(?:[-_. ][A-Za-z]+)*\Z")
_PATH = re.compile(r"(?:/|~|\.{1,2}[/\\]|[A-Za-z]:[/\\])")
_BASE64_KEY = re.compile(r"(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])(?=[^0-9]*[0-9])[A-Za-z0-9+/]{40,}={0,2}\Z")

_RARE_FIRST = (
    "~^|%+$#&*!;?@=<>QZXJKVYWUGHBFPNDLMROCSETAIzqjx9876543210/_-kvbywgfpmucdlhrsnioate"  # Others before these.
)

_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_registered: dict[str, str] = {}  # Value -> what it is, for error messages.
_lock = threading.Lock()


def register_secret(value: str) -> None:
    """Redact this value in every store and log of this process. Values under 8 characters are ignored."""
    _register(value, "a registered secret")


def register_guess(value: str, kind: SecretKind, what: str) -> None:
    """Register a key or password from an option or a URL, unless it is a plain word such as "postgres"."""
    if looks_like_secret(value, kind):
        _register(value, what)


def _register(value: str, what: str) -> None:
    if len(value) >= MIN_LENGTH:
        with _lock:
            _registered[value] = what


class Redactor:
    """Replaces given secrets, and text in the format of a credential."""

    __slots__ = ("_by_byte", "_by_character", "_clean", "_needles", "_sources")

    def __init__(self, secrets: Iterable[str] | Mapping[str, str] = ()) -> None:
        """Initialize with the secrets; a mapping has a description of each, for error messages."""
        sources = secrets if isinstance(secrets, Mapping) else dict.fromkeys(secrets, "a secret")
        self._sources = {
            form: what for secret, what in sources.items() if len(secret) >= MIN_LENGTH for form in _forms(secret)
        }
        self._clean: set[str] = set()  # Short texts without secrets: names of metrics come with every trial.
        # The longest first, so that a secret inside another one does not leave a part of it.
        self._needles = tuple(sorted(self._sources, key=lambda form: (-len(form), form)))
        # By a rare character of each: searching one character takes a tenth of the time of searching a text.
        self._by_character: dict[str, list[str]] = {}
        self._by_byte: dict[bytes, list[bytes]] = {}
        for needle in self._needles:
            rare = min(needle, key=_commonness)
            self._by_character.setdefault(rare, []).append(needle)
            self._by_byte.setdefault(_bytes(rare), []).append(_bytes(needle))

    @property
    def has_secrets(self) -> bool:
        """Whether there are any secrets, besides the formats of credentials."""
        return bool(self._needles)

    def find(self, text: str | bytes) -> str | None:
        """Return the description of the first known secret in `text`, such as "the value of $API_KEY"; None if none."""
        if isinstance(text, bytes):
            for byte, encoded in self._by_byte.items():
                for data in encoded if byte in text else ():
                    if data in text:
                        return self._sources[data.decode("utf-8", "surrogatepass")]
            return None
        for character, needles in self._by_character.items():
            if character in text:
                for needle in needles:
                    if needle in text:
                        return self._sources[needle]
        return None

    def text(self, text: str) -> str:
        """Return `text` without secrets; the same object if there are none."""
        short = len(text) <= _SHORT
        if short and text in self._clean:
            return text
        redacted = self._redact(text)
        if short and redacted is text and len(self._clean) < _MAX_CLEAN:
            self._clean.add(text)
        return redacted

    def _redact(self, text: str) -> str:
        if self.find(text) is not None:
            for needle in self._needles:
                text = text.replace(needle, REDACTED)
        return hide_credentials(text, REDACTED)

    def json(self, text: str) -> str:
        """Return JSON text without secrets, still valid JSON; the same object if there are none."""
        redacted = self.text(text)
        if redacted is text:  # The usual case.
            return text
        try:
            tree = json.loads(redacted)
        except ValueError:
            # Not valid JSON to begin with, or a known secret is a number or extends beyond one string.
            try:
                tree = self._tree(json.loads(text))
            except ValueError:
                return redacted
        careful = _text(tree)
        return careful if self.find(careful) is None else _text(REDACTED)

    def data(self, data: bytes) -> bytes:
        """Return bytes without secrets; JSON stays valid. The same object if there are none."""
        try:
            text = data.decode("utf-8")
        except ValueError:
            redacted = data
            for needle in self._needles:
                redacted = redacted.replace(_bytes(needle), REDACTED.encode())
            return hide_credential_bytes(redacted, REDACTED.encode())
        known = self._needles and self.find(text) is not None
        if not known and hide_credentials(text, REDACTED) is text:  # Almost always.
            return data
        return self.json(text).encode("utf-8")

    def _tree(self, tree: Any) -> Any:
        if isinstance(tree, str):
            return self.text(tree)
        if isinstance(tree, list):
            return [self._tree(item) for item in tree]
        if isinstance(tree, dict):
            return {self.text(key): self._tree(item) for key, item in tree.items()}
        if isinstance(tree, int | float) and not isinstance(tree, bool) and self.find(_text(tree)) is not None:
            return REDACTED
        return tree


def refuse_secret(redactor: Redactor, field: str, text: str | bytes | None) -> None:
    """Raise `SecretInDataError` if a field that must be stored unchanged contains a known secret."""
    found = redactor.find(text) if text else None
    if found is not None:
        raise SecretInDataError(
            f"{field} must not contain a secret (it contains {found}).\n"
            "Remove it from there. If the value is not a secret, name its environment variable in "
            f"{NOT_SECRET_VARIABLES}"
        )


class RedactingFilter(logging.Filter):
    """A logging filter that redacts secrets in messages and tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the record in place; always returns True."""
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


_current: tuple[dict[str, str], Redactor] | None = None


def known_secrets(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the current secrets of this process: value -> description."""
    with _lock:
        registered = dict(_registered)
    return environment_secrets(os.environ if environ is None else environ) | registered


def secrets_version() -> tuple[int, int]:
    """Return two numbers that change with the known secrets, and are quicker to have than these."""
    return len(_registered), hash(frozenset(os.environ.items()))


def register_known(secrets: Mapping[str, str]) -> None:
    """Register the `known_secrets` of another process of the run."""
    for value, what in secrets.items():
        _register(value, what)


def current() -> Redactor:
    """Return the redactor for the current secrets of this process; rebuilt when they change."""
    global _current
    secrets = known_secrets()
    known = _current
    if known is None or known[0] != secrets:
        known = _current = (secrets, Redactor(secrets))
    return known[1]


def environment_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets in an environment: value -> description."""
    always = _names(environ.get(SECRET_VARIABLES, ""))
    never = _names(environ.get(NOT_SECRET_VARIABLES, ""))
    return {
        secret: f"the value of ${name}"
        for name, value in environ.items()
        if len(value) >= MIN_LENGTH and name not in never
        for secret in _variable_secrets(name, value, name in always)
    }


def _names(listed: str) -> frozenset[str]:
    return frozenset(name.strip() for name in listed.split(",") if name.strip())


@lru_cache(maxsize=1024)
def _variable_secrets(name: str, value: str, named: bool) -> tuple[str, ...]:
    """Return the secrets in one environment variable; `named` if it was declared to contain one."""
    if named:
        return (value,)
    kind = kind_of_variable(name)
    if kind is not None and looks_like_secret(value, kind) and (name.upper().endswith("WEBHOOK") or not _is_url(value)):
        return (value,)
    passwords = {form for found in find_url_passwords(value) for form in (found, unquote(found))}
    return (
        *(password for password in passwords if looks_like_secret(password, "password")),
        *(found for found in find_credentials(value) if found not in passwords and looks_like_secret(found, "key")),
    )


def kind_of_variable(name: str) -> SecretKind | None:
    """Return the kind of secret that the last word of a variable's name indicates."""
    if name in _NEVER:
        return None
    words = [word for word in re.split(r"[_.-]", name.upper()) if word]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in _STAGES):
        words.pop()
    if not words or (len(words) > 1 and words[-2] in _HARMLESS):
        return None
    last = words[-1]
    if last in _PASSWORD_WORDS or last.endswith(_PASSWORD_ENDINGS):
        return "password"
    return "key" if last in _KEY_WORDS or last.endswith(_KEY_ENDINGS) else None


def looks_like_secret(value: str, kind: SecretKind) -> bool:
    """Return whether a value can be a credential: not a path, a plain word or a short number.

    A key is more than words of letters joined by `-`, `_`, `.` or spaces; a password may be words, but a single one has
    12 letters at least.
    """
    if len(value) < MIN_LENGTH or (_PATH.match(value) and not _BASE64_KEY.match(value)):
        return False
    if value.isdigit():
        return len(value) >= 12
    if kind == "password":
        return len(value) >= 12 or not value.isalpha()
    if _WORDS.match(value):
        # Random letters have capitals within: `GzQwKpTnVbXsLmRj`.
        return value.isalpha() and len(value) >= 20 and not (value.islower() or value.isupper())
    return True


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _commonness(character: str) -> int:
    """Return a low number for characters that are rare in text and in JSON."""
    return _RARE_FIRST.find(character)


def _is_url(value: str) -> bool:
    return "://" in value


def _forms(secret: str) -> set[str]:
    """Return the encodings of a secret: plain, percent-encoded, base64, and each inside JSON strings."""
    forms = {secret, escape_text(secret), *_percent_forms(secret), *_base64_forms(secret)}
    fresh = forms
    for _depth in range(3):
        fresh = {
            form
            for text in fresh
            for form in (_text(text)[1:-1], json.dumps(text)[1:-1], _text(text)[1:-1].replace("/", "\\/"))
        } - forms
        forms |= fresh
    return forms


def _percent_forms(secret: str) -> Iterator[str]:
    data = secret.encode("utf-8", "surrogatepass")
    for encoded in (quote(data), quote(data, safe=""), quote_plus(data)):
        yield encoded
        yield re.sub(r"%[0-9A-F]{2}", lambda found: found[0].lower(), encoded)


def _base64_forms(secret: str) -> Iterator[str]:
    """Return the base64 digits that depend on the secret only, for each of the three alignments."""
    data = secret.encode("utf-8", "surrogatepass")
    for lead in range(3):
        start, end = (lead * 8 + 5) // 6, (lead + len(data)) * 8 // 6
        padded = bytes(lead) + data
        yield base64.b64encode(padded).decode()[start:end]
        yield base64.urlsafe_b64encode(padded).decode()[start:end]


keep_secrets(SecretKeeper(__name__, known_secrets, register_known))
