"""Functions by their bytecode: what they are, and which names they use."""

from __future__ import annotations

import dis
import hashlib
from functools import lru_cache
from types import CodeType
from typing import Any

from fairtrial.base.codec import canonical
from fairtrial.base.frozen import JSON


@lru_cache(maxsize=4096)
def bytecode_digest(code: CodeType) -> str:
    """Return a digest of a function that is in no file, or whose source cannot be told."""
    return hashlib.sha256(canonical(_bytecode(code))).hexdigest()[:32]


def _bytecode(code: CodeType) -> JSON:
    constants: list[JSON] = [_constant(item) for item in code.co_consts]
    return [
        "bytecode",
        code.co_code.hex(),
        constants,
        list(code.co_names),
        list(code.co_varnames),
        list(code.co_freevars),
        [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags],
    ]


def _constant(value: Any) -> JSON:
    if isinstance(value, CodeType):
        return _bytecode(value)
    if isinstance(value, tuple):
        return ["tuple", [_constant(item) for item in value]]
    if isinstance(value, frozenset):
        return ["frozenset", sorted((_constant(item) for item in value), key=canonical)]
    return [type(value).__name__, ascii(value)]


_GLOBALS = frozenset(
    dis.opmap[name]
    for name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")
)


@lru_cache(maxsize=4096)
def names_used(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a function and the functions inside it use: of globals, and of attributes."""
    names: set[str] = set()
    extended = 0
    for operation, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument |= extended
        extended = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation in _GLOBALS:
            names.add(code.co_names[argument >> 1 if operation == dis.opmap["LOAD_GLOBAL"] else argument])
    attributes = set(code.co_names) - names
    for item in code.co_consts:
        if isinstance(item, CodeType):
            inner = names_used(item)
            names |= inner[0]
            attributes |= inner[1]
    return frozenset(names), frozenset(attributes)
