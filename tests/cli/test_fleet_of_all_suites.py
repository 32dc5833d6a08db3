"""`fairtrial fleet` from the queue alone: an operator of a shared server does not know the suites."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Sample
from fairtrial.fleet import EvalRequest, connect_broker
from fairtrial.fleet.queues import requests_name
from tests.cli.conftest import Cli


@pytest.fixture(params=["redis", "postgresql", "sqs"])
def queue_url(request: pytest.FixtureRequest) -> str:
    fixtures = {"redis": "redis_url", "postgresql": "pg_url", "sqs": "sqs_url"}
    url: str = request.getfixturevalue(fixtures[request.param])
    return url


def fill(url: str) -> None:
    """A dead letter of suite "billing", and a request of suite "my suite", whose name no mailbox may have."""

    async def work() -> None:
        broker = connect_broker(url)
        try:
            billing: Any = await broker.requests("billing")
            await billing.send(EvalRequest(sample=Sample("unpaid", 1)))
            (message,) = await billing.receive(1, 60, 5)
            await message.dead_letter("it ended its process")
            other: Any = await broker.requests("my suite")
            await other.send(EvalRequest(sample=Sample("s", 1)))
        finally:
            await broker.close()

    asyncio.run(work())


def test_a_queue_without_suites_says_how_they_come(cli: Cli, queue_url: str) -> None:
    done = cli("fleet", "--mailbox", queue_url)
    assert (done.code, done.out) == (0, "")
    assert "no suite has a queue here yet" in done.err
    assert cli("fleet", "--mailbox", queue_url, "--json").json["suites"] == []
    assert cli("fleet", "dlq", "list", "--mailbox", queue_url).err == "no dead letters for any suite\n"


def test_all_suites_with_a_queue_are_shown_with_their_dead_letters(cli: Cli, queue_url: str) -> None:
    fill(queue_url)
    rows = [line.split() for line in cli("fleet", "--mailbox", queue_url).out.splitlines()]
    assert [row[0].partition("-")[0] for row in rows[1:]] == ["billing", "my"]
    assert (rows[1][5], rows[2][1]) == ("1", "1")  # A dead letter; a request that waits.
    head, row = cli("fleet", "dlq", "list", "--mailbox", queue_url).out.splitlines()
    assert head.split() == ["suite", "id", "when", "tries", "sample", "reason"]
    assert row.startswith("billing")
    assert "it ended its process" in row
    (letter,) = cli("fleet", "dlq", "list", "--mailbox", queue_url, "--json").json["letters"]
    assert (letter["suite"], letter["sample_id"]) == ("billing", "unpaid")
    # A suite narrows; it may be spelled as the queue spells it.
    for name in ("my suite", requests_name("my suite").removesuffix(".requests")):
        assert len(cli("fleet", name, "--mailbox", queue_url).out.splitlines()) == 2
    assert cli("fleet", "dlq", "list", "my suite", "--mailbox", queue_url).err == "no dead letters for my suite\n"


def test_purging_without_a_suite_touches_none_that_is_unknown_here(cli: Cli, redis_url: str) -> None:
    fill(redis_url)
    done = cli("fleet", "--purge", "--yes", "--mailbox", redis_url)
    assert done.code == 2
    assert "no suite is given, and none is configured or stored here" in done.err


def test_a_suite_that_is_stored_here_is_shown_once_and_by_its_own_name(cli: Cli, evals: Path, redis_url: str) -> None:
    evals.write_text(evals.read_text().replace('"doubles"', '"my suite"'))
    cli("run", "evals.py", "--quiet")
    fill(redis_url)
    suites = [one["suite"] for one in cli("fleet", "--mailbox", redis_url, "--json").json["suites"]]
    assert suites == ["my suite", "billing"]
