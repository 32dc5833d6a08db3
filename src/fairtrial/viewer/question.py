"""The question that an address asks, and addresses that ask it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args
from urllib.parse import quote, unquote, urlencode

from fairtrial.store.protocol import RunRecord
from fairtrial.trials.result import TRIAL_FIGURES, Outcome

STATES: tuple[str, ...] = ("passed", "failed", *(name for name in get_args(Outcome.__value__) if name != "scored"))
"""How trials ended: an outcome, or for a scored trial its verdict."""
RANGES = ("score", *TRIAL_FIGURES)
"""The numbers that can be filtered by a range."""
SORTS = ("ordinal", *RANGES)
PAGE = 100
_META = "m."
_SPAN = re.compile(r"(?P<low>[-+0-9.eE]*?)\.\.(?P<high>[-+0-9.eE]*)")
_PLACE = re.compile(r"(?P<key>[-+0-9.eEinfa]*):(?P<ordinal>[0-9]{1,12})")


@dataclass(frozen=True, slots=True)
class Span:
    """A range of numbers, ends included; None: no limit."""

    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{_number(self.low)}..{_number(self.high)}"


@dataclass(frozen=True, slots=True)
class RowCursor:
    """A row of a sorted table: the number it is sorted by (None: it has none) and its ordinal."""

    key: float | None
    ordinal: int

    def __str__(self) -> str:
        return f"{_number(self.key)}:{self.ordinal}"


@dataclass(frozen=True, slots=True)
class Question:
    """One question to the table of trials.

    Attributes:
        experiments: Names of experiments; empty for all.
        states: See `STATES`; empty for all.
        metadata: Metadata keys, each with the texts of its accepted values; "" accepts samples without the key.
        spans: Ranges of numbers by name; see `RANGES`.
        sort: One of `SORTS`, or "metric:NAME".
        descending: Whether large numbers come first.
        text: What input, output, reason, error or transcript must contain.
        after: Show the rows after this one.
        before: Show the rows before this one.
        scan_from: With `text`: search from this ordinal on.
    """

    experiments: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    metadata: tuple[tuple[str, tuple[str, ...]], ...] = ()
    spans: tuple[tuple[str, Span], ...] = ()
    sort: str = "ordinal"
    descending: bool = False
    text: str = ""
    after: RowCursor | None = None
    before: RowCursor | None = None
    scan_from: int = 0

    @property
    def is_filtered(self) -> bool:
        """True if some trials are left out."""
        return bool(self.experiments or self.states or self.metadata or self.spans or self.text)

    @property
    def selects_results(self) -> bool:
        """True if trials are selected by what they are measured by: a pass rate of these says nothing."""
        return bool(self.states or self.text) or any(name == "score" for name, _ in self.spans)

    @property
    def first_page(self) -> Question:
        """The same question from its first row on."""
        return replace(self, after=None, before=None, scan_from=0)

    def with_value(self, facet: str, value: str, chosen: bool) -> Question:
        """Return the question with one value of a facet added or removed: "experiment", "outcome" or "m.KEY"."""
        if facet == "experiment":
            return replace(self.first_page, experiments=_changed(self.experiments, value, chosen))
        if facet == "outcome":
            return replace(self.first_page, states=_changed(self.states, value, chosen))
        values, metadata_key = dict(self.metadata), facet.removeprefix(_META)
        values[metadata_key] = _changed(values.get(metadata_key, ()), value, chosen)
        return replace(self.first_page, metadata=tuple((key, some) for key, some in values.items() if some))

    def selected(self, facet: str) -> tuple[str, ...]:
        """Return the values of a facet that are selected."""
        if facet == "experiment":
            return self.experiments
        return self.states if facet == "outcome" else dict(self.metadata).get(facet.removeprefix(_META), ())

    def sorted_by(self, sort: str) -> Question:
        """Return the question in another order; the same order again is turned round."""
        descending = not self.descending if sort == self.sort else sort != "ordinal"
        return replace(self.first_page, sort=sort, descending=descending)

    def pairs(self) -> list[tuple[str, str]]:
        """Return the query string as pairs; defaults are left out."""
        made = [("e", name) for name in self.experiments]
        made += [("outcome", state) for state in self.states]
        made += [(f"{_META}{key}", value) for key, values in self.metadata for value in values]
        made += [(name, str(span)) for name, span in self.spans]
        sort = f"{'-' if self.descending else ''}{self.sort}"
        others = {
            "q": self.text,
            "sort": "" if sort == "ordinal" else sort,
            "after": self.after,
            "before": self.before,
            "from": self.scan_from,
        }
        return made + [(name, str(value)) for name, value in others.items() if value]


def read_question(pairs: Iterable[tuple[str, str]]) -> tuple[Question, list[str]]:
    """Read a query string. What cannot be used is left out, with a sentence that says so."""
    question = Question()
    complaints: list[str] = []
    for name, value in pairs:
        try:
            question = _read(question, name, value)
        except ValueError as error:
            complaints.append(str(error))
    return question, complaints


SHOWS = {
    "": "all samples",
    "differ": "verdicts differ",
    "worse": "worse than the first column",
    "better": "better than the first column",
    "failed": "some trial failed",
    "errors": "some trial ended in an error",
    "outputs": "outputs differ",
}
"""The rows of the matrix that can be chosen; of these, only the last one needs all outputs to be read."""
LENGTHS = (400, 1_500, 6_000)
"""How many characters of each output the matrix shows."""


@dataclass(frozen=True, slots=True)
class MatrixQuestion:
    """One question to the matrix of samples and experiments.

    Attributes:
        columns: Names of experiments ("support@3:careful"), the one that others are compared with first.
        show: One of `SHOWS`.
        repeat: The repeat whose output is shown.
        length: One of `LENGTHS`.
        filters: Its metadata, its text and the sample where the page begins (`scan_from`).
    """

    columns: tuple[str, ...]
    show: str = ""
    repeat: int = 0
    length: int = LENGTHS[0]
    filters: Question = Question()

    @property
    def reads_texts(self) -> bool:
        """True if texts must be read to find the rows, which takes long."""
        return bool(self.filters.text) or self.show == "outputs"

    def pairs(self) -> list[tuple[str, str]]:
        """Return the query string as pairs; defaults are left out."""
        length = "" if self.length == LENGTHS[0] else str(self.length)
        given = {"show": self.show, "repeat": str(self.repeat or ""), "length": length}
        made = [("c", name) for name in self.columns] + [(name, value) for name, value in given.items() if value]
        return made + self.filters.pairs()


def read_matrix_question(pairs: Sequence[tuple[str, str]]) -> tuple[MatrixQuestion, list[str]]:
    """Read a query string. What cannot be used is left out, with a sentence that says so."""
    filters, complaints = read_question([pair for pair in pairs if pair[0] in ("q", "from") or pair[0][:2] == _META])
    given = dict(pairs)
    show, repeat, length = (given.get(name, "") for name in ("show", "repeat", "length"))
    if show not in SHOWS:
        complaints.append(f"show must be one of {', '.join(filter(None, SHOWS))} (got {show!r})")
    return MatrixQuestion(
        tuple(dict.fromkeys(value for name, value in pairs if name in ("a", "b", "c") and value)),
        show if show in SHOWS else "",
        int(repeat) if repeat.isdecimal() and len(repeat) < 9 else 0,
        int(length) if length in map(str, LENGTHS) else LENGTHS[0],
        filters,
    ), complaints


def _read(question: Question, name: str, value: str) -> Question:
    if name.startswith(_META) and len(name) > len(_META):
        return question.with_value(name, value, True)
    match name:
        case "e":
            return replace(question, experiments=_changed(question.experiments, value, True)) if value else question
        case "outcome":
            if value and value not in STATES:
                raise ValueError(f"outcome must be one of {', '.join(STATES)} (got {value!r})")
            return replace(question, states=_changed(question.states, value, True)) if value else question
        case "sort":
            sort = value.removeprefix("-")
            if sort not in SORTS and not sort.startswith("metric:"):
                raise ValueError(f"sort must be one of {', '.join(SORTS)} or metric:NAME (got {value!r})")
            return replace(question, sort=sort, descending=value.startswith("-"))
        case "q":
            return replace(question, text=value.strip()[:500])
        case "after" | "before":
            cursor = _cursor(name, value)
            return replace(question, after=cursor) if name == "after" else replace(question, before=cursor)
        case "from":
            if not value.isdecimal() or len(value) > 12:
                raise ValueError(f"from must be a whole number (got {value!r})")
            return replace(question, scan_from=int(value))
    if name in RANGES:
        return _with_span(question, name, value)
    for end, suffix in (("low", ".min"), ("high", ".max")):  # What a form without scripts sends.
        if name.endswith(suffix) and name.removesuffix(suffix) in RANGES and value:
            base = name.removesuffix(suffix)
            span = dict(question.spans).get(base, Span())
            number = _float(name, value)
            changed = Span(number, span.high) if end == "low" else Span(span.low, number)
            return _replace_span(question, base, changed)
    return question


def _with_span(question: Question, name: str, value: str) -> Question:
    found = _SPAN.fullmatch(value)
    if found is None:
        raise ValueError(f"{name} must be a range such as 0.5..1 (got {value!r})")
    low, high = (_float(name, found[end]) if found[end] else None for end in ("low", "high"))
    return _replace_span(question, name, Span(low, high))


def _replace_span(question: Question, name: str, span: Span) -> Question:
    kept = {**dict(question.spans), name: span}
    return replace(question, spans=tuple((key, one) for key, one in kept.items() if one != Span()))


def _float(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a number (got {text!r})")
    return number


def _cursor(name: str, value: str) -> RowCursor:
    found = _PLACE.fullmatch(value)
    if found is None:
        raise ValueError(f"{name} must be a row of the table (got {value!r})")
    return RowCursor(_float(name, found["key"]) if found["key"] else None, int(found["ordinal"]))


def _number(value: float | None) -> str:
    return "" if value is None else repr(int(value) if value.is_integer() and abs(value) < 1e15 else value)


def _changed(values: Sequence[str], value: str, chosen: bool) -> tuple[str, ...]:
    kept = tuple(one for one in values if one != value)
    return (*kept, value) if chosen else kept


def segment(text: str) -> str:
    """Encode a text as one part of a path.

    Twice: servers decode a path once before they split it, and ids may contain slashes. Browsers resolve `.` and `..`
    in every spelling but this one. Lone surrogates, which text of models may contain, are kept.
    """
    if text in (".", ".."):
        return text.replace(".", "%252E")
    return quote(quote(text, safe="@", errors="surrogatepass"), safe="@")


def from_segment(text: str) -> str:
    """Undo `segment`, after the server has decoded the path once."""
    return unquote(text, errors="surrogatepass")


class Links:
    """Addresses of pages, seen from the page at this path below the prefix."""

    def __init__(self, path: str, static: str = "") -> None:
        self.up = "../" * path.count("/") or "./"
        self._static = static

    def static(self, name: str) -> str:
        """Return the address of a style sheet or script; the hash of all of them is part of it."""
        return f"{self.up}static/{self._static}/{name}"

    def runs(self, **query: str) -> str:
        """Return the list of runs."""
        return self.up + _query(query.items())

    def history(self, suite: str, query: Iterable[tuple[str, str]] = ()) -> str:
        """Return the history of a suite."""
        return f"{self.up}history{_query([('suite', suite), *query])}"

    def run(self, run: RunRecord) -> str:
        """Return the report of a run."""
        return f"{self.up}{segment(run.name)}"

    def trials(self, run: RunRecord, query: Iterable[tuple[str, str]] = ()) -> str:
        """Return the table of trials."""
        return f"{self.up}{segment(run.name)}/trials{_query(query)}"

    def trial(
        self, run: RunRecord, experiment: str, sample: str, repeat: int, query: Iterable[tuple[str, str]] = ()
    ) -> str | None:
        """Return the page of one trial."""
        number = f"/{repeat}" if repeat else ""
        return f"{self.up}{segment(run.name)}/t/{segment(experiment)}/{segment(sample)}{number}{_query(query)}"

    def blob(self, run: RunRecord, sha256: str, ordinal: int) -> str | None:
        """Return an attachment of a trial."""
        return f"{self.up}{segment(run.name)}/blob/{sha256}?o={ordinal}"

    def live(self, run: RunRecord) -> str | None:
        """Return the stream of a run's progress."""
        return f"{self.up}{segment(run.name)}/live"

    def reviews(self, run: RunRecord) -> str:
        """Return the reviews of a run."""
        return f"{self.up}{segment(run.name)}/review"

    def review(self, run: RunRecord, name: str, suffix: str = "") -> str:
        """Return the state of one review; with a suffix, its labels as a file."""
        return f"{self.up}{segment(run.name)}/review/{segment(name)}{suffix}"

    def picked(self, run: RunRecord) -> str:
        """Return where labels of trials that somebody picked are sent."""
        return f"{self.up}{segment(run.name)}/picked"

    def comment(self, run: RunRecord, query: Iterable[tuple[str, str]] = ()) -> str:
        """Return where comments are sent; the query is that of the page of a trial, to which the answer leads back."""
        return f"{self.up}{segment(run.name)}/comment{_query(query)}"

    def queue(self, code: str, query: Iterable[tuple[str, str]] = ()) -> str:
        """Return the next trial of a review."""
        return f"{self.up}review/{code}{_query(query)}"

    def review_blob(self, code: str, sha256: str, member: str) -> str:
        """Return an attachment of a drawn trial."""
        return f"{self.up}review/{code}/blob/{sha256}{_query([('id', member)])}"

    def calibration(self, run: RunRecord, query: Iterable[tuple[str, str]] = ()) -> str:
        """Return the comparison of a judge with people."""
        return f"{self.up}{segment(run.name)}/calibration{_query(query)}"

    def compare(self, baseline: str, candidate: str, query: Iterable[tuple[str, str]] = ()) -> str | None:
        """Return a comparison."""
        return f"{self.up}compare{_query([('a', baseline), ('b', candidate), *query])}"

    def matrix(self, query: Iterable[tuple[str, str]]) -> str:
        """Return experiments side by side; each "c" of the query names one, or a run with all of its experiments."""
        return f"{self.up}matrix{_query(query)}"

    def search(self, name: str, query: Iterable[tuple[str, str]] = ()) -> str:
        """Return a search for a better text of a parameter."""
        return f"{self.up}search{_query([('name', name), *query])}"

    def pair(self, baseline: str, candidate: str, sample: str) -> str | None:
        """Return one sample of a comparison, side by side."""
        return f"{self.up}compare/sample{_query([('a', baseline), ('b', candidate), ('id', sample)])}"


def _query(pairs: Iterable[tuple[str, str]]) -> str:
    text = urlencode([(name, value.encode("utf-8", "replace")) for name, value in pairs])
    return f"?{text}" if text else ""
