"""The faults of the fake provider of batches, as the official SDKs see them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from fairtrial.integrations.model_server import (
    BatchFault,
    BatchOptions,
    ConnectionReset,
    Fault,
    FaultRule,
    HalfSent,
    Hang,
    MalformedJson,
    RateLimited,
    ReplyLost,
    ServerConfig,
    ServerFailed,
    spawn_model_server,
)
from fairtrial.integrations.model_server.batches import LINE_FAULTS
from tests.integrations.model_server.batch_clients import (
    CHAT,
    SECONDS,
    Provider,
    anthropic_requests,
    create_openai,
    ids_of,
    openai_lines,
    rows_of,
    upload,
)


@pytest.fixture
def provider() -> Iterator[Callable[..., Provider]]:
    with ExitStack() as stack:
        yield lambda *replies, **options: Provider(stack, *replies, **options)


def at_line_2(kind: Any) -> tuple[BatchFault, ...]:
    return (BatchFault(kind, lines=(2,)),)


# --- Lines: what the output file, the error file and Anthropic's results have, and who is billed.

NOT_EXECUTED = {"rate_limited", "server_failed", "invalid", "expired"}
OF_OPENAI = {
    "rate_limited": (["r1", "r3"], ["r2"]),
    "server_failed": (["r1", "r3"], ["r2"]),
    "invalid": (["r1", "r3"], ["r2"]),
    "expired": (["r1", "r3"], ["r2"]),
    "missing": (["r1", "r3"], []),
    "duplicate": (["r1", "r2", "r2", "r3"], []),
    "unknown": (["r1", "r2", "nobody-sent-this", "r3"], []),
}


@pytest.mark.parametrize("kind", OF_OPENAI)
def test_a_fault_of_a_line_of_openai(provider: Callable[..., Provider], kind: str) -> None:
    fake = provider(faults=at_line_2(kind))
    batch_id = create_openai(fake.openai)
    fake.end()
    batch, output, errors = fake.openai_results(batch_id)
    assert (ids_of(output), ids_of(errors)) == OF_OPENAI[kind]
    assert fake.billed() == (["r1", "r3"] if kind in NOT_EXECUTED else ["r1", "r2", "r3"])
    assert batch.status == ("expired" if kind == "expired" else "completed")
    if kind == "expired":
        (row,) = rows_of(errors)
        assert (row["response"], row["error"]["code"]) == (None, "batch_expired")
    elif kind in NOT_EXECUTED:
        (row,) = rows_of(errors)
        assert row["response"]["status_code"] == {"rate_limited": 429, "server_failed": 500, "invalid": 400}[kind]


OF_ANTHROPIC = {
    "rate_limited": ("rate_limit_error", ["r1", "r2", "r3"]),
    "server_failed": ("api_error", ["r1", "r2", "r3"]),
    "invalid": ("invalid_request_error", ["r1", "r2", "r3"]),
    "expired": ("expired", ["r1", "r2", "r3"]),
    "missing": ("", ["r1", "r3"]),
    "duplicate": ("succeeded", ["r1", "r2", "r2", "r3"]),
    "unknown": ("succeeded", ["r1", "r2", "nobody-sent-this", "r3"]),
}


@pytest.mark.parametrize("kind", OF_ANTHROPIC)
def test_a_fault_of_a_line_of_anthropic(provider: Callable[..., Provider], kind: str) -> None:
    fake = provider(faults=at_line_2(kind))
    batch_id = fake.create_anthropic()
    fake.end()
    result, ids = OF_ANTHROPIC[kind]
    rows = fake.anthropic_results(batch_id)
    assert [row.custom_id for row in rows] == ids
    found = {row.result.error.error.type if row.result.type == "errored" else row.result.type for row in rows}
    assert found == {"succeeded", result or "succeeded"}
    assert fake.billed() == (["r1", "r3"] if kind in NOT_EXECUTED else ["r1", "r2", "r3"])
    counts = fake.anthropic.messages.batches.retrieve(batch_id).request_counts
    assert counts.expired == (kind == "expired")
    assert counts.errored == (kind in NOT_EXECUTED - {"expired"})
    assert counts.succeeded + counts.errored + counts.expired == 3


def test_a_malformed_line_ends_in_the_middle(provider: Callable[..., Provider]) -> None:
    fake = provider(faults=at_line_2("malformed"))
    batch_id, message_id = create_openai(fake.openai), fake.create_anthropic()
    fake.end()
    first, second, third = fake.openai_results(batch_id)[1].splitlines()
    assert [json.loads(one)["custom_id"] for one in (first, third)] == ["r1", "r3"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(second)
    with pytest.raises(json.JSONDecodeError):
        fake.anthropic_results(message_id)
    assert fake.billed() == ["r1", "r2", "r3"] * 2


def test_the_tests_of_this_file_know_every_fault_of_lines() -> None:
    assert OF_OPENAI.keys() | {"malformed"} == OF_ANTHROPIC.keys() | {"malformed"} == LINE_FAULTS


def test_a_share_of_the_lines_fails_and_the_seed_says_which(provider: Callable[..., Provider]) -> None:
    failed = []
    for _ in range(2):
        fake = provider(faults=(BatchFault("expired", 0.3),))
        batch_id = create_openai(fake.openai, 200)
        fake.end()
        failed.append(ids_of(fake.openai_results(batch_id)[2]))
    assert 30 < len(failed[0]) < 90
    assert failed[0] == failed[1]


# --- Whole batches


def test_only_the_batches_that_a_fault_names_have_it(provider: Callable[..., Provider]) -> None:
    fake = provider(faults=(BatchFault("failed", batches=(2,), code="invalid_request", message="No such model"),))
    ids = [create_openai(fake.openai) for _ in range(3)]
    fake.end()
    batches = [fake.openai.batches.retrieve(one) for one in ids]
    assert [batch.status for batch in batches] == ["completed", "failed", "completed"]
    errors = batches[1].errors
    assert errors is not None
    assert [(one.code, one.message) for one in errors.data or ()] == [("invalid_request", "No such model")]
    assert len(fake.billed()) == 6


def test_a_batch_can_end_without_files(provider: Callable[..., Provider]) -> None:
    fake = provider(faults=(BatchFault("no_files"), BatchFault("expired")))
    batch_id, message_id = create_openai(fake.openai), fake.create_anthropic()
    fake.end()
    batch = fake.openai.batches.retrieve(batch_id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("expired", None, None)
    messages = fake.anthropic.messages.batches.retrieve(message_id)
    assert (messages.processing_status, messages.results_url) == ("ended", None)


def test_files_of_results_can_be_gone(provider: Callable[..., Provider]) -> None:
    fake = provider(faults=(BatchFault("gone"),))
    batch_id, message_id = create_openai(fake.openai), fake.create_anthropic()
    fake.end()
    with pytest.raises(openai.NotFoundError):
        fake.openai_results(batch_id)
    with pytest.raises(anthropic.NotFoundError):
        fake.anthropic_results(message_id)


def test_results_can_be_in_another_order(provider: Callable[..., Provider]) -> None:
    fake = provider(faults=(BatchFault("reordered"),))
    batch_id, message_id = create_openai(fake.openai, 20), fake.create_anthropic(20)
    fake.end()
    ids = [f"r{number}" for number in range(1, 21)]
    for found in (
        ids_of(fake.openai_results(batch_id)[1]),
        [row.custom_id for row in fake.anthropic_results(message_id)],
    ):
        assert sorted(found) == sorted(ids)
        assert found != ids


def test_counts_can_stay_0(provider: Callable[..., Provider]) -> None:
    fake = provider(faults=(BatchFault("counts_hidden"),))
    batch_id, message_id = create_openai(fake.openai), fake.create_anthropic()
    fake.end()
    batch, output, _ = fake.openai_results(batch_id)
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.total, batch.request_counts.completed) == ("completed", 0, 0)
    assert len(rows_of(output)) == 3
    assert fake.anthropic.messages.batches.retrieve(message_id).request_counts.succeeded == 0


def test_a_batch_that_never_ends_can_be_cancelled(provider: Callable[..., Provider]) -> None:
    fake = provider(faults=(BatchFault("never_ends"),))
    batch_id, message_id = create_openai(fake.openai), fake.create_anthropic()
    fake.server.advance(100 * SECONDS)
    assert fake.openai.batches.retrieve(batch_id).status == "in_progress"
    assert fake.anthropic.messages.batches.cancel(message_id).processing_status == "canceling"
    fake.openai.batches.cancel(batch_id)
    fake.end()
    assert fake.openai.batches.retrieve(batch_id).status == "cancelled"
    assert fake.anthropic.messages.batches.retrieve(message_id).processing_status == "ended"


def test_a_cancelled_batch_has_the_results_of_what_was_executed(provider: Callable[..., Provider]) -> None:
    fake = provider()
    batch_id, message_id = create_openai(fake.openai, 4), fake.create_anthropic(4)
    fake.server.advance(SECONDS / 2)
    assert fake.openai.batches.cancel(batch_id).status == "cancelling"
    assert fake.openai.batches.cancel(batch_id).status == "cancelling"
    fake.anthropic.messages.batches.cancel(message_id)
    fake.end()
    batch, output, errors = fake.openai_results(batch_id)
    assert (batch.status, ids_of(output), ids_of(errors)) == ("cancelled", ["r1", "r2"], ["r3", "r4"])
    assert {row["error"]["code"] for row in rows_of(errors)} == {"batch_cancelled"}
    types = [row.result.type for row in fake.anthropic_results(message_id)]
    assert types == ["succeeded", "succeeded", "canceled", "canceled"]
    assert sorted(fake.billed()) == ["r1", "r1", "r2", "r2"]
    assert fake.openai.batches.cancel(batch_id).status == "cancelled"
    with pytest.raises(anthropic.BadRequestError, match="already ended"):
        fake.anthropic.messages.batches.cancel(message_id)


def test_a_completed_batch_cannot_be_cancelled(provider: Callable[..., Provider]) -> None:
    fake = provider()
    batch_id, message_id = create_openai(fake.openai), fake.create_anthropic()
    with pytest.raises(anthropic.BadRequestError, match="cannot be deleted"):
        fake.anthropic.messages.batches.delete(message_id)
    fake.end()
    with pytest.raises(openai.ConflictError, match="'completed'"):
        fake.openai.batches.cancel(batch_id)


def test_what_is_not_executed_within_24_hours_expires(provider: Callable[..., Provider]) -> None:
    fake = provider(seconds=2 * 86_400.0)
    batch_id, message_id = create_openai(fake.openai, 4), fake.create_anthropic(4)
    fake.server.advance(86_399)
    assert fake.openai.batches.retrieve(batch_id).status == "in_progress"
    fake.server.advance(1)
    batch, output, errors = fake.openai_results(batch_id)
    assert (batch.status, batch.expired_at) == ("expired", batch.expires_at)
    assert (ids_of(output), ids_of(errors)) == (["r1", "r2"], ["r3", "r4"])
    assert [row.result.type for row in fake.anthropic_results(message_id)] == ["succeeded"] * 2 + ["expired"] * 2
    assert sorted(fake.billed()) == ["r1", "r1", "r2", "r2"]


# --- Requests to the API


def at(route: str, fault: Fault) -> FaultRule:
    return FaultRule(fault, when=f"^{route}$", attempts=(1,))


def test_a_lost_reply_to_upload_leaves_a_file(provider: Callable[..., Provider]) -> None:
    fake = provider(server_faults=at("POST /v1/files", ReplyLost()))
    with pytest.raises(openai.APIConnectionError):
        upload(fake.openai, openai_lines(1))
    assert len(fake.server.batches().files) == 1
    upload(fake.openai, openai_lines(1))
    assert len(fake.server.batches().files) == 2


@pytest.mark.parametrize("fault", [ReplyLost(), ReplyLost(504)])
def test_a_lost_reply_to_create_leaves_a_batch_that_is_paid_for(
    provider: Callable[..., Provider], fault: ReplyLost
) -> None:
    faults = [at("POST /v1/batches", fault), at("POST /v1/messages/batches", fault)]
    fake = provider(server_faults=faults)
    with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
        create_openai(fake.openai, metadata={"fairtrial": "x"})
    with pytest.raises((anthropic.APIConnectionError, anthropic.InternalServerError)):
        fake.create_anthropic()
    assert [one.metadata for one in fake.openai.batches.list()] == [{"fairtrial": "x"}]
    assert len(list(fake.anthropic.messages.batches.list())) == 1
    fake.end()
    fake.openai.batches.list()
    assert fake.billed() == ["r1", "r2", "r3"] * 2
    assert fake.server.stats().by_fault == {"reply_lost": 2}


@pytest.mark.parametrize("fault", [ConnectionReset(), RateLimited(), ServerFailed(500), ServerFailed(529)], ids=repr)
def test_a_refused_create_leaves_nothing(provider: Callable[..., Provider], fault: Fault) -> None:
    fake = provider(server_faults=[at("POST /v1/batches", fault), at("POST /v1/messages/batches", fault)])
    with pytest.raises(openai.APIError):
        create_openai(fake.openai)
    with pytest.raises(anthropic.APIError):
        fake.create_anthropic()
    assert fake.server.batches().created == ()
    create_openai(fake.openai)
    fake.create_anthropic()
    assert len(fake.server.batches().created) == 2


@pytest.mark.parametrize("status", [429, 500])
def test_every_route_can_fail_once(provider: Callable[..., Provider], status: int) -> None:
    fault = RateLimited() if status == 429 else ServerFailed(status)
    fake = provider(seconds=0.0, server_faults=FaultRule(fault, attempts=(1,)))
    refused = 0

    def twice[T](call: Callable[[], T]) -> T:
        nonlocal refused
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as failed:
            call()
        assert getattr(failed.value, "status_code", None) == status
        refused += 1
        return call()

    ours, files, theirs = fake.openai.batches, fake.openai.files, fake.anthropic.messages.batches
    file_id = twice(lambda: upload(fake.openai, openai_lines(1)))
    twice(lambda: files.retrieve(file_id))
    twice(lambda: files.content(file_id))
    batch = twice(lambda: ours.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h"))
    twice(lambda: ours.retrieve(batch.id))
    twice(ours.list)
    with pytest.raises(openai.ConflictError):
        twice(lambda: ours.cancel(batch.id))
    twice(lambda: files.delete(file_id))
    message = twice(lambda: theirs.create(requests=anthropic_requests(1)))
    twice(lambda: theirs.retrieve(message.id))
    twice(theirs.list)
    twice(lambda: list(theirs.results(message.id)))
    with pytest.raises(anthropic.BadRequestError):
        twice(lambda: theirs.cancel(message.id))
    twice(lambda: theirs.delete(message.id))
    assert refused == 14
    assert len(fake.server.batches().created) == 2


def test_results_can_be_cut_off_by_the_connection(provider: Callable[..., Provider]) -> None:
    fake = provider(server_faults=FaultRule(HalfSent(0.5), when=r"/(content|results)$", attempts=(1,)))
    batch_id, message_id = create_openai(fake.openai), fake.create_anthropic()
    fake.end()
    for read in (lambda: fake.openai_results(batch_id), lambda: fake.anthropic_results(message_id)):
        with pytest.raises((openai.APIConnectionError, httpx2.RemoteProtocolError)):
            read()
    assert len(rows_of(fake.openai_results(batch_id)[1])) == 3
    assert len(fake.anthropic_results(message_id)) == 3


def test_results_can_end_in_the_middle_of_a_line_without_a_sign_of_it(provider: Callable[..., Provider]) -> None:
    fake = provider(server_faults=FaultRule(MalformedJson(), when=r"/(content|results)$", attempts=(1,)))
    batch_id, message_id = create_openai(fake.openai), fake.create_anthropic()
    fake.end()
    text = fake.openai_results(batch_id)[1]
    assert ids_of(text.splitlines()[0]) == ["r1"]
    for read in (lambda: rows_of(text), lambda: fake.anthropic_results(message_id)):
        with pytest.raises(json.JSONDecodeError):
            read()
    assert len(rows_of(fake.openai_results(batch_id)[1])) == 3
    assert len(fake.anthropic_results(message_id)) == 3


CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="test", max_retries=0, timeout=60)
client.batches.create(input_file_id=sys.argv[2], endpoint="/v1/chat/completions", completion_window="24h")
print("created", flush=True)
"""


@pytest.mark.parametrize(("fault", "created"), [(Hang(), 0), (ReplyLost(seconds=600), 1)], ids=["before", "after"])
def test_a_client_can_be_killed_before_or_after_a_request_is_executed(fault: Fault, created: int) -> None:
    rule = FaultRule(fault, when="^POST /v1/batches$", attempts=(1,))
    with spawn_model_server(faults=rule, batches=BatchOptions(SECONDS, rate=0)) as server:
        with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="test", max_retries=0) as client:
            file_id = upload(client, openai_lines(2))
            command = [sys.executable, "-c", CLIENT, server.base_url, file_id]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                while not server.stats().by_fault:
                    assert process.poll() is None
                os.kill(process.pid, signal.SIGKILL)
                assert process.communicate()[0] == b""
            assert len(server.batches().created) == created
            assert len(client.batches.list().data) == created
        server.advance(SECONDS)
        assert [one.text for one in server.batches().executed] == ["question 1", "question 2"][: 2 * created]


# --- Settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BatchFault("expired", 1.5), "probability"),
        (lambda: BatchFault("failed", lines=(1,)), "whole batches"),
        (lambda: BatchOptions(-1.0), "at least 0"),
        (lambda: BatchOptions(1.0, rate=-1.0), "at least 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_script_file_sets_batches_and_their_faults() -> None:
    text = '{"batches": {"seconds": 2, "foreign": 1, "faults": [{"kind": "missing", "lines": [2]}]}}'
    config = ServerConfig.from_json(text)
    assert config.batches == BatchOptions(2, foreign=1, faults=at_line_2("missing"))
    assert ServerConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="kind"):
        ServerConfig.from_json(text.replace("missing", "mising"))


def test_the_clock_is_not_turned_back(provider: Callable[..., Provider]) -> None:
    with pytest.raises(ValueError, match="can only be advanced"):
        provider().server.advance(-1.0)
