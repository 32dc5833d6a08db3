"""Every fault of the model server, and what the official SDKs make of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import get_args

import aiohttp
import anthropic
import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from fairtrial.integrations.model_server import CutOff, EmptyBody, Fault, HalfSent, Hang, NotAuthorised, Refused, Slow
from fairtrial.integrations.model_server.config import FaultRule
from fairtrial.integrations.model_server.faults import (
    ConnectionReset,
    ContentFiltered,
    ContextTooLong,
    EncryptedRefused,
    MalformedJson,
    RateLimited,
    ReasoningNotReturned,
    ReplyLost,
    ServerFailed,
    StreamFailed,
    StreamOptionsRefused,
    TemperatureRefused,
    TokensDamaged,
    ToolsNeedResponses,
    WrongShape,
)
from fairtrial.integrations.model_server.reply import FixedLatency
from fairtrial.integrations.model_server.rules import HostedEvals
from fairtrial.integrations.model_server.server import ModelServer, spawn_model_server
from tests.figures import Figure
from tests.integrations.importers.project import small_project


@contextmanager
def both_clients(
    server: ModelServer, *, timeout: float = 30.0
) -> Iterator[tuple[Callable[..., object], Callable[..., object]]]:
    """Two functions that ask the server through an SDK; with `stream=True` they read the stream to its end."""
    with (
        openai.OpenAI(base_url=server.base_url + "/v1", api_key="test", max_retries=0, timeout=timeout) as first,
        anthropic.Anthropic(base_url=server.base_url, api_key="test", max_retries=0, timeout=timeout) as second,
    ):

        def ask_openai(*, stream: bool = False) -> object:
            if stream:
                return list(
                    first.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
                )
            return first.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

        def ask_anthropic(*, stream: bool = False) -> object:
            if stream:
                return list(
                    second.messages.create(
                        model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}], stream=True
                    )
                )
            return second.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])

        yield ask_openai, ask_anthropic


RAISED: list[tuple[Fault, bool, type[Exception], type[Exception]]] = [
    (RateLimited(), False, openai.RateLimitError, anthropic.RateLimitError),
    (RateLimited(), True, openai.RateLimitError, anthropic.RateLimitError),
    (ServerFailed(), False, openai.InternalServerError, anthropic.InternalServerError),
    (ServerFailed(503), True, openai.InternalServerError, anthropic.InternalServerError),
    (ServerFailed(529), False, openai.InternalServerError, anthropic.InternalServerError),
    (NotAuthorised(), False, openai.AuthenticationError, anthropic.AuthenticationError),
    (NotAuthorised(403), False, openai.PermissionDeniedError, anthropic.PermissionDeniedError),
    (ContextTooLong(), False, openai.BadRequestError, anthropic.BadRequestError),
    (ConnectionReset(), False, openai.APIConnectionError, anthropic.APIConnectionError),
    (ConnectionReset(), True, openai.APIConnectionError, anthropic.APIConnectionError),
    (ReplyLost(), False, openai.APIConnectionError, anthropic.APIConnectionError),
    (ReplyLost(), True, openai.APIConnectionError, anthropic.APIConnectionError),
    (ReplyLost(504), False, openai.InternalServerError, anthropic.InternalServerError),
    (HalfSent(), False, openai.APIConnectionError, anthropic.APIConnectionError),
    (HalfSent(0.0), False, openai.APIConnectionError, anthropic.APIConnectionError),
    # Here Anthropic's SDK lets its transport's own error through.
    (HalfSent(), True, openai.APIConnectionError, httpx2.RemoteProtocolError),
    # Both SDKs let the decoder's error through.
    (MalformedJson(), False, json.JSONDecodeError, json.JSONDecodeError),
    (MalformedJson(), True, json.JSONDecodeError, json.JSONDecodeError),
    (EmptyBody(), False, json.JSONDecodeError, json.JSONDecodeError),
    (StreamFailed(), False, openai.InternalServerError, anthropic.InternalServerError),
    (StreamFailed(), True, openai.APIError, anthropic.APIStatusError),
]


@pytest.mark.parametrize(("fault", "stream", "from_openai", "from_anthropic"), RAISED, ids=repr)
def test_a_fault_makes_the_sdks_raise(
    fault: Fault, stream: bool, from_openai: type[Exception], from_anthropic: type[Exception]
) -> None:
    with ModelServer(faults=fault) as server, both_clients(server) as (ask_openai, ask_anthropic):
        with pytest.raises(from_openai):
            ask_openai(stream=stream)
        with pytest.raises(from_anthropic):
            ask_anthropic(stream=stream)
        assert server.stats().by_fault == {fault.kind: 2}


def test_the_tests_of_this_file_know_every_fault() -> None:
    # Those of reasoning models are in test_model_server_reasoning.py, those of token ids in tests/rl, refused fields
    # in tests/models/test_odd_providers.py.
    reasoning = {ToolsNeedResponses, ReasoningNotReturned, TemperatureRefused, CutOff}
    reasoning |= {EncryptedRefused, StreamOptionsRefused}
    elsewhere = {Hang, Slow, WrongShape, ContentFiltered, Refused, TokensDamaged} | reasoning
    assert {type(fault) for fault, *_ in RAISED} | elsewhere == set(get_args(get_args(Fault.__value__)[0]))


def test_the_context_length_error_has_the_code_clients_look_for() -> None:
    with ModelServer(faults=ContextTooLong(100)) as server, both_clients(server) as (ask_openai, ask_anthropic):
        with pytest.raises(openai.BadRequestError) as from_openai:
            ask_openai()
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 101 tokens > 100 maximum"):
            ask_anthropic()
    assert from_openai.value.code == "context_length_exceeded"


def test_a_hang_ends_in_the_clients_timeout_and_leaves_nothing_in_flight() -> None:
    with ModelServer(faults=Hang()) as server:
        with both_clients(server, timeout=0.05) as (ask_openai, ask_anthropic):
            with pytest.raises(openai.APITimeoutError):
                ask_openai()
            with pytest.raises(anthropic.APITimeoutError):
                ask_anthropic()
        deadline = time.monotonic() + 30
        while server.stats().in_flight and time.monotonic() < deadline:
            time.sleep(0.001)
        stats = server.stats()
    assert (stats.in_flight, stats.max_in_flight >= 1, stats.abandoned) == (0, True, 2)
    assert stats.by_status == {}


def test_a_hang_is_bounded() -> None:
    with (
        ModelServer(faults=Hang(0.01)) as server,
        both_clients(server) as (ask_openai, _),
        pytest.raises(openai.APIConnectionError),
    ):
        ask_openai()


def test_a_server_that_stops_lets_hung_requests_go() -> None:
    with ThreadPoolExecutor(1) as pool:
        with ModelServer(faults=Hang()) as server:
            client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="test", max_retries=0)
            messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
            waiting = pool.submit(lambda: client.chat.completions.create(model="m", messages=messages))
            while not server.stats().in_flight:
                assert not waiting.done()
                time.sleep(0.001)
        with client, pytest.raises(openai.APIConnectionError):
            waiting.result(30)


def test_valid_json_that_is_no_completion_gets_through_the_sdks_as_nothing() -> None:
    with ModelServer(faults=WrongShape()) as server, both_clients(server) as (ask_openai, ask_anthropic):
        assert getattr(ask_openai(), "choices", "missing") is None
        assert getattr(ask_anthropic(), "content", "missing") is None
    with ModelServer(faults=WrongShape([1])) as server, both_clients(server) as (ask_openai, ask_anthropic):
        assert (ask_openai(), ask_anthropic()) == ([1], [1])
        assert (ask_openai(stream=True), ask_anthropic(stream=True)) == ([[1]], [[1]])


def test_an_empty_stream_is_empty() -> None:
    with ModelServer(faults=EmptyBody()) as server, both_clients(server) as (ask_openai, ask_anthropic):
        assert (ask_openai(stream=True), ask_anthropic(stream=True)) == ([], [])


def test_a_filtered_answer_says_why_it_stopped() -> None:
    with ModelServer(faults=ContentFiltered()) as server, both_clients(server) as (ask_openai, ask_anthropic):
        from_openai, from_anthropic = ask_openai(), ask_anthropic()
    assert isinstance(from_openai, openai.types.chat.ChatCompletion)
    assert isinstance(from_anthropic, anthropic.types.Message)
    assert from_openai.choices[0].finish_reason == "content_filter"
    assert from_anthropic.stop_reason == "refusal"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_where_each_protocol_has_it(stream: bool) -> None:
    with (
        ModelServer(faults=Refused("I won't do it.")) as server,
        openai.OpenAI(base_url=server.base_url + "/v1", api_key="test") as first,
        anthropic.Anthropic(base_url=server.base_url, api_key="test") as second,
    ):
        if stream:
            with first.chat.completions.stream(model="m", messages=[{"role": "user", "content": "hi"}]) as chunks:
                choice = chunks.get_final_completion().choices[0]
                assert (choice.message.refusal, choice.finish_reason) == ("I won't do it.", "stop")
            with second.messages.stream(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
            ) as events:
                assert events.get_final_message().stop_reason == "refusal"
        else:
            message = first.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            assert (message.choices[0].message.refusal, message.choices[0].message.content) == ("I won't do it.", None)
            answer = second.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
            assert answer.stop_reason == "refusal"
            assert answer.stop_details is not None
            assert answer.stop_details.explanation == "I won't do it."


def test_a_stream_that_fails_has_begun_well() -> None:
    with (
        ModelServer(faults=StreamFailed()) as server,
        openai.OpenAI(base_url=server.base_url + "/v1", api_key="test", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        assert next(stream).choices[0].delta.role == "assistant"
        with pytest.raises(openai.APIError, match="mid-stream"):
            list(stream)


def test_retry_after_comes_in_the_form_asked_for() -> None:
    def headers(fault: Fault) -> dict[str, str]:
        with (
            ModelServer(faults=fault) as server,
            both_clients(server) as (ask_openai, _),
            pytest.raises(openai.APIStatusError) as raised,
        ):
            ask_openai()
        return {name: value for name, value in raised.value.response.headers.items() if name.startswith("retry")}

    assert headers(RateLimited()) == {}
    assert headers(RateLimited(2)) == {"retry-after": "2"}
    assert headers(RateLimited(0.25)) == {"retry-after": "0.25"}
    assert headers(RateLimited(0.25, "milliseconds")) == {"retry-after-ms": "250"}
    assert headers(ServerFailed(503, retry_after=1)) == {"retry-after": "1"}
    before = time.time()
    (date,) = headers(RateLimited(30, "date")).values()
    assert before + 30 <= parsedate_to_datetime(date).timestamp() <= time.time() + 31


def test_the_sdks_own_retry_gets_past_a_fault_of_the_first_attempt() -> None:
    with (
        ModelServer(faults=FaultRule(RateLimited(0.01, "milliseconds"), attempts=(1,))) as server,
        openai.OpenAI(base_url=server.base_url + "/v1", api_key="test", max_retries=1) as client,
    ):
        for text in ("one", "two"):
            answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            assert answer.choices[0].message.content == text
        assert server.stats().by_status == {429: 2, 200: 2}
        assert [(request.attempt, request.last_user) for request in server.requests()] == [
            (1, "one"),
            (2, "one"),
            (1, "two"),
            (2, "two"),
        ]


def test_a_slow_answer_is_good_but_late() -> None:
    with ModelServer(faults=Slow(FixedLatency(0.05))) as server, both_clients(server) as (ask_openai, _):
        started = time.monotonic()
        ask_openai()
        assert time.monotonic() - started >= 0.05
        assert server.stats().by_fault == {"slow": 1}


def test_a_rule_may_fail_the_requests_that_match_a_pattern() -> None:
    with (
        ModelServer(faults=FaultRule(NotAuthorised(), when="secret", where="anywhere", model="m")) as server,
        openai.OpenAI(base_url=server.base_url + "/v1", api_key="test", max_retries=0) as client,
    ):
        assert client.chat.completions.create(model="m", messages=[{"role": "user", "content": "open"}]).choices
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(
                model="m", messages=[{"role": "system", "content": "secret"}, {"role": "user", "content": "open"}]
            )
        assert client.chat.completions.create(model="x", messages=[{"role": "user", "content": "secret"}]).choices


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServerFailed(404),
        lambda: HalfSent(1.0),
        lambda: FaultRule(RateLimited(), 1.5),
        lambda: FaultRule(RateLimited(), every=0),
        lambda: FaultRule(RateLimited(), when="("),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        make()


# The model server costs little more than its HTTP server, so that measurements with it are valid.


_REQUESTS = 5000
_CONNECTIONS = 100
_ROUNDS = 4
_BODY = {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}]}

# The least that aiohttp can do with such a request: read its JSON and send an answer of the same shape.
_BARE_SERVER = """
import asyncio
from aiohttp import web

async def complete(request):
    body = await request.json()
    message = {"role": "assistant", "content": body["messages"][-1]["content"]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return web.json_response({"id": "1", "model": body["model"], "choices": [choice], "usage": usage})

async def main():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@contextmanager
def _bare_server() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", _BARE_SERVER], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


async def _rate(base_url: str) -> float:
    """Requests per second over many connections."""
    connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector) as session:
        numbers = iter(range(_REQUESTS))

        async def worker() -> None:
            for _ in numbers:
                async with session.post(base_url + "/v1/chat/completions", json=_BODY) as answer:
                    assert answer.status == 200
                    await answer.read()

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(_CONNECTIONS)))
        return _REQUESTS / (time.perf_counter() - started)


@pytest.mark.measured
def test_over_a_hundred_connections_it_serves_two_thirds_of_what_a_bare_server_does(figure: Figure) -> None:
    ours, bare = [], []
    with spawn_model_server() as server, _bare_server() as bare_url:
        # In turns, and the best of each: the first round warms the interpreters, and neighbours come and go.
        for _ in range(_ROUNDS):
            bare.append(asyncio.run(_rate(bare_url)))
            ours.append(asyncio.run(_rate(server.base_url)))
        assert server.stats().requests == _ROUNDS * _REQUESTS
    figure("model server: requests a second, x a bare server", max(ours) / max(bare), at_least=2 / 3)


# The model server as OpenAI's hosted Evals, seen through OpenAI's own client.


def client_of(base_url: str, **options: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="sk-test", max_retries=options.get("max_retries", 0))


def test_lists_come_in_pages_in_both_orders() -> None:
    project = small_project(page_size=4)
    ids = [item["id"] for item in project.items["evalrun_a"]]
    with ModelServer(evals=project) as server:
        client = client_of(server.base_url)
        assert [one.id for one in client.evals.list()] == ["eval_capitals"]
        assert [run.id for run in client.evals.runs.list("eval_capitals")] == ["evalrun_a", "evalrun_b"]
        items = client.evals.runs.output_items
        page = items.list("evalrun_a", eval_id="eval_capitals", limit=3)
        assert ([item.id for item in page.data], page.has_more) == (ids[:3], True)
        assert [item.id for item in page] == ids
        assert [item.id for item in items.list("evalrun_a", eval_id="eval_capitals", order="desc")] == ids[::-1]
        assert len(items.list("evalrun_a", eval_id="eval_capitals", limit=100).data) == 4
        assert server.stats().by_status == {200: 1 + 1 + 4 + 3 + 1}


def test_what_is_not_there_is_404_and_an_unknown_cursor_400() -> None:
    with ModelServer(evals=HostedEvals(files={"file-1": "one\n"})) as server:
        client = client_of(server.base_url)
        assert client.files.content("file-1").content == b"one\n"
        with pytest.raises(openai.NotFoundError, match="file file-2"):
            client.files.content("file-2")
        with pytest.raises(openai.NotFoundError, match="eval x"):
            client.evals.runs.list("x")
        with pytest.raises(openai.NotFoundError, match="run y"):
            client.evals.runs.output_items.list("y", eval_id="x")
        with pytest.raises(openai.BadRequestError, match="no object 'z'"):
            client.evals.list(after="z")
    with ModelServer() as server, pytest.raises(openai.NotFoundError):
        client_of(server.base_url).evals.list()


def test_limits_and_faults_apply_and_a_project_is_sent_to_another_process() -> None:
    fault = FaultRule(RateLimited(0.01), when="/output_items", attempts=(1,))
    with spawn_model_server(evals=small_project(), faults=fault) as server:
        client = client_of(server.base_url, max_retries=1)
        assert len(list(client.evals.runs.output_items.list("evalrun_a", eval_id="eval_capitals"))) == 10
        assert server.stats().by_fault == {"rate_limited": 3}


def test_a_resource_can_be_cut_off_by_the_connection() -> None:
    with ModelServer(evals=HostedEvals(files={"file-1": "a line\n"}), faults=HalfSent()) as server:
        with client_of(server.base_url) as client, pytest.raises(openai.APIConnectionError):
            client.files.content("file-1")
        assert server.stats().by_status == {200: 1}
