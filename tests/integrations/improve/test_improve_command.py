"""`fairtrial improve`: the demos without a key, an optimizer of one's own, and GEPA killed and continued."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fairtrial import open_store
from fairtrial.cli.app import invoke
from fairtrial.data.session import ChatMessage
from fairtrial.data.splits import SHARES, SplitRequest
from fairtrial.integrations.model_server import BatchOptions, ModelServer, ParsedRequest, Reply
from fairtrial.reports.search.search import SEARCH, find_searches, read_search
from fairtrial.store.protocol import RunStore
from fairtrial.suites.loading import load_module

ROOT = Path(__file__).resolve().parents[3]

OWN = """
def search(searching):
    for text in ("Answer the question. Name the unit.", "Answer the question. Be brief."):
        searching.evaluate(text, searching.validation, [searching.baseline])
"""


FEW = """
import copy

from improve import questions, units

few = copy.copy(units)
few.name = "few"
few.dataset = questions().head(1)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the example, which is the current one."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples" / "improve.py", tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path


def improve(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """Run the command; returns its JSON, or what it prints as an error."""
    assert invoke(["improve", *words, "--json"]) == code
    printed = capsys.readouterr()
    return printed.err if code else json.loads(printed.out)


def test_an_optimizer_is_any_function_and_the_same_command_only_reads(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("improve.py:units", "--parameter", "prompt", "--optimizer", "mine.py:search", "--max-cost", "1")
    found = improve(capsys, *words)
    assert found["format"] == "fairtrial.search/1"
    assert [one["text"] for one in found["candidates"]][1:] == [
        "Answer the question. Name the unit.",
        "Answer the question. Be brief.",
    ]
    assert (found["status"], found["best"]) == ("tested", found["candidates"][1]["id"])
    assert (place / "units.splits.jsonl").is_file()
    runs = len(open_store(".fairtrial/runs.db").runs())
    assert improve(capsys, *words) == found
    assert len(open_store(".fairtrial/runs.db").runs()) == runs
    for row in (place / "units.splits.jsonl").read_text().splitlines()[:1]:
        assert json.loads(row)["shares"] == {"train": 0.5, "validation": 0.2, "test": 0.3}


def test_splits_that_a_project_made_are_used(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import improve\nimprove.questions().split(train=.4, validation=.4, test=.2, seed=5, file='own.jsonl')"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=place)
    before = (place / "own.jsonl").read_bytes()
    words = ("improve.py:units", "--parameter", "prompt", "--optimizer", "mine.py:search", "--max-trials", "400")
    found = improve(capsys, *words, "--splits", "own.jsonl")
    assert (place / "own.jsonl").read_bytes() == before
    rows = [json.loads(line) for line in before.splitlines()[1:]]
    validation = sum(row["split"] == "validation" for row in rows)
    assert found["candidates"][0]["validation"]["samples"] == validation > 90


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("improve.py:units", "--parameter", "prompt"), "a search needs a budget"),
        (("improve.py:units", "--parameter", "style", "--max-cost", "1"), "name one of prompt"),
        (("improve.py:units", "--parameter", "prompt", "--max-cost", "1", "--optimizer", "hill"), "must be FILE:NAME"),
        (
            ("improve.py:units", "--parameter", "prompt", "--max-cost", "1", "--splits", "mine.py"),
            "not a file of splits",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused_before_the_first_trial(
    place: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    assert problem in improve(capsys, "improve.py:units", "--parameter", *words, code=2)
    assert not Path(".fairtrial/runs.db").exists() or not open_store(".fairtrial/runs.db").runs()


@pytest.mark.parametrize(
    ("name", "words", "problem"),
    [
        ("units", ("--parameter", "style"), "name one of prompt"),
        ("units", ("--parameter", "prompt", "--optimizer", "hill"), "must be FILE:NAME"),
        ("few", ("--parameter", "prompt"), "train split of 'distances' is empty: add samples"),
    ],
)
def test_a_search_that_is_refused_writes_no_file_of_splits_and_changes_none(
    place: Path, capsys: pytest.CaptureFixture[str], name: str, words: tuple[str, ...], problem: str
) -> None:
    (place / "suites.py").write_text(FEW)
    assert problem in improve(capsys, f"suites.py:{name}", "--max-cost", "1", *words, code=2)
    assert not list(place.glob("*.splits.jsonl"))
    (place / "kept.jsonl").write_text(json.dumps(SplitRequest(SHARES).header) + "\n")
    before = (place / "kept.jsonl").read_bytes()
    assert problem in improve(capsys, f"suites.py:{name}", "--max-cost", "1", "--splits", "kept.jsonl", *words, code=2)
    assert (place / "kept.jsonl").read_bytes() == before


def test_the_file_of_splits_that_improve_makes_is_the_one_of_the_dataset(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--parameter", "prompt", "--optimizer", "mine.py:search", "--max-trials", "1")
    assert "raise the budget" in improve(capsys, "improve.py:units", *words, code=2)
    units = load_module("improve.py").units
    units.dataset.split(by=units.config.cluster or None, file="own.jsonl")
    assert (place / "units.splits.jsonl").read_bytes() == (place / "own.jsonl").read_bytes()


@pytest.mark.long
def test_the_demo_without_an_effect_claims_ten_points_on_validation_and_shows_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = improve(capsys, "improve.py:nothing", "--parameter", "prompt", "--max-cost", "1.60")
    assert found["validation_gain"] > 0.08
    tested = found["comparison"]["candidates"][0]["metrics"][0]
    assert tested["verdict"] == "no detectable difference"
    assert tested["low"] < 0 < tested["high"]
    assert found["comparison"]["looks"]["numbers"] == [1]
    assert found["cost_usd"] <= 1.60


@pytest.mark.long
def test_the_demo_with_a_gain_finds_and_shows_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = improve(capsys, "improve.py:units", "--parameter", "prompt", "--max-cost", "0.40")
    assert found["comparison"]["candidates"][0]["metrics"][0]["verdict"] == "better"
    winner = next(one for one in found["candidates"] if one["id"] == found["best"])
    assert "Name the unit." in winner["text"]


SUITE = """
from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Sample, Score
from fairtrial.models import OpenAIAdapter

import improve

model = OpenAIAdapter("gpt-5.5", api="chat")


async def answer(question, ctx):
    return (await model.complete(f"{ctx.experiment.params['prompt']} | {question}", session=ctx.session)).text


suite = EvalSuite(
    "far", improve.questions().head(40), answer, improve.names_distance, adapter=model,
    experiments=[Experiment("plain", {"prompt": "Answer the question."})], config=EvalConfig(max_concurrent=1),
)
"""

KILLED_AT = (3, 12, 21, 33, 42)


class Provider:
    """The replies of the demo's model. At some requests it kills the client, which then gets no reply."""

    def __init__(self, folder: Path, kills: tuple[int, ...] = ()) -> None:
        self.folder, self.kills = folder, kills
        self.demo = load_module(str(ROOT / "examples" / "improve.py"))
        self.asked: Counter[str] = Counter()
        self.lost: list[str] = []
        self.client: subprocess.Popen[str] | None = None

    def __call__(self, request: ParsedRequest) -> Reply:
        text = request.last_user
        answered = self.asked.total() - len(self.lost)
        self.asked[text] += 1
        if self.asked.total() in self.kills and self.client is not None:
            self._wait_until_stored(answered)
            os.kill(self.client.pid, signal.SIGKILL)
            self.client.wait()
            self.lost.append(text)
        prompt, mark, question = text.partition(" | ")
        if not mark:
            return Reply(self.demo.propose([ChatMessage("user", text)]))
        return Reply(self.demo.forgetful([ChatMessage("system", prompt), ChatMessage("user", question)]))

    def _wait_until_stored(self, count: int) -> None:
        """Wait until every reply so far is in the store: what is killed then loses one request, and which is known."""
        store = open_store(str(self.folder / ".fairtrial" / "runs.db"))
        deadline = time.monotonic() + 60
        while stored_trials(store) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        store.close()


def stored_trials(store: RunStore) -> int:
    return sum(byte.bit_count() for run in store.runs() if SEARCH in run.tags for byte in store.done(run.run_id))


@pytest.mark.long
def test_gepa_killed_five_times_continues_and_pays_for_no_reply_twice(tmp_path: Path) -> None:
    found = []
    for name, kills in (("whole", ()), ("killed", KILLED_AT)):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(ROOT / "examples" / "improve.py", folder)
        (folder / "far.py").write_text(SUITE)
        provider = Provider(folder, kills)
        with ModelServer(provider) as server:
            environment = {**os.environ, "OPENAI_BASE_URL": f"{server.base_url}/v1", "OPENAI_API_KEY": "sk-test"}
            codes: list[int] = []
            printed = problem = ""
            while not codes or codes[-1] == -signal.SIGKILL:
                words = ["improve", "far.py", "--parameter", "prompt", "--max-trials", "40", "--json"]
                command = [sys.executable, "-m", "fairtrial.cli", *words]
                provider.client = subprocess.Popen(
                    command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
                printed, problem = provider.client.communicate(timeout=300)
                codes.append(provider.client.returncode)
            requests = server.stats().requests
        assert codes == [-signal.SIGKILL] * len(kills) + [0], problem
        store = open_store(str(folder / ".fairtrial" / "runs.db"))
        (search,) = find_searches(store)
        found.append(read_search(store, search))
        assert json.loads(printed)["status"] == "tested"
        # Only the request that each kill interrupted was sent again.
        assert requests == provider.asked.total() == stored_trials(store) + len(kills)
        assert len(provider.lost) == len(kills)
    whole, killed = found
    assert [one.text for one in killed.candidates] == [one.text for one in whole.candidates]
    assert (killed.best, killed.trials) == (whole.best, whole.trials)
    assert killed.comparison is not None
    assert whole.comparison is not None
    assert killed.comparison.candidates[0].metrics == whole.comparison.candidates[0].metrics


@pytest.mark.long
def test_a_search_in_batches_finds_the_same_at_half_the_price(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "far.py").write_text(SUITE)
    (place / "prices.toml").write_text('"gpt-5.5" = {input = 10.0, output = 40.0}')
    monkeypatch.setenv("FAIRTRIAL_PRICES", "prices.toml")
    monkeypatch.setattr("fairtrial.models.batches.sender._TICK_SECONDS", 0.02)
    monkeypatch.setattr("random.uniform", lambda low, high: 0.01)  # Between two questions for the state of a batch.
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    words = ("far.py", "--parameter", "prompt", "--max-trials", "30")
    found: list[Any] = []
    asked: list[int] = []
    provider = Provider(place)
    with ModelServer(provider, batches=BatchOptions(0.05)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.base_url}/v1")
        for name, *option in (("single.db",), ("batched.db", "--batch")):
            found.append(improve(capsys, *words, *option, "--store", name))
            asked.append(provider.asked.total() - sum(asked))
            assert asked[-1] == stored_trials(open_store(name))
        assert len(server.batches().executed) == asked[1] == asked[0]
    single, batched = found
    assert single["status"] == batched["status"] == "tested"
    assert [one["text"] for one in batched["candidates"]] == [one["text"] for one in single["candidates"]]
    assert 0 < batched["cost_usd"] == pytest.approx(single["cost_usd"] / 2)
    assert batched["comparison"]["candidates"][0]["metrics"][0]["verdict"] == "better"
