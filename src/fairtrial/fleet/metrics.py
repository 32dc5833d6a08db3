"""Numbers for Prometheus, in its text format."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fairtrial.frozen import EMPTY

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_STARTED_AT = time.time()


@dataclass(frozen=True, slots=True)
class Reading:
    """One number, with the labels that tell it from its siblings."""

    value: float
    labels: Mapping[str, str] = field(default_factory=lambda: EMPTY)


@dataclass(frozen=True, slots=True)
class Family:
    """Numbers of one kind under one name.

    Attributes:
        name: Letters, digits and underscores; anything else in it becomes an underscore.
        kind: "counter" only grows, "gauge" goes up and down.
        help: What it is, for people.
        readings: The numbers.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    readings: tuple[Reading, ...]


def metric_name(text: str) -> str:
    """A name Prometheus accepts: loops name their own counters, and may name them anything."""
    name = _NOT_IN_NAMES.sub("_", text)
    return f"_{name}" if not name or name[0].isdigit() else name


def exposition(families: Iterable[Family]) -> str:
    """The text Prometheus reads."""
    lines: list[str] = []
    for family in families:
        name = metric_name(family.name)
        explained = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines.append(f"# HELP {name} {explained}")
        lines.append(f"# TYPE {name} {family.kind}")
        lines.extend(f"{name}{_labels(reading.labels)} {_number(reading.value)}" for reading in family.readings)
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{metric_name(name)}="{_escaped(text)}"' for name, text in labels.items()) + "}"


def _escaped(text: str) -> str:
    # Half a surrogate pair cannot be sent as UTF-8.
    plain = str(text).encode("utf-8", "replace").decode("utf-8")
    return plain.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def process_families() -> list[Family]:
    """Processor time and memory of this process, under the names every dashboard knows."""
    times = os.times()
    found = [
        _alone("process_cpu_seconds_total", "counter", "Processor time used, in seconds.", times.user + times.system),
        _alone("process_start_time_seconds", "gauge", "When the process started, since the epoch.", _STARTED_AT),
    ]
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):  # Not on Linux.
        return found
    size = pages * os.sysconf("SC_PAGE_SIZE")
    return [*found, _alone("process_resident_memory_bytes", "gauge", "Memory in use, in bytes.", size)]


def _alone(name: str, kind: Literal["counter", "gauge"], explained: str, value: float) -> Family:
    return Family(name, kind, explained, (Reading(value),))
