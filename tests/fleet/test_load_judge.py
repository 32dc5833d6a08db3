"""The SQL that judges an hour of load finds each kind of damage."""

from __future__ import annotations

import psycopg
import pytest

from fairtrial import Dataset, EvalSuite, Sample, ToolInvoked, TrialContext, exact_match
from tests.fleet.load import JUDGEMENTS, judge

DAMAGE = {
    "unfinished runs": ["UPDATE runs SET status = 'running'"],
    "incomplete runs": ["DELETE FROM details WHERE ordinal = 1", "DELETE FROM results WHERE ordinal = 1"],
    "trials stored twice": [
        "ALTER TABLE results DROP CONSTRAINT results_pkey",
        "INSERT INTO results SELECT * FROM results WHERE ordinal = 1",
    ],
    "wrong results": ["UPDATE details SET output = '7' WHERE ordinal = 1"],
    "wrong samples": ["DELETE FROM samples WHERE ordinal = 1"],
    "trials with details twice": [
        "CREATE TABLE other AS SELECT * FROM details WHERE ordinal = 1",
        "UPDATE other SET execution = execution + 1",
        "INSERT INTO details SELECT * FROM other",
    ],
    "details without a result": ["DELETE FROM results WHERE ordinal = 1"],
}


async def double(number: int, ctx: TrialContext) -> int:
    ctx.session.record(ToolInvoked("read", {"number": number}, "text"))
    return 2 * number


@pytest.mark.postgres
def test_every_kind_of_damage_to_a_store_is_found(pg_url: str) -> None:
    samples = [Sample(f"s{number}", number, 2 * number) for number in range(4)]
    EvalSuite("judged", Dataset(samples, name="numbers"), double, exact_match).run_sync(store=pg_url)
    assert set(DAMAGE) == set(JUDGEMENTS)
    with psycopg.connect(pg_url) as database:
        assert judge(database) == dict.fromkeys(JUDGEMENTS, 0)
        for name, statements in DAMAGE.items():
            for statement in statements:
                database.execute(statement.encode())
            assert judge(database)[name] > 0, name
            database.rollback()
