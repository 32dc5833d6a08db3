"""Samples with the same input are treated as clusters automatically."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalReport, EvalSuite, Experiment, GateRules, Sample, StopWhen, compare, gate, open_store
from fairtrial.trials import EvalConfig, TrialContext

pytestmark = pytest.mark.proves("R113")


def ran(
    inputs: list[Any], *, metadata: Mapping[int, dict[str, Any]] | None = None, store: Any = "memory:", **settings: Any
) -> EvalReport:
    def task(given: Any, ctx: TrialContext) -> bool:
        return (int(ctx.sample.id) * 7 + (ctx.experiment.name == "b")) % 5 != 0

    facts = metadata or {}
    samples: list[Sample[Any, Any]] = [Sample(str(i), given, None, facts.get(i, {})) for i, given in enumerate(inputs)]
    suite = EvalSuite(
        "s",
        Dataset(samples),
        task,
        lambda output, expected: bool(output),
        experiments=[Experiment("a"), Experiment("b")],
        config=EvalConfig(**settings),
    )
    return suite.run_sync(store=store)


def clusters(report: EvalReport) -> int | None:
    return report["a"].estimates[0].clusters


@pytest.mark.parametrize("kept", ["memory:", "file"])
def test_samples_with_equal_inputs_are_clusters_and_one_line_says_so(kept: str, tmp_path: Path) -> None:
    inputs = [{"q": i % 40, "lang": "en"} if i < 60 else {"lang": "en", "q": i % 40} for i in range(80)]
    store = open_store(kept if kept == "memory:" else str(tmp_path / "runs.db"))
    report = ran(inputs, store=store)
    line = "40 samples repeat the input of another; they count as clusters."
    assert clusters(report) == 40
    assert line in str(report)
    comparison = compare(report["a"], report["b"])
    assert comparison["b"]["passed"].clusters == 40
    assert line in str(comparison)
    assert line in gate(report["a"], GateRules(min_pass_rate=0.1)).warnings
    assert line in gate(report["b"], GateRules(margin=0.5), report["a"]).warnings
    store.close()


def test_samples_without_repeated_inputs_stay_independent() -> None:
    report = ran([f"q{i}" for i in range(30)])
    assert clusters(report) is None
    assert "input of another" not in str(report)


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_empty_inputs_are_no_repeated_inputs(empty: Any) -> None:
    assert clusters(ran([empty] * 10 + ["x", "y"])) is None


def test_one_input_for_all_samples_is_no_cluster() -> None:
    report = ran(["Play the game."] * 20)
    assert clusters(report) is None
    assert "input of another" not in str(report)


def test_declared_clusters_win_over_equal_inputs() -> None:
    inputs = ["x", "x", "y", "y", "z", *[f"q{i}" for i in range(20)]]
    report = ran(inputs, metadata={0: {"cluster": "A"}, 1: {"cluster": "B"}, 4: {"cluster": "A"}})
    assert clusters(report) == 3 - 1 + 1 + 20  # A (0 and 4), B, the two of "y", and the others.
    said = " ".join(str(report).split())
    assert "2 samples repeat the input of another; 1 input is in more than one declared cluster, which" in said


def test_equal_inputs_are_independent_if_the_run_says_so() -> None:
    report = ran([i % 10 for i in range(40)], cluster="")
    assert clusters(report) is None
    assert "input of another" not in str(report)
    clustered = ran([i % 10 for i in range(40)])
    assert clusters(clustered) == 10
    assert compare(clustered["a"], clustered["b"], cluster="")["b"]["passed"].clusters is None


def test_a_run_that_ended_by_its_own_rule_only_says_so() -> None:
    report = ran([i % 100 for i in range(200)], stop_when=StopWhen(narrower_than=0.5))
    assert clusters(report) is None
    assert "in a run that used its own results to stop they count as independent" in " ".join(str(report).split())
