"""In a notebook, whose cells run inside an event loop: a real kernel executes what people type there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from tests.notebooks import execute, printed, start_kernel

SUITE = """
from fairtrial import Dataset, EvalSuite, compare, evaluate, evaluate_sync, exact_match
capitals = Dataset.of({"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Peru": "Lima"})
def answer(country):
    return {"France": "Paris"}.get(country, "?")
suite = EvalSuite(name="geography", dataset=capitals, task=answer, evaluator=exact_match)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockingKernelClient]:
    """A kernel in a folder of its own, which knows `suite`."""
    with start_kernel(tmp_path_factory.mktemp("notebook")) as client:
        assert execute(client, SUITE) == []
        yield client


@pytest.mark.parametrize("run", ["await evaluate(capitals, answer, exact_match)", "suite.run_sync()"])
def test_a_report_is_shown_as_a_table_and_printed_as_text(kernel: BlockingKernelClient, run: str) -> None:
    [shown] = execute(kernel, f"report = {run}\nreport")
    assert "<table" in shown["text/html"]
    assert shown["text/plain"].endswith(": 4 of 4 trials>")
    assert "pass rate     25.0%  0.6% to 80.6%  4" in printed(execute(kernel, "print(report)"))


def test_a_comparison_is_shown_as_a_table_and_printed_as_text(kernel: BlockingKernelClient) -> None:
    [shown] = execute(kernel, "both = compare(suite.run_sync(), await suite.run())\nboth")
    assert "<table" in shown["text/html"]
    assert "passed: too few samples to tell" in printed(execute(kernel, "print(both)"))


def test_progress_is_one_line_that_changes(kernel: BlockingKernelClient) -> None:
    outputs = execute(kernel, "_ = await suite.run(store='sqlite:///runs.db', progress=True)")
    assert all(list(output) == ["text/plain"] for output in outputs)
    assert "4 of 4 trials, passed 25.0% [0.6%, 80.6%], no errors" in outputs[-1]["text/plain"]


def test_a_cell_that_defines_the_task_again_starts_another_run(kernel: BlockingKernelClient) -> None:
    known = "def recall(country):\n    return {known}.get(country, '?')\n"
    again = "EvalSuite(name='again', dataset=capitals, task=recall, evaluator=exact_match)"
    rate = f"print({again}.run_sync(store='sqlite:///again.db')['baseline'].pass_rate)"
    assert printed(execute(kernel, known.format(known={"France": "Paris"}) + rate)) == "0.25\n"
    assert printed(execute(kernel, known.format(known={"France": "Paris", "Peru": "Lima"}) + rate)) == "0.5\n"
