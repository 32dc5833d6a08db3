"""Code of models, scored by tests in a sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, evaluate_sync
from fairtrial.integrations.sandbox import Sandbox, SandboxLimits, extract_code, runs_tests
from fairtrial.scoring import Case, resolve

TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```bash\npip install y\n```\n```py\nx = 1\n```\n```python\nprint(x)\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```Python title=a.py\nx = 1\n```", "x = 1\n"),
        ("```{python}\nx = 1\n```", "x = 1\n"),
        ("1. Like this:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"),
        ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("Cut off:\n```python\nx = 1\ny =", "x = 1\ny =\n"),
        ("```json\n{}\n```", "```json\n{}\n```"),
        ("", ""),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_code_is_found_in_an_answer(text: str, code: str) -> None:
    assert extract_code(text) == code


def test_the_last_or_all_blocks_can_be_taken() -> None:
    text = "```python\nx = 1\n```\n```js\n0\n```\n```python\nx = 2\n```"
    assert extract_code(text, block="last") == "x = 2\n"
    assert extract_code(text, block="all") == "x = 1\n\nx = 2\n"
    assert extract_code(text, "javascript") == "0\n"


async def score(answer: str, tests: str = TESTS, **options: Any) -> tuple[bool, str]:
    result = await resolve(runs_tests(**options)).score(Case(Sample("q", "", tests), answer))
    return result.passed, result.reason


async def test_code_passes_only_if_its_tests_ran_to_their_end() -> None:
    good = "```python\nfrom __future__ import annotations\ndef add(a, b): return a + b\n"
    assert await score(good + "```") == (True, "")
    assert await score(good + "if __name__ == '__main__': input()\n```") == (True, "")
    assert await score("def add(a, b): return a - b") == (False, "exit status 1: AssertionError")
    assert await score(good + "import sys; sys.exit(0)\n```") == (
        False,
        "the code ended the process before its tests had ended",
    )
    assert await score("def add(a, b): return") == (False, "exit status 1: AssertionError")
    passed, reason = await score("def add(a, b) return a")
    assert (passed, reason.split(":")[1]) == (False, " SyntaxError")
    assert await score("while True: pass", timeout=0.5) == (False, "killed after 0.5 s")


async def test_limits_programs_and_other_commands() -> None:
    small = SandboxLimits(memory=100 * 2**20)
    passed, reason = await score("x = b'x' * (1 << 30)", sandbox=lambda: Sandbox(limits=small))
    assert (passed, reason) == (False, "exit status 1: MemoryError")
    sample: Sample[str, str] = Sample("q", "def add(a, b):\n", TESTS)
    continued = runs_tests(prepare=lambda code, given: f"{given.input}{code}")
    assert (await continued("    return a + b", sample)).passed
    shell = runs_tests(language="bash", files=("add.sh", "test.sh"), command=["sh", "test.sh"])
    tests = '[ "$(sh add.sh 2 3)" = 5 ]'
    in_shell: Sample[str, str] = Sample("q", "", tests)
    assert (await shell("```bash\necho $(($1 + $2))\n```", in_shell)).passed
    assert not (await shell("echo 6", in_shell)).passed


def answer(question: str) -> str:
    return {"add": "```python\ndef add(a, b): return a + b\n```", "wrong": "def add(a, b): return 0"}[question]


@pytest.mark.proves("R145")
def test_a_run_scores_code_and_reports_pass_at_k() -> None:
    samples = Dataset([Sample(name, name, TESTS) for name in ("add", "wrong")])
    report = EvalSuite("code", samples, answer, runs_tests(), config=EvalConfig(repeats=2)).run_sync(store="memory:")
    assert report.pass_rate == 0.5
    assert "pass@2" in str(report)


def test_a_sandbox_that_is_not_available_is_an_error_and_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    report = evaluate_sync(Dataset([Sample("a", "add", TESTS)]), answer, runs_tests(), store="memory:")
    (result,) = report.results
    assert result.outcome == "scorer_error"
    assert "bwrap is not installed" in str(result.error)
