"""The fake provider of batches, driven by the official SDKs of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types.messages import DeletedMessageBatch, MessageBatch, MessageBatchIndividualResponse
from openai.types import Batch, FileDeleted, FileObject
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel, ValidationError

from fairtrial.integrations.model_server import (
    BatchFault,
    BatchOptions,
    ModelServer,
    ParsedRequest,
    Reply,
    Script,
    ToolCallReply,
    Usage,
)
from tests.integrations.model_server.batch_clients import (
    CHAT,
    RESPONSES,
    SECONDS,
    Provider,
    anthropic_requests,
    check_reply,
    check_request,
    create_openai,
    ids_of,
    openai_client,
    openai_lines,
    rows_of,
    unknown_fields,
    upload,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def provider() -> Iterator[Callable[..., Provider]]:
    with ExitStack() as stack:
        yield lambda *replies, **options: Provider(stack, *replies, **options)


# --- What works


def test_a_batch_of_openai_goes_through_its_states_by_the_clock(provider: Callable[..., Provider]) -> None:
    fake = provider()
    batch_id = create_openai(fake.openai, 4, metadata={"fairtrial": "intent-1"})
    seen = []
    for _ in range(10):
        batch = fake.openai.batches.retrieve(batch_id)
        assert batch.request_counts is not None
        seen.append((batch.status, batch.request_counts.completed))
        fake.server.advance(SECONDS / 10)
    assert [state for state, _ in seen] == ["validating", *["in_progress"] * 8, "finalizing"]
    assert [done for _, done in seen] == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]
    batch, output, errors = fake.openai_results(batch_id)
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"fairtrial": "intent-1"}, "small")
    assert batch.completed_at == batch.created_at + SECONDS
    assert (batch.error_file_id, errors) == (None, "")
    assert {
        row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows_of(output)
    } == {f"r{number}": f"question {number}" for number in (1, 2, 3, 4)}
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(one.input_tokens for one in fake.server.batches().executed)


def test_a_batch_of_responses_is_answered_as_live_requests_are(provider: Callable[..., Provider]) -> None:
    fake = provider("Paris")
    file_id = upload(fake.openai, openai_lines(1, RESPONSES))
    batch = fake.openai.batches.create(input_file_id=file_id, endpoint=RESPONSES, completion_window="24h")
    fake.end()
    (row,) = rows_of(fake.openai_results(batch.id)[1])
    assert Response.model_validate(row["response"]["body"]).output_text == "Paris"


def test_the_counts_of_anthropic_stay_0_until_the_batch_has_ended(provider: Callable[..., Provider]) -> None:
    fake = provider()
    batch_id = fake.create_anthropic(4)
    fake.server.advance(SECONDS * 0.95)
    early = fake.anthropic.messages.batches.retrieve(batch_id)
    assert (early.processing_status, early.results_url) == ("in_progress", None)
    assert (early.request_counts.processing, early.request_counts.succeeded) == (4, 0)
    with pytest.raises(anthropic.AnthropicError, match="No `results_url`"):
        fake.anthropic_results(batch_id)
    fake.end()
    batch = fake.anthropic.messages.batches.retrieve(batch_id)
    assert (batch.processing_status, batch.request_counts.succeeded) == ("ended", 4)
    for number, row in enumerate(fake.anthropic_results(batch_id), 1):
        assert row.custom_id == f"r{number}"
        assert row.result.type == "succeeded"
        (block,) = row.result.message.content
        assert block.type == "text"
        assert block.text == f"question {number}"
        assert row.result.message.usage.service_tier == "batch"


@pytest.mark.anyio
async def test_the_async_clients_use_every_route() -> None:
    async with (
        ModelServer(batches=BatchOptions(SECONDS, rate=0)) as server,
        openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="test", max_retries=0) as ours,
        anthropic.AsyncAnthropic(base_url=server.base_url, api_key="test", max_retries=0) as theirs,
    ):
        content = "\n".join(map(json.dumps, openai_lines(2))).encode()
        file = await ours.files.create(file=("in.jsonl", content), purpose="batch")
        assert (await ours.files.retrieve(file.id)).bytes == len(content)
        assert (await ours.files.content(file.id)).content == content
        batch = await ours.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert [one.id async for one in ours.batches.list()] == [batch.id]
        assert (await ours.batches.cancel(batch.id)).status == "cancelling"
        assert (await ours.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await ours.files.content(file.id)
        messages = theirs.messages.batches
        first = await messages.create(requests=anthropic_requests(1))
        second = await messages.create(requests=anthropic_requests(1))
        assert (await messages.cancel(second.id)).processing_status == "canceling"
        server.advance(SECONDS)
        assert [row.custom_id async for row in await messages.results(first.id)] == ["r1"]
        assert [one.id async for one in messages.list()] == [second.id, first.id]
        await messages.delete(first.id)
        with pytest.raises(anthropic.NotFoundError):
            await messages.retrieve(first.id)
        assert [one.id async for one in messages.list()] == [second.id]
        assert len(server.batches().created) == 3  # The ledger forgets nothing.


def test_all_replies_have_exactly_the_fields_and_types_of_the_sdks(provider: Callable[..., Provider]) -> None:
    fake = provider(faults=(BatchFault("rate_limited", lines=(2,)),))
    raw, files = fake.openai.batches.with_raw_response, fake.openai.files.with_raw_response
    content = "\n".join(map(json.dumps, openai_lines(3))).encode()
    file = files.create(file=("in.jsonl", content), purpose="batch")
    check_reply(FileObject, file.content)
    file_id = file.parse().id
    created = raw.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})
    batch_id = created.parse().id
    checks: list[tuple[type[BaseModel], bytes]] = [(Batch, created.content)]
    messages = fake.anthropic.messages.batches.with_raw_response
    made = messages.create(requests=anthropic_requests(3))
    message_id = made.parse().id
    cancelled = create_openai(fake.openai)
    checks += [(MessageBatch, made.http_response.content), (Batch, raw.cancel(cancelled).content)]
    for _ in range(11):
        checks += [(Batch, raw.retrieve(batch_id).content), (Batch, raw.retrieve(cancelled).content)]
        checks.append((MessageBatch, messages.retrieve(message_id).http_response.content))
        fake.server.advance(SECONDS / 10)
    listed = json.loads(raw.list().content)
    assert listed.keys() == {"object", "data", "has_more", "first_id", "last_id"}
    checks += [(Batch, json.dumps(one).encode()) for one in listed["data"]]
    assert json.loads(messages.list().http_response.content).keys() == {"data", "has_more", "first_id", "last_id"}
    _, output, errors = fake.openai_results(batch_id)
    for row in rows_of(output):
        assert row.keys() == {"id", "custom_id", "response", "error"}
        checks.append((ChatCompletion, json.dumps(row["response"]["body"]).encode()))
    (failed,) = rows_of(errors)
    assert (failed["response"]["status_code"], failed["error"]) == (429, None)
    assert failed["response"]["body"]["error"]["code"] == "rate_limit_exceeded"
    url = messages.retrieve(message_id).parse().results_url
    assert url is not None
    lines = fake.anthropic.get(url, cast_to=str).splitlines()
    checks += [(MessageBatchIndividualResponse, line.encode()) for line in lines]
    checks.append((FileDeleted, files.delete(file_id).content))
    checks.append((DeletedMessageBatch, messages.delete(message_id).http_response.content))
    assert len(checks) > 40
    for kind, text in checks:
        check_reply(kind, text)


def test_the_strict_check_reports_an_unknown_field_and_a_wrong_type(provider: Callable[..., Provider]) -> None:
    text = '{"id": "b", "deleted": true, "object": "file", "more": 1}'
    assert list(unknown_fields(FileDeleted.model_validate_json(text))) == [".more"]
    with pytest.raises(AssertionError):
        check_reply(FileDeleted, text)
    with pytest.raises(ValidationError):
        check_reply(FileDeleted, '{"id": "b", "deleted": "yes", "object": "file"}')


def test_the_requests_of_the_tests_are_what_the_sdks_types_say() -> None:
    for row in (*openai_lines(2), *openai_lines(2, RESPONSES)):
        check_request("openai", row)
    for request in anthropic_requests(2):
        check_request("anthropic", dict(request))
    with pytest.raises(ValidationError):
        check_request("openai", {**openai_lines(1)[0], "body": {"model": "small"}})
    with pytest.raises(ValidationError):
        check_request("anthropic", {"custom_id": "r1", "params": {"model": "small", "messages": []}})


def test_the_log_has_every_request_to_the_provider(provider: Callable[..., Provider]) -> None:
    fake = provider()
    create_openai(fake.openai)
    fake.create_anthropic()
    fake.openai.batches.list(limit=5)
    assert [(one.number, one.protocol, one.last_user) for one in fake.server.requests()] == [
        (1, "openai", "POST /v1/files"),
        (2, "openai", "POST /v1/batches"),
        (3, "anthropic", "POST /v1/messages/batches"),
        (4, "openai", "GET /v1/batches?limit=5"),
    ]


def test_the_ledger_has_every_request_that_was_paid_for_with_its_tokens(provider: Callable[..., Provider]) -> None:
    usage = [Usage(1000, 20, cached_tokens=900), Usage(7, 3), Usage(500, 1, cache_write_tokens=400)]
    fake = provider(Script(tuple(Reply("x", usage=one) for one in usage), per="server"))
    batch_id = create_openai(fake.openai, 3)
    fake.server.advance(SECONDS / 2)
    fake.openai.batches.retrieve(batch_id)
    assert fake.billed() == ["r1"]
    fake.end()
    fake.openai.batches.retrieve(batch_id)
    ledger = fake.server.batches()
    assert [
        (one.input_tokens, one.cached_tokens, one.cache_write_tokens, one.output_tokens) for one in ledger.executed
    ] == [(1000, 900, 0, 20), (7, 0, 0, 3), (500, 0, 400, 1)]
    assert {one.batch for one in ledger.executed} == {batch_id}
    assert [one.text for one in ledger.executed] == ["question 1", "question 2", "question 3"]
    assert ledger.paid_twice() == {}
    create_openai(fake.openai, 2)
    fake.end()
    fake.openai.batches.list()
    assert sorted(fake.server.batches().paid_twice().values()) == [2, 2]


@pytest.mark.parametrize("is_async", [False, True])
def test_replies_come_from_the_function_that_answers_live_requests(
    provider: Callable[..., Provider], is_async: bool
) -> None:
    def answer(request: ParsedRequest) -> Reply:
        if request.last_user == "question 2":
            raise RuntimeError("the function of the test failed")
        return Reply(tool_calls=(ToolCallReply("look_up", {"text": request.last_user}),))

    async def answer_later(request: ParsedRequest) -> Reply:
        return answer(request)

    fake = provider(answer_later if is_async else answer)
    batch_id = create_openai(fake.openai)
    fake.end()
    batch, output, errors = fake.openai_results(batch_id)
    calls = [row["response"]["body"]["choices"][0]["message"]["tool_calls"][0] for row in rows_of(output)]
    assert [json.loads(call["function"]["arguments"])["text"] for call in calls] == ["question 1", "question 3"]
    assert len({call["id"] for call in calls}) == 2
    assert "RuntimeError: the function of the test failed" in errors
    assert batch.request_counts is not None
    assert batch.request_counts.failed == 1


@pytest.mark.anyio
async def test_requests_at_the_same_time_execute_each_line_once() -> None:
    async def answer(request: ParsedRequest) -> str:
        await asyncio.sleep(0.001)
        return request.last_user

    async with (
        ModelServer(answer, batches=BatchOptions(SECONDS, rate=0)) as server,
        openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="test", max_retries=0) as client,
    ):
        content = "\n".join(map(json.dumps, openai_lines(5))).encode()
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        server.advance(SECONDS)
        found = await asyncio.gather(*(client.batches.retrieve(batch.id) for _ in range(10)))
        assert {one.status for one in found} == {"completed"}
        assert [one.custom_id for one in server.batches().executed] == [f"r{number}" for number in range(1, 6)]


@pytest.mark.anyio
async def test_a_client_that_gives_up_leaves_no_line_half_executed() -> None:
    waiting, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: ParsedRequest) -> str:
        waiting.set()
        await go_on.wait()
        return request.last_user

    async with (
        ModelServer(answer, batches=BatchOptions(SECONDS, rate=0)) as server,
        anthropic.AsyncAnthropic(base_url=server.base_url, api_key="test", max_retries=0) as client,
    ):
        batch = await client.messages.batches.create(requests=anthropic_requests(2))
        server.advance(SECONDS)
        abandoned = asyncio.create_task(client.messages.batches.retrieve(batch.id))
        await waiting.wait()
        abandoned.cancel()
        await asyncio.gather(abandoned, return_exceptions=True)
        async with asyncio.timeout(30):
            while server.stats().abandoned == 0:  # noqa: ASYNC110 - the server has counters to read, not events
                await asyncio.sleep(0.001)
        go_on.set()
        results = await client.messages.batches.results(batch.id)
        assert [row.result.type async for row in results] == ["succeeded", "succeeded"]
        assert [one.custom_id for one in server.batches().executed] == ["r1", "r2"]


def test_the_clock_can_follow_real_time() -> None:
    with ModelServer(batches=BatchOptions(60.0, rate=1e7)) as server, openai_client(server) as client:
        batch_id = create_openai(client)
        while (batch := client.batches.retrieve(batch_id)).status != "completed":
            assert batch.status != "failed"
        assert batch.output_file_id is not None


def test_a_batch_that_takes_no_time_has_ended_when_it_is_looked_at(provider: Callable[..., Provider]) -> None:
    fake = provider(seconds=0.0)
    batch_id = create_openai(fake.openai)
    assert fake.billed() == ["r1", "r2", "r3"]
    assert fake.openai.batches.retrieve(batch_id).status == "completed"
    message_id = fake.create_anthropic()
    assert len(fake.anthropic_results(message_id)) == 3


def test_without_the_option_there_are_no_batches() -> None:
    with ModelServer() as server, openai_client(server) as client:
        with pytest.raises(openai.NotFoundError):
            client.batches.list()
        with pytest.raises(RuntimeError, match=r"pass batches=BatchOptions\(\)"):
            server.batches()


# --- Lists


def test_lists_are_paged_newest_first(provider: Callable[..., Provider]) -> None:
    fake = provider()
    ours = [create_openai(fake.openai, 1) for _ in range(5)][::-1]
    page = fake.openai.batches.list(limit=2)
    assert ([one.id for one in page.data], page.has_more) == (ours[:2], True)
    assert [one.id for one in fake.openai.batches.list(limit=2)] == ours
    last = fake.openai.batches.list(limit=2, after=ours[3])
    assert ([one.id for one in last.data], last.has_more) == (ours[4:], False)
    theirs = [fake.create_anthropic(1) for _ in range(5)][::-1]
    messages = fake.anthropic.messages.batches
    assert [one.id for one in messages.list(limit=2)] == theirs
    before = messages.list(limit=2, before_id=theirs[3])
    assert ([one.id for one in before.data], before.has_more) == (theirs[1:3], True)
    assert [one.id for one in messages.list(limit=1000, after_id=theirs[0]).data] == theirs[1:]
    for limit in (0, 101):
        with pytest.raises(openai.BadRequestError, match="limit"):
            fake.openai.batches.list(limit=limit)
    with pytest.raises(openai.BadRequestError, match="there is no batch"):
        fake.openai.batches.list(after="batch_unknown")


def test_a_new_batch_is_not_listed_for_some_lists(provider: Callable[..., Provider]) -> None:
    fake = provider(list_lag_polls=2)
    batch_id, message_id = create_openai(fake.openai), fake.create_anthropic()
    assert [[one.id for one in fake.openai.batches.list()] for _ in range(3)] == [[], [], [batch_id]]
    assert [[one.id for one in fake.anthropic.messages.batches.list()] for _ in range(3)] == [[], [], [message_id]]
    assert fake.openai.batches.retrieve(batch_id).id == batch_id


def test_a_new_batch_is_not_listed_for_some_time(provider: Callable[..., Provider]) -> None:
    fake = provider(list_lag=30.0)
    batch_id = create_openai(fake.openai)
    fake.server.advance(29)
    assert list(fake.openai.batches.list()) == []
    fake.server.advance(1)
    assert [one.id for one in fake.openai.batches.list()] == [batch_id]


def test_batches_of_others_are_in_the_list_and_cost_nothing(provider: Callable[..., Provider]) -> None:
    fake = provider(foreign=2)
    batch_id, message_id = create_openai(fake.openai, metadata={"fairtrial": "x"}), fake.create_anthropic()
    listed = list(fake.openai.batches.list())
    assert [one.metadata for one in listed] == [{"fairtrial": "x"}, None, None]
    assert listed[0].id == batch_id
    messages = list(fake.anthropic.messages.batches.list())
    assert [one.request_counts.processing for one in messages] == [3, 3, 3]
    fake.end()
    foreign = next(one.id for one in fake.anthropic.messages.batches.list() if one.id != message_id)
    assert [row.custom_id for row in fake.anthropic_results(foreign)] == ["foreign-0", "foreign-1", "foreign-2"]
    assert fake.billed() == ["r1", "r2", "r3"] * 2
    assert Counter(one.foreign for one in fake.server.batches().created) == {True: 4, False: 2}


def test_a_provider_can_lose_metadata(provider: Callable[..., Provider]) -> None:
    fake = provider(metadata=False)
    batch_id = create_openai(fake.openai, metadata={"fairtrial": "x"})
    assert fake.openai.batches.retrieve(batch_id).metadata is None


# --- What is refused


@pytest.mark.parametrize(
    "metadata", [{f"k{number}": "v" for number in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}], ids=len
)
def test_metadata_beyond_the_limits_is_refused(provider: Callable[..., Provider], metadata: dict[str, str]) -> None:
    fake = provider()
    with pytest.raises(openai.BadRequestError, match="metadata"):
        create_openai(fake.openai, metadata=metadata)
    assert fake.server.batches().created == ()


def test_bad_requests_to_create_are_refused(provider: Callable[..., Provider]) -> None:
    fake = provider(max_requests=3)
    file_id = upload(fake.openai, openai_lines(1))
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        fake.openai.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="1h")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        fake.openai.batches.create(input_file_id=file_id, endpoint="/v1/videos", completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        fake.openai.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match=r"Must be \.jsonl"):
        fake.openai.files.create(file=("in.txt", b"{}"), purpose="batch")
    for custom_id in ("", "a b", "é", "x" * 65):
        with pytest.raises(anthropic.BadRequestError, match="custom_id"):
            fake.anthropic.messages.batches.create(requests=[{**anthropic_requests(1)[0], "custom_id": custom_id}])
    with pytest.raises(anthropic.BadRequestError, match="unique"):
        fake.anthropic.messages.batches.create(requests=anthropic_requests(1) * 2)
    with pytest.raises(anthropic.BadRequestError, match="at most 3"):
        fake.create_anthropic(4)
    with pytest.raises(anthropic.BadRequestError, match="at least one"):
        fake.create_anthropic(0)
    assert fake.server.batches().created == ()


def test_a_message_batch_that_is_too_large_is_refused(provider: Callable[..., Provider]) -> None:
    with pytest.raises(anthropic.APIStatusError) as refused:
        provider(max_bytes=100).create_anthropic(3)
    assert refused.value.status_code == 413


def changed(**fields: Any) -> bytes:
    good, bad = openai_lines(2)
    return "\n".join(json.dumps(row) for row in (good, {**bad, **fields})).encode()


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"\n", "empty_file", None),
        (json.dumps(openai_lines(1)[0]).encode() + b'\n{"custom_id": "r2"', "invalid_json_line", 2),
        (b'{"custom_id": "r1"}', "missing_required_parameter", 1),
        (changed(url=RESPONSES), "url_mismatch", 2),
        (changed(custom_id="r1"), "duplicate_custom_id", 2),
        (changed(body={"model": "large", "messages": []}), "model_mismatch", 2),
        ("\n".join(map(json.dumps, openai_lines(4))).encode(), "too_many_tasks", None),
        (b" " * 2001, "file_too_large", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_file_makes_a_batch_that_fails_after_its_creation(
    provider: Callable[..., Provider], content: bytes, code: str, line: int | None
) -> None:
    fake = provider(max_requests=3, max_bytes=2000)
    created = fake.openai.batches.create(
        input_file_id=upload(fake.openai, content), endpoint=CHAT, completion_window="24h"
    )
    assert created.status == "validating"
    fake.end()
    batch = fake.openai.batches.retrieve(created.id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(one.code, one.line) for one in batch.errors.data] == [(code, line)]
    check_reply(Batch, fake.openai.batches.with_raw_response.retrieve(created.id).content)
    assert fake.billed() == []


def test_a_batch_has_at_most_50_000_requests(provider: Callable[..., Provider]) -> None:
    fake = provider()
    line = json.dumps(openai_lines(1)[0])
    for count, status in ((50_000, "in_progress"), (50_001, "failed")):
        content = "\n".join(line.replace("r1", f"r{number}") for number in range(count)).encode()
        batch = fake.openai.batches.create(
            input_file_id=upload(fake.openai, content), endpoint=CHAT, completion_window="24h"
        )
        fake.server.advance(SECONDS / 10)
        assert fake.openai.batches.retrieve(batch.id).status == status


def test_too_many_enqueued_tokens_fail_a_batch_until_another_has_ended(provider: Callable[..., Provider]) -> None:
    fake = provider(enqueued_tokens=100)  # A batch of three requests has about 60.
    first, second = create_openai(fake.openai), create_openai(fake.openai)
    fake.server.advance(SECONDS / 5)
    refused = fake.openai.batches.retrieve(second)
    assert refused.status == "failed"
    assert refused.errors is not None
    assert refused.errors.data is not None
    assert refused.errors.data[0].code == "token_limit_exceeded"
    fake.end()
    assert fake.openai.batches.retrieve(first).status == "completed"
    third = create_openai(fake.openai)
    fake.end()
    assert fake.openai.batches.retrieve(third).status == "completed"


def test_a_request_that_the_provider_cannot_read_fails_alone(provider: Callable[..., Provider]) -> None:
    fake = provider()
    lines = openai_lines(2)
    lines[0]["body"]["messages"] = []
    batch = fake.openai.batches.create(input_file_id=upload(fake.openai, lines), endpoint=CHAT, completion_window="24h")
    requests: list[Any] = anthropic_requests(2)
    del requests[0]["params"]["max_tokens"]
    requests[1]["params"]["stream"] = True
    messages = fake.anthropic.messages.batches.create(requests=requests)
    fake.end()
    _, output, errors = fake.openai_results(batch.id)
    assert (ids_of(output), ids_of(errors)) == (["r2"], ["r1"])
    assert rows_of(errors)[0]["response"]["status_code"] == 400
    for row in fake.anthropic_results(messages.id):
        assert row.result.type == "errored"
        assert row.result.error.error.type == "invalid_request_error"
    assert fake.billed() == ["r2"]
