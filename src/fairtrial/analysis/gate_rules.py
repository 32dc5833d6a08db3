"""What a run must reach to be let through a gate. Needs no numbers yet, so nothing heavy is imported."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fairtrial.analysis.metrics import PASSED
from fairtrial.errors import ConfigurationError
from fairtrial.frozen import EMPTY, FrozenDict
from fairtrial.types import JSON


@dataclass(frozen=True, slots=True)
class SliceRule:
    """Rules for the samples whose metadata has `value` under the key `by`; without a value, for every one there is."""

    by: str
    value: JSON = None
    min_pass_rate: float | None = None
    floors: Mapping[str, float] = EMPTY
    ceilings: Mapping[str, float] = EMPTY
    margin: float | None = None
    margins: Mapping[str, float] = EMPTY

    def __post_init__(self) -> None:
        by: object = self.by  # It may come from a file.
        if not isinstance(by, str) or not by:
            raise ConfigurationError(f"a slice rule needs `by`, the metadata key it slices by, not {self.by!r}")
        _check(self, f"the slice rule for {self.by!r}")
        if not self.all_floors and not self.ceilings and not self.all_margins:
            raise ConfigurationError(f"the slice rule for {self.by!r} asks for nothing: add min_pass_rate or margin")

    @property
    def all_floors(self) -> dict[str, float]:
        """The least mean of each metric."""
        return _floors(self)

    @property
    def all_margins(self) -> dict[str, float]:
        """How much worse than the baseline each metric may be."""
        return _margins(self)


@dataclass(frozen=True, slots=True)
class GateRules:
    """What a run must reach. Change a copy with `dataclasses.replace`.

    Attributes:
        min_pass_rate: The least pass rate, task errors and timeouts counting as failures.
        floors: The least mean of metrics, by name.
        ceilings: The greatest mean of metrics of which less is better, such as latency_ms or cost_usd.
        margin: How much the pass rate may lie below the baseline's: .02 is two points.
        margins: The same for other metrics, by name.
        slices: Rules for some of the samples.
        max_missing_share: Above this share of missing trials the gate does not decide.
        alpha: The accepted chance of letting a bad run through, or of stopping a good one.
        lower_is_better: Metrics under `margins` of which less is better, besides latency_ms, tokens and cost_usd.
        cluster: The metadata key of samples that are not independent; None for the run's own, "" for none.
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

    def __post_init__(self) -> None:
        _check(self, "the gate rules")
        for name in ("slices", "lower_is_better"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        if not all(isinstance(rule, SliceRule) for rule in self.slices):
            raise ConfigurationError("the gate rules' slices are SliceRule records; from_mapping makes them of tables")
        if not _is_number(self.max_missing_share) or not 0 <= self.max_missing_share <= 1:
            raise ConfigurationError(f"max_missing_share is a share from 0 to 1, not {self.max_missing_share!r}")
        if not _is_number(self.alpha) or not 0 < self.alpha < 1:
            raise ConfigurationError(f"alpha lies between 0 and 1, as in 0.05, not at {self.alpha!r}")
        if self.cluster is not None and not isinstance(self.cluster, str):
            raise ConfigurationError(f"cluster is the name of a metadata key, not {self.cluster!r}")

    @property
    def all_floors(self) -> dict[str, float]:
        """The least mean of each metric."""
        return _floors(self)

    @property
    def all_margins(self) -> dict[str, float]:
        """How much worse than the baseline each metric may be."""
        return _margins(self)

    @property
    def compares(self) -> bool:
        """Whether a rule needs a baseline."""
        return bool(self.all_margins) or any(rule.all_margins for rule in self.slices)

    @property
    def empty(self) -> bool:
        """Whether nothing is asked for."""
        return not (self.all_floors or self.ceilings or self.compares or self.slices)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric that a rule is about."""
        named = [*self.all_floors, *self.ceilings, *self.all_margins]
        for rule in self.slices:
            named += [*rule.all_floors, *rule.ceilings, *rule.all_margins]
        return tuple(dict.fromkeys(named))

    def check_baseline(self, *, given: bool) -> None:
        """Refuse to decide without rules, with a margin and no baseline, or with a baseline that no rule needs."""
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
        """Rules from a table, as a TOML or JSON file gives it."""
        values = _known(cls, mapping, "the gate rules")
        slices = values.get("slices", ())
        if not isinstance(slices, list | tuple):
            raise ConfigurationError(f"the gate rules' slices are a list of tables, not {slices!r}")
        if slices:
            values["slices"] = tuple(_slice_rule(rule) for rule in slices)
        return cls(**values)

    @classmethod
    def load(cls, path: Path | str, table: str = "gate") -> GateRules:
        """Rules from a table of a TOML file; dots lead to tables inside others, as in "tool.fairtrial.gate"."""
        try:
            found: Any = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"the gate rules in {path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} is not a TOML file: {error}") from None
        for name in table.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise ConfigurationError(f"{path} has no table [{table}] with gate rules")
        return cls.from_mapping(found)


def _slice_rule(rule: Any) -> SliceRule:
    if isinstance(rule, SliceRule):
        return rule
    if not isinstance(rule, Mapping):
        raise ConfigurationError(f"a slice rule is a table with by = a metadata key, not {rule!r}")
    values = _known(SliceRule, rule, "a slice rule")
    return SliceRule(**({"by": ""} | values))


def _known(kind: type[GateRules] | type[SliceRule], mapping: Mapping[str, Any], what: str) -> dict[str, Any]:
    names = [one.name for one in fields(kind)]
    for name in mapping:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ConfigurationError(
                f"{what} have no {name!r}; {hint}" if kind is GateRules else f"{what} has no {name!r}; {hint}"
            )
    return dict(mapping)


def _check(rules: GateRules | SliceRule, what: str) -> None:
    for name in ("min_pass_rate", "margin"):
        value = getattr(rules, name)
        if value is not None and not (_is_number(value) and 0 <= value <= 1):
            raise ConfigurationError(f"{what}: {name} is a share from 0 to 1, such as 0.8, not {value!r}")
    for name in ("floors", "ceilings", "margins"):
        table = getattr(rules, name)
        if not isinstance(table, Mapping):
            raise ConfigurationError(f"{what}: {name} is a table of metric names and numbers, not {table!r}")
        for metric, value in table.items():
            if not isinstance(metric, str) or not _is_number(value) or (name == "margins" and value < 0):
                kind = "a number of at least 0" if name == "margins" else "a number"
                raise ConfigurationError(f"{what}: {name}.{metric} is {kind}, not {value!r}")
        object.__setattr__(rules, name, FrozenDict(table))
    for one, many in (("min_pass_rate", "floors"), ("margin", "margins")):
        if getattr(rules, one) is not None and PASSED in getattr(rules, many):
            raise ConfigurationError(f"{what}: {one} and {many}.passed say the same thing; give one of them")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _floors(rules: GateRules | SliceRule) -> dict[str, float]:
    first = {} if rules.min_pass_rate is None else {PASSED: rules.min_pass_rate}
    return first | dict(rules.floors)


def _margins(rules: GateRules | SliceRule) -> dict[str, float]:
    first = {} if rules.margin is None else {PASSED: rules.margin}
    return first | dict(rules.margins)
