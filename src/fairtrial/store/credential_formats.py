"""The shapes of credentials that are recognised without being known. docs/reference/redaction.md lists them.

Every pattern takes time linear in the text: it starts at a fixed marker, its repetitions do not overlap with those of a
later start, and where it looks beyond what it matches, it looks a bounded number of characters ahead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Not inside a longer word; a JSON escape such as \n may stand before.
_START = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrtbf]))"
_END = r"(?![A-Za-z0-9])"
_NEAR = 200  # How far from a match its `beside` may be.
_QUERY_NAMES = (
    r"api[_-]?key|access[_-]?key|(?:(?:access|auth|refresh|id)[_-]?)?token|(?:client[_-]?)?secret|password|passwd|pwd"
)


class Format(NamedTuple):
    """One shape of a credential. Its last group is the secret; without a group, all of the match is."""

    name: str
    pattern: str
    beside: str | None = None  # What must be found near a match.


URL_PASSWORD = Format(
    "passwords in URLs",
    # A password with a slash in it is not told from a port and a path where it begins with digits.
    r"://[^\s/:@\"'\\<>]{0,200}+:([^\s/\"'\\<>]{1,200}(?=@)|(?!\d{1,5}/)[^\s@\"'\\<>]{1,200}(?=@))",
)

FORMATS: tuple[Format, ...] = (
    Format(
        "OpenAI, Anthropic and similar keys",
        rf"{_START}sk-(?:(?:ant|proj|svcacct|admin|or|live|test)-[A-Za-z0-9_-]{{16,}}"
        rf"|(?=[A-Za-z]{{0,200}}[0-9])[A-Za-z0-9]{{20,}}{_END})",
    ),
    Format("Stripe keys", rf"{_START}[srp]k_(?:live|test)_[A-Za-z0-9]{{16,}}"),
    Format(
        "GitHub tokens",
        rf"{_START}(?:gh[pousr]_[A-Za-z0-9]{{20,}}|github_pat_[A-Za-z0-9_]{{22,}})",
    ),
    Format("GitLab tokens", rf"{_START}glpat-[A-Za-z0-9_-]{{20,}}"),
    Format("AWS access key ids", rf"{_START}(?:AKIA|ASIA)[A-Z0-9]{{16}}{_END}"),
    Format("Google API keys", rf"{_START}AIza[A-Za-z0-9_-]{{35}}"),
    Format("Slack tokens", rf"{_START}xox[abeoprs]-[A-Za-z0-9-]{{10,}}"),
    Format("Slack webhooks", r"hooks\.slack\.com/(?:services|workflows)/([A-Za-z0-9/_-]{20,})"),
    Format("Hugging Face tokens", rf"{_START}hf_[A-Za-z0-9]{{30,}}"),
    Format(
        "JSON web tokens",
        rf"{_START}eyJ[A-Za-z0-9_-]{{8,}}+\.[A-Za-z0-9_-]{{2,}}+\.[A-Za-z0-9_-]{{20,}}+",
    ),
    Format(
        "private keys",
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----((?:[A-Za-z0-9+/=\s\\:,.()]|-(?!-)){40,}+)",
    ),
    Format(
        "Authorization headers",
        r"(?i:authorization)[\\\"']{0,8}\s{0,4}[:=]\s{0,4}[\\\"']{0,8}(?i:bearer|basic|token)\s{1,4}"
        r"([A-Za-z0-9._~+/=-]{8,})",
    ),
    Format(
        "bearer tokens",
        rf"{_START}[Bb]earer\s{{1,4}}((?=[A-Za-z._~+/-]{{0,200}}[0-9])[A-Za-z0-9._~+/-]{{16,}}=*)",
    ),
    Format(
        "basic credentials",
        rf"{_START}[Bb]asic\s{{1,4}}((?=[A-Za-z+/]{{0,200}}[0-9])(?=[a-z0-9+/]{{0,200}}[A-Z])(?=[A-Z0-9+/]{{0,200}}[a-z])"
        r"[A-Za-z0-9+/]{16,}=*)",
    ),
    Format(
        "keys in URL queries",
        rf"[?&](?i:{_QUERY_NAMES})=([^\s&#\"'\\<>]{{8,}})",
    ),
    Format(
        "passwords in connection strings",
        r"(?:(?<![A-Za-z0-9_.,(?&])|(?<=\\[nrtbf]))(?i:password|passwd|pwd)=([^\s;\"'\\(){},]{4,200}+)(?=[\s;\"'\\]|\Z)",
        # `password=...` alone is a line of code.
        beside=r"(?i:\b(?:host|hostaddr|server|port|user|username|uid|dbname|database)=)",
    ),
    URL_PASSWORD,
    Format(
        "tokens in URLs",
        r"https?://((?=[^\s/:@0-9]{0,200}[0-9])[^\s/:@\"'\\<>]{16,200})(?=@)",
    ),
)


# One of these is found in every text that holds a credential. Each begins with one character that is rare in ordinary
# text: looking for a character takes a tenth of the time of looking for two, and most text is let go on its account.
_SIGNS = (
    r"_(?:(?<=hf_)|(?<=gh[pousr]_)|(?<=github_pat_)|(?<=k_live_)|(?<=k_test_))",
    r"-(?:(?<=sk-)|(?<=glpat-)|(?<=xox[abeoprs]-)|(?<=-----)BEGIN )",
    r"I(?:(?<=AKI)A|(?<=ASI)A|(?<=AI)za)",
    r"J(?<=eyJ)",
    r"B(?:earer|asic)\s",
    r"z(?<=(?i:uthoriz))(?i:ation)",
    r"Z(?<=(?i:uthoriz))(?i:ation)",
    r"/(?<=hooks\.slack\.com/)",
    r"=(?:(?<=(?i:key=))|(?<=(?i:token=))|(?<=(?i:secret=))|(?<=(?i:password=))|(?<=(?i:passwd=))|(?<=(?i:pwd=)))",
    r"@(?<![\s/\"'\\]@)",
)


class _Matcher[T: (str, bytes)]:
    """The formats for text, or for bytes."""

    def __init__(
        self, signs: Iterable[tuple[T, re.Pattern[T]]], formats: Iterable[tuple[re.Pattern[T], re.Pattern[T] | None]]
    ) -> None:
        self._signs: tuple[tuple[T, re.Pattern[T]], ...] = tuple(signs)
        self._formats: tuple[tuple[re.Pattern[T], re.Pattern[T] | None], ...] = tuple(formats)

    def may_match(self, text: T) -> bool:
        """False if no format occurs in `text`; quick."""
        for character, sign in self._signs:  # noqa: SIM110 - a generator would double the cost of this hot path
            if character in text and sign.search(text) is not None:
                return True
        return False

    def spans(self, text: T) -> Iterator[tuple[int, int]]:
        """Where the secrets are, format by format."""
        for pattern, beside in self._formats:
            if beside is not None and beside.search(text) is None:
                continue
            for found in pattern.finditer(text):
                start, end = found.span(found.lastindex or 0)
                if beside is None or beside.search(text, max(0, start - _NEAR), end + _NEAR):
                    yield start, end

    def replace(self, text: T, mark: T) -> T:
        """`text` with `mark` in place of every secret; the same object where there is none."""
        spans = sorted(self.spans(text))
        if not spans:
            return text
        parts: list[T] = []
        done = 0
        for start, end in spans:
            if start >= done:
                parts += (text[done:start], mark)
            done = max(done, end)
        parts.append(text[done:])
        return text[:0].join(parts)


_TEXT = _Matcher(
    [(sign[0], re.compile(sign)) for sign in _SIGNS],
    [(re.compile(known.pattern), re.compile(known.beside) if known.beside else None) for known in FORMATS],
)
_BYTES = _Matcher(
    [(sign[0].encode(), re.compile(sign.encode())) for sign in _SIGNS],
    [
        (re.compile(known.pattern.encode()), re.compile(known.beside.encode()) if known.beside else None)
        for known in FORMATS
    ],
)


def hide_credentials(text: str, mark: str) -> str:
    """`text` with `mark` in place of whatever has the shape of a credential; the same object where nothing has."""
    return _TEXT.replace(text, mark) if _TEXT.may_match(text) else text


def hide_credential_bytes(data: bytes, mark: bytes) -> bytes:
    """The same for bytes."""
    return _BYTES.replace(data, mark) if _BYTES.may_match(data) else data


def find_credentials(text: str) -> Iterator[str]:
    """Whatever in `text` has the shape of a credential."""
    if _TEXT.may_match(text):
        for start, end in _TEXT.spans(text):
            yield text[start:end]


def find_url_passwords(text: str) -> Iterator[str]:
    """The passwords of the URLs in `text`."""
    for found in re.finditer(URL_PASSWORD.pattern, text):
        yield found[1]
