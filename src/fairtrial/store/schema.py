"""The tables of a store, version 4: one description for SQLite and PostgreSQL.

Results are found by (run, ordinal), two integers that grow during a run: every insert lands at the right edge of
its index, so a trial costs the same after a hundred million others. Nothing on that path is indexed by a random key.

Every column that a version adds is nullable or has a server default, and is listed in `ADDED`: that list is the
migration.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
)

VERSION = 4

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", Text, nullable=False, unique=True),
    Column("suite", Text, nullable=False),
    Column("number", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("dataset", Integer, nullable=False),
    Column("dataset_name", Text, nullable=False),
    Column("dataset_version", Text, nullable=False),
    Column("dataset_fingerprint", Text, nullable=False),
    Column("dataset_size", BigInteger, nullable=False),
    Column("experiments", Text, nullable=False),
    Column("repeats", Integer, nullable=False),
    Column("params", Text, nullable=False),
    Column("config", Text, nullable=False),
    Column("tags", Text, nullable=False),
    Column("evaluator", Text, nullable=False),
    Column("code_hash", Text, nullable=False),
    Column("parent_run", Text),
    Column("created_at", Double, nullable=False),
    Column("finished_at", Double),
    Column("notes", Text, nullable=False),
    Column("identity", Text),  # What the run is made of, as canonical JSON; NULL before version 2.
    Column("owner", Text),  # The process that executes the run, and the fencing token of its ownership.
    Column("epoch", Integer, nullable=False, server_default="0"),
    Column("heartbeat_at", Double),  # By the database's clock.
    # Whether a result has one of `rows.EXTRA_USAGE`: if none has, they need not be added up. Runs of version 1 may.
    Column("extra_usage", SmallInteger, nullable=False, server_default="1"),
    Column("revision", BigInteger, nullable=False, server_default="0"),  # See `RunRecord.revision`.
    UniqueConstraint("suite", "number"),
    # Numbers are never reused, so that remaining rows of a deleted run cannot belong to a new one.
    sqlite_autoincrement=True,
)

# A fingerprint says nothing about order, and samples are stored by their place. Runs share the samples of a
# fingerprint (owner 0) until one of them turns out to have another order; that run then owns a dataset of its own.
datasets = Table(
    "datasets",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("fingerprint", Text, nullable=False),
    Column("owner", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    UniqueConstraint("fingerprint", "owner"),
    sqlite_autoincrement=True,
)

samples = Table(
    "samples",
    metadata,
    Column("dataset", Integer, primary_key=True, autoincrement=False),
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False),
    Column("input", Text),  # NULL: only the id is known so far.
    Column("expected", Text),
    Column("metadata", Text),
    Column("input_hash", BigInteger),  # Of the canonical input; NULL if it is empty, unknown or of version 1.
    sqlite_with_rowid=False,
)

results = Table(
    "results",
    metadata,
    Column("run", Integer, primary_key=True, autoincrement=False),
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("experiment", Integer, nullable=False),
    Column("sample", BigInteger, nullable=False),
    Column("repeat", Integer, nullable=False),
    Column("outcome", SmallInteger, nullable=False),
    Column("timed", SmallInteger, nullable=False),
    Column("passed", SmallInteger),
    Column("value", Double),
    Column("latency_ms", Integer, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("input_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("cost_usd", Double),
    Column("attempt", Integer, nullable=False),
    Column("stage", SmallInteger),
    Column("execution", BigInteger, nullable=False),
    Column("metrics", Text),
    Column("reward", Double),  # NULL where it equals `value`.
    Column("verdicts", Text),  # What metrics declare: protocol.split_facts. NULL: nothing.
    Column("judge_cost_usd", Double),
    Column("cache_hits", Integer, nullable=False, server_default="0"),  # Model calls answered by the response cache.
    Column("unpriced_calls", Integer, nullable=False, server_default="0"),  # Calls of the task with unknown cost.
    Column("unpriced_judge_calls", Integer, nullable=False, server_default="0"),
    Column("cut_off_calls", Integer, nullable=False, server_default="0"),  # Answers truncated at a token limit.
    Column("refused_calls", Integer, nullable=False, server_default="0"),  # Calls that were declined.
    Column("unknown_endings", Text),  # Answers by the unknown reason with which they ended, as JSON; NULL: none.
    Column("reasoning_tokens", Integer, nullable=False, server_default="0"),
    Column("cache_write_tokens", Integer, nullable=False, server_default="0"),
    Column("redacted", SmallInteger, nullable=False, server_default="0"),  # Bits of `rows.REDACTED_PARTS`.
    Column("code", SmallInteger, nullable=False, server_default="0"),  # Index into the run's list of code versions.
    sqlite_with_rowid=False,
)

# With a rowid on purpose: in a table without one SQLite keeps only a quarter of a page per row in place.
# The wide columns come last, so reading the others leaves their overflow pages alone.
details = Table(
    "details",
    metadata,
    Column("run", Integer, primary_key=True, autoincrement=False),
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("execution", BigInteger, primary_key=True, autoincrement=False),
    Column("error", Text),
    Column("reason", Text),
    Column("score", Text),
    Column("metadata", Text),
    Column("output", Text),
    Column("transcript", LargeBinary),
)

blobs = Table(
    "blobs",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

labels = Table(
    "labels",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run", Integer, nullable=False, index=True),
    Column("experiment", Text, nullable=False),
    Column("sample_id", Text, nullable=False),
    Column("repeat", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("value", Text, nullable=False),
    Column("annotator", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("weight", Double, nullable=False, server_default="1"),
    sqlite_autoincrement=True,
)

# Sessions that are sent from the worker that executes to the one that scores; not part of any run.
session_snapshots = Table(
    "session_snapshots",
    metadata,
    Column("id", Text, primary_key=True),
    Column("saved_at", Double, nullable=False, index=True),
    Column("data", LargeBinary, nullable=False),
)

# What each version added: new tables, and columns of existing ones, in the order in which a migration adds them. The
# oldest version that can be read is the one before the first entry; nothing older was released.
ADDED: dict[int, tuple[Table | Column[Any], ...]] = {}
