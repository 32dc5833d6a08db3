"""Whether a run is let through: pass, fail, or not enough evidence to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fairtrial.analysis.caveats import about_runs
from fairtrial.analysis.checks import Check, Floor, GateCheck, Margin, evaluate_checks
from fairtrial.analysis.columns import Columns, hashable, read_columns
from fairtrial.analysis.compare import compare_columns, side_names
from fairtrial.analysis.comparison import ComparisonRecord
from fairtrial.analysis.gate_rules import GateRules, SliceRule
from fairtrial.analysis.metrics import COSTS, PASSED
from fairtrial.analysis.pairing import ComparisonSettings, Pairs, pair
from fairtrial.analysis.slicing import Slice, cut
from fairtrial.analysis.source import ExperimentSource

type GateStatus = Literal["pass", "fail", "inconclusive"]

_EXIT_CODES: Mapping[GateStatus, int] = {"pass": 0, "fail": 1, "inconclusive": 3}


@dataclass(frozen=True, slots=True)
class GateRecord:
    """What a gate decided, rule by rule; "inconclusive" means that the data allow both answers.

    `reasons` say why it did not pass, or what it passed on; `needed` is the number of samples that would decide what
    is open, None where nothing is or no number can be named.
    """

    status: GateStatus
    checks: tuple[GateCheck, ...]
    reasons: tuple[str, ...]
    needed: int | None
    missing_share: float
    candidate: str
    baseline: str | None
    warnings: tuple[str, ...]
    comparison: ComparisonRecord | None = None

    @property
    def passed(self) -> bool:
        """Whether the run is let through."""
        return self.status == "pass"

    @property
    def exit_code(self) -> int:
        """0 for pass, 1 for fail, 3 for inconclusive."""
        return _EXIT_CODES[self.status]


def gate_sources(candidate: ExperimentSource, rules: GateRules, baseline: ExperimentSource | None = None) -> GateRecord:
    """Decide by intervals whether an experiment meets its rules; those with a margin need a baseline."""
    rules.check_baseline(given=baseline is not None)
    sources = [candidate] if baseline is None else [candidate, baseline]
    metrics = {*rules.metrics, PASSED}
    keys = tuple(dict.fromkeys(rule.by for rule in rules.slices))
    columns = [
        read_columns(source, metrics=metrics, cluster=rules.cluster, keys=keys, name=name).looked_at()
        for source, name in zip(sources, side_names(sources), strict=True)
    ]
    result = gate_columns(columns[0], rules, columns[1] if baseline is not None else None, sources=sources)
    return replace(result, warnings=(*about_runs(sources), *result.warnings))


def gate_columns(
    candidate: Columns,
    rules: GateRules,
    baseline: Columns | None = None,
    *,
    settings: ComparisonSettings | None = None,
    sources: Sequence[ExperimentSource] = (),
) -> GateRecord:
    """Hold columns against rules: a pure function of numbers, but for `sources`, where results can be read."""
    lower = frozenset((*rules.lower_is_better, *COSTS))
    settings = replace(settings or ComparisonSettings(), alpha=rules.alpha, lower_is_better=lower)
    pairs = None if baseline is None else pair(candidate, baseline)
    checks = evaluate_checks(list(_checks(candidate, pairs, rules)), settings)
    share = candidate.missing / candidate.trials if candidate.trials else 0.0
    comparison = None
    if baseline is not None and pairs is not None:
        comparison = compare_columns(
            baseline,
            [candidate],
            metrics=tuple(rules.all_margins) or (PASSED,),
            settings=settings,
            sources=tuple(reversed(sources)),
        )
        share = max(share, comparison.candidates[0].missing_share)
    status = _overall(checks)
    telling = [check.reason for check in checks if check.status == status or check.status == "fail"]
    if share > rules.max_missing_share:
        status = "inconclusive"
        telling.insert(
            0,
            f"{share:.1%} of the {'trials' if pairs is None else 'trials or pairs'} are missing (not run, or not "
            "scored through no fault of the system), more than "
            f"the {rules.max_missing_share:.1%} that is allowed: finish the run or mend its scoring first.",
        )
    open_counts = [check.needed for check in checks if check.status == "inconclusive" and check.needed is not None]
    return GateRecord(
        status=status,
        checks=checks,
        reasons=tuple(telling),
        needed=max(open_counts, default=None),
        missing_share=share,
        candidate=candidate.name,
        baseline=None if baseline is None else baseline.name,
        warnings=() if comparison is None else comparison.candidates[0].warnings,
        comparison=comparison,
    )


def _overall(checks: Sequence[GateCheck]) -> GateStatus:
    found = {check.status for check in checks}
    return "fail" if "fail" in found else "inconclusive" if "inconclusive" in found else "pass"


def _checks(candidate: Columns, pairs: Pairs | None, rules: GateRules) -> Iterator[Check]:
    yield from _of(rules, candidate, pairs, None)
    for rule in rules.slices:
        slices = _slices(rule, candidate)
        paired = {} if pairs is None else {part.name: part for part in _slices(rule, pairs.baseline, pairs.candidate)}
        for name in dict.fromkeys([*(part.name for part in slices), *paired]):
            here = next((part.rows for part in slices if part.name == name), np.zeros(len(candidate.ids), np.bool_))
            both = None
            if pairs is not None:
                part = paired.get(name)
                both = pairs.take(np.zeros(pairs.matched, np.bool_) if part is None else part.rows)
            yield from _of(rule, candidate.take(here), both, name)
        if not slices and not paired:
            nobody = candidate.take(np.zeros(len(candidate.ids), np.bool_))
            none_paired = None if pairs is None else pairs.take(np.zeros(pairs.matched, np.bool_))
            yield from _of(rule, nobody, none_paired, f"{rule.by} = {rule.value}")


def _of(rules: GateRules | SliceRule, candidate: Columns, pairs: Pairs | None, name: str | None) -> Iterator[Check]:
    for metric, least in rules.all_floors.items():
        yield Floor(metric, name, least, candidate, ceiling=False)
    for metric, most in rules.ceilings.items():
        yield Floor(metric, name, most, candidate, ceiling=True)
    if pairs is not None:
        for metric, margin in rules.all_margins.items():
            yield Margin(metric, name, margin, pairs)


def _slices(rule: SliceRule, *sides: Columns) -> list[Slice]:
    labels = next((side.groups[rule.by] for side in sides if rule.by in side.groups), ())
    if all(label is None for label in labels):
        return []
    found = list(cut((rule.by,), *sides))
    if rule.value is None:
        return [part for part in found if part.value is not None]
    wanted = hashable(rule.value)
    return [part for part in found if part.value == wanted and isinstance(part.value, bool) == isinstance(wanted, bool)]
