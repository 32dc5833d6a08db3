"""Descriptions of values: what is a part, what is cleaned from text, and what is only noted."""

from __future__ import annotations

import enum
import functools
import hashlib
import io
import os
import re
import sys
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fairtrial.runs.callables import Description, describe


def described(*values: Any, **named: Any) -> Description:
    return describe({"task": functools.partial(print, *values, **named)})


def items(*values: Any) -> list[Any]:
    """What is said about values that are given to a task."""
    whole: Any = described(*values).parts["<task>"]
    function, (kind, said), keywords = whole[1:]
    assert (whole[0], function, kind, keywords) == ("partial", ["name", "builtins", "print", None], "tuple", [])
    return list(said)


def part(value: Any) -> Any:
    """What is said about an object, which is a part of its own."""
    found = described(value)
    assert found.values == {"task[]"}
    return found.parts["task[]"]


class Colour(enum.Enum):
    RED = 1


def test_plain_values_are_described_by_themselves() -> None:
    assert items(1, "a", True, None, 1.5) == [1, "a", True, None, ["float", "1.5"]]
    assert items(2**53 - 1, 2**53, 1 - 2**53, -(2**53)) == [
        2**53 - 1,
        ["int", hex(2**53)],
        1 - 2**53,
        ["int", hex(-(2**53))],
    ]
    assert items("a\nb", "\u00fc") == [["text", "'a\\nb'"], "\u00fc"]
    assert items([1, (2,)], deque([3]), {"a": {1: 2}}) == [
        ["list", [1, ["tuple", [2]]]],
        ["collections.deque", [3]],
        ["dict", [["a", ["dict", [[1, 2]]]]]],
    ]
    sha = hashlib.sha256(b"ab").hexdigest()
    assert items(b"ab", bytearray(b"ab"), ..., object()) == [
        ["bytes", sha],
        ["bytes", sha],
        ["constant", "ellipsis"],
        ["constant", "object"],
    ]
    assert items(Colour.RED) == [["enum", "tests/runs/test_descriptions.py:Colour", "RED", 1]]
    assert items(PurePosixPath("a/b"), KeyError("k")) == [["path", "a/b"], ["error", "KeyError", ["tuple", ["k"]]]]


def test_members_of_sets_are_in_one_order() -> None:
    assert items({3, 1, 2}) == items({2, 3, 1}) == [["set", [1, 2, 3]]]
    assert items(frozenset({"b", "a"})) == [["frozenset", ["a", "b"]]]
    assert items({(1, 2)}) == items({(1, 2)}) != items({(1, 3)})


@pytest.mark.parametrize(("levels", "parts"), [(40, 1), (41, 2), (82, 3)])
def test_deep_containers_become_parts_so_that_no_recursion_is_too_deep(levels: int, parts: int) -> None:
    nested: Any = 1
    for _ in range(levels):
        nested = [nested]
    assert len(described(nested).parts) == parts


def test_a_container_in_itself_is_described_by_its_distance() -> None:
    circle: list[Any] = [[]]
    circle[0].append(circle)
    assert items(circle) == [["list", [["list", [["again", -2]]]]]]


def test_text_loses_what_differs_between_machines() -> None:
    root, home, temporary = os.getcwd(), os.path.expanduser("~"), tempfile.gettempdir()
    found = described(
        root, f"{root}/data.json", f"see {root}/a and {root}/b", f"{home}/x", "/", f"{temporary}/tmpab_9cd12/x.txt"
    )
    assert found.parts["<task>"][2][1] == [  # type: ignore[index]
        "<project>",
        "<project>/data.json",
        "see <project>/a and <project>/b",
        "~/x",
        "/",
        "<temporary>/x.txt",
    ]
    assert found.varying == {}
    secret = described(api_key="0fA9c3e1B7d25846aF10cD93eB", name="api_key").parts["<task>"]
    assert secret[3] == [["api_key", "<secret>"], ["name", "api_key"]]  # type: ignore[index]


def test_text_that_may_matter_is_noted_apart() -> None:
    cache = os.path.join(tempfile.gettempdir(), "cache", "x.txt")
    local = "http://localhost:8080/v1"
    found = described(cache), described(local), described("http://example.org:8080/v1")
    assert items(cache, local) == ["<temporary>/x.txt", "http://localhost/v1"]
    assert [set(each.varying) for each in found] == [{"task[]"}, {"task[]"}, set()]
    both = [described(local, f"http://127.0.0.1:{port}").varying for port in (1, 1, 2)]
    assert both[0] == both[1] != both[2]
    first = [described(f"http://localhost:{port}", local).varying for port in (1, 2)]
    assert first[0] != first[1]
    assert len(both[0]["task[]"]) == 16


def test_objects_of_libraries_are_values_state_or_unknown() -> None:
    assert part(re.compile("a+", re.IGNORECASE)) == ["pattern", "a+", int(re.compile("", re.IGNORECASE).flags)]
    assert part(range(3)) == ["value", "range(0, 3)"]
    assert part(Decimal("1.50")) == ["value", "decimal.Decimal", ["tuple", ["1.50"]]]
    assert part(SimpleNamespace(b=2, a=1)) == ["value", "types.SimpleNamespace", ["dict", [["a", 1], ["b", 2]]]]
    sha = hashlib.sha256(np.array([1, 2]).tobytes()).hexdigest()
    assert part(np.array([1, 2])) == ["value", "numpy.ndarray", "int64", [2], sha]
    objects = part(np.array(["a", None], dtype=object))
    assert objects[2:] == ["object", [2], hashlib.sha256(b"['a', None]").hexdigest()]
    assert part(int | None) == ["type", "int | None"]
    assert part(threading.Lock()) == ["state", "_thread.lock"]
    assert part(io.StringIO("x")) == ["state", "_io.StringIO"]
    assert described(re.compile("a"), threading.Lock()).unknown == {}


class Client:
    """A client of a library, by its module."""

    __module__ = "numpy.client"
    model = "m1"
    base_url = "http://localhost:1"

    @property
    def name(self) -> str:
        raise RuntimeError("closed")


def test_an_unknown_object_is_named_with_what_identifies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy.client", np)
    found = described(Client())
    assert found.unknown == {"task[]": "numpy.client.Client"}
    assert found.parts["task[]"] == [
        "object",
        "numpy.client.Client",
        [["model", "m1"], ["base_url", "http://localhost"]],
    ]
    assert set(found.varying) == {"task[].base_url"}
    assert found.packages == {"numpy"}


@dataclass
class Options:
    """A record of a library, by its module."""

    low: int = 1
    words: list[str] = field(default_factory=list)


Options.__module__ = "numpy.client"


def test_a_record_of_a_library_is_described_by_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy.client", np)
    found = described(Options(low=2))
    assert found.parts["task[]"] == ["object", "numpy.client.Options", [["low", ["part", "task[].low"]]]]
    assert (found.parts["task[].low"], found.unknown) == (2, {})
    assert described(Options(1, ["a"])).parts["task[].words"] == ["list", ["a"]]


def test_classes_are_described_by_their_bases_and_those_of_libraries_by_their_names() -> None:
    class Base:
        limit = 3

    class Derived(Base):
        pass

    names = set(described(Derived).parts)
    assert any(name.endswith("Derived") for name in names)
    assert any(name.endswith("Base.limit") for name in names)
    library = described(np.ndarray)
    assert library.packages == {"numpy"}
    assert library.files == set()


def test_a_function_that_is_in_no_file_is_described_by_its_code() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def f(x: int = 3): return x", "<stdin>", "exec"), space)
    found = describe({"task": space["f"]})
    assert found.typed == [space["f"].__code__]
    assert any(name.endswith(":f") for name in found.values)
    assert 3 in found.parts.values()


def test_annotations_may_name_what_only_type_checkers_import() -> None:
    # Evaluated when they are asked for, from Python 3.14 on; text before.
    lazily = sys.version_info >= (3, 14)
    space: dict[str, Any] = {"__name__": "__main__"}
    code = "def f(x: Unknown): return g\nclass g:\n    y: Unknown\n"
    exec(compile(code, "<stdin>", "exec", dont_inherit=lazily), space)
    parts: Any = describe({"task": space["f"]}).parts
    types = [said["types"] for said in parts.values() if "types" in said]
    assert types == [[["x", "Unknown"]], [["y", "Unknown"]]]
    assert "__annotate" not in str(parts)


@dataclass
class Settings:
    low: int = 1
    words: list[str] = field(default_factory=list)


class Slotted:
    __slots__ = ("first", "second")

    def __init__(self) -> None:
        self.first = 1


def test_attributes_of_the_projects_objects_are_parts() -> None:
    found = described(Settings(low=2, words=["a"]), Slotted())
    assert (found.parts["task[].low"], found.parts["task[].words"]) == (2, ["list", ["a"]])
    assert found.parts["task[]#2.first"] == 1
    assert not any(name.endswith(".second") for name in found.parts)
    assert {"task[]", "task[].low", "task[].words"} <= found.values
    assert found.files == {str(Path(__file__))}


def test_an_object_that_cannot_be_looked_at_is_unknown() -> None:
    class Odd:
        def __fairtrial_identity__(self) -> Any:
            raise LookupError("no")

    found = described(Odd())
    (name,) = found.unknown
    assert found.unknown[name].endswith("Odd: LookupError")
    assert found.parts[name][0] == "unknown"  # type: ignore[index]


def test_digests_are_those_of_the_parts() -> None:
    found = described(range(3))
    digests = found.digests()
    assert set(digests) == set(found.parts)
    assert {len(digest) for digest in digests.values()} == {16}
    assert described(range(4)).digests()["task[]"] != digests["task[]"]
