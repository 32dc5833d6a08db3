from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import assert_type

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fairtrial import Attachment, ChatMessage, ConfigurationError
from fairtrial.models.prompt import MarkdownSection, Prompt, PromptTemplate


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
