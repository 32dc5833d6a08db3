"""A secret is in neither the store nor the logs, whoever lets it slip."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import pytest

from fairtrial import ChatMessage, Dataset, EvalSuite, Sample, Score, ToolInvoked, TrialContext, open_store
from fairtrial.runs import RunEvent
from fairtrial.store.compress import decompress

SECRET = "sk-live-4f0c9a77e2b1d38e"


def test_a_secret_that_user_code_lets_slip_reaches_neither_store_nor_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_PROVIDER_API_KEY", SECRET)

    async def leaky(given: str, ctx: TrialContext) -> str:
        ctx.session.record(ChatMessage("user", f"the key is {SECRET}"))
        ctx.session.record(ToolInvoked("curl", {"header": f"Bearer {SECRET}"}, {"url": f"https://u:{SECRET}@host/"}))
        if given == "raise":
            raise RuntimeError(f"401 for {SECRET}")
        return f"{given} {SECRET}"

    def judge(output: str, expected: str) -> Score:
        if output.startswith("score"):
            raise ValueError(f"cannot judge {output}")
        return Score(1.0, reason=f"it says {output}")

    class Talkative:
        def publish(self, event: RunEvent) -> None:
            raise RuntimeError(f"bus of {SECRET}")

    dataset = Dataset([Sample(name, name, SECRET, {"note": SECRET}) for name in ("fine", "raise", "score")])
    store = open_store(f"sqlite:///{tmp_path}/runs.db")
    suite = EvalSuite("leaky", dataset, leaky, judge)
    with caplog.at_level(logging.DEBUG):
        report = suite.run_sync(store=store, bus=Talkative(), tags={"key": SECRET})
        errors = [str(result.error) for result in report.results]
    store.close()
    assert "the run goes on" in caplog.text
    assert SECRET not in caplog.text
    assert "[redacted]" in caplog.text
    assert sum("[redacted]" in error for error in errors) == 2
    for file in tmp_path.iterdir():
        assert SECRET.encode() not in file.read_bytes()
    with sqlite3.connect(tmp_path / "runs.db") as database:
        transcripts = [row[0] for row in database.execute("SELECT transcript FROM details")]
    database.close()
    assert len(transcripts) == 3
    for transcript in transcripts:
        plain = decompress(transcript)
        assert SECRET.encode() not in plain
        assert b"[redacted]" in plain
