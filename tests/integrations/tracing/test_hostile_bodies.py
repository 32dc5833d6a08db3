"""The trace receiver answers hostile bodies with 4xx or ignores them, and serves others meanwhile."""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from fairtrial import TrialKey
from fairtrial.integrations.tracing import TraceReceiver
from tests.integrations.tracing.test_receive import App, post

PROTOBUF = {"Content-Type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def receiver() -> Iterator[TraceReceiver]:
    with TraceReceiver() as started:
        yield started


def span(**changes: Any) -> bytes:
    one = {"traceId": "a" * 32, "spanId": "b" * 16, "name": "x", **changes}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]}).encode()


def attribute(value: Any) -> bytes:
    return span(attributes=[{"key": "gen_ai.operation.name", "value": value}])


DEEP: dict[str, Any] = {"intValue": "1"}
for _ in range(40):
    DEEP = {"arrayValue": {"values": [DEEP]}}
TOO_DEEP = b'{"key":"a","value":' + b'{"arrayValue":{"values":[' * 300 + b'{"intValue":"1"}' + b"]}}" * 300 + b"}"
DEEP_SPAN = (
    b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"a","spanId":"b","attributes":[%s]}]}]}]}' % TOO_DEEP
)
BODIES: dict[str, tuple[bytes, dict[str, str], int]] = {
    "random protobuf": (random.Random(1).randbytes(100_000), PROTOBUF, 400),
    "a protobuf that is cut off": (b"\x0a\xff\xff\xff\xff\x0f", PROTOBUF, 400),
    "a deep protobuf": (b"\x0a\x02" * 5000, PROTOBUF, 400),
    "no JSON": (b"\xff\xfe{", {}, 400),
    "an empty body": (b"", {}, 400),
    "100,000 levels": (b"[" * 100_000, {}, 400),
    "a list": (b"[]", {}, 400),
    "a text for a list": (b'{"resourceSpans":"x"}', {}, 400),
    "nulls": (b'{"resourceSpans":[null]}', {}, 400),
    "spans that are numbers": (b'{"resourceSpans":[{"scopeSpans":[{"spans":[5]}]}]}', {}, 400),
    "an integer that is none": (attribute({"intValue": "zz"}), {}, 400),
    "an attribute without a key": (span(attributes=[{"value": {"intValue": "1"}}, 7]), {}, 400),
    "a text that is a list": (attribute({"stringValue": ["chat"]}), {}, 400),
    "a list for a text": (attribute({"arrayValue": {"values": [{"stringValue": "chat"}]}}), {}, 200),
    "an attribute of 40 levels": (attribute(DEEP), {}, 200),
    "an attribute of 300 levels": (DEEP_SPAN, {}, 400),
    "times that never were": (span(startTimeUnixNano="9" * 26, endTimeUnixNano="-5"), {}, 200),
    "a time of 400 digits": (span(startTimeUnixNano=10**400), {}, 400),
    "no gzip": (b"zzzz", {"Content-Encoding": "gzip"}, 400),
    "half a gzip": (gzip.compress(b"{}")[:-4], {"Content-Encoding": "gzip"}, 400),
    "deflate": (zlib.compress(b"{}"), {"Content-Encoding": "deflate"}, 200),
    "an unknown encoding": (b"x", {"Content-Encoding": "br"}, 400),
    "a long encoding": (b"x", {"Content-Encoding": "a" * 5000}, 400),
    "another content type": (b"x", {"Content-Type": "text/html"}, 415),
    "100 MB of zeros": (gzip.compress(bytes(100_000_000), 1), {"Content-Encoding": "gzip"}, 413),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_answered_and_the_next_one_too(receiver: TraceReceiver, name: str) -> None:
    body, headers, status = BODIES[name]
    assert post(receiver.endpoint, body, **headers) == status
    assert post(receiver.endpoint, b"{}") == 200


def test_many_empty_gzip_members_delay_nobody(receiver: TraceReceiver) -> None:
    empty = gzip.compress(b"")
    body = empty * (8 * 1024 * 1024 // len(empty))
    answers: list[int] = []
    before = time.monotonic()
    sender = threading.Thread(
        target=lambda: answers.append(post(receiver.endpoint, body, **{"Content-Encoding": "gzip"}))
    )
    sender.start()
    assert post(receiver.endpoint, b"{}") == 200
    sender.join()
    assert answers == [413]
    assert time.monotonic() - before < 30  # 400,000 members took hours.


def test_a_span_with_a_list_for_a_name_is_part_of_its_trial(receiver: TraceReceiver) -> None:
    expected = receiver.expect(TrialKey("run", "b", "list"), 1)
    app = App(receiver.endpoint, f"00-{expected.trace_id}-{expected.root_id}-01")
    odd = app.span("odd")
    odd["attributes"] = [{"key": "gen_ai.operation.name", "value": {"arrayValue": {"values": [{"intValue": 1}]}}}]
    app.send(odd)
    assert expected.collected().spans == 1


def test_floods_of_spans_are_counted_and_forgotten(receiver: TraceReceiver) -> None:
    def spans(trace: str, first: int) -> dict[str, Any]:
        made = [
            {"traceId": trace, "spanId": f"{first + n:016x}", "name": "x", "startTimeUnixNano": "1"}
            for n in range(2000)
        ]
        return {"resourceSpans": [{"scopeSpans": [{"spans": made}]}]}

    unknown, surplus = receiver.counts.unknown, receiver.counts.surplus
    for number in range(1, 4):
        assert post(receiver.endpoint, spans(f"{number:032x}", 1)) == 200
    assert receiver.counts.unknown == unknown + 6000
    expected = receiver.expect(TrialKey("run", "b", "flood"), 1)
    for number in range(7):
        assert post(receiver.endpoint, spans(expected.trace_id, number * 2000 + 1)) == 200
    assert receiver.counts.surplus > surplus
    assert expected.collected().spans <= 10_000
