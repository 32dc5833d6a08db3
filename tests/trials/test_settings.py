"""The settings of runs: what is refused, what is converted, and what is derived from the key of a trial."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import anyio.lowlevel
import pytest

from fairtrial import ConfigurationError, EvalConfig, StopWhen, TrialKey
from fairtrial.trials.context import (
    current_slot,
    event_span_id,
    is_sampled,
    slot_released,
    trace_id_of,
    traceparent_of,
    trial_span_id,
)

AnyRule: Any = StopWhen
AnyConfig: Any = EvalConfig
NARROW = StopWhen(0.1)
KEY = TrialKey("run", "baseline", "s1", 2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (AnyRule, "exactly one of"),
        (lambda: AnyRule(0.1, decides=("a", "b")), "exactly one of"),
        (lambda: AnyRule(1.5), "narrower_than must be between 0 and 1"),
        (lambda: AnyRule(1), "narrower_than must be between 0 and 1"),
        (lambda: AnyRule(0.0), "narrower_than must be between 0 and 1"),
        (lambda: AnyRule(math.nan), "narrower_than must be between 0 and 1"),
        (lambda: AnyRule("0.1"), "narrower_than must be between 0 and 1"),
        (lambda: AnyRule(True), "narrower_than must be between 0 and 1"),
        (lambda: AnyRule(0.1, level=1.0), "level must be between 0 and 1"),
        (lambda: AnyRule(0.1, every=0), "every must be a whole number"),
        (lambda: AnyRule(0.1, every=2.0), "every must be a whole number"),
        (lambda: AnyRule(0.1, every=True), "every must be a whole number"),
        (lambda: AnyRule(0.1, verdicts=1), "verdicts must be True or False"),
        (lambda: AnyRule(0.1, shuffle=None), "shuffle must be True or False"),
        (lambda: AnyRule(decides="ab"), "must name two experiments"),
        (lambda: AnyRule(decides=("a",)), "must name two experiments"),
        (lambda: AnyRule(decides=("a", 1)), "must name two experiments"),
        (lambda: AnyRule(decides=("a", "a")), "twice"),
        (lambda: AnyConfig(stop_when=0.1), "stop_when must be a StopWhen"),
        (lambda: AnyConfig(stop_when=NARROW, repeats=2), "repeats must be 1 with narrower_than"),
        (lambda: AnyConfig(refusals="ignore"), 'refusals must be "error" or "score"'),
        (lambda: AnyConfig(cluster=None), "cluster must be the name of a metadata key"),
        (lambda: AnyConfig(timeout_seconds=0), "timeout_seconds must be more than 0"),
        (lambda: AnyConfig(timeout_seconds=5, timeout_per_sample_ms=5000), "mutually exclusive"),
        (lambda: AnyConfig(timeout_per_sample_ms="5000"), "timeout_per_sample_ms must be a number"),
        (lambda: AnyConfig(timeout_per_sample_ms=True), "timeout_per_sample_ms must be a number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_a_rule_has_its_defaults_and_keeps_its_experiments() -> None:
    assert (NARROW.level, NARROW.every, NARROW.verdicts, NARROW.shuffle) == (0.95, 10, False, True)
    assert AnyRule(decides=["a", "b"]).decides == ("a", "b")
    assert StopWhen(0.1, every=1).every == 1


LEAST = {
    "max_concurrent": 1, "max_retries": 0, "max_same_errors": 0, "repeats": 1, "max_samples": 1, "seed": 0, "warmup": 0,
    "max_cost_usd": 0, "max_output_bytes": 1, "close_seconds": 0, "grace_seconds": 0,
}  # fmt: skip
REAL = {"max_cost_usd", "close_seconds", "grace_seconds"}


@pytest.mark.parametrize("name", LEAST)
def test_every_number_has_a_least_value(name: str) -> None:
    least = LEAST[name]
    assert getattr(AnyConfig(**{name: least}), name) == least
    kind = "a number" if name in REAL else "a whole number"
    for odd in (least - 1, "1", True, math.inf if name in REAL else 1.5, math.nan if name in REAL else None):
        if odd is None and name == "max_samples":
            continue
        with pytest.raises(ConfigurationError, match=f"EvalConfig.{name} must be {kind} of at least {least} "):
            AnyConfig(**{name: odd})
    if name in REAL:
        assert getattr(AnyConfig(**{name: 2.5}), name) == 2.5


def test_settings_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        AnyConfig(5)


def test_the_defaults_are_those_of_the_reference() -> None:
    config = EvalConfig()
    assert (config.max_concurrent, config.timeout_seconds, config.max_retries, config.max_same_errors) == (
        10,
        300,
        0,
        20,
    )
    assert (config.repeats, config.seed, config.warmup, config.refusals, config.cluster) == (
        1,
        0,
        0,
        "error",
        "cluster",
    )
    assert (config.close_seconds, config.grace_seconds, config.max_output_bytes) == (10, 5, 16 << 20)
    assert (config.max_samples, config.max_cost_usd, config.stop_when) == (None, None, None)
    assert (config.stop_on_error, config.strict_cost, config.strict_packages) == (False, False, False)


def test_a_time_limit_in_milliseconds_is_one_in_seconds() -> None:
    config = EvalConfig(timeout_per_sample_ms=1500)
    assert (config.timeout_seconds, config.timeout_per_sample_ms) == (1.5, 1500)
    assert replace(config, seed=3).timeout_seconds == 1.5
    assert replace(config, timeout_seconds=4).timeout_seconds == 4
    assert replace(config, timeout_per_sample_ms=2500).timeout_seconds == 2.5
    with pytest.raises(ConfigurationError, match="mutually exclusive"):
        replace(EvalConfig(timeout_seconds=7), timeout_per_sample_ms=2500.0)


def test_a_configuration_is_read_by_name() -> None:
    config = EvalConfig(seed=4)
    assert {field.name: config[field.name] for field in fields(config)}["seed"] == 4
    with pytest.raises(KeyError):
        config["replace"]


def test_ids_of_traces_follow_from_the_key_and_the_attempt() -> None:
    others = [
        KEY._replace(run_id="other"),
        KEY._replace(experiment="other"),
        KEY._replace(sample_id="other"),
        KEY._replace(repeat=1),
        TrialKey("run\0baseline", "s1", "", 2),
    ]
    assert len({trace_id_of(key, 1) for key in (KEY, *others)} | {trace_id_of(KEY, 2)}) == 7
    trace_id = trace_id_of(KEY, 1)
    assert (len(trace_id), len(trial_span_id(trace_id))) == (16, 8)
    assert trace_id == trace_id_of(TrialKey("run", "baseline", "s1", 2), 1)
    spans = {trial_span_id(trace_id), *(event_span_id(trace_id, sequence) for sequence in range(300))}
    assert len(spans) == 301
    assert traceparent_of(KEY, 1) == f"00-{trace_id.hex()}-{trial_span_id(trace_id).hex()}-01"
    assert len(trace_id_of(KEY._replace(sample_id="\ud800"), 1)) == 16
    # Known values: a trial is the same trace in every version.
    assert traceparent_of(TrialKey("r", "e", "s", 0), 1) == "00-23e230dabd1302d344cc96f34852a988-60120da3ad4ddfa1-01"


def test_a_sample_of_trials_grows_with_its_share() -> None:
    keys = [TrialKey("run", "baseline", f"s{place}", place % 3) for place in range(3000)]
    shares = [{key for key in keys if is_sampled(key, share)} for share in (0.0, 0.1, 0.5, 1.0)]
    assert [round(len(chosen), -2) for chosen in shares] == [0, 300, 1500, 3000]
    assert shares[0] < shares[1] < shares[2] < shares[3]
    assert is_sampled(KEY._replace(sample_id="\ud800"), 1.0)
    is_sampled(KEY._replace(sample_id="\ud800"), 0.5)


class Slot:
    """A place among the running trials."""

    def __init__(self, *, free: bool) -> None:
        self.free = free
        self.steps: list[str] = []

    def release(self) -> bool:
        self.steps.append("release")
        return self.free

    async def acquire(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.steps.append("acquire")


@pytest.mark.parametrize(("free", "steps"), [(True, ["release", "wait", "acquire"]), (False, ["release", "wait"])])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_place_is_given_up_while_a_trial_waits(free: bool, steps: list[str], fails: bool) -> None:
    slot = Slot(free=free)
    token = current_slot.set(slot)
    try:
        async with slot_released():
            slot.steps.append("wait")
            if fails:
                raise LookupError
    except LookupError:
        assert fails
    finally:
        current_slot.reset(token)
    assert slot.steps == steps


async def test_without_a_scheduler_there_is_no_place_to_give_up() -> None:
    assert current_slot.get() is None
    async with slot_released():
        pass
