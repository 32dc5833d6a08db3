"""The least instance of a JSON schema is valid, and the same every time."""

from __future__ import annotations

import datetime
import enum
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter

from fairtrial.integrations.model_server import UnsatisfiedSchemaError, minimal_instance


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Node(BaseModel):
    value: int
    next: Node | None
    children: list[Node]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(gt=3, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(min_length=2)]


class Everything(BaseModel):
    pet: Annotated[Dog | Cat, Field(discriminator="kind")]
    colour: Colour
    tags: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2)]
    pair: tuple[int, str]
    ratio: Annotated[float, Field(gt=0, lt=1)]
    born: datetime.date
    at: datetime.datetime
    key: uuid.UUID
    counts: dict[str, int]
    code: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    anything: Any
    yes: bool
    optional: int | None = None


@pytest.mark.parametrize("kind", [Node, Cat, Dog, Everything, list[Node], int | None, dict[str, Cat], Colour])
def test_pydantic_accepts_what_is_made_from_its_own_schema(kind: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    schema = adapter.json_schema()
    instance = minimal_instance(schema)
    jsonschema.validate(instance, schema)
    adapter.validate_python(instance)
    assert minimal_instance(schema) == instance


@pytest.mark.parametrize(
    ("schema", "least"),
    [
        ({}, None),
        ({"const": 5}, 5),
        ({"enum": ["b", "a"]}, "b"),
        ({"type": ["null", "string"]}, None),
        ({"type": "integer", "minimum": 3}, 3),
        ({"type": "integer", "maximum": -3}, -3),
        ({"type": "integer", "exclusiveMinimum": 3, "multipleOf": 5}, 5),
        ({"type": "integer", "exclusiveMinimum": 3}, 4),
        ({"type": "integer", "exclusiveMaximum": -3}, -4),
        ({"type": "number", "multipleOf": 0.5, "minimum": 0.3}, 0.5),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
        ({"type": "number", "exclusiveMinimum": 2}, 3),
        ({"type": "number", "exclusiveMaximum": -2}, -3),
        ({"type": "number", "minimum": 1.5}, 1.5),
        ({"minimum": 7}, 7),
        ({"minLength": 2}, "aa"),
        ({"items": {"type": "string"}, "minItems": 1}, [""]),
        ({"required": ["a"], "properties": {"a": {"type": "string"}, "b": {}}}, {"a": ""}),
        ({"type": "object", "required": ["unknown"]}, {"unknown": None}),
        ({"type": "string", "pattern": "^x-", "examples": ["x-1"]}, "x-1"),
        ({"type": "string", "pattern": "^a+$", "minLength": 9}, "aaaaaaaaa"),
        ({"type": "string", "format": "unheard-of"}, ""),
        ({"oneOf": [{"enum": []}, {"type": "boolean"}]}, False),
        (
            {"allOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"required": ["a", "b"]}, True]},
            {"a": 1, "b": None},
        ),
        ({"$ref": "#/$defs/a~1b", "description": "x", "$defs": {"a/b": {"const": 1}}}, 1),
        (
            {
                "allOf": [{"$ref": "#/$defs/x"}, {"required": ["a"]}],
                "$defs": {"x": {"properties": {"a": {"const": 2}}}},
            },
            {"a": 2},
        ),
        ({"type": "array", "uniqueItems": True, "minItems": 1}, [None]),
    ],
)
def test_the_least_instance(schema: dict[str, Any], least: Any) -> None:
    instance = minimal_instance(schema)
    assert instance == least
    jsonschema.validate(instance, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#", "description": "with a sibling"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "other.json"},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"enum": []},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "number", "minimum": 2, "exclusiveMaximum": 2},
        {"type": "string", "pattern": "^never guessed$"},
        {"type": "quaternion"},
        {"type": "array", "minItems": 1, "items": False},
        {"type": "array", "minItems": 2, "uniqueItems": True},
        {"allOf": [False]},
        {"anyOf": []},
    ],
)
def test_what_cannot_be_made_is_said(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsatisfiedSchemaError, match="add a rule to the server"):
        minimal_instance(schema)


SCALARS = st.one_of(
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-50, 50),
        st.integers(0, 9),
    ),
    st.builds(lambda n: {"type": "string", "minLength": n}, st.integers(0, 5)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"enum": ["x", 1]}, {"const": [1]}]),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda item, n: {"type": "array", "items": item, "minItems": n}, inner, st.integers(0, 2)),
        st.builds(
            lambda fields: {"type": "object", "properties": fields, "required": sorted(fields)[:2]},
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
        st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)


@given(SCHEMAS)
def test_the_least_instance_of_any_plain_schema_is_valid(schema: dict[str, Any]) -> None:
    jsonschema.validate(minimal_instance(schema), schema)
