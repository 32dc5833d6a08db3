"""The course of a training run: its evaluation runs by step, with intervals."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fairtrial.base.formatting import number
from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.errors import ConfigurationError
from fairtrial.reports.render.plots import STYLE
from fairtrial.reports.render.safe_text import plain
from fairtrial.reports.report import EvalReport
from fairtrial.rl.values import sample_values
from fairtrial.stats.intervals import MeanEstimate, mean_interval
from fairtrial.store.open import open_store
from fairtrial.store.protocol import RunRecord, RunStore

_WIDTH, _HEIGHT = 760, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 740, 24, 276


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation run: the training step, the name of the run, and the mean with its interval."""

    step: int
    run: str
    estimate: MeanEstimate


@first_is(str)
@dataclass(frozen=True, slots=True)
class Curve:
    """Means over training steps; print it as a table, or draw it with `to_svg`."""

    metric: str
    points: tuple[CurvePoint, ...]

    def __str__(self) -> str:
        rows = [("step", "run", self.metric, "interval", "n")]
        for point in self.points:
            found = point.estimate
            span = found.interval
            interval = "" if span is None else f"{number(span.low)} to {number(span.high)}"
            mean = "" if found.mean is None else number(found.mean)
            rows.append((str(point.step), point.run, mean, interval, str(found.n)))
        widths = [max(len(row[at]) for row in rows) for at in range(5)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def to_svg(self) -> str:
        """Draw the means as a line over the steps, each with its interval."""
        known = [point for point in self.points if point.estimate.mean is not None]
        ends = [end for point in known for end in _ends(point.estimate)]
        low, high = min(ends, default=0.0), max(ends, default=1.0)
        low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
        first, last = known[0].step if known else 0, known[-1].step if known else 1

        def x(step: int) -> float:
            return round(_LEFT + (step - first) / max(last - first, 1) * (_RIGHT - _LEFT), 1)

        def y(value: float) -> float:
            return round(_BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP), 1)

        parts = [f'<line class="zero" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>']
        for value in (low, (low + high) / 2, high):
            parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
            parts.append(f'<text class="muted" x="{_LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:.3g}</text>')
        line = " ".join(f"{x(point.step)},{y(point.estimate.mean or 0.0)}" for point in known)
        parts.append(f'<polyline class="span" fill="none" points="{line}"/>')
        for point in known:
            at = x(point.step)
            bottom, top = _ends(point.estimate)
            parts.append(f'<line class="span" x1="{at}" x2="{at}" y1="{y(bottom)}" y2="{y(top)}"/>')
            parts.append(f'<circle class="dot" cx="{at}" cy="{y(point.estimate.mean or 0.0)}" r="4"/>')
        for step in dict.fromkeys((first, last)):
            parts.append(f'<text class="muted" x="{x(step)}" y="{_BOTTOM + 18}" text-anchor="middle">{step}</text>')
        parts.append(
            f'<text class="muted" x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>'
        )
        title = html.escape(plain(f"{self.metric} by training step"))
        description = "; ".join(f"step {point.step}: {point.estimate.mean:.4g}" for point in known)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ft-plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
            f"<title>{title}</title><desc>{html.escape(plain(description, limit=4000))}</desc>"
            f"<style>{STYLE}</style>{''.join(parts)}</svg>"
        )


def curve(
    store: RunStore | Path | str,
    *,
    tags: Mapping[str, str] = EMPTY,
    suite: str | None = None,
    metric: str = "reward",
    experiment: str | None = None,
    level: float = 0.95,
) -> Curve:
    """Return the means of the evaluation runs of a training run by step.

    A run belongs to it if it has these tags, as in `suite.run(tags={"train": "run-7", "step": "120"})`; of several
    runs with one step, the latest counts.

    Args:
        store: The store, or its URL.
        tags: The tags of the runs, besides `step`.
        suite: Only runs of this suite; needed if runs of several suites have these tags.
        metric: "reward", "value", "passed", or the name of a metric.
        experiment: The experiment, if runs have several.
        level: The level of the intervals.
    """
    opened = open_store(str(store)) if isinstance(store, str | Path) else store
    found: dict[int, RunRecord] = {}
    for run in opened.runs(suite=suite):  # Newest first.
        step = run.tags.get("step", "")
        if step.isdecimal() and all(run.tags.get(name) == value for name, value in tags.items()):
            found.setdefault(int(step), run)
    suites = sorted({run.suite for run in found.values()})
    if len(suites) > 1:
        raise ConfigurationError(f"the runs must be of one suite (got {', '.join(suites)}): name it with suite=...")
    if not found:
        shown = ", ".join(f"{name}={value}" for name, value in tags.items()) or "a step"
        raise ConfigurationError(
            f"no run is tagged with {shown} and a step\ntag them: suite.run(tags={{'train': 'run-7', 'step': '120'}})"
        )
    points = tuple(_point(opened, step, found[step], metric, experiment, level) for step in sorted(found))
    return Curve(metric, points)


def _point(store: RunStore, step: int, run: RunRecord, metric: str, experiment: str | None, level: float) -> CurvePoint:
    report: EvalReport = EvalReport(store, run)
    found = sample_values(report if experiment is None else report[experiment], metric)
    values = list(found.values.values())
    estimate = mean_interval(values, clusters=found.labels, bounds=found.bounds, level=level)
    return CurvePoint(step, run.name, estimate)


def _ends(estimate: MeanEstimate) -> tuple[float, float]:
    mean = estimate.mean or 0.0
    return (mean, mean) if estimate.interval is None else (estimate.interval.low, estimate.interval.high)
