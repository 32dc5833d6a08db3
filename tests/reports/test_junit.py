"""JUnit XML: a test case for every trial, that every parser of XML takes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from fairtrial import ConfigurationError, compare, gate
from tests.reports.made import FAIL, PASS, TASK_ERROR, Made, hostile_report, made_report


def mixed(place: int, experiment: str, repeat: int) -> Made | None:
    kinds = {
        0: TASK_ERROR,
        1: Made(None, "scorer_error", error="judge down"),
        2: Made(None, "timeout"),
        3: FAIL,
        4: Made(None, "not_run"),
        5: None,
    }
    return kinds.get(place, PASS)


def test_failures_errors_and_what_was_not_run_are_told_apart() -> None:
    root = ElementTree.fromstring(made_report(mixed).to_junit())
    assert (root.tag, root.get("name")) == ("testsuites", "support")
    (suite,) = root
    counts = {name: suite.get(name) for name in ("name", "tests", "failures", "errors", "skipped")}
    assert counts == {"name": "support.baseline", "tests": "9", "failures": "1", "errors": "3", "skipped": "1"}
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert len(cases) == 9
    found = {name: [child.tag for child in case if child.tag != "properties"] for name, case in cases.items()}
    assert found["sample-00"] == ["error"]
    assert found["sample-03"] == ["failure"]
    assert found["sample-04"] == ["skipped"]
    assert found["sample-06"] == []
    error = cases["sample-01"].find("error")
    assert error is not None
    assert (error.get("type"), error.get("message"), error.text) == ("scorer_error", "judge down", "judge down")
    failure = cases["sample-03"].find("failure")
    assert failure is not None
    assert (failure.get("message"), failure.text) == ("not the same", "not the same\n\noutput: an answer")
    assert cases["sample-06"].get("classname") == "support.baseline"
    assert cases["sample-06"].get("time") == "0.100"


def test_every_rate_has_its_interval_and_n_among_the_properties() -> None:
    root = ElementTree.fromstring(made_report(mixed).to_junit())
    facts = {found.get("name"): found.get("value") for found in root[0].findall("properties/property")}
    assert facts["pass_rate"] == "0.8"
    assert float(facts["pass_rate.low"] or 0) == pytest.approx(0.2836, abs=1e-4)
    assert (facts["pass_rate.n"], facts["not_run"], facts["planned"]) == ("5", "2", "10")
    empty = ElementTree.fromstring(made_report(lambda *_: TASK_ERROR, samples=2).to_junit())
    undefined = {found.get("name"): found.get("value") for found in empty[0].findall("properties/property")}
    assert undefined["pass_rate"] == undefined["pass_rate.low"] == ""


def test_repeats_and_experiments_have_names_of_their_own() -> None:
    root = ElementTree.fromstring(made_report(mixed, samples=7, repeats=2, experiments=("a", "b")).to_junit())
    assert [suite.get("name") for suite in root] == ["support.a", "support.b"]
    assert "sample-06 [repeat 1]" in [case.get("name") for case in root.iter("testcase")]
    alone = ElementTree.fromstring(made_report(mixed, samples=7, experiments=("a", "b"))["b"].to_junit())
    assert [suite.get("name") for suite in alone] == ["support.b"]


def test_characters_that_xml_cannot_hold_are_dropped_and_nothing_is_markup() -> None:
    text = hostile_report().to_junit()
    text.encode("utf-8")
    root = ElementTree.fromstring(text)
    known = {"testsuites", "testsuite", "testcase", "properties", "property", "failure", "error"}
    assert {element.tag for element in root.iter()} == known
    failure = next(root.iter("failure"))
    assert "<script>document.title='owned'</script>" in (failure.text or "")
    assert "]]>" in (failure.text or "")
    assert "\n# heading\n" in (failure.text or "")
    assert "\x1b" not in text
    assert "\x00" not in text


def test_a_failing_trial_without_a_reason_says_its_value() -> None:
    root = ElementTree.fromstring(made_report(lambda *_: Made(0.25, output={"a": 1}), samples=1).to_junit())
    failure = next(root.iter("failure"))
    assert (failure.get("message"), failure.text) == ("value 0.25", 'output: {"a":1}')


@pytest.mark.proves("R103")
def test_a_gate_has_a_case_for_every_rule() -> None:
    report = made_report(lambda place, *_: PASS if place % 4 else FAIL, samples=100)
    result = gate(report, {"min_pass_rate": 0.9, "floors": {"value": 0.5}})
    root = ElementTree.fromstring(result.to_junit())
    cases = {case.get("name"): [child.tag for child in case][1:] for case in root.iter("testcase")}
    assert cases == {"passed at least 90.0%": ["failure"], "value at least 0.500": []}
    assert (root[0].get("tests"), root[0].get("failures"), root[0].get("errors")) == ("2", "1", "0")
    close = ElementTree.fromstring(gate(report, {"min_pass_rate": 0.75}).to_junit())
    error = next(close.iter("error"))
    assert error.get("type") == "inconclusive"
    assert "the interval contains 75.0%" in (error.get("message") or "")


@pytest.mark.proves("R103")
def test_a_rule_left_open_by_missing_trials_is_an_error() -> None:
    report = made_report(lambda place, *_: None if place < 20 else PASS, samples=200)
    result = gate(report, {"min_pass_rate": 0.5})
    root = ElementTree.fromstring(result.to_junit())
    assert [case.get("name") for case in root.iter("testcase")] == ["passed at least 50.0%"]
    assert root[0].get("errors") == "1"
    assert "20 of 200 trials (10.0%) have no number for it" in (next(root.iter("error")).get("message") or "")


def test_files_are_written_by_their_suffix(tmp_path: Path) -> None:
    report = made_report(mixed, experiments=("a", "b"))
    compared, decided = compare(report["a"], report["b"]), gate(report["a"], {"min_pass_rate": 0.5})
    begins = {"html": "<!doctype html>", "md": "### ", "json": "{", "xml": "<?xml"}
    for what, suffixes in ((report, "html md json xml"), (report["a"], "html md json xml"), (compared, "html md json"),
                           (decided, "html md json xml")):  # fmt: skip
        for suffix in suffixes.split():
            path = tmp_path / f"{type(what).__name__}.{suffix}"
            what.export(path)
            assert path.read_text(encoding="utf-8").startswith(begins[suffix])
    report.export(tmp_path / "results.csv")
    report.export(tmp_path / "page", "html")
    assert (tmp_path / "page").read_text(encoding="utf-8") == report.to_html()
    with pytest.raises(ConfigurationError, match=r"html, md or json \(got 'xml'\)"):
        compared.export(tmp_path / "comparison.xml")
    with pytest.raises(ConfigurationError, match=r"csv, jsonl or parquet \(got 'docx'\)"):
        report.export(tmp_path / "report.docx")
    assert not (tmp_path / "report.docx").exists()
