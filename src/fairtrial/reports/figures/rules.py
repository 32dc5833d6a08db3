"""The rules of gates. Imports no numerical libraries."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any

from fairtrial.base.foreign import load_toml
from fairtrial.base.frozen import EMPTY, JSON, FrozenDict, first_is
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.metrics import PASSED, SMALLEST_DIFFERENCE, is_ratio, measured_metric, parse_quantile

_LARGEST = sys.float_info.max
_LIKE_QUANTILE = re.compile(r"(median|p[\d.]+):")


@dataclass(frozen=True, slots=True)
class SliceRule:
    """Rules for samples with metadata `by` = `value`; without a value, for each value of the key."""

    by: str
    value: JSON = None
    min_pass_rate: float | None = None
    _: KW_ONLY
    floors: Mapping[str, float] = EMPTY
    ceilings: Mapping[str, float] = EMPTY
    margin: float | None = None
    margins: Mapping[str, float] = EMPTY
    max_missing: float | None = None

    def __post_init__(self) -> None:
        by: object = self.by  # It may come from a file.
        if not isinstance(by, str) or not by:
            raise ConfigurationError(f"`by` of a slice rule must be a metadata key (got {self.by!r})")
        _check(self, f"the slice rule for {self.by!r}")
        if not self.all_floors and not self.ceilings and not self.all_margins:
            raise ConfigurationError(f"the slice rule for {self.by!r} asks for nothing: add min_pass_rate or margin")

    @property
    def all_floors(self) -> dict[str, float]:
        """The minimum mean of each metric."""
        return _floors(self)

    @property
    def all_margins(self) -> dict[str, float]:
        """How much worse than the baseline each metric may be."""
        return _margins(self)


@first_is()
@dataclass(frozen=True, slots=True)
class GateRules:
    """The rules of a gate. Change a copy with `dataclasses.replace`.

    Attributes:
        min_pass_rate: The least pass rate, task errors and timeouts counting as failures.
        floors: The least mean of metrics, by name; or the least quantile, as "median:words".
        ceilings: The greatest mean of metrics of which less is better, such as latency_ms or cost_usd; or the greatest
            quantile, as {"p95:latency_ms": 2000}, which holds for any tail, however long.
        margin: How much the pass rate may lie below the baseline's: .02 is two points.
        margins: The same for other metrics, by name.
        slices: Rules for some of the samples.
        max_missing_share: A rule is inconclusive if more than this share of its trials (or pairs) have no number:
            they were not run, could not be scored, or lack the metric. Up to it, missing numbers are taken at their
            worst; a metric without `bounds` has no worst, so there any missing number makes its rule inconclusive.
        max_missing: Up to this share, leave missing numbers out instead. This assumes that they are missing at random,
            and each reason says so. A slice rule may have its own.
        bounds: The ranges of metrics that do not declare theirs (`Metric.bounds`), as in {"f1": (0, 1)}.
        alpha: The accepted chance of letting a bad run through, or of stopping a good one.
        spend_alpha: Make every further gate of the same code against the same baseline stricter, so that trying until
            it passes does not raise the chance of a wrong decision above alpha.
        smallest_difference_that_matters: How far from a floor the truth is assumed to be when a number of samples is
            named; one number for shares, or one for each metric by name.
        lower_is_better: Metrics under `margins` of which less is better, besides latency_ms, tokens and cost_usd.
        higher_is_better: Metrics under `margins` of which more is better, besides passed, value and reward. A margin on
            a metric whose direction neither the rules nor the metric itself declares is refused.
        cluster: The metadata key of samples that are not independent; None for the run's own, "" for none.
        other_users: Decide although the two sides talked to different simulated users, which is refused otherwise.
    """

    min_pass_rate: float | None = None
    floors: Mapping[str, float] = EMPTY
    ceilings: Mapping[str, float] = EMPTY
    margin: float | None = None
    margins: Mapping[str, float] = EMPTY
    slices: tuple[SliceRule, ...] = ()
    max_missing_share: float = 0.05
    alpha: float = 0.05
    lower_is_better: tuple[str, ...] = ()
    cluster: str | None = None
    max_missing: float | None = None
    bounds: Mapping[str, tuple[float, float]] = EMPTY
    spend_alpha: bool = False
    higher_is_better: tuple[str, ...] = ()
    smallest_difference_that_matters: float | Mapping[str, float] = SMALLEST_DIFFERENCE
    other_users: bool = False

    def __post_init__(self) -> None:
        _check(self, "the gate rules")
        object.__setattr__(self, "bounds", checked_bounds(self.bounds, "the gate rules"))
        object.__setattr__(
            self,
            "smallest_difference_that_matters",
            checked_smallest_difference(self.smallest_difference_that_matters),
        )
        for name in ("spend_alpha", "other_users"):
            if not isinstance(given := getattr(self, name), bool):
                raise ConfigurationError(f"the gate rules: {name} must be true or false (got {given!r})")
        for name in ("slices", "lower_is_better", "higher_is_better"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        if not all(isinstance(rule, SliceRule) for rule in self.slices):
            raise ConfigurationError(
                "slices of the gate rules must be SliceRule records; use from_mapping to read tables"
            )
        if not _is_number(self.max_missing_share) or not 0 <= self.max_missing_share <= 1:
            raise ConfigurationError(f"max_missing_share must be between 0 and 1 (got {self.max_missing_share!r})")
        if not _is_number(self.alpha) or not 0 < self.alpha < 1:
            raise ConfigurationError(f"alpha must be between 0 and 1, such as 0.05 (got {self.alpha!r})")
        if self.cluster is not None and not isinstance(self.cluster, str):
            raise ConfigurationError(f"cluster must be the name of a metadata key (got {self.cluster!r})")

    @property
    def all_floors(self) -> dict[str, float]:
        """The minimum mean of each metric."""
        return _floors(self)

    @property
    def all_margins(self) -> dict[str, float]:
        """How much worse than the baseline each metric may be."""
        return _margins(self)

    @property
    def compares(self) -> bool:
        """True if a rule needs a baseline."""
        return bool(self.all_margins) or any(rule.all_margins for rule in self.slices)

    @property
    def empty(self) -> bool:
        """True if there are no rules."""
        return not (self.all_floors or self.ceilings or self.compares or self.slices)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric that a rule is about, whether about its mean or a quantile."""
        named = [*self.all_floors, *self.ceilings, *self.all_margins]
        for rule in self.slices:
            named += [*rule.all_floors, *rule.ceilings, *rule.all_margins]
        return tuple(dict.fromkeys(map(measured_metric, named)))

    def check_baseline(self, *, given: bool) -> None:
        """Raise if there are no rules, a margin without a baseline, or a baseline that no rule needs."""
        if self.empty:
            raise ConfigurationError("the gate has no rules: set at least min_pass_rate, or margin with a baseline")
        if self.compares and not given:
            raise ConfigurationError("a rule with a margin compares with a baseline; give one")
        if given and not self.compares:
            raise ConfigurationError(
                "a baseline was given, but no rule compares with it: set margin, as in margin = 0.02"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> GateRules:
        """Read rules from a mapping, such as a table of a TOML or JSON file."""
        values = known_keys(cls, mapping, "the gate rules have")
        slices = values.get("slices", ())
        if not isinstance(slices, list | tuple):
            raise ConfigurationError(f"slices of the gate rules must be a list of tables (got {slices!r})")
        if slices:
            values["slices"] = tuple(_slice_rule(rule) for rule in slices)
        return cls(**values)

    @classmethod
    def load(cls, path: Path | str, table: str = "gate") -> GateRules:
        """Read rules from a table of a TOML file; dots separate nested tables, as in "tool.fairtrial.gate"."""
        return load_table(path, table, "the gate rules", cls.from_mapping)


def load_table[Record](path: Path | str, table: str, what: str, read: Callable[[Mapping[str, Any]], Record]) -> Record:
    """Read a record from a table of a TOML file; `what` is what errors call it."""
    try:
        found: Any = load_toml(Path(path))
    except OSError as error:
        raise ConfigurationError(f"{what} in {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a TOML file: {error}") from None
    for name in table.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} has no table [{table}] with {what}")
    try:
        return read(found)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _slice_rule(rule: Any) -> SliceRule:
    if isinstance(rule, SliceRule):
        return rule
    if not isinstance(rule, Mapping):
        raise ConfigurationError(f"a slice rule must be a table with `by`, a metadata key (got {rule!r})")
    values = known_keys(SliceRule, rule, "a slice rule has")
    return SliceRule(**({"by": ""} | values))


def known_keys(kind: type[Any], mapping: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return a table whose keys are all fields of a record; an unknown one is refused, with the nearest known one."""
    names = [one.name for one in fields(kind)]
    for name in mapping:
        if name not in names:
            near = difflib.get_close_matches(str(name), names)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ConfigurationError(f"{what} no {name!r}; {hint}")
    return dict(mapping)


def checked_bounds(bounds: object, what: str) -> FrozenDict[str, tuple[float, float]]:
    """Check and return the ranges of metrics, by name."""
    if not isinstance(bounds, Mapping):
        raise ConfigurationError(f"{what}: bounds must be a table of metric names and ranges (got {bounds!r})")
    made = {}
    for metric, ends in bounds.items():
        valid = isinstance(ends, list | tuple) and len(ends) == 2 and all(map(_is_number, ends)) and ends[0] < ends[1]
        if not isinstance(metric, str) or not valid:
            raise ConfigurationError(f"{what}: bounds.{metric} must be a range such as [0, 1] (got {ends!r})")
        made[metric] = (float(ends[0]), float(ends[1]))
    return FrozenDict(made)


def checked_smallest_difference(value: Any) -> float | FrozenDict[str, float]:
    """Check the smallest difference that matters: one number above 0, or one for each metric."""
    what = "smallest_difference_that_matters"
    for name, one in value.items() if isinstance(value, Mapping) else (("", value),):
        if not _is_number(one) or one <= 0:
            where = f"{what}.{name}" if name else what
            raise ConfigurationError(f"{where} must be a number above 0, such as 0.05 (got {one!r})")
    return FrozenDict(value) if isinstance(value, Mapping) else float(value)


def _check(rules: GateRules | SliceRule, what: str) -> None:
    examples = {"min_pass_rate": "0.8, for 80%", "margin": "0.02, for two points", "max_missing": "0.05, for 5%"}
    for name, example in examples.items():
        value = getattr(rules, name)
        if value is not None and not (_is_number(value) and 0 <= value <= 1):
            raise ConfigurationError(f"{what}: {name} must be between 0 and 1, such as {example} (got {value!r})")
    for name in ("floors", "ceilings", "margins"):
        table = getattr(rules, name)
        if not isinstance(table, Mapping):
            raise ConfigurationError(f"{what}: {name} must be a table of metric names and numbers (got {table!r})")
        for metric, value in table.items():
            if not isinstance(metric, str) or not _is_number(value) or (name == "margins" and value < 0):
                kind = "a number of at least 0" if name == "margins" else "a number"
                raise ConfigurationError(f"{what}: {name}.{metric} must be {kind} (got {value!r})")
            quantile = parse_quantile(metric)
            if quantile is None and _LIKE_QUANTILE.match(metric):
                raise ConfigurationError(
                    f"{what}: a quantile in {name} must be median or p0.1 to p99.9 of a metric, such as p95:latency_ms "
                    f"(got {metric})"
                )
            if is_ratio(metric) and name != "margins":
                raise ConfigurationError(
                    f"{what}: {name} must name metrics or quantiles (got {metric}, which compares with a baseline); "
                    f"use margins, or median:{measured_metric(metric)}"
                )
        object.__setattr__(rules, name, FrozenDict(table))
    for one, many in (("min_pass_rate", "floors"), ("margin", "margins")):
        if getattr(rules, one) is not None and PASSED in getattr(rules, many):
            raise ConfigurationError(f"{what}: {one} and {many}.passed say the same thing; give one of them")


def _is_number(value: object) -> bool:
    # Whole numbers beyond those of floats are refused too.
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _floors(rules: GateRules | SliceRule) -> dict[str, float]:
    first = {} if rules.min_pass_rate is None else {PASSED: rules.min_pass_rate}
    return first | dict(rules.floors)


def _margins(rules: GateRules | SliceRule) -> dict[str, float]:
    first = {} if rules.margin is None else {PASSED: rules.margin}
    return first | dict(rules.margins)
