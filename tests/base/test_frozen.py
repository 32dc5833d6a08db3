"""Containers that look like dict and list and refuse to change."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from fairtrial.base.frozen import FrozenDict, FrozenList, freeze

CHANGES_OF_DICTS: list[Callable[[Any], object]] = [
    lambda d: d.__setitem__("a", 1),
    lambda d: d.__delitem__("a"),
    lambda d: d.clear(),
    lambda d: d.pop("a"),
    lambda d: d.popitem(),
    lambda d: d.setdefault("b", 1),
    lambda d: d.update(b=1),
    lambda d: d.__ior__({"b": 1}),
]
CHANGES_OF_LISTS: list[Callable[[Any], object]] = [
    lambda values: values.__setitem__(0, 1),
    lambda values: values.__delitem__(0),
    lambda values: values.append(1),
    lambda values: values.clear(),
    lambda values: values.extend([1]),
    lambda values: values.insert(0, 1),
    lambda values: values.pop(),
    lambda values: values.remove(1),
    lambda values: values.reverse(),
    lambda values: values.sort(),
    lambda values: values.__iadd__([1]),
    lambda values: values.__imul__(2),
]


@pytest.mark.parametrize("change", CHANGES_OF_DICTS)
def test_a_frozen_dict_refuses_every_change(change: Callable[[Any], object]) -> None:
    frozen = freeze({"a": 1})
    with pytest.raises(TypeError, match=r"copy it with dict\(\.\.\.\) first"):
        change(frozen)
    assert frozen == {"a": 1}


@pytest.mark.parametrize("change", CHANGES_OF_LISTS)
def test_a_frozen_list_refuses_every_change(change: Callable[[Any], object]) -> None:
    frozen = freeze([1, 2])
    with pytest.raises(TypeError, match=r"copy it with list\(\.\.\.\) first"):
        change(frozen)
    assert frozen == [1, 2]


def test_everything_inside_is_frozen_too() -> None:
    frozen = freeze({"a": [{"b": (["c"], {"d"})}], "e": {1, 2}})
    assert isinstance(frozen["a"], FrozenList)
    assert isinstance(frozen["a"][0], FrozenDict)
    assert isinstance(frozen["a"][0]["b"][0], FrozenList)
    assert isinstance(frozen["e"], frozenset)
    assert frozen == {"a": [{"b": (["c"], {"d"})}], "e": {1, 2}}


def test_frozen_containers_behave_like_what_they_look_like() -> None:
    frozen = freeze({"a": [1]})
    assert json.dumps(frozen) == '{"a": [1]}'
    assert isinstance(frozen, dict)
    assert hash(frozen) == hash(freeze({"a": [1]}))
    assert {frozen: 1}[freeze({"a": [1]})] == 1
    assert frozen | {"b": 2} == {"a": [1], "b": 2}


def test_copies_are_shared_when_shallow_and_changeable_when_deep() -> None:
    frozen = freeze({"a": [1]})
    assert copy.copy(frozen) is frozen
    assert copy.copy(frozen["a"]) is frozen["a"]
    deep = copy.deepcopy(frozen)
    deep["a"].append(2)
    assert (deep, frozen) == ({"a": [1, 2]}, {"a": [1]})
    again = pickle.loads(pickle.dumps(frozen))
    assert (again, type(again), type(again["a"])) == (frozen, FrozenDict, FrozenList)
