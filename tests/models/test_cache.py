"""Replies kept on disk, what calls cost, and the time that adapters add."""

from __future__ import annotations

import asyncio
import importlib.util
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

from fairtrial import ChatMessage, EvalResult, Experiment, Sample, Session, TokenUsage, ToolCall, TrialContext, TrialKey
from fairtrial.data.session.events import PromptExecuted
from fairtrial.errors import ConfigurationError, ModelUnavailableError, OutputParseError, StoreError
from fairtrial.integrations.model_server import FaultRule, ModelServer, ParsedRequest, ServerFailed, spawn_model_server
from fairtrial.integrations.model_server.reply import Reply as Served
from fairtrial.integrations.model_server.reply import Usage
from fairtrial.models import ModelReply, ResponseCache, RetryPolicy, ScriptedAdapter, ToolSpec
from fairtrial.models.pricing import Prices, _cost, is_known, priced, read_prices
from fairtrial.models.sdk import SdkAdapter
from fairtrial.scoring.evaluator import resolve
from fairtrial.testing.environments import FakeClock
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import resolve_task
from tests.figures import Figure

type MakeAdapter = Callable[..., SdkAdapter]


def ask(text: str) -> list[ChatMessage]:
    return [ChatMessage("user", text)]


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ResponseCache]:
    opened = ResponseCache(tmp_path / "cache" / "responses.db")
    yield opened
    opened.close()


def numbered() -> Callable[[ParsedRequest], Served]:
    """A model that never says the same thing twice."""

    def reply(request: ParsedRequest) -> Served:
        return Served(f"answer {request.number}", usage=Usage(10, 5))

    return reply


async def suite(task: Any, *, samples: int, repeats: int, run_id: str) -> list[EvalResult]:
    """The trials of a suite, side by side."""

    def passes(output: Any, expected: Any) -> bool:
        return str(output).startswith("answer")

    rules = TrialRules((resolve_task(task),), (Experiment(),), resolve(passes), timeout_seconds=30)
    results: list[EvalResult] = []

    async def one(ordinal: int) -> None:
        sample: Sample[str, str] = Sample(f"s{ordinal % samples}", f"question {ordinal % samples}")
        key = TrialKey(run_id, "baseline", sample.id, ordinal // samples)
        results.append(await run_trial(rules, key, ordinal, sample, 0))

    async with anyio.create_task_group() as group:
        for ordinal in range(samples * repeats):
            group.start_soon(one, ordinal)
    return sorted(results, key=lambda result: result.ordinal)


@pytest.mark.proves("R107")
async def test_the_second_run_makes_no_request_and_gives_the_same_results(
    adapter_for: MakeAdapter, cache: ResponseCache
) -> None:
    async def vote(question: str, ctx: TrialContext) -> str:
        # The same prompt three times in one trial: three answers, for self-consistency.
        answers = [(await adapter.complete(ask(question))).output or "" for _ in range(3)]
        return " / ".join(answers)

    with ModelServer(numbered()) as server:
        adapter = adapter_for(server, cache=cache)
        first = await suite(vote, samples=5, repeats=2, run_id="one")
        assert server.stats().requests == 30
        second = await suite(vote, samples=5, repeats=2, run_id="two")
        assert server.stats().requests == 30
    seen = [(result.outcome, result.output, result.score, result.usage.total_tokens) for result in first]
    assert [(result.outcome, result.output, result.score, result.usage.total_tokens) for result in second] == seen
    # A call that was not made costs nothing, whether its price is known or not.
    assert {(result.cache_hits, result.unpriced_calls, result.usage.cost_usd) for result in first} == {(0, 3, None)}
    assert {(result.cache_hits, result.unpriced_calls, result.usage.cost_usd) for result in second} == {(3, 0, 0.0)}
    assert all(result.usage == TokenUsage(30, 15) for result in first)
    answers = [answer for result in first for answer in result.output.split(" / ")]
    assert len(set(answers)) == 30  # Repeats and identical calls of a trial stay distinct.
    assert (cache.hits, cache.misses) == (30, 30)


async def test_changing_any_part_of_the_key_misses(
    cache: ResponseCache, provider: str, adapter_for: MakeAdapter
) -> None:
    tool = ToolSpec("t", "d", {"type": "object", "properties": {}})
    with ModelServer(numbered()) as server, ModelServer(numbered()) as elsewhere:
        base: dict[str, Any] = {"messages": ask("x")}
        variants: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
            (server, {}, base),
            (elsewhere, {}, base),
            (server, {"model": "other"}, base),
            (server, {"params": {"temperature": 0.5}}, base),
            (server, {}, {**base, "params": {"temperature": 0.25}}),
            (server, {}, {**base, "params": {"seed": 1}}),
            (server, {}, {"messages": ask("y")}),
            (server, {}, {"messages": [ChatMessage("system", "s"), *ask("x")]}),
            (server, {}, {**base, "tools": [tool]}),
            (server, {}, {**base, "tools": [ToolSpec("t", "other", tool.parameters)]}),
        ]
        for at, options, call in variants:
            await adapter_for(at, cache=cache, **options).complete(**call)
        assert server.stats().requests + elsewhere.stats().requests == len(variants)
        for at, options, call in variants:
            await adapter_for(at, cache=cache, **options).complete(**call)
        assert server.stats().requests + elsewhere.stats().requests == len(variants)
    assert len(cache) == len(variants)


async def test_the_form_asked_for_and_the_provider_are_part_of_the_key(cache: ResponseCache) -> None:
    one = ScriptedAdapter([Verdict("a"), '{"reason": "b"}', '{"reason": "c"}'], cache=cache)
    two = ScriptedAdapter(["d"], name="other", cache=cache)
    assert (await one.complete(ask("x"), output_type=Verdict)).output == Verdict("a")
    assert (await one.complete(ask("x"))).output == '{"reason": "b"}'
    assert (await one.complete(ask("x"), output_type=dict)).output == {"reason": "c"}
    assert (await two.complete(ask("x"))).output == "d"
    assert (await one.complete(ask("x"), output_type=Verdict)).output == Verdict("a")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_identical_calls_at_one_time_share_one_request(cache: ResponseCache, backend: str) -> None:
    async def main() -> tuple[set[str | None], int]:
        async def slowly(messages: Any) -> str:
            await anyio.sleep(0.02)
            return "ok"

        adapter = ScriptedAdapter(slowly, cache=cache)
        answers: set[str | None] = set()

        async def call() -> None:
            answers.add((await adapter.complete(ask("x"))).output)

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(call)
        return answers, len(adapter.calls)

    assert anyio.run(main, backend=backend) == ({"ok"}, 1)


async def test_if_the_shared_request_fails_the_others_ask_for_themselves(cache: ResponseCache) -> None:
    adapter = ScriptedAdapter([ModelUnavailableError("a"), ModelUnavailableError("b"), "ok"], cache=cache)
    outcomes: list[str] = []

    async def call() -> None:
        try:
            outcomes.append(str((await adapter.complete(ask("x"))).output))
        except ModelUnavailableError as error:
            outcomes.append(str(error))

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(call)
    assert sorted(outcomes) == ["a", "b", *["ok"] * 8]
    assert len(adapter.calls) == 3


async def test_a_caller_that_gives_up_does_not_take_the_others_with_it(cache: ResponseCache) -> None:
    started = anyio.Event()

    async def reply(messages: Any) -> str:
        if not started.is_set():
            started.set()
            await anyio.sleep_forever()
        return "ok"

    adapter = ScriptedAdapter(reply, cache=cache)
    answers: list[str | None] = []

    async def follower() -> None:
        await started.wait()
        answers.append((await adapter.complete(ask("x"))).output)

    async with anyio.create_task_group() as group:
        group.start_soon(follower)
        with anyio.move_on_after(0.05):
            await adapter.complete(ask("x"))
    assert answers == ["ok"]


async def test_errors_and_unreadable_answers_are_never_kept(cache: ResponseCache) -> None:
    adapter = ScriptedAdapter([ModelUnavailableError("a"), "no", "no", "no", Verdict("fine")], cache=cache)
    with pytest.raises(ModelUnavailableError):
        await adapter.complete(ask("x"), output_type=Verdict)
    with pytest.raises(OutputParseError):
        await adapter.complete(ask("x"), output_type=Verdict)
    assert len(cache) == 0
    assert (await adapter.complete(ask("x"), output_type=Verdict)).output == Verdict("fine")
    assert len(adapter.calls) == 5
    assert len(cache) == 1  # The repair's answer; what needed it is asked for again.


async def test_refusals_are_never_kept(cache: ResponseCache, adapter_for: MakeAdapter) -> None:
    from fairtrial.errors import ModelRefusedError

    with ModelServer([Served(refusal="No."), "Yes."]) as server:
        adapter = adapter_for(server, cache=cache)
        with pytest.raises(ModelRefusedError):
            await adapter.complete(ask("x"))
        assert (await adapter.complete(ask("x"))).output == "Yes."


async def test_an_attempt_that_is_retried_does_not_pay_again_for_what_it_has(
    cache: ResponseCache, adapter_for: MakeAdapter
) -> None:
    async def chain(question: str) -> str:
        said = question
        for _ in range(4):
            said = (await adapter.complete(ask(said))).output or ""
        return said

    fault = FaultRule(ServerFailed(), numbers=(4,))
    with ModelServer(numbered(), faults=fault) as server:
        adapter = adapter_for(server, cache=cache, retry=RetryPolicy(attempts=1))
        rules = TrialRules(
            (resolve_task(chain),), (Experiment(),), resolve(lambda output, expected: True), max_retries=1
        )
        result = await run_trial(rules, TrialKey("r", "baseline", "s"), 0, Sample("s", "go"), 0)
        assert (result.outcome, result.attempt, result.output) == ("scored", 2, "answer 5")
        assert server.stats().requests == 5


async def test_money_is_paid_once_and_tokens_count_as_they_were(cache: ResponseCache) -> None:
    session = Session()
    adapter = ScriptedAdapter(["x"], usage=TokenUsage(10, 5, 0, 0.5), cache=cache)
    for _ in range(2):
        await adapter.complete(ask("x"), session=session)
    assert [event.usage for event in session[PromptExecuted].all()] == [
        TokenUsage(10, 5, 0, 0.5),
        TokenUsage(10, 5, 0, 0.0),
    ]


async def test_tool_calls_come_back_from_the_cache_as_they_were(cache: ResponseCache) -> None:
    adapter = ScriptedAdapter([ToolCall("t", {"a": [1, {"b": None}]}, "id")], cache=cache)
    one, two = [(await adapter.complete(ask("x"))).message for _ in range(2)]
    assert one == two
    assert one.tool_calls[0].arguments == {"a": [1, {"b": None}]}


async def test_policies(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    adapter_script = [str(number) for number in range(20)]

    async def outputs(policy: Any, script: list[str]) -> tuple[list[str | None], int]:
        cache = ResponseCache(path, policy)
        adapter = ScriptedAdapter(script, cache=cache)
        said = [(await adapter.complete(ask("x"))).output for _ in range(2)]
        cache.close()
        return said, len(adapter.calls)

    assert await outputs("off", adapter_script) == (["0", "1"], 2)
    assert await outputs("read", adapter_script) == (["0", "1"], 2)
    assert await outputs("read-write", ["kept"]) == (["kept", "kept"], 1)
    assert await outputs("read", ["unused"]) == (["kept", "kept"], 0)
    assert await outputs("refresh", ["new", "newer"]) == (["new", "newer"], 2)
    assert await outputs("read-write", []) == (["newer", "newer"], 0)


async def test_old_answers_are_not_used_and_go(tmp_path: Path) -> None:
    clock = FakeClock()
    cache = ResponseCache(tmp_path / "c.db", max_age_seconds=60, max_bytes=10_000_000, clock=clock)
    adapter = ScriptedAdapter(["a", "b", "c"], cache=cache)
    assert (await adapter.complete(ask("x"))).output == "a"
    clock.advance(59)
    assert (await adapter.complete(ask("x"))).output == "a"
    clock.advance(2)
    assert (await adapter.complete(ask("x"))).output == "b"
    clock.advance(61)
    await adapter.complete(ask("y"))
    assert len(cache) == 1
    cache.close()


async def test_the_oldest_answers_go_when_it_grows_too_large(tmp_path: Path) -> None:
    clock = FakeClock()
    cache = ResponseCache(tmp_path / "c.db", max_bytes=20_000, clock=clock)
    adapter = ScriptedAdapter(lambda messages: "x" * 1000, cache=cache)
    for number in range(40):
        clock.advance(1)
        await adapter.complete(ask(str(number)))
    assert 5 < len(cache) < 20
    before = len(adapter.calls)
    await adapter.complete(ask("39"))
    assert len(adapter.calls) == before
    await adapter.complete(ask("0"))
    assert len(adapter.calls) == before + 1
    cache.clear()
    assert len(cache) == 0
    cache.close()


async def test_the_size_of_the_cache_is_kept_and_not_added_up_at_each_check(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    clock = FakeClock()
    cache = ResponseCache(path, max_bytes=10_000_000, policy="refresh", clock=clock)
    reply = ModelReply(ChatMessage("assistant", "x" * 100), None, "stop", "m", None)

    def steps_of_a_write(key: str) -> int:
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += 1
            return 0

        database = cache._open()
        database.set_progress_handler(count, 1)
        try:
            cache._write(key, reply)
        finally:
            database.set_progress_handler(None, 1)
        return steps

    def kept_and_counted() -> tuple[int, int]:
        with closing(sqlite3.connect(path)) as database:
            kept = database.execute("SELECT bytes FROM total").fetchone()[0]
            return kept, database.execute("SELECT COALESCE(SUM(size), 0) FROM responses").fetchone()[0]

    few = max(steps_of_a_write(f"a{number}") for number in range(10))
    for number in range(1000):
        clock.advance(1)
        cache._write(f"b{number}", reply)
    assert steps_of_a_write("c") <= few + 50
    cache._write("c", replace(reply, message=ChatMessage("assistant", "longer" * 100)))
    kept, counted = kept_and_counted()
    assert kept == counted > 0
    cache.close()

    cache = ResponseCache(path, max_bytes=kept // 2, clock=clock)
    cache._write("d", reply)
    kept, counted = kept_and_counted()
    assert kept == counted > 0
    assert cache.prune(-1) > 0
    assert kept_and_counted() == (0, 0)
    cache._write("e", reply)
    cache.clear()
    assert kept_and_counted() == (0, 0)
    cache.close()


async def test_only_the_owner_may_read_the_file(cache: ResponseCache) -> None:
    await ScriptedAdapter(["x"], cache=cache).complete(ask("x"))
    files = list(cache.path.parent.iterdir())
    assert cache.path in files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert repr(cache) == f"<ResponseCache {str(cache.path)!r} read-write>"


async def test_a_damaged_answer_is_asked_for_again(cache: ResponseCache) -> None:
    adapter = ScriptedAdapter(["a", "b"], cache=cache)
    await adapter.complete(ask("x"))
    with closing(sqlite3.connect(cache.path)) as database, database:
        database.execute("UPDATE responses SET reply = '{\"odd\":1}'")
    database.close()
    assert (await adapter.complete(ask("x"))).output == "b"


async def test_a_file_that_is_no_cache_or_a_newer_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is not a database, and long enough to be seen as such" * 20)
    with pytest.raises(StoreError, match="cannot be used"):
        await ScriptedAdapter(["a"], cache=ResponseCache(tmp_path / "text.db")).complete(ask("x"))
    with closing(sqlite3.connect(tmp_path / "new.db")) as database, database:
        database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(StoreError, match="cache format 99"):
        await ScriptedAdapter(["a"], cache=ResponseCache(tmp_path / "new.db")).complete(ask("x"))


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cache policy must be one of off, read, read-write, refresh"):
        ResponseCache(tmp_path / "c.db", "sometimes")  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(ConfigurationError, match="more than 0"):
        ResponseCache(tmp_path / "c.db", max_bytes=0)


USED = TokenUsage(1000, 100, 500)


def test_a_known_model_has_its_price_by_provider_or_by_address() -> None:
    by_name = priced(USED, "gpt-4o-mini", provider="openai")
    by_address = priced(USED, "gpt-4o-mini", base_url="https://api.openai.com/v1")
    assert by_name.cost_usd == by_address.cost_usd == pytest.approx(0.0001725)
    assert (by_name.input_tokens, by_name.output_tokens, by_name.cached_tokens) == (1000, 100, 500)


def test_writing_to_a_providers_cache_costs_extra() -> None:
    plain = priced(TokenUsage(1000, 0), "claude-sonnet-4-5", provider="anthropic").cost_usd
    used = TokenUsage(1000, 0, cache_write_tokens=1000)
    written = priced(used, "claude-sonnet-4-5", provider="anthropic").cost_usd
    assert plain is not None
    assert written == pytest.approx(plain * 1.25)


def test_given_prices_tell_cache_writes_and_reasoning_apart() -> None:
    used = TokenUsage(1_000_000, 1_000_000, 500_000, reasoning_tokens=600_000, cache_write_tokens=300_000)
    assert Prices(input=2.0, output=10.0).cost(used) == pytest.approx(12.0)
    assert Prices(2.0, 10.0, cached=0.2, cache_write=2.5, reasoning=5.0).cost(used) == pytest.approx(
        0.2 * 2 + 0.5 * 0.2 + 0.3 * 2.5 + 0.4 * 10 + 0.6 * 5
    )
    table = read_prices({"m": {"input": 1, "output": 2, "cache_write": 3, "reasoning": 4}})
    assert table == {"m": Prices(1, 2, cache_write=3, reasoning=4)}
    with pytest.raises(ConfigurationError, match="cached, cache_write, reasoning"):
        read_prices({"m": {"input": 1, "output": 2, "thinking": 3}})


@pytest.mark.parametrize(
    ("model", "provider", "base_url"),
    [
        ("no-such-model", "openai", None),
        ("gpt-4o", "no-such-provider", None),
        ("gpt-4o", None, "http://127.0.0.1:1"),
        ("gpt-4o", None, None),
    ],
)
def test_what_is_not_in_the_list_has_no_price(model: str, provider: str | None, base_url: str | None) -> None:
    assert priced(USED, model, provider=provider, base_url=base_url) == USED


def test_counts_that_cannot_be_have_no_price() -> None:
    assert priced(TokenUsage(10, 5, 500), "gpt-4o-mini", provider="openai").cost_usd is None


def test_without_the_list_nothing_has_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    is_known.cache_clear()
    _cost.cache_clear()
    try:
        assert priced(USED, "gpt-4o-mini", provider="openai") == USED
    finally:
        is_known.cache_clear()
        _cost.cache_clear()


# Figures, measured in one run. The commands in `benchmarks/` measure the same with more calls.


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


@pytest.mark.measured
def test_the_adapter_keeps_nine_tenths_of_the_bare_sdks_throughput(figure: Figure) -> None:
    benchmark = load("adapter")
    with spawn_model_server("Paris.", latency=0.05) as server:
        rates, costs = asyncio.run(benchmark.measure(server.base_url, 1500, 100, 3))
    print({name: [round(rate) for rate in found] for name, found in rates.items()})
    print({name: [round(cost, 2) for cost in found] for name, found in costs.items()})
    print({other: round(benchmark.ratio(rates, other), 2) for other in ("sdk", "sdk_raw", "aiohttp")})
    figure("adapter: calls a second, x the bare SDK", benchmark.ratio(rates, "sdk"), at_least=0.9)


@pytest.mark.measured
def test_the_limiter_finds_a_limit_it_was_not_told(figure: Figure) -> None:
    benchmark = load("limiter")
    fixed, adaptive = benchmark.compare(calls=1500, cap=40, latency=0.2)
    print(fixed, adaptive)
    assert fixed.failed == adaptive.failed == 0
    figure("limiter: calls a second, x the right limit", adaptive.rate / fixed.rate, at_least=0.85)
    assert adaptive.refused_late < 0.05
