"""Cases that print the sentences of the product: compare, gate, plan and early stops. Each returns its lines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Sample, Score, StopWhen, TrialContext, compare, gate
from fairtrial.reports import AnalysisPlan, Calibration, Comparison, EvalReport, GateRules, SliceRule
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.methods import methods_paragraph
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.metrics import FAILED, MISSING, SCORED
from fairtrial.reports.gate.gate import GateResult, gate_columns
from fairtrial.reports.plan.plan import PlanRequest, TrialCosts, plan_columns
from fairtrial.reports.plan.spread import HistorySide
from fairtrial.reports.render.document import Cell, Conclusion, Details, Document, Heading, Remarks, Table
from fairtrial.reports.report.experiment import RunReport
from fairtrial.store import open_store
from fairtrial.store.notes import PlanNote, write_notes
from tests.reports.build import stored
from tests.reports.sides import GRADED, one, planned
from tests.reports.test_shown_comparisons import report as changed_report

type Case = Callable[[], Iterator[str]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Register a case under the name of its function."""
    CASES[function.__name__] = function
    return function


def lines_of(document: Document) -> Iterator[str]:
    """Yield every text of a document, a line for each."""
    yield from (document.title, *document.about)
    blocks = [*document.blocks]
    while blocks:
        block = blocks.pop(0)
        if isinstance(block, Details):
            blocks = [*block.blocks, *blocks]
        elif isinstance(block, Conclusion):
            yield f"{block.word}: {block.text}"
        elif isinstance(block, Remarks):
            yield from block.lines
        elif isinstance(block, Heading):
            yield from (block.title, *block.about)
        elif isinstance(block, Table):
            yield block.caption
            yield from (column.title.replace("\n", " ") for column in block.columns)
            for row in block.rows:
                if isinstance(row, tuple):
                    yield from (cell.text if isinstance(cell, Cell) else str(cell) for cell in row)
        else:
            yield str(getattr(block, "caption", ""))


def shown(record: Any) -> Iterator[str]:
    """Yield what is shown of a record: the sentences, and for comparisons their details, notes and methods."""
    yield from lines_of(record.document(0))
    if isinstance(record, GateResult):
        yield from (check.reason for check in record.checks)
    if isinstance(record, RunReport):
        yield from lines_of(record.in_detail().document(0))
        for figures in (part.figures for part in record.parts):
            yield from (
                text or "" for one in (*figures.estimates, *figures.per_trial) for text in (one.note, one.method)
            )
    if isinstance(record, Calibration):
        yield from (figure.method or "" for figure in (record.kappa, record.corrected))
    if isinstance(record, Comparison):
        yield from lines_of(record.in_detail().document(0))
        yield methods_paragraph(record)
        parts: list[Any] = [part for one in record.candidates for part in (one, *one.slices)]
        for metric in (metric for part in parts for metric in part.metrics):
            yield from (metric.sentence, *metric.notes, metric.method or "", metric.test or "")


def passes(name: str, passed: int, n: int, **changes: Any) -> Columns:
    """Columns of which the first `passed` samples pass."""
    return Columns.of({"passed": (np.arange(n) < passed).astype(float)}, name=name, **changes)


def columns(name: str, values: Any, metric: str = "passed", **changes: Any) -> Columns:
    """Columns of one metric, beside passes."""
    return Columns.of({"passed": np.ones(len(values)), metric: values}, name=name, **changes)


def compared(old: Any, new: Any, *metrics: Any, slice_by: Any = (), **settings: Any) -> Iterator[str]:
    """Yield what a comparison of columns says."""
    how = ComparisonSettings(**settings)
    yield from shown(compare_columns(old, [new], metrics=metrics or ["passed"], slice_by=slice_by, settings=how))


def gated(candidate: Columns, baseline: Columns | None = None, **rules: Any) -> Iterator[str]:
    """Yield what a gate of columns says."""
    yield from shown(gate_columns(candidate, GateRules(**rules), baseline))


def draw(seed: int, rate: float, n: int) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).random(n) < rate).astype(float)


def long_tail(sigma: float, n: int) -> np.ndarray[Any, Any]:
    return 1000 * np.exp(sigma * np.random.default_rng(51).normal(size=n) - sigma**2 / 2)


# Comparisons.


@case
def a_difference() -> Iterator[str]:
    yield from shown(compare_columns(passes("old", 40, 100), [passes("new", 90, 100)]))
    yield from shown(compare_columns(passes("old", 40, 100), [columns("new", np.ones(100), "value")]))


@case
def a_difference_below_what_matters() -> Iterator[str]:
    yield from compared(passes("old", 3960, 4000), passes("new", 3900, 4000))


@case
def an_undeclared_direction() -> Iterator[str]:
    yield from compared(columns("old", draw(1, 0.3, 200), "tone"), columns("new", draw(2, 0.7, 200), "tone"), "tone")


@case
def no_difference() -> Iterator[str]:
    yield from compared(columns("old", draw(1, 0.7, 100), "passed"), columns("new", draw(2, 0.7, 100), "passed"))
    yield from compared(passes("old", 5, 5), passes("new", 5, 5))


@case
def equally_good() -> Iterator[str]:
    base, shift = np.repeat([1.0, 0.0], [1600, 400]), np.tile([0.01, -0.01], 1000)
    sides = [
        Columns.of({"passed": base, "value": np.where(base, 0.8, 0.1) + sign * shift}, name=name)
        for name, sign in (("old", 0), ("new", 1))
    ]
    yield from compared(*sides, "passed", "value")


@case
def several_metrics_and_slices() -> Iterator[str]:
    yield from shown(compare(stored(GRADED)["plain"], stored(GRADED)["terse"], metrics=["passed", "value", "calm"]))
    topics = [f"t{place % 40}" for place in range(1600)]
    old = draw(2, 0.5, 1600)
    new = old.copy()
    chosen = [place for place, topic in enumerate(topics) if topic == "t3"]
    new[chosen] = 0.0
    old[chosen] = [float(place % 5 == 0) for place in range(len(chosen))]
    few = [topic if place < 1560 else f"few {place // 5}" for place, topic in enumerate(topics)]
    sides = [
        Columns.of({"passed": v, "value": v[::-1]}, name=n, groups={"topic": few})
        for n, v in (("old", old), ("new", new))
    ]
    yield from compared(*sides, "passed", "value", slice_by="topic")
    change = np.repeat([1.0, -1.0, 0.0], [14, 4, 182])
    sides = [
        Columns.of(
            {"passed": np.maximum(sign * change, 0.0), "value": np.roll(np.maximum(sign * change, 0.0), 7) * 0.5},
            name=name,
        )
        for sign, name in ((-1, "old"), (1, "new"))
    ]
    yield from compared(*sides, "passed", "value")


@case
def several_candidates() -> Iterator[str]:
    others = [columns(f"c{place}", draw(place, 0.7, 100), "passed") for place in range(1, 6)]
    yield from shown(compare_columns(columns("old", draw(9, 0.7, 100), "passed"), others, metrics=["passed"]))
    sizes = [passes("short", 20, 30), passes("long", 40, 60)]
    yield from shown(compare_columns(passes("old", 30, 60), sizes, metrics=["passed"]))
    sides: Mapping[str, Any] = {**GRADED, "other": GRADED["plain"][::-1]}
    report = planned(sides, AnalysisPlan(secondary=("calm", "clear"), tests=2, samples=60))
    yield from shown(compare(report["plain"], report["terse"], report["other"]))
    clusters = ([f"c{place % size}" for place in range(60)] for size in (12, 20))
    sides_of = [passes(name, 40, 60, clusters=list(own)) for name, own in zip(("a", "b"), clusters, strict=True)]
    yield from shown(compare_columns(passes("old", 30, 60), sides_of, metrics=["passed"]))


@case
def clusters() -> Iterator[str]:
    unequal = np.repeat(np.arange(5), [150, 10, 10, 10, 10])
    yield from compared(passes("old", 190, 190, clusters=unequal), passes("new", 0, 190))
    yield from compared(passes("old", 9, 9, clusters=[0, 1, 2] * 3), passes("new", 2, 9))
    equal = np.arange(200) // 10
    sides = [columns(name, draw(seed, 0.7, 200), "passed", clusters=equal) for seed, name in ((1, "old"), (2, "new"))]
    yield from compared(*sides)
    yield from gated(sides[1], sides[0], margin=0.02, min_pass_rate=0.7)
    yield from compared(
        columns("old", np.arange(9.0), "m", clusters=[0, 1, 2] * 3), columns("new", np.arange(9.0) + 1, "m"), "p95:m"
    )


@case
def different_samples() -> Iterator[str]:
    names = [f"s{place}" for place in range(61)]
    yield from compared(passes("old", 30, 31, ids=names[:31]), passes("new", 30, 31, ids=names[30:]))
    yield from compared(passes("old", 3, 30, ids=names[:30]), passes("new", 20, 30, ids=names[30:60]))
    twice = ["s0", "s0", "s1", "s1", *names[2:30]]
    yield from compared(passes("old", 3, 32, ids=twice), passes("new", 20, 30, ids=names[:30]))


@case
def missing_outcomes() -> Iterator[str]:
    outcomes = np.where(np.arange(100) < 12, MISSING, SCORED)
    for size, passed in ((100, 100), (100, 60)):
        yield from compared(passes("old", passed, size), passes("new", size, size, outcomes=outcomes))
    yield from compared(
        columns("old", draw(1, 0.5, 100) + 3, "m"), columns("new", draw(2, 0.5, 100), "m", outcomes=outcomes), "m"
    )


@case
def failures() -> Iterator[str]:
    crashed = np.where(np.arange(100) < 30, FAILED, SCORED)
    yield from compared(passes("old", 60, 100), passes("new", 100, 100, outcomes=crashed))
    sides = [
        columns(name, draw(seed, 0.5, 100) + 3, "m", outcomes=how)
        for seed, name, how in ((1, "old", None), (2, "new", crashed))
    ]
    yield from compared(*sides, "m")
    yield from compared(*sides, "m", lower_is_better=frozenset({"m"}))
    one_crash = stored({"old": [1.0] * 40, "new": ["task_error", *[1.0] * 38, "scorer_error"]})
    yield from shown(compare(one_crash["old"], one_crash["new"]))
    crashes = stored({"old": [1.0] * 40, "new": [*["task_error"] * 2, *[1.0] * 36, *["scorer_error"] * 2]})
    yield from shown(compare(crashes["old"], crashes["new"]))
    yield from compared(passes("old", 1, 2), passes("new", 2, 2, outcomes=np.array([FAILED, FAILED])))


@case
def long_tails() -> Iterator[str]:
    sides = [columns(name, long_tail(sigma, 100), "latency_ms") for name, sigma in (("old", 2.0), ("new", 0.5))]
    for metric in ("latency_ms", "p95:latency_ms", "median:latency_ms", "geomean:latency_ms"):
        yield from compared(*sides, metric)
    zero = columns("free", np.arange(100.0), "latency_ms")
    yield from compared(sides[0], zero, "geomean:latency_ms")
    yield from compared(sides[0].take(np.arange(12)), sides[1].take(np.arange(12)), "p95:latency_ms")
    yield from gated(sides[0], ceilings={"latency_ms": 1000.0})
    yield from gated(sides[0], floors={"latency_ms": 1000.0})
    yield from gated(sides[1], sides[0], margins={"latency_ms": 100.0, "geomean:latency_ms": 0.1})


@case
def changed_questions() -> Iterator[str]:
    same = [True] * 180 + [False] * 20
    edited = {place: {"of": "a letter"} for place in range(60)}
    new = changed_report(same, inputs=edited, expected={70: "no"})
    yield from shown(compare(changed_report(same), new))
    yield from shown(gate(new, {"margin": 0.02}, changed_report(same)))
    yield from shown(compare(changed_report(same), changed_report(same, known=False)))
    alone = changed_report(same, expected={70: "no"})
    yield from shown(gate(alone, {"margin": 0.02, "max_missing_share": 0.001}, changed_report(same)))


@case
def repeated_questions() -> Iterator[str]:
    for inputs, metadata in (
        (["same", "same", *range(38)], None),
        (["same"] * 20 + [*range(20)], None),
        (["same", "same", *range(38)], [{"cluster": place // 2} for place in range(40)]),
        (["a", "b", "a", "b", *range(36)], [{"cluster": place // 2} for place in range(40)]),
        (["a", "b", "a", *range(37)], [{"cluster": place // 2} for place in range(40)]),
    ):
        report = stored({"plain": [1.0] * 20 + [0.0] * 20, "terse": [1.0] * 40}, inputs=inputs, metadata=metadata)
        yield from shown(one(report))


@case
def runs_with_a_history() -> Iterator[str]:
    store = open_store("memory:")
    sides = {"plain": [1.0] * 30, "terse": [0.0] * 30, "other": [1.0] * 30}
    for run_id, status, changes in (
        ("r1", "interrupted", {"identity": {"packages": {"numpy": "1", "scipy": "1"}}}),
        ("r2", "stopped", {"identity": {"packages": {"numpy": "2", "scipy": "1"}}, "evaluator": "other"}),
    ):
        stored(sides, run_id=run_id, store=store, status=status, **changes)
    first, second = (EvalReport(store, store.get_run(run_id)) for run_id in ("r1", "r2"))
    yield from shown(compare(first["plain"], second["terse"]))
    yield from shown(compare(second["plain"], second["terse"]))


# Gates.


@case
def floors_and_ceilings() -> Iterator[str]:
    for floor in (0.5, 0.75, 0.95):
        yield from gated(passes("new", 150, 200), min_pass_rate=floor)
    for ceiling in (0.2, 0.6, 0.99):
        yield from gated(
            columns("new", draw(3, 0.6, 200), "cost", ranges={"cost": (0.0, 1.0)}), ceilings={"cost": ceiling}
        )
    values = columns("new", np.arange(200.0), "latency_ms")
    for limit in (50.0, 193.0, 300.0):
        yield from gated(values, ceilings={"p95:latency_ms": limit})
        yield from gated(values, floors={"median:latency_ms": limit})
    nowhere = SliceRule("topic", "none", min_pass_rate=0.5, ceilings={"p95:latency_ms": 9.0})
    yield from gated(replace(values, groups={"topic": ["some"] * 200}), slices=(nowhere,))
    yield from gated(columns("new", [np.nan] * 5, "tone"), ceilings={"p95:tone": 0.5, "tone": 0.5})
    yield from gated(passes("new", 1, 5), ceilings={"p95:passed": 0.5})


@case
def one_of_many_rules() -> Iterator[str]:
    rules = tuple(SliceRule("topic", min_pass_rate=0.9, margin=0.01, ceilings={"p95:wait": 40.0}) for _ in range(1))
    topics = [f"t{place // 50}" for place in range(500)]
    base, waits = np.ones(500), np.tile(np.arange(50.0), 10)
    bad = base.copy()
    bad[:6], bad[50:63] = 0.0, 0.0
    slow = waits.copy()
    slow[:6] = 41.0 + np.arange(6)
    sides = [
        Columns.of({"passed": values, "wait": late}, name=name, groups={"topic": topics})
        for name, values, late in (("old", base, waits), ("new", bad, slow))
    ]
    yield from gated(sides[1], sides[0], slices=rules)


@case
def margins() -> Iterator[str]:
    for passed, margin in ((195, 0.1), (150, 0.1), (180, 0.1), (195, 0.02), (200, 0.0), (150, 0.0), (199, 0.0)):
        yield from gated(passes("new", passed, 200), passes("old", 200, 200), margin=margin)
    yield from gated(passes("new", 200, 200), passes("old", 150, 200), margin=0.0)
    noisy = [columns(name, draw(seed, 0.7, 300), "passed") for seed, name in ((1, "old"), (2, "new"))]
    yield from gated(noisy[1], noisy[0], margin=0.03)
    values = np.linspace(0.4, 0.6, 20)
    sides = [
        Columns.of({"passed": np.ones(20), "value": values + add * np.sin(np.arange(20))}, name=name)
        for add, name in ((0.0, "old"), (0.01, "new"))
    ]
    yield from gated(sides[1], sides[0], margins={"value": 0.05})
    grouped = [replace(side, clusters=np.arange(20) // 2) for side in sides]
    yield from gated(grouped[1], grouped[0], margins={"value": 0.05})


@case
def gates_with_missing_outcomes() -> Iterator[str]:
    for missing in (1, 4, 12):
        outcomes = np.where(np.arange(100) < missing, MISSING, SCORED)
        new = passes("new", 100, 100, outcomes=outcomes)
        yield from gated(new, passes("old", 100, 100), margin=0.1, min_pass_rate=0.7)
        yield from gated(new, min_pass_rate=0.7, max_missing=0.2)
    for missing in (1, 4):
        outcomes = np.where(np.arange(100) < missing, MISSING, SCORED)
        yield from gated(columns("new", np.arange(100.0), "m", outcomes=outcomes), ceilings={"m": 10.0})


@case
def attempts() -> Iterator[str]:
    report = stored({"old": [1.0] * 80 + [0.0] * 20, "new": [1.0] * 85 + [0.0] * 15})
    store = report.store
    for place in range(22):
        again = replace(report.run, run_id=f"again{place}", code_hash="c" * 8)
        store.create_run(again)
        results = [replace(one, key=one.key._replace(run_id=again.run_id)) for one in store.results(report.run_id)]
        store.commit(again.run_id, results, dict(store.samples(report.run_id)))
        margin = 0.05 if place else 0.02
        found = gate(EvalReport(store, again)["new"], {"margin": margin}, report["old"])
        if place == 21:
            yield from shown(found)


# Plans.


def history(
    *sides: tuple[str, str, Any], clusters: Sequence[int] | None = None, costs: TrialCosts | None = None, **request: Any
) -> Iterator[str]:
    made = [
        HistorySide(Columns.of({"passed": values}, clusters=clusters), f"{name} of {run}", run, name, (run, name))
        for run, name, values in sides
    ]
    yield from shown(plan_columns(made, PlanRequest(**({"difference": 0.05} | request)), costs=costs, suite="qa"))


@case
def plans() -> Iterator[str]:
    yield from history()
    yield from history(power=0.9)
    yield from history(("r", "old", draw(1, 0.7, 100)), ("r", "new", draw(2, 0.7, 100)), tests=2)
    yield from history(("r", "old", draw(1, 0.7, 9000)), ("r", "new", draw(2, 0.7, 9000)))
    yield from history(("r", "old", [1.0]), ("r", "new", [1.0]))
    yield from history(("r", "old", np.ones(100)), ("r", "new", np.ones(100)))
    yield from history(("r", "old", draw(1, 0.7, 100)))
    three = [("r2", "new", draw(1, 0.7, 100)), ("r2", "old", draw(2, 0.7, 100)), ("r1", "old", draw(3, 0.7, 100))]
    yield from history(*three)
    yield from history(("r2", "old", np.ones(4)), ("r2", "new", np.zeros(4)), difference=0.01)


@case
def plans_with_repeats_clusters_and_costs() -> Iterator[str]:
    repeats = [(np.random.default_rng(seed).random((60, 3)) < 0.6).astype(float) for seed in (1, 2)]
    steady = [np.repeat(draw(seed, 0.6, 60)[:, None], 3, axis=1) for seed in (1, 2)]
    steady[0][:20, 0] = 1 - steady[0][:20, 0]
    for cost, pair in ((0.01, repeats), (0.01, steady), (1.0, steady)):
        costs = TrialCosts(120, 900.0, cost, 1500.0, 10, priced=True, complete=True)
        yield from history(("r", "old", pair[0]), ("r", "new", pair[1]), costs=costs, sample_cost_usd=2.0)
    for size in (60, 2400):
        sides = [("r", name, draw(seed, 0.6, size)) for seed, name in ((1, "old"), (2, "new"))]
        yield from history(*sides, clusters=(np.arange(size) % 12).tolist())
    version = ("same", "same")
    sides_of = [
        HistorySide(Columns.of({"passed": draw(seed, 0.7, 100)}), f"old of {run}", run, "old", version)
        for seed, run in ((1, "r2"), (2, "r1"))
    ]
    yield from shown(plan_columns(sides_of, PlanRequest(difference=0.05)))


@case
def plans_of_long_tails() -> Iterator[str]:
    sides = [
        HistorySide(Columns.of({"passed": np.ones(300), "ms": long_tail(seed, 300)}, name=name), name, name, "baseline")
        for seed, name in ((1, "old"), (2, "new"))
    ]
    for metric, difference in (("ms", 100.0), ("median:ms", 100.0), ("geomean:ms", 0.2)):
        yield from shown(plan_columns(sides, PlanRequest(difference, metric)))
    yield from shown(plan_columns(sides[:1], PlanRequest(100.0, "ms")))


@case
def plans_that_nothing_meets() -> Iterator[str]:
    yield from history(difference=1e-9)


# Analysis plans.


@case
def analyses_as_planned() -> Iterator[str]:
    plan = AnalysisPlan("passed", secondary=("calm",), samples=60)
    report = planned(GRADED, plan)
    yield from shown(one(report))
    yield from shown(gate(report["terse"], {"margin": 0.05}, report["plain"]))


@case
def deviations_from_a_plan() -> Iterator[str]:
    sides = {**GRADED, "third": GRADED["plain"]}
    plan = AnalysisPlan(
        "calm",
        secondary=("polite",),
        samples=90,
        repeats=2,
        slices=("topic",),
        cluster="page",
        margins={"calm": 0.1, "geomean:clear": 0.2},
        min_pass_rate=0.5,
    )
    metadata = [{"kind": place % 2, "page": place // 3} for place in range(60)]
    note = PlanNote(plan.digest, plan.content, 1e9, results=3, earlier=("suite@7",))
    late = PlanNote("ab" * 32, AnalysisPlan("passed").content, 2e9, results=9)
    missing = {name: [*["scorer_error"] * 6, *rows[6:]] if name == "terse" else rows for name, rows in sides.items()}
    report = stored(
        missing, notes=write_notes(plans=[note, late]), metadata=metadata, parent_run="r0", status="stopped"
    )
    labels = {name: {f"s{place}": place % 2 == 0 for place in range(6, 30)} for name in ("plain", "terse", "third")}
    choice: dict[str, Any] = {
        "slice_by": "kind",
        "cluster": "kind",
        "alpha": 0.1,
        "bounds": {"clear": (0.0, 1.0)},
        "smallest_difference_that_matters": 0.2,
    }
    yield from shown(
        compare(report["plain"], report["terse"], report["third"], metrics=["passed", "clear"], labels=labels, **choice)
    )
    rules = GateRules(
        0.4,
        margins={"calm": 0.05, "geomean:clear": 0.1},
        ceilings={"clear": 0.9},
        slices=(SliceRule("kind", min_pass_rate=0.1),),
        max_missing=0.2,
        cluster="",
    )
    yield from shown(gate(report["terse"], rules, report["plain"]))
    rest = AnalysisPlan("passed", max_missing=0.02, samples=60)
    other = planned(GRADED, rest)
    yield from shown(compare(other["plain"], other["terse"], smallest_difference_that_matters=0.2))
    yield from shown(gate(report["terse"], GateRules(margin=0.1), report["plain"]))
    yield from shown(gate(other["terse"], GateRules(margin=0.05), stored(GRADED, run_id="r9")["plain"]))
    yield from shown(compare(planned(GRADED, AnalysisPlan("calm"), run_id="r5")["plain"], other["terse"]))
    yield from shown(compare(stored(GRADED, run_id="r6")["plain"], other["terse"], cluster=""))
    yield from shown(report)
    looked = stopped(StopWhen(decides=("old", "new")), 0.4, 0.9, n=10, plan=AnalysisPlan())
    yield from shown(looked)


# Early stops.


def stopped(
    rule: StopWhen, old: float, new: float, n: int, *, unscored: bool = False, plan: AnalysisPlan | None = None
) -> EvalReport:
    def task(number: int, ctx: TrialContext) -> float:
        rate = old if ctx.experiment.name == "old" else new
        return float(random.Random(f"{number} {ctx.experiment.name}").random() < rate)

    def grade(output: float, expected: float) -> Score:
        if unscored and output:
            raise RuntimeError("it broke")
        return Score(output)

    data = Dataset([Sample(f"s{place}", place, 1.0) for place in range(n)])
    config = EvalConfig(stop_when=rule, max_concurrent=8)
    suite = EvalSuite("qa", data, task, grade, experiments=[Experiment("old"), Experiment("new")], config=config)
    return suite.run_sync(store="memory:", plan=plan)


@case
def early_stops() -> Iterator[str]:
    for rates in ((0.4, 0.9), (0.7, 0.7)):
        report = stopped(StopWhen(decides=("old", "new")), *rates, n=40)
        yield from shown(report)
        comparison = compare(report["old"], report["new"])
        yield from shown(comparison)
        yield from shown(
            gate(report["new"], {"min_pass_rate": 0.85, "margin": 0.02, "ceilings": {"p95:passed": 0.5}}, report["old"])
        )
