"""Prompts, and the schemas of what they answer."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, TypedDict, assert_type
from uuid import UUID

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from fairtrial import Attachment, ChatMessage, ConfigurationError
from fairtrial.base.codec import from_json, to_json
from fairtrial.models.prompt import MarkdownSection, Prompt, PromptTemplate
from fairtrial.models.schema import output_schema, schema_of


@dataclass(frozen=True, slots=True)
class QAParams:
    question: str


@dataclass(frozen=True, slots=True)
class Style:
    tone: str


@dataclass(frozen=True, slots=True)
class QAOutput:
    answer: str
    confidence: float


class Mood(Enum):
    CALM = "calm"


class Loud(StrEnum):
    YES = "yes"


class ModelParams(BaseModel):
    question: str


QA = PromptTemplate[QAOutput](
    ns="qa",
    key="answer",
    name="qa",
    sections=[MarkdownSection[QAParams](title="Question", template="Answer concisely: $question", key="q")],
)


@pytest.mark.proves("R66")
def test_a_prompt_is_bound_with_a_dataclass_or_with_keywords() -> None:
    by_params = Prompt(QA).bind(QAParams("Why?"))
    by_keywords = QA.bind(question="Why?")
    by_model = QA.bind(ModelParams(question="Why?"))
    assert by_params.render() == "## Question\n\nAnswer concisely: Why?"
    assert by_keywords.render() == by_model.render() == by_params.render()
    assert by_params.messages == (ChatMessage("user", by_params.render()),)


@pytest.mark.proves("R66")
def test_the_output_type_stands_in_the_brackets() -> None:
    assert QA.output_type is QAOutput
    assert QA.bind(question="x").output_type is QAOutput
    assert_type(QA.bind(question="x"), Prompt[QAOutput])


def test_the_output_type_may_also_be_given_by_name_or_by_a_subclass() -> None:
    section = MarkdownSection[QAParams]("Q", "$question", "q")

    class Question(PromptTemplate[QAOutput]):
        pass

    explicit: PromptTemplate[int] = PromptTemplate("a", "b", sections=[section], output_type=int)
    plain: PromptTemplate[str] = PromptTemplate("a", "b", sections=[section])
    assert explicit.output_type is int
    assert plain.output_type is str
    assert Question("a", "b", sections=[section]).output_type is QAOutput


def test_a_type_variable_as_output_type_is_refused_with_the_way_out() -> None:
    section = MarkdownSection[None]("Q", "Hello", "q")

    def make[T](kind: type[T]) -> PromptTemplate[T]:
        return PromptTemplate[T](key="k", sections=[section])

    def make_list[T](kind: type[T]) -> PromptTemplate[list[T]]:
        return PromptTemplate[list[T]](key="k", sections=[section])

    def make_named[T](kind: type[T]) -> PromptTemplate[T]:
        return PromptTemplate[T](key="k", sections=[section], output_type=kind)

    for template in (make(QAOutput), make_list(QAOutput)):
        with pytest.raises(ConfigurationError, match=r"'k' must be a type .*T[\s\S]*output_type="):
            _ = template.output_type
    assert make_named(QAOutput).output_type is QAOutput


def test_a_template_without_a_name_is_called_by_its_key() -> None:
    section = MarkdownSection[None]("Q", "Hello", "q")
    assert PromptTemplate[str]("a", "b", sections=[section]).name == "a/b"
    assert PromptTemplate[str](sections=[section]).name == "prompt"


def test_missing_and_extra_parameters_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"prompt 'qa' needs \$question and has no place for \$querstion"):
        QA.bind(querstion="x")
    with pytest.raises(ConfigurationError, match=r"needs \$question"):
        QA.bind()
    with pytest.raises(ConfigurationError, match=r"got \$question twice"):
        QA.bind(QAParams("a"), question="b")


def test_an_unbound_prompt_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"needs \$question; bind"):
        Prompt(QA).render()


def test_parameters_must_have_names() -> None:
    with pytest.raises(ConfigurationError, match="got int"):
        QA.bind(5)
    with pytest.raises(ConfigurationError, match="got type"):
        QA.bind(QAParams)


def test_placeholders_are_checked_against_the_sections_parameters_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"section 'q' uses \$topic, but QAParams has question"):
        PromptTemplate[str]("a", "b", sections=[MarkdownSection[QAParams]("Q", "$question $topic", "q")])


def test_sections_have_different_keys_and_there_is_at_least_one() -> None:
    section = MarkdownSection[None]("Q", "Hello", "q")
    with pytest.raises(ConfigurationError, match="more than one section q"):
        PromptTemplate[str]("a", "b", sections=[section, section])
    with pytest.raises(ConfigurationError, match="no sections"):
        PromptTemplate[str]("a", "b")


def test_several_sections_take_several_parameter_records() -> None:
    template = PromptTemplate[str](
        "a",
        "b",
        sections=[
            MarkdownSection[Style]("", "Be $tone.", "style", role="system"),
            MarkdownSection[None]("", "Always.", "always", role="system"),
            MarkdownSection[QAParams]("Question", "$question", "q"),
        ],
    )
    prompt = template.bind(QAParams("Why?"), Style("kind"))
    assert prompt.messages == (
        ChatMessage("system", "Be kind.\n\nAlways."),
        ChatMessage("user", "## Question\n\nWhy?"),
    )
    assert prompt.render() == "Be kind.\n\nAlways.\n\n## Question\n\nWhy?"
    assert dict(prompt.params) == {"question": "Why?", "tone": "kind"}


def test_indentation_of_the_template_goes_and_that_of_a_parameter_stays() -> None:
    section = MarkdownSection[QAParams](
        "",
        """
        Read this:
          $question
        """,
        "q",
    )
    template = PromptTemplate[str]("a", "b", sections=[section])
    assert template.bind(question="    four\n\n").render() == "Read this:\n      four\n\n"


def test_a_dollar_that_names_nothing_is_a_dollar() -> None:
    template = PromptTemplate[str]("a", "b", sections=[MarkdownSection[None]("", "$5, $$name, ${who}s, 10$", "q")])
    assert template.placeholders == ("who",)
    assert template.bind(who="cat").render() == "$5, $name, cats, 10$"


@given(st.text(alphabet="${}abcquestion \n", max_size=40), st.text(alphabet="${}tone \n", max_size=40))
def test_what_is_put_in_is_never_expanded_again(one: str, two: str) -> None:
    template = PromptTemplate[str]("a", "b", sections=[MarkdownSection[None]("", "<$question|$tone|$question>", "q")])
    assert template.bind(question=one, tone=two).render() == f"<{one}|{two}|{one}>"


def test_values_that_are_not_text_are_written_as_json() -> None:
    template = PromptTemplate[str]("a", "b", sections=[MarkdownSection[None]("", "$x", "q")])
    shown = {
        3: "3",
        0.5: "0.5",
        True: "true",
        None: "null",
        Mood.CALM: "calm",
        Loud.YES: "yes",
        QAOutput("a", 1.0): '{"answer":"a","confidence":1.0}',
    }
    assert {value: template.bind(x=value).render() for value in shown} == shown


def test_an_attachment_becomes_a_part_of_the_message() -> None:
    image = Attachment.of(b"x", media_type="image/png", name="cat.png")
    template = PromptTemplate[str]("a", "b", sections=[MarkdownSection[None]("See", "What is $image?", "q")])
    prompt = template.bind(image=image)
    assert prompt.messages == (ChatMessage("user", ("## See\n\nWhat is ", image, "?")),)
    assert prompt.render() == "## See\n\nWhat is [cat.png]?"


def test_templates_and_sections_do_not_change() -> None:
    with pytest.raises(AttributeError, match="cannot be changed"):
        QA.name = "other"
    with pytest.raises(AttributeError, match="cannot be changed"):
        QA.sections[0].template = "other"


def test_prompts_show_their_names() -> None:
    assert [repr(thing) for thing in (QA, QA.sections[0], Prompt(QA))] == [
        "<PromptTemplate 'qa'>",
        "<MarkdownSection 'q'>",
        "<Prompt 'qa'>",
    ]


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
