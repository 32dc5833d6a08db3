"""Environments and rollouts as TRL drives them, without TRL: every environment that is opened is closed."""

from __future__ import annotations

import gc
import inspect
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from fairtrial import ChatMessage, ConfigurationError, EvalSuite, OpenAIAdapter, exact_match, rl
from fairtrial.base.sync_bridge import call_sync
from fairtrial.integrations.model_server import FaultRule, ParsedRequest, Reply, TokensDamaged, ToolCallReply
from fairtrial.integrations.model_server.server import ModelServer
from fairtrial.rl.local_model import parse_tool_calls
from fairtrial.rl.trl import METRICS, REWARD
from tests.rl import reward_suites
from tests.rl.trainers import counter_suites
from tests.rl.trainers.counter_suites import Counter

ADD_FIVE = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}]
ANSWER = [*ADD_FIVE, {"role": "tool", "name": "add", "content": "5"}, {"role": "assistant", "content": "five"}]


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    before = Counter.opened
    yield
    assert Counter.opened > before
    assert Counter.opened == Counter.closed


def scored(training: Any, environments: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
    (function,) = training.reward_funcs
    rewards: list[float | None] = function(
        prompts=[[{"role": "user", "content": "Count."}]] * len(completions),
        completions=completions,
        environments=environments,
        **columns,
    )
    return rewards


@pytest.mark.proves("R100", "R101")
def test_an_environment_of_trl_is_scored_as_it_is_and_closed_afterwards() -> None:
    training = rl.trl(counter_suites.suite)
    factory = training.environment_factory
    assert factory is not None
    first, second, unused = factory(), factory(), factory()
    first.reset(sample_id="five", prompt="ignored")
    second.reset(sample_id="six")
    assert (Counter.opened - Counter.closed, first.add(number=2), first.add(number=1, times=3)) == (2, 2, 5)
    with pytest.raises(RuntimeError, match="ValueError: only numbers of at least 0"):
        second.add(number=-1)
    with pytest.raises(RuntimeError, match="bad arguments"):
        second.add(number="many")
    logged: dict[str, float] = {}
    rewards = scored(training, [first, second], [ANSWER] * 2, sample_id=["five", "six"], log_metric=logged.__setitem__)
    assert rewards == [1.0, 0.5]
    assert logged == {"calls": 2.0}
    assert Counter.opened == Counter.closed
    with pytest.raises(RuntimeError, match="the environment is closed"):
        first.add(number=1)
    with pytest.raises(RuntimeError, match="was not reset"):
        unused.add(number=1)


def test_tools_are_methods_of_the_class_with_signature_and_docstring() -> None:
    factory = rl.trl(counter_suites.suite).environment_factory
    assert factory is not None
    kind = type(factory())
    methods = dict(inspect.getmembers(kind, predicate=inspect.isfunction))
    assert {name for name in methods if not name.startswith("_")} == {"add", "reset"}
    add = methods["add"]
    assert str(inspect.signature(add)) == "(self, *, number: int, times: int = 1)"
    assert add.__annotations__ == {"number": int, "times": int}
    assert add.__doc__ == "Add a number to the counter.\n\nArgs:\n    number: number\n    times: times"


def test_the_factory_is_pickled_by_the_import_string_of_the_suite() -> None:
    factory = rl.trl(counter_suites.suite).environment_factory
    again = pickle.loads(pickle.dumps(factory))
    environment = again()
    environment.reset(sample_id="five")
    assert environment.add(number=4) == 4
    again.close()


def test_an_environment_that_is_reset_or_left_open_is_closed() -> None:
    factory = rl.trl(counter_suites.suite).environment_factory
    assert factory is not None
    environment = factory()
    environment.reset(sample_id="five")
    environment.reset(sample_id="six")
    assert Counter.opened - Counter.closed == 1
    factory.close()
    factory.close()
    assert Counter.opened == Counter.closed


def test_an_environment_that_cannot_be_opened_has_no_reward(caplog: pytest.LogCaptureFixture) -> None:
    training = rl.trl(counter_suites.broken_suite)
    factory = training.environment_factory
    assert factory is not None
    environments = [factory(), factory()]
    environments[0].reset(sample_id="five")
    environments[1].reset(sample_id="broken")
    with pytest.raises(RuntimeError, match="OSError: no room for a counter"):
        environments[1].add(number=1)
    environments[0].add(number=5)
    assert scored(training, environments, [ANSWER] * 2, sample_id=["five", "broken"]) == [1.0, None]
    assert "no room for a counter" in caplog.text


def test_environments_are_closed_when_scoring_raises() -> None:
    training = rl.trl(counter_suites.suite)
    factory = training.environment_factory
    assert factory is not None
    environment = factory()
    environment.reset(sample_id="five")
    with pytest.raises(ConfigurationError, match="has no sample 'seven'"):
        scored(training, [environment], [ANSWER], sample_id=["seven"])


def test_a_suite_without_an_agent_has_no_environments() -> None:
    assert rl.trl(reward_suites.suite).environment_factory is None
    call_sync(_open_one)


async def _open_one() -> None:
    """For the fixture, which wants an environment in every test."""
    made = Counter(next(iter(counter_suites.data)))
    await made.close()


def counting(request: ParsedRequest) -> Reply:
    """Add what is missing and say so; count too far for six."""
    if request.turn:
        return Reply("done")
    number = 5 if "five" in request.last_user else 500
    return Reply(tool_calls=(ToolCallReply("add", {"number": number}),))


class Tokenizer:
    """What a rollout without tokens needs of one."""

    eos_token_id = 9

    def apply_chat_template(self, prompt: Any, **options: Any) -> list[int]:
        return [7, 8]


def trainer() -> Any:
    modes: list[bool] = []
    model = SimpleNamespace(training=True, eval=lambda: modes.append(False), train=modes.append)
    return SimpleNamespace(model=model, processing_class=Tokenizer(), state=SimpleNamespace(global_step=3), modes=modes)


def prompt(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Count to {name}.", "sample_id": name}]


@pytest.mark.proves("R101")
def test_rollouts_of_an_agent_have_one_completion_for_every_prompt_in_order() -> None:
    with ModelServer(counting, token_ids="vllm") as server:
        adapter = OpenAIAdapter("policy", base_url=f"{server.base_url}/v1", api_key="none", tokens=True)
        trained = trainer()
        made = rl.trl(counter_suites.suite).rollout_func(adapter=adapter)(
            [prompt("five"), prompt("six"), prompt("five")], trained
        )
    assert made[REWARD] == [1.0, 0.5, 1.0]
    assert [metrics["calls"] for metrics in made[METRICS]] == [1.0] * 3
    assert trained.modes == [False, True]
    lengths = [[len(row) for row in made[name]] for name in ("completion_ids", "logprobs", "env_mask")]
    assert lengths[0] == lengths[1] == lengths[2]
    assert all(set(mask) == {0, 1} for mask in made["env_mask"])
    assert bytes(token for token in made["prompt_ids"][1] if token < 256) == b"Count to six."
    logged: dict[str, float] = {}
    (reward,) = rl.trl(counter_suites.suite).rollout_rewards
    assert reward(prompts=[], log_metric=logged.__setitem__, **made) == [1.0, 0.5, 1.0]
    assert logged == {"calls": 1.0, "letters": 1.0, "right": 2 / 3}


@pytest.mark.proves("R101")
def test_a_rollout_that_fails_or_times_out_is_masked_and_closed(caplog: pytest.LogCaptureFixture) -> None:
    with ModelServer(counting, token_ids="vllm") as server:
        adapter = OpenAIAdapter("policy", base_url=f"{server.base_url}/v1", api_key="none", tokens=True)
        broken = rl.trl(counter_suites.broken_suite).rollout_func(adapter=adapter)
        made = broken([prompt("five"), prompt("broken")], trainer())
        slow = rl.trl(counter_suites.limited_suite).rollout_func(adapter=adapter)
        late = slow([prompt("six")], trainer())
    assert made[REWARD] == [1.0, None]
    assert (made["prompt_ids"][1], made["completion_ids"][1], made["env_mask"][1]) == ([7, 8], [9], [0])
    assert "no room for a counter" in caplog.text
    assert late[REWARD] == [None]


def test_rollouts_with_several_rows_are_refused_at_the_start_and_never_trained_in_part() -> None:
    # The second call of a rollout finds a conversation that the engine has tokenized differently.
    with ModelServer(counting, token_ids="vllm", faults=FaultRule(TokensDamaged("retokenized"), every=2)) as server:
        adapter = OpenAIAdapter("policy", base_url=f"{server.base_url}/v1", api_key="none", tokens=True)
        rollouts = rl.trl(counter_suites.suite).rollout_func(adapter=adapter)
        with pytest.raises(ConfigurationError, match="each rollout must be one row of tokens"):
            rollouts([prompt("five")], trainer())
        later = rollouts([prompt("five")], trainer())
    assert (later["env_mask"], later[REWARD]) == ([[0]], [None])


@pytest.mark.proves("R101")
def test_environments_of_cancelled_rollouts_are_closed() -> None:
    reached: list[str] = []

    async def cancelled(scope: anyio.CancelScope) -> None:
        def count(request: ParsedRequest) -> Reply:
            reached.append(request.last_user)
            if len(reached) == 2:
                scope.cancel()
            return Reply(tool_calls=(ToolCallReply("add", {"number": 1}),))

        async with ModelServer(count, token_ids="vllm") as server:
            adapter = OpenAIAdapter("policy", base_url=f"{server.base_url}/v1", api_key="none", tokens=True)
            task = rl.with_adapter(counter_suites.suite, adapter)
            with scope:
                await rl.rollout(counter_suites.data, task, counter_suites.score, group_size=4)
            await adapter.aclose()

    async def main() -> None:
        await cancelled(anyio.CancelScope())

    anyio.run(main)
    assert len(reached) >= 2
    gc.collect()


def test_prompts_without_a_sample_and_tasks_without_a_model_are_refused() -> None:
    function = rl.trl(counter_suites.suite).rollout_func()
    with pytest.raises(ConfigurationError, match=r"(?s)must name their samples.*rollout_dataset"):
        function([[{"role": "user", "content": "Count."}]], trainer())
    (reward,) = rl.trl(counter_suites.suite).rollout_rewards
    with pytest.raises(ConfigurationError, match="must have rollout_func"):
        reward(prompts=[], completions=[])
    plain = EvalSuite("plain", counter_suites.data, str, exact_match)
    with pytest.raises(ConfigurationError, match="must be an agent_task or a prompt_task"):
        rl.with_adapter(plain, counter_suites.agent.adapter)  # type: ignore[attr-defined]
    call_sync(_open_one)


def test_tool_calls_are_read_from_text() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"number": 2}}\n</tool_call>'
    message = parse_tool_calls(f"I count. {call}{call}")
    assert [(found.name, found.arguments, found.id) for found in message.tool_calls] == [
        ("add", {"number": 2}, "call_0"), ("add", {"number": 2}, "call_1"),
    ]  # fmt: skip
    assert message.text == "I count."
    broken = "<tool_call>{no json}</tool_call>"
    assert parse_tool_calls(broken) == ChatMessage("assistant", broken)
    call_sync(_open_one)
