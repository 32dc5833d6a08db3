"""Plan the samples, repeats and cost of a comparison from earlier runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fairtrial import stats
from fairtrial.base.formatting import count, duration, level, mean_text, money, rate, round_samples, size_text
from fairtrial.base.frozen import first_is
from fairtrial.data.session.events import PromptExecuted
from fairtrial.data.session.session import restore_session
from fairtrial.data.session.views import RecordedView, kind_of
from fairtrial.errors import ConfigurationError
from fairtrial.reports.compare.compare import side_names
from fairtrial.reports.compare.verdicts import added_variance
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns, refuse_weighted
from fairtrial.reports.figures.metrics import (
    PASSED,
    SMALLEST_DIFFERENCE,
    VALUE,
    ExperimentSource,
    is_ratio,
    is_verdict,
    measured_metric,
)
from fairtrial.reports.plan.spread import HistorySide, Spread, fewest_units, spread_of
from fairtrial.reports.plan.test_split import TestGain, TestSplit, next_test
from fairtrial.reports.render.renderable import Renderable
from fairtrial.reports.report import EvalReport, ExperimentReport, sources_of
from fairtrial.store.protocol import Totals

if TYPE_CHECKING:
    from fairtrial.reports.render.document import Document

REPEATS = (1, 3, 5)
"""The numbers of repeats that a plan answers for, unless told otherwise."""

_DEFAULT_CONCURRENCY = 10
_CALL = kind_of(PromptExecuted)
_IN_BATCHES = frozenset({"openai", "anthropic"})
_LOOKED_AT = 200  # Trials whose calls are counted.
_MOST_SAMPLES = 10**12  # No plan names more; the search for a number ends at 2**50, which then would be taken for it.


@dataclass(frozen=True, slots=True)
class PlanOption:
    """Samples, time and cost of a comparison with this many repeats. Unknown values are None.

    `samples` and `clusters` find the difference with the power asked for; `trials`, `tokens`, `cost_usd` and
    `duration_ms` are those of both sides together. `se` and `detectable` are the standard error of the difference and
    the minimum detectable difference with the samples that there are, `present_cost_usd` what comparing on those costs.
    """

    repeats: int
    samples: int | None
    clusters: int | None
    trials: int | None
    tokens: int | None
    cost_usd: float | None
    duration_ms: float | None
    se: float | None
    detectable: float | None
    present_cost_usd: float | None


@dataclass(frozen=True, slots=True)
class TrialCosts:
    """Mean tokens, time and cost of a trial in earlier runs; None if unknown.

    `complete` is False if some calls have no known price or were answered from a cache: a new run may cost more.
    `priced` is False if there were calls and none has a known price. `turns` is the largest number of calls of a trial,
    one after the other, that `run --batch` would send in batches, of the trials that were looked at. `batched` is True
    if they were sent in batches: then the costs are at half price.
    """

    trials: int
    tokens: float | None
    cost_usd: float | None
    latency_ms: float | None
    concurrency: int
    complete: bool
    priced: bool = True
    turns: int = 0
    batched: bool = False


@first_is(str)
@dataclass(frozen=True, slots=True, repr=False)
class SamplePlan(Renderable):
    """The number of samples needed to detect a difference, for several numbers of repeats.

    `samples`, `clusters` and `repeats` are those of the cheapest option, or of the cheapest that makes do with the
    samples there are. `between` and `within` are the variances of the difference between samples and between repeats of
    one; `within` is None if no earlier run has repeats. `unequal` is the share of samples on which the two sides are
    expected to disagree; None unless they pass or fail. `best_repeats` is the number of repeats at which the cost is
    least, from the cost of a sample and of a trial. `test_split` is what the test split can show, if the runs are on a
    split of a dataset.
    """

    json_format: ClassVar[str] = "fairtrial.plan/1"

    suite: str
    metric: str
    difference: float
    power: float
    alpha: float
    tests: int
    samples: int | None
    clusters: int | None
    repeats: int
    options: tuple[PlanOption, ...]
    present_samples: int | None
    present_clusters: int | None
    between: float
    within: float | None
    unequal: float | None
    best_repeats: float | None
    costs: TrialCosts | None
    assumptions: tuple[str, ...]
    sentence: str
    test_split: TestGain | None = None

    def document(self, cases: int) -> Document:
        """Return what is shown; a plan has no single trials, whatever `cases` is."""
        from fairtrial.reports.plan.document import plan_document

        return plan_document(self)

    def __repr__(self) -> str:
        return f"<SamplePlan: {self.sentence}>"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The parameters of a plan.

    `tests` None stands for as many as a comparison makes unless metrics are named: one, or two if values are not just
    0 and 1. `sample_cost_usd` is what one new sample costs to make, labels included.
    """

    difference: float
    metric: str = PASSED
    power: float = 0.8
    alpha: float = 0.05
    repeats: tuple[int, ...] = REPEATS
    tests: int | None = None
    sample_cost_usd: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("power", self.power), ("alpha", self.alpha)):
            if not 0 < value < 1:
                raise ConfigurationError(f"{name} must be between 0 and 1 (got {value!r})")
        if not 0 < self.difference < math.inf:
            raise ConfigurationError(f"the difference must be a number above 0, such as 0.05 (got {self.difference!r})")
        if is_verdict(self.metric) and self.difference >= 1:
            raise ConfigurationError(
                f"a difference of pass rates must be below 1 (got {self.difference:g}): 0.05 is five points"
            )
        if not self.repeats or any(one < 1 for one in self.repeats):
            raise ConfigurationError(f"repeats must be whole numbers of at least 1 (got {self.repeats!r})")
        if self.tests is not None and self.tests < 1:
            raise ConfigurationError(f"tests must be a whole number of at least 1 (got {self.tests!r})")
        if not 0 <= self.sample_cost_usd < math.inf:
            raise ConfigurationError(f"the cost of a sample must be at least 0 (got {self.sample_cost_usd!r})")

    @property
    def level(self) -> float:
        """The confidence level of each test."""
        return 1 - self.alpha / (self.tests or 1)

    @property
    def shift(self) -> float:
        """The difference on the scale of the spread: of a ratio, that of logarithms."""
        return math.log1p(self.difference) if is_ratio(self.metric) else self.difference


def plan(
    *history: EvalReport | ExperimentReport,
    difference: float = SMALLEST_DIFFERENCE,
    metric: str = PASSED,
    power: float = 0.8,
    alpha: float = 0.05,
    repeats: Sequence[int] | int = REPEATS,
    tests: int | None = None,
    cluster: str | None = None,
    sample_cost_usd: float = 0.0,
) -> SamplePlan:
    """Plan how many samples and repeats are needed to detect a difference, and their cost.

    Earlier runs show how often two sides differ on the same samples, how much repeats of a sample vary, and what a
    trial costs. Their observed difference is not used, because it is mostly chance. Values that no run shows are
    assumed and listed in `assumptions`.

    Args:
        *history: Reports of earlier runs, or experiments of them, newest first; none for the worst case.
        difference: The true difference to detect: .05 is five points of a pass rate.
        metric: The metric to compare: "passed", "value", or a metric of an earlier run.
        power: The probability of detecting it.
        alpha: The accepted chance of a false alarm, over all tests.
        repeats: The numbers of repeats to plan for.
        tests: The number of metrics and candidates that are compared together, which share alpha. By default that of
            `compare` for two sides: one, or two if there are values other than 0 and 1.
        cluster: The metadata key that groups samples that are not independent; None for that of the runs, "" for none.
        sample_cost_usd: The cost of making a new sample, labels included; it affects the best number of repeats.
    """
    sources = [source for report in history for source in sources_of(report)]
    wanted = (repeats,) if isinstance(repeats, int) else tuple(dict.fromkeys(repeats))
    request = PlanRequest(difference, metric, power, alpha, wanted, tests, sample_cost_usd)
    return plan_sources(sources, request, cluster)


def plan_sources(sources: Sequence[ExperimentSource], request: PlanRequest, cluster: str | None) -> SamplePlan:
    """Plan from the experiments of earlier runs, newest first."""
    metrics = {measured_metric(request.metric), PASSED, VALUE}
    sides = [
        HistorySide(
            read_columns(source, metrics=metrics, cluster=cluster, name=name).analysed_prefix(),
            name,
            source.run.run_id,
            source.name,
            (source.run.code_hash or source.run.run_id, repr(source.run.params.get(source.name))),
        )
        for source, name in zip(sources, side_names(sources), strict=True)
    ]
    suite = sources[0].run.suite if sources else ""
    return plan_columns(sides, request, suite=suite, costs=_costs(sources), test=next_test(sources))


def plan_columns(
    sides: Sequence[HistorySide],
    request: PlanRequest,
    *,
    suite: str = "",
    costs: TrialCosts | None = None,
    test: TestSplit | None = None,
) -> SamplePlan:
    """Plan from columns: a pure function. The observed difference is not used."""
    refuse_weighted([side.columns for side in sides], "a plan")
    latest = sides[0].columns if sides else None
    if request.tests is None:
        graded = any(not _agree(side.columns) for side in sides) or (not sides and request.metric == VALUE)
        request = replace(request, tests=2 if graded and request.metric in (PASSED, VALUE) else 1)
    if sides and not any(
        np.isfinite(side.columns.values.get(measured_metric(request.metric), np.empty(0))).any() for side in sides
    ):
        raise ConfigurationError(
            f"the metric {request.metric!r} must be one that an earlier run has (got none with a number in it)"
        )
    spread, assumptions = spread_of(sides, request.metric)
    unequal = spread.share if spread.binary else None
    if unequal is not None:
        if spread.within is not None:
            assumptions[0] += f" Two single trials of a sample differ in {rate(unequal)} of cases."
        adds = f" A true difference of {size_text(request.difference, percent=True)} adds to that:"
        assumptions[0] += f"{adds} {rate(min(1.0, unequal + request.difference))} are assumed to differ."
    options = tuple(_option(repeats, spread, unequal, request, latest, costs) for repeats in request.repeats)
    chosen = _cheapest(options, request, None if latest is None else latest.planned)
    best = _best_repeats(spread, request, costs)
    assumptions += _about_repeats(spread, best, request)
    assumptions += _about_clusters(spread)
    assumptions += _about_costs(costs)
    assumptions.append(_about_test(request))
    present = None if latest is None else latest.planned
    return SamplePlan(
        suite=suite,
        metric=request.metric,
        difference=request.difference,
        power=request.power,
        alpha=request.alpha,
        tests=request.tests or 1,
        samples=chosen.samples,
        clusters=chosen.clusters,
        repeats=chosen.repeats,
        options=options,
        present_samples=present,
        present_clusters=None if latest is None or latest.clusters is None else int(np.unique(latest.clusters).size),
        between=spread.between,
        within=spread.within,
        unequal=unequal,
        best_repeats=best,
        costs=costs,
        assumptions=tuple(assumptions),
        sentence=_sentence(chosen, request, present),
        test_split=None if test is None else _gain(test, chosen.repeats, spread, unequal, request),
    )


def _gain(test: TestSplit, repeats: int, spread: Spread, unequal: float | None, request: PlanRequest) -> TestGain:
    look = replace(request, alpha=test.alpha(request.alpha))
    _, detectable = _by_pairs(repeats, spread, unequal, look, test.samples)
    return test.gain(request.metric, request.alpha, request.power, repeats, detectable)


def _agree(columns: Columns) -> bool:
    """True if all values are passes or failures."""
    passed, values = (columns.values.get(name) for name in (PASSED, VALUE))
    return passed is None or values is None or np.array_equal(passed, values, equal_nan=True)


def _option(
    repeats: int,
    spread: Spread,
    unequal: float | None,
    request: PlanRequest,
    latest: Columns | None,
    costs: TrialCosts | None,
) -> PlanOption:
    present = None if latest is None else latest.planned
    needed, detectable = _by_pairs(repeats, spread, unequal, request, present)
    samples = None if needed is None or needed > _MOST_SAMPLES else round_samples(needed)
    clusters = None
    if samples is not None and spread.clusters is not None:
        clusters = math.ceil(samples * spread.clusters / spread.n)
    trials = None if samples is None else 2 * samples * repeats
    return PlanOption(
        repeats=repeats,
        samples=samples,
        clusters=clusters,
        trials=trials,
        tokens=None if trials is None or costs is None or costs.tokens is None else round(trials * costs.tokens),
        cost_usd=_cost(trials, costs, new=0 if samples is None else samples - (present or 0), request=request),
        duration_ms=None
        if trials is None or costs is None or costs.latency_ms is None
        else trials * costs.latency_ms / costs.concurrency,
        se=None if not present else math.sqrt(spread.variance(repeats) / present),
        detectable=detectable,
        present_cost_usd=_cost(None if not present else 2 * present * repeats, costs, new=0, request=request),
    )


def _by_pairs(
    repeats: int, spread: Spread, unequal: float | None, request: PlanRequest, present: int | None
) -> tuple[int | None, float | None]:
    """Return the samples that detect the difference, and the difference that the existing samples detect."""
    asked = {"level": request.level, "power": request.power}
    needed: int | stats.Undefined
    detectable: float | stats.Undefined | None = None
    if unequal is not None and spread.clusters is None and (repeats == 1 or spread.within is None):
        needed = stats.pairs_to_detect(unequal, request.difference, **asked)
        if present:
            detectable = stats.pairs_mde(present, unequal, **asked)
    else:
        variance = spread.variance(repeats)
        size = 1.0 if spread.clusters is None else spread.n / spread.worth  # Samples per independent unit.
        # Where a side passes what it failed before, the two disagree there: the difference brings its own variance.
        extra = 0.0 if unequal is None else added_variance(request.difference, repeats)
        units = 1_000_000
        se = math.sqrt((variance + extra) / (units * size))
        needed = stats.samples_to_detect(
            round(units * size), se or 1e-9, request.shift, units=units, df=spread.df, excess=spread.excess, **asked
        )
        if present and present / size >= 2:
            shift = stats.smallest_detectable(1.0, present / size - 1, excess=spread.excess, **asked)
            # It solves d = shift * SE(d), where a difference of d brings its own variance, as above.
            added = 0.0 if unequal is None else added_variance(1.0, repeats) * shift**2 / present
            detectable = (added + math.sqrt(added**2 + 4 * shift**2 * variance / present)) / 2
            if is_ratio(request.metric):
                detectable = math.expm1(detectable)
            if spread.bounded and detectable > 1:
                detectable = None
    size = 1.0 if spread.clusters is None else spread.n / spread.clusters
    return (
        None if isinstance(needed, stats.Undefined) else max(needed, math.ceil(fewest_units(request.metric) * size)),
        None if isinstance(detectable, stats.Undefined) else detectable,
    )


def _cost(trials: int | None, costs: TrialCosts | None, *, new: int, request: PlanRequest) -> float | None:
    if trials is None or costs is None or costs.cost_usd is None:
        return None
    return trials * costs.cost_usd + max(0, new) * request.sample_cost_usd


def _cheapest(options: Sequence[PlanOption], request: PlanRequest, present: int | None) -> PlanOption:
    """Return the cheapest option with the existing samples, if one is enough; else the cheapest of all."""

    def price(option: PlanOption) -> tuple[bool, bool, float, int]:
        samples = option.samples
        fits = samples is not None and present is not None and samples <= present
        cost = option.cost_usd if option.cost_usd is not None else float(option.trials or math.inf)
        return samples is None, not fits, cost, option.repeats

    return min(options, key=price)


def _best_repeats(spread: Spread, request: PlanRequest, costs: TrialCosts | None) -> float | None:
    """Return the cheapest number of repeats, sqrt(within c_sample / (between c_trial)). Cochran (1977)."""
    if not spread.within or not spread.between or costs is None or not costs.cost_usd or not request.sample_cost_usd:
        return None
    return max(1.0, math.sqrt(spread.within * request.sample_cost_usd / (spread.between * 2 * costs.cost_usd)))


def _sentence(chosen: PlanOption, request: PlanRequest, present: int | None) -> str:
    percent, relative = is_verdict(request.metric), is_ratio(request.metric)
    name = "the pass rate" if request.metric == PASSED else request.metric
    aim = f"a true difference of {size_text(request.difference, percent=percent, relative=relative)} in {name}"
    often = "four times in five" if abs(request.power - 0.8) < 1e-9 else f"in {level(request.power)} of runs"
    if chosen.samples is None:
        return f"No feasible number of samples is enough to detect {aim} {often}."
    size = count(chosen.samples, "sample")
    if chosen.clusters is not None:
        size = f"{count(chosen.clusters, 'cluster')} like these ({size})"
    price = "" if chosen.cost_usd is None else f" for {money(chosen.cost_usd)}"
    text = (
        f"About {size} with {count(chosen.repeats, 'repeat')}: they detect {aim} {often}, in "
        f"{count(chosen.trials or 0, 'trial')} of two sides{price}."
    )
    if present is None:
        return text
    if chosen.samples <= present:
        are = "sample is" if present == 1 else "samples are"
        return f"{text} The {present:,} existing {are} enough with {count(chosen.repeats, 'repeat')}."
    existing = f"the {count(present, 'existing sample')}"
    if chosen.detectable is not None:
        seen = size_text(chosen.detectable, percent=percent, relative=relative)
        text = f"{text} With {count(chosen.repeats, 'repeat')}, {existing} {'detects' if present == 1 else 'detect'} "
        text += f"{seen} or more."
        # Half of a difference in pass rates is assumed to flip whole samples.
        return f"{text} That is an upper bound: what flips few samples shows sooner." if percent else text
    return f"{text} With {existing}, even the largest difference might be missed."


def _about_repeats(spread: Spread, best: float | None, request: PlanRequest) -> list[str]:
    if request.repeats == (1,):
        return []
    if spread.within is None:
        return ["No earlier run has repeats: they are assumed to agree every time, so that more of them do not help."]
    total = spread.between + spread.within
    if total <= 0:
        return ["Repeats and samples agreed every time."]
    share = f"{'' if spread.between > 0 else 'up to '}{rate(spread.within / total)}"
    line = f"Differences between repeats of one sample are {share} of the variance. More repeats reduce only this part."
    if best is not None:
        cheapest = "1 repeat costs" if best < 1.05 else f"{best:.1f} repeats cost"
        line += f" At {money(request.sample_cost_usd)} for a new sample, {cheapest} least."
    return [line]


def _about_clusters(spread: Spread) -> list[str]:
    if spread.clusters is None:
        return []
    size = spread.n / spread.clusters
    text = count(round(size), "sample") if size == round(size) else f"{mean_text(size, percent=False)} samples"
    return [f"New samples come in new clusters like the {spread.clusters:,} that were seen ({text} on average)."]


def _about_costs(costs: TrialCosts | None) -> list[str]:
    if costs is None:
        return []
    parts = [
        *([] if costs.tokens is None else [f"{costs.tokens:,.0f} tokens"]),
        *([] if costs.cost_usd is None else [money(costs.cost_usd)]),
        *([] if costs.latency_ms is None else [duration(costs.latency_ms)]),
    ]
    if not parts:
        return []
    lines = [
        f"A trial takes {', '.join(parts)} (mean of {count(costs.trials, 'trial')}); {costs.concurrency} run at once."
    ]
    if costs.cost_usd is not None and not costs.complete:
        lines.append("Some calls had no known price or came from a cache: a new run may cost more.")
    elif not costs.priced:
        lines.append("The price of its calls is not known.")
    if costs.turns:
        calls = "a call" if costs.turns == 1 else f"up to {count(costs.turns, 'call')}, each after the one before,"
        batches, days = count(costs.turns, "batch", "batches"), count(costs.turns, "day")
        if costs.batched:
            lines.append(f"These costs are of batches: trials of {calls} wait for {batches}, at most {days}.")
        else:
            lines.append(f"With --batch, trials of {calls} wait for {batches}: half the price, in at most {days}.")
    return lines


def _about_test(request: PlanRequest) -> str:
    tests = "one test" if request.tests == 1 else f"{request.tests} tests together"
    return f"Compared by {tests}, at {level(1 - request.alpha)}; task errors and timeouts count as failures."


def _costs(sources: Sequence[ExperimentSource]) -> TrialCosts | None:
    """Return the mean cost of a trial over these experiments."""
    totals: list[Totals] = []
    for run_id, store in {source.run.run_id: source.store for source in sources}.items():
        names = {source.name for source in sources if source.run.run_id == run_id}
        totals += [one for one in store.totals(run_id) if one.experiment in names]
    trials = sum(sum(one.outcomes.values()) - one.outcomes.get("not_run", 0) for one in totals)
    if not trials:
        return None
    timed = sum(one.timed for one in totals)
    tokens = sum(one.input_tokens + one.output_tokens for one in totals)
    priced = [one for one in totals if one.cost_usd is not None or one.judge_cost_usd is not None]
    concurrency = sources[0].run.config.get("max_concurrent")
    return TrialCosts(
        trials=trials,
        tokens=tokens / trials if tokens else None,
        cost_usd=sum(one.total_cost_usd for one in priced) / trials if priced else None,
        latency_ms=sum(one.latency_sum for one in totals) / timed if timed else None,
        concurrency=concurrency if isinstance(concurrency, int) and concurrency > 0 else _DEFAULT_CONCURRENCY,
        priced=bool(priced) or not any(one.unpriced_calls or one.unpriced_judge_calls for one in totals),
        complete=not any(one.unpriced_calls or one.unpriced_judge_calls or one.cache_hits for one in totals),
        turns=_turns(sources[0]),
        batched=sources[0].run.noted.batches is not None,
    )


def _turns(source: ExperimentSource) -> int:
    """Return the largest number of turns with calls that can be sent in batches, of trials spread over a run."""
    run_id, done = source.run.run_id, source.store.done(source.run.run_id)
    stored = [ordinal for ordinal in range(source.run.planned) if done[ordinal >> 3] >> (ordinal & 7) & 1]
    looked_at = stored[:: math.ceil(len(stored) / _LOOKED_AT) or 1]
    snapshots = (source.store.snapshot(run_id, ordinal) for ordinal in looked_at)
    return max((_turns_in(restore_session(one).everything()) for one in snapshots if one is not None), default=0)


def _turns_in(session: RecordedView) -> int:
    """Return the largest number of calls of which each began after the one before had ended."""
    turns, last_end = 0, -math.inf
    for event in session.envelopes:  # Calls are recorded when they end.
        if event.kind == _CALL and event.data["adapter"] in _IN_BATCHES:
            took = ((event.data.get("duration_ms") or 0.0) + (event.data.get("waited_ms") or 0.0)) / 1000
            # The clock of the events may be adjusted while a call waits for hours.
            if event.time - took >= last_end - took / 1000 - 0.001:
                turns, last_end = turns + 1, event.time
    return turns
