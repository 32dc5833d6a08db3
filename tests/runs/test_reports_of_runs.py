"""Reports of finished and running runs."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from fairtrial import ConfigurationError, EvalConfig, EvalReport, EvalSuite, TrialContext, evaluate, exact_match
from fairtrial.data.session import ChatMessage, PromptExecuted, TokenUsage
from fairtrial.runs import EvalRunCompleted, RunEvent
from fairtrial.store import RunStore
from tests.runs.doubles import double, doubles


@pytest.mark.proves("R47")
async def test_reports_are_sliced_by_metadata_by_metric_and_by_any_function() -> None:
    async def evens_only(given: int) -> int:
        return 2 * given if given % 2 == 0 else 0

    report = await evaluate(doubles(10), evens_only, exact_match)
    by_parity = report.group_by("parity")
    assert {value: (found["n"], found["pass_rate"]) for value, found in by_parity.items()} == {0: (5, 1.0), 1: (5, 0.0)}
    by_size = report.group_by(lambda result: result.ordinal < 5)
    assert {value: found["n"] for value, found in by_size.items()} == {True: 5, False: 5}
    with pytest.raises(ConfigurationError, match="has metadata 'no_such_key'; it has parity"):
        report.group_by("no_such_key")


@pytest.mark.proves("R41", "R42")
async def test_a_result_leads_to_its_sample_its_output_and_its_trajectory() -> None:
    async def talk(given: int, ctx: TrialContext) -> int:
        ctx.session.record(ChatMessage("user", str(given)))
        ctx.session.record(PromptExecuted(usage=TokenUsage(3, 4)))
        return 2 * given

    report = await evaluate(doubles(2), talk, exact_match)
    last = report.results[-1]
    assert (last.output, last.usage.total_tokens) == (2, 7)
    assert last.sample.input == 1
    assert last.sample.metadata == {"parity": 1}
    assert last.trajectory.messages == (ChatMessage("user", "1"),)


@pytest.mark.proves("R42")
async def test_a_results_metadata_is_stored_with_it() -> None:
    async def fails_here(given: int) -> int:
        raise ValueError(given)

    report = await evaluate(doubles(1), fails_here, exact_match)
    assert "in fails_here" in str(report.results[0].metadata["traceback"])


async def test_a_report_is_a_table_a_person_can_read_in_a_terminal_and_in_a_notebook() -> None:
    report = await EvalSuite("doubles", doubles(4), double, exact_match).run(store="memory:")
    text = str(report)
    assert "100.0%" in text
    assert "39.8% to 100.0%" in text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "<table>" in report._repr_html_()
    assert repr(report).startswith("<EvalReport doubles")


@pytest.mark.proves("R46")
async def test_a_report_gives_mean_spread_and_extremes_and_can_be_saved_and_loaded(tmp_path: Path) -> None:
    values = {0: 0.0, 1: 0.25, 2: 0.5, 3: 1.0}

    def grade(output: int, expected: int) -> float:
        return values[output]

    async def same(given: int) -> int:
        return given

    report = await evaluate(doubles(4), same, grade)
    summary = report.summary
    assert (summary["n"], summary["mean"], summary["min"], summary["max"]) == (4, 0.4375, 0.0, 1.0)
    assert summary["std"] == pytest.approx(0.4269562)
    report.save(tmp_path / "run.db")
    loaded = EvalReport.load(tmp_path / "run.db")
    assert loaded.summary == summary
    assert loaded.config == report.config
    assert [result.output for result in loaded.results] == [0, 1, 2, 3]
    assert loaded.results[2].sample.expected == 4
    loaded.store.close()
    report.export(tmp_path / "results.jsonl")
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4


@pytest.mark.proves("R89")
async def test_a_report_of_a_running_run_shows_what_is_stored_so_far(store: RunStore) -> None:
    seen: list[tuple[str, int, int]] = []

    async def wait_for_the_first(given: int) -> int:
        if given < 4:
            return 2 * given
        (run,) = store.runs(suite="s")
        with anyio.fail_after(5):
            while (report := EvalReport(store, store.get_run(run.run_id))).total < 4:
                await anyio.lowlevel.checkpoint()  # Another thread commits them.
        seen.append((report.status, report.total, len(list(report.results))))
        return 2 * given

    config = EvalConfig(max_concurrent=1)
    report = await EvalSuite("s", doubles(5), wait_for_the_first, exact_match, config=config).run(store=store)
    assert seen == [("running", 4, 4)]
    assert report.total == 5


@pytest.mark.proves("R89")
async def test_a_running_run_can_be_looked_at_and_refreshed(store: RunStore) -> None:
    seen: list[int] = []
    looked_at: list[EvalReport] = []

    async def look(given: int) -> int:
        if not looked_at:
            looked_at.append(EvalReport(store, store.runs()[0]))
            assert looked_at[0].total == 0
        elif given == 4:
            with anyio.fail_after(5):
                while (total := looked_at[0].refresh().total) < 4:
                    await anyio.lowlevel.checkpoint()  # Another thread commits them.
            seen.append(total)
        return 2 * given

    class Peek:
        def publish(self, event: RunEvent) -> None:
            if isinstance(event, EvalRunCompleted):
                seen.append(EvalReport(store, store.get_run(event.run_id)).total)

    config = EvalConfig(max_concurrent=1)
    report = await EvalSuite("s", doubles(5), look, exact_match, config=config).run(store=store, bus=Peek())
    assert seen == [4, 5]
    assert report.refresh().total == 5
