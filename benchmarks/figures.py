"""How a benchmark gives its figures: printed with their targets, and in a file if `scripts/figures` names one."""

from __future__ import annotations

import json
import os
from typing import Any

ENGINES = {"redis": "Redis", "postgres": "PostgreSQL", "sqlite": "SQLite"}


def figure(
    name: str,
    value: float,
    unit: str = "",
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    cpu_us: float | None = None,
    bare_cpu_us: float | None = None,
) -> bool:
    """Give a figure; return whether it meets its target.

    A figure that depends on the processor comes with its CPU time per call, and that of the bare loop if it is known.
    """
    line: dict[str, Any] = {"figure": name, "value": float(f"{value:.4g}"), "unit": unit}
    optional = {"at_most": at_most, "at_least": at_least, "cpu_us": cpu_us, "bare_cpu_us": bare_cpu_us}
    line |= {key: float(f"{number:.4g}") for key, number in optional.items() if number is not None}
    if file := os.environ.get("BENCHMARK_FIGURES"):
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
    remarks = [f"target: {target(line)}"] if target(line) else []
    remarks += [f"depends on the processor: {cpu(line)} of CPU per call"] if cpu(line) else []
    print(f"{name}: {measured(line)}" + (f" ({'; '.join(remarks)})" if remarks else ""), flush=True)
    return not missed(line)


def missed(line: dict[str, Any]) -> bool:
    """Return whether a figure misses its target."""
    value = line["value"]
    return bool(value > line.get("at_most", value) or value < line.get("at_least", value))


def measured(line: dict[str, Any]) -> str:
    """Return the value of a figure with its unit."""
    return f"{_number(line['value'])} {line['unit']}".rstrip()


def target(line: dict[str, Any]) -> str:
    """Return what a figure has to be, or nothing."""
    return ", ".join(f"{key.replace('_', ' ')} {_number(line[key])}" for key in ("at_least", "at_most") if key in line)


def cpu(line: dict[str, Any]) -> str:
    """Return the CPU time per call of a figure that depends on the processor, or nothing."""
    if "cpu_us" not in line:
        return ""
    return _time(line["cpu_us"]) + (f", bare {_time(line['bare_cpu_us'])}" if "bare_cpu_us" in line else "")


def _time(us: float) -> str:
    return f"{_number(us)} us" if us < 10_000 else f"{_number(us / 1000)} ms"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
