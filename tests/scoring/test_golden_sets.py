"""The golden sets: what they hold, what the rules do on them, and what the documentation says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fairtrial.models.judges
import fairtrial.scoring
from fairtrial import EvalSuite
from fairtrial.base import formatting
from fairtrial.models import ScriptedAdapter
from fairtrial.reports.calibrate.calibrate import Figure
from fairtrial.reports.calibrate.golden import GoldenCheck, golden_check
from fairtrial.scoring import GOLDEN_RULES, GOLDEN_SETS, golden_set, replay

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "scorers.md"
FOLDER = Path(fairtrial.scoring.__file__).parent / "golden_sets"
NEEDED = {
    "json_correctness": "expected",
    "tool_correctness": "expected",
    "answer_correctness": "expected",
    "hallucination": "context",
    "task_completion": "trajectory",
    "goal_reached": "trajectory",
    "kept_role": "trajectory",
    "remembered": "trajectory",
}
KNOWN = {"id", "input", "output", "expected", "context", "trajectory", "label", "note", "kind", "language"}


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_golden_set_is_listed() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(GOLDEN_SETS)
    assert len(GOLDEN_SETS) == 12


@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_a_golden_set_is_large_balanced_and_varied(name: str) -> None:
    rows = rows_of(name)
    passes = sum(row["label"] == "pass" for row in rows)
    assert 40 <= len(rows) <= 60
    assert 0.35 * len(rows) <= passes <= 0.65 * len(rows)
    assert len({row["id"] for row in rows}) == len({json.dumps(row["input"]) for row in rows}) == len(rows)
    for row in rows:
        assert {"id", "input", "output", "label", "note"} <= row.keys() <= KNOWN
        assert row["label"] in ("pass", "fail")
        assert all(row[key] for key in ("id", "input", "output", "note"))
        assert row.get("kind", "hard") in ("hard", "adversarial")
        assert NEEDED.get(name, "note") in row
        assert row.get("trajectory") or name not in ("tool_correctness", "task_completion")
    assert sum(row.get("language", "en") != "en" for row in rows) >= 3
    assert sum(row.get("kind") == "hard" for row in rows) >= 8
    assert sum(row.get("kind") == "adversarial" for row in rows) >= 2


def check_of(name: str, metric: Any) -> GoldenCheck:
    suite = EvalSuite(f"golden-{name}", golden_set(name), replay, metric)
    return golden_check(name, suite.run_sync(store="memory:"))


def figure(found: Figure) -> str:
    rate = formatting.rate
    return f"{rate(found.value)} ({rate(found.low)} to {rate(found.high)})"


def test_the_documentation_gives_the_figures_of_the_rules_as_they_are() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in GOLDEN_RULES:
        check = check_of(name, getattr(fairtrial.scoring, name)())
        right = check.confusion.true_passes + check.confusion.true_fails
        share = f"{right} of {check.cases}, {figure(check.agreement)}"
        row = f"| `{name}` | {share} | {figure(check.recall)} | {figure(check.precision)} |"
        assert not check.unscored
        assert check.disagreements  # Hard cases that a rule misses stay in the set.
        assert row in text, row


def test_the_documentation_states_the_limit_of_every_metric() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for name, limit in GOLDEN_SETS.items():
        assert any(row.startswith(f"| `{name}(") and row.endswith(f"| {limit} |") for row in rows), limit


@pytest.mark.parametrize("name", sorted(set(GOLDEN_SETS) - set(GOLDEN_RULES)))
def test_a_scripted_judge_sees_every_case_and_its_verdicts_are_counted(name: str) -> None:
    # The plumbing alone: a script that knows the labels says nothing about models.
    cases = {json.dumps(case.input, ensure_ascii=False): case for case in golden_set(name)}
    made: dict[str, str] = {}

    def judge(messages: Any) -> Any:
        text = messages[-1].text
        shown = next(case for given, case in cases.items() if f"\n{given}\n<<<END" in text)
        made[shown.id] = text
        labels = list(metric.rubric.labels)
        return {"reason": "as labelled", "label": labels[0 if shown.metadata["label"] == "pass" else -1]}

    metric = getattr(fairtrial.models.judges, name)(ScriptedAdapter(judge))
    check = check_of(name, metric)
    assert (check.agreement.value, check.cases, check.unscored) == (1.0, len(cases), ())
    assert check.judge_models
    for row in rows_of(name):
        steps = [step.get("tool", step.get("content")) for step in row.get("trajectory", ())]
        for text in (*row.get("context", ()), *steps):
            assert json.dumps(text, ensure_ascii=False) in made[row["id"]]


def test_verdicts_that_differ_are_disagreements_and_errors_have_no_verdict() -> None:
    kind = {"reason": "all fine", "label": "respectful"}
    check = check_of("toxicity", fairtrial.models.judges.toxicity(ScriptedAdapter(lambda messages: kind)))
    failed = sum(row["label"] == "fail" for row in rows_of("toxicity"))
    assert (len(check.disagreements), check.recall.value, check.passed_good.value) == (failed, 0.0, 1.0)
    assert check.precision.value is None
    assert check.disagreements[0].verdict == "pass" != check.disagreements[0].label
    none = check_of("bias", fairtrial.models.judges.bias(ScriptedAdapter(lambda messages: {"label": "nonsense"})))
    assert (none.scored, len(none.unscored), none.disagreements) == (0, none.cases, ())
    assert "agrees with 0 of 0 labels." in str(none)
