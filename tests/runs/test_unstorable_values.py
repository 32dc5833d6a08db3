"""Values that no store could keep, in outputs, tool calls and metadata of metrics: every trial is stored, once."""

from __future__ import annotations

import decimal
import math
import re
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Metric, Sample, Score, ToolInvoked, TrialContext, evaluator
from fairtrial.data.session import PromptExecuted, TokenUsage


class Stubborn:
    """It can be neither shown, compared, copied nor pickled."""

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError("no")

    __repr__ = __eq__ = __deepcopy__ = __reduce__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(3000):
        found = [found]
    return found


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


ODD: dict[str, Callable[[], Any]] = {
    "exception": lambda: ValueError("x"), "match": lambda: re.match("a", "a"), "function": lambda: len,
    "lambda": lambda: lambda: 1, "complex": lambda: 1j, "nan": lambda: math.nan, "infinity": lambda: -math.inf,
    "stubborn": Stubborn, "generator": lambda: iter([]), "cyclic": cyclic, "surrogate": lambda: "\ud800",
    "null character": lambda: "a\0b", "5,000 digits": lambda: 10**5000, "mixed set": lambda: {1, "a", None},
    "signalling nan": lambda: decimal.Decimal("sNaN"), "lock": threading.Lock, "memory": lambda: memoryview(b"x"),
    "3,000 levels": deep, "type": lambda: int,
    "module": lambda: ModuleType("odd"),
}  # fmt: skip
USAGES: dict[str, tuple[int, int, float | None]] = {
    "2^31 tokens": (2**31, 5, None), "2^63 tokens": (2**63, 2**63, None), "10^30 tokens": (10**30, 1, None),
    "cost that is no number": (1, 1, math.nan), "endless cost": (1, 1, math.inf), "negative cost": (1, 1, -5.0),
    "negative tokens": (-1, -1, None),
}  # fmt: skip


def stored(folder: Path, names: list[str], task: Callable[..., Any], judge: Any) -> list[tuple[Any, ...]]:
    """Run a sample for each name; what the store has of every trial."""
    dataset: Dataset[str, Any] = Dataset([Sample(name, name) for name in names], name="odd")
    suite = EvalSuite("odd", dataset, task, judge, config=EvalConfig(max_retries=0, timeout_seconds=30), version="1")
    suite.run_sync(store=str(folder / "runs.db"))
    with closing(sqlite3.connect(folder / "runs.db")) as connection:
        (status,) = connection.execute("SELECT status FROM runs").fetchone()
        assert status in ("finished", "unscored")  # Where no score could be kept.
        return connection.execute("SELECT ordinal, input_tokens, output_tokens, cost_usd FROM results").fetchall()


@pytest.mark.parametrize("place", ["output", "metadata", "tool"])
def test_every_trial_with_an_odd_value_is_stored(tmp_path: Path, place: str) -> None:
    def task(name: str, ctx: TrialContext) -> Any:
        if place == "tool":
            ctx.session.record(ToolInvoked("t", {"a": ODD[name]()}, ODD[name]()))
        return ODD[name]() if place == "output" else name

    @evaluator(name="odd")
    def judge(output: Any, _expected: Any) -> Score:
        metadata = {"x": ODD[output]()} if place == "metadata" else {}
        return Score(1.0, metrics=(Metric("m", 1.0, metadata=metadata),))

    found = stored(tmp_path, list(ODD), task, judge)
    assert sorted(row[0] for row in found) == list(range(len(ODD)))


def test_every_trial_with_an_odd_usage_is_stored(tmp_path: Path) -> None:
    def task(name: str, ctx: TrialContext) -> str:
        given, made, cost = USAGES[name]
        ctx.session.record(PromptExecuted(model="m", usage=TokenUsage(given, made, 0, cost)))
        return "ok"

    @evaluator(name="fine")
    def judge(_output: Any, _expected: Any) -> Score:
        return Score(1.0)

    found = stored(tmp_path, list(USAGES), task, judge)
    assert sorted(row[0] for row in found) == list(range(len(USAGES)))
    assert all(count >= 0 for row in found for count in row[1:3])
    assert all(cost is None or 0 <= cost < math.inf for *_, cost in found)
