"""The screen of one trial, in a terminal and in unusual cases."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from fairtrial import ChatMessage, EvalResult, Metric, Sample, Score, Session, TrialKey, open_store
from fairtrial.base.formatting import ago
from fairtrial.base.frozen import JSON
from fairtrial.cli.command_show import print_trial
from fairtrial.reports.figures.error_groups import error_text
from fairtrial.store.protocol import RunRecord

RUN = RunRecord("r1", "support", "data", "1", "f", 1, ("baseline",), 2, number=1)


def screen(width: int, sample: Sample[Any, Any], **fields: Any) -> list[str]:
    session = Session()
    session.record(ChatMessage("user", "word " * 40))
    session.record(ChatMessage("judge", "x" * 200), actor="judge")
    store = open_store("memory:")
    store.create_run(RUN)
    key = TrialKey("r1", "baseline", sample.id, 1)
    store.commit("r1", [EvalResult(key=key, ordinal=1, snapshot=session.snapshot(), **fields)], {0: sample})
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_trial(console, store.get_run("r1"), next(iter(store.results("r1"))))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 140])
def test_long_text_is_wrapped_and_indented(width: int) -> None:
    lines = screen(width, Sample("a", "why " * 60, None, {}), outcome="scored", score=Score(1.0), output="because")
    assert lines[0] == "a  support@1:baseline, repeat 1  passed, score 1.000"
    assert max(len(line) for line in lines[:-1]) <= width  # The last line is a command, to be copied.
    assert lines[1].startswith("input     why why")
    assert lines[2].startswith("          why why")
    assert any("judge (judge)  xxx" in line for line in lines)
    assert lines[-1] == "again     fairtrial run SUITE --sample a"


def test_an_error_says_its_stage_and_a_second_attempt_is_marked() -> None:
    lines = screen(80, Sample("a", "in"), outcome="task_error", error="ValueError: no", stage="task", attempt=2)
    assert lines[0].endswith("task error")
    assert "error     ValueError: no" in lines
    assert "          (in stage task)" in lines
    assert any(line.startswith("timing    <1 ms, attempt 2") for line in lines)


TRACEBACK = """  File "/usr/lib/python3.12/site-packages/fairtrial/trials/run_trial.py", line 305, in _invoke
    return await task.fn(*args)
  File "/home/me/fairtrial/app/evals.py", line 18, in answer
    find(question)
  File "/usr/lib/python3.12/json/decoder.py", line 355, in raw_decode
    raise JSONDecodeError("Expecting value", s, err.value) from None
"""


def test_an_error_shows_its_file_line_and_traceback_without_our_own_calls() -> None:
    failed: dict[str, Any] = {"outcome": "task_error", "error": "ValueError: no"}
    lines = screen(120, Sample("a", "in"), metadata={"traceback": TRACEBACK}, **failed)
    assert "error     ValueError: no (evals.py:18 in answer)" in lines
    at = next(place for place, line in enumerate(lines) if line.startswith("traceback"))
    assert lines[at : at + 2] == [
        'traceback File "/home/me/fairtrial/app/evals.py", line 18, in answer',
        "            find(question)",
    ]
    assert "run_trial.py" not in "".join(lines)


@pytest.mark.parametrize(
    "stored", [None, 3, "no calls at all", '  File "/x/site-packages/lib.py", line 1, in f\n', 'File "' * 2_000]
)
def test_an_error_without_calls_in_own_files_is_shown_without_a_place(stored: JSON) -> None:
    key = TrialKey("r1", "baseline", "a", 0)
    failed = EvalResult(
        key=key, ordinal=0, outcome="task_error", error="ValueError: no", metadata={"traceback": stored}
    )
    assert error_text(failed) == "ValueError: no"


def test_a_trial_with_redacted_secrets_names_the_redacted_fields() -> None:
    output = "the key is ghp_abcdefghijklmnop1234"
    lines = screen(80, Sample("a", "in"), outcome="scored", score=Score(1.0, reason=output), output=output)
    assert "output    the key is [redacted]" in lines
    assert "redacted  secrets were redacted in: output, reason" in lines


def test_a_long_input_is_cut_with_the_number_of_omitted_lines() -> None:
    lines = screen(80, Sample("a", "\n".join("x" * 500)), outcome="scored", score=Score(0.0), output=None)
    assert "          ... 100 more lines; all of it with --json" in lines


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(3, "3 s ago"), (119, "119 s ago"), (600, "10 min ago"), (3 * 3600, "3 h ago"), (5 * 86_400, "5 d ago")],
)
def test_when_something_was(seconds: float, said: str) -> None:
    assert ago(1_000_000_000 - seconds, 1_000_000_000) == said
    assert ago(1_000_000_000 - 90 * 86_400, 1_000_000_000) == "2001-06-11"


def test_the_reasons_of_criteria_are_printed_once() -> None:
    parts = [
        Metric("politeness", 0.0, 1.0, passed=False, reason="rude words; twice"),
        Metric("length", 1.0, 1.0, passed=True, reason="short"),
    ]
    for reason, shown in (("politeness: rude words; twice", False), ("", False), ("a person said so", True)):
        score = Score(0.5, passed=False, reason=reason, metrics=parts)
        lines = screen(100, Sample("a", 1), outcome="scored", score=score, output="b")
        assert any(line.startswith("reason ") for line in lines) is shown
        assert sum("rude words" in line for line in lines) == 1
