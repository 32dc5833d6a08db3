"""The tables of a store, version 6: one description for SQLite and PostgreSQL.

Results are found by (run, ordinal), two integers that grow during a run: every insert lands at the right edge of
its index, so a trial costs the same after a hundred million others. Nothing on that path is indexed by a random key.

Every column that a version adds is nullable or has a server default, and is listed in `ADDED`: that list is the
migration.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

VERSION = 6

metadata = sa.MetaData()

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("run_id", sa.Text, nullable=False, unique=True),
    sa.Column("suite", sa.Text, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("dataset", sa.Integer, nullable=False),
    sa.Column("dataset_name", sa.Text, nullable=False),
    sa.Column("dataset_version", sa.Text, nullable=False),
    sa.Column("dataset_fingerprint", sa.Text, nullable=False),
    sa.Column("dataset_size", sa.BigInteger, nullable=False),
    sa.Column("experiments", sa.Text, nullable=False),
    sa.Column("repeats", sa.Integer, nullable=False),
    sa.Column("params", sa.Text, nullable=False),
    sa.Column("config", sa.Text, nullable=False),
    sa.Column("tags", sa.Text, nullable=False),
    sa.Column("evaluator", sa.Text, nullable=False),
    sa.Column("code_hash", sa.Text, nullable=False),
    sa.Column("parent_run", sa.Text),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("finished_at", sa.Double),
    sa.Column("notes", sa.Text, nullable=False),
    sa.Column("identity", sa.Text),  # What the run is made of, as canonical JSON; NULL before version 2.
    sa.Column("owner", sa.Text),  # The process that executes the run, and the fencing token of its ownership.
    sa.Column("epoch", sa.Integer, nullable=False, server_default="0"),
    sa.Column("heartbeat_at", sa.Double),  # By the database's clock.
    # Whether a result has one of `rows.EXTRA_USAGE`: if none has, they need not be added up. Runs of version 1 may.
    sa.Column("extra_usage", sa.SmallInteger, nullable=False, server_default="1"),
    sa.Column("revision", sa.BigInteger, nullable=False, server_default="0"),  # See `RunRecord.revision`.
    sa.UniqueConstraint("suite", "number"),
    # Numbers are never reused, so that remaining rows of a deleted run cannot belong to a new one.
    sqlite_autoincrement=True,
)

# A fingerprint says nothing about order, and samples are stored by their place. Runs share the samples of a
# fingerprint (owner 0) until one of them turns out to have another order; that run then owns a dataset of its own.
datasets = sa.Table(
    "datasets",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("fingerprint", sa.Text, nullable=False),
    sa.Column("owner", sa.Integer, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("fingerprint", "owner"),
    sqlite_autoincrement=True,
)

samples = sa.Table(
    "samples",
    metadata,
    sa.Column("dataset", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("ordinal", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("input", sa.Text),  # NULL: only the id is known so far.
    sa.Column("expected", sa.Text),
    sa.Column("metadata", sa.Text),
    sa.Column("input_hash", sa.BigInteger),  # Of the canonical input; NULL if it is empty, unknown or of version 1.
    sqlite_with_rowid=False,
)

results = sa.Table(
    "results",
    metadata,
    sa.Column("run", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("ordinal", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("experiment", sa.Integer, nullable=False),
    sa.Column("sample", sa.BigInteger, nullable=False),
    sa.Column("repeat", sa.Integer, nullable=False),
    sa.Column("outcome", sa.SmallInteger, nullable=False),
    sa.Column("timed", sa.SmallInteger, nullable=False),
    sa.Column("passed", sa.SmallInteger),
    sa.Column("value", sa.Double),
    sa.Column("latency_ms", sa.Integer, nullable=False),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("input_tokens", sa.Integer, nullable=False),
    sa.Column("output_tokens", sa.Integer, nullable=False),
    sa.Column("cached_tokens", sa.Integer, nullable=False),
    sa.Column("cost_usd", sa.Double),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("stage", sa.SmallInteger),
    sa.Column("execution", sa.BigInteger, nullable=False),
    sa.Column("metrics", sa.Text),
    sa.Column("reward", sa.Double),  # NULL where it equals `value`.
    sa.Column("verdicts", sa.Text),  # What metrics declare: protocol.split_facts. NULL: nothing.
    sa.Column("judge_cost_usd", sa.Double),
    sa.Column(
        "cache_hits", sa.Integer, nullable=False, server_default="0"
    ),  # Model calls answered by the response cache.
    sa.Column("unpriced_calls", sa.Integer, nullable=False, server_default="0"),  # Calls of the task with unknown cost.
    sa.Column("unpriced_judge_calls", sa.Integer, nullable=False, server_default="0"),
    sa.Column("cut_off_calls", sa.Integer, nullable=False, server_default="0"),  # Answers truncated at a token limit.
    sa.Column("refused_calls", sa.Integer, nullable=False, server_default="0"),  # Calls that were declined.
    sa.Column("unknown_endings", sa.Text),  # Answers by the unknown reason with which they ended, as JSON; NULL: none.
    sa.Column("reasoning_tokens", sa.Integer, nullable=False, server_default="0"),
    sa.Column("cache_write_tokens", sa.Integer, nullable=False, server_default="0"),
    sa.Column("redacted", sa.SmallInteger, nullable=False, server_default="0"),  # Bits of `rows.REDACTED_PARTS`.
    sa.Column(
        "code", sa.SmallInteger, nullable=False, server_default="0"
    ),  # Index into the run's list of code versions.
    sqlite_with_rowid=False,
)

# With a rowid on purpose: in a table without one SQLite keeps only a quarter of a page per row in place.
# The wide columns come last, so reading the others leaves their overflow pages alone.
details = sa.Table(
    "details",
    metadata,
    sa.Column("run", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("ordinal", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("execution", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("error", sa.Text),
    sa.Column("reason", sa.Text),
    sa.Column("score", sa.Text),
    sa.Column("metadata", sa.Text),
    sa.Column("output", sa.Text),
    sa.Column("transcript", sa.LargeBinary),
)

blobs = sa.Table(
    "blobs",
    metadata,
    sa.Column("sha256", sa.Text, primary_key=True),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

labels = sa.Table(
    "labels",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("run", sa.Integer, nullable=False, index=True),
    sa.Column("experiment", sa.Text, nullable=False),
    sa.Column("sample_id", sa.Text, nullable=False),
    sa.Column("repeat", sa.Integer, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("value", sa.Text, nullable=False),
    sa.Column("annotator", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("weight", sa.Double, nullable=False, server_default="1"),
    sqlite_autoincrement=True,
)

# Sessions that are sent from the worker that executes to the one that scores; not part of any run.
session_snapshots = sa.Table(
    "session_snapshots",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("saved_at", sa.Double, nullable=False, index=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

# Batches of model calls at a provider: one row for each, committed before anything is sent (models/batches).
batch_intents = sa.Table(
    "batch_intents",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("run", sa.Integer, nullable=False, index=True),
    sa.Column("provider", sa.Text, nullable=False),
    sa.Column("account", sa.Text, nullable=False),  # A digest of the address and the key.
    sa.Column("base_url", sa.Text, nullable=False),
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("batch_id", sa.Text),  # The provider's; NULL until its reply was received.
    sa.Column("file_id", sa.Text),
    sa.Column("requests", sa.Integer, nullable=False),
    sa.Column("done", sa.Integer),  # As the provider reported; NULL if it did not.
    sa.Column("failed", sa.Integer),
    sa.Column("created_at", sa.Double, nullable=False),
)

# The calls in those batches, by a digest that says whose call it is: a task that is executed again finds its replies.
batch_requests = sa.Table(
    "batch_requests",
    metadata,
    sa.Column("run", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("intent", sa.Text, nullable=False),  # The last batch that it was sent in.
    sa.Column("ordinal", sa.BigInteger, nullable=False),  # Of its trial.
    sa.Column("state", sa.SmallInteger, nullable=False),
    sa.Column("tries", sa.SmallInteger, nullable=False),
    sa.Column("used", sa.SmallInteger, nullable=False),  # Whether the trial has asked for the reply.
    sa.Column("attempt", sa.Integer, nullable=False),  # A trial that is executed again makes calls of its own.
    sa.Column("cost_usd", sa.Double),
    sa.Column("reply", sa.LargeBinary),  # The provider's, or its error; NULL when the trial has been stored.
    sqlite_with_rowid=False,
)

# What the receiver of live traces has acknowledged and no run has yet: a row for each trace in a request.
received_spans = sa.Table(
    "received_spans",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("suite", sa.Text, nullable=False),
    sa.Column("trace", sa.Text, nullable=False),
    sa.Column("received_at", sa.Double, nullable=False),
    sa.Column("factor", sa.Double, nullable=False),  # Of all rates, when its first spans were received.
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.Index("ix_received_spans_trace", "suite", "trace"),
    sqlite_autoincrement=True,
)

# What each version added: new tables, and columns of existing ones, in the order in which a migration adds them. The
# oldest version that can be read is the one before the first entry; nothing older was released.
ADDED: dict[int, tuple[sa.Table | sa.Column[Any], ...]] = {
    5: (batch_intents, batch_requests),
    6: (received_spans,),
}
