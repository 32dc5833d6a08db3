"""The document of a search: what the test split showed, and the candidates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fairtrial.base.formatting import cost, count, listed, range_text, rate, signed, size_text
from fairtrial.reports.compare.document import TONES
from fairtrial.reports.render.document import (
    Block,
    Cases,
    Column,
    Conclusion,
    Document,
    Passage,
    Remarks,
    Table,
    TrialDetails,
)

if TYPE_CHECKING:
    from fairtrial.reports.search.search import Search, SearchCandidate, SplitScore

_NAMED = 5
_IN_TERMINAL = 12
"""Rows of a table of candidates where no texts are shown."""


def search_document(search: Search, cases: int) -> Document:
    """Return the document of a search; pages show the texts and the whole comparison on the test split."""
    about = (
        f"{search.parameter} of {search.suite}, by {search.optimizer}: {count(len(search.candidates), 'candidate')}, "
        f"{count(search.trials, 'trial')}, {cost(search.cost_usd, search.unpriced)}"
    )
    shown = _listed(search, cases)
    blocks: list[Block] = [conclusion(search), _candidates(search, shown)]
    if search.winner is not None:
        blocks.append(Passage(f"The text of {search.winner.name}", search.winner.text))
    left_out = len(search.candidates) - len(shown)
    more = [f"{count(left_out, 'further candidate')}: fairtrial view, or --json"] if left_out else []
    blocks.append(Remarks((*more, *remarks(search))))
    if cases:
        blocks.append(_texts(search))
    if search.comparison is not None and cases:
        blocks += search.comparison.document(cases).blocks
    return Document(f"search {search.name}", (about,), tuple(blocks))


def conclusion(search: Search) -> Conclusion:
    """Return what the test split showed, or why it was not looked at."""
    if search.tested is not None:
        word, _, rest = search.tested.sentence.partition(": ")
        return Conclusion("On the test split", f"{word}: {rest}" if rest else word, TONES[search.tested.verdict])
    if search.status == "unfinished":
        return Conclusion("unfinished", "the same command continues the search", "unsure")
    if search.status == "no candidate":
        return Conclusion("nothing better", "no candidate was better on the validation split; no test was spent", "")
    return Conclusion("untested", "the run on the test split is not finished; the same command finishes it", "unsure")


def _listed(search: Search, cases: int) -> tuple[SearchCandidate, ...]:
    """Return the candidates of the table: all where there is room, else the baseline and the best on validation."""
    if cases or len(search.candidates) <= _IN_TERMINAL:
        return search.candidates
    means = {one.id: -1.0 if (score := one.validation) is None else score.mean or 0.0 for one in search.candidates}
    first = sorted(search.candidates[1:], key=lambda one: (one.id != search.best, -means[one.id]))
    kept = {one.id for one in (search.candidates[0], *first[: _IN_TERMINAL - 1])}
    return tuple(one for one in search.candidates if one.id in kept)


def _candidates(search: Search, shown: tuple[SearchCandidate, ...]) -> Table:
    columns = (
        Column("candidate", "left", name=True),
        Column("from", "left", name=True),
        Column("train"),
        Column("n"),
        Column("validation"),
        Column("95% interval"),
        Column("n"),
    )
    rows = tuple(
        (
            one.name + (" (chosen)" if one.id == search.best else ""),
            listed(search[id].name for id in one.parents) if one.parents else "",
            *_score(one.train)[::2],
            *_score(one.validation),
        )
        for one in shown
    )
    return Table("Mean scores; the validation split chose, so its figures are optimistic", columns, rows)


def _texts(search: Search) -> Cases:
    total = len(search.candidates)
    texts = (TrialDetails(one.name, "", "", ((search.parameter, one.text),)) for one in search.candidates)
    return Cases("The texts of all candidates", total, total, texts)


def _score(score: SplitScore | None) -> tuple[str, str, str]:
    if score is None:
        return "", "", ""
    interval = "" if score.low is None or score.high is None else f"{rate(score.low)} to {rate(score.high)}"
    return rate(score.mean), interval, f"{score.samples:,}"


def remarks(search: Search) -> Iterator[str]:
    """Yield what a reader of the result has to know."""
    if search.validation_gain is not None:
        gain = signed(search.validation_gain, percent=True)
        line = f"On the validation split, which chose among the candidates, the gain is {gain} points: not evidence."
        if search.tested is not None and search.optimism is not None:
            test = range_text(search.tested.low, search.tested.high, percent=True)
            size = size_text(search.optimism, percent=True)
            how = f"{size} {'above' if search.optimism > 0 else 'below'} it"
            line += (
                f" On the test split it is {signed(search.tested.difference, percent=True)} points ({test}): the "
                f"validation figure was {'the same' if size == size_text(0.0, percent=True) else how}."
            )
        yield line
    if search.comparison is not None and search.comparison.looks is not None:
        yield from search.comparison.looks.sentences
    if search.ended:
        yield f"The search ended because {search.ended}."
    for one in search.candidates:
        yield from _errors(one)


def _errors(candidate: SearchCandidate) -> Iterator[str]:
    for name, score in (("train", candidate.train), ("validation", candidate.validation)):
        if score is not None and score.errors:
            more = f" and {len(score.errors) - _NAMED:,} more" if len(score.errors) > _NAMED else ""
            which = ", ".join(score.errors[:_NAMED]) + more
            yield f"{candidate.name}, {name}: {count(len(score.errors), 'sample')} left out after errors: {which}."
