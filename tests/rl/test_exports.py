"""Training files of runs, and token rows."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import Attachment, ConfigurationError, Dataset, EvalConfig, EvalReport, EvalSuite, Sample, TrialContext
from fairtrial.cli.app import invoke
from fairtrial.data.session import ChatMessage, Session, ToolCall, restore_session
from fairtrial.data.session.session import TokenCall, TokensSampled, check_tokens, record_tokens, token_calls
from fairtrial.data.session.trajectory import from_chat
from fairtrial.errors import InvalidCallError
from fairtrial.integrations.model_server import FaultRule, ModelServer, ParsedRequest, Reply, Script, TokensDamaged
from fairtrial.integrations.model_server.reply import ToolCallReply, prompt_ids
from fairtrial.models import OpenAIAdapter, ResponseCache, agent_task
from fairtrial.rl import export, groups, stitch
from fairtrial.rl.local_model import to_chat
from tests.rl.build import suite_of


@pytest.fixture(scope="module")
def report() -> EvalReport:
    return suite_of(9).run_sync(store="memory:")


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.proves("R101", "R104", "R140")
def test_trajectories_have_every_rollout_also_failed_ones(report: EvalReport, tmp_path: Path) -> None:
    counts = export(report, tmp_path / "trajectories.jsonl")
    rows = lines(tmp_path / "trajectories.jsonl")
    rollouts = [rollout for group in groups(report) for rollout in group.rollouts]
    assert counts.rows == len(rows) == len(rollouts) == 36
    assert [(row["sample_id"], row["repeat"], row["reward"], row["advantage"], row["status"]) for row in rows] == [
        (one.sample_id, one.repeat, one.reward, one.advantage, one.status) for one in rollouts
    ]
    assert {row["reward"] for row in rows if row["outcome"] != "scored"} == {None}
    assert rows[0]["messages"][0] == {"role": "user", "content": "is 0 even?"}
    spoken = [[(message.role, message.text) for message in one.messages] for one in rollouts]
    assert [[(said["role"], said["content"]) for said in row["messages"]] for row in rows] == spoken
    assert max(map(len, spoken)) > 1  # Otherwise the whole conversation is its first message.


def test_sft_has_the_conversations_that_passed(report: EvalReport, tmp_path: Path) -> None:
    counts = export(report, tmp_path / "sft.jsonl", "sft")
    rows = lines(tmp_path / "sft.jsonl")
    passed = [r for group in groups(report) for r in group.rollouts if r.reward == 1.0 and r.status == "terminated"]
    assert [row["messages"][-1]["content"] for row in rows] == [one.last_reply for one in passed]
    assert counts.left_out.keys() == {"unscored", "truncated", "not passed"}
    assert counts.rows + sum(counts.left_out.values()) == 36
    assert str(counts).startswith(f"{len(rows)} rows; left out: ")
    everything = export(report, tmp_path / "all.jsonl", "sft", min_reward=0.0, truncated=True)
    assert everything.rows == sum(one.reward is not None for group in groups(report) for one in group.rollouts)


def test_dpo_pairs_are_of_one_group_with_a_margin_and_ties_are_never_paired(report: EvalReport, tmp_path: Path) -> None:
    counts = export(report, tmp_path / "dpo.jsonl", "dpo")
    rows = lines(tmp_path / "dpo.jsonl")
    assert counts.rows == len(rows) > 0
    for row in rows:
        assert {row["chosen"][0]["content"], row["rejected"][0]["content"]} == {"yes", "no"}
        assert row["prompt"][0]["role"] == "user"
    assert counts.left_out["groups without a difference"] > 0
    with pytest.raises(ConfigurationError, match="no rollout of the run can be exported as dpo"):
        export(report, tmp_path / "none.jsonl", "dpo", margin=1.0)
    assert not (tmp_path / "none.jsonl").exists()


def test_kto_has_a_verdict_for_every_scored_rollout(report: EvalReport, tmp_path: Path) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    export(report, tmp_path / "kto.jsonl", "kto", truncated=True, tools=[add])
    rows = lines(tmp_path / "kto.jsonl")
    scored = [one for group in groups(report) for one in group.rollouts if one.reward is not None]
    assert [row["label"] for row in rows] == [one.reward == 1.0 for one in scored]
    assert rows[0]["tools"][0]["function"]["name"] == "add"


def test_wrong_arguments_are_refused(report: EvalReport, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="format must be one of trajectories, sft, dpo, kto, tokens"):
        export(report, tmp_path / "x", "csv")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="margin must be at least 0"):
        export(report, tmp_path / "x", "dpo", margin=-1)
    with pytest.raises(ConfigurationError, match=r"as tokens \(.* without tokens.*\)\nrun the suite with"):
        export(report, tmp_path / "x", "tokens")


def test_the_command_writes_the_same_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(tmp_path / "runs.db")
    report = suite_of(9).run_sync(store=store)
    export(report, tmp_path / "own.jsonl", "kto")
    target = tmp_path / "kto.jsonl"
    assert invoke(["export", "guesses", "--store", store, "-f", "kto", "-o", str(target), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert target.read_bytes() == (tmp_path / "own.jsonl").read_bytes()
    assert said["rows"] == len(lines(target))
    assert set(said["left_out"]) == {"unscored", "truncated"}
    assert invoke(["export", "guesses", "--store", store, "-f", "sft", "-o", "-"]) == 0
    assert all("messages" in json.loads(line) for line in capsys.readouterr().out.splitlines())


def test_messages_survive_the_chat_format() -> None:
    messages = [
        ChatMessage("system", "s"),
        ChatMessage("assistant", "", (ToolCall("add", {"a": 1}, "c1"),), reasoning="hm"),
        ChatMessage("tool", "3", name="c1"),
        ChatMessage("user", "u", name="Ann"),
    ]
    rows = [to_chat(message) for message in messages]
    assert rows[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert (rows[1]["reasoning_content"], rows[2]["tool_call_id"]) == ("hm", "c1")
    again = [from_chat(json.loads(json.dumps(row))) for row in rows]
    assert again == messages
    assert again[1].reasoning == "hm"
    with pytest.raises(ConfigurationError, match="a message must be a mapping"):
        from_chat("hello")
    with pytest.raises(ConfigurationError, match="must be text"):
        to_chat(ChatMessage("user", ("look", Attachment("0" * 64, "image/png", 1))))


def _slow_rows(calls: list[TokenCall]) -> list[Any]:
    """The same as `stitch`, token by token."""
    rows: list[list[tuple[int, int, float]]] = []
    for call in calls:
        held = [token for token, _, _ in rows[-1]] if rows else None
        if held is None or list(call.prompt_ids[: len(held)]) != held:
            rows.append([])
            held = []
        rows[-1] += [(token, 0, 0.0) for token in call.prompt_ids[len(held) :]]
        rows[-1] += [(token, 1, lp) for token, lp in zip(call.completion_ids, call.logprobs, strict=True)]
    return rows


@given(st.integers(0, 2**31))
def test_stitching_loses_no_sampled_token(seed: int) -> None:
    rng = random.Random(seed)
    calls: list[TokenCall] = []
    session = Session()
    held: list[int] = []
    for _ in range(rng.randint(1, 6)):
        prompt = held + [rng.randrange(9) for _ in range(rng.randint(0 if held else 1, 4))]
        if held and rng.random() < 0.3:
            prompt[rng.randrange(len(prompt))] = 99  # The engine tokenized the conversation differently.
        sampled = [rng.randrange(9) for _ in range(rng.randint(1, 4))]
        calls.append(TokenCall(tuple(prompt), tuple(sampled), tuple(-rng.random() for _ in sampled)))
        record_tokens(session, *calls[-1][:3])
        held = prompt + sampled
    rows = stitch(calls)
    slow = _slow_rows(calls)
    assert [row.prompt_ids + row.completion_ids for row in rows] == [tuple(t for t, _, _ in row) for row in slow]
    assert [(0,) * len(row.prompt_ids) + row.mask for row in rows] == [tuple(m for _, m, _ in row) for row in slow]
    assert sum(sum(row.mask) for row in rows) == sum(len(call.completion_ids) for call in calls)
    assert all(len(row.mask) == len(row.logprobs) == len(row.completion_ids) for row in rows)
    assert token_calls(restore_session(session.snapshot())) == calls


def test_a_long_conversation_is_stored_once() -> None:
    def size(turns: int) -> int:
        session = Session()
        held: list[int] = []
        for turn in range(turns):
            prompt = [*held, *range(50)]
            record_tokens(session, prompt, [turn] * 50, [-0.5] * 50)
            held = prompt + [turn] * 50
        return len(session.snapshot())

    assert size(20) < 2.2 * size(10)


@pytest.mark.parametrize(
    ("logprobs", "problem"),
    [
        ([-1.0], "each of 2 ids"),
        ([-1.0, 0.5], "at most 0"),
        ([-1.0, float("nan")], "finite"),
        ([-1.0, -9999.0], "9999"),
    ],
)
def test_tokens_that_cannot_be_trained_on_are_refused(logprobs: list[float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_tokens([1], [2, 3], logprobs)
    with pytest.raises(ValueError, match="ids of the prompt must be whole numbers"):
        check_tokens(["1"], [2, 3], [-1.0, -1.0])


def test_recorded_tokens_are_exported_with_rewards(tmp_path: Path) -> None:
    def two_turns(given: int, ctx: TrialContext) -> str:
        record_tokens(ctx.session, [1, 2], [3], [-0.1])
        record_tokens(ctx.session, [1, 2, 3, 4], [5, 6], [-0.2, -0.3])
        return "yes"

    def even(output: str, sample: Sample[Any, Any], session: Any) -> float:
        return 1.0

    data: Dataset[int, Any] = Dataset([Sample("a", 1)])
    suite = EvalSuite("t", data, two_turns, even, config=EvalConfig(repeats=2), version="1")
    report = suite.run_sync(store="memory:")
    assert export(report, tmp_path / "tokens.jsonl", "tokens").rows == 2
    assert lines(tmp_path / "tokens.jsonl")[1] == {
        "prompt_ids": [1, 2], "completion_ids": [3, 4, 5, 6], "mask": [1, 0, 1, 1],
        "logprobs": [-0.1, 0.0, -0.2, -0.3], "reward": 1.0, "advantage": 0.0, "repeat": 1,
        "group": f"{report.run.run_id}/baseline/a", "run": report.run.run_id, "policy": "", "actor": "task",
        "model": "", "sampling": {}, "row": 0, "status": "terminated",
    }  # fmt: skip


# Token ids and log-probabilities of vLLM and SGLang: requested, checked, recorded and exported.


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
