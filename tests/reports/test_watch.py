"""The watch over daily runs: what counts, what an alarm names, and what it says about the judge."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from fairtrial import GateRules, Metric, Score, compare, gate
from fairtrial.errors import ConfigurationError
from fairtrial.reports.watch.alarm import watch_alarm
from fairtrial.reports.watch.watched import WatchAlarm
from fairtrial.store.memory import MemoryStore
from fairtrial.store.notes import SAMPLING_WEIGHT, ImportNote, SamplingNote, write_notes
from fairtrial.store.protocol import RunStore
from fairtrial.store.sql import SqlStore
from tests.reports.build import stored
from tests.reports.watched import DAY, FIRST, day, nightly

QUIET = [0.9] * 30
DROP = [0.9] * 25 + [0.7] * 8
NOW = FIRST + 33 * DAY


def watch(store: RunStore, **given: Any) -> WatchAlarm:
    return watch_alarm(store, "suite", **{"now": NOW, **given})


def test_days_without_a_change_are_quiet() -> None:
    found = watch(nightly(QUIET))
    assert (found.status, found.exit_code, found.changes) == ("quiet", 0, ())
    reference = found.system.reference
    assert reference is not None
    assert (reference.first, reference.last, reference.scores) == (day(0), day(9), 1_000)
    assert reference.bound < 0.9
    assert len(found.system.days) == 20
    assert 0 < found.system.evidence < 1
    assert [one.days for one in found.system.detectable if one.days] == sorted(
        (one.days for one in found.system.detectable if one.days), reverse=True
    )
    assert "at most once in 1,000 days on average" in found.system.sentence


def test_an_alarm_names_the_day_its_range_and_what_changed_then() -> None:
    changed = {
        0: {"code_hash": "a" * 12, "params": {"baseline": {"prompt": "Be kind.", "top": 1}}},
        25: {"code_hash": "b" * 12, "params": {"baseline": {"prompt": "Be quick.", "top": 1}}},
    }
    found = watch(nightly(DROP, by_day=changed))
    assert (found.status, found.exit_code) == ("alarm", 1)
    system = found.system
    assert system.likely == day(25)
    assert str(system.earliest) <= day(25) <= str(system.latest) <= str(system.alarm_on)
    assert system.days[-1].day == system.alarm_on
    assert system.since is not None
    assert system.since < 0.8
    assert {(one.day, one.what, one.before, one.after) for one in found.changes} == {
        (day(25), "code", "aaaaaaaa", "bbbbbbbb"),
        (day(25), "parameter prompt", "Be kind.", "Be quick."),
    }
    assert f"likely since {day(25)}" in found.to_markdown()
    assert "parameter prompt: Be kind. " in found.to_markdown()


def test_a_day_before_the_range_changes_nothing_that_is_named() -> None:
    found = watch(nightly(DROP, by_day={0: {"code_hash": "a" * 12}, 12: {"code_hash": "b" * 12}}))
    assert found.status == "alarm"
    assert found.changes == ()
    assert "Nothing that runs record changed" in found.to_markdown()


@pytest.mark.parametrize(
    ("days", "reference", "said"),
    [(5, 1_000, "there are 500 scores in 5 days"), (10, 1_000, "no day after the reference"), (2, 200, "no day after")],
)
def test_too_little_data_is_not_quiet(days: int, reference: int, said: str) -> None:
    found = watch(nightly(QUIET[:days]), reference=reference)
    assert (found.status, found.exit_code) == ("too little data", 3)
    assert said in found.system.sentence


def test_a_second_look_and_later_days_do_not_change_an_alarm() -> None:
    store = nightly(DROP)
    first = watch(store)
    nightly([0.95] * 5, store=store, seed=8, suite="other")
    assert watch(store) == first
    longer = watch(nightly([*DROP, *([0.9] * 20)]), now=FIRST + 60 * DAY)
    assert (longer.system.alarm_on, longer.system.likely) == (first.system.alarm_on, first.system.likely)


def test_a_new_watch_has_a_new_reference() -> None:
    store = nightly([*DROP, *([0.75] * 20)])
    found = watch(store, since=day(26), reference=500)
    assert found.status == "quiet"
    assert found.system.reference is not None
    assert found.system.reference.first == day(26)
    assert watch(store, since=day(26).replace("-", ""), reference=500) == found


def test_runs_of_one_day_are_taken_together_and_others_are_left_out() -> None:
    store = nightly(QUIET[:12])
    extra: dict[str, Any] = {"store": store, "created_at": FIRST + 11 * DAY + 600}
    stored([1.0] * 100, run_id="second", **extra)
    stored([0.0] * 100, run_id="unfinished", status="interrupted", **extra)
    stored([0.0] * 100, run_id="rescored", parent_run="second", **extra)
    stored([0.0] * 100, run_id="changed", fingerprint="0" * 32, **{**extra, "created_at": FIRST + 5 * DAY})
    found = watch(store)
    assert found.system.days[-1].scores == 200
    assert found.system.scores == 1_300
    said = "Left out: 1 unfinished run and 1 run on another version of the dataset."
    assert said in found.remarks


def test_errors_of_the_system_are_failures_and_those_of_scoring_are_left_out() -> None:
    store = nightly(QUIET[:10])
    stored(["task_error"] * 40 + ["scorer_error"] * 20 + [1.0] * 40, store=store, created_at=FIRST + 10 * DAY)
    found = watch(store)
    assert found.system.days[0].scores == 80
    assert found.system.days[0].mean == 0.5
    assert "20 trials could not be scored and are left out." in found.remarks


def test_slices_share_the_rate_and_the_one_that_dropped_is_named() -> None:
    metadata = [{"lang": "de" if place % 5 == 0 else "en"} for place in range(100)]
    store = MemoryStore()
    for number in range(30):
        broken = number >= 20
        trials = [float(place % 10 != 1 and not (broken and place % 5 == 0)) for place in range(100)]
        stored(trials, run_id=f"r{number}", store=store, created_at=FIRST + number * DAY, metadata=metadata)
    found = watch(store, by="lang")
    assert (found.status, found.system.slice) == ("alarm", "lang = de")
    assert found.system.watched_slices == ("lang = de", "lang = en")
    assert "where lang = de" in found.system.sentence
    with pytest.raises(ConfigurationError, match="no sample of suite 'suite' has 'nothing'"):
        watch(store, by="nothing")


def anchors(agree: int, n: int = 40) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return trials and metadata of anchors: half should pass; `agree` of them are judged as people do."""
    truth = [place % 2 == 0 for place in range(n)]
    scores = [float(one) if place < agree else float(not one) for place, one in enumerate(truth)]
    return scores, [{"anchor": one} for one in truth]


def with_anchors(rates: list[float], agreeing: list[int]) -> RunStore:
    rng, store = random.Random(4), MemoryStore()
    for number, (rate, agree) in enumerate(zip(rates, agreeing, strict=True)):
        scores, metadata = anchors(agree)
        trials = [float(rng.random() < rate) for _ in range(100)] + scores
        facts: list[Any] = [*({} for _ in range(100)), *metadata]
        stored(trials, run_id=f"r{number}", store=store, created_at=FIRST + number * DAY, metadata=facts)
    return store


def test_a_drop_with_a_steady_judge_points_to_the_system() -> None:
    found = watch(with_anchors([0.9] * 20 + [0.6] * 6, [38] * 26))
    assert found.judge is not None
    assert (found.system.status, found.judge.status) == ("alarm", "quiet")
    assert found.system.days[0].scores == 100
    assert "which points to the system" in found.to_markdown()


def test_a_judge_that_drifts_has_an_alarm_of_its_own() -> None:
    found = watch(with_anchors([0.9] * 20 + [0.6] * 6, [38] * 20 + [15] * 6))
    assert found.judge is not None
    assert (found.system.status, found.judge.status, found.judge.likely) == ("alarm", "alarm", day(20))
    assert "may be that of the judge" in found.to_markdown()
    lenient = watch(with_anchors([0.9] * 26, [38] * 20 + [15] * 6))
    assert (lenient.system.status, lenient.status, lenient.exit_code) == ("quiet", "alarm", 1)
    assert "judge: alarm" in lenient.to_markdown()
    assert "judge: agreement" in lenient.text


def test_anchors_may_be_a_suite_of_their_own() -> None:
    store = nightly(DROP)
    for number in range(33):
        scores, metadata = anchors(38)
        stored(scores, run_id=f"a{number}", store=store, suite="anchors", created_at=FIRST + number * DAY,
               metadata=metadata)  # fmt: skip
    found = watch(store, anchors="anchors")
    assert found.judge is not None
    assert found.judge.status == "quiet"
    with pytest.raises(ConfigurationError, match="it has no anchors"):
        watch(store, anchors="suite")


def test_a_metric_needs_a_range_and_a_direction() -> None:
    store = MemoryStore()
    for number in range(30):
        values = [Score(1.0, metrics=[Metric("words", 40.0 + place % 3 + 30 * (number > 20))]) for place in range(100)]
        stored(values, run_id=f"r{number}", store=store, created_at=FIRST + number * DAY)
    with pytest.raises(ConfigurationError, match="'words' declares none"):
        watch(store, metric="words")
    with pytest.raises(ConfigurationError, match="which way is better"):
        watch(store, metric="words", bounds={"words": (0, 100)})
    with pytest.raises(ConfigurationError, match="no metric 'wrods'"):
        watch(store, metric="wrods")


def test_a_metric_of_which_less_is_better_rises() -> None:
    store = MemoryStore()
    for number in range(30):
        metrics = [[Metric("words", 40.0 + 30 * (number > 20), bounds=(0, 100), higher_is_better=False)]] * 100
        stored([Score(1.0, metrics=one) for one in metrics], run_id=f"r{number}", store=store,
               created_at=FIRST + number * DAY)  # fmt: skip
    found = watch(store, metric="words")
    assert found.status == "alarm"
    assert "words has risen" in found.system.sentence
    assert found.system.since == pytest.approx(70)
    assert found.system.reference is not None
    assert found.system.reference.bound > 40


def test_samples_that_change_every_day_count_once_and_clusters_too() -> None:
    store = MemoryStore()
    for number in range(12):
        rows = [[1.0, 0.0] for _ in range(200)]
        metadata = [{"cluster": f"c{place // 2}"} for place in range(200)]
        stored(rows, run_id=f"r{number}", store=store, created_at=FIRST + number * DAY, fingerprint=f"{number:032}",
               inputs=[f"{number} {place}" for place in range(200)], metadata=metadata)  # fmt: skip
    found = watch(store)
    assert [one.scores for one in found.system.days] == [100] * 2
    assert found.system.days[0].mean == 0.5
    two = watch(store, reference=200)
    assert two.system.reference is not None
    assert two.system.reference.days == 2
    assert any("2 days of changing samples" in line for line in two.remarks)


def test_the_same_samples_count_once_on_a_day() -> None:
    store = MemoryStore()
    for number in range(12):
        for repeated in range(3 if number == 11 else 1):
            note = write_notes(imported=ImportNote("otlp", f"{number}{repeated}.jsonl", "c", 0.0))
            common: dict[str, Any] = {
                "store": store, "fingerprint": f"{number:032}", "inputs": [f"{number} {place}" for place in range(100)],
            }  # fmt: skip
            stored(["scorer_error"] * 100, run_id=f"i{number}{repeated}", notes=note,
                   created_at=FIRST + number * DAY + repeated, **common)  # fmt: skip
            if repeated < 2:
                stored([1.0] * 100, run_id=f"s{number}{repeated}", parent_run=f"i{number}{repeated}",
                       created_at=FIRST + 60 * DAY, **common)  # fmt: skip
    found = watch(store)
    assert [one.scores for one in found.system.days] == [100, 100]
    assert not any("could not be scored" in line for line in found.remarks)
    assert "Left out: 2 runs on samples of another run of its day." in found.remarks


def test_a_reference_whose_runs_were_deleted_is_said_to_have_been_another_one() -> None:
    store = nightly([0.9] * 12 + [0.6] * 20)
    said = "Runs before suite@14 are not in this store"
    assert watch(store).status == "alarm"
    assert not any(line.startswith("Runs before") for line in watch(store).remarks)
    for number in range(13):
        store.delete_run(str(number))
    found = watch(store)
    assert found.status == "quiet"
    assert any(line.startswith(said) for line in found.remarks)
    assert any(line.startswith(said) for line in watch(store, since=day(4)).remarks)
    assert not any(line.startswith(said) for line in watch(store, since=day(13)).remarks)


def test_a_run_that_looked_at_its_results_is_left_out() -> None:
    store = nightly(QUIET[:12])
    store.update_run("11", notes={"adaptive": {"experiments": {}}})
    assert any("1 run with adaptive stopping" in line for line in watch(store).remarks)


def test_old_days_are_said_to_be_old() -> None:
    assert any("5 days ago: nothing was watched since" in line for line in watch(nightly(QUIET), now=NOW + DAY).remarks)
    assert not any("nothing was watched" in line for line in watch(nightly(QUIET), now=FIRST + 30 * DAY).remarks)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every": 0.5}, "every must be at least 1 day"),
        ({"reference": 100}, "reference must be at least 200"),
        ({"since": "yesterday"}, "since must be a day"),
        ({"experiment": "other"}, "no run of suite 'suite' has an experiment 'other'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        watch(nightly(QUIET[:3]), **given)


def test_one_of_several_experiments_must_be_named() -> None:
    store = MemoryStore()
    stored({"a": [1.0], "b": [0.0]}, store=store, created_at=FIRST)
    with pytest.raises(ConfigurationError, match="choose one: suite:a or suite:b"):
        watch(store)
    assert watch(store, experiment="b").experiment == "b"
    with pytest.raises(ConfigurationError, match="no run of suite 'none'"):
        watch_alarm(store, "none")


def test_the_json_has_every_figure() -> None:
    found: Any = watch(nightly(DROP)).to_json()
    assert found["format"] == "fairtrial.alarm/1"
    assert found["status"] == found["system"]["status"] == "alarm"
    assert set(found["system"]["days"][0]) == {"day", "scores", "mean", "evidence"}
    assert found["judge"] is None


def test_the_newest_scoring_of_imported_traces_counts_on_the_day_of_the_traces() -> None:
    store = MemoryStore()
    for number in range(4):
        common: dict[str, Any] = {
            "store": store, "fingerprint": f"{number:032}", "inputs": [f"{number} {place}" for place in range(300)],
        }  # fmt: skip
        note = write_notes(imported=ImportNote("otlp", f"{number}.jsonl", "c", 0.0))
        stored(["scorer_error"] * 300, run_id=f"i{number}", created_at=FIRST + number * DAY, notes=note, **common)
        for scoring, value in enumerate((0.0, 1.0)):
            stored([value] * 300, run_id=f"s{number}{scoring}", parent_run=f"i{number}",
                   created_at=FIRST + (60 + number + scoring) * DAY, **common)  # fmt: skip
    found = watch(store, reference=200)
    assert found.status == "quiet"
    assert [one.day for one in found.system.days] == [day(1), day(2), day(3)]
    assert {one.mean for one in found.system.days} == {1.0}
    assert not any("could not be scored" in line for line in found.remarks)


@pytest.mark.parametrize(("weighted", "status"), [(True, "quiet"), (False, "alarm")])
def test_a_stratum_that_is_taken_more_often_is_no_drop_if_its_weights_say_so(weighted: bool, status: str) -> None:
    rng, store = random.Random(5), MemoryStore()
    for number in range(20):
        share = 0.2 if number < 12 else 1.0  # Of 100 unhappy users a day; of all others 1%.
        failed = round(100 * share)
        trials = [float(rng.random() < 0.9) for _ in range(100)] + [0.0] * failed
        metadata = [{SAMPLING_WEIGHT: 100.0}] * 100 + [{SAMPLING_WEIGHT: 1 / share}] * failed
        notes = write_notes(sampling=SamplingNote(day(number), 0.01)) if weighted else {}
        stored(
            trials,
            run_id=f"r{number}",
            store=store,
            created_at=FIRST + number * DAY,
            metadata=metadata,
            fingerprint=f"{number:032x}",
            notes=notes,
        )
    found = watch_alarm(store, "suite", reference=1000, now=FIRST + 20 * DAY)
    assert found.system.status == status
    if weighted:
        assert found.system.reference is not None
        assert found.system.reference.mean == pytest.approx(0.89, abs=0.02)
        assert any("sampled at several rates" in one for one in found.remarks)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_database_reads_many_runs_at_once_and_says_the_same(tmp_path: Path, weighted: bool) -> None:
    stores, statements = (MemoryStore(), SqlStore.sqlite(tmp_path / "runs.db")), list[str]()
    weights = [{SAMPLING_WEIGHT: 1.0 + place % 3} for place in range(50)] if weighted else None
    for store in stores:
        rng = random.Random(5)
        for number in range(40):
            stored(
                [float(rng.random() < (0.9 if number < 30 else 0.5)) for _ in range(50)],
                run_id=f"r{number}",
                store=store,
                created_at=FIRST + number * DAY / 2,
                metadata=weights,
                fingerprint=f"{number:032x}",
                inputs=[f"{number} {place}" for place in range(50)],
                notes=write_notes(sampling=SamplingNote(day(number // 2), 0.01)) if weighted else {},
            )
    event.listen(stores[1]._engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    now = FIRST + 20 * DAY
    found = [watch_alarm(store, "suite", reference=500, now=now).to_json() for store in stores]
    assert found[0]["status"] == "alarm"
    assert found[1] == found[0]
    assert sum("samples.input_hash IS NOT NULL" in one for one in statements) < 5  # One of each run that is read alone.
    stores[1].close()


def test_figures_that_do_not_allow_for_weights_are_refused() -> None:
    metadata = [{SAMPLING_WEIGHT: 100.0}] * 50 + [{SAMPLING_WEIGHT: 1.0}] * 50
    notes = write_notes(sampling=SamplingNote("2026-10-01", 0.01))
    store = MemoryStore()
    trials = [1.0] * 50 + [0.0] * 50
    sides = [
        stored(trials, run_id=name, suite=name, store=store, metadata=metadata, notes=notes) for name in ("a", "b")
    ]
    assert sides[0].pass_rate == pytest.approx(50 * 100 / (50 * 100 + 50))
    with pytest.raises(ConfigurationError, match="sampled at several rates, for which a comparison has no weights"):
        compare(*sides)
    with pytest.raises(ConfigurationError, match="for which a gate has no weights"):
        gate(sides[0], GateRules(floors={"passed": 0.5}))
