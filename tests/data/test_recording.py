"""R26, R27, R34 and R97: recording and reading the events of a trial."""

from __future__ import annotations

import asyncio
import copy
import heapq
import pickle
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

import anyio
import anyio.to_thread
import pytest
from annotated_types import Len
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fairtrial import Attachment, PromptExecuted, Session, SessionView, TokenUsage, ToolCall, ToolInvoked, Trajectory
from fairtrial.base.codec import to_json
from fairtrial.data.session import ChatMessage, Envelope, SliceView, SpanClosed, restore_session
from fairtrial.data.session.views import is_immutable, kind_of, same_kind
from fairtrial.errors import SessionError
from fairtrial.testing import FakeClock, session_of


@dataclass(frozen=True, slots=True)
class Thought:
    text: str
    scores: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Note:
    text: str


@dataclass(frozen=True)
class Box[T]:
    item: T


@dataclass(frozen=True)
class Wrapper:
    note: Note
    names: Annotated[dict[str, int], Len(0, 9)] = field(default_factory=dict)
    tags: set[str] = field(default_factory=set)


class Model(BaseModel):
    items: list[int]


class TestRecording:
    @pytest.mark.proves("R34")
    def test_events_of_ours_and_of_the_user_are_recorded_and_read_by_type(self) -> None:
        session = Session()
        call = ToolInvoked("search", {"q": "x"}, {"hits": 3}, True, session_id=session.session_id)
        session.record(call)
        session.record(PromptExecuted("p", "openai", "m", TokenUsage(10, 5, 2, 0.1), "stop", Attachment.of(b"t")))
        session.record(Thought("hm", [0.5], {"a": [1]}))
        assert session[ToolInvoked].all() == (call,)
        assert session[Thought].latest() == Thought("hm", [0.5], {"a": [1]})
        assert session[PromptExecuted].where(lambda event: event.model == "m")[0].usage == TokenUsage(10, 5, 2, 0.1)
        assert session[Note].all() == ()
        assert session[Note].latest() is None
        assert len(session) == 3

    @pytest.mark.proves("R34")
    def test_an_envelope_says_when_by_whom_in_which_attempt_and_span(self) -> None:
        clock = FakeClock(100.0)
        session = Session(clock=clock)
        session.record(Note("a"))
        clock.advance(2.5)
        session = session.next_attempt()
        with session.span("outer") as outer, session.span("inner", actor="judge") as inner:
            session.record(Note("b"), actor="judge")
            clock.advance(1)
        first, second, *_ = session.everything().envelopes
        assert first[:6] == (0, 100.0, "task", 1, None, None)
        assert second[:6] == (1, 102.5, "judge", 2, inner, outer)
        assert first.kind.endswith("test_recording:Note")
        closed = session.everything()[SpanClosed].all()
        assert closed == (SpanClosed("inner", 1000.0), SpanClosed("outer", 1000.0))
        session.record(Note("c"))
        assert session.everything().envelopes[-1].span_id is None
        assert session.attempt == 2

    def test_late_events_of_an_ended_attempt_stay_out_of_the_next_one(self) -> None:
        first = Session()
        with first.span("work"):
            second = first.next_attempt()
            first.record(Note("late"))
            second.record(Note("in time"))
        first.extend(restore_session(_recorded(Note("late too"))).everything().envelopes)
        assert second.view(attempt=second.attempt)[Note].all() == (Note("in time"),)
        assert second.view(attempt=second.attempt)[SpanClosed].all() == ()
        assert (first.attempt, second.attempt) == (1, 2)
        assert [(e.seq, e.attempt) for e in second.everything().envelopes] == [(0, 1), (1, 2), (2, 1), (3, 1)]
        assert second.late_events == 3

    def test_a_span_that_fails_says_so_and_lets_the_error_pass(self) -> None:
        session = Session()
        with pytest.raises(KeyError), session.span("work"):
            raise KeyError("x")
        assert session[SpanClosed].all()[0].error == "KeyError: 'x'"

    def test_what_cannot_be_stored_is_refused_when_it_is_recorded(self) -> None:
        session = Session()
        with pytest.raises(SessionError, match=r"a Thought cannot be recorded: at \$\.facts\.k: a builtins\.object"):
            session.record(Thought("x", facts={"k": object()}))
        with pytest.raises(SessionError, match="more than 4300 digits"):
            session.record(Thought("x", facts={"k": 10**5000}))
        assert len(session) == 0

    def test_the_record_does_not_change_with_the_objects_it_was_made_from(self) -> None:
        params: dict[str, Any] = {"q": ["a"]}
        session = Session()
        session.record(ToolInvoked("search", params))
        params["q"].append("b")
        assert session[ToolInvoked].all()[0].params == {"q": ["a"]}

    def test_a_session_has_an_id_and_tags_of_text(self) -> None:
        session = Session(session_id=UUID(int=7), tags={"run": "r1"})
        assert (session.session_id, session.tags) == (UUID(int=7), {"run": "r1"})
        assert Session().session_id != Session().session_id
        assert repr(session) == f"<Session {UUID(int=7)}: 0 events>"
        assert repr(session.view()) == f"<SessionView {UUID(int=7)}: 0 events>"
        assert repr(session.view()[Note]) == "<0 x Note>"
        with pytest.raises(SessionError, match="tags must be text"):
            Session(tags={"run": 3})  # type: ignore[dict-item]

    def test_a_live_session_is_never_pickled(self) -> None:
        with pytest.raises(SessionError, match="send its snapshot"):
            pickle.dumps(Session())

    def test_what_another_process_recorded_can_be_taken_over(self) -> None:
        worker = Session()
        worker.record(Note("a"))
        worker.record(Note("b"), actor="judge")
        session = Session()
        session.record(Note("mine"))
        session = session.next_attempt()
        session.extend(restore_session(worker.snapshot()).everything().envelopes)
        found = session.everything().envelopes
        assert [(e.seq, e.actor, e.attempt) for e in found] == [(0, "task", 1), (1, "task", 2), (2, "judge", 2)]

    @pytest.mark.proves("R34")
    def test_usage_adds_up_and_keeps_what_is_known_of_the_cost(self) -> None:
        assert TokenUsage(1, 2, 1, 0.5) + TokenUsage(3, 4) == TokenUsage(4, 6, 1, 0.5)
        first, second = TokenUsage(1, 2, 3, 0.5, 4, 5), TokenUsage(10, 20, 30, 0.25, 40, 50)
        assert first + second == TokenUsage(11, 22, 33, 0.75, 44, 55)
        assert (TokenUsage(1) + TokenUsage(2)).cost_usd is None
        assert (TokenUsage(cost_usd=0.25) + TokenUsage(cost_usd=0.5)).cost_usd == 0.75
        assert TokenUsage(3, 4).total_tokens == 7

    @pytest.mark.proves("R31")
    @pytest.mark.parametrize(
        ("call", "failed"),
        [
            (ToolInvoked("t"), False),
            (ToolInvoked("t", success=True, result={"success": False}), True),
            (ToolInvoked("t", success=False), True),
            (ToolInvoked("t", error="boom"), True),
            (ToolInvoked("t", error=""), True),
            (ToolInvoked("t", result={"success": False}), True),
            (ToolInvoked("t", result={"success": True}), False),
            (ToolInvoked("t", result="success"), False),
        ],
    )
    def test_a_call_failed_however_the_tool_reported_it(self, call: ToolInvoked, failed: bool) -> None:
        assert call.failed is failed


class TestConcurrency:
    @pytest.mark.proves("R34")
    def test_32_threads_and_1000_tasks_lose_nothing_and_number_in_order(self) -> None:
        session = Session()
        per_thread, tasks = 200, 1_000

        def from_thread(thread: int) -> None:
            for count in range(per_thread):
                session.record(ToolInvoked(f"thread-{thread}", {"n": count}))

        async def from_task(task: int) -> None:
            session.record(ToolInvoked("task", {"n": task}))
            await asyncio.sleep(0)
            session.record(PromptExecuted(f"{task}"))

        async def all_tasks() -> None:
            await asyncio.gather(*(from_task(task) for task in range(tasks)))

        threads = [threading.Thread(target=from_thread, args=(thread,)) for thread in range(32)]
        for thread in threads:
            thread.start()
        asyncio.run(all_tasks())
        for thread in threads:
            thread.join()

        envelopes = session.view().envelopes
        assert [envelope.seq for envelope in envelopes] == list(range(32 * per_thread + 2 * tasks))
        assert [e.time for e in envelopes] == sorted(e.time for e in envelopes)
        calls = session[ToolInvoked].all()
        for thread_number in range(32):
            mine = [call.params["n"] for call in calls if call.name == f"thread-{thread_number}"]
            assert mine == list(range(per_thread))
        assert sorted(call.params["n"] for call in calls if call.name == "task") == list(range(tasks))
        assert {event.prompt_name for event in session[PromptExecuted].all()} == {str(n) for n in range(tasks)}

    @pytest.mark.parametrize("backend", ["asyncio", "trio"])
    def test_spans_follow_tasks_and_threads_and_do_not_mix(self, backend: str) -> None:
        session = Session()

        async def work(name: str) -> None:
            with session.span(name) as span:
                await anyio.lowlevel.checkpoint()
                session.record(Note(name))
                await anyio.to_thread.run_sync(session.record, Note(name))
                assert session.everything().envelopes[-1].span_id is not None
                spans[name] = span

        spans: dict[str, str] = {}

        async def main() -> None:
            async with anyio.create_task_group() as group:
                for number in range(20):
                    group.start_soon(work, f"w{number}")

        anyio.run(main, backend=backend)
        for envelope in session.view().envelopes:
            if envelope.kind.endswith(":Note"):
                assert envelope.span_id == spans[envelope.data["text"]]


class TestReading:
    @pytest.mark.proves("R26", "R27")
    def test_views_have_exactly_what_the_protocols_promise(self) -> None:
        view = session_of(Note("a"), tags={"run": "r"})
        assert isinstance(view, SessionView)
        assert isinstance(Session(), SessionView)
        assert isinstance(view[Note], SliceView)
        assert isinstance(view.session_id, UUID)
        assert view.tags == {"run": "r"}
        assert view[Note].where(lambda note: note.text == "a") == (Note("a"),)

    @pytest.mark.proves("R27")
    def test_a_view_shows_the_session_as_it_stood(self) -> None:
        session = Session()
        session.record(Note("before"))
        view = session.view()
        session.record(Note("after"))
        assert view[Note].all() == (Note("before"),)
        assert session[Note].all() == (Note("before"), Note("after"))

    @pytest.mark.proves("R27")
    def test_a_view_cannot_be_changed(self) -> None:
        view = session_of(ToolInvoked("t", {"a": [1], "b": {"c": 2}}, [3, 1, 2]), tags={"run": "r"})
        for target in (view, view[ToolInvoked]):
            for name in ("tags", "session_id", "envelopes", "trajectory", "all", "latest", "where", "extra"):
                with pytest.raises(AttributeError):
                    setattr(target, name, None)
        (call,) = view[ToolInvoked].all()
        (envelope,) = view.envelopes
        changes: list[Any] = [
            lambda: view.tags.update(run="x"),  # type: ignore[attr-defined]
            lambda: call.params["a"].append(2),
            lambda: call.params.update(a=1),  # type: ignore[attr-defined]
            lambda: call.params["b"].clear(),
            lambda: call.result.sort(),
            lambda: call.result.__iadd__([1]),
            lambda: call.params["b"].__ior__({"x": 1}),
            lambda: setattr(call, "name", "x"),
            lambda: setattr(envelope, "data", {}),
            lambda: envelope.data.update(name="x"),
            lambda: envelope.data["params"]["a"].append(2),
            lambda: view.__setitem__(ToolInvoked, ()),  # type: ignore[index]
        ]
        for change in changes:
            with pytest.raises((TypeError, AttributeError)):
                change()
        assert view[ToolInvoked].all() == (ToolInvoked("t", {"a": [1], "b": {"c": 2}}, [3, 1, 2]),)

    @pytest.mark.proves("R27")
    def test_a_change_of_an_event_by_one_reader_is_not_seen_by_others(self) -> None:
        session = Session()
        session.record(Wrapper(Note("a"), {"n": 1}, {"t"}))
        session.record(Note("b"))
        session.record(Model(items=[3, 1]))
        session.record(Thought("c", [3.0, 1.0, 2.0]))
        view = session.view()
        with pytest.raises(TypeError):
            view.envelopes[0].data["note"]["text"] = "changed"
        view[Wrapper].all()[0].note.text = "changed"
        view[Note].all()[0].text = "changed"
        view[Model].all()[0].items.append(9)
        heapq.heapify(view[Thought].all()[0].scores)  # In C, and it does not ask.
        with pytest.raises(TypeError):
            view[Wrapper].all()[0].names["n"] = 2
        with pytest.raises(AttributeError):
            view[Wrapper].all()[0].tags.add("u")
        assert view[Wrapper].all() == (Wrapper(Note("a"), {"n": 1}, {"t"}),)
        assert view[Note].all() == (Note("b"),)
        assert view[Model].all() == (Model(items=[3, 1]),)
        assert view[Thought].latest() == Thought("c", [3.0, 1.0, 2.0])
        assert view[Thought].all()[0].scores == [3.0, 1.0, 2.0]

    def test_events_in_which_nothing_can_change_are_decoded_once(self) -> None:
        view = session_of(PromptExecuted("p", usage=TokenUsage(1, 2)), ChatMessage("user", ("a", Attachment.of(b""))))
        assert view[PromptExecuted].all() is view[PromptExecuted].all()
        assert view[ChatMessage].all() is view[ChatMessage].all()
        assert is_immutable((1, "a", b"", frozenset({1}), datetime.now(UTC), None))
        assert not is_immutable([1])
        assert not is_immutable(Note)

    def test_copies_of_what_is_frozen_can_be_changed(self) -> None:
        (call,) = session_of(ToolInvoked("t", {"a": [1]})).envelopes
        mine = copy.deepcopy(call.data)
        mine["params"]["a"].append(2)
        assert mine["params"] == {"a": [1, 2]}
        assert call.data["params"] == {"a": [1]}

    def test_events_of_a_generic_type_are_read_as_what_they_hold(self) -> None:
        view = session_of(Box(Note("a")))
        assert view[Box[Note]].all() == (Box(Note("a")),)
        assert view[Box[dict[str, str]]].all() == (Box({"text": "a"}),)
        assert "1 x " in repr(view[Box[Note]])

    def test_an_event_that_no_longer_fits_its_type_is_named(self) -> None:
        wrong = Envelope(3, 0.0, "task", 1, None, None, kind_of(Note), {"words": "x"})
        session = Session()
        session.extend([wrong])
        with pytest.raises(SessionError, match=r"event 0 was recorded as .*Note has no field 'words'"):
            session[Note].all()

    def test_events_of_judges_are_not_part_of_the_tasks_record(self) -> None:
        session = Session()
        session.record(PromptExecuted("task"))
        session.record(PromptExecuted("judge"), actor="judge")
        session = session.next_attempt()
        session.record(PromptExecuted("again"))
        for view in (session.view(), restore_session(session.snapshot())):
            assert [event.prompt_name for event in view[PromptExecuted].all()] == ["task", "again"]
            assert [event.prompt_name for event in view.everything()[PromptExecuted].all()] == [
                "task",
                "judge",
                "again",
            ]
            assert [event.prompt_name for event in view.view(attempt=2)[PromptExecuted].all()] == ["again"]
        assert [event.prompt_name for event in session.view(attempt=1)[PromptExecuted].all()] == ["task"]


class TestNamesOfTypes:
    def test_a_script_is_known_by_its_file_wherever_it_is_imported(self) -> None:
        assert same_kind("a.b:Step", "a.b:Step")
        assert same_kind("evals.support:Step", "*.support:Step")
        assert same_kind("*.support:Step", "support:Step")
        assert not same_kind("*.support:Step", "evals.support:Stop")
        assert not same_kind("*.support:Step", "evals.mysupport:Step")

    def test_a_module_of_the_same_last_name_is_another_module(self) -> None:
        assert not same_kind("events:ToolInvoked", kind_of(ToolInvoked))
        assert kind_of(ToolInvoked) == "fairtrial:ToolInvoked"

    def test_events_under_both_names_are_read_in_their_order(self) -> None:
        name = kind_of(Note)
        script = "*." + name.rpartition(".")[2]
        session = Session()
        session.extend(Envelope(0, 0.0, "task", 1, None, None, kind, {"text": kind}) for kind in (script, name, script))
        assert [note.text for note in session[Note].all()] == [script, name, script]

    @pytest.mark.parametrize("how", ["-c", "script", "-m"])
    def test_how_a_script_is_started_decides_its_name(self, how: str, tmp_path: Any, child: Any) -> None:
        code = "from fairtrial.data.session.views import kind_of\nclass Step: pass\nprint(kind_of(Step))"
        (tmp_path / "evals").mkdir()
        (tmp_path / "evals" / "support.py").write_text(code)
        run = {
            "-c": code,
            "script": "import runpy, sys; sys.argv = ['x']; runpy.run_path('evals/support.py', run_name='__main__')",
            "-m": "import runpy; runpy.run_module('evals.support', run_name='__main__', alter_sys=True)",
        }[how]
        expected = {"-c": "*.__main__:Step", "script": "*.support:Step", "-m": "evals.support:Step"}[how]
        assert child(run) == expected


class TestTrajectories:
    @pytest.mark.proves("R97")
    def test_a_trajectory_is_the_recorded_messages(self) -> None:
        messages = (ChatMessage("user", "hi"), ChatMessage("assistant", "hello"))
        view = session_of(messages[0], ToolInvoked("t"), messages[1])
        assert view.trajectory == Trajectory(messages)
        assert view.trajectory.last_reply == "hello"

    @pytest.mark.proves("R97")
    @pytest.mark.parametrize(
        ("messages", "reply"),
        [
            ((), None),
            ((ChatMessage("user", "hi"),), None),
            ((ChatMessage("assistant", "a"), ChatMessage("tool", "42"), ChatMessage("user", "ok")), "a"),
            ((ChatMessage("assistant", "a"), ChatMessage("assistant", "", (ToolCall("t", {"x": 1}),))), "a"),
            ((ChatMessage("assistant", ("see ", Attachment.of(b"x"), "this")),), "see this"),
        ],
    )
    def test_the_last_reply_is_the_last_thing_the_assistant_said(self, messages: Any, reply: str | None) -> None:
        assert Trajectory(messages).last_reply == reply

    def test_a_live_session_has_a_trajectory_too(self) -> None:
        session = Session()
        session.record(ChatMessage("user", "hi"))
        assert session.trajectory.messages == (ChatMessage("user", "hi"),)


@given(st.lists(st.text(st.characters(codec=None), max_size=5), max_size=5), st.text(st.characters(codec=None)))
def test_any_record_survives_a_snapshot(words: list[str], actor: str) -> None:
    session = Session(tags={"t": actor})
    for word in words:
        with session.span(word):
            session.record(Thought(word, [float("inf")], {word: [word]}), actor=actor)
    back = restore_session(session.snapshot())
    assert back.everything().envelopes == session.everything().envelopes
    assert back[Thought].all() == session[Thought].all()
    assert (back.tags, back.session_id) == (session.tags, session.session_id)


def _recorded(*events: object) -> bytes:
    session = Session()
    for event in events:
        session.record(event)
    return session.snapshot()


class Word(str):
    __slots__ = ()


@pytest.mark.parametrize("role", ["user", "\0", "\ud800", Word("\ufdd0")])
@pytest.mark.parametrize("content", ["hello", "a\0b", Word("\udfff"), ("part", "\0")])
def test_a_message_is_recorded_as_the_codec_writes_it(role: str, content: Any) -> None:
    for message in (ChatMessage(role, content), ChatMessage(role, content, (ToolCall("f"),), "name")):
        record = message.to_record()
        assert record == to_json(message)
        assert list(record) == list(to_json(message))
        assert {type(record["role"]), type(record["name"])} == {str}
