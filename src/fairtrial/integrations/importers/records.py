"""What importers make: runs, samples, scores and evaluators of foreign files."""

from __future__ import annotations

import ast
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fairtrial.base.codec import parse_foreign_json
from fairtrial.base.foreign import inside, read_whole
from fairtrial.base.frozen import EMPTY, JSON
from fairtrial.data.sample import NOT_GIVEN
from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import CodecError, DataError
from fairtrial.scoring.score import Metric, Score

_LONGEST_NAME = 60
_MAX_TOKENS = (1 << 31) - 1
_LONGEST_MS = 1 << 53  # Beyond it, floats are not exact.


def as_text(value: Any) -> str:
    """Return a text, or "" for anything else."""
    return value if isinstance(value, str) else ""


def is_id(value: Any) -> bool:
    """Return whether a value can be the id of a sample."""
    return isinstance(value, int) or bool(as_text(value))


def reference(value: Any) -> Any:
    """Return the expected value of a sample: to other tools, null means that there is none."""
    return NOT_GIVEN if value is None else value


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return an object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; none for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def as_number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_milliseconds(value: Any, unit: float = 1.0) -> int | None:
    """Return a duration in units of `unit` milliseconds, or None if it is not a possible one."""
    number = as_number(value)
    return round(number * unit) if number is not None and abs(number) <= _LONGEST_MS / unit else None


def as_time(value: Any) -> float:
    """Return an ISO 8601 time in seconds since the epoch; 0 if it is none."""
    try:
        return datetime.fromisoformat(as_text(value)).timestamp()
    except ValueError:
        return 0.0


def usage_of(input_tokens: Any, output_tokens: Any, cached_tokens: Any = 0, cost_usd: Any = None) -> TokenUsage:
    """Return token counts, without those that are no possible count."""
    cost = as_number(cost_usd)
    known_cost = cost if cost is not None and cost >= 0 else None
    return TokenUsage(_tokens(input_tokens), _tokens(output_tokens), _tokens(cached_tokens), known_cost)


def _tokens(count: Any) -> int:
    return min(max(int(as_number(count) or 0), 0), _MAX_TOKENS)


def suite_name(name: str) -> str:
    """Return a name that is valid for a suite and a file."""
    return re.sub(r"[^\w.]+", "-", name).strip("-._").lower()[:_LONGEST_NAME] or "imported"


def experiment_name(name: str) -> str:
    """Return a name that is valid for an experiment."""
    return re.sub(r"[:@/\s]+", "-", name).strip("-")[:_LONGEST_NAME] or "imported"


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the files of a folder. Raises `DataError` for a link to a file elsewhere."""
    return [inside(folder, file.relative_to(folder)) for file in folder.glob(pattern) if file.is_file()]


def file_hash(path: Path) -> str:
    """Return a hash of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_start(path: Path, suffix: str, size: int = 4096) -> bytes:
    """Return the first bytes of a file with a suffix; none if there is no such file."""
    if path.suffix.lower() != suffix or not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(size)


def load_json_object(path: Path) -> dict[str, Any]:
    """Load a file that contains one JSON object. Raises `DataError` if it does not."""
    with path.open("rb") as file:
        return as_document(read_whole(file, str(path)), str(path))


def as_document(content: bytes, source: str) -> dict[str, Any]:
    """Return a JSON object. Raises `DataError` if the content is something else."""
    try:
        document = parse_foreign_json(content)
    except CodecError as error:
        raise DataError(f"{source} must be JSON ({error})") from None
    if not isinstance(document, dict):
        raise DataError(f"{source} must contain a JSON object (got {type(document).__name__})")
    return document


_WIDTH = 100
_DEEPEST = 20  # The parser of Python allows 200 parentheses.
_LARGEST_INTEGER = 1 << 63


def literal(value: Any) -> ast.expr:
    """Return a JSON value as a literal. Raises `DataError` for other values, large integers and deep nesting."""
    return _literal(value, _DEEPEST)


def _literal(value: Any, depth: int) -> ast.expr:
    if not depth:
        raise DataError(f"a literal may be nested {_DEEPEST} levels deep")
    if value is None or type(value) in (bool, str):
        return ast.Constant(value)
    if (type(value) is int and abs(value) < _LARGEST_INTEGER) or (type(value) is float and math.isfinite(value)):
        # Python has no negative literals: what is written is read as a minus before a number.
        is_negative = math.copysign(1, value) < 0
        return ast.UnaryOp(ast.USub(), ast.Constant(-value)) if is_negative else ast.Constant(value)
    if type(value) is list:
        return ast.List([_literal(item, depth - 1) for item in value], ast.Load())
    if type(value) is dict and all(type(key) is str for key in value):
        keys: list[ast.expr | None] = [ast.Constant(key) for key in value]
        return ast.Dict(keys, [_literal(item, depth - 1) for item in value.values()])
    raise DataError(f"a literal must be a JSON value of ordinary size (got {type(value).__name__})")


def fill(template: str, **parts: ast.expr) -> list[ast.stmt]:
    """Parse a template and replace names by nodes; the name of a function is replaced by that of a `Name`."""
    return [_Fill(parts).visit(statement) for statement in ast.parse(template).body]


def fill_expression(template: str, **parts: ast.expr) -> ast.expr:
    """Parse a template of an expression and replace names by nodes."""
    node: ast.expr = _Fill(parts).visit(ast.parse(template, mode="eval").body)
    return node


def replace_names[Node: ast.AST](node: Node, **parts: ast.expr) -> Node:
    """Replace names in a tree by nodes, in place."""
    replaced: Node = _Fill(parts).visit(node)
    return replaced


class _Fill(ast.NodeTransformer):
    def __init__(self, parts: dict[str, ast.expr]) -> None:
        self.parts = parts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.parts.get(node.id, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        named = self.parts.get(node.name)
        if isinstance(named, ast.Name):
            node.name = named.id
        return self.generic_visit(node)


def names_in(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that trees read or write."""
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def source_of(statements: Sequence[ast.stmt]) -> str:
    """Return the source code of a file.

    Raises:
        DataError: the code would not be read as the same statements.
    """
    module = ast.fix_missing_locations(ast.Module(list(statements), []))
    text, before = "", type(module.body[0])
    for statement in module.body:
        if ast.FunctionDef in (before, type(statement)):
            text += "\n\n"
        elif type(statement) is not before:
            text += "\n"
        text += f"{_statement(statement)}\n"
        before = type(statement)
    try:
        read = ast.dump(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"a suite file cannot be written: {error}") from None
    if read != ast.dump(module):
        raise DataError("a suite file cannot be written: it would be read as other code")
    return text


def _statement(statement: ast.stmt) -> str:
    line = ast.unparse(ast.Module([statement], []))  # A text that begins a module is its docstring.
    if len(line) > _WIDTH and isinstance(statement, ast.Assign):
        return f"{ast.unparse(statement.targets[0])} = {_wrapped(statement.value, 0, len(line))}"
    return line


def _wrapped(node: ast.expr, indent: int, length: int = 0) -> str:
    """Return an expression, with an item per line where one line would be too long."""
    line = ast.unparse(node)
    if max(length, indent + len(line)) <= _WIDTH:
        return line
    match node:
        case ast.Call():
            items = [("", argument) for argument in node.args]
            items += [(f"{keyword.arg}=", keyword.value) for keyword in node.keywords]
            opening, closing = f"{ast.unparse(node.func)}(", ")"
        case ast.List():
            items, opening, closing = [("", item) for item in node.elts], "[", "]"
        case ast.Dict():
            items = [
                (f"{ast.unparse(key)}: ", value)
                for key, value in zip(node.keys, node.values, strict=True)
                if key is not None
            ]
            opening, closing = "{", "}"
        case _:
            return line
    if not items:
        return line
    inner = indent + 4
    lines = [f"{' ' * inner}{label}{_wrapped(item, inner)},\n" for label, item in items]
    return f"{opening}\n{''.join(lines)}{' ' * indent}{closing}"


_LONGEST_REASON = 4_000


@dataclass(frozen=True, slots=True)
class SourceScore:
    """One number of the source. `value` is None if the source has none for this trial, as for NaN."""

    name: str
    value: float | None
    passed: bool | None = None  # The source's own verdict.
    reason: str = ""
    higher_is_better: bool | None = True  # None: a measurement, such as a duration, that is never the value of a trial.
    metadata: Mapping[str, JSON] = EMPTY

    def __post_init__(self) -> None:
        if not self.name:  # Any text is a key of a JSON object, and a metric must have a name.
            object.__setattr__(self, "name", "unnamed")


@dataclass(slots=True)
class ScoreRanges:
    """Which scores of a run leave 0 to 1, and which one is the value of its trials."""

    names: dict[str, None] = field(default_factory=dict)  # In the order of the source, without measurements.
    wide: set[str] = field(default_factory=set)

    def add(self, scores: Iterable[SourceScore]) -> None:
        """Take note of the scores of a trial."""
        for score in scores:
            if score.value is None or score.higher_is_better is None:
                continue
            self.names[score.name] = None
            if not 0.0 <= score.value <= 1.0 or score.higher_is_better is False:
                self.wide.add(score.name)

    @property
    def headline(self) -> str | None:
        """The score that is the value of a trial; None if all leave 0 to 1."""
        return next((name for name in self.names if name not in self.wide), None)

    def remarks(self) -> list[str]:
        """Say which scores are only metrics."""
        if not self.names:
            return []
        if self.headline is None:
            listed = ", ".join(self.names)
            return [f"no score stays within 0 to 1 ({listed}): they are metrics, and no trial has a value or passes"]
        found = []
        if self.wide:
            wide = ", ".join(name for name in self.names if name in self.wide)
            found.append(f"imported as metrics only, as not from 0 to 1, or as lower is better: {wide}")
        if len(self.names) - len(self.wide) > 1:
            found.append(f"{self.headline} is the value of a trial; the other scores are metrics")
        return found

    def score(
        self, scores: Sequence[SourceScore], *, value: float | None = None, passed: bool | None = None
    ) -> Score | None:
        """Return the score of a trial; None if the source has none.

        Value and verdict are those of the source if it has them. Without a verdict, a value of at least 0.5 passes.
        """
        metrics = [self._metric(score) for score in scores if score.value is not None]
        deciding = self.headline
        headline = next((score for score in scores if score.name == deciding), None)
        if value is None and headline is not None:
            value = headline.value
        if value is None:
            if passed is None and (self.headline is not None or not metrics):
                return None
            value = float(bool(passed))
        if passed is None and headline is not None:
            passed = headline.passed
        if passed is None:
            passed = self.headline is not None and value >= 0.5
        reason = "" if headline is None else headline.reason
        return Score(value, passed, reason[:_LONGEST_REASON], _distinct(metrics))

    def _metric(self, score: SourceScore) -> Metric:
        value = score.value or 0.0
        passed = score.passed
        judged = score.higher_is_better is True and score.name not in self.wide
        if passed is None and judged:
            passed = value >= 0.5
        direction = score.higher_is_better if judged or score.higher_is_better is False else None
        reason = score.reason[:_LONGEST_REASON]
        return Metric(score.name, value, 0.0, score.metadata, passed, reason, direction)


def _distinct(metrics: Iterable[Metric]) -> list[Metric]:
    return list({metric.name: metric for metric in metrics}.values())
