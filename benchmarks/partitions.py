"""Tables of PostgreSQL as they are beside tables partitioned by run: what it takes to fill, read and delete runs.

    python benchmarks/partitions.py [--trials 2000000] [--runs 20] [--empty 1000]

Fills the tables `results` and `details` of a new store with small rows, then the same tables with a partition for each
run, on the server that the tests use. A run is deleted as `fairtrial store delete` does, and by dropping its
partitions. Then the second tables get --empty partitions more, as a store has that is used for a year.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psycopg

from fairtrial import open_store
from fairtrial.store.schema import details, results
from fairtrial.store.sql import SqlStore
from fairtrial.store.upkeep import delete_rows
from tests.servers import PostgresServer

FILL_RESULTS = """
    INSERT INTO results (run, ordinal, experiment, sample, repeat, outcome, timed, passed, value, latency_ms,
        started_at, input_tokens, output_tokens, cached_tokens, attempt, execution)
    SELECT {run}, at, 0, at, 0, 1, 1, 1, 1.0, 900, 1.7e9 + at, 100, 50, 0, 1, at * 7919
    FROM generate_series(1, {trials}) AS at
"""
FILL_DETAILS = """
    INSERT INTO details (run, ordinal, execution, output, transcript)
    SELECT {run}, at, at * 7919, '"an answer of a few words"', decode(repeat('00', 60), 'hex')
    FROM generate_series(1, {trials}) AS at
"""
READ = """
    SELECT r.outcome, d.output FROM results r JOIN details d USING (run, ordinal, execution)
    WHERE r.run = %s AND r.ordinal = %s
"""


class Tables:
    """The two tables, in the schema `public`, or with partitions in another one."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self.connection, self.schema = connection, schema
        connection.execute(f"SET search_path = {schema}")
        self.figures: dict[str, float] = {}

    def execute(self, statement: str) -> None:
        """Execute a statement of this program."""
        self.connection.execute(statement.encode())

    def partition(self, run: int) -> None:
        """Make the partitions of a run."""
        for name in ("results", "details"):
            self.execute(f"CREATE TABLE {name}_{run} PARTITION OF {name} FOR VALUES IN ({run})")

    def drop(self, run: int) -> None:
        """Delete a run by dropping its partitions."""
        self.execute(f"DROP TABLE results_{run}, details_{run}")

    def take(self, title: str, call: Callable[[], object], *, per: float = 1.0) -> None:
        """Measure the seconds of a call and its megabytes of write-ahead log."""
        position = "SELECT pg_current_wal_lsn() - '0/0'"
        wal, began = self._one(position), time.perf_counter()
        call()
        self.figures[f"{title}, s"] = (time.perf_counter() - began) / per
        self.figures[f"{title}, MB of log"] = (self._one(position) - wal) / per / 1e6

    def read_ms(self, runs: list[int], trials: int) -> float:
        """Return the median milliseconds in which one trial is read."""
        taken = []
        for at in range(300):
            began = time.perf_counter()
            found = self.connection.execute(READ.encode(), (runs[at % len(runs)], 1 + at * 7919 % trials)).fetchall()
            taken.append((time.perf_counter() - began) * 1000)
            assert len(found) == 1
        return statistics.median(taken)

    def _one(self, query: str) -> float:
        row = self.connection.execute(query.encode()).fetchone()
        return float(row[0]) if row else 0.0


def measure(tables: Tables, store: SqlStore, options: argparse.Namespace) -> dict[str, float]:
    """Fill the tables, read from them and delete runs."""
    partitioned = tables.schema != "public"
    trials, runs = options.trials // options.runs, list(range(1, options.runs + 1))

    def fill() -> None:
        for run in runs:
            if partitioned:
                tables.partition(run)
            for statement in (FILL_RESULTS, FILL_DETAILS):
                tables.execute(statement.format(run=run, trials=trials))

    def delete() -> None:
        if partitioned:
            tables.drop(runs[0])
        else:
            for table in (details, results):
                delete_rows(store._write, table, runs[0])

    def vacuum() -> None:
        for name in ("results", "details"):
            tables.execute(f"VACUUM ANALYZE {name}")

    tables.take("fill, per 1,000,000 trials", fill, per=options.trials / 1e6)
    vacuum()
    tables.figures["read of one trial, ms"] = tables.read_ms(runs, trials)
    tables.take(f"delete a run of {trials:,}", delete)
    tables.take("vacuum afterwards", vacuum if not partitioned else lambda: None)
    if partitioned:
        more = range(1_000, 1_000 + options.empty)

        def add() -> None:
            for run in more:
                tables.partition(run)

        tables.take("make the partitions of a run", add, per=options.empty)
        tables.figures[f"read of one trial, {options.empty:,} runs more, ms"] = tables.read_ms(runs[1:], trials)
        size = "SELECT pg_total_relation_size('results_1000') + pg_total_relation_size('details_1000')"
        tables.figures["an empty run, kB"] = tables._one(size) / 1000
    return tables.figures


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2_000_000)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--empty", type=int, default=1_000)
    options = parser.parse_args()
    with PostgresServer() as server:
        url = server.new_database()
        store = open_store(url)
        assert isinstance(store, SqlStore)
        with psycopg.connect(url, autocommit=True) as connection:
            plain = measure(Tables(connection, "public"), store, options)
            connection.execute("CREATE SCHEMA parted")
            for name in ("results", "details"):
                like = f"CREATE TABLE parted.{name} (LIKE public.{name} INCLUDING ALL) PARTITION BY LIST (run)"
                connection.execute(like.encode())
            parted = measure(Tables(connection, "parted"), store, options)
        store.close()
    print(f"{options.trials:,} small trials in {options.runs} runs of PostgreSQL\n")
    print(f"{'':46}{'as now':>12}{'partitions':>12}")
    for title in parted:
        cells = "".join(f"{figures[title]:12.3f}" if title in figures else f"{'':>12}" for figures in (plain, parted))
        print(f"{title:46}{cells}")


if __name__ == "__main__":
    main()
