"""The analysis plan: what will be compared and how, decided before the first result. Imports no numerical libraries."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any

from fairtrial.base.codec import digest, to_json
from fairtrial.base.formatting import count
from fairtrial.base.frozen import EMPTY, JSON
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.metrics import PASSED, SMALLEST_DIFFERENCE, ExperimentSource
from fairtrial.reports.figures.rules import GateRules, known_keys, load_table
from fairtrial.store.notes import PlanNote
from fairtrial.store.protocol import RESUMABLE, RunRecord
from fairtrial.trials.config import check_history

TABLE = "plan"
"""The table of a file with a plan; in pyproject.toml it is `[tool.fairtrial.plan]`."""

_LARGEST = 10**12  # More samples than any run has.
_RULES = (
    "smallest_difference_that_matters", "margin", "margins", "min_pass_rate", "floors", "ceilings", "cluster", "alpha",
    "max_missing_share", "max_missing", "lower_is_better", "higher_is_better", "bounds",
)  # fmt: skip
_COMMENTS = {
    "suite": "the suite that the plan is for",
    "primary": "tested on its own, at the full alpha",
    "secondary": "adjusted by Holm, with an alpha of their own",
    "smallest_difference_that_matters": "what `samples` detect",
    "slices": "metadata keys by which the comparison is repeated",
    "tests": "of the primary metric: one for each candidate",
    "samples": "fewer are a deviation",
    "looks": "alpha is the total of all looks at the test split",
    "history": "earlier runs whose results make figures more precise",
    "max_missing_share": "up to it missing outcomes are taken at their worst",
}


@dataclass(frozen=True, slots=True)
class AnalysisPlan:
    """What a comparison will ask, and how. Stored with a run before its first trial: `suite.run(plan=...)`.

    Attributes:
        primary: The metric that answers the question. It is tested on its own, at the full alpha.
        secondary: Other metrics to compare, adjusted by Holm among themselves.
        smallest_difference_that_matters: As in `compare`: one number for shares, or one for each metric by name.
        margin: As in `GateRules`: how much the pass rate may lie below the baseline's.
        margins: As in `GateRules`: the same for other metrics, by name.
        min_pass_rate: As in `GateRules`.
        floors: As in `GateRules`.
        ceilings: As in `GateRules`.
        slices: Metadata keys by which the comparison is repeated.
        cluster: The metadata key of samples that are not independent; None for the run's own, "" for none.
        alpha: The accepted chance of a false alarm: in the primary metric, and in all others together.
        tests: Number of tests of the primary metric, one for each candidate.
        samples: Number of samples; None if it was not planned.
        repeats: Number of repeats of each sample.
        power: The probability that `samples` samples detect the smallest difference that matters.
        max_missing_share: As in `GateRules`: up to this share, missing outcomes are taken at their worst.
        max_missing: As in `GateRules`: up to this share, leave missing outcomes out instead.
        lower_is_better: As in `GateRules`: metrics of which less is better.
        higher_is_better: As in `GateRules`: metrics of which more is better.
        bounds: As in `GateRules`: the ranges of metrics.
        suite: The suite that the plan is for; empty for any.
        history: As in `EvalConfig`: earlier runs that make the figures of a report more precise.
        looks: Whether alpha is the total of all looks at a test split (`Dataset.split`): the k-th comparison of a new
            pair has the level alpha/(k(k + 1)).
    """

    primary: str = PASSED
    _: KW_ONLY
    secondary: tuple[str, ...] = ()
    smallest_difference_that_matters: float | Mapping[str, float] = SMALLEST_DIFFERENCE
    margin: float | None = None
    margins: Mapping[str, float] = EMPTY
    min_pass_rate: float | None = None
    floors: Mapping[str, float] = EMPTY
    ceilings: Mapping[str, float] = EMPTY
    slices: tuple[str, ...] = ()
    cluster: str | None = None
    alpha: float = 0.05
    tests: int = 1
    samples: int | None = None
    repeats: int = 1
    power: float = 0.8
    max_missing_share: float = 0.05
    max_missing: float | None = None
    lower_is_better: tuple[str, ...] = ()
    higher_is_better: tuple[str, ...] = ()
    bounds: Mapping[str, tuple[float, float]] = EMPTY
    suite: str = ""
    history: int | tuple[str, ...] = 0
    looks: bool = False

    def __post_init__(self) -> None:
        for name in ("secondary", "slices", "lower_is_better", "higher_is_better"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        _names("primary", [self.primary])
        if self.primary in self.secondary:
            raise ConfigurationError(f"{self.primary} is the primary metric and listed under secondary: name it once")
        for name in ("tests", "samples", "repeats"):
            value = getattr(self, name)
            if (value is not None or name != "samples") and (type(value) is not int or not 1 <= value < _LARGEST):
                raise ConfigurationError(f"{name} must be a whole number of at least 1 (got {value!r})")
        power: object = self.power
        if not isinstance(power, int | float) or not 0 < power < 1:
            raise ConfigurationError(f"power must be between 0 and 1, such as 0.8 (got {power!r})")
        suite: object = self.suite
        if not isinstance(suite, str):
            raise ConfigurationError(f"suite must be the name of a suite (got {suite!r})")
        object.__setattr__(self, "history", check_history(self.history, "history"))
        looks: object = self.looks
        if not isinstance(looks, bool):
            raise ConfigurationError(f"looks must be true or false (got {looks!r})")
        rules = self.rules  # Checked there; tables are frozen copies.
        for name in _RULES:
            object.__setattr__(self, name, getattr(rules, name))
        for table in (self.margins, self.floors, self.ceilings, self.bounds, self.smallest_difference_that_matters):
            _names("metrics of a plan", list(table) if isinstance(table, Mapping) else [])

    @property
    def rules(self) -> GateRules:
        """The rules of a gate that were planned; there may be none."""
        return GateRules(**{name: getattr(self, name) for name in _RULES})

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics to compare, the primary one first."""
        return (self.primary, *self.secondary)

    def is_for(self, suite: str) -> bool:
        """True unless the plan is for another suite; a part of a suite (`support+part`) is no other one."""
        return not self.suite or suite == self.suite or suite.startswith(f"{self.suite}+")

    def smallest_difference(self, metric: str) -> float:
        """Return the smallest difference in a metric that matters."""
        smallest = self.smallest_difference_that_matters
        return smallest.get(metric, SMALLEST_DIFFERENCE) if isinstance(smallest, Mapping) else smallest

    @property
    def content(self) -> dict[str, JSON]:
        """The plan as it is stored and hashed: by key, without those that say nothing."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {name: _floats(values[name]) for name in _RULES} | {"power": float(self.power)}
        values = {name: one for name, one in values.items() if one or name not in ("suite", "history", "looks")}
        content: dict[str, JSON] = to_json({name: one for name, one in values.items() if one not in (None, (), {})})
        return content

    @property
    def digest(self) -> str:
        """The SHA-256 of the content; layout and comments of the file do not matter."""
        return digest(self.content)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> AnalysisPlan:
        """Read a plan from a mapping, such as a table of a TOML file; unknown keys are refused."""
        return cls(**known_keys(cls, mapping, "the plan has"))

    @classmethod
    def load(cls, path: Path | str, table: str = TABLE) -> AnalysisPlan:
        """Read a plan from a table of a TOML file; dots separate nested tables, as in "tool.fairtrial.plan"."""
        return load_table(path, table, "the plan", cls.from_mapping)

    def to_toml(self) -> str:
        """Return the plan as the text of a file, with comments for its readers."""
        return "\n".join([f"[{TABLE}]", *self._lines()]) + "\n"

    def _lines(self) -> Iterator[str]:
        order = ("suite", *(field.name for field in fields(self)))
        content = {**self.content, "secondary": list(self.secondary), "slices": list(self.slices)}
        for name in dict.fromkeys(order):
            if name in content:
                line = f"{name} = {_toml(content[name])}"
                yield f"{line:<42}  # {_COMMENTS[name]}" if name in _COMMENTS else line


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """Whether an analysis is the one that was planned before the first result.

    Attributes:
        digest: The hash of the plan.
        planned_at: When the plan was stored with the run, in seconds since the epoch.
        primary: The primary metric.
        deviations: What is not as planned; empty if everything is.
        content: The plan, by key.
    """

    digest: str
    planned_at: float
    primary: str
    deviations: tuple[str, ...]
    content: Mapping[str, JSON]

    @property
    def sentence(self) -> str:
        """Whether the analysis is as planned, in a line."""
        name, on = f"plan {self.digest[:8]}", date_text(self.planned_at)
        if self.deviations:
            return f"Not as planned on {on} ({name}): {count(len(self.deviations), 'deviation')}, listed below."
        return f"As planned on {on}, before the first result ({name})."

    @property
    def lines(self) -> tuple[str, ...]:
        """The deviations as sentences."""
        return tuple(f"Not as planned: {deviation}." for deviation in self.deviations)


def date_text(moment: float) -> str:
    """Format the date of a moment, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(moment))


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan in force in a run, and its note."""

    run: RunRecord
    note: PlanNote
    plan: AnalysisPlan
    readable: bool = True  # False if a later version has stored it, or if it is damaged.

    @property
    def in_use(self) -> AnalysisPlan | None:
        """The plan, if this version can read it."""
        return self.plan if self.readable else None

    def check(self, deviations: Iterator[str]) -> PlanCheck:
        """Return the check of an analysis, with its deviations."""
        found = tuple(dict.fromkeys(deviations)) if self.readable else ("this version cannot read the plan",)
        return PlanCheck(self.note.digest, self.note.given_at, self.plan.primary, found, self.note.content)


def plan_of(run: RunRecord) -> RunPlan | None:
    """Return the plan in force: the last one before the first result, else the first one after it."""
    notes = run.noted.plans
    if not notes:
        return None
    note = next((note for note in reversed(notes) if not note.results), notes[0])
    try:
        return RunPlan(run, note, AnalysisPlan.from_mapping(note.content))
    except ConfigurationError:
        return RunPlan(run, note, AnalysisPlan(), readable=False)


def plan_of_sides(sources: Sequence[ExperimentSource]) -> RunPlan | None:
    """Return the plan of a comparison: that of the first candidate that has one, else the baseline's."""
    return next((plan for source in (*sources[1:], *sources[:1]) if (plan := plan_of(source.run))), None)


def check_run(run: RunRecord) -> PlanCheck | None:
    """Check a run against its plan; None without one."""
    planned = plan_of(run)
    return None if planned is None else planned.check(run_deviations(run, planned, sized=True))


def run_deviations(run: RunRecord, planned: RunPlan, *, sized: bool) -> Iterator[str]:
    """Yield what in a run is not as planned; with `sized`, also too few samples."""
    plan, note = planned.plan, planned.note
    if note.results:
        yield f"the plan was given to {run.name} after {count(note.results, 'result')}"
    for other in run.noted.plans:
        if other.results and other.digest != note.digest:
            yield (
                f"another plan ({other.digest[:8]}) was given to {run.name} on {date_text(other.given_at)}, after "
                f"{count(other.results, 'result')}; it is not used"
            )
    if note.earlier:
        yield f"{', '.join(note.earlier)} ran the same code on the same samples before {run.name} had a plan"
    if run.parent_run is not None:
        yield f"{run.name} scores the outputs of run {run.parent_run} again"
    if run.noted.is_adaptive:
        yield f"{run.name} used its own results to decide when to stop"
    elif run.status == "stopped" or run.status in RESUMABLE:
        yield f"{run.name} ended early ({run.status})"
    if sized and plan.samples is not None and run.dataset_size < plan.samples:
        yield f"{run.name} has {count(run.dataset_size, 'sample')}, planned were {plan.samples:,}"
    if run.repeats != plan.repeats:
        yield f"{run.name} has {count(run.repeats, 'repeat')}, planned was {plan.repeats:,}"


def _names(what: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigurationError(f"{what} must be a list of names (got {value!r})")
    for name in value:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ConfigurationError(f"{what} must be a name in printable text (got {name!r})")
    return tuple(dict.fromkeys(value))


def _floats(value: Any) -> Any:
    """Return numbers as floats, so that 1 and 1.0 have one hash."""
    if isinstance(value, Mapping):
        return {name: _floats(part) for name, part in value.items()}
    return float(value) if isinstance(value, int) else value


def _toml(value: JSON) -> str:
    """Return a value of a plan in TOML. Names are printable, so a JSON string is a TOML string."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(key)} = {_toml(part)}" for key, part in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
