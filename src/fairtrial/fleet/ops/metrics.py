"""Metrics for Prometheus: those of loops, and those that `fairtrial.base.metrics` keeps for the whole process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from fairtrial._version import __version__
from fairtrial.base import metrics
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import MissingExtraError
from fairtrial.mailbox.protocol import MailboxDepth

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_STATES = ("waiting", "delayed", "in_flight", "dead")


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample of a metric: its value, its labels, and an optional suffix of its name."""

    value: float
    labels: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family: samples of one type under one name.

    Attributes:
        name: Letters, digits and underscores; anything else in it becomes an underscore.
        kind: "counter" only grows, "gauge" goes up and down.
        help: The description.
        readings: The samples.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    readings: tuple[Reading, ...]


def metric_name(text: str) -> str:
    """Return a valid Prometheus metric name: loops may name their counters freely."""
    name = _NOT_IN_NAMES.sub("_", text)
    return f"_{name}" if not name or name[0].isdigit() else name


def check_installed() -> None:
    """Raise `MissingExtraError` if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401 - asked for here, so that its absence is explained
    except ImportError:
        raise MissingExtraError("a health port", "metrics") from None


def exposition(families: Iterable[Family], *, process: bool = False) -> str:
    """Return the metrics in the Prometheus text format; with `process`, including CPU time and memory."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    class Collected:
        def collect(self) -> Iterator[Metric]:
            return map(_metric, families)

    registry = CollectorRegistry()
    registry.register(Collected())
    if process:
        ProcessCollector(registry=registry)
    return generate_latest(registry).decode()


def _metric(family: Family) -> Metric:
    from prometheus_client.metrics_core import Metric

    name = metric_name(family.name)
    # The writer adds the ending of counters itself.
    metric = Metric(name.removesuffix("_total") if family.kind == "counter" else name, family.help, family.kind)
    for reading in family.readings:
        # Half a surrogate pair cannot be sent as UTF-8.
        labels = {
            metric_name(key): str(text).encode("utf-8", "replace").decode() for key, text in reading.labels.items()
        }
        metric.add_sample(name + reading.suffix, labels, reading.value)
    return metric


def build_info() -> Family:
    """Return the version as a metric."""
    return Family("fairtrial_build_info", "gauge", "The version that runs.", (Reading(1, {"version": __version__}),))


def process_families() -> list[Family]:
    """Return the metrics of this process: durations, waiting, and the runs of which it is the client."""
    found = [_histogram(histogram) for histogram in metrics.HISTOGRAMS]
    for measure in metrics.MEASURES:
        values = measure.read().items()
        readings = tuple(Reading(value, dict(zip(measure.labels, labels, strict=True))) for labels, value in values)
        found.append(Family(measure.name, measure.kind, measure.help, readings))
    runs = metrics.running()
    trials: list[Reading] = []
    costs: list[Reading] = []
    depths: dict[str, MailboxDepth] = {}
    for run in runs:
        named = {"run": run.run_id, "suite": run.suite}
        for state in ("planned", "stored", "outstanding"):
            trials.append(Reading(getattr(run, state), {**named, "state": state}))
        costs.append(Reading(run.cost_usd, named))
        depths |= run.depths
    return [
        *found,
        Family("fairtrial_run_trials", "gauge", "Trials of a run by state.", tuple(trials)),
        Family("fairtrial_run_cost_usd", "gauge", "What a run has cost so far, in US dollars.", tuple(costs)),
        *depth_families(depths),
    ]


def depth_families(depths: Mapping[str, MailboxDepth]) -> list[Family]:
    """Return the depth of mailboxes as metrics."""
    readings = tuple(
        Reading(getattr(depth, state), {"mailbox": name, "state": state})
        for name, depth in depths.items()
        for state in _STATES
    )
    return [Family("fairtrial_mailbox_messages", "gauge", "Messages by where they are.", readings)] if readings else []


def _histogram(histogram: metrics.Histogram) -> Family:
    readings: list[Reading] = []
    bounds = [*(f"{bound:g}" for bound in histogram.buckets), "+Inf"]
    for labels, (counts, total) in histogram.read().items():
        named = dict(zip(histogram.labels, labels, strict=True))
        for bound, count in zip(bounds, accumulate(counts), strict=True):
            readings.append(Reading(count, {**named, "le": bound}, "_bucket"))
        readings += [Reading(sum(counts), named, "_count"), Reading(total, named, "_sum")]
    return Family(histogram.name, "histogram", histogram.help, tuple(readings))
