"""The document of a report: estimates with intervals and n, counts, costs and remarks."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fairtrial.base import formatting
from fairtrial.data.splits import FAILURES
from fairtrial.reports.figures.analysis_plan import check_run
from fairtrial.reports.figures.broken_users import BrokenUsers
from fairtrial.reports.figures.error_groups import read_error_groups
from fairtrial.reports.figures.estimates import SHOWN_QUANTILES, Estimate
from fairtrial.reports.figures.figures import Figures
from fairtrial.reports.figures.metrics import (
    COST,
    CRITERION,
    ERRORS,
    NOTHING_SCORED,
    TOKENS,
    code_versions,
    quantile_name,
)
from fairtrial.reports.render import plots
from fairtrial.reports.render.document import (
    Block,
    Cases,
    Column,
    Content,
    Details,
    Document,
    Heading,
    Plot,
    Remarks,
    Section,
    Table,
)
from fairtrial.reports.render.safe_text import plain, shown
from fairtrial.reports.report.answer import MAIN_FIGURES, ReportAnswer, find_answer
from fairtrial.reports.report.remarks import (
    CHOSEN_FAILURES,
    TITLES,
    adaptive_remarks,
    bar,
    history_remarks,
    history_table,
    sampling_remarks,
    span,
    title_of,
    type_remarks,
    value,
)
from fairtrial.reports.report.slices import slice_keys, slice_table
from fairtrial.reports.report.trials import all_trials, failed_trials
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.result import TRIAL_FIGURES

if TYPE_CHECKING:
    from fairtrial.reports.compare.comparison import Comparison
    from fairtrial.reports.report.experiment import ExperimentReport, RunReport

_SHORT = {"pass_rate_all": "with errors as failures", "mean_score_all": "with errors as 0"}
_MAY_REPEAT = (
    ("pass_rate_all", "pass_rate"),
    ("mean_score", "pass_rate"),
    ("mean_score_all", "mean_score"),
    ("mean_score_all", "pass_rate_all"),
)
_DRAWN_CRITERIA = 12
_DRAWN = ("pass_rate", "pass_rate_all", "mean_score")
_NAME = 80
_WITH_BARS = 3  # More experiments have no row with a bar for each estimate: they would fill several screens.
_ERROR_GROUPS = 4
_FEW = 20  # With more trials than this to read, a document is a page that stands alone.
_PER_CASE = 10  # A page lists ten times as many trials as it would list failures.
_MOST_KEYS = 12
_HARDLY = 0.05  # A smaller narrowing of the interval is not worth mentioning.


def report_document(
    report: RunReport, cases: int, *, full: bool = False, answer: ReportAnswer | None = None
) -> Document:
    """Return the document of a run, or of some experiments: the answer and, on pages or if `full`, the details.

    Pages have details of at most `cases` trials. The answer is computed unless it is at hand.
    """
    store, run, parts = report.store, report.run, report.parts
    answer = report_answer(report) if answer is None else answer
    plan = check_run(run)
    planned = () if plan is None else (plan.sentence,)
    if not cases and not full:
        return Document(_short_title(run, parts), planned, tuple(answer.blocks))
    figures = {part.name: part.figures for part in parts}
    names = _names(figures, [one.figure.name for one in answer.rows if one.figure is not None])
    in_pairs = len(figures) > _WITH_BARS or not names
    estimates = _estimates_in_pairs(figures, names) if in_pairs else [_estimates(figures, names)]
    details: list[Block] = [*estimates, *history_table(figures, _names(figures)), _counts(parts)]
    if any(part.errors for part in parts):
        details.append(Remarks(tuple(_error_groups(store, run, parts))))
    details += [*_per_trial(figures), _costs(parts)]
    if full or cases > _FEW:
        details.append(slice_table(slice_keys(store, run), parts))
    if cases > _FEW:
        details.append(_parameters(run, parts))
    if cases:
        details += _plots(figures)
    remarks = _remarks(run, parts, code_versions(store, run))
    details.append(Remarks(tuple(text for warns, text in remarks if not warns)))
    about = [_about(run, parts), *planned]
    blocks: list[Block] = [*answer.blocks, Details("Details", tuple(details))]
    if cases > _FEW:  # A page, to be read without the store: it has what every other screen can be asked for.
        about.append(_circumstances(run))
        blocks.append(all_trials(store, run, parts, cases * _PER_CASE))
    elif cases:
        blocks += failed_trials(store, run, parts, cases)
    return Document(_title(run), tuple(about), tuple(blocks))


def report_answer(report: RunReport) -> ReportAnswer:
    """Return what a report says first."""
    store, run, parts = report.store, report.run, report.parts
    warnings = [text for warns, text in _remarks(run, parts, code_versions(store, run)) if warns]
    return find_answer(store, run, parts, warnings)


def report_with_comparisons(report: RunReport, comparisons: Sequence[Comparison], cases: int) -> Document:
    """Return the document of a report, with the comparisons before the list of trials."""
    from fairtrial.reports.compare.document import comparison_document

    whole = report.document(cases)
    trials = [block for block in whole.blocks if isinstance(block, Cases)]
    blocks: list[Block] = [block for block in whole.blocks if not isinstance(block, Cases)]
    for comparison in comparisons:
        found = comparison_document(comparison, cases)
        blocks += [Heading(found.title, found.about), *found.blocks]
    if cases and trials:
        blocks.append(Heading(report.run.name))
    return Document(whole.title, whole.about, (*blocks, *trials))


def _circumstances(run: RunRecord) -> str:
    """Return when the run was started, its code version, and its tags."""
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.created_at))
    code = f", code {run.code_hash[:8]}" if run.code_hash else ""
    tags = "".join(f", {plain(key)}={plain(text)}" for key, text in run.tags.items())
    return f"{run.name}, started {started}{code}{tags}"


def _parameters(run: RunRecord, parts: Sequence[ExperimentReport]) -> Table:
    """Return the table of the parameters of the experiments; empty if there are none."""
    params = {part.name: run.params.get(part.name) or {} for part in parts}
    given = {name: found if isinstance(found, Mapping) else {} for name, found in params.items()}
    keys = list(dict.fromkeys(key for found in given.values() for key in found))[:_MOST_KEYS]
    columns = (Column("experiment", "left", name=True), *(Column(plain(key), "left", name=True) for key in keys))
    rows = tuple(
        (name, *(plain(shown(found[key]), limit=_NAME) if key in found else formatting.UNDEFINED for key in keys))
        for name, found in given.items()
    )
    return Table("Parameters of the experiments", columns, rows if keys else ())


def _title(run: RunRecord) -> str:
    took = "" if run.took_seconds is None else f" in {formatting.duration(run.took_seconds * 1000)}"
    return f"{plain(run.suite, limit=_NAME)}  run {run.run_id}, {run.status}{took}"


def _short_title(run: RunRecord, parts: Sequence[ExperimentReport]) -> str:
    total, planned = sum(part.total for part in parts), sum(part.planned for part in parts)
    trials = "" if total == planned else f", {total:,} of {planned:,} trials"
    repeats = f", {run.repeats} repeats" if run.repeats > 1 else ""
    return f"{_title(run)}: {_samples(run)}{repeats}{trials}, scored by {plain(run.evaluator, limit=_NAME)}"


def _samples(run: RunRecord) -> str:
    split = run.noted.split
    samples = formatting.count(run.dataset_size, "sample")
    return samples if split is None else f"{samples} of split {plain(split.name, limit=_NAME)}"


def _about(run: RunRecord, parts: Sequence[ExperimentReport]) -> str:
    total, planned = sum(part.total for part in parts), sum(part.planned for part in parts)
    repeats = f", {run.repeats} repeats" if run.repeats > 1 else ""
    dataset, evaluator = plain(run.dataset_name, limit=_NAME), plain(run.evaluator, limit=_NAME)
    return f"dataset {dataset} ({_samples(run)}), {total:,} of {planned:,} trials{repeats}, scored by {evaluator}"


def _names(figures: Mapping[str, Figures], shown: Sequence[str] = ()) -> list[str]:
    """Return the estimates to show, without those shown before and those that repeat others; a remark names these."""
    names = dict.fromkeys(estimate.name for figure in figures.values() for estimate in figure.estimates)
    left_out = (*_repeated(figures), *shown)
    return [name for name in names if name not in left_out]


def _repeated(figures: Mapping[str, Figures]) -> list[str]:
    """Return estimates with the same figures as another in every experiment, such as means of 0s and 1s."""
    criteria = _criteria(figures)
    may_repeat = [*_MAY_REPEAT, *((criterion, CRITERION + criterion) for criterion in criteria)]
    if len(criteria) == 1:  # The only criterion has the same figures as the score.
        may_repeat += [(CRITERION + criteria[0], "pass_rate"), (criteria[0], "mean_score")]
    return [name for name, other in may_repeat if _same(figures.values(), name, other)]


def _criteria(figures: Mapping[str, Figures]) -> list[str]:
    names = dict.fromkeys(estimate.name for figure in figures.values() for estimate in figure.estimates)
    return [name.removeprefix(CRITERION) for name in names if name.startswith(CRITERION)]


def _same(figures: Iterable[Figures], name: str, other: str) -> bool:
    pairs = [(_key(figure.get(name)), _key(figure.get(other))) for figure in figures]
    return all(first == second for first, second in pairs) and any(first is not None for first, _ in pairs)


def _key(estimate: Estimate | None) -> tuple[object, ...] | None:
    if estimate is None:
        return None
    numbers = (estimate.value, estimate.low, estimate.high)
    # Floating-point sums in another order differ slightly.
    return (*(None if number is None else round(number, 12) for number in numbers), estimate.n, estimate.trials)


def _estimates(figures: Mapping[str, Figures], names: Sequence[str]) -> Table:
    repeats, clusters = _has_repeats(figures), _has_clusters(figures)
    columns = [
        Column("", "left", name=True),
        Column("estimate"),
        Column(_interval_title(figures)),
        Column("samples" if repeats or clusters else "n"),
        *([Column("trials")] if repeats else []),
        *([Column("clusters")] if clusters else []),
        Column("0 to 1", "left", bar=True),
    ]
    rows: list[tuple[Content, ...] | Section] = []
    criteria = _criteria(figures)
    section = ""
    for name in names:
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


def _has_repeats(figures: Mapping[str, Figures]) -> bool:
    return any(estimate.trials != estimate.n for figure in figures.values() for estimate in figure.estimates)


def _has_clusters(figures: Mapping[str, Figures]) -> bool:
    return any(estimate.clusters is not None for figure in figures.values() for estimate in figure.estimates)


def _interval_title(figures: Mapping[str, Figures]) -> str:
    levels = {figure.level for figure in figures.values()}
    return f"{formatting.level(levels.pop())} interval" if len(levels) == 1 else "interval"


def _estimates_in_pairs(figures: Mapping[str, Figures], names: Sequence[str]) -> list[Table]:
    """Return tables with at most two estimates side by side and a row for each experiment."""
    return [_pair_table(figures, title, pair) for title, pair in _pairs(figures, names)]


def _pairs(figures: Mapping[str, Figures], names: Sequence[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the caption of each table, and its estimates with the titles of their columns."""
    criteria = _criteria(figures)
    left = list(names)

    def take(*names: str) -> list[str]:
        """Return the remaining names if their numbers of samples agree, else only the first of them."""
        found = [name for name in names if name in left]
        found = found if len({_sizes(figures, name) for name in found}) == 1 else found[:1]
        for name in found:
            left.remove(name)
        return found

    while left:
        name = left[0]
        if name in ("pass_rate", "mean_score"):
            yield "", [(title_of(one), one) for one in take("pass_rate", "mean_score")]
        elif name in ("pass_rate_all", "mean_score_all"):
            found = take("pass_rate_all", "mean_score_all")
            yield "errors as 0", [(title_of(one).partition(",")[0], one) for one in found]
        elif name.startswith(("pass@", "pass^")):
            yield "", [(one, one) for one in take(f"pass@{name[5:]}", f"pass^{name[5:]}")]
        elif name.startswith(CRITERION) and name.removeprefix(CRITERION) in left:
            criterion = name.removeprefix(CRITERION)
            yield criterion, list(zip(("pass rate", "mean"), take(name, criterion), strict=False))
        elif name.startswith(CRITERION):
            alone = [one for one in left if one.startswith(CRITERION) and one.removeprefix(CRITERION) not in left]
            yield "pass rate of", [(one.removeprefix(CRITERION), one) for one in take(*alone[:2])]
        else:
            others = [one for one in left if one not in criteria and not one.startswith((CRITERION, "pass"))]
            yield "mean of", [(TITLES.get(one, one).removeprefix("mean "), one) for one in take(name, *others[:2][1:])]


def _sizes(figures: Mapping[str, Figures], name: str) -> tuple[tuple[int, int] | None, ...]:
    found = [figure.get(name) for figure in figures.values()]
    return tuple(None if one is None else (one.n, one.trials) for one in found)


def _pair_table(figures: Mapping[str, Figures], title: str, pair: Sequence[tuple[str, str]]) -> Table:
    repeats, clusters = _has_repeats(figures), _has_clusters(figures)
    columns = [Column(title, "left", name=True)]
    for heading, _ in pair:
        columns += [Column(heading), Column(_interval_title(figures))]
    columns.append(Column("samples" if repeats or clusters else "n"))
    columns += [Column("trials", optional=True)] if repeats else []
    columns += [Column("clusters", optional=True)] if clusters else []
    rows = []
    for experiment, figure in figures.items():
        found = [figure.get(name) for _, name in pair]
        cells: list[Content] = [experiment]
        for one in found:
            cells += [formatting.UNDEFINED] * 2 if one is None else [value(one, one.value), span(one)]
        first = found[0]
        cells.append("0" if first is None else f"{first.n:,}")
        cells += ["0" if first is None else f"{first.trials:,}"] if repeats else []
        count = None if first is None else first.clusters
        cells += [formatting.UNDEFINED if count is None else f"{count:,}"] if clusters else []
        rows.append(tuple(cells))
    return Table("", tuple(columns), tuple(rows))


def _section(name: str, criteria: Sequence[str]) -> str:
    """Return the section of an estimate in the table of one experiment."""
    if name in criteria or name.startswith(CRITERION):
        return "criteria"
    return "metrics" if criteria and name not in TITLES and not name.startswith(("pass@", "pass^")) else ""


def _label(name: str, criteria: Sequence[str]) -> str:
    if name.startswith(CRITERION):
        return name.removeprefix(CRITERION)
    return f"{name}, mean" if name in criteria else _SHORT.get(name, title_of(name))


def _counts(parts: Sequence[ExperimentReport]) -> Table:
    """Return the table of trials by outcome; dead letters and broken users only if there are any."""
    rare = {"dead_letter": "dead\nletters", "user_error": "broken\nusers"}
    seen = [outcome for outcome in rare if any(part.errors.get(outcome) for part in parts)]
    columns = [
        Column("trials", "left", name=True),
        *(Column(title) for title in ("planned", "scored", "task\nerrors", "scorer\nerrors", "timeouts")),
        *(Column(rare[outcome]) for outcome in seen),
        Column("not\nrun"),
    ]
    kinds = [outcome for outcome in ERRORS if outcome not in rare or outcome in seen]
    rows = [
        (
            part.name,
            *(f"{count:,}" for count in (part.planned, part.successful)),
            *(f"{part.errors.get(outcome, 0):,}" for outcome in kinds),
            f"{part.not_run:,}",
        )
        for part in parts
    ]
    return Table("", tuple(columns), tuple(rows))


def _error_groups(store: RunStore, run: RunRecord, parts: Sequence[ExperimentReport]) -> Iterator[str]:
    """Yield the most frequent errors with their counts, and how many more there are."""
    only = parts[0].name if len(parts) == 1 else None
    groups = read_error_groups(store, run.run_id, only)
    total = sum(sum(part.errors.values()) for part in parts)
    read = sum(group.trials for group in groups)
    yield from map(str, groups[:_ERROR_GROUPS])
    others = groups[_ERROR_GROUPS:]
    if others:
        more = formatting.count(sum(group.trials for group in others), "more error")
        yield f"{more}, of {formatting.count(len(others), 'other kind')}"
    if read < total:
        yield f"Only the first {read:,} of {total:,} errors were grouped."


def _per_trial(figures: Mapping[str, Figures]) -> Iterator[Table]:
    """Return the table of medians and 95th percentiles; tokens only if no price is known."""
    metrics = dict.fromkeys(estimate.metric for figure in figures.values() for estimate in figure.per_trial)
    if COST in metrics:
        metrics.pop(TOKENS, None)
    interval = _interval_title(figures)
    rows = []
    for metric in metrics:
        label = TRIAL_FIGURES[metric].title if metric in TRIAL_FIGURES else metric
        for experiment, figure in figures.items():
            by_name = {estimate.name: estimate for estimate in figure.per_trial if estimate.metric == metric}
            quantiles = [by_name.get(quantile_name(metric, share)) for share in SHOWN_QUANTILES]
            if all(quantiles):
                cells = [
                    cell
                    for estimate in quantiles
                    if estimate is not None
                    for cell in (quantity(estimate, estimate.value), reach(estimate))
                ]
                rows.append((label, *([experiment] if len(figures) > 1 else []), *cells))
                label = ""
    if rows:
        names = [Column("per trial", "left", name=True), *([Column("", "left", name=True)] if len(figures) > 1 else [])]
        yield Table("", (*names, *map(Column, ("median", interval, "p95", interval))), tuple(rows))


def quantity(estimate: Estimate, number: float | None) -> str:
    """Format a value of a metric without a range, in its unit."""
    figure = TRIAL_FIGURES.get(estimate.metric)
    if figure is None or number is None:
        return formatting.number(number)
    if figure.unit == "tokens":
        return f"{number:,.0f}"
    return formatting.duration(number) if figure.unit == "ms" else formatting.money(number)


def reach(estimate: Estimate) -> str:
    """Format the interval of a quantile; an end may be open."""
    low, high = (None if end is None else quantity(estimate, end) for end in (estimate.low, estimate.high))
    return formatting.open_range(low, high)


def _costs(parts: Sequence[ExperimentReport]) -> Table:
    judged = any(part.totals.judge_cost_usd is not None or part.totals.unpriced_judge_calls for part in parts)
    cached = any(part.cache_hits for part in parts)
    users = any(part.run.noted.users for part in parts)
    titles = [
        *("slowest\ntrial", "tokens"),
        *(("task\ncost", "judge, user\ncost" if users else "judge\ncost") if judged else ("cost",)),
        *(("from\ncache",) if cached else ()),
    ]
    rows = [
        (
            part.name,
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
    """Yield the origin of an imported run, and differences from its source."""
    origin = run.noted.imported
    if origin is not None:
        yield f"Imported: {plain(origin.format)} {plain(origin.source)}."
        for remark in map(plain, origin.remarks):
            yield f"{remark[:1].upper()}{remark[1:]}."


def _remarks(run: RunRecord, parts: Sequence[ExperimentReport], versions: int) -> Iterator[tuple[bool, str]]:
    """Yield all remarks on a run, each with whether it warns: then it belongs to the answer, else to the details."""
    repeated = _repeated({part.name: part.figures for part in parts})
    scored = any(part.successful for part in parts)
    if scored and "pass_rate_all" in repeated:
        yield False, "With errors as failures, the figures are the same."
    if scored and "mean_score" in repeated:
        yield False, "The mean score has the same figures as the pass rate."
    if run.noted.split is not None and run.noted.split.name == FAILURES:
        yield True, CHOSEN_FAILURES
    yield from adaptive_remarks(run)
    yield from sampling_remarks(run)
    batches = run.noted.batches
    if batches is not None and batches.replies:
        calls = "1 model call was" if batches.replies == 1 else f"{batches.replies:,} model calls were"
        yield False, f"{calls} answered in batches at half price, for {formatting.cost(batches.cost_usd, 0)}."
    if run.repeats > 1:
        yield False, "Repeats of one sample are not independent, so they do not count as more samples."
    for part in parts:
        if (told := BrokenUsers.of(part.totals).remark()) is not None:
            warns, text = told
            yield warns, text if len(parts) == 1 else f"{part.name}: {text}"
    by_remark: dict[tuple[bool, str], list[str]] = {}
    for part in parts:
        for told in _figure_remarks(part.figures):
            by_remark.setdefault(told, []).append(part.name)
    for (warns, remark), names in by_remark.items():
        yield warns, remark if len(names) == len(parts) else f"{', '.join(names)}: {remark}"
    yield from ((True, text) for text in _warnings(run, parts, versions))


def _warnings(run: RunRecord, parts: Sequence[ExperimentReport], versions: int) -> Iterator[str]:
    yield from _origin(run)
    yield from () if (plan := check_run(run)) is None else plan.lines
    # The samples are the same in every experiment of a run.
    yield from dict.fromkeys(
        part.figures.repeated_inputs.remark for part in parts if part.figures.repeated_inputs is not None
    )
    cut_off = sum(part.cut_off_calls for part in parts)
    if cut_off:
        answers = "1 answer was" if cut_off == 1 else f"{cut_off:,} answers were"
        yield f"{answers} cut off by a token limit: with a higher limit the scores may differ."
    refused = sum(part.refused_calls for part in parts)
    if refused:
        calls = "1 call was" if refused == 1 else f"{refused:,} calls were"
        yield f"{calls} declined by the model or a filter."
    unknown: Counter[str] = sum((Counter(part.unknown_endings) for part in parts), Counter())
    for name, number in sorted(unknown.items()):
        answers = "1 answer" if number == 1 else f"{number:,} answers"
        yield f"{answers} ended with the unknown reason {plain(name)!r}: counted as complete."
    batches = run.noted.batches
    if batches is not None and batches.unused:
        replies = "1 reply of a batch was" if batches.unused == 1 else f"{batches.unused:,} replies of batches were"
        cost = formatting.cost(batches.unused_cost_usd, 0)
        yield (
            f"{replies} paid and not used ({cost}): their trials had given up waiting, or made other calls when they "
            "were executed again."
        )
    if run.status == "unscored":
        count = sum(part.errors.get("scorer_error", 0) for part in parts)
        trials, them = formatting.count(count, "trial"), "it" if count == 1 else "them"
        yield f"{trials} could not be scored; run the same command again to score {them} without calling the task."
    failures = [failed for part in parts if (failed := part.failed_samples())]  # To find none, all rows would be read.
    yield from type_remarks(result for failed in failures for result in failed)
    stopped = run.noted.stopped
    if stopped:
        yield f"ended early: {stopped}"
    if versions > 1:
        word = formatting.number_word(versions)
        yield f"results of {word} code versions: the code changed while the run was unfinished"


def _figure_remarks(figures: Figures) -> Iterator[tuple[bool, str]]:
    """Yield the remarks on the figures of one experiment; those on figures that only details have do not warn."""
    yield from ((False, text) for text in _split(figures))
    yield from ((True, text) for text in history_remarks(figures))
    by_note: dict[str, list[str]] = {}
    for estimate in figures.estimates:
        if estimate.note:
            by_note.setdefault(estimate.note, []).append(estimate.name)
    for note, names in by_note.items():
        warns = any(name in MAIN_FIGURES for name in names)
        titles = ", ".join(map(title_of, names))
        every = len(names) == len(figures.estimates) or (warns and note == NOTHING_SCORED)
        yield warns, note if every else f"{note} ({titles})"


def _split(figures: Figures) -> Iterator[str]:
    """Advise on repeats: how much narrower the interval could become with more of them."""
    split = figures.split
    if split is None or split.between is None or split.within is None:
        return
    if not split.within:
        yield "Repeats agreed every time: 1 repeat is enough; more samples narrow the interval."
        return
    # SE^2 is (between + within/K)/n, and no number of repeats takes away the first part.
    left = math.sqrt(split.between / (split.between + split.within * split.n / split.trials))
    if left > 1 - _HARDLY:
        yield "More repeats would hardly narrow the interval; more samples do."
    elif left < _HARDLY:
        yield "Repeats differ as much as samples do: more of either narrows the interval."
    else:
        yield (
            f"Repeats of a sample differ: more of them narrow the interval by up to {1 - left:.0%}; more "
            "samples narrow it without such a limit."
        )


def _plots(figures: Mapping[str, Figures]) -> list[Block]:
    blocks: list[Block] = []
    if len(figures) > _WITH_BARS:  # Tables of fewer experiments have bars.
        blocks.append(interval_plot(figures))
    panels = []
    for experiment, figure in figures.items():
        mean = figure.get("mean_score")
        panels.append(plots.Distribution(experiment, figure.distribution, None if mean is None else mean.value))
    if any(sum(panel.counts) for panel in panels):
        blocks.append(Plot("Scores", plots.distributions(panels, "How the scores of trials are distributed")))
    return blocks


def interval_plot(figures: Mapping[str, Figures]) -> Plot:
    """Return a drawing of the main estimates and the criteria; tables have their numbers."""
    rows = []
    repeated = _repeated(figures)
    criteria = _criteria(figures)
    for name in (*_DRAWN, *(CRITERION + criterion for criterion in criteria[:_DRAWN_CRITERIA])):
        if name in repeated:
            continue
        title = title_of(name) if name in _DRAWN else name.removeprefix(CRITERION)  # Plots have little room for names.
        if len(figures) > 1:
            rows.append(plots.IntervalRow(title, None, ""))
        for experiment, figure in figures.items():
            estimate = figure.get(name)
            if estimate is not None:
                text = f"{value(estimate, estimate.value)} ({span(estimate)})"
                label = experiment if len(figures) > 1 else title
                rows.append(plots.IntervalRow(label, bar(estimate, figure.bounds[name]), text))
    return Plot("Intervals", plots.intervals(rows, "Estimates with their intervals", percent=False))
