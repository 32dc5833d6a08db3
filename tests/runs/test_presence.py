"""Two processes that start the same suite: the second one does not pay for the trials of the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalSuite, exact_match, open_store
from fairtrial.errors import RunBusyError
from fairtrial.runs import presence, writer

SUITE = textwrap.dedent(
    """
    import sys, time
    from fairtrial import Dataset, EvalConfig, EvalSuite, exact_match

    def slow(question):
        time.sleep(0.05)
        return question

    data = Dataset.of({str(number): str(number) for number in range(400)})
    config = EvalConfig(max_concurrent=2, grace_seconds=1)
    suite = EvalSuite("slow", data, slow, exact_match, version="1", config=config)
    if __name__ == "__main__":
        suite.run_sync(store=sys.argv[1])
    """
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes are renewed and grow old in tenths of a second."""
    monkeypatch.setattr(presence, "_WATCH_SECONDS", 0.05)
    monkeypatch.setattr(presence, "_STALE_SECONDS", 2.0)


def started(tmp_path: Path, url: str) -> subprocess.Popen[bytes]:
    (tmp_path / "slow_suite.py").write_text(SUITE)
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    code = (
        "import runpy, sys; from fairtrial.runs import presence, writer; writer.BEAT_SECONDS = 0.2; "
        "runpy.run_path('slow_suite.py', run_name='__main__')"
    )
    process = subprocess.Popen([sys.executable, "-c", code, url], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    store = open_store(url)
    until = time.monotonic() + 60
    while not (runs := store.runs(suite="slow")) or not any(store.done(runs[0].run_id)):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    store.close()
    return process


def the_suite() -> EvalSuite:
    data = Dataset.of({str(number): str(number) for number in range(400)})
    return EvalSuite("slow", data, lambda question: question, exact_match, version="1")


def test_a_second_process_is_refused_while_the_first_is_at_work_and_goes_on_when_it_was_killed(
    tmp_path: Path, quick: None
) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    process = started(tmp_path, url)
    try:
        with pytest.raises(RunBusyError, match=rf"being worked on by process {process.pid} on .*fresh=True"):
            the_suite().run_sync(store=url)
        assert process.poll() is None
        assert open_store(url).runs(suite="slow")[0].status == "running"  # It was left as it was.
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    began = time.monotonic()
    report = the_suite().run_sync(store=url)
    assert (report.status, report.total) == ("finished", 400)
    assert time.monotonic() - began < 30
    assert report.run.notes[presence.NOTE] is None
    assert len(open_store(url).runs(suite="slow")) == 1


def test_a_note_that_is_never_renewed_holds_nobody_up_for_long(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"

    def interrupted(question: str) -> str:
        raise KeyboardInterrupt

    data = Dataset.of({str(number): str(number) for number in range(400)})
    with pytest.raises(KeyboardInterrupt):
        EvalSuite("slow", data, interrupted, exact_match, version="1").run_sync(store=url)
    store = open_store(url)
    (run,) = store.runs(suite="slow")
    note: Any = presence.present()[presence.NOTE]
    store.update_run(run.run_id, notes={presence.NOTE: {**note, "host": "elsewhere"}})
    report = the_suite().run_sync(store=store)
    assert (report.run_id, report.total) == (run.run_id, 400)
    assert "waiting to see whether it still is" in caplog.text


def test_a_note_is_renewed_by_the_writer_even_when_no_result_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BEAT_SECONDS", 0.1)
    store = open_store(f"sqlite:///{tmp_path}/runs.db")
    seen: list[float] = []

    def patient(question: str) -> str:
        for _ in range(100):
            note: Any = store.runs(suite="slow")[0].notes.get(presence.NOTE)
            if note and note["at"] not in seen:
                seen.append(note["at"])
            if len(seen) >= 3:
                break
            time.sleep(0.05)
        return question

    EvalSuite("slow", Dataset.of({"1": "1"}), patient, exact_match).run_sync(store=store)
    assert len(seen) >= 3
