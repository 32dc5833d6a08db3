from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, TypedDict
from uuid import UUID

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from fairtrial.base.codec import from_json, to_json
from fairtrial.errors import ConfigurationError
from fairtrial.models.schema import output_schema, schema_of


class Rating(enum.Enum):
    GOOD = "good"
    POOR = "poor"


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str
    rating: Rating
    notes: tuple[str, ...] = ()
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    label: str
    children: list[Tree] = field(default_factory=list, metadata={"description": "what hangs below"})


@dataclass(frozen=True, slots=True)
class Box[T]:
    content: T
    hidden: int = field(default=0, init=False)


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Point(NamedTuple):
    x: int
    y: float


class Person(BaseModel):
    name: str = Field(min_length=1)
    age: int = 0
    friends: list[Person] = []


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    extra: dict[str, int] = {}


type Json = str | list[Json]
type Pair[T] = tuple[T, T]
UserId = NewType("UserId", int)


@pytest.mark.proves("R36")
def test_properties_keep_the_order_of_the_fields() -> None:
    schema = schema_of(Verdict)
    assert list(schema["properties"]) == ["reason", "rating", "notes", "weight"]
    assert schema["required"] == ["reason", "rating"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["rating"] == {"type": "string", "enum": ["good", "poor"]}
    assert schema["properties"]["weight"] == {"anyOf": [{"type": "number"}, {"type": "null"}]}


def test_an_answer_must_have_every_field() -> None:
    found = output_schema(Verdict)
    assert found is not None
    assert found.schema["required"] == ["reason", "rating", "notes", "weight"]
    assert (found.name, found.wrapped, found.strict) == ("Verdict", False, True)


def test_text_needs_no_schema() -> None:
    assert output_schema(str) is None


@pytest.mark.parametrize("kind", [int, list[Verdict], Verdict | Movie, Rating, Json, Annotated[int, Field(ge=1)]])
def test_what_is_not_an_object_is_wrapped_in_one(kind: Any) -> None:
    found = output_schema(kind)
    assert found is not None
    assert found.wrapped
    assert found.schema["type"] == "object"
    assert found.schema["required"] == ["value"]


def test_an_unhashable_annotation_has_a_schema_too() -> None:
    found = output_schema(Annotated[int, ["unhashable"]])
    assert found is not None
    assert found.schema["properties"]["value"] == {"type": "integer"}


def test_a_type_that_contains_itself_is_defined_once() -> None:
    schema = schema_of(Tree)
    assert schema["type"] == "object"
    assert schema["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}
    assert schema["properties"]["children"]["description"] == "what hangs below"
    assert list(schema["$defs"]) == ["Tree"]


def test_pydantic_models_are_closed_and_keep_their_constraints() -> None:
    schema = schema_of(Box[Person], all_required=True)
    person = schema["$defs"]["Person"]
    assert person["required"] == ["name", "age", "friends"]
    assert person["properties"]["name"] == {"type": "string", "minLength": 1}
    assert person["additionalProperties"] is False
    assert "default" not in person["properties"]["age"]
    assert schema_of(Person)["$defs"]["Person"]["properties"]["age"]["default"] == 0


def test_a_discriminated_union_is_any_of_its_members() -> None:
    found = output_schema(Owner)
    assert found is not None
    assert len(found.schema["properties"]["pet"]["anyOf"]) == 2
    assert not found.strict  # It has a free mapping.


def test_descriptions_and_bounds_come_from_annotations() -> None:
    assert schema_of(Annotated[int, "in metres"]) == {"type": "integer", "description": "in metres"}
    assert schema_of(Annotated[int, Field(ge=1, description="d")]) == {
        "type": "integer",
        "description": "d",
        "minimum": 1,
    }


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Any, {}),
        (int | Any, {}),
        (UserId, {"type": "integer"}),
        (Literal["a", 1], {"enum": ["a", 1]}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (list, {"type": "array", "items": {}}),
        (Sequence[int], {"type": "array", "items": {"type": "integer"}}),
        (set[int], {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        (dict, {"type": "object", "additionalProperties": True}),
        (Mapping[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Path, {"type": "string"}),
        (datetime, {"type": "string", "format": "date-time"}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (
            Pair[int],
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "integer"}], "minItems": 2, "maxItems": 2},
        ),
        (
            Point,
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "number"}], "minItems": 2, "maxItems": 2},
        ),
        (
            Movie,
            {
                "type": "object",
                "properties": {"title": {"type": "string"}, "year": {"type": "integer"}},
                "required": ["title"],
                "additionalProperties": False,
            },
        ),
        (
            Box[int],
            {
                "type": "object",
                "properties": {"content": {"type": "integer"}},
                "required": ["content"],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_every_type_has_its_schema(kind: Any, expected: Any) -> None:
    assert schema_of(kind) == expected


@pytest.mark.parametrize("kind", [object, list[Any], tuple[int, int], set[int], dict[str, int]])
def test_open_types_are_not_for_strict_modes(kind: Any) -> None:
    found = output_schema(list[kind])
    assert found is not None
    assert not found.strict


class Opaque:
    pass


@pytest.mark.parametrize("kind", [Opaque, "text"])
def test_a_type_the_codec_cannot_read_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="no JSON Schema"):
        schema_of(kind)


@dataclass(frozen=True)
class Dangling:
    field: NotDefinedAnywhere  # type: ignore[name-defined]  # noqa: F821  # what the test is about


def test_annotations_that_cannot_be_resolved_are_reported() -> None:
    with pytest.raises(ConfigurationError, match="cannot be resolved"):
        schema_of(Dangling)


VALUES: dict[Any, st.SearchStrategy[Any]] = {
    Verdict: st.builds(Verdict),
    Tree: st.recursive(
        st.builds(Tree, children=st.just([])),
        lambda inner: st.builds(Tree, children=st.lists(inner, max_size=2)),
        max_leaves=4,
    ),
    Movie: st.from_type(Movie),
    Point: st.builds(Point, y=st.floats(allow_nan=False, allow_infinity=False)),
    Person: st.builds(Person, name=st.text(min_size=1, alphabet="ab"), friends=st.just([])),
    list[int | None]: st.from_type(list[int | None]),
    dict[str, date]: st.dictionaries(st.text(alphabet="abc"), st.dates()),
    UUID: st.uuids(),
    Decimal: st.decimals(allow_nan=False, allow_infinity=False),
    Rating: st.sampled_from(Rating),
}


@given(st.data(), st.sampled_from(list(VALUES)))
def test_what_the_codec_writes_satisfies_the_schema_and_is_read_back(data: st.DataObject, kind: Any) -> None:
    value = data.draw(VALUES[kind])
    tree = to_json(value)
    jsonschema.validate(tree, schema_of(kind))
    assert from_json(kind, tree) == value
