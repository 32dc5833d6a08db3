"""Formats of credentials that are recognized without being registered. docs/reference/redaction.md lists them.

Every pattern takes linear time and is fast: it begins with a literal or a set of characters, for which `re` has an
optimized search; what precedes that is checked by a look-behind. Its repetitions do not overlap with those of a later
start, and look-aheads are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

_END = r"(?![A-Za-z0-9])"
_NEAR = 100  # How far from a match its `beside` may be; twice as far before it.


class Format(NamedTuple):
    """One format of a credential. The first group of a pattern, if any, is the text before the secret."""

    name: str
    patterns: tuple[str, ...]
    signs: tuple[str, ...]  # One of these is in every match.
    # A pattern that must occur near a match. Group 2 of `pattern` is then the part that is not a secret.
    beside: str | None = None
    word: str = ""  # A pattern of which a match is in every match; quicker to look for than several signs.


def _starts(prefix: str, width: int, inside: str = "A-Za-z0-9_-") -> str:
    r"""`prefix`, `width` characters long, not after a character `inside` a word, but after a JSON escape such as `\n`.

    Checked behind the prefix: a pattern that begins with a condition is tried at every character of the text.
    """
    return rf"{prefix}(?:(?<![{inside}].{{{width}}})|(?<=\\[nrtbf].{{{width}}}))"


_AFTER_UNDERSCORE = "_[A-Za-z0-9_]{16}"
_AT_HYPHEN = "-(?:(?<=[kt]-)(?:(?<=sk-)|(?<=glpat-))|(?<=xox.-)|BEGIN (?<=-----BEGIN ))"  # Hyphens may be many.

_URL_PART = r"[^\s:@\"'\\<>]"
_URL_PARTS = rf"{_URL_PART}*+(?::(?!//){_URL_PART}*+)*+"  # Up to the next `://`.

URL_PASSWORD = Format(
    "passwords in URLs",
    (
        r"(://[^\s/:@\"'\\<>]{0,200}+:)(?:"
        r"[^\s/\"'\\<>]+(?=@)"
        # A password with a slash in it is not told from a port and a path where it begins with digits. It may contain
        # `://` once: if it could contain more, every `://` would be read again from each one before it.
        rf"|(?!\d{{1,5}}/)(?!@){_URL_PARTS}(?:://{_URL_PARTS})?+(?=@))",
    ),
    ("@",),
)

# They are replaced in this order. A secret that may contain another comes first, unless it may contain the mark that
# stands for a replaced one too; what needs something beside it comes before all that may replace that.
FORMATS: tuple[Format, ...] = (
    Format(
        "passwords in connection strings",
        (
            # Text that is not a secret is matched too, or it would be searched again from each `password=` in it.
            rf"({_starts('[pP]', 1, 'A-Za-z0-9_.,(?&')}(?i:assword|asswd|wd)=)"
            r"(?:([^\s;\"'\\(){},]{4,}+)(?=[\s;\"'\\]|\Z)|[^\s;\"'\\(){},]++)",
        ),
        ("=",),
        # `password=...` alone is a line of code.
        beside=r"=(?<=(?i:st|rt|er|id|me|se|dr)=)(?:(?<=\b(?i:uid)=)|(?<=\b(?i:host|port|user)=)|(?<=\b(?i:server|dbname)=)"
        r"|(?<=\b(?i:hostaddr|username|database)=))",
    ),
    Format(
        "private keys",
        (
            # A backslash counts only in an escape: JSON in which a key is replaced is still JSON.
            r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----)"
            r"(?:[A-Za-z0-9+/=\s:,.()]|\\++[nrt/]|-(?!-)){40,}+",
        ),
        ("-----BEGIN ",),
        word=_AT_HYPHEN,
    ),
    Format(
        "Authorization headers",
        (
            r"([zZ](?<=(?i:authoriz))(?i:ation)[\\\"']{0,8}\s{0,4}[:=]\s{0,4}[\\\"']{0,8}(?i:bearer|basic|token)\s{1,4})"
            r"[A-Za-z0-9._~+/=-]{8,}+",
        ),
        ("z", "Z"),
    ),
    Format(
        "bearer tokens",
        (
            rf"({_starts('earer(?<=[Bb]earer)', 6)}\s{{1,4}})"
            r"(?=[A-Za-z._~+/-]{0,200}[0-9])[A-Za-z0-9._~+/-]{16,}+=*+",
        ),
        ("earer",),
    ),
    Format(
        "basic credentials",
        (
            rf"({_starts('asic(?<=[Bb]asic)', 5)}\s{{1,4}})"
            r"(?=[A-Za-z+/]{0,200}[0-9])(?=[a-z0-9+/]{0,200}[A-Z])(?=[A-Z0-9+/]{0,200}[a-z])[A-Za-z0-9+/]{16,}+=*+",
        ),
        ("asic",),
    ),
    Format(
        "JSON web tokens",
        (rf"{_starts('eyJ', 3)}[A-Za-z0-9_-]{{8,}}+\.[A-Za-z0-9_-]{{2,}}+\.[A-Za-z0-9_-]{{20,}}+",),
        ("eyJ",),
    ),
    Format(
        "Slack webhooks",
        (r"(hooks\.slack\.com/(?:services|workflows)/)[A-Za-z0-9/_-]{20,}+",),
        ("hooks.slack.com/",),
    ),
    Format(
        "OpenAI, Anthropic and similar keys",
        (
            rf"{_starts('sk-', 3)}(?:(?:ant|proj|svcacct|admin|or|live|test)-[A-Za-z0-9_-]{{16,}}+"
            r"|(?=[A-Za-z]{0,200}[0-9])[A-Za-z0-9]{20,}+)",
        ),
        ("sk-",),
        word=_AT_HYPHEN,
    ),
    Format("GitLab tokens", (rf"{_starts('glpat-', 6)}[A-Za-z0-9_-]{{20,}}+",), ("glpat-",), word=_AT_HYPHEN),
    Format("Slack tokens", (rf"{_starts('xox[abeoprs]-', 5)}[A-Za-z0-9-]{{10,}}+",), ("xox",), word=_AT_HYPHEN),
    Format(
        "Stripe keys",
        tuple(rf"{_starts(f'{kind}k_{mode}_', 8)}[A-Za-z0-9]{{16,}}+" for kind in "srp" for mode in ("live", "test")),
        ("k_live_", "k_test_"),
        word=_AFTER_UNDERSCORE,
    ),
    Format(
        "GitHub tokens",
        (
            rf"{_starts('gh[pousr]_', 4)}[A-Za-z0-9]{{20,}}+",
            rf"{_starts('github_pat_', 11)}[A-Za-z0-9_]{{22,}}+",
        ),
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        word=_AFTER_UNDERSCORE,
    ),
    Format("Hugging Face tokens", (rf"{_starts('hf_', 3)}[A-Za-z0-9]{{30,}}+",), ("hf_",), word=_AFTER_UNDERSCORE),
    Format(
        "AWS access key ids",
        tuple(rf"{_starts(prefix, 4)}[A-Z0-9]{{16}}{_END}" for prefix in ("AKIA", "ASIA")),
        ("IA",),
    ),
    Format("Google API keys", (rf"{_starts('AIza', 4)}[A-Za-z0-9_-]{{35}}",), ("AIza",)),
    Format(
        "keys in URL queries",
        (
            # Alternatives that begin with a set of characters are skipped at once, unlike those of `(?i:...)`.
            r"([?&](?:[aA](?i:pi[_-]?key|ccess[_-]?(?:key|token)|uth[_-]?token)|[tT](?i:oken)|[rR](?i:efresh[_-]?token)"
            r"|[iI](?i:d[_-]?token)|[cC](?i:lient[_-]?secret)|[sS](?i:ecret)|[pP](?i:assw(?:or)?d|wd))=)"
            r"[^\s&#\"'\\<>]{8,}+",
        ),
        ("=",),
    ),
    URL_PASSWORD,
    Format(
        "tokens in URLs",
        (r"(://(?:(?<=http://)|(?<=https://)))(?=[^\s/:@0-9]{0,200}[0-9])[^\s/:@\"'\\<>]{16,200}+(?=@)",),
        ("@",),
    ),
)


class _Pattern[T: (str, bytes)]:
    """One pattern, for text or for bytes."""

    def __init__(self, pattern: T, beside: T | None, template: T) -> None:
        self._pattern: re.Pattern[T] = re.compile(pattern)
        self._beside: re.Pattern[T] | None = re.compile(beside) if beside else None
        self._template: T = template if self._pattern.groups else template[:0]  # What stays of a match.

    def replace(self, text: T, mark: T) -> T:
        """`text` with `mark` in place of every secret; the same object where there is none."""
        if self._beside is None:
            return self._pattern.sub(self._template + mark, text)
        parts: list[T] = []
        done = 0
        for start, end in self.spans(text):
            parts += (text[done:start], mark)
            done = end
        parts.append(text[done:])
        return text[:0].join(parts) if done else text

    def spans(self, text: T) -> list[tuple[int, int]]:
        """Where the secrets are."""
        if self._beside is not None:
            found = [match.span(2) for match in self._pattern.finditer(text)]
            return _near(found, _sparse(self._beside, text)) if found else found
        group = self._pattern.groups
        return [(match.end(1) if group else match.start(), match.end()) for match in self._pattern.finditer(text)]


def _near(spans: Iterable[tuple[int, int]], places: Iterator[int]) -> list[tuple[int, int]]:
    """The spans that have a place near them. Both ascend."""
    near: list[tuple[int, int]] = []
    place = next(places, None)
    for span in spans:
        start, end = span
        while place is not None and place < start - 2 * _NEAR:
            place = next(places, None)
        if place is None:
            break
        if place <= end + _NEAR and end > 0:
            near.append(span)
    return near


def _sparse[T: (str, bytes)](pattern: re.Pattern[T], text: T) -> Iterator[int]:
    """Where `pattern` matches, but of matches within `_NEAR` characters only the first: there may be very many."""
    match = pattern.search(text)
    while match is not None:
        yield match.start()
        match = pattern.search(text, match.start() + _NEAR)


def _rare_part[T: (str, bytes)](signs: tuple[T, ...], characters: T) -> T:
    """A character of all signs that few texts have: looking for one is several times as quick as looking for a word."""
    for place in range(len(characters)):
        if all(characters[place : place + 1] in sign for sign in signs):
            return characters[place : place + 1]
    return characters[:0]


class _Formats[T: (str, bytes)]:
    """All formats, for text or for bytes."""

    def __init__(self, formats: Sequence[tuple[tuple[T, ...], T, tuple[_Pattern[T], ...]]], rare: T) -> None:
        words: dict[T, re.Pattern[T]] = {word: re.compile(word) for _, word, _ in formats if word}
        # In order, and neighbours with the same rare character and the same word together: both are looked for once.
        self._groups: list[tuple[T, re.Pattern[T] | None, list[tuple[tuple[T, ...], tuple[_Pattern[T], ...]]]]] = []
        for (character, word), group in groupby(formats, lambda one: (_rare_part(one[0], rare), one[1])):
            self._groups.append((character, words.get(word), [(signs, patterns) for signs, _, patterns in group]))

    def patterns(self, text: T) -> Iterator[_Pattern[T]]:
        """The patterns of which a sign is in `text`."""
        for rare, _, group in self._groups:
            for signs, patterns in group if rare in text else ():
                if any(sign in text for sign in signs):
                    yield from patterns

    def replace(self, text: T, mark: T) -> T:
        """`text` with `mark` in place of every secret; the same object where there is none."""
        given = text
        missing: re.Pattern[T] | None = None
        # As in `patterns`, but a generator costs more than most texts.
        for rare, word, group in self._groups:
            if rare in given:
                if word is not None and (word is missing or word.search(given) is None):
                    missing = word
                    continue
                for signs, patterns in group:
                    for sign in signs:
                        if sign in given:
                            for pattern in patterns:
                                text = pattern.replace(text, mark)
                            break
        return text


_RARE = "-@=/JIZx_"  # Characters, the rarest first.


@cache  # Compiled when a text is first searched: a process that only reads a store searches none.
def _texts() -> _Formats[str]:
    patterns = [
        (known.signs, known.word, tuple(_Pattern(pattern, known.beside, r"\g<1>") for pattern in known.patterns))
        for known in FORMATS
    ]
    return _Formats(patterns, _RARE)


@cache
def _bytes() -> _Formats[bytes]:
    patterns = [
        (
            tuple(sign.encode() for sign in known.signs),
            known.word.encode(),
            tuple(
                _Pattern(pattern.encode(), known.beside.encode() if known.beside else None, rb"\g<1>")
                for pattern in known.patterns
            ),
        )
        for known in FORMATS
    ]
    return _Formats(patterns, _RARE.encode())


def hide_credentials(text: str, mark: str) -> str:
    """Return `text` with `mark` instead of every credential; the same object if there are none."""
    return _texts().replace(text, mark)


def hide_credential_bytes(data: bytes, mark: bytes) -> bytes:
    """Return `data` with `mark` instead of every credential; the same object if there are none."""
    return _bytes().replace(data, mark)


def find_credentials(text: str) -> Iterator[str]:
    """Return everything in `text` that has the format of a credential."""
    for pattern in _texts().patterns(text):
        for start, end in pattern.spans(text):
            yield text[start:end]


def find_url_passwords(text: str) -> Iterator[str]:
    """Return the passwords of the URLs in `text`."""
    for found in re.finditer(URL_PASSWORD.patterns[0], text):
        yield text[found.end(1) : found.end()]
