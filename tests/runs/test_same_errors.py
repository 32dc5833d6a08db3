"""An experiment whose first trials all end in the same programming error is stopped, and can be resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ConfigurationError, Dataset, EvalSuite, Experiment, Sample, exact_match, open_store, task
from fairtrial.cli.running import exit_status
from fairtrial.errors import ModelError, is_programming_error
from fairtrial.trials import EvalConfig

ONE = EvalConfig(max_concurrent=1)


def numbers(count: int) -> Dataset[int, int]:
    return Dataset([Sample(f"q{n}", n, n) for n in range(count)], name="numbers")


def run(fn: Any, count: int = 60, config: EvalConfig = ONE, **rest: Any) -> Any:
    return EvalSuite("s", numbers(count), fn, rest.pop("evaluator", exact_match), config=config, **rest).run_sync(
        store="memory:"
    )


class OwnKeyError(KeyError):
    """A subclass counts."""


def name_error(given: int) -> int:
    return misspelt  # type: ignore[name-defined, no-any-return]  # noqa: F821


def attribute_error(given: int) -> int:
    return given.outputt  # type: ignore[attr-defined, no-any-return]


def type_error(given: int) -> int:
    return len(given)  # type: ignore[arg-type]


def import_error(given: int) -> int:
    import no_such_module_anywhere  # type: ignore[import-not-found]

    return no_such_module_anywhere.value  # type: ignore[no-any-return]


def key_error(given: int) -> int:
    return {"a": given}["b"]


def index_error(given: int) -> int:
    return [given][1]


def own_error(given: int) -> int:
    raise OwnKeyError(given)


async def async_error(given: int) -> int:
    return given.outputt  # type: ignore[attr-defined, no-any-return]


@task(isolate=True)
def isolated_error(given: int) -> int:
    return given.outputt  # type: ignore[attr-defined, no-any-return]


MISTAKES = (name_error, attribute_error, type_error, import_error, key_error, index_error, own_error, async_error)


@pytest.mark.parametrize("fn", [*MISTAKES, isolated_error])
def test_the_first_twenty_equal_programming_errors_stop_the_run(
    fn: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    report = run(fn)
    assert (report.status, report.total, dict(report.errors)) == ("incomplete", 20, {"task_error": 20})
    assert report.run.noted.stopped.startswith(
        "40 of 60 trials have no stored result: the run was stopped because its first 20 trials all ended in the same "
    )
    assert f"(test_same_errors.py:{_line(fn)} in {fn.__name__})" in report.run.noted.stopped
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "run it again with --resume errors (resume='errors'); max_same_errors=0" in said
    code, reason = exit_status(report, fail_under=None, max_error_share=1.0)
    assert int(code) == 4
    assert "the run was stopped because" in reason


def _line(fn: Any) -> int:
    """Return the line of the mistake: the last one, or that of the import."""
    code = fn.__code__
    return int(
        max(line for _, _, line in code.co_lines() if line is not None)
        if fn is not import_error
        else code.co_firstlineno + 1
    )


def connection_error(given: int) -> int:
    raise ConnectionRefusedError


def time_error(given: int) -> int:
    raise TimeoutError


def provider_error(given: int) -> int:
    raise ModelError("overloaded")


def value_error(given: int) -> int:
    raise ValueError("not a mistake that Python names")


def mistake_after_the_network(given: int) -> int:
    try:
        raise ConnectionResetError
    except OSError as error:
        return error.status  # type: ignore[attr-defined, no-any-return]


def provider_as_key_error(given: int) -> int:
    raise KeyError("choices") from ModelError("overloaded")


def two_places(given: int) -> int:
    if given % 2:
        return given.odd  # type: ignore[attr-defined, no-any-return]
    return given.even  # type: ignore[attr-defined, no-any-return]


def mostly(given: int) -> int:
    return given if given == 3 else given.outputt  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fn",
    [
        connection_error,
        time_error,
        provider_error,
        value_error,
        mistake_after_the_network,
        provider_as_key_error,
        two_places,
        mostly,
    ],
)
def test_other_errors_do_not_stop_it(fn: Callable[[int], int]) -> None:
    report = run(fn, 30)
    assert (report.status, report.total) == ("finished", 30)


def test_a_timeout_does_not_stop_it() -> None:
    async def slow(given: int) -> int:
        import anyio

        await anyio.sleep(5)
        return given

    report = run(slow, 4, EvalConfig(timeout_seconds=0.01, close_seconds=0, max_same_errors=2))
    assert (report.status, dict(report.errors)) == ("finished", {"timeout": 4})


@pytest.mark.parametrize(("limit", "executed"), [(5, 5), (1, 1), (0, 60), (60, 60), (100, 60)])
def test_the_number_is_a_setting_and_0_turns_it_off(limit: int, executed: int) -> None:
    report = run(attribute_error, config=EvalConfig(max_concurrent=1, max_same_errors=limit))
    assert report.total == executed
    assert report.status == ("incomplete" if executed < 60 else "finished")


@pytest.mark.parametrize("limit", [-1, 1.5, True, None])
def test_the_number_must_be_whole(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_same_errors must be a whole number of at least 0"):
        EvalConfig(max_same_errors=limit)


def test_other_experiments_go_on() -> None:
    report = run(
        attribute_error,
        experiments=[
            Experiment("bad"),
            Experiment("good", task=lambda given: given),
            Experiment("worse", task=key_error),
        ],
    )
    assert report.status == "incomplete"
    assert (report["bad"].total, report["good"].total, report["worse"].total) == (20, 60, 20)
    assert report["good"].pass_rate == 1.0
    assert "experiment bad was stopped because" in report.run.noted.stopped
    assert "experiment worse was stopped because" in report.run.noted.stopped


def test_an_evaluator_of_the_user_stops_it_too_and_a_built_in_one_does_not() -> None:
    def broken(output: int, expected: int) -> bool:
        return output.outputt  # type: ignore[attr-defined, no-any-return]

    assert (report := run(lambda given: given, evaluator=broken)).status == "incomplete"
    assert dict(report.errors) == {"scorer_error": 20}
    from fairtrial import contains

    assert run(lambda given: given, 30, evaluator=contains).total == 30  # Its TypeError has no line of the user's.


def test_after_the_fix_the_run_is_resumed_with_retried_errors(tmp_path: Path) -> None:
    broken = [True]
    calls: list[int] = []

    def answer(given: int) -> int:
        calls.append(given)
        return given.outputt if broken[0] else given  # type: ignore[attr-defined]

    store = open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    suite = EvalSuite("s", numbers(60), answer, exact_match, config=ONE, version="1")
    first = suite.run_sync(store=store)
    assert (first.status, len(calls)) == ("incomplete", 20)
    again = suite.run_sync(store=store)
    assert (again.run_id, again.status, again.total) == (first.run_id, "incomplete", 40)
    broken[0] = False
    last = suite.run_sync(store=store, resume="errors")
    assert (last.run_id, last.status, last.pass_rate, dict(last.errors)) == (first.run_id, "finished", 1.0, {})


def test_an_experiment_with_scored_trials_is_not_stopped_when_it_is_resumed(tmp_path: Path) -> None:
    calls: list[int] = []

    def breaks_later(given: int) -> int:
        calls.append(given)
        if len(calls) == 5:
            raise ValueError("stop")
        return given if len(calls) < 5 else given.outputt  # type: ignore[attr-defined]

    store = open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    suite = EvalSuite(
        "s",
        numbers(60),
        breaks_later,
        exact_match,
        config=EvalConfig(max_concurrent=1, stop_on_error=True),
        version="1",
    )
    assert suite.run_sync(store=store).total == 5
    suite.config = ONE
    assert (report := suite.run_sync(store=store)).total == 60
    assert report.status == "finished"


def test_a_loop_of_causes_ends() -> None:
    one, other = KeyError("a"), KeyError("b")
    one.__cause__, other.__cause__ = other, one
    assert is_programming_error(one)
    assert not is_programming_error(None)
