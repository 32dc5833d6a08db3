"""What a report says: every rate and mean with its interval and n, the errors beside them, and the trials to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fairtrial import formatting
from fairtrial.analysis.estimates import Estimate
from fairtrial.analysis.experiment import ExperimentAnalysis, RunAnalysis
from fairtrial.analysis.figures import Figures
from fairtrial.analysis.metrics import CRITERION, ERRORS, is_verdict
from fairtrial.render import plots
from fairtrial.render.adaptive_remarks import adaptive_remarks
from fairtrial.render.document import (
    Bar,
    Block,
    Case,
    Cases,
    Column,
    Content,
    Document,
    Plot,
    Remarks,
    Section,
    Table,
    Tone,
)
from fairtrial.render.safe_text import plain, shown
from fairtrial.scoring.score import Metric
from fairtrial.store.protocol import IMPORTED, RunRecord, RunStore
from fairtrial.trials.result import EvalResult

_TITLES = {
    "pass_rate": "pass rate",
    "pass_rate_all": "pass rate, errors as failures",
    "mean_score": "mean score",
    "mean_score_all": "mean score, errors as 0",
    "mean_reward": "mean reward",
}
_SHORT = {"pass_rate_all": "with errors as failures", "mean_score_all": "with errors as 0"}
_MAY_REPEAT = (
    ("pass_rate_all", "pass_rate"),
    ("mean_score", "pass_rate"),
    ("mean_score_all", "mean_score"),
    ("mean_score_all", "pass_rate_all"),
)
_DRAWN_CRITERIA = 12
_DRAWN = ("pass_rate", "pass_rate_all", "mean_score")
_CUT, _NAME = 4_000, 80


def report_document(analysis: RunAnalysis, cases: int) -> Document:
    """What there is to say about a run, or about some of its experiments, with at most `cases` trials to read."""
    run, parts = analysis.run, analysis.parts
    figures = {part.name: part.figures for part in parts}
    blocks: list[Block] = [_estimates(figures), _counts(parts), _costs(parts), Remarks(tuple(_remarks(run, parts)))]
    if cases:
        blocks[3:3] = _plots(figures)
        blocks += _cases(analysis.store, run, parts, cases)
    return Document(_title(run), (_about(run, parts),), tuple(blocks))


def _title(run: RunRecord) -> str:
    took = "" if run.finished_at is None else f" in {formatting.duration((run.finished_at - run.created_at) * 1000)}"
    return f"{plain(run.suite, limit=_NAME)}  run {run.run_id}, {run.status}{took}"


def _about(run: RunRecord, parts: Sequence[ExperimentAnalysis]) -> str:
    total, planned = sum(part.total for part in parts), sum(part.planned for part in parts)
    repeats = f", {run.repeats} repeats" if run.repeats > 1 else ""
    dataset, evaluator = plain(run.dataset_name, limit=_NAME), plain(run.evaluator, limit=_NAME)
    return (
        f"dataset {dataset} ({formatting.count(run.dataset_size, 'sample')}), {total:,} of {planned:,} trials"
        f"{repeats}, scored by {evaluator}"
    )


def title_of(name: str) -> str:
    """What people call an estimate."""
    if name.startswith(CRITERION):
        return f"pass rate of {name.removeprefix(CRITERION)}"
    return _TITLES.get(name, name)


def is_rate(estimate: Estimate) -> bool:
    """Whether an estimate is a share, which people read in percent."""
    return is_verdict(estimate.metric)


def value(estimate: Estimate, number: float | None) -> str:
    """A value of an estimate in words."""
    return formatting.rate(number) if is_rate(estimate) else formatting.number(number)


def span(estimate: Estimate) -> str:
    """The interval of an estimate in words."""
    if estimate.low is None or estimate.high is None:
        return formatting.UNDEFINED
    return f"{value(estimate, estimate.low)} to {value(estimate, estimate.high)}"


def bar(estimate: Estimate, bounds: tuple[float, float] | None) -> Bar | None:
    """The interval of an estimate to draw; None where it is undefined or its scale is unknown."""
    if estimate.low is None or estimate.high is None or estimate.value is None or bounds is None:
        return None
    return Bar(estimate.low, estimate.value, estimate.high, *bounds)


def _names(figures: Mapping[str, Figures]) -> list[str]:
    """The estimates to show; those that only repeat others are left out, and a remark says so."""
    names = dict.fromkeys(estimate.name for found in figures.values() for estimate in found.estimates)
    repeated = _repeated(figures)
    return [name for name in names if name not in repeated]


def _repeated(figures: Mapping[str, Figures]) -> list[str]:
    """Estimates that have the same figures as another in every experiment: a mean of 0s and 1s is a pass rate."""
    criteria = _criteria(figures)
    may_repeat = [*_MAY_REPEAT, *((criterion, CRITERION + criterion) for criterion in criteria)]
    if len(criteria) == 1:  # All that is judged, so that its figures are those of the score.
        may_repeat += [(CRITERION + criteria[0], "pass_rate"), (criteria[0], "mean_score")]
    return [name for name, other in may_repeat if _same(figures.values(), name, other)]


def _criteria(figures: Mapping[str, Figures]) -> list[str]:
    names = dict.fromkeys(estimate.name for found in figures.values() for estimate in found.estimates)
    return [name.removeprefix(CRITERION) for name in names if name.startswith(CRITERION)]


def _same(figures: Iterable[Figures], name: str, other: str) -> bool:
    pairs = [(_key(figure.get(name)), _key(figure.get(other))) for figure in figures]
    return all(one == two for one, two in pairs) and any(one is not None for one, _ in pairs)


def _key(estimate: Estimate | None) -> tuple[object, ...] | None:
    if estimate is None:
        return None
    numbers = (estimate.value, estimate.low, estimate.high)
    # Sums in another order differ by a hair.
    return (*(None if number is None else round(number, 12) for number in numbers), estimate.n, estimate.trials)


def _estimates(figures: Mapping[str, Figures]) -> Table:
    found = list(figures.values())
    levels = {figure.level for figure in found}
    repeats = any(estimate.trials != estimate.n for figure in found for estimate in figure.estimates)
    clusters = any(estimate.clusters is not None for figure in found for estimate in figure.estimates)
    columns = [
        Column("", "left", name=True),
        Column("estimate"),
        Column(f"{formatting.level(levels.pop())} interval" if len(levels) == 1 else "interval"),
        Column("samples" if repeats or clusters else "n"),
        *([Column("trials")] if repeats else []),
        *([Column("clusters")] if clusters else []),
        Column("0 to 1", "left", bar=True),
    ]
    rows: list[tuple[Content, ...] | Section] = []
    criteria = _criteria(figures)
    section = ""
    for name in _names(figures):
        if len(figures) > 1:
            rows.append(Section(f"mean of {name}" if name in criteria else title_of(name)))
        elif (new := _section(name, criteria)) != section:
            rows.append(Section(section := new))
        for experiment, figure in figures.items():
            estimate = figure.get(name)
            label = experiment if len(figures) > 1 else _label(name, criteria)
            if estimate is None:
                undefined = [formatting.UNDEFINED] * (2 + clusters)
                rows.append((label, *undefined[:2], "0", *["0"] * repeats, *undefined[2:], None))
                continue
            rows.append(
                (
                    label,
                    value(estimate, estimate.value),
                    span(estimate),
                    f"{estimate.n:,}",
                    *([f"{estimate.trials:,}"] if repeats else []),
                    *(
                        [formatting.UNDEFINED if estimate.clusters is None else f"{estimate.clusters:,}"]
                        if clusters
                        else []
                    ),
                    bar(estimate, figure.bounds[name]),
                )
            )
    return Table("", tuple(columns), tuple(rows))


def _section(name: str, criteria: Sequence[str]) -> str:
    """The heading under which an estimate stands in the table of one experiment."""
    if name in criteria or name.startswith(CRITERION):
        return "criteria"
    return "metrics" if criteria and name not in _TITLES and not name.startswith(("pass@", "pass^")) else ""


def _label(name: str, criteria: Sequence[str]) -> str:
    if name.startswith(CRITERION):
        return name.removeprefix(CRITERION)
    return f"{name}, mean" if name in criteria else _SHORT.get(name, title_of(name))


def _counts(parts: Sequence[ExperimentAnalysis]) -> Table:
    """Trials by outcome: kinds of errors that did not occur are shown too, as 0, but for dead letters."""
    lost = any(part.errors.get("dead_letter") for part in parts)
    columns = [
        Column("trials", "left", name=True),
        *(Column(title) for title in ("planned", "scored", "task\nerrors", "scorer\nerrors", "timeouts")),
        *([Column("dead\nletters")] if lost else []),
        Column("not\nrun"),
    ]
    kinds = [kind for kind in ERRORS if kind != "dead_letter" or lost]
    rows = [
        (
            part.name,
            *(f"{count:,}" for count in (part.planned, part.successful)),
            *(f"{part.errors.get(kind, 0):,}" for kind in kinds),
            f"{part.not_run:,}",
        )
        for part in parts
    ]
    return Table("", tuple(columns), tuple(rows))


def _costs(parts: Sequence[ExperimentAnalysis]) -> Table:
    judged = any(part.totals.judge_cost_usd is not None or part.totals.unpriced_judge_calls for part in parts)
    cached = any(part.cache_hits for part in parts)
    titles = [
        *("mean\nlatency", "slowest\ntrial", "tokens"),
        *(("task\ncost", "judge\ncost") if judged else ("cost",)),
        *(("from\ncache",) if cached else ()),
    ]
    rows = [
        (
            part.name,
            formatting.duration(part.mean_latency_ms),
            formatting.duration(part.totals.latency_max if part.totals.timed else None),
            f"{part.total_tokens:,}" if part.total_tokens else formatting.UNDEFINED,
            formatting.cost(part.cost_usd, part.totals.unpriced_calls),
            *((formatting.cost(part.judge_cost_usd, part.totals.unpriced_judge_calls),) if judged else ()),
            *((formatting.count(part.cache_hits, "call"),) if cached else ()),
            part.totals.slowest or "",
        )
        for part in parts
    ]
    columns = (
        Column("time and cost", "left", name=True),
        *(Column(title) for title in titles),
        Column("slowest sample", "left", name=True),
    )
    return Table("", columns, tuple(rows))


def _origin(run: RunRecord) -> Iterator[str]:
    """Where an imported run came from, and how it differs from what the source says."""
    origin = run.notes.get(IMPORTED)
    if isinstance(origin, Mapping):
        yield f"Imported: {plain(str(origin.get('format')))} {plain(str(origin.get('source')))}."
        remarks = origin.get("remarks")
        for remark in remarks if isinstance(remarks, Sequence) and not isinstance(remarks, str) else ():
            yield f"{plain(str(remark))[:1].upper()}{plain(str(remark))[1:]}."


def _remarks(run: RunRecord, parts: Sequence[ExperimentAnalysis]) -> Iterator[str]:
    yield from _origin(run)
    repeated = _repeated({part.name: part.figures for part in parts})
    if "pass_rate_all" in repeated:
        yield "With errors as failures, the figures are the same."
    if "mean_score" in repeated:
        yield "The mean score has the same figures as the pass rate."
    yield from adaptive_remarks(run)
    if run.repeats > 1:
        yield "Repeats are averaged within each sample first, so that an interval is as wide as its samples deserve."
    for part in parts:
        label = f"{part.name}: " if len(parts) > 1 else ""
        figures = part.figures
        yield from _split(figures, label)
        by_note: dict[str, list[str]] = {}
        for estimate in figures.estimates:
            if estimate.note:
                by_note.setdefault(estimate.note, []).append(title_of(estimate.name))
        for note, names in by_note.items():
            whose = "" if len(names) == len(figures.estimates) else f" ({', '.join(names)})"
            yield f"{label}{note}{whose}"
    if run.status == "unscored":
        count = sum(part.errors.get("scorer_error", 0) for part in parts)
        trials = formatting.count(count, "trial")
        yield f"{trials} could not be scored; the same command again scores them without their task."
    stopped = run.notes.get("stopped")
    if stopped:
        yield f"ended early: {stopped}"
    if run.code_versions > 1:
        versions = formatting.number_word(run.code_versions)
        yield f"results of {versions} code versions: the code changed while the run was unfinished"


def _split(figures: Figures, label: str) -> Iterator[str]:
    split = figures.split
    if split is not None and split.correlation is not None:
        yield (
            f"{label}{formatting.rate(split.correlation)} of the variance of passing lies between samples, the rest "
            "between repeats of one sample: more repeats can shrink only the rest."
        )


def _plots(figures: Mapping[str, Figures]) -> list[Block]:
    rows = []
    repeated = _repeated(figures)
    criteria = _criteria(figures)
    for name in (*_DRAWN, *(CRITERION + criterion for criterion in criteria[:_DRAWN_CRITERIA])):
        if name in repeated:
            continue
        title = title_of(name) if name in _DRAWN else name.removeprefix(CRITERION)  # Drawn, little of a name fits.
        if len(figures) > 1:
            rows.append(plots.IntervalRow(title, None, ""))
        for experiment, figure in figures.items():
            estimate = figure.get(name)
            if estimate is not None:
                text = f"{value(estimate, estimate.value)} ({span(estimate)})"
                label = experiment if len(figures) > 1 else title
                rows.append(plots.IntervalRow(label, bar(estimate, figure.bounds[name]), text))
    panels = []
    for experiment, figure in figures.items():
        mean = figure.get("mean_score")
        panels.append(plots.Distribution(experiment, figure.distribution, None if mean is None else mean.value))
    blocks: list[Block] = [Plot("Intervals", plots.intervals(rows, "Estimates with their intervals", percent=False))]
    if any(sum(panel.counts) for panel in panels):
        blocks.append(Plot("Scores", plots.distributions(panels, "How the scores of trials are distributed")))
    return blocks


def _cases(store: RunStore, run: RunRecord, parts: Sequence[ExperimentAnalysis], limit: int) -> list[Block]:
    only = parts[0].name if len(parts) == 1 else None
    broken = sum(sum(part.errors.values()) for part in parts)
    failed = sum(part.successful - part.totals.passed for part in parts)
    errors = store.results(run.run_id, experiment=only, outcomes=ERRORS, limit=limit)
    failures = store.results(run.run_id, experiment=only, passed=False, limit=limit)
    blocks: list[Block] = []
    for name, total, results in (("Errors", broken, errors), ("Did not pass", failed, failures)):
        if total:
            showing = f", the first {limit:,} shown" if total > limit else ""
            caption = f"{name}: {formatting.count(total, 'trial')}{showing}"
            blocks.append(Cases(caption, total, min(limit, total), _read(results, run, several=len(parts) > 1)))
    return blocks


def _read(results: Iterable[EvalResult], run: RunRecord, *, several: bool) -> Iterator[Case]:
    for result in results:
        title = result.sample_id
        if several:
            title = f"{result.experiment}: {title}"
        if run.repeats > 1:
            title = f"{title} (repeat {result.repeat})"
        yield case(result, title)


def criterion_text(metric: Metric) -> str:
    """A criterion in words: its verdict, its name, its value unless it is plainly 0 or 1, and why."""
    verdict = "passed" if metric.passed else "failed"
    value = "" if metric.value == float(bool(metric.passed)) else f" with {metric.value:g}"
    return f"{verdict}{value}  {metric.name}{f': {metric.reason}' if metric.reason else ''}"


def case(result: EvalResult, title: str) -> Case:
    """A trial to read."""
    score = result.score
    facts = [("input", shown(result.sample.input)), ("expected", shown(result.sample.expected))]
    tone: Tone = "bad"
    if score is None:
        facts.append(("error", result.error or ""))
        tone = "unsure"
        if result.output is not None:
            facts.append(("output", shown(result.output)))
        outcome = result.outcome.replace("_", " ")
    else:
        facts += [("output", shown(result.output)), ("reason", score.explain())]
        if len(score.criteria) > 1:
            facts.append(("criteria", "\n".join(map(criterion_text, score.criteria))))
        tracked = [f"{m.name} {formatting.number(m.value)}" for m in score.metrics if m.passed is None]
        facts.append(("metrics", "\n".join(tracked)))
        if score.reward != score.value:
            facts.append(("reward", formatting.number(score.reward)))
        outcome, tone = ("passed", "good") if score.passed else ("failed", "bad")
        outcome = f"{outcome} with {score.value:g}"
    return Case(title, outcome, tone, tuple((label, text[:_CUT]) for label, text in facts if text))
