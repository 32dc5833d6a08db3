"""`fairtrial watch`: alarms on stored runs, and their notifications over real HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fairtrial import Dataset, EvalSuite, open_store
from tests.cli.conftest import Cli
from tests.cli.test_notify import Webhook, webhook
from tests.reports.watched import DAY, FIRST, day, nightly

__all__ = ["webhook"]

DROP = [0.9] * 15 + [0.6] * 3
LONG = "a-suite-with-a-name-that-is-far-too-long-for-any-table-of-ours"


@pytest.fixture
def runs(place: Path) -> str:
    """Return the address of a store with a suite that is quiet, one that has dropped, and one with two days."""
    url = f"sqlite:///{place / 'daily.db'}"
    store = open_store(url)
    changed = {0: {"code_hash": "a" * 12}, 15: {"code_hash": "b" * 12}}
    nightly(DROP[:14], store=store, suite="quiet")
    nightly(DROP, store=store, suite="dropped", by_day=changed)
    nightly(DROP[:2], store=store, suite="new")
    languages = [{"language": "long " * 30 + str(place % 2)} for place in range(100)]
    nightly(DROP, store=store, suite=LONG, fingerprint="0" * 32, metadata=languages)
    store.close()
    return url


@pytest.mark.parametrize(("suite", "code"), [("quiet", 0), ("dropped", 1), ("new", 3)])
def test_the_exit_code_says_whether_quality_has_dropped(cli: Cli, runs: str, suite: str, code: int) -> None:
    done = cli("watch", "alarm", suite, "--store", runs)
    assert (done.code, done.err) == (code, "")
    facts = cli("watch", "alarm", f"{suite}:baseline", "--store", runs, "--json")
    assert facts.code == code
    assert facts.json["status"] == {0: "quiet", 1: "alarm", 3: "too little data"}[code]
    assert facts.json["format"] == "fairtrial.alarm/1"


def test_the_screen_says_since_when_and_what_changed(cli: Cli, runs: str) -> None:
    out = " ".join(cli("watch", "alarm", "dropped", "--store", runs).out.split())
    assert f"alarm: passed has dropped, likely since {day(15)}" in out
    assert f"{day(15)}: code: aaaaaaaa -> bbbbbbbb" in out
    assert "--since DAY" in out


@pytest.mark.parametrize("columns", [80, 140])
def test_every_line_fits_the_screen(cli: Cli, runs: str, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = cli("watch", "alarm", LONG, "--by", "language", "--store", runs)
    assert done.code == 1
    assert max(map(len, done.out.splitlines())) <= columns


def test_an_alarm_is_posted_with_its_record(cli: Cli, runs: str, webhook: Webhook) -> None:
    assert cli("watch", "alarm", "dropped", "--store", runs, "--notify", webhook.url).code == 1
    (posted,) = webhook.received
    assert posted["alarm"]["system"]["likely"] == day(15)
    assert posted["text"].startswith("fairtrial watch: dropped: alarm: passed has dropped, likely since")


def test_a_webhook_that_is_away_changes_no_exit_code_and_is_said(cli: Cli, runs: str, webhook: Webhook) -> None:
    webhook.statuses = [500, 500, 500]
    done = cli("watch", "alarm", "quiet", "--store", runs, "--notify", webhook.url, "--json")
    assert done.code == 0
    assert "the webhook at 127.0.0.1 could not be notified: HTTP status 500" in done.err
    assert json.loads(done.out)["status"] == "quiet"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["quiet@3"], "a watch needs a suite (got quiet@3)"),
        (["quite"], "there is no run 'quite'"),
        (["quiet", "--every", "often"], "--every must be a number of days (got 'often')"),
        (["quiet", "--every", "0.1d"], "every must be at least 1 day"),
        (["quiet", "--every", "nan"], "every must be at least 1 day"),
        (["quiet", "--reference", "20"], "reference must be at least 200 scores"),
        (["quiet", "--notify", "ftp://x"], "--notify must be the http or https address"),
        (["quiet", "--anchors", "new"], "it has no anchors"),
    ],
)
def test_a_mistake_is_named(cli: Cli, runs: str, words: list[str], said: str) -> None:
    done = cli("watch", "alarm", *words, "--store", runs)
    assert done.code == 2
    assert said in done.err


def traffic(number: int, good: int) -> str:
    """Return a day of recorded traces as lines of OTLP JSON, some of them with a good answer."""
    lines = []
    for place in range(110):
        start = FIRST + number * DAY + place
        texts = {"input.value": f"{number}/{place}?", "output.value": "good" if place < good else "bad"}
        span = {
            "traceId": f"{1000 * number + place + 1:032x}", "spanId": f"{place + 1:016x}", "name": "answer",
            "startTimeUnixNano": str(int(start) * 10**9), "endTimeUnixNano": str((int(start) + 1) * 10**9),
            "attributes": [{"key": key, "value": {"stringValue": text}} for key, text in texts.items()],
        }  # fmt: skip
        lines.append(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    return "\n".join(lines)


def test_recorded_traces_that_were_scored_are_watched_by_the_day_of_their_recording(cli: Cli, place: Path) -> None:
    for number, good in enumerate((100, 100, 100, 100, 60)):
        file = place / f"traffic.{day(number)}.jsonl"
        file.write_text(traffic(number, good))
        assert cli("import", str(file)).code == 0
    assert cli("watch", "alarm", "traffic", "--reference", "200").code == 3
    store = open_store(".fairtrial/runs.db")
    for run in store.runs(suite="traffic"):
        samples = Dataset([sample for _, sample in store.samples(run.run_id)], name="traffic")
        EvalSuite("traffic", samples, str, is_good).rescore_sync(run.run_id, store=store)
    store.close()
    facts = cli("watch", "alarm", "traffic", "--reference", "200", "--json")
    assert facts.code == 1
    assert facts.json["system"]["reference"]["last"] == day(1)
    assert [one["day"] for one in facts.json["system"]["days"]] == [day(2), day(3), day(4)]
    assert facts.json["system"]["likely"] == day(4)


def is_good(output: str) -> float:
    return float(output == "good")


@pytest.mark.parametrize("settle", ["0", "nan", "inf"])
def test_a_settle_time_that_is_none_is_refused_by_the_name_of_its_option(cli: Cli, settle: str) -> None:
    done = cli("watch", "start", "live.py", "--sample", "1", "--settle", settle)
    assert done.code == 2
    assert "--settle must be above 0 seconds" in done.err


def test_settings_of_fleets_and_processes_are_named_as_not_used(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTRIAL_MAILBOX", "redis://127.0.0.1:6379")
    (place / "pyproject.toml").write_text("[tool.fairtrial]\nprocesses = 2\n")
    done = cli("watch", "start", "missing.py", "--sample", "1")
    assert done.code == 2
    for name in ("mailbox", "processes"):
        assert f"the setting {name} is not used" in done.err
