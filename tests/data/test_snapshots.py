"""A snapshot can be read anywhere, and reading it never imports code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fairtrial.base.codec import decode
from fairtrial.base.codec.escape import escape_text
from fairtrial.base.frozen import freeze
from fairtrial.data.session import PromptExecuted, Session, TokenUsage, ToolInvoked, restore_session
from fairtrial.data.session.session import snapshot_bytes
from fairtrial.data.session.views import Envelope
from fairtrial.errors import SessionError
from fairtrial.scoring import Score, token_usage_under

TASK = """
from dataclasses import dataclass
from fairtrial import ChatMessage, PromptExecuted, TokenUsage, ToolInvoked

@dataclass(frozen=True)
class Thought:
    text: str

def run(session):
    session.record(ChatMessage("user", "find it"))
    session.record(Thought("I should search"))
    session.record(ToolInvoked("search", {"q": "it", "n": 3}, {"hits": []}, True))
    session.record(PromptExecuted("p", "scripted", "m", TokenUsage(100, 20)))
    session.record(PromptExecuted("judge", "scripted", "m", TokenUsage(9_000, 20)), actor="judge")
    session.record(ToolInvoked("refund", {}, {"success": False}))
"""

SCORING = """
from fairtrial.data.session import PromptExecuted
from fairtrial.scoring import *
from fairtrial.base.codec import dumps

SCORERS = [
    tool_called("search"), tool_not_called("search"), token_usage_under(120), token_usage_under(119),
    all_tools_succeeded(), tool_calls_match([{"name": "search", "arguments": {"n": 3}}], arguments="subset"),
    slice_contains(PromptExecuted, lambda event: event.model == "m"),
    all_of(tool_called("search"), token_usage_under(4_000)),
]

def scores(view):
    return dumps([scorer("out", None, view) for scorer in SCORERS])
"""


@pytest.mark.proves("R13", "R26")
def test_scores_are_the_same_live_and_from_a_snapshot_where_the_task_was_never_imported(
    child: Any, tmp_path: Path
) -> None:
    (tmp_path / "task_under_test.py").write_text(TASK)
    (tmp_path / "scoring.py").write_text(SCORING)
    live = child(
        "import pathlib\nimport task_under_test\nimport scoring\nfrom fairtrial import Session\n"
        "session = Session()\ntask_under_test.run(session)\n"
        "pathlib.Path('snapshot').write_bytes(session.snapshot())\nprint(scoring.scores(session))"
    )
    restored = child(
        "import pathlib, sys\nimport scoring\nfrom fairtrial.data.session import restore_session\n"
        "print(scoring.scores(restore_session(pathlib.Path('snapshot').read_bytes())))\n"
        "assert 'task_under_test' not in sys.modules"
    )
    assert restored == live
    assert [score.passed for score in decode(list[Score], live)] == [True, False, True, False, False, True, True, True]


def test_a_snapshot_is_plain_json_with_a_version() -> None:
    session = Session()
    session.record(ToolInvoked("t"))
    tree = json.loads(session.snapshot())
    assert tree["version"] == 1
    assert tree["events"][0][6] == "fairtrial:ToolInvoked"


def test_events_of_judges_are_in_the_snapshot_and_not_counted() -> None:
    session = Session()
    session.record(PromptExecuted(usage=TokenUsage(5, 5)))
    before = token_usage_under(10)(None, None, session.view())
    session.record(PromptExecuted(usage=TokenUsage(5_000, 0)), actor="judge")
    assert token_usage_under(10)(None, None, restore_session(session.snapshot())) == before
    assert len(restore_session(session.snapshot()).everything().envelopes) == 2
    assert restore_session(session.snapshot()).view().everything()[PromptExecuted].latest() is not None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a session snapshot: not JSON"),
        (b"[]", "not a session snapshot: an object was expected"),
        (b"{}", "format None"),
        (b'{"version": 2}', "format 2, but this Fairtrial reads format 1; upgrade the older"),
        (b'{"version": 1}', "expected UUID as text"),
        (b'{"version": 1, "session_id": 5}', "expected UUID as text"),
        (b'{"version": 1, "session_id": "%s"}', "expected an object"),
        (b'{"version": 1, "session_id": "%s", "tags": {"a": 1}, "events": []}', "expected str"),
        (b'{"version": 1, "session_id": "%s", "tags": {}}', "its events are missing"),
        (b'{"version": 1, "session_id": "%s", "tags": {}, "events": [5]}', "an event is not an array"),
        (b'{"version": 1, "session_id": "%s", "tags": {}, "events": [[]]}', "an event is not an array"),
        (b'{"version": 1, "session_id": "%s", "tags": {}, "events": [[1, 2]]}', "an array of 7"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_one_sentence(data: bytes, words: str) -> None:
    data = data.replace(b"%s", b"00000000-0000-0000-0000-000000000001")
    with pytest.raises(SessionError, match=words):
        restore_session(data)


_MESSAGE = {"role": "user", "content": 'a "quote", \\, \x1f, é and 😀', "tool_calls": [], "name": ""}


@pytest.mark.parametrize(
    "envelope",
    [
        Envelope(0, 1.5e-05, "task", 1, None, None, "fairtrial:ChatMessage", _MESSAGE),
        Envelope(1, 1e22, "judge", 2, "ab", "cd", 'odd "kind"', freeze(_MESSAGE)),
        Envelope(2, 3, 'user\0 "x"', 1, None, "e", "k", _MESSAGE | {"tool_calls": [{"name": "f", "arguments": {}}]}),
        Envelope(3, 0.1, "task", 1, None, None, "k", _MESSAGE | {"role": 1}),
        Envelope(4, 0.1, "task", 1, None, None, "k", _MESSAGE | {"content": ["a", 1.0, None]}),
        Envelope(5, 0.1, "task", 1, None, None, "k", _MESSAGE | {"tool_calls": ""}),
        Envelope(6, 0.1, "task", 1, None, None, "k", dict(reversed(_MESSAGE.items()))),
        Envelope(7, 0.1, "task", 1, None, None, "k", ["role", "content", "tool_calls", "name"]),
        Envelope(8, 0.1, "task", 1, None, None, "k", None),
    ],
)
def test_a_snapshot_has_the_bytes_that_json_writes_for_its_tree(envelope: Envelope) -> None:
    tags = {'na"me\0': "värde", "": ""}
    tree = {
        "version": 1,
        "session_id": "ab" * 16,
        "tags": {escape_text(name): escape_text(value) for name, value in tags.items()},
        "events": [[*envelope[:2], escape_text(envelope.actor), *envelope[3:]]] * 2,
    }
    written = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
    assert snapshot_bytes("ab" * 16, tags, (envelope, envelope)) == written


@pytest.mark.parametrize("time", [math.nan, math.inf])
def test_a_time_that_is_no_number_is_refused(time: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        snapshot_bytes("ab" * 16, {}, (Envelope(0, time, "task", 1, None, None, "k", None),))
