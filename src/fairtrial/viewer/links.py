"""The only place that makes addresses. All are relative to the page, so that any base path works."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, unquote, urlencode

from fairtrial.store.protocol import RunRecord


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

    def history(self, suite: str) -> str:
        """Return the history of a suite."""
        return f"{self.up}history{_query([('suite', suite)])}"

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

    def pair(self, baseline: str, candidate: str, sample: str) -> str | None:
        """Return one sample of a comparison, side by side."""
        return f"{self.up}compare/sample{_query([('a', baseline), ('b', candidate), ('id', sample)])}"


def _query(pairs: Iterable[tuple[str, str]]) -> str:
    text = urlencode([(name, value.encode("utf-8", "replace")) for name, value in pairs])
    return f"?{text}" if text else ""
