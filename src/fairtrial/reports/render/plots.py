"""Draw plots as SVG: intervals, wins and losses, distributions.

Every plot has a title and a description for those who do not see it, every bar its number beside it, and colours that
suit light and dark; meaning is never in the colour alone. Names are escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fairtrial.base.frozen import EMPTY
from fairtrial.reports.render.document import Bar
from fairtrial.reports.render.safe_text import plain

STYLE = """
.ft-plot{--ink:#1f2328;--muted:#59636e;--rule:#d1d9e0;--blue:#0969da;--orange:#b35900;--pale:#ddf4ff;
font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;display:block;width:100%;max-width:760px;height:auto}
.ft-plot text{fill:var(--ink)}.ft-plot .muted{fill:var(--muted)}.ft-plot .head{font-weight:600}
.ft-plot .rule{stroke:var(--rule);stroke-width:1}.ft-plot .zero{stroke:var(--muted);stroke-width:1}
.ft-plot .span{stroke:var(--blue);stroke-width:2}.ft-plot .dot,.ft-plot .win{fill:var(--blue)}
.ft-plot .loss{fill:var(--orange)}.ft-plot .bin{fill:var(--blue)}
.ft-plot .mean{stroke:var(--orange);stroke-width:2;stroke-dasharray:4 3}
@media (prefers-color-scheme:dark){.ft-plot{--ink:#e6edf3;--muted:#9198a1;--rule:#3d444d;--blue:#4493f8;
--orange:#f0883e;--pale:#121d2f}}
"""
"""The style of all plots. A page has it once; a plot that stands alone carries its own."""

_WIDTH = 760
_LEFT, _RIGHT = 200, 560  # Left and right edges of the drawing area.
_ROW = 24
_MOST_ROWS = 60
_MOST_PANELS = 12


@dataclass(frozen=True, slots=True)
class IntervalRow:
    """A name, its interval (None if undefined) and its text. Without both, a heading."""

    name: str
    bar: Bar | None
    words: str


@dataclass(frozen=True, slots=True)
class WinsRow:
    """Wins, losses and ties in one slice."""

    name: str
    wins: int
    losses: int
    ties: int
    words: str


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram: the number of scores in each of `len(counts)` equal bins from `start` to `end`."""

    name: str
    counts: tuple[int, ...]
    mean: float | None
    start: float = 0.0
    end: float = 1.0


@dataclass(frozen=True, slots=True)
class TimePoint:
    """A figure at a place in time: neighbours of the same line are joined; without a bar it has only its marks.

    `changes` are what changed since the point before, `states` what is to be said of this one: texts by name, each name
    a row below the plot.
    """

    place: int
    name: str
    bar: Bar | None
    words: str
    line: str = ""
    changes: Mapping[str, str] = EMPTY
    states: Mapping[str, str] = EMPTY


@dataclass(frozen=True, slots=True)
class TimeBand:
    """A period of time behind the points, with both ends."""

    first: int
    last: int
    name: str
    bad: bool = False


def intervals(rows: Sequence[IntervalRow], title: str, *, percent: bool = True, alone: bool = False) -> str:
    """Draw each estimate as a dot on its interval, on a common scale."""
    shown = rows[:_MOST_ROWS]
    bars = [row.bar for row in shown if row.bar is not None]
    start, end = min((bar.start for bar in bars), default=0.0), max((bar.end for bar in bars), default=1.0)
    top = 8
    height = top + _ROW * len(shown) + 30
    scale = _Scale(start, end)
    parts = list(scale.grid(top, top + _ROW * len(shown), percent=percent))
    if bars and bars[0].mark is not None:
        x = scale(bars[0].mark)
        parts.append(f'<line class="zero" x1="{x}" x2="{x}" y1="{top}" y2="{top + _ROW * len(shown)}"/>')
    for at, row in enumerate(shown):
        y = top + _ROW * at + _ROW / 2
        parts.append(_name(row.name, y, heading=row.bar is None and not row.words))
        if row.bar is not None:
            low, mean, high = scale(row.bar.low), scale(row.bar.mean), scale(row.bar.high)
            parts.append(f'<line class="span" x1="{low}" x2="{high}" y1="{y}" y2="{y}"/>')
            parts.extend(f'<line class="span" x1="{x}" x2="{x}" y1="{y - 5}" y2="{y + 5}"/>' for x in (low, high))
            parts.append(f'<circle class="dot" cx="{mean}" cy="{y}" r="4.5"/>')
        parts.append(_text(_RIGHT + 14, y + 4, row.words))
    description = "; ".join(f"{row.name}: {row.words}" for row in shown if row.words)
    return _svg(title, description, height, parts, left_out=len(rows) - len(shown), alone=alone)


def wins_and_losses(
    rows: Sequence[WinsRow], title: str, *, words: tuple[str, str] = ("worse", "better"), alone: bool = False
) -> str:
    """Draw losses to the left and wins to the right, as shares of the samples of each slice."""
    left, right = words
    shown = rows[:_MOST_ROWS]
    share = max((max(row.wins, row.losses) / max(1, row.wins + row.losses + row.ties) for row in shown), default=0)
    reach = share or 1.0
    middle, half = (_LEFT + _RIGHT) / 2, (_RIGHT - _LEFT) / 2 - 34  # Space for the counts at both ends.
    top = 26
    height = top + _ROW * len(shown) + 24
    parts = [
        _text(middle - 8, 16, left, css_class="muted", anchor="end"),
        _text(middle + 8, 16, right, css_class="muted"),
        f'<line class="zero" x1="{middle}" x2="{middle}" y1="{top - 4}" y2="{top + _ROW * len(shown)}"/>',
    ]
    for at, row in enumerate(shown):
        y = top + _ROW * at + _ROW / 2
        total = max(1, row.wins + row.losses + row.ties)
        won, lost = (round(count / total / reach * half, 1) for count in (row.wins, row.losses))
        parts.append(_name(row.name, y))
        parts.append(f'<rect class="loss" x="{round(middle - lost, 1)}" y="{y - 8}" width="{lost}" height="16"/>')
        parts.append(f'<rect class="win" x="{middle}" y="{y - 8}" width="{won}" height="16"/>')
        parts.append(_text(middle - lost - 5, y + 4, f"{row.losses:,}", anchor="end"))
        parts.append(_text(middle + won + 5, y + 4, f"{row.wins:,}"))
        parts.append(_text(_RIGHT + 14, y + 4, row.words))
    foot = "bars are shares of each row's samples; the numbers are samples"
    parts.append(_text(middle, height - 6, foot, css_class="muted", anchor="middle"))
    description = "; ".join(f"{row.name}: {row.wins} {right}, {row.losses} {left}, {row.ties} tied" for row in shown)
    return _svg(title, description, height, parts, left_out=len(rows) - len(shown), alone=alone)


def distributions(panels: Sequence[Distribution], title: str, *, alone: bool = False) -> str:
    """Draw histograms with their means, one below the other on a common scale."""
    shown = panels[:_MOST_PANELS]
    tall, gap = 70, 56
    height = len(shown) * (tall + gap) + 4
    parts: list[str] = []
    for at, panel in enumerate(shown):
        top = at * (tall + gap) + 34
        scale = _Scale(panel.start, panel.end, left=40, right=_WIDTH - 20)
        step = (scale.right - scale.left) / len(panel.counts)
        most = max(panel.counts, default=0) or 1
        mean = "" if panel.mean is None else f", mean {panel.mean:.3f}"
        parts.append(_text(40, top - 20, panel.name, css_class="head", limit=60))
        parts.append(
            _text(scale.right, top - 20, f"{sum(panel.counts):,} scores{mean}", css_class="muted", anchor="end")
        )
        for position, count in enumerate(panel.counts):
            if count:
                size = max(1.0, round(count / most * tall, 1))
                x = scale.left + position * step
                parts.append(
                    f'<rect class="bin" x="{x + 1:.1f}" y="{top + tall - size:.1f}" width="{step - 2:.1f}" '
                    f'height="{size}"/>'
                )
                parts.append(
                    _text(x + step / 2, top + tall - size - 3, f"{count:,}", css_class="muted", anchor="middle")
                )
        parts.append(f'<line class="zero" x1="{scale.left}" x2="{scale.right}" y1="{top + tall}" y2="{top + tall}"/>')
        for tick in _ticks(panel.start, panel.end):
            parts.append(_text(scale(tick), top + tall + 14, f"{tick:g}", css_class="muted", anchor="middle"))
        if panel.mean is not None:
            x = scale(panel.mean)
            parts.append(f'<line class="mean" x1="{x}" x2="{x}" y1="{top - 6}" y2="{top + tall}"/>')
    description = "; ".join(f"{panel.name}: {sum(panel.counts)} scores, mean {panel.mean}" for panel in shown)
    return _svg(title, description, height, parts, left_out=len(panels) - len(shown), alone=alone)


_EARLY, _LATE = 92, 750  # Left and right edges of time.
_TALL = 170
_APART = 78  # Between the names of points.
_WIDEST = 60  # Place of a point.


def percent(share: float) -> str:
    """Return a tick of a scale of rates."""
    return f"{100 * share:g}%"


def timeline(
    points: Sequence[TimePoint], title: str, *, label: Callable[[float], str] = percent, bands: Sequence[TimeBand] = ()
) -> str:
    """Draw figures with their intervals from left to right, and below them what changed in between."""
    start = min(point.place for point in points)
    step = min(_WIDEST, (_LATE - _EARLY) / (max(point.place for point in points) - start + 1))
    top = 26 if bands else 12
    bottom = top + _TALL
    bar = next((point.bar for point in points if point.bar is not None), Bar(0, 0, 0))
    rows = list(dict.fromkeys([name for one in points for name in one.changes] + [n for p in points for n in p.states]))
    height = bottom + 30 + 18 * len(rows)
    spread = [_EARLY + step * (point.place - start + 0.5) for point in points]
    for at, same in enumerate(spread):
        spread[at] += 7 * spread[:at].count(same)  # Points at one place, such as those of two datasets.
    parts = [part for band in bands for part in _band(band, start, step, top, bottom)]
    for tick in _ticks(bar.start, bar.end):
        y = bottom - _TALL * bar.place(tick)
        parts.append(f'<line class="rule" x1="{_EARLY}" x2="{_LATE}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_EARLY - 8, y + 4, label(tick), css_class="muted", anchor="end"))
    for at, name in enumerate(rows):
        parts += _row_of_marks(name, bottom + 36 + 18 * at, points, spread, step)
    named = -math.inf
    for at, (x, point) in enumerate(zip(spread, points, strict=True)):
        before = x - step / 2
        if point.changes:
            parts.append(f'<line class="zero" x1="{before:.1f}" x2="{before:.1f}" y1="{top}" y2="{height - 6}" '
                         'stroke-dasharray="3 3"/>')  # fmt: skip
        if at and point.bar is not None:
            parts += _joint(points[at - 1], point, spread[at - 1], x, bottom)
        parts.append(f"<g><title>{html.escape(plain(f'{point.name}: {point.words}', limit=300))}</title>")
        if point.bar is not None:
            low, mean, high = (
                bottom - _TALL * point.bar.place(v) for v in (point.bar.low, point.bar.mean, point.bar.high)
            )
            parts.append(f'<line class="span" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
            parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{mean:.1f}" r="{min(4.5, max(2, step / 2)):.1f}"/>')
        parts.append("</g>")
        if x - named >= _APART:
            parts.append(_text(x, bottom + 18, point.name, css_class="muted", anchor="middle", limit=12))
            named = x
    description = "; ".join(f"{point.name}: {point.words}" for point in points)
    return _svg(title, description, height, parts, left_out=0, alone=False)


def _row_of_marks(
    name: str, y: float, points: Sequence[TimePoint], spread: Sequence[float], step: float
) -> Iterator[str]:
    """Mark changes between points, and states at them, with their texts where there is room."""
    yield _text(_EARLY - 8, y + 4, name, anchor="end")
    marks = [
        (x - step / 2, True, one.changes[name]) for x, one in zip(spread, points, strict=True) if name in one.changes
    ]
    marks += [(x, False, one.states[name]) for x, one in zip(spread, points, strict=True) if name in one.states]
    for at, (x, changed, words) in enumerate(marks):
        title = f"<title>{html.escape(plain(f'{name}: {words}', limit=300))}</title>"
        if changed:
            yield f'<path class="loss" d="M{x:.1f} {y - 5}l5 5l-5 5l-5 -5z">{title}</path>'
        else:
            yield f'<circle class="zero" fill="none" cx="{x:.1f}" cy="{y}" r="4">{title}</circle>'
        room = int(((marks[at + 1][0] if at + 1 < len(marks) else _WIDTH) - x - 16) / 6.5)
        if room >= min(8, len(words)):
            yield _text(x + 9, y + 4, words, css_class="muted", limit=room)


def _band(band: TimeBand, start: int, step: float, top: float, bottom: float) -> Iterator[str]:
    left, width = _EARLY + step * (band.first - start), step * (band.last - band.first + 1)
    kind = "loss" if band.bad else "bin"
    yield (
        f'<rect class="{kind}" fill-opacity=".13" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{bottom - top}">'
        f"<title>{html.escape(plain(band.name))}</title></rect>"
    )
    yield _text(left, top - 8, band.name, css_class="muted")


def _joint(before: TimePoint, point: TimePoint, x1: float, x2: float, bottom: float) -> Iterator[str]:
    """Join two points, unless something is missing between them or they are not of the same line."""
    neighbours = before.line == point.line and point.place - before.place == 1
    if neighbours and before.bar is not None and point.bar is not None:
        y1, y2 = (bottom - _TALL * bar.place(bar.mean) for bar in (before.bar, point.bar))
        yield f'<line class="zero" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


class _Scale:
    """Maps values to positions in the drawing."""

    def __init__(self, start: float, end: float, left: float = _LEFT, right: float = _RIGHT) -> None:
        self.start, self.end = start, end
        self.left, self.right = left, right

    def __call__(self, value: float) -> float:
        share = (value - self.start) / (self.end - self.start)
        return round(self.left + min(1.0, max(0.0, share)) * (self.right - self.left), 1)

    def grid(self, top: float, bottom: float, *, percent: bool) -> Iterable[str]:
        for tick in _ticks(self.start, self.end):
            x = self(tick)
            yield f'<line class="rule" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
            label = f"{100 * tick:g}%" if percent else f"{tick:g}"
            yield _text(x, bottom + 16, label, css_class="muted", anchor="middle")


def _ticks(start: float, end: float) -> list[float]:
    """Return four to ten round numbers in a range."""
    rough = (end - start) / 7
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(start / step - 1e-9)
    last = math.floor(end / step + 1e-9)
    return [round(number * step, 12) + 0.0 for number in range(first, last + 1)]


def _text(x: float, y: float, text: str, *, css_class: str = "", anchor: str = "start", limit: int = 90) -> str:
    shown = html.escape(plain(text, limit=limit))
    kinds = f' class="{css_class}"' if css_class else ""
    side = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text{kinds} x="{x:.1f}" y="{y:.1f}"{side}>{shown}</text>'


def _name(name: str, y: float, *, heading: bool = False) -> str:
    whole = html.escape(plain(name, limit=500))
    short = html.escape(plain(name, limit=30))
    if heading:
        return f'<text class="head" x="4" y="{y + 4:.1f}">{short}<title>{whole}</title></text>'
    return f'<text x="{_LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{short}<title>{whole}</title></text>'


def _svg(title: str, description: str, height: float, parts: Iterable[str], *, left_out: int, alone: bool) -> str:
    if left_out:
        description = f"{description}; {left_out:,} more are not drawn"
        parts = [*parts, _text(4, height + 12, f"and {left_out:,} more, not drawn", css_class="muted")]
        height += 20
    style = f"<style>{STYLE}</style>" if alone else ""
    space = ' xmlns="http://www.w3.org/2000/svg"' if alone else ""
    return (
        f'<svg{space} class="ft-plot" viewBox="0 0 {_WIDTH} {height:g}" role="img">'
        f"<title>{html.escape(plain(title))}</title><desc>{html.escape(plain(description, limit=4000))}</desc>"
        f"{style}{''.join(parts)}</svg>"
    )
