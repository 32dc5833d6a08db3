"""Token ids and log-probabilities of vLLM and SGLang: requested, checked, recorded and exported."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from fairtrial import ChatMessage, ConfigurationError, Dataset, EvalConfig, EvalReport, EvalSuite, Sample, TrialContext
from fairtrial.data.session.session import TokensSampled
from fairtrial.errors import InvalidCallError
from fairtrial.integrations.model_server import (
    FaultRule,
    ModelServer,
    ParsedRequest,
    Reply,
    Script,
    TokensDamaged,
    ToolCallReply,
)
from fairtrial.integrations.model_server.reply import prompt_ids
from fairtrial.models import OpenAIAdapter, ResponseCache, agent_task
from fairtrial.rl import export, groups

ENGINES: list[tuple[Literal["vllm", "sglang"], bool]] = [("vllm", False), ("vllm", True), ("sglang", False)]
THREE_TURNS = Script(
    (
        Reply("I look.", (ToolCallReply("look", {"place": "drawer"}),), reasoning="Where? Hm."),
        Reply(tool_calls=(ToolCallReply("look", {"place": "cupboard"}),)),
        Reply("It is in the cupboard."),
    ),
    per="turn",
)


def look(place: str) -> str:
    """Look into a place."""
    return f"nothing in the {place}"


@contextmanager
def served(**options: Any) -> Iterator[ModelServer]:
    with ModelServer(THREE_TURNS, **{"token_ids": "vllm", **options}) as server:
        yield server


def adapter(server: ModelServer, **options: Any) -> OpenAIAdapter:
    return OpenAIAdapter("policy", base_url=f"{server.base_url}/v1", api_key="none", tokens=True, **options)


def run(server: ModelServer, repeats: int = 1, **options: Any) -> EvalReport:
    data = Dataset([Sample("key", "Where is the key?", "cupboard")])
    task = agent_task(adapter(server, **options), tools=[look])
    config = EvalConfig(repeats=repeats, max_concurrent=1)
    suite = EvalSuite(
        "search", data, task, lambda output, expected: float(expected in output), config=config, version="1"
    )
    return suite.run_sync(store="memory:")


def sent_back(request: ParsedRequest) -> list[int]:
    return prompt_ids([message.raw for message in request.messages])


@pytest.mark.proves("R101")
@pytest.mark.parametrize(("engine", "stream"), ENGINES)
def test_every_sampled_token_is_recorded_once_and_stitched(
    engine: Literal["vllm", "sglang"], stream: bool, tmp_path: Path
) -> None:
    with served(token_ids=engine) as server:
        report = run(server, stream=stream, params={"seed": 5})
        requests = server.requests()
    assert [request.body["return_token_ids"] for request in requests] == [True] * 3
    (rollout,) = next(groups(report)).rollouts
    assert [list(call.prompt_ids) for call in rollout.calls] == [sent_back(request) for request in requests]
    (row,) = rollout.rows()
    assert row.prompt_ids == rollout.calls[0].prompt_ids
    assert sum(row.mask) == sum(len(call.completion_ids) for call in rollout.calls)
    sampled = [token for token, mine in zip(row.completion_ids, row.mask, strict=True) if mine]
    text = bytes(token for token in sampled if token < 256).decode()
    assert text.startswith("Where? Hm.I look.")
    assert text.endswith("It is in the cupboard.")
    assert "nothing in the" not in text
    assert all((value < 0) == bool(mine) for value, mine in zip(row.logprobs, row.mask, strict=True))
    assert [event.sampling for event in rollout.session[TokensSampled].all()] == [{"seed": 5}] * 3
    counts = export(report, tmp_path / "tokens.jsonl", "tokens")
    (line,) = (tmp_path / "tokens.jsonl").read_text().splitlines()
    assert counts.rows == 1
    assert json.loads(line)["completion_ids"] == list(row.completion_ids)


DAMAGES: dict[Any, str] = {
    "ids_missing": "the server sent no token ids of the prompt",
    "logprob_missing": "there must be a log-probability for each of",
    "not_a_number": "a log-probability must be a finite number of at most 0 (got None)",
    "clamped": "a log-probability must be a finite number of at most 0 (got -9999.0)",
}


@pytest.mark.parametrize(("engine", "stream"), ENGINES)
def test_damaged_tokens_are_not_recorded_and_the_reason_is(
    engine: Literal["vllm", "sglang"], stream: bool, tmp_path: Path
) -> None:
    # The second of the three calls of each rollout is damaged in another way.
    faults = [FaultRule(TokensDamaged(how), numbers=(3 * place + 2,)) for place, how in enumerate(DAMAGES)]
    with served(token_ids=engine, faults=faults) as server:
        report = run(server, repeats=len(DAMAGES), stream=stream)
        assert server.stats().by_fault == {"tokens_damaged": len(DAMAGES)}
    (group,) = groups(report)
    assert group.rewards == (1.0,) * len(DAMAGES)  # The answers themselves are intact.
    for rollout, reason in zip(group.rollouts, DAMAGES.values(), strict=True):
        assert len(rollout.calls) == 2
        assert [found[: len(reason)] for found in rollout.missing_tokens] == [reason]
    with pytest.raises(ConfigurationError, match="1 with calls without tokens"):
        export(report, tmp_path / "tokens.jsonl", "tokens")


def test_a_prompt_that_was_tokenized_differently_starts_a_new_row() -> None:
    faults = [FaultRule(TokensDamaged("retokenized"), numbers=(3,))]
    with served(faults=faults) as server:
        (rollout,) = next(groups(run(server))).rollouts
    first, second = rollout.rows()
    assert rollout.missing_tokens == ()
    assert sum(first.mask) + sum(second.mask) == sum(len(call.completion_ids) for call in rollout.calls)
    assert second.prompt_ids == rollout.calls[2].prompt_ids


def test_tokens_of_a_simulated_user_are_not_trained_and_rows_name_what_sampled_them(tmp_path: Path) -> None:
    with ModelServer(lambda request: f"Reply {request.number}", token_ids="vllm") as server:
        policy = adapter(server, params={"seed": 5})

        async def dialogue(goal: str, ctx: TrialContext) -> str:
            talk = [ChatMessage("user", goal)]
            for _ in range(2):
                talk.append((await policy.complete(talk)).message)
                customer = [ChatMessage("system", "You are the customer."), *talk]
                said = await policy.complete(customer, actor="user")
                talk.append(ChatMessage("user", said.text))
            return talk[-2].text

        data: Dataset[str, Any] = Dataset([Sample("key", "Hello")])
        suite = EvalSuite("talk", data, dialogue, lambda output: 1.0, version="1")
        reports = [suite.run_sync(store="memory:", tags={"policy": f"step-{step}"}) for step in range(2)]
        requests = server.requests()
    (rollout,) = next(groups(reports[0])).rollouts
    mine = [request for request in requests[:4] if "customer" not in request.messages[0].text]
    assert [list(call.prompt_ids) for call in rollout.calls] == [sent_back(request) for request in mine]
    (row,) = rollout.rows()
    sampled = bytes(token for token, own in zip(row.completion_ids, row.mask, strict=True) if own and token < 256)
    assert sampled == b"Reply 1Reply 3"
    assert {event.actor for event in rollout.session[TokensSampled].all()} == {"task", "user"}
    rows = []
    for report in reports:
        export(report, tmp_path / "tokens.jsonl", "tokens")
        rows += [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    assert [(row["policy"], row["actor"], row["model"], row["sampling"]) for row in rows] == [
        (f"step-{step}", "task", "policy", {"seed": 5}) for step in range(2)
    ]
    assert [row["run"] for row in rows] == [report.run.run_id for report in reports]
    assert len({row["group"] for row in rows}) == 2


def test_a_server_without_token_ids_is_noted() -> None:
    with served(token_ids=None) as server:
        (rollout,) = next(groups(run(server))).rollouts
    assert rollout.calls == ()
    assert rollout.missing_tokens == ("the server sent no token ids of the prompt",) * 3


def test_sglang_does_not_stream_token_ids_and_the_error_says_so() -> None:
    refused = pytest.raises(InvalidCallError, match="SGLang does not stream token ids: use stream=False")
    with served(token_ids="sglang") as server, refused:
        adapter(server, stream=True).complete_sync("hello")


def test_token_ids_need_chat_completions_of_an_engine_and_no_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"must call chat completions of vLLM or SGLang \(got api='responses'"):
        OpenAIAdapter("gpt-9", api_key="none", tokens=True)
    with pytest.raises(ConfigurationError, match="must have no cache"):
        OpenAIAdapter("m", base_url="http://127.0.0.1:1/v1", api_key="none", tokens=True, cache=ResponseCache(tmp_path))


def test_parameters_that_change_the_distribution_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with served() as server, caplog.at_level(logging.WARNING, "fairtrial.models"):
        run(server, params={"temperature": 1.0, "top_p": 1, "seed": 3, "max_tokens": 50})
        assert not [record for record in caplog.records if "sampled with" in record.message]
        run(server, params={"temperature": 0.7, "top_k": 20})
    (warning,) = (record.message for record in caplog.records if "sampled with" in record.message)
    assert "temperature=0.7, top_k=20" in warning


def test_calls_of_judges_leave_no_tokens() -> None:
    with served() as server:
        model = adapter(server)

        async def judge(output: str, expected: str, session: Any) -> float:
            return float(bool((await model.complete("Good?", session=session)).text))

        data = Dataset([Sample("a", "Where is the key?", "x")])
        suite = EvalSuite("judged", data, agent_task(model, tools=[look]), judge, version="1")
        (rollout,) = next(groups(suite.run_sync(store="memory:"))).rollouts
    assert len(rollout.calls) == 3
