"""The encoding of messages, and the messages that are refused."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import EvalResult, Experiment, Metric, Sample, Score, Session, TokenUsage, TrialKey
from fairtrial.errors import BodyError, CodecError, ConfigurationError
from fairtrial.fleet.messages import EvalReply, EvalRequest, MainLoopRequest, MainLoopResult, by_run, without_secrets
from fairtrial.mailbox import InMemoryMailbox
from fairtrial.store import redact

KEY = TrialKey("run", "terse", "s1", 2)
REQUEST: EvalRequest = EvalRequest(
    KEY,
    Sample("s1", {"question": "why"}, "because", {"level": 3}),
    ordinal=7,
    sample_ordinal=3,
    attempt=2,
    params={"style": ["short"]},
    suite="support",
    fingerprint="abc",
    echo=True,
)


def a_result(**changes: Any) -> EvalResult:
    session = Session(tags={"run_id": "run"})
    session.record(TokenUsage(1, 2))
    score = Score(
        0.75,
        True,
        "fine",
        [Metric("tone", 0.5, 1.0, {"by": "judge"}), Metric("polite", 1.0, passed=True, reason="kind")],
        name="support",
    )
    return replace(
        EvalResult(
            key=KEY,
            ordinal=7,
            outcome="scored",
            score=score,
            output={"answer": "because"},
            latency_ms=12,
            usage=TokenUsage(10, 20, 3, 0.25),
            judge_cost_usd=0.5,
            cache_hits=2,
            unpriced_calls=1,
            unpriced_judge_calls=3,
            cut_off_calls=2,
            attempt=2,
            execution=99,
            started_at=1_700_000_000.5,
            metadata={"note": "x"},
            output_json='{"answer":"because"}',
            snapshot=session.snapshot(),
        ),
        **changes,
    )


REPLY = EvalReply(a_result(), 3, REQUEST.sample, REQUEST.request_id, "worker-1")
MAIN_REQUEST = MainLoopRequest(
    {"question": "why"}, "id", {"a": 1}, "terse", KEY, {"level": 3}, seed=5, attempt=2, timeout_seconds=2.5
)
MAIN_RESULT = MainLoopResult("id", ["out"], "no", b'{"events":[]}', "session", TokenUsage(1, 2, 0, None), 5)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec=None)), inner, max_size=4),
    max_leaves=10,
)


class TestRoundTrips:
    @pytest.mark.proves("R48", "R65")
    @pytest.mark.parametrize("body", [REQUEST, REPLY, MAIN_REQUEST, MAIN_RESULT], ids=lambda body: type(body).__name__)
    def test_messages_are_equal_after_a_round_trip(self, body: Any) -> None:
        read = type(body).from_wire(body.to_wire())
        assert read == body
        if isinstance(body, EvalReply):
            assert read.result.output_json == body.result.output_json
            assert read.result.snapshot == body.result.snapshot

    def test_everything_that_can_be_left_out_may_be(self) -> None:
        request = EvalRequest(TrialKey("r", "baseline", "s"), Sample("s", 1))
        assert EvalRequest.from_wire(request.to_wire()) == request
        reply = EvalReply(EvalResult(key=request.key, ordinal=0, outcome="timeout", error="slow", stage="task"))
        assert EvalReply.from_wire(reply.to_wire()) == reply
        assert MainLoopResult.from_wire(MainLoopResult("i").to_wire()) == MainLoopResult("i")
        asked = MainLoopRequest("q")
        assert MainLoopRequest.from_wire(asked.to_wire()) == asked

    @pytest.mark.proves("R48")
    def test_a_request_carries_the_time_it_was_made(self) -> None:
        before = time.time()
        request = EvalRequest(TrialKey("r", "baseline", "s"), Sample("s", 1))
        assert before <= request.created_at <= time.time()
        assert EvalRequest.from_wire(request.to_wire()).created_at == request.created_at

    @given(value=json_values, text=st.text(st.characters(codec=None)))
    def test_any_json_and_any_text_comes_through(self, value: Any, text: str) -> None:
        request = EvalRequest(TrialKey(text, "baseline", "s" + text), Sample("s" + text, value, [value]), suite=text)
        assert EvalRequest.from_wire(request.to_wire()) == request
        result = EvalResult(
            key=request.key, ordinal=0, outcome="task_error", output=value, error=text, metadata={"m": value}
        )
        reply = EvalReply.from_wire(EvalReply(result, sample=request.sample).to_wire())
        assert (reply.result, reply.sample) == (result, request.sample)
        answer = MainLoopResult(text, value)
        assert MainLoopResult.from_wire(answer.to_wire()) == answer

    def test_values_that_json_lacks_are_encoded_by_the_codec(self) -> None:
        request = replace(REQUEST, sample=Sample("s1", {"data": b"\0\xff", "limit": math.inf}))
        assert EvalRequest.from_wire(request.to_wire()).sample.input == {"data": b"\0\xff", "limit": math.inf}
        reply = replace(REPLY, result=a_result(output=b"\xff", output_json=None))
        assert EvalReply.from_wire(reply.to_wire()).result.output == b"\xff"

    def test_a_message_that_cannot_be_encoded_is_refused(self) -> None:
        with pytest.raises(CodecError, match="object"):
            replace(REQUEST, sample=Sample("s1", object())).to_wire()
        with pytest.raises(CodecError, match="UTF-8"):
            replace(REPLY, result=a_result(snapshot=b"\xff")).to_wire()
        knot: list[Any] = []
        knot.append(knot)
        with pytest.raises(CodecError):
            MainLoopResult("id", knot).to_wire()

    def test_a_request_must_be_about_its_own_sample(self) -> None:
        with pytest.raises(ConfigurationError, match="the key must name sample"):
            EvalRequest(KEY, Sample("other", 1))


@dataclass(frozen=True)
class Question:
    text: str


class TestTypedSamples:
    def test_a_worker_reads_input_and_expected_with_its_own_types(self) -> None:
        sent = replace(REQUEST, sample=Sample("s1", Question("why"), {1, 2}, {"level": 3}))
        read = EvalRequest.from_wire(sent.to_wire())
        assert read.sample.input == {"text": "why"}
        sample = read.typed(Question, set[int])
        assert (sample.input, sample.expected, sample.metadata) == (Question("why"), {1, 2}, {"level": 3})
        assert read.experiment == Experiment("terse", {"style": ["short"]})

    def test_plain_values_are_not_read_twice(self) -> None:
        request = replace(REQUEST, sample=Sample("s1", "q", None))
        assert request.typed(str, str) is request.sample
        assert request.typed() is request.sample

    def test_a_sample_of_another_type_is_an_error_that_says_where(self) -> None:
        with pytest.raises(CodecError, match=r"\$\.input"):
            REQUEST.typed(Question)
        with pytest.raises(CodecError, match=r"\$\.expected"):
            REQUEST.typed(object, int)


def tampered(body: Any, **changes: Any) -> bytes:
    tree = json.loads(body.to_wire())
    for name, value in changes.items():
        if value is ...:
            del tree[name]
        else:
            tree[name] = value
    return json.dumps(tree).encode()


BAD_REQUESTS: list[dict[str, Any]] = [
    {"key": ["run", "terse", "s1"]},
    {"key": ["run", "terse", "", 0]},
    {"key": ["run", "terse", 5, 0]},
    {"key": ["run", "terse", "s1", -1]},
    {"key": ["run", "terse", "s1", True]},
    {"key": ["run", "a/b", "s1", 0]},
    {"key": ...},
    {"ordinal": -1},
    {"ordinal": True},
    {"ordinal": 1.0},
    {"ordinal": 1 << 70},
    {"attempt": 0},
    {"params": []},
    {"metadata": "x"},
    {"suite": 5},
    {"echo": 1},
    {"id": ...},
    {"at": "now"},
    {"at": -1},
    {"at": 10**400},
    {"v": 2},
    {"v": True},
    {"v": ...},
]
BAD_REPLIES: list[dict[str, Any]] = [
    {"outcome": "great"},
    {"stage": "elsewhere"},
    {"score": ...},
    {"score": [2.0, True, "", [], ""]},
    {"score": ["1", True, "", [], ""]},
    {"score": [1.0, "yes", "", [], ""]},
    {"score": [1.0, True, 5, [], ""]},
    {"score": [1.0, True, "", [["m", "1", 0, {}]], ""]},
    {"score": [1.0, True, "", [["m", 1]], ""]},
    {"score": [1.0, True, "", [5], ""]},
    {"score": {}},
    {"output": "{"},
    {"output": "NaN"},
    {"output": "[" * 100_000},
    {"output": {"not": "text"}},
    {"usage": [1, 2, 3]},
    {"usage": [1, 2, -3, None]},
    {"usage": [1, 2, 3, "free"]},
    {"calls": [0.5, 1, 2]},
    {"calls": [0.5, -1, 2, 3]},
    {"calls": ["free", 1, 2, 3]},
    {"snapshot": 5},
    {"sample": [1, 2]},
    {"sample": [1, 2, 3]},
    {"worker": None},
]
BAD_PLAIN_REPLIES: list[dict[str, Any]] = [
    *({"ordinal": "1"}, {"attempt": 0}, {"execution": None}, {"started_at": "x"}, {"id": 5}, {"key": []}),
    *({"sample_ordinal": -1}, {"latency_ms": 1.5}),
]
BAD_MAIN: list[dict[str, Any]] = [{"timeout_seconds": "1"}, {"experiment": "a/b"}, {"seed": -1}, {"key": "x"}]


PLAIN_REQUEST = EvalRequest(TrialKey("r", "baseline", "s"), Sample("s", "in", "out"), 1, 2, suite="s", fingerprint="f")


def test_bytes_with_a_secret_leave_as_a_text_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_registered", {})
    redact.register_secret("first-secret-4711")
    result = EvalResult(key=REQUEST.key, ordinal=0, outcome="scored", score=Score(1), output=b"a first-secret-4711 b")
    reply = EvalReply.from_wire(without_secrets(EvalReply(result)).to_wire())
    assert (reply.result.output, reply.result.redacted_parts) == ("[redacted]", ("output",))


def test_a_reply_leaves_without_the_secrets_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_registered", {})
    redact.register_secret("first-secret-4711")
    redact.register_secret("other-secret-4711")
    redact.register_secret("1234567890")
    metrics = [
        Metric("first-secret-4711", 1234567890, metadata={"why": "first-secret-4711"}, reason="other-secret-4711"),
        Metric("other-secret-4711", 0.5),
    ]
    sent = without_secrets(
        EvalReply(
            EvalResult(
                key=REQUEST.key,
                ordinal=0,
                outcome="scored",
                score=Score(1, True, "first-secret-4711", metrics, name="judge"),
                output={"text": "first-secret-4711"},
                metadata={"note": "first-secret-4711"},
                unknown_endings={"first-secret-4711": 1},
            )
        )
    )
    reply = EvalReply.from_wire(sent.to_wire())
    assert b"secret-4711" not in reply.to_wire()
    result, score = reply.result, reply.result.score
    assert score is not None
    assert (score.reason, score.name, score.metrics[0].value) == ("[redacted]", "judge", 1234567890)
    assert [metric.name for metric in score.metrics] == ["[redacted]", "[redacted]#2"]
    assert result.output == {"text": "[redacted]"}
    assert dict(result.unknown_endings) == {"[redacted]": 1}
    assert result.redacted_parts == ("output", "reason", "score", "metadata")
    clean = EvalReply(EvalResult(key=REQUEST.key, ordinal=0, score=Score(1, True, "fine")))
    assert without_secrets(clean) is clean


PLAIN_REPLY = EvalReply(
    EvalResult(
        key=PLAIN_REQUEST.key,
        ordinal=1,
        outcome="scored",
        score=Score(1.0),
        output="yes",
        started_at=1.5,
        output_json='"yes"',
    ),
    2,
    None,
    "i",
    "w",
)


class TestWhatDoesNotGetThrough:
    @pytest.mark.parametrize(
        ("body", "change"),
        [
            *((body, change) for body in (PLAIN_REQUEST, REQUEST) for change in BAD_REQUESTS),
            *((body, change) for body in (PLAIN_REPLY, REPLY) for change in BAD_REPLIES),
            *((PLAIN_REPLY, change) for change in BAD_PLAIN_REPLIES),
            *((MAIN_REQUEST, change) for change in BAD_MAIN),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_a_message_with_a_wrong_field(self, body: Any, change: dict[str, Any]) -> None:
        if body in (PLAIN_REQUEST, PLAIN_REPLY):
            assert type(body).from_wire(body.to_wire()) == body
        with pytest.raises(CodecError):
            type(body).from_wire(tampered(body, **change))

    @pytest.mark.parametrize("kind", [EvalRequest, EvalReply, MainLoopRequest, MainLoopResult])
    @pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"{}", b"[" * 200_000, b'{"v":1,"x":NaN}'])
    def test_something_else_altogether(self, kind: Any, data: bytes) -> None:
        with pytest.raises(CodecError):
            kind.from_wire(data)

    def test_deep_nesting_with_escapes_is_an_error_and_not_a_crash(self) -> None:
        deep = b'{"v":1,"id":"\\u0041","input":' + b"[" * 900 + b"]" * 900 + b"}"
        try:
            assert MainLoopRequest.from_wire(deep).request_id == "A"
        except CodecError:
            pass  # How deep is too deep depends on how deep we already are.

    @given(data=st.binary(max_size=200))
    def test_noise(self, data: bytes) -> None:
        with pytest.raises(CodecError):
            EvalRequest.from_wire(data)


class TestInMailboxes:
    async def test_a_mailbox_carries_them_and_sets_aside_what_is_not_one(self) -> None:
        mailbox = InMemoryMailbox("requests", EvalRequest)
        await mailbox.send(REQUEST)
        await mailbox.send(MAIN_REQUEST)  # type: ignore[arg-type]  # what a stranger might send
        await mailbox.send({"key": "value"})  # type: ignore[arg-type]
        (message,) = await mailbox.receive(10, wait_time_seconds=0)
        assert message.body == REQUEST
        aside = await mailbox.dead_letters.page()
        assert [letter.error for letter in aside] == ["BodyError", "BodyError"]
        assert aside[0].body(MainLoopRequest) == MAIN_REQUEST
        with pytest.raises(BodyError):
            aside[1].body(EvalRequest)

    def test_replies_are_sorted_by_run_for_the_store(self) -> None:
        other = replace(REPLY, result=a_result(key=KEY._replace(run_id="other")), sample=None)
        sorted_ = by_run([REPLY, other, REPLY])
        assert {run: (len(results), set(samples)) for run, (results, samples) in sorted_.items()} == {
            "run": (2, {3}),
            "other": (1, set()),
        }
