CREATE TABLE batch_intents (
  id TEXT NOT NULL,
  run INTEGER NOT NULL,
  provider TEXT NOT NULL,
  account TEXT NOT NULL,
  base_url TEXT NOT NULL,
  endpoint TEXT NOT NULL,
  model TEXT NOT NULL,
  state TEXT NOT NULL,
  batch_id TEXT,
  file_id TEXT,
  requests INTEGER NOT NULL,
  done INTEGER,
  failed INTEGER,
  created_at DOUBLE NOT NULL,
  PRIMARY KEY (id)
);

CREATE INDEX ix_batch_intents_run ON batch_intents (run);

CREATE TABLE batch_requests (
  run INTEGER NOT NULL,
  "key" TEXT NOT NULL,
  intent TEXT NOT NULL,
  ordinal BIGINT NOT NULL,
  state SMALLINT NOT NULL,
  tries SMALLINT NOT NULL,
  used SMALLINT NOT NULL,
  attempt INTEGER NOT NULL,
  cost_usd DOUBLE,
  reply BLOB,
  PRIMARY KEY (run, "key")
)
 WITHOUT ROWID;

CREATE TABLE blobs (
  sha256 TEXT NOT NULL,
  size BIGINT NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (sha256)
);

CREATE TABLE datasets (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  fingerprint TEXT NOT NULL,
  owner INTEGER NOT NULL,
  name TEXT NOT NULL,
  version TEXT NOT NULL,
  size BIGINT NOT NULL,
  UNIQUE (fingerprint, owner)
);

CREATE TABLE details (
  run INTEGER NOT NULL,
  ordinal BIGINT NOT NULL,
  execution BIGINT NOT NULL,
  error TEXT,
  reason TEXT,
  score TEXT,
  metadata TEXT,
  output TEXT,
  transcript BLOB,
  PRIMARY KEY (run, ordinal, execution)
);

CREATE TABLE labels (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  run INTEGER NOT NULL,
  experiment TEXT NOT NULL,
  sample_id TEXT NOT NULL,
  repeat INTEGER NOT NULL,
  name TEXT NOT NULL,
  value TEXT NOT NULL,
  annotator TEXT NOT NULL,
  at DOUBLE NOT NULL,
  weight DOUBLE DEFAULT '1' NOT NULL
);

CREATE INDEX ix_labels_run ON labels (run);

CREATE TABLE meta (
  name TEXT NOT NULL,
  value TEXT NOT NULL,
  PRIMARY KEY (name)
);

CREATE TABLE received_spans (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  suite TEXT NOT NULL,
  trace TEXT NOT NULL,
  received_at DOUBLE NOT NULL,
  factor DOUBLE NOT NULL,
  data BLOB NOT NULL
);

CREATE INDEX ix_received_spans_trace ON received_spans (suite, trace);

CREATE TABLE results (
  run INTEGER NOT NULL,
  ordinal BIGINT NOT NULL,
  experiment INTEGER NOT NULL,
  sample BIGINT NOT NULL,
  repeat INTEGER NOT NULL,
  outcome SMALLINT NOT NULL,
  timed SMALLINT NOT NULL,
  passed SMALLINT,
  value DOUBLE,
  latency_ms INTEGER NOT NULL,
  started_at DOUBLE NOT NULL,
  input_tokens INTEGER NOT NULL,
  output_tokens INTEGER NOT NULL,
  cached_tokens INTEGER NOT NULL,
  cost_usd DOUBLE,
  attempt INTEGER NOT NULL,
  stage SMALLINT,
  execution BIGINT NOT NULL,
  metrics TEXT,
  reward DOUBLE,
  verdicts TEXT,
  judge_cost_usd DOUBLE,
  cache_hits INTEGER DEFAULT '0' NOT NULL,
  unpriced_calls INTEGER DEFAULT '0' NOT NULL,
  unpriced_judge_calls INTEGER DEFAULT '0' NOT NULL,
  cut_off_calls INTEGER DEFAULT '0' NOT NULL,
  refused_calls INTEGER DEFAULT '0' NOT NULL,
  unknown_endings TEXT,
  reasoning_tokens INTEGER DEFAULT '0' NOT NULL,
  cache_write_tokens INTEGER DEFAULT '0' NOT NULL,
  redacted SMALLINT DEFAULT '0' NOT NULL,
  code SMALLINT DEFAULT '0' NOT NULL,
  PRIMARY KEY (run, ordinal)
)
 WITHOUT ROWID;

CREATE TABLE runs (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  run_id TEXT NOT NULL,
  suite TEXT NOT NULL,
  number INTEGER NOT NULL,
  status TEXT NOT NULL,
  dataset INTEGER NOT NULL,
  dataset_name TEXT NOT NULL,
  dataset_version TEXT NOT NULL,
  dataset_fingerprint TEXT NOT NULL,
  dataset_size BIGINT NOT NULL,
  experiments TEXT NOT NULL,
  repeats INTEGER NOT NULL,
  params TEXT NOT NULL,
  config TEXT NOT NULL,
  tags TEXT NOT NULL,
  evaluator TEXT NOT NULL,
  code_hash TEXT NOT NULL,
  parent_run TEXT,
  created_at DOUBLE NOT NULL,
  finished_at DOUBLE,
  notes TEXT NOT NULL,
  identity TEXT,
  owner TEXT,
  epoch INTEGER DEFAULT '0' NOT NULL,
  heartbeat_at DOUBLE,
  extra_usage SMALLINT DEFAULT '1' NOT NULL,
  revision BIGINT DEFAULT '0' NOT NULL,
  UNIQUE (suite, number),
  UNIQUE (run_id)
);

CREATE TABLE samples (
  dataset INTEGER NOT NULL,
  ordinal BIGINT NOT NULL,
  id TEXT NOT NULL,
  input TEXT,
  expected TEXT,
  metadata TEXT,
  input_hash BIGINT,
  PRIMARY KEY (dataset, ordinal)
)
 WITHOUT ROWID;

CREATE TABLE session_snapshots (
  id TEXT NOT NULL,
  saved_at DOUBLE NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (id)
);

CREATE INDEX ix_session_snapshots_saved_at ON session_snapshots (saved_at);
