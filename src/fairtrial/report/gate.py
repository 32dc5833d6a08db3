"""Whether a run is let through: pass, fail, or not enough evidence to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fairtrial.codec import to_json
from fairtrial.errors import ConfigurationError
from fairtrial.report.caveats import about_runs
from fairtrial.report.checks import Check, Floor, GateCheck, Margin, judged
from fairtrial.report.columns import COSTS, PASSED, Columns, hashable, one_experiment, read_columns
from fairtrial.report.compare import compare_columns, side_names
from fairtrial.report.comparison import Comparison
from fairtrial.report.pairs import Pairs, pair
from fairtrial.report.rendered import Rendered
from fairtrial.report.report import EvalReport, ExperimentReport
from fairtrial.report.rules import GateRules, SliceRule
from fairtrial.report.scores import Settings
from fairtrial.report.slicing import Slice, cut
from fairtrial.types import JSON

if TYPE_CHECKING:
    from fairtrial.report.render.document import Document

__all__ = ["GateCheck", "GateResult", "GateRules", "SliceRule", "gate", "gate_columns"]

type GateStatus = Literal["pass", "fail", "inconclusive"]

_EXIT_CODES: Mapping[GateStatus, int] = {"pass": 0, "fail": 1, "inconclusive": 3}


@dataclass(frozen=True, slots=True)
class GateResult(Rendered):
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
    comparison: Comparison | None = None

    @property
    def passed(self) -> bool:
        """Whether the run is let through."""
        return self.status == "pass"

    @property
    def exit_code(self) -> int:
        """0 for pass, 1 for fail, 3 for inconclusive."""
        return _EXIT_CODES[self.status]

    def to_json(self) -> dict[str, JSON]:
        """The whole record as JSON values."""
        plain = {one.name: to_json(getattr(self, one.name)) for one in fields(self) if one.name != "comparison"}
        return (
            {"format": "fairtrial.gate/1"}
            | plain
            | {
                "exit_code": self.exit_code,
                "comparison": None if self.comparison is None else self.comparison.to_json(),
            }
        )

    def to_junit(self) -> str:
        """JUnit XML with a test case for every rule."""
        from fairtrial.report.render.of_gate import as_junit

        return as_junit(self)

    def _document(self, cases: int) -> Document:
        from fairtrial.report.render.of_gate import document

        return document(self, cases=cases)


def gate(
    candidate: EvalReport | ExperimentReport,
    rules: GateRules | Mapping[str, Any],
    baseline: EvalReport | ExperimentReport | None = None,
) -> GateResult:
    """Decide by intervals, not by the bare numbers, whether a run meets its rules.

    A floor is met if the whole interval is at or above it, and missed if the whole interval is below. A margin is kept
    if the lower bound of candidate - baseline is above -margin, and broken if the upper bound is below 0. Anything else
    is inconclusive, and so is the gate if too many trials are missing. With several rules all must be met, and a rule
    counts as missed only if it is so allowing for their number: one false alarm blocks a release.
    """
    rules = rules if isinstance(rules, GateRules) else GateRules.from_mapping(rules)
    if rules.empty:
        raise ConfigurationError("the gate has no rules: set at least min_pass_rate, or margin with a baseline")
    if rules.compares and baseline is None:
        raise ConfigurationError("a rule with a margin compares with a baseline; give one")
    if baseline is not None and not rules.compares:
        raise ConfigurationError("a baseline was given, but no rule compares with it: set margin, as in margin = 0.02")
    example = 'name one, as in gate(report["terse"], rules)'
    parts = [one_experiment(side, example) for side in (candidate, baseline) if side is not None]
    metrics = {*rules.metrics, PASSED}
    keys = tuple(dict.fromkeys(rule.by for rule in rules.slices))
    columns = [
        read_columns(part, metrics=metrics, cluster=rules.cluster, keys=keys, name=name).looked_at()
        for part, name in zip(parts, side_names(parts), strict=True)
    ]
    result = gate_columns(columns[0], rules, columns[1] if baseline is not None else None, reports=parts)
    return replace(result, warnings=(*about_runs(parts), *result.warnings))


def gate_columns(
    candidate: Columns,
    rules: GateRules,
    baseline: Columns | None = None,
    *,
    settings: Settings | None = None,
    reports: Sequence[ExperimentReport] = (),
) -> GateResult:
    """`gate` for columns: a pure function of numbers, but for `reports`, which say where results can be read."""
    lower = frozenset((*rules.lower_is_better, *COSTS))
    settings = replace(settings or Settings(), alpha=rules.alpha, lower_is_better=lower)
    pairs = None if baseline is None else pair(candidate, baseline)
    checks = judged(list(_checks(candidate, pairs, rules)), settings)
    share = candidate.missing / candidate.trials if candidate.trials else 0.0
    comparison = None
    if baseline is not None and pairs is not None:
        comparison = compare_columns(
            baseline,
            [candidate],
            metrics=tuple(rules.all_margins) or (PASSED,),
            settings=settings,
            reports=tuple(reversed(reports)),
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
    return GateResult(
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
