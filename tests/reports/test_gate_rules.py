"""Attempts at a gate, its rules and its records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fairtrial import EvalReport, GateRules, gate, open_store
from fairtrial.errors import ConfigurationError, StoreError
from fairtrial.reports.figures.rules import SliceRule
from fairtrial.store import RunStore
from tests.reports.build import stored
from tests.reports.test_gate import changed

pytestmark = pytest.mark.proves("R103", "R114")


class TestAttempts:
    """Trying until it passes is noticed."""

    def sides(self, store: RunStore, place: int, code: str = "c1") -> EvalReport:
        share_of = {"plain": [1.0] * 50, "terse": [1.0] * 48 + [0.0] * 2}
        return stored(share_of, run_id=f"r{place}", store=store, code_hash=code)

    def test_a_second_run_of_the_same_code_is_warned_about(self) -> None:
        store = open_store("memory:")
        rules = GateRules(margin=0.02)
        first = self.sides(store, 1)
        for _ in range(2):  # Looking again at the same results is no attempt.
            result = gate(first["terse"], rules, baseline=first["plain"])
            assert (result.attempt, result.warnings) == (1, ())
        second = self.sides(store, 2)
        for baseline in (second["plain"], first["plain"]):
            again = gate(second["terse"], rules, baseline=baseline)
            assert again.attempt == 2
            assert again.warnings[0].startswith("This is attempt 2 to pass this gate with the same code.")
        other = self.sides(store, 3, code="c2")
        assert gate(other["terse"], rules, baseline=first["plain"]).attempt == 1

    def test_a_gate_that_cannot_be_noted_decides_all_the_same_and_says_so(self) -> None:
        store = open_store("memory:")
        report = self.sides(store, 1)

        def refuse(*args: object, **changes: object) -> None:
            raise StoreError("the database is read-only")

        store.update_run, write = refuse, store.update_run  # type: ignore[method-assign]
        result = gate(report["terse"], GateRules(margin=0.02), baseline=report["plain"])
        assert (result.status, result.attempt) == ("inconclusive", 1)
        assert result.warnings == ("The gate could not be recorded in run r1: the database is read-only",)
        assert store.get_run("r1").noted.gates == ()
        store.update_run = write  # type: ignore[method-assign]
        assert gate(report["terse"], GateRules(margin=0.02), baseline=report["plain"]).warnings == ()
        assert len(store.get_run("r1").noted.gates) == 1

    def test_alpha_is_spent_over_attempts(self) -> None:
        store = open_store("memory:")
        rules = GateRules(margin=0.02, spend_alpha=True)
        levels = []
        for place in range(3):
            report = self.sides(store, place)
            result = gate(report["terse"], rules, baseline=report["plain"])
            assert result.comparison is not None
            levels.append(result.comparison.alpha)
            assert not any("attempt" in warning for warning in result.warnings)
        assert levels == pytest.approx([0.05 / 2, 0.05 / 6, 0.05 / 12])

    def test_a_worn_out_baseline_is_mentioned(self) -> None:
        store = open_store("memory:")
        baseline = self.sides(store, 0)["plain"]
        told = []
        for place in range(1, 21):
            report = self.sides(store, place, code=f"c{place}")
            told.append(gate(report["terse"], GateRules(margin=0.02), baseline=baseline).warnings)
        assert not any(told[:19])
        assert told[19][0].startswith("This baseline has been used in 20 gates.")


class TestRules:
    def test_rules_come_from_a_toml_file(self, tmp_path: Path) -> None:
        path = tmp_path / "gates.toml"
        path.write_text("""
            [gate]
            min_pass_rate = 0.8
            margins = { passed = 0.02, value = 0.05 }
            ceilings.latency_ms = 2000
            lower_is_better = "toxic"
            cluster = "passage"

            [[gate.slices]]
            by = "topic"
            value = "refunds"
            min_pass_rate = 0.9
        """)
        rules = GateRules.load(path)
        assert rules == GateRules(
            min_pass_rate=0.8,
            margins={"passed": 0.02, "value": 0.05},
            ceilings={"latency_ms": 2000},
            lower_is_better=("toxic",),
            cluster="passage",
            slices=(SliceRule("topic", "refunds", min_pass_rate=0.9),),
        )
        assert rules.metrics == ("passed", "latency_ms", "value")
        with pytest.raises(ConfigurationError, match=r"has no table \[tool.fairtrial.gate\]"):
            GateRules.load(path, "tool.fairtrial.gate")
        path.write_text("[gate")
        with pytest.raises(ConfigurationError, match="is not a TOML file"):
            GateRules.load(path)
        with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
            GateRules.load(tmp_path / "none.toml")

    @pytest.mark.parametrize(
        ("table", "sentence"),
        [
            ({"min_passrate": 0.8}, "have no 'min_passrate'; did you mean min_pass_rate?"),
            ({"zzz": 1}, "have no 'zzz'; there are min_pass_rate"),
            ({"min_pass_rate": 80}, "min_pass_rate must be between 0 and 1, such as 0.8, for 80% (got 80)"),
            ({"margin": True}, "margin must be between 0 and 1, such as 0.02, for two points (got True)"),
            ({"margins": {"value": -0.1}}, "margins.value must be a number of at least 0 (got -0.1)"),
            ({"floors": {"value": "high"}}, "floors.value must be a number (got 'high')"),
            ({"floors": 0.8}, "floors must be a table of metric names and numbers (got 0.8)"),
            ({"min_pass_rate": 0.8, "floors": {"passed": 0.9}}, "min_pass_rate and floors.passed say the same thing"),
            ({"max_missing_share": 5}, "max_missing_share must be between 0 and 1 (got 5)"),
            ({"alpha": 0}, "alpha must be between 0 and 1, such as 0.05 (got 0)"),
            ({"max_missing": 2}, "max_missing must be between 0 and 1, such as 0.05, for 5% (got 2)"),
            ({"bounds": {"f1": [1, 0]}}, "bounds.f1 must be a range such as [0, 1] (got [1, 0])"),
            ({"bounds": 3}, "bounds must be a table of metric names and ranges (got 3)"),
            ({"spend_alpha": 1}, "spend_alpha must be true or false (got 1)"),
            ({"smallest_difference_that_matters": 0}, "smallest_difference_that_matters must be a number above 0"),
            ({"smallest_difference_that_matters": {"f1": -1}}, "smallest_difference_that_matters.f1 must be a number"),
            ({"cluster": 3}, "cluster must be the name of a metadata key (got 3)"),
            ({"slices": {"by": "topic"}}, "must be a list of tables"),
            ({"slices": ["topic"]}, "a slice rule must be a table with `by`, a metadata key (got 'topic')"),
            ({"slices": [{"margin": 0.1}]}, "`by` of a slice rule must be a metadata key"),
            ({"slices": [{"by": "topic"}]}, "the slice rule for 'topic' asks for nothing"),
            ({"slices": [{"by": "topic", "margn": 0.1}]}, "a slice rule has no 'margn'; did you mean margin?"),
        ],
    )
    def test_a_mistake_in_the_rules_is_a_sentence(self, table: Mapping[str, Any], sentence: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            GateRules.from_mapping(table)
        assert sentence in str(caught.value)

    def test_slice_rules_may_be_records_already(self) -> None:
        rule = SliceRule("topic", margin=0.1)
        assert GateRules(lower_is_better="toxic").lower_is_better == ("toxic",)  # type: ignore[arg-type]  # as in TOML
        assert GateRules.from_mapping({"slices": [rule]}).slices == (rule,)
        with pytest.raises(ConfigurationError, match="must be SliceRule records"):
            GateRules(slices=({"by": "topic"},))  # type: ignore[arg-type]  # that is the mistake

    def test_rules_and_baseline_must_fit(self) -> None:
        report = changed(10, 1, 1)
        with pytest.raises(ConfigurationError, match="the gate has no rules"):
            gate(report["terse"], GateRules())
        with pytest.raises(ConfigurationError, match="compares with a baseline; give one"):
            gate(report["terse"], GateRules(margin=0.02))
        with pytest.raises(ConfigurationError, match="no rule compares with it: set margin"):
            gate(report["terse"], GateRules(min_pass_rate=0.8), baseline=report["plain"])
        with pytest.raises(ConfigurationError, match=r'name one, as in gate\(report\["terse"\], rules\)'):
            gate(report, GateRules(min_pass_rate=0.8))


class TestRecords:
    def test_a_result_becomes_json(self) -> None:
        report = changed(100, 1, 5)
        result = gate(report["terse"], GateRules(margin=0.02, min_pass_rate=0.8), baseline=report["plain"])
        found = json.loads(json.dumps(result.to_json()))
        assert (found["status"], found["exit_code"], len(found["checks"])) == ("inconclusive", 3, 2)
        assert found["comparison"]["candidates"][0]["metrics"][0]["metric"] == "passed"

    def test_the_pass_rate_of_a_report_with_dead_letters_is_said_to_be_another(self) -> None:
        ended = ["dead_letter"] * 2 + ["task_error"] * 3
        report = stored([*ended, *[1.0] * 90, *[0.0] * 5])
        said = " ".join(gate(report, {"min_pass_rate": 0.5}).warnings)
        assert said.startswith("2 trials have scorer errors or are dead letters. Whether they would have passed is not")
        assert 'The report shows the pass rate of scored trials, and under "errors as failures"' in said
        assert gate(report, {"ceilings": {"latency_ms": 1e9}}).warnings == ()
        assert gate(stored([1.0] * 100), {"min_pass_rate": 0.5}).warnings == ()

    def test_an_unfinished_run_is_mentioned(self) -> None:
        report = stored([1.0] * 100, status="interrupted")
        assert "Run r1 is not finished (interrupted)" in gate(report, {"min_pass_rate": 0.5}).warnings[0]
