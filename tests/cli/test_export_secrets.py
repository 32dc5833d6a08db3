"""Whatever the format of an export, no secret that a trial let slip is in it."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import cast

import pytest

from fairtrial import EvalReport, open_store
from fairtrial.cli.command_export import FORMATS
from fairtrial.data.session.views import RecordedView
from fairtrial.store import redact
from tests.cli.conftest import Cli

SECRET = "zq7-4f0c9a77e2b1d38e-Xy"  # Without the shape of a credential: known by its variable alone.
LEAKY = """
from fairtrial import (
    ChatMessage, Dataset, EvalConfig, EvalSuite, Metric, PromptExecuted, Sample, Score, TokenUsage, ToolCall,
    ToolInvoked, TrialContext, task,
)

KEY = "zq7-4f0c9a77" + "e2b1d38e-Xy"


@task(inline=True)
def leaks(question: str, ctx: TrialContext) -> dict:
    with ctx.session.span("span " + KEY):
        ctx.session.record(ChatMessage("user", question + KEY))
        ctx.session.record(PromptExecuted("p" + KEY, "a", "m" + KEY, TokenUsage(3, 4), "stop"))
        ctx.session.record(ChatMessage("assistant", KEY, (ToolCall("curl", {"key": KEY}, "c" + KEY),)))
        ctx.session.record(ToolInvoked("curl" + KEY, {"key": KEY}, {KEY: KEY}, False, "bad " + KEY))
        ctx.session.record(ChatMessage("tool", KEY, name="c" + KEY))
        ctx.session.record(ChatMessage("assistant", "done with " + KEY))
    if question == "raise":
        raise RuntimeError("401 for " + KEY)
    return {"answer": question + KEY, "list": [KEY], "repeat": ctx.key.repeat}


def judge(output: dict, expected: object) -> Score:
    if output["answer"].startswith("score"):
        raise ValueError("cannot judge " + KEY)
    good = output["repeat"] == 0
    metrics = [Metric("m" + KEY, 1.0, passed=good, reason=KEY)]
    return Score(float(good), good, "because of " + KEY, metrics, name="n" + KEY)


samples = [Sample(name, name) for name in ("fine", "raise", "score")]
suite = EvalSuite("leaky", Dataset(samples, name="leaky"), leaks, judge, config=EvalConfig(repeats=2))
"""


def content(path: Path) -> bytes:
    """All that a file says, unpacked."""
    if path.suffix in (".zip", ".eval"):
        with zipfile.ZipFile(path) as archive:
            return b"".join(archive.read(name) for name in archive.namelist())
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return repr(parquet.read_table(path).to_pydict()).encode()
    if path.suffix == ".db":
        store = open_store(str(path))
        (run,) = store.runs()
        results = list(EvalReport(store, run).results)
        found = repr([(result, result.output, result.score, result.error, result.metadata) for result in results])
        found += repr([cast(RecordedView, result.session).everything().envelopes for result in results])
        store.close()
        return path.read_bytes() + found.encode()
    return path.read_bytes()


@pytest.mark.parametrize("format", sorted(set(FORMATS) - {"tokens"}))  # Which has numbers only.
def test_no_export_has_a_secret(cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    monkeypatch.setattr(redact, "_registered", {})
    monkeypatch.setenv("MY_PROVIDER_API_KEY", SECRET)
    Path("evals.py").write_text(LEAKY)
    cli("run", "evals.py", "--quiet")
    words = ["--trace-content"] if format in ("otlp", "langsmith") else []
    written = cli("export", "leaky", "--format", format, "--json", *words)
    assert written.code == 0, written.err
    found = content(Path(written.json["file"]))
    assert SECRET.encode() not in found
    assert b"redacted" in found
    assert SECRET not in written.out + written.err
