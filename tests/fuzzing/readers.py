"""The readers of foreign bytes, each with valid inputs to start from and a fitting way to change them."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from fairtrial import AnalysisPlan, Dataset, EvalReport, EvalResult, GateRules, Sample, Score, TrialKey, open_store
from fairtrial.base.foreign import ExpansionBudget, expand
from fairtrial.cli.label_file import read_labels
from fairtrial.cli.settings import load_settings
from fairtrial.data.session import ChatMessage, PromptExecuted, Session, TokenUsage, ToolInvoked, restore_session
from fairtrial.errors import BodyError
from fairtrial.fleet.messages import EvalReply, EvalRequest, MainLoopRequest, MainLoopResult
from fairtrial.integrations.tracing.received import otlp_messages, parse_logs, parse_traces
from fairtrial.integrations.tracing.receiver import TraceBuffer
from fairtrial.mailbox.body import seal, unseal
from fairtrial.mailbox.sqs.queues import WireMessage
from fairtrial.reports.figures import column_file
from fairtrial.store.column_cache import cached_columns, cached_totals, column_path
from fairtrial.store.compress import compress, decompress
from fairtrial.store.portable import save_run
from tests.fuzzing.mutators import (
    Mutator,
    in_gzip,
    in_zip,
    in_zstd,
    mutate_bytes,
    mutate_column_file,
    mutate_database,
    mutate_json,
    mutate_request,
    mutate_toml,
)
from tests.integrations.importers.test_arbitrary_fields import FORMATS, import_file
from tests.viewer.conftest import add_running_run, open_session, record, start_server, support_samples, trial

TRACES = Path(__file__).parent.parent / "integrations" / "tracing" / "recorded"
QUEUE_KEY = b"0123456789abcdef0123"


@dataclass(frozen=True)
class Reader:
    """What reads bytes.

    Attributes:
        inputs: Valid inputs.
        read: Reads one input. It returns, or raises an error of ours.
        mutate: Changes inputs.
        file: The name that errors must contain.
    """

    inputs: Sequence[bytes]
    read: Callable[[bytes], object]
    mutate: Mutator = mutate_bytes
    file: str = ""


type MakeReader = Callable[[Path], contextlib.AbstractContextManager[Reader]]
READERS: dict[str, MakeReader] = {}


def reader(name: str) -> Callable[[Callable[[Path], Iterator[Reader]]], None]:
    def add(make: Callable[[Path], Iterator[Reader]]) -> None:
        READERS[name] = contextmanager(make)

    return add


def _import(format: str, path: Path) -> None:
    with TemporaryDirectory() as target:
        import_file(format, path, Path(target, "out"))


def _importer(format: str, name: str, mutate: Mutator = mutate_json) -> None:
    """One file of what an importer reads; the others stay as they are."""

    @reader(f"import {format} {name}".replace("*", "").rstrip())
    def make(folder: Path) -> Iterator[Reader]:
        document, write = FORMATS[format]
        source = folder / "source"
        source.mkdir()
        path = write(document(), source)
        file = next(source.rglob(name)) if name else path

        def read(data: bytes) -> None:
            file.write_bytes(data)
            _import(format, path)

        yield Reader([file.read_bytes()], read, mutate, "source" if path.is_dir() else path.suffix[:5])


PARTS = {
    "inspect": ("*.eval",), "promptfoo": ("",), "pydantic-evals": ("",), "otlp": ("",),
    "lm-eval": ("samples_*", "results_*"), "openai-evals": ("evals*", "runs*", "evalrun*"),
}  # fmt: skip
for _format, _names in PARTS.items():
    for _name in _names:
        _importer(_format, _name, in_zip(mutate_json) if _format == "inspect" else mutate_json)


@reader("import inspect .json")
def _inspect_json(folder: Path) -> Iterator[Reader]:
    document = FORMATS["inspect"][0]()
    path = folder / "log.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _import("inspect", path)

    yield Reader(
        [json.dumps({**document["header"], "samples": document["samples"]}).encode()], read, mutate_json, "log.json"
    )


ROWS: list[dict[str, Any]] = [
    {"id": "a", "input": "1 + 1", "expected": "2", "metadata": {"level": 1}},
    {"id": "b", "input": {"q": ["x", 2.5]}, "expected": None},
]
CASES = """name: quiz
cases:
- &one {name: a, inputs: 1, expected_output: 2026-01-01, metadata: {k: [1, 2]}}
- <<: *one
  name: b
"""
TESTS = """tests:
- vars: {q: x}
  assert:
  - {type: equals, value: 0x10}
- description: d
  vars: &v
    a: [1, 2.5, null]
"""
CSV = 'id,input,expected\na,1 + 1,2\nb,"two\nlines, and ""quotes""",\n'


def _parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    target = BytesIO()
    table = pyarrow.table({"id": ["a", "b"], "input": ["x", "y"], "expected": [None, "z"],
                           "metadata": [{"k": [1, 2], "d": {"e": b"x"}}, None],
                           "when": pyarrow.array([0, None], pyarrow.timestamp("ns"))})  # fmt: skip
    pyarrow.parquet.write_table(table, target)
    return target.getvalue()


def _dataset(suffix: str, inputs: Callable[[], Sequence[str | bytes]], mutate: Mutator, **options: Any) -> None:
    @reader(f"dataset {options.get('format') or 'own'}{' lazy' if options.get('lazy') else ''} {suffix}")
    def make(folder: Path) -> Iterator[Reader]:
        path = folder / f"data{suffix}"

        def read(data: bytes) -> None:
            path.write_bytes(data)
            for sample in Dataset.load(path, **options):
                repr(sample)

        yield Reader([one if isinstance(one, bytes) else one.encode() for one in inputs()], read, mutate, path.name)


_lines = "".join(json.dumps(row) + "\n" for row in ROWS)
_dataset(".jsonl", lambda: [_lines], mutate_json)
_dataset(".jsonl", lambda: [_lines], mutate_json, lazy=True)
_dataset(".json", lambda: [json.dumps(ROWS)], mutate_json)
_dataset(".csv", lambda: [CSV], mutate_bytes)
_dataset(
    ".tsv",
    lambda: [CSV.replace(",", "\t").replace("input", "inputs").replace("expected", "outputs")],
    mutate_bytes,
    format="langsmith",
)
_dataset(".parquet", lambda: [_parquet()], mutate_bytes)
_dataset(".yaml", lambda: [CASES], mutate_bytes, format="pydantic-evals")
_dataset(".yaml", lambda: [TESTS], mutate_bytes, format="promptfoo")
_dataset(
    ".jsonl",
    lambda: ['{"user_input": "x", "reference": "y", "retrieved_contexts": ["a"]}\n'],
    mutate_json,
    format="ragas",
)
_dataset(".jsonl", lambda: ['{"item": {"q": 1}, "sample": {"output_text": "x"}}\n'], mutate_json, format="openai")


@reader("splits")
def _splits(folder: Path) -> Iterator[Reader]:
    path = folder / "data.splits.jsonl"
    data: Dataset[str, Any] = Dataset([Sample(f"s{n}", f"question {n * 7919}", None, {"k": n % 3}) for n in range(8)])
    data.split(by="k", file=path)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        repr(data.split(by="k", file=path))

    yield Reader([path.read_bytes()], read, mutate_json, path.name)


def _snapshot() -> bytes:
    session = Session(tags={"run": "r"})
    session.record(ChatMessage("user", "2 + 2?"))
    session.record(ToolInvoked("add", {"a": 2}, 4, True, duration_ms=3.0))
    session.record(PromptExecuted(model="m", usage=TokenUsage(10, 5, cost_usd=0.1), duration_ms=2.0), actor="judge")
    return session.snapshot()


def _messages() -> dict[type[Any], Any]:
    key = TrialKey("r", "baseline", "s", 0)
    sample: Sample[Any, Any] = Sample("s", {"q": [1]}, "e", {"m": 1})
    result: EvalResult = EvalResult(
        key=key, ordinal=0, outcome="scored", score=Score(0.5, False, "why"), output={"a": 1}, snapshot=_snapshot()
    )
    return {
        EvalRequest: EvalRequest(key, sample, params={"t": 1}, tags={"a": "b"}, echo=True),
        EvalReply: EvalReply(result, 0, sample, "id", "w"),
        MainLoopRequest: MainLoopRequest("x", "id", {"p": 1}, key=key, metadata={"a": 1}, timeout_seconds=3.0),
        MainLoopResult: MainLoopResult("id", {"a": 1}, None, _snapshot(), "sid", TokenUsage(1, 2)),
    }


def _message(kind: type[Any]) -> None:
    @reader(f"message {kind.__name__}")
    def make(_folder: Path) -> Iterator[Reader]:
        body = _messages()[kind].to_wire()
        yield Reader([body], lambda data: kind.from_wire(unseal(data, None, "box", "")), mutate_json)


for _kind in (EvalRequest, EvalReply, MainLoopRequest, MainLoopResult):
    _message(_kind)


@reader("message sealed")
def _sealed(_folder: Path) -> Iterator[Reader]:
    body = seal(_messages()[EvalReply].to_wire() * 20, QUEUE_KEY, "box", "")

    def read(data: bytes) -> None:
        for key in (None, QUEUE_KEY):
            with contextlib.suppress(BodyError):
                unseal(data, key, "box", "")

    yield Reader([body, seal(b"x" * 9000, None, "box", "")], read)


@reader("message of SQS")
def _sqs(_folder: Path) -> Iterator[Reader]:
    messages = [WireMessage.of(b"{}", "back"), WireMessage.of(b"\0\xff", ""), WireMessage.of_claim("ab" * 32, "")]

    def read(data: bytes) -> None:
        message = WireMessage.loads(data.decode("utf-8", "surrogateescape"))
        if message.form != "claim":
            message.body()
        message.dumps()

    yield Reader([message.dumps().encode() for message in messages], read, mutate_json)


@reader("transcript")
def _transcript(_folder: Path) -> Iterator[Reader]:
    def read(data: bytes) -> None:
        view = restore_session(decompress(data))
        for kind in (ChatMessage, PromptExecuted, ToolInvoked):
            view[kind].all()
        repr(view.trajectory.messages)

    yield Reader([compress(_snapshot()), _snapshot()], read, in_zstd(mutate_json))


def _spans(is_json: bool) -> Iterator[Reader]:
    from google.protobuf.json_format import Parse

    documents = [line for file in sorted(TRACES.glob("*.jsonl")) for line in file.read_bytes().splitlines()[:2]]
    documents = [line for line in documents if b"resourceSpans" in line and len(line) < 30_000]
    if not is_json:
        kind = otlp_messages("reading").traces
        documents = [
            Parse(_base64_ids(line), kind(), ignore_unknown_fields=True).SerializeToString() for line in documents
        ]

    def read(data: bytes) -> None:
        body = expand(data, "gzip", ExpansionBudget("the body", 1 << 24)) if data[:2] == b"\x1f\x8b" else data
        spans = parse_traces(body, is_json=is_json)
        logs = parse_logs(body, is_json=is_json) if is_json or not spans else []
        buffer = TraceBuffer(wait_seconds=0.001, silence_seconds=0.0, max_spans=1000)
        pending = [buffer.expect(trace, "0" * 16) for trace in sorted({span.trace_id for span in spans})[:3]]
        buffer.add(spans, logs)
        for one in pending:
            one.collected()

    change = mutate_json if is_json else mutate_bytes
    compressed = [gzip.compress(one, 1) for one in documents[:3]]

    def mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        return (in_gzip(change) if data[:2] == b"\x1f\x8b" else change)(random, data, others)

    yield Reader([*documents, *compressed], read, mutate)


def _base64_ids(line: bytes) -> bytes:
    import base64

    return re.sub(rb'"(traceId|spanId|parentSpanId)": ?"([0-9a-fA-F]+)"', lambda found: b'"%s": "%s"' % (
        found[1], base64.b64encode(bytes.fromhex(found[2].decode()))), line)  # fmt: skip


reader("spans as JSON")(lambda _folder: _spans(True))
reader("spans as protobuf")(lambda _folder: _spans(False))


def small_store(path: Path) -> Any:
    store = open_store(path)
    run = store.create_run(record("support-run-1", size=4))
    store.commit(run.run_id, [trial(run, ordinal) for ordinal in range(run.planned)], support_samples(4))
    store.update_run(run.run_id, status="finished", finished_at=1010.0)
    return store


@reader("saved run")
def _saved_run(folder: Path) -> Iterator[Reader]:
    store = small_store(folder / "runs.db")
    save_run(store, "support-run-1", folder / "valid.db")
    store.close()
    path = folder / "saved.db"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        report = EvalReport.load(path)
        try:
            str(report)
            for result in report.results:
                repr((result.sample, result.trajectory, result.score))
        finally:
            report.store.close()

    yield Reader([(folder / "valid.db").read_bytes()], read, mutate_database)


@reader("column file")
def _columns(folder: Path) -> Iterator[Reader]:
    store = small_store(folder / "runs.db")
    run = store.get_run("support-run-1")
    column_file.write_columns(store, run)
    path = column_path(store.identity, run.run_id)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        cached_columns(store.identity)
        cached_totals(store.identity, run)
        column_file.forget()
        column_file.open_columns(store, run)

    yield Reader([path.read_bytes()], read, mutate_column_file)
    store.close()


SETTINGS = """[tool.fairtrial]\nstore = "runs.db"\nsuites = ["a.py", "b"]\nconcurrency = 4\nmax-error-share = 0.5\n
cache = "read"\nlog-format = "json"\n[tool.fairtrial.prices.m]\ninput = 1.5\noutput = 2\n
[tool.fairtrial.gate]\nfloors = {value = 0.5}\nslices = [{by = "kind", min_pass_rate = 0.5}]\n
[tool.fairtrial.plan]\nprimary = "value"\nmargins = {value = 0.1}\nslices = ["kind"]\nsamples = 40\n"""


@reader("settings")
def _settings(folder: Path) -> Iterator[Reader]:
    path = folder / "pyproject.toml"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        load_settings(folder, {})
        if b"[tool.fairtrial.gate" in data:
            GateRules.load(path, "tool.fairtrial.gate")
        if b"[tool.fairtrial.plan" in data:
            AnalysisPlan.load(path, "tool.fairtrial.plan")

    yield Reader(
        [SETTINGS.encode(), *(line.encode() for line in SETTINGS.split("\n\n"))], read, mutate_toml, "pyproject.toml"
    )


def _labels(suffix: str, content: str, mutate: Mutator) -> None:
    @reader(f"labels {suffix}")
    def make(folder: Path) -> Iterator[Reader]:
        store = small_store(folder / "runs.db")
        report = EvalReport(store, store.get_run("support-run-1"))
        path = folder / f"labels{suffix}"

        def read(data: bytes) -> None:
            path.write_bytes(data)
            read_labels(path, report.parts)

        yield Reader([content.encode()], read, mutate, path.name)
        store.close()


_labels(
    ".csv",
    "id,label,experiment,repeat,weight,annotator\nq01,true,baseline,0,1.5,me\nq02,0.5,careful,,,\n",
    mutate_bytes,
)
_labels(".jsonl", '{"id": "q01", "label": true, "experiment": "baseline", "repeat": 0, "weight": 2}\n', mutate_json)

SIDES = "a=support@1:baseline&b=support@1:careful"
PATHS = [
    "", "history", f"compare?{SIDES}", f"compare/sample?{SIDES}&sample=q01", "support@1", "support@1/trials.csv",
    "support@1/trials?q=passed%3Dfalse&sort=value", "support@1/rates?q=kind", "support@1/t/baseline/q03",
    "support@1/t/baseline/q03/0?form=markdown", "support@1/review", "support@1/calibration", "endless@1", "review",
    "login?token=x&run=y", "static/x/view.css", f"support@1/blob/{'ab' * 32}",
]  # fmt: skip
FORM = "form_secret=x&name=r&count=10&seed=1"


@reader("viewer")
def _viewer(folder: Path) -> Iterator[Reader]:
    """Requests as bytes on a socket, with the session of the owner."""
    store = small_store(folder / "runs.db")
    add_running_run(store)
    server, thread = start_server(folder / "runs.db", user="me")
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    cookie, port = open_session(server), server.port
    head = f"Host: 127.0.0.1:{port}\r\nCookie: {cookie}\r\nAccept: text/html\r\n"
    inputs = [f"GET /@prefix@/{path} HTTP/1.1\r\n{head}\r\n" for path in PATHS]
    origin = f"{head}Origin: http://127.0.0.1:{port}\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    inputs += [f"POST /@prefix@/{path} HTTP/1.1\r\n{origin}Content-Length: {len(FORM)}\r\n\r\n{FORM}"
               for path in ("support@1/review", "support@1/picked", "support@1/comment", "logout2")]  # fmt: skip

    def read(data: bytes) -> None:
        if b"logout" in data:
            return  # It would end the session that all others need.
        address = ("127.0.0.1", port or 0)
        with contextlib.suppress(ConnectionError), socket.create_connection(address, timeout=20) as connection:
            connection.sendall(data.replace(b"@prefix@", server.access.prefix.encode()))
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
            if answer[:10] in (b"HTTP/1.1 5", b"HTTP/1.0 5"):
                raise AssertionError(answer[:600].decode("latin-1"))

    yield Reader([one.encode() for one in inputs], read, mutate_request)
    server.stop()
    thread.join(60)
    store.close()
