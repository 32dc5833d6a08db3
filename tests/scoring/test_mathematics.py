"""math_equal against math-verify itself and a table of verdicts, alone and in runs."""

from __future__ import annotations

from typing import Any

import pytest

from fairtrial import ConfigurationError, Dataset, EvalConfig, EvalResult, EvalSuite, Sample
from fairtrial.scoring import math_equal
from fairtrial.scoring.evaluator import marks_of

CASES: list[tuple[str, str, bool]] = [
    ("72", "72", True),
    ("The answer is 72.", "72", True),
    ("The answer is 73.", "72", False),
    ("$\\boxed{72}$", "72", True),
    ("First 12, then 60, so 12 + 60 = 72.\nThe final answer is $\\boxed{72}$.", "72", True),
    ("1/2", "0.5", True),
    ("$\\frac{1}{2}$", "0.5", True),
    ("\\frac{1}{2}", "1/2", True),
    ("$\\frac{2}{4}$", "\\frac{1}{2}", True),
    ("$\\dfrac{3}{4}$", "0.75", True),
    ("$0.3333$", "1/3", False),
    ("1,000", "1000", True),
    ("$1,234.50$", "1234.5", True),
    ("-5", "5", False),
    ("$-5$", "-5", True),
    ("$\\sqrt{8}$", "$2\\sqrt{2}$", True),
    ("$\\sqrt{2}$", "$2\\sqrt{2}$", False),
    ("$2^{10}$", "1024", True),
    ("$x^2 + 2x + 1$", "$(x+1)^2$", True),
    ("$x^2 + 1$", "$(x+1)^2$", False),
    ("$2x + 3$", "$3 + 2x$", True),
    ("$\\pi$", "$\\pi$", True),
    ("$2\\pi$", "$\\pi$", False),
    ("$(1, 2)$", "$(1, 2)$", True),
    ("$(2, 1)$", "$(1, 2)$", False),
    ("$[0, 1)$", "$[0, 1)$", True),
    ("$[0, 1]$", "$[0, 1)$", False),
    ("$\\{1, 2, 3\\}$", "$\\{3, 2, 1\\}$", True),
    ("$\\{1, 2\\}$", "$\\{1, 2, 3\\}$", False),
    ("$x = 5$", "5", True),
    ("$\\text{no solution here}$ 3", "3", True),
    ("$\\boxed{\\frac{\\pi}{4}}$", "$\\frac{\\pi}{4}$", True),
    ("$3 \\times 10^{2}$", "300", True),
    ("I cannot solve this.", "300", False),
    ("", "300", False),
]


@pytest.mark.proves("R157")
@pytest.mark.filterwarnings("ignore")
def test_verdicts_are_those_of_the_table_and_of_math_verify() -> None:
    from math_verify import parse, verify

    check = math_equal()
    ours = [check(output, expected).passed for output, expected, _ in CASES]
    assert ours == [passed for _, _, passed in CASES]
    # math-verify with its own time limits, on texts with delimiters.
    direct = [(output, expected) for output, expected, _ in CASES if "\\" not in expected or "$" in expected]
    compared = [(o, e) for o, e in direct if "\\" not in o or "$" in o]
    assert len(compared) >= 30
    theirs = [bool(verify(parse(expected), parse(output))) for output, expected in compared]
    assert theirs == [check(output, expected).passed for output, expected in compared]


@pytest.mark.filterwarnings("ignore")
def test_what_was_found_is_said_and_no_answer_has_its_own_metric() -> None:
    wrong = math_equal()("The answer is 73.", 72)
    assert (wrong.reason, wrong.metric("extracted")) == ("73 is not equal to 72", 1.0)
    none = math_equal()("I do not know.", 72)
    assert (none.reason, none.metric("extracted")) == ("no answer was found", 0.0)
    with pytest.raises(ValueError, match="must be a number or an expression"):
        math_equal()("3", "")
    with pytest.raises(ValueError, match="up to 100,000 characters"):
        math_equal()("3" * 100_001, "3")
    with pytest.raises(ConfigurationError, match="decimals"):
        math_equal(decimals=99)


@pytest.mark.filterwarnings("ignore")
def test_decimals_decide_how_close_floating_point_numbers_must_be() -> None:
    assert math_equal(decimals=2)("3.14159", "3.1416").passed
    assert not math_equal(decimals=6)("3.14159", "3.1416").passed


@pytest.mark.filterwarnings("ignore")
def test_floating_point_numbers_are_compared_to_six_decimals() -> None:
    assert math_equal()("0.1234561", "0.1234564").passed
    assert not math_equal(decimals=7)("0.1234561", "0.1234564").passed
    assert not math_equal()("0.123456", "0.123457").passed
    assert math_equal(decimals=0)("7", "7").passed
    assert math_equal(decimals=15)("7", "7").passed
    with pytest.raises(ConfigurationError, match=r"must be from 0 to 15 \(got 16\)"):
        math_equal(decimals=16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("output", ["2\\sqrt{2}", " 2\\sqrt{2}\n", "$2\\sqrt{2}$", "It is:\n$2\\sqrt{2}$\n"])
def test_a_line_that_is_nothing_but_latex_needs_no_delimiters(output: str) -> None:
    assert math_equal()(output, "\\sqrt{8}").passed
    assert not math_equal()(output, "2").passed


def run_of(rows: list[tuple[str, Any]], seconds: float) -> dict[str, EvalResult]:
    samples = Dataset([Sample(f"q{n}", text, right) for n, (text, right) in enumerate(rows)], name="sums")
    config = EvalConfig(timeout_seconds=seconds, max_concurrent=1)
    report = EvalSuite("sums", samples, lambda text: text, math_equal(), config=config).run_sync(store="memory:")
    return {result.sample_id: result for result in report.results}


@pytest.mark.proves("R157")
def test_in_a_run_it_is_computed_in_a_child_process() -> None:
    assert marks_of(math_equal()).isolate
    results = run_of([("7", 7), ("$\\frac{1}{4}$", "0.25"), ("8", 9)], 60)
    assert [results[f"q{n}"].score.passed for n in range(3)] == [True, True, False]  # type: ignore[union-attr]


@pytest.mark.long
def test_an_endless_computation_ends_at_the_timeout_and_the_run_goes_on() -> None:
    results = run_of([("$9^{9^{9^{9}}}$", 1), ("7", 7)], 12)
    assert results["q0"].score is None
    assert "within 12 s" in str(results["q0"].error)
    assert results["q1"].score is not None
    assert results["q1"].score.passed
