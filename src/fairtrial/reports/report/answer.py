"""The answer of a report: a row for each experiment, how they compare, the worst trials, and what to do next."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import batched, chain
from typing import TYPE_CHECKING

from fairtrial.base import formatting
from fairtrial.errors import FairtrialError
from fairtrial.reports.figures.error_groups import READ_ERRORS, error_key, error_line, error_location, plain_error
from fairtrial.reports.figures.estimates import Estimate
from fairtrial.reports.figures.figures import BINS, Figures
from fairtrial.reports.figures.metrics import CRITERION, ERRORS, LATENCY, PASSED, VALUE, quantile_name
from fairtrial.reports.render.document import (
    Block,
    Column,
    Conclusion,
    Remarks,
    Table,
    TrialExample,
    TrialGroup,
    TrialGroups,
)
from fairtrial.reports.render.safe_text import is_hash, plain
from fairtrial.reports.report.remarks import bar, span, title_of, value
from fairtrial.reports.run_names import resume_command
from fairtrial.store.protocol import RESUMABLE, RunRecord, RunStore
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from fairtrial.reports.compare.comparison import Comparison
    from fairtrial.reports.report.experiment import ExperimentReport

MAIN_FIGURES = ("pass_rate", "pass_rate_all", "mean_score")
"""The estimates that an answer may have: what is to be said of them is said with it."""
SHOWN = 5
"""How many trials are shown of those that failed or ended in an error."""
_READ = 1_000  # How many failed trials of a run are read to group them.
_TEXT = 400  # Characters of an input and an output.
_HASH = 8  # Characters of an id that is a hash.


@dataclass(frozen=True, slots=True)
class ExperimentAnswer:
    """The main figures of an experiment.

    `figure` is its pass rate or, in a suite without verdicts, its mean score: `rate` is then its pass rate. `rate_all`
    is the pass rate with errors as failures, None where it is the same. `cost` is "" if no model was called.
    """

    experiment: str
    figure: Estimate | None
    bounds: tuple[float, float] | None
    rate: float | None
    rate_all: float | None
    errors: int
    latency_ms: float | None
    cost: str


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """What a report says first.

    `conclusions` are what `compare` says of the experiments; `not_compared` is why it says nothing, "" for a single
    experiment. `warnings` are all that has to be known to read the figures and the conclusions; they are never folded.
    `groups` has the worst trials, and `commands` what to type next, with a remark on each.
    """

    rows: tuple[ExperimentAnswer, ...]
    level: float | None
    repeats: bool
    conclusions: tuple[Conclusion, ...]
    not_compared: str
    warnings: tuple[str, ...]
    groups: TrialGroups
    commands: tuple[tuple[str, str], ...]

    @property
    def blocks(self) -> list[Block]:
        """The answer as blocks of a document, without the commands."""
        remarks = ((self.not_compared,) if self.not_compared else ()) + self.warnings
        return [_table(self), *self.conclusions, Remarks(remarks), self.groups]


def find_answer(
    store: RunStore, run: RunRecord, parts: Sequence[ExperimentReport], warnings: Sequence[str] = ()
) -> ReportAnswer:
    """Compute the answer for some experiments of a run, with warnings about their figures."""
    scored = [part.figures for part in parts if part.successful]
    by_score = bool(scored) and all(map(_is_score_only, scored))
    conclusions: tuple[Conclusion, ...] = ()
    not_compared, caveats = "", tuple[str, ...]()
    if len(parts) > 1:
        compared = _compared(run, parts)
        if isinstance(compared, str):
            not_compared = compared
        else:
            # numpy is loaded by now: there are figures.
            from fairtrial.reports.compare.document import comparison_remarks, headlines

            conclusions = headlines(compared, VALUE if by_score else PASSED)
            caveats = tuple(comparison_remarks(compared, detailed=False))
    levels = {part.figures.level for part in parts}
    worst = worst_trials(store, run, parts)
    return ReportAnswer(
        tuple(_row(part, by_score=by_score) for part in parts),
        levels.pop() if len(levels) == 1 else None,
        any(one.trials != one.n for part in parts for one in part.figures.estimates),
        conclusions,
        not_compared,
        tuple(dict.fromkeys((*warnings, *caveats))),
        worst,
        tuple(_next_commands(store, run, worst)),
    )


def compare_parts(parts: Sequence[ExperimentReport]) -> Comparison:
    """Compare the experiments of a run with its first, as `fairtrial compare RUN` does."""
    from fairtrial.reports.compare.compare import compare

    return compare(*parts)


def _compared(run: RunRecord, parts: Sequence[ExperimentReport]) -> Comparison | str:
    """Return the comparison with the first experiment, or why there is none."""
    if run.status == "running" or run.status in RESUMABLE:
        return f"Not compared: the run is not finished ({run.status})."
    if not any(part.successful for part in parts):
        return "Not compared: no trial was scored."
    try:
        return compare_parts(parts)
    except FairtrialError as error:
        return f"Not compared: {str(error).partition(chr(10))[0]}."


def _is_score_only(figures: Figures) -> bool:
    """Return whether nobody gave a verdict: there are no criteria, and trials passed just where a score is above .5."""
    rate, between = figures.get("pass_rate"), sum(figures.distribution[1:-1])
    if (
        not between
        or rate is None
        or rate.value is None
        or any(one.name.startswith(CRITERION) for one in figures.estimates)
    ):
        return False
    above = sum(figures.distribution[BINS // 2 :]) / sum(figures.distribution)
    return rate.trials == sum(figures.distribution) and abs(above - rate.value) < 1e-9


def _row(part: ExperimentReport, *, by_score: bool) -> ExperimentAnswer:
    name = "mean_score" if by_score else "pass_rate"
    figures = part.figures
    rate, whole = part.figures.get("pass_rate"), part.figures.get("pass_rate_all")
    differs = rate is not None and whole is not None and (rate.value, rate.n) != (whole.value, whole.n)
    latency = next((one for one in figures.per_trial if one.name == quantile_name(LATENCY, 0.5)), None)
    totals = part.totals
    paid = [cost for cost in (totals.cost_usd, totals.judge_cost_usd) if cost is not None]
    unpriced = part.unpriced_calls or (part.total_tokens if not paid else 0)
    return ExperimentAnswer(
        part.name,
        figures.get(name),
        figures.bounds.get(name),
        rate.value if by_score and rate is not None else None,
        whole.value if differs and whole is not None and not by_score else None,
        sum(part.errors.values()),
        None if latency is None else latency.value,
        formatting.cost(sum(paid) if paid else None, unpriced) if paid or unpriced else "",
    )


def _table(answer: ReportAnswer) -> Table:
    rows = answer.rows
    named = next((one.figure for one in rows if one.figure is not None), None)
    by_score, as_failures = any(one.rate is not None for one in rows), any(one.rate_all is not None for one in rows)
    timed, paid = any(one.latency_ms is not None for one in rows), any(one.cost for one in rows)
    clusters = any(one.figure is not None and one.figure.clusters is not None for one in rows)
    columns = [
        Column("", "left", name=True),
        Column((title_of("pass_rate") if named is None else title_of(named.name)).replace(" ", "\n")),
        Column("interval" if answer.level is None else f"{formatting.level(answer.level)} interval"),
        Column("samples" if answer.repeats or clusters else "n"),
        *([Column("trials", optional=True)] if answer.repeats else []),
        *([Column("clusters", optional=True)] if clusters else []),
        *([Column("pass\nrate")] if by_score else []),
        Column("errors"),
        *([Column("errors as\nfailures")] if as_failures else []),
        *([Column("median\nlatency", optional=True)] if timed else []),
        *([Column("cost", optional=True)] if paid else []),
        Column("0 to 1", "left", bar=True),
    ]
    cells = [
        (
            one.experiment,
            *_figure_cells(one.figure, trials=answer.repeats, clusters=clusters),
            *([formatting.rate(one.rate)] if by_score else []),
            f"{one.errors:,}",
            *([formatting.UNDEFINED if one.rate_all is None else formatting.rate(one.rate_all)] if as_failures else []),
            *([formatting.duration(one.latency_ms)] if timed else []),
            *([one.cost or formatting.UNDEFINED] if paid else []),
            None if one.figure is None else bar(one.figure, one.bounds),
        )
        for one in rows
    ]
    return Table("", tuple(columns), tuple(cells))


def _figure_cells(figure: Estimate | None, *, trials: bool, clusters: bool) -> Iterator[str]:
    yield from (formatting.UNDEFINED,) * 2 if figure is None else (value(figure, figure.value), span(figure))
    yield f"{0 if figure is None else figure.n:,}"
    if trials:
        yield f"{0 if figure is None else figure.trials:,}"
    if clusters:
        yield formatting.UNDEFINED if figure is None or figure.clusters is None else f"{figure.clusters:,}"


# The worst trials.


@dataclass(slots=True)
class _Group:
    """Trials with the same reason: how many, those to show, and the lowest score."""

    trials: int
    worst: float
    examples: list[EvalResult]
    reason: str


def worst_trials(store: RunStore, run: RunRecord, parts: Sequence[ExperimentReport]) -> TrialGroups:
    """Return some of the trials that failed or ended in an error, by reason, the most frequent reason first."""
    only = parts[0].name if len(parts) == 1 else None
    errors = sum(sum(part.errors.values()) for part in parts)
    failed = sum(part.successful - part.totals.passed for part in parts)
    results = chain(
        store.results(run.run_id, experiment=only, outcomes=ERRORS, limit=READ_ERRORS, outputs=False) if errors else (),
        store.results(run.run_id, experiment=only, passed=False, limit=_READ, outputs=False) if failed else (),
    )
    groups = group_trials(store, run, results, several=len(parts) > 1)
    if errors > READ_ERRORS or failed > _READ:
        groups = [replace(one, at_least=True) for one in groups]
    return TrialGroups(tuple(groups), errors + failed - sum(one.trials for one in groups))


def group_trials(
    store: RunStore, run: RunRecord, results: Iterable[EvalResult], *, several: bool, shown: int = SHOWN
) -> list[TrialGroup]:
    """Group trials that did not pass by reason, at most `shown` groups with as many examples in all.

    The largest group is first; of equal ones that with errors, then that with the lower score, then the order of the
    plan.
    """
    groups: dict[tuple[str, ...], _Group] = {}
    for some in batched(results, 100):
        outputs = {
            one.ordinal: one.output
            for one in store.previews(run.run_id, [one.ordinal for one in some if one.score is not None])
        }
        for result in some:
            if result.score is None:
                place = error_location(result).partition(" in ")[0]  # First: the end of a long line is cut.
                reason = f"{place}: {error_line(plain_error(result))}" if place else error_line(plain_error(result))
                _add(groups, error_key(result), result, reason, shown)
            else:
                reason = without_output(failure_reason(result), outputs.get(result.ordinal, ""))
                _add(groups, ("failed", reason), result, reason, shown)
    ordered = sorted(groups.values(), key=lambda one: (-one.trials, one.worst, one.examples[0].ordinal))[:shown]
    counts = _spread([one.trials for one in ordered], shown)
    chosen = [one.examples[:count] for one, count in zip(ordered, counts, strict=True)]
    ordinals = [result.ordinal for some in chosen for result in some]
    texts = {one.ordinal: (one.input, one.output) for one in store.previews(run.run_id, ordinals, size=_TEXT)}
    made = []
    for group, examples in zip(ordered, chosen, strict=True):
        outcome = examples[0].outcome
        name = "failed" if outcome == "scored" else outcome.replace("_", " ")
        shown_trials = tuple(
            TrialExample(
                _title(run, one, several=several),
                one.sample_id,
                one.experiment,
                one.repeat,
                *texts.get(one.ordinal, ("(not stored)", "")),
            )
            for one in examples
        )
        made.append(
            TrialGroup(name, "bad" if outcome == "scored" else "unsure", group.reason, group.trials, shown_trials)
        )
    return made


def _add(
    groups: dict[tuple[str, ...], _Group], key: tuple[str, ...], result: EvalResult, reason: str, most: int
) -> None:
    """Count a trial, and keep it as an example if few trials of its group have a lower score."""
    worst = _value(result)
    group = groups.setdefault(key, _Group(0, worst, [], reason))
    group.trials += 1
    group.worst = min(group.worst, worst)
    if len(group.examples) < most or worst < _value(group.examples[-1]):
        group.examples = sorted((*group.examples, result), key=lambda one: (_value(one), one.ordinal))[:most]


def _value(result: EvalResult) -> float:
    return -1.0 if result.score is None else result.score.value


def _spread(sizes: Sequence[int], shown: int) -> list[int]:
    """Return how many trials of each group are shown: one of each, then more of the first."""
    counts = [1] * len(sizes)
    for place, size in enumerate(sizes):
        counts[place] += min(size - 1, shown - sum(counts))
    return counts


def _title(run: RunRecord, result: EvalResult, *, several: bool) -> str:
    sample = short_id(result.sample_id)
    repeat = f" (repeat {result.repeat})" if run.repeats > 1 else ""
    return f"{result.experiment} {sample}{repeat}" if several else f"{sample}{repeat}"


def short_id(sample_id: str) -> str:
    """Return an id for a list: of a hash the start, which commands take too."""
    return sample_id[:_HASH] if is_hash(sample_id) else sample_id


def failure_reason(result: EvalResult) -> str:
    """Return in one line why a scored trial did not pass: the reason of its score, with the criteria that failed."""
    score = result.score
    if score is None:
        return ""
    failed = score.failed_criteria
    reasons = [metric.reason for metric in failed if metric.reason]
    if len(failed) > 1 and reasons:  # All names first: the end of a long line is cut.
        return " ".join(f"{', '.join(metric.name for metric in failed)}: {'; '.join(reasons)}".split())
    return " ".join((score.explain() or "no reason given").split())


_QUOTED = re.compile(r"""(?:\.\.\.)?('(?:[^'\\]|\\.){0,400}'|"(?:[^"\\]|\\.){0,400}")(?:\.\.\.)?""")
_LONG = 20  # A quoted text of this length that is part of the output is taken for the output.


def without_output(reason: str, output: str) -> str:
    """Return a reason without what it quotes of the output, which is shown beside it: "expected 'a' in …".

    So trials with other outputs and the same fault have the same reason.
    """

    def shortened(found: re.Match[str]) -> str:
        try:
            text = ast.literal_eval(found[1])
        except (SyntaxError, ValueError):
            return found[0]
        whole = text == output or (len(text) >= _LONG and text in output)
        return "…" if text and whole else found[0]

    return _QUOTED.sub(shortened, reason) if output else reason


# What to do next.


def _next_commands(store: RunStore, run: RunRecord, worst: TrialGroups) -> Iterator[tuple[str, str]]:
    """Yield useful commands after a report, each with a remark."""
    latest = store.runs(suite=run.suite, limit=1)
    name = shlex.quote(run.suite if latest and latest[0].run_id == run.run_id else run.name)
    if run.status in RESUMABLE:
        cap = run.noted.cost_cap_usd
        if cap is not None:
            yield resume_command(run, max_cost=2 * cap), "resume with a higher limit"
        else:
            yield resume_command(run), "resume the run"
    yield f"fairtrial show {name} --full", "criteria, means, quantiles, slices"
    if worst.groups:
        yield f"fairtrial trials {name} --failed", "all failed trials, and why"
        if len(run.experiments) == 1:
            sample = shlex.quote(plain(worst.groups[0].examples[0].sample_id))
            yield f"fairtrial show {name} --sample {sample}", "one trial in full"
    if len(run.experiments) > 2:
        yield f"fairtrial leaderboard {name}", "which is best?"
    elif len(run.experiments) == 2:
        yield f"fairtrial compare {name}", "all metrics, and how many samples decide"
