"""Calls that an application makes with its own client, of the real SDKs, against the model server."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from fairtrial import ConfigurationError, Dataset, EvalSuite, Score, Session, current_trial, evaluate_sync, task
from fairtrial.data.session import ChatMessage, PromptExecuted, TokenUsage, ToolInvoked
from fairtrial.integrations.model_server import FaultRule, ModelServer, RateLimited, Reply, Script, ToolCallReply, Usage
from fairtrial.integrations.model_server.faults import ServerFailed, StreamFailed
from fairtrial.integrations.tracing import TrialSpanProcessor, record_anthropic, record_openai
from fairtrial.integrations.tracing.recording import REPLACES, _sender, reader_of
from fairtrial.models import ModelCallFailed, OpenAIAdapter, Prices, TaskLoop
from fairtrial.models.pricing import configure_prices

LOOK = Reply(
    tool_calls=(ToolCallReply("weather", {"city": "Oslo"}),), reasoning="Look outside.", usage=Usage(100, 20, 40, 8)
)
SNOW = Reply("It is snowing.", usage=Usage(150, 10))
TOOL = {"name": "weather", "description": "The weather", "parameters": {"type": "object", "properties": {}}}
PROTOCOLS = ("chat", "responses", "messages")
CLIENTS = (openai.OpenAI, openai.AsyncOpenAI, anthropic.Anthropic, anthropic.AsyncAnthropic)
WAYS = ("sync", "async", "sync-stream", "async-stream")


class City(BaseModel):
    name: str


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    for owner, name in (
        *((_sender(kind), "request") for kind in CLIENTS),
        (ThreadPoolExecutor, "submit"),
        (threading.Thread, "start"),
    ):
        function = getattr(owner, name)
        setattr(owner, name, getattr(function, REPLACES, function))


@pytest.fixture(autouse=True)
def prices() -> Iterator[None]:
    before = configure_prices({"my-model": Prices(1.0, 10.0)})
    yield
    configure_prices(before)


@pytest.fixture(scope="module")
def weather() -> Iterator[ModelServer]:
    with ModelServer(Script((LOOK, SNOW), per="turn")) as server:
        yield server


def session_of(function: Callable[[str], Any]) -> Session:
    """Return the session of one trial of a task."""
    return asyncio.run(TaskLoop(task=function).execute("Weather?"))[1]


def make_client(server: ModelServer, protocol: str, *, is_async: bool, **options: Any) -> Any:
    package: Any = anthropic if protocol == "messages" else openai
    name = ("Async" if is_async else "") + ("Anthropic" if protocol == "messages" else "OpenAI")
    url = server.base_url + ("" if protocol == "messages" else "/v1")
    return getattr(package, name)(base_url=url, api_key="test", **{"max_retries": 0, **options})


def record(client: Any, protocol: str) -> Any:
    return record_anthropic(client) if protocol == "messages" else record_openai(client)


def request_of(protocol: str, conversation: list[Any]) -> dict[str, Any]:
    if protocol == "chat":
        return {
            "model": "my-model",
            "messages": [{"role": "system", "content": "Be brief."}, *conversation],
            "tools": [{"type": "function", "function": TOOL}],
        }
    if protocol == "responses":
        tools = [{"type": "function", **TOOL}]
        return {"model": "my-model", "instructions": "Be brief.", "input": conversation, "tools": tools}
    tools = [{"name": "weather", "description": "", "input_schema": TOOL["parameters"]}]
    return {"model": "my-model", "max_tokens": 99, "system": "Be brief.", "messages": conversation, "tools": tools}


def method_of(client: Any, protocol: str) -> Any:
    if protocol == "chat":
        return client.chat.completions.create
    return client.responses.create if protocol == "responses" else client.messages.create


def with_result(protocol: str, conversation: list[Any], answer: Any) -> list[Any]:
    """Return the conversation with an answer and the result of its tool, as an application appends them."""
    if protocol == "chat":
        said = answer.choices[0].message.model_dump(exclude_none=True)
        call_id = said["tool_calls"][0]["id"]
        return [*conversation, said, {"role": "tool", "tool_call_id": call_id, "content": '{"sky": "snow"}'}]
    if protocol == "responses":
        items = [item.model_dump(exclude_none=True) for item in answer.output]
        result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": '{"sky": "snow"}'}
        return [*conversation, *items, result]
    blocks = [block.model_dump(exclude_none=True) for block in answer.content]
    result = {
        "type": "tool_result",
        "tool_use_id": blocks[-1]["id"],
        "content": [{"type": "text", "text": '{"sky": "snow"}'}],
    }
    return [*conversation, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]


def streamed_request(protocol: str, conversation: list[Any]) -> dict[str, Any]:
    asked = request_of(protocol, conversation)
    return {**asked, "stream_options": {"include_usage": True}} if protocol == "chat" else asked


async def converse(server: ModelServer, protocol: str, way: str) -> None:
    """Do what an application with a tool does: ask, call the tool, ask again; the second time as `way` says."""
    is_async = way.startswith("async")
    client = record(make_client(server, protocol, is_async=is_async), protocol)
    create = method_of(client, protocol)
    asked: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = create(**request_of(protocol, asked))
    answer = await first if is_async else first
    second = streamed_request(protocol, with_result(protocol, asked, answer))
    if not way.endswith("stream"):
        final = create(**request_of(protocol, with_result(protocol, asked, answer)))
        if is_async:
            await final
    elif is_async:
        async for _event in await create(**second, stream=True):
            pass
    else:
        for _event in create(**second, stream=True):
            pass
    await client.close() if is_async else client.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_conversation_with_a_tool_is_recorded(weather: ModelServer, protocol: str, way: str) -> None:
    async def application(question: str) -> None:
        await converse(weather, protocol, way)

    session = session_of(application)
    first, second = session[PromptExecuted].all()
    provider = "anthropic" if protocol == "messages" else "openai"
    assert (first.adapter, first.model) == (provider, "my-model")
    assert first.usage == TokenUsage(100, 20, 40, 0.0003, 8)
    assert second.usage == TokenUsage(150, 10, 0, 0.00025)
    assert first.duration_ms is not None
    assert first.duration_ms > 0
    assert (first.finish_reason, second.finish_reason) == (
        ("tool_use", "end_turn") if protocol == "messages" else ("tool_calls", "stop")
    )
    said = session.trajectory.messages
    assert [message.role for message in said] == ["system", "user", "assistant", "tool", "assistant"]
    assert [message.text for message in said if message.role != "tool"][-1] == "It is snowing."
    assert said[2].reasoning == "Look outside."
    (tool,) = session[ToolInvoked].all()
    assert (tool.name, dict(tool.params), tool.result) == ("weather", {"city": "Oslo"}, {"sky": "snow"})
    assert session.usage().cost_usd == pytest.approx(550e-6)


def test_every_client_of_the_process_is_recorded(weather: ModelServer) -> None:
    before = make_client(weather, "chat", is_async=False)
    record_openai()
    record_openai()
    after = make_client(weather, "chat", is_async=False)

    def application(question: str) -> None:
        for client in (before, after, before.with_options(timeout=9)):
            client.chat.completions.create(**request_of("chat", [{"role": "user", "content": question}]))

    assert len(session_of(application)[PromptExecuted].all()) == 3
    before.close()
    after.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_in_another_service_tier_does_not_have_the_usual_cost(protocol: str) -> None:
    replies = [Reply("ok", usage=Usage(100, 10)), Reply("ok", usage=Usage(100, 10, service_tier="priority"))]
    with ModelServer(replies) as server, record(make_client(server, protocol, is_async=False), protocol) as client:

        def application(question: str) -> None:
            for _ in replies:
                method_of(client, protocol)(**request_of(protocol, [{"role": "user", "content": "Weather?"}]))

        usual, fast = session_of(application)[PromptExecuted].all()
    assert usual.usage == TokenUsage(100, 10, cost_usd=0.0002)
    assert fast.usage == TokenUsage(100, 10)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_other_ways_to_read_an_answer_are_recorded(protocol: str) -> None:
    with ModelServer(Reply(output={"name": "Oslo"}, usage=Usage(9, 3))) as server:
        client = record(make_client(server, protocol, is_async=False), protocol)
        asked: list[Any] = [{"role": "user", "content": "Where?"}]
        given = {key: value for key, value in request_of(protocol, asked).items() if key != "tools"}

        def application(question: str) -> None:
            resource = getattr(client, protocol) if protocol != "chat" else client.chat.completions
            raw = resource.with_raw_response.create(**given)
            assert raw.parse().model == "my-model"
            with resource.with_streaming_response.create(**given) as response:
                assert json.loads(b"".join(response.iter_bytes()))["model"] == "my-model"
            if protocol == "chat":
                resource.parse(**given, response_format=City)
                with resource.stream(**streamed_request(protocol, asked), response_format=City) as stream:
                    assert stream.get_final_completion().choices[0].message.parsed == City(name="Oslo")
            elif protocol == "responses":
                resource.parse(**given, text_format=City)
                with resource.stream(**given, text_format=City) as stream:
                    assert stream.get_final_response().output_parsed == City(name="Oslo")
            else:
                resource.parse(**given, output_format=City)
                with resource.stream(**given) as stream:
                    assert stream.get_final_text() == '{"name": "Oslo"}'

        session = session_of(application)
        client.close()
    calls = session[PromptExecuted].all()
    assert [call.usage for call in calls] == [TokenUsage(9, 3, 0, 39e-6)] * 4
    assert [message.role for message in session.trajectory.messages].count("user") == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_that_is_left_early_has_no_cost(protocol: str, is_async: bool) -> None:
    reply = Reply("one two three four five", usage=Usage(9, 5))
    with ModelServer(reply, stream_interval=0.01) as server, contextlib.ExitStack() as left:

        async def application(question: str) -> Any:
            client = record(make_client(server, protocol, is_async=is_async), protocol)
            left.callback(client.close) if not is_async else current_trial().resources.push_async_callback(client.close)
            asked: list[Any] = [{"role": "user", "content": question}]
            stream = method_of(client, protocol)(**streamed_request(protocol, asked), stream=True)
            if is_async:
                stream = await stream
                async for event in stream:
                    if "two" in event.to_json():
                        break
            else:
                for event in stream:
                    if "two" in event.to_json():
                        break
            left.callback(bool, stream)  # Still open at the end of the task.

        session = session_of(application)
    (call,) = session[PromptExecuted].all()
    assert call.finish_reason == "abandoned"
    assert call.usage is None or call.usage.cost_usd is None
    assert session.call_totals().unpriced_calls == 1
    said = session.trajectory.messages[-1]
    assert said.role == "assistant"
    assert said.text.startswith("one two")
    assert "five" not in said.text


def test_a_stream_without_counts_has_an_unknown_cost() -> None:
    with ModelServer("Hello there") as server, record_openai(make_client(server, "chat", is_async=False)) as client:

        def application(question: str) -> None:
            for _chunk in client.chat.completions.create(
                model="my-model", messages=[{"role": "user", "content": question}], stream=True
            ):
                pass

        session = session_of(application)
    (call,) = session[PromptExecuted].all()
    assert (call.usage, call.finish_reason) == (None, "stop")
    assert session.trajectory.last_reply == "Hello there"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_retries_and_errors_are_recorded_and_reach_the_application(protocol: str) -> None:
    faults = [FaultRule(ServerFailed(500), when="break"), FaultRule(RateLimited(retry_after=0.0), attempts=(1,))]
    with ModelServer("fine", faults=faults) as server:
        client = record(make_client(server, protocol, is_async=False, max_retries=1), protocol)

        def application(question: str) -> None:
            create = method_of(client, protocol)
            create(**request_of(protocol, [{"role": "user", "content": "retry"}]))
            with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)):
                create(**request_of(protocol, [{"role": "user", "content": "break"}]))

        session = session_of(application)
        client.close()
    failures = [failure.error for failure in session[ModelCallFailed].all()]
    assert failures[0] == "status 429: Too many requests."
    assert {failure[:10] for failure in failures} == {"status 429", "status 500"}
    assert len(session[PromptExecuted].all()) == 1
    assert [message.text for message in session.trajectory.messages if message.role == "user"] == ["retry", "break"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stream_that_fails_is_recorded_as_failed(protocol: str) -> None:
    with ModelServer("fine", faults=StreamFailed()) as server:
        client = record(make_client(server, protocol, is_async=False), protocol)

        def application(question: str) -> None:
            asked: list[Any] = [{"role": "user", "content": question}]
            # The SDK hands errors inside Responses to the application as events.
            raised = pytest.raises((openai.APIError, anthropic.APIError))
            with raised if protocol != "responses" else contextlib.nullcontext():
                for _event in method_of(client, protocol)(**request_of(protocol, asked), stream=True):
                    pass

        session = session_of(application)
        client.close()
    (call,) = session[PromptExecuted].all()
    assert call.usage is None or call.usage.cost_usd is None


def test_a_server_that_cannot_be_reached_is_recorded() -> None:
    client = record_openai(openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0))

    def application(question: str) -> None:
        with pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(model="my-model", messages=[])

    (failure,) = session_of(application)[ModelCallFailed].all()
    assert "ConnectError" in failure.error


def test_threads_and_pools_of_a_trial_belong_to_it(weather: ModelServer) -> None:
    client = record_openai(make_client(weather, "chat", is_async=False))
    pool = ThreadPoolExecutor(2)

    def ask(question: str) -> None:
        client.chat.completions.create(**request_of("chat", [{"role": "user", "content": question}]))

    async def application(question: str) -> None:
        list(pool.map(ask, [f"{question} 1", f"{question} 2"]))
        thread = threading.Thread(target=ask, args=(f"{question} 3",))
        thread.start()
        await asyncio.get_running_loop().run_in_executor(None, ask, f"{question} 4")
        await asyncio.to_thread(ask, f"{question} 5")
        thread.join()

    report = evaluate_sync(Dataset.of({"a": "", "b": ""}), application, lambda output: Score(1.0))
    for result in report.results:
        texts = [message.text for message in result.session.trajectory.messages if message.role == "user"]
        assert sorted(texts) == [f"{result.sample.input} {number}" for number in range(1, 6)]
        assert len(result.session[PromptExecuted].all()) == 5
    pool.submit(ask, "outside").result()  # In a thread that was started inside a trial.
    pool.shutdown()
    client.close()


def test_calls_are_recorded_where_only_the_sdk_is_installed(
    weather: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application with its own client does not need the extra `models`."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "aiohttp" else find(name, *rest)
    )
    reader_of.cache_clear()
    with make_client(weather, "chat", is_async=False) as client:
        record_openai(client)
        messages = [{"role": "user", "content": "Weather?"}]
        session = session_of(lambda question: client.chat.completions.create(**request_of("chat", messages)) and None)
    (call,) = session[PromptExecuted].all()
    assert call.usage is not None
    assert call.usage.input_tokens == 100


def test_nothing_is_recorded_outside_of_a_trial_and_no_adapter_is_recorded_twice(weather: ModelServer) -> None:
    record_openai()
    client = make_client(weather, "chat", is_async=False)
    client.chat.completions.create(**request_of("chat", [{"role": "user", "content": "Outside"}]))
    adapter = OpenAIAdapter("my-model", base_url=f"{weather.base_url}/v1", api_key="test")

    async def application(question: str) -> None:
        await adapter.complete(question)

    session = session_of(application)
    assert len(session[PromptExecuted].all()) == 1
    assert session.trajectory.messages == ()
    client.close()


def test_calls_of_an_evaluator_are_those_of_a_judge(weather: ModelServer) -> None:
    client = record_openai(make_client(weather, "chat", is_async=False))

    def judge(output: str) -> Score:
        client.chat.completions.create(**request_of("chat", [{"role": "user", "content": "Good?"}]))
        return Score(1.0)

    report = evaluate_sync(Dataset.of({"a": "a"}), lambda text: text, judge)
    (result,) = report.results
    assert result.judge_cost_usd == pytest.approx(300e-6)
    assert result.usage == TokenUsage()
    assert result.session[PromptExecuted].all() == ()


def test_a_tool_that_is_called_last_or_that_the_application_records_is_there_once(weather: ModelServer) -> None:
    client = record_openai(make_client(weather, "chat", is_async=False))

    def last(question: str) -> None:
        client.chat.completions.create(**request_of("chat", [{"role": "user", "content": question}]))

    def recorded(question: str) -> None:
        last(question)
        current_trial().session.record(ToolInvoked("weather", {"city": "Oslo"}, "snow", True))

    (tool,) = session_of(last)[ToolInvoked].all()
    assert (tool.name, tool.result, tool.success) == ("weather", None, None)
    (tool,) = session_of(recorded)[ToolInvoked].all()
    assert (tool.name, tool.result, tool.success) == ("weather", "snow", True)
    client.close()


@task(isolate=True)
def in_child(url: str) -> str:
    client = record_openai(openai.OpenAI(base_url=url, api_key="test"))
    return str(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}]).model)


@pytest.mark.long  # A child process that imports an SDK.
def test_calls_of_an_isolated_task_are_recorded() -> None:
    with ModelServer() as server:
        report = evaluate_sync(Dataset.of({f"{server.base_url}/v1": "m"}), in_child, lambda output: Score(1.0))
    (result,) = report.results
    assert [call.usage for call in result.session[PromptExecuted].all()] == [TokenUsage(1, 1)]


def test_a_call_that_a_trace_has_too_is_recorded_once(weather: ModelServer) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    provider, processor = TracerProvider(), TrialSpanProcessor()
    provider.add_span_processor(processor)  # type: ignore[arg-type]  # it has the methods
    tracer = provider.get_tracer("application")
    client = record_openai(make_client(weather, "chat", is_async=False))

    def traced(asked: list[Any], texts: list[str]) -> Any:
        with tracer.start_as_current_span("chat") as span:
            answer = client.chat.completions.create(**request_of("chat", asked))
            span.set_attributes(
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.request.model": "another-name",
                    "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": answer.usage.completion_tokens,
                    "gen_ai.input.messages": json.dumps(
                        [{"role": "user", "parts": [{"type": "text", "content": text}]} for text in texts]
                    ),
                }
            )
        return answer

    def application(question: str) -> str:
        asked: list[Any] = [{"role": "user", "content": question}]
        answer = traced(asked, [question])
        with tracer.start_as_current_span("execute_tool weather") as span:
            span.set_attributes({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather"})
        traced(with_result("chat", asked, answer), [question])
        with tracer.start_as_current_span("chat") as span:  # A call of another client, which only the trace has.
            span.set_attributes({"gen_ai.operation.name": "chat", "gen_ai.usage.output_tokens": 77})
        return "done"

    suite = EvalSuite("s", Dataset.of({"Weather?": ""}), application, lambda output: Score(1.0), traces=processor)
    (result,) = suite.run_sync(store="memory:").results
    counts = [call.usage.output_tokens for call in result.session[PromptExecuted].all() if call.usage]
    assert counts == [20, 10, 77]
    assert [tool.name for tool in result.session[ToolInvoked].all()] == ["weather"]
    assert [message.role for message in result.session.trajectory.messages].count("user") == 1
    client.close()


def test_an_answer_that_cannot_be_read_reaches_the_application_and_is_recorded_without_tokens() -> None:
    body = gzip.compress(b'{"id": "x", "object": "chat.completion", "model": "my-model", "choices": []}')

    class Odd(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            for name, value in (("content-type", "application/json"), ("content-encoding", "gzip")):
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with record_openai(openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k")) as client:

            def application(question: str) -> int:
                return len(client.chat.completions.create(model="my-model", messages=[]).choices)

            response, session = asyncio.run(TaskLoop(task=application).execute("x"))
        server.shutdown()
        thread.join()
    assert response.output == 0
    assert [call.usage for call in session[PromptExecuted].all()] == [None]


def test_something_that_is_not_a_client_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a client of the package openai"):
        record_openai(ChatMessage("user", "x"))
    with pytest.raises(ConfigurationError, match="needs a client of the package anthropic"):
        record_anthropic(openai.OpenAI(api_key="k"))
