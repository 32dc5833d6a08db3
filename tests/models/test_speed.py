"""Figures, measured in one run. The commands in `benchmarks/` measure the same with more calls."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from fairtrial.integrations.model_server import spawn_model_server
from tests.figures import Figure

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


@pytest.mark.measured
def test_the_adapter_keeps_nine_tenths_of_the_bare_sdks_throughput(figure: Figure) -> None:
    benchmark = load("adapter")
    with spawn_model_server("Paris.", latency=0.05) as server:
        rates, costs = asyncio.run(benchmark.measure(server.base_url, 1500, 100, 3))
    print({name: [round(rate) for rate in found] for name, found in rates.items()})
    print({name: [round(cost, 2) for cost in found] for name, found in costs.items()})
    print({other: round(benchmark.ratio(rates, other), 2) for other in ("sdk", "sdk_raw", "aiohttp")})
    figure("adapter: calls a second, x the bare SDK", benchmark.ratio(rates, "sdk"), at_least=0.9)


@pytest.mark.measured
def test_the_limiter_finds_a_limit_it_was_not_told(figure: Figure) -> None:
    benchmark = load("limiter")
    fixed, adaptive = benchmark.compare(calls=1500, cap=40, latency=0.2)
    print(fixed, adaptive)
    assert fixed.failed == adaptive.failed == 0
    figure("limiter: calls a second, x the right limit", adaptive.rate / fixed.rate, at_least=0.85)
    assert adaptive.refused_late < 0.05
