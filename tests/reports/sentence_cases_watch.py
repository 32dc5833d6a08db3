"""Cases that print the sentences of the watch over daily runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fairtrial import Metric, Score, TrialKey
from fairtrial.reports.watch.alarm import watch_alarm
from fairtrial.store.memory import MemoryStore
from fairtrial.store.notes import SAMPLING_WEIGHT, SamplingNote, write_notes
from fairtrial.store.protocol import RunStore
from tests.reports.build import result, stored
from tests.reports.sentence_cases import case, shown
from tests.reports.watched import DAY, FIRST, nightly

DROP = [0.9] * 20 + [0.6] * 6


def answer(store: RunStore, days: int = 26, **given: Any) -> Iterator[str]:
    found = watch_alarm(store, "suite", now=FIRST + days * DAY, **given)
    yield from (*shown(found), found.text)


def daily(trials: list[list[Any]], **common: Any) -> RunStore:
    store = MemoryStore()
    for number, own in enumerate(trials):
        stored(own, run_id=f"r{number}", store=store, created_at=FIRST + number * DAY, **common)
    return store


def anchored(agreeing: int, later: int, *, n: int = 40) -> RunStore:
    truth = [place % 2 == 0 for place in range(n)]
    metadata: list[Any] = [*({} for _ in range(100)), *({"anchor": one} for one in truth)]
    days = []
    for number in range(26):
        agree = agreeing if number < 20 else later
        judged = [float(one == (place < agree)) for place, one in enumerate(truth)]
        days.append([float(place >= (10 if number < 20 else 40)) for place in range(100)] + judged)
    return daily(days, metadata=metadata)


@case
def a_quiet_watch() -> Iterator[str]:
    yield from answer(nightly(DROP[:20]))
    yield from answer(nightly(DROP[:20], n=20), reference=200)
    languages = [{"lang": "de" if place % 3 else "en" if place else "fr"} for place in range(100)]
    yield from answer(nightly(DROP[:20], metadata=languages), by="lang")
    graded = [[Score(1.0, metrics=[Metric("f1", 0.9, bounds=(0, 1), higher_is_better=True)])] * 100] * 20
    yield from answer(daily(graded), metric="f1")


@case
def too_little_to_watch() -> Iterator[str]:
    yield from answer(nightly(DROP[:3]))
    yield from answer(nightly(DROP[:10]))
    yield from answer(daily([["scorer_error"] * 5, ["scorer_error"]]))


@case
def an_alarm_of_a_watch() -> Iterator[str]:
    changed = {0: {"code_hash": "a" * 12}, 20: {"code_hash": "b" * 12}}
    yield from answer(nightly(DROP, by_day=changed))
    yield from answer(nightly([0.9] * 20 + [0.7] * 30, n=30), days=60, reference=300)
    days = [[float(place % 10 != 1 and not (number > 20 and place % 5 == 0)) for place in range(100)]
            for number in range(30)]  # fmt: skip
    yield from answer(
        daily(days, metadata=[{"lang": "de" if place % 5 == 0 else "en"} for place in range(100)]), by="lang"
    )
    for agreeing, later, n in ((38, 38, 40), (38, 10, 40), (6, 6, 6)):
        yield from answer(anchored(agreeing, later, n=n))


@case
def a_watch_with_gaps() -> Iterator[str]:
    store = nightly(DROP[:20])
    stored([1.0], run_id="open", store=store, status="interrupted", created_at=FIRST + 3 * DAY)
    stored(["scorer_error"] * 2 + [1.0] * 98, run_id="last", store=store, created_at=FIRST + 20 * DAY)
    key, ordinal = TrialKey("last", "baseline", "s0"), 0
    store.commit("last", [replace(result(key, ordinal, 1.0), cache_hits=2, attempt=2)])
    yield from answer(store)
    changing = MemoryStore()
    for number in range(4):
        stored([1.0] * 200, run_id=f"r{number}", store=changing, created_at=FIRST + number * DAY,
               fingerprint=f"{number:032}", inputs=[f"{number} {place}" for place in range(200)])  # fmt: skip
    yield from answer(changing, reference=200)
    pruned = nightly(DROP)
    pruned.delete_run("0")
    yield from answer(pruned)


@case
def sampled_live_traces() -> Iterator[str]:
    metadata = [{SAMPLING_WEIGHT: 100.0 if place % 2 else 5.0} for place in range(60)]
    trials = [
        Score(float(place % 7 > 0), metrics=[Metric("seconds", 1.0 + place % 5, higher_is_better=False)])
        for place in range(60)
    ]
    note = SamplingNote("2026-10-01", 0.01, ("error=true:0.2",), 5.0, ((FIRST, 0.5),), 9_000, 2, 1)
    for rates in (note.rates, (*note.rates, (FIRST, 0.0))):
        notes = write_notes(sampling=replace(note, rates=rates))
        yield from shown(stored(trials, metadata=metadata, notes=notes))
