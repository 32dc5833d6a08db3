"""Write Python files from syntax trees, so that foreign text can only become a literal.

The text of a file is never put together from foreign text: templates of ours are parsed, nodes take the place of their
capitalized names, and the result is compared with the tree after it is written.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

from fairtrial.errors import DataError

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
