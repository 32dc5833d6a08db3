"""Compare JSON field by field, with tolerances."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fairtrial.base.codec import to_json
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import CodecError, ConfigurationError, NothingToScoreError
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.numeric import is_within
from fairtrial.scoring.score import Metric, Score
from fairtrial.scoring.structure import as_json, same_json

_INDEX = re.compile(r"\[\d+\]")
_MISSING = object()
_SHOWN = 5
_KINDS: tuple[Literal["wrong", "missing", "unexpected"], ...] = ("wrong", "missing", "unexpected")


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of either side. `kind` is empty if both sides agree."""

    path: str
    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class _Rules:
    tolerance: float
    relative: bool
    tolerances: Mapping[str, float]
    ignore: frozenset[str]
    unordered: frozenset[str]

    def fields(self, output: Any, expected: Any, path: str = "$") -> Iterator[_Field]:
        """Compare two trees; yields one item for every field of either."""
        general = _INDEX.sub("[*]", path)
        if path in self.ignore or general in self.ignore:
            return
        if isinstance(expected, dict) and isinstance(output, dict):
            for key in [*expected, *(key for key in output if key not in expected)]:
                yield from self.fields(output.get(key, _MISSING), expected.get(key, _MISSING), f"{path}.{key}")
        elif isinstance(expected, list) and isinstance(output, list):
            if path in self.unordered or general in self.unordered:
                output = self._aligned(output, expected, path)
            for place in range(max(len(expected), len(output))):
                ours = output[place] if place < len(output) else _MISSING
                theirs = expected[place] if place < len(expected) else _MISSING
                yield from self.fields(ours, theirs, f"{path}[{place}]")
        elif expected is _MISSING:
            yield from (_Field(leaf, "unexpected", f"unexpected: {leaf}") for leaf in self._leaves(output, path))
        elif output is _MISSING:
            yield from (_Field(leaf, "missing", f"missing: {leaf}") for leaf in self._leaves(expected, path))
        elif isinstance(expected, dict | list) and expected:
            # A container in place of which there is something else: all its fields are wrong.
            yield from (_Field(leaf, "wrong", f"wrong: {leaf}") for leaf in self._leaves(expected, path))
        elif self._same(output, expected, self.tolerances.get(path, self.tolerances.get(general))):
            yield _Field(path, "")
        else:
            yield _Field(path, "wrong", f"wrong: {path} is {_short(output)}, expected {_short(expected)}")

    def _leaves(self, tree: Any, path: str) -> Iterator[str]:
        if path in self.ignore or _INDEX.sub("[*]", path) in self.ignore:
            return
        if isinstance(tree, dict) and tree:
            for key, item in tree.items():
                yield from self._leaves(item, f"{path}.{key}")
        elif isinstance(tree, list) and tree:
            for place, item in enumerate(tree):
                yield from self._leaves(item, f"{path}[{place}]")
        else:
            yield path

    def _same(self, output: Any, expected: Any, tolerance: float | None) -> bool:
        if _is_number(output) and _is_number(expected):
            allowed = self.tolerance if tolerance is None else tolerance
            return is_within(output, expected, allowed * abs(expected) if self.relative else allowed)
        return same_json(output, expected)

    def _aligned(self, output: list[Any], expected: list[Any], path: str) -> list[Any]:
        """Return the items of the output, those that equal an expected item in its place."""
        rest = list(output)
        places: list[Any] = []
        for place, item in enumerate(expected):
            at = f"{path}[{place}]"
            match = next(
                (i for i, ours in enumerate(rest) if not any(f.kind for f in self.fields(ours, item, at))), None
            )
            places.append(_MISSING if match is None else rest.pop(match))
        filled = [rest.pop(0) if item is _MISSING and rest else item for item in places]
        return [*filled, *rest]


def json_diff(
    *,
    tolerance: float = 0.0,
    relative: bool = False,
    tolerances: Mapping[str, float] = EMPTY,
    ignore: Collection[str] = (),
    unordered: Collection[str] = (),
    pass_at: float = 1.0,
) -> Callable[[object, object], Score]:
    """The share of JSON fields that agree, of all fields of the output and of expected. Text is read as JSON first.

    Paths are written as in "$.items[0].price" (RFC 9535); "$.items[*].price" stands for all items. Metrics: the number
    of `wrong`, `missing` and `unexpected` fields.

    Args:
        tolerance: The largest accepted difference of numbers.
        relative: Take tolerances as shares of the expected number.
        tolerances: Tolerances of single paths, instead of `tolerance`.
        ignore: Paths that are not compared, with everything under them.
        unordered: Paths of arrays whose order does not matter.
        pass_at: The share from which it passes.
    """
    for number in (tolerance, *tolerances.values()):
        if not (math.isfinite(number) and number >= 0):
            raise ConfigurationError(f"a tolerance must be a finite number of at least 0 (got {number})")
    if not 0.0 < pass_at <= 1.0:
        raise ConfigurationError(f"pass_at of json_diff must be above 0 and at most 1 (got {pass_at})")
    if wrong := [path for path in (*tolerances, *ignore, *unordered) if not path.startswith("$")]:
        raise ConfigurationError(f"a path of json_diff must begin with $ (got {wrong[0]!r})")
    rules = _Rules(tolerance, relative, dict(tolerances), frozenset(ignore), frozenset(unordered))

    @evaluator(inline=True, name="json_diff", needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        try:
            found = to_json(as_json(output))
        except CodecError as error:
            return Score(0.0, False, f"the output is not JSON: {error.problem}")
        wanted = to_json(as_json(expected))
        fields = list(rules.fields(found, wanted))
        if not fields and not same_json(found, wanted):
            raise NothingToScoreError("json_diff: every field is ignored, so nothing was compared")
        different = [field for field in fields if field.kind]
        value = 1 - len(different) / len(fields) if fields else 1.0
        counts = {kind: sum(field.kind == kind for field in different) for kind in _KINDS}
        reason = "; ".join(field.text for field in different[:_SHOWN])
        if len(different) > _SHOWN:
            reason += f"; and {len(different) - _SHOWN} more"
        metrics = [Metric(kind, count, higher_is_better=False) for kind, count in counts.items()]
        return Score(value, value >= pass_at, reason, metrics)

    return score


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
