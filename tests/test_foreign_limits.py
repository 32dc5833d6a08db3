"""Data of others expands only as far as a budget allows: bytes, ratio, members, depth, references, rows."""

from __future__ import annotations

import gzip
import io
import json
import resource
import struct
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zstandard

from fairtrial import Dataset, open_store
from fairtrial.base.codec import parse_foreign_json
from fairtrial.base.foreign import SETTING, ExpansionBudget, Method, check_limit, expand, limit_factor
from fairtrial.base.plugins import plugin_names
from fairtrial.cli.app import invoke
from fairtrial.errors import CodecError, ConfigurationError, DataError, DatasetError, LimitExceededError, StoreError
from fairtrial.integrations.importers.inspect_log import InspectLogs
from fairtrial.runs.imported import load_importer, store_run
from fairtrial.store.compress import decompress
from tests.integrations.importers.project import CRITERIA, answers, eval_of, run_of, write_archive

MIB = 1 << 20
HEADER = {"version": 2, "status": "success", "eval": {"task": "quiz", "model": "m", "eval_id": "e"}}
ID = "0123456789abcdef" * 2


def packed(content: bytes, method: Method) -> bytes:
    if method == "zstd":
        return zstandard.ZstdCompressor().compress(content)
    wbits = {"gzip": 31, "zlib": 15, "deflate": -15}[method]
    stream = zlib.compressobj(1, zlib.DEFLATED, wbits)
    return stream.compress(content) + stream.flush()


@pytest.mark.parametrize("method", ["gzip", "zlib", "deflate", "zstd"])
@pytest.mark.parametrize("content", [b"", b"x", b"text " * 100_000])
def test_what_fits_is_returned_whole(method: Method, content: bytes) -> None:
    assert expand(packed(content, method), method, ExpansionBudget("it", len(content))) == content
    for data in (packed(content, method)[:-1] if content else b"no", b"nonsense"):
        with pytest.raises(DataError, match="it cannot be read"):
            expand(data, method, ExpansionBudget("it", MIB))


@pytest.mark.parametrize("method", ["gzip", "zlib", "deflate", "zstd"])
def test_a_bomb_is_refused_without_being_held_in_memory(method: Method) -> None:
    bomb = packed(bytes(40 * MIB), method)
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceededError, match=rf"the bomb must have at most 1,048,576 bytes.*\n.*{SETTING}"):
            expand(bomb, method, ExpansionBudget("the bomb", MIB))
        assert tracemalloc.get_traced_memory()[1] < 12 * MIB
    finally:
        tracemalloc.stop()


def test_a_frame_that_hides_its_size_is_counted_while_it_expands() -> None:
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    frame = stream.compress(bytes(64 * MIB)) + stream.flush()
    with pytest.raises(LimitExceededError, match="must have at most 1,048,576 bytes"):
        expand(frame, "zstd", ExpansionBudget("it", MIB))
    assert expand(frame, "zstd", ExpansionBudget("it", 64 * MIB)) == bytes(64 * MIB)
    two = packed(b"a", "zstd") + packed(b"b", "zstd")
    assert expand(two, "zstd", ExpansionBudget("it", 2)) == b"ab"
    with pytest.raises(LimitExceededError):
        expand(two, "zstd", ExpansionBudget("it", 1))


def test_a_frame_that_claims_too_much_is_refused_before_it_expands() -> None:
    frame = b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + (2**50).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(LimitExceededError, match="must have at most 1,048,576 bytes"):
        expand(frame, "zstd", ExpansionBudget("it", MIB))


def test_many_empty_streams_are_refused_at_once() -> None:
    body = gzip.compress(b"") * 100_000
    with pytest.raises(LimitExceededError, match="at most 100 compressed streams"):
        expand(body, "gzip", ExpansionBudget("the body", MIB, "TraceReceiver(max_body_bytes=...)"))
    few = b"".join(gzip.compress(b"%d" % n) for n in range(10))
    assert expand(few, "gzip", ExpansionBudget("it", 10)) == b"0123456789"


def test_expansion_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ExpansionBudget("it", MIB)
    monkeypatch.setattr("fairtrial.base.foreign.time.monotonic", lambda: budget._end + 1)
    with pytest.raises(LimitExceededError, match="within 120 seconds"):
        expand(packed(b"x", "gzip"), "gzip", budget)


def test_one_setting_raises_the_limits_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LimitExceededError, match=rf"x must have at most 5 rows \(got 6\)\n.*{SETTING}"):
        check_limit("x", "rows", 6, 5)
    monkeypatch.setenv(SETTING, "2.5")
    check_limit("x", "rows", 12, 5)
    for wrong in ("many", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(SETTING, wrong)
        with pytest.raises(ConfigurationError, match=f"{SETTING} must be a number above 0"):
            limit_factor()


def test_a_stored_transcript_expands_within_the_same_budget() -> None:
    with pytest.raises(StoreError, match=rf"a stored transcript must have at most 268,435,456 bytes.*\n.*{SETTING}"):
        decompress(packed(bytes(257 * MIB), "zstd"))


def sample(**changes: Any) -> dict[str, Any]:
    return {
        "id": 1, "epoch": 1, "input": "?", "target": "t", "scores": {"s": {"value": "C"}}, "messages": [],
        "output": {"completion": "a"}, **changes,
    }  # fmt: skip


def log(path: Path, *samples: Any, members: Mapping[str, bytes] | None = None) -> Path:
    """A log with these samples, as objects or as the bytes of their JSON."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for place, one in enumerate(samples):
            archive.writestr(f"samples/{place}.json", one if isinstance(one, bytes) else json.dumps(one))
        for name, content in {"header.json": json.dumps(HEADER).encode(), **(members or {})}.items():
            archive.writestr(name, content)
    return path


def zstd_log(path: Path, header: bytes) -> Path:
    """A log whose header is a Zstandard frame and says nothing true about its size."""
    body = io.BytesIO()
    directory = b""
    for name, content, method in ((b"header.json", header, 93),):
        offset, facts = body.tell(), (0, len(content), 0xFFFFFF, len(name), 0)
        body.write(struct.pack("<4s5H3I2H", b"PK\3\4", 63, 0, method, 0, 33, *facts) + name + content)
        directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", 63, 63, 0, method, 0, 33, *facts, 0, 0, 0, 0, offset) + name
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(directory), body.tell(), 0)
    path.write_bytes(body.getvalue() + directory + end)
    return path


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@pytest.mark.parametrize("kind", ["deflate", "zstd"])
def test_a_log_that_is_a_bomb_is_refused_by_name_and_setting(tmp_path: Path, kind: str) -> None:
    spaces = b"{" + b" " * (150 * MIB) + b"}"
    if kind == "zstd":
        path = zstd_log(tmp_path / "bomb.eval", packed(spaces, "zstd"))
    else:
        path = log(tmp_path / "bomb.eval", sample(), members={"header.json": spaces})
    del spaces
    before = peak_mb()
    with pytest.raises(LimitExceededError, match=rf"bomb\.eval: header\.json must have at most .*\n.*{SETTING}"):
        InspectLogs().read(path)
    assert peak_mb() - before < 200


def test_members_of_a_log_are_limited_together_and_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log(tmp_path / "log.eval", *(sample(id=n, input="x" * 50_000) for n in range(20)))
    assert len(InspectLogs().read(path).suites[0].dataset) == 20  # Read three times, counted once.
    monkeypatch.setattr("fairtrial.integrations.importers.inspect_log._FILE_BYTES", 500_000)
    with pytest.raises(LimitExceededError, match=rf"log\.eval must have at most [\d,]+ bytes.*\n.*{SETTING}"):
        InspectLogs().read(path)
    monkeypatch.setenv(SETTING, "3")
    assert InspectLogs().read(path).suites
    monkeypatch.setattr("fairtrial.integrations.importers.inspect_log._MAX_MEMBERS", 5)
    with pytest.raises(LimitExceededError, match=r"log\.eval must have at most 15 members \(got 21\)"):
        InspectLogs().read(path)


def test_a_text_that_is_referred_to_again_and_again_is_limited(tmp_path: Path) -> None:
    attached = {ID: "x" * MIB}
    path = log(tmp_path / "log.eval", sample(input=f"attachment://{ID} " * 200, attachments=attached))
    with pytest.raises(LimitExceededError, match=rf"log\.eval: the attachments of sample 1 must .*\n.*{SETTING}"):
        InspectLogs().read(path)
    # What a model was sent repeats the conversation at every call, and is not imported.
    calls = [{"event": "model", "model": "m", "input": [f"attachment://{ID}"] * 50, "output": {}} for _ in range(4)]
    path = log(tmp_path / "calls.eval", sample(input=f"attachment://{ID}", events=calls, attachments=attached))
    (suite,) = InspectLogs().read(path).suites
    assert suite.dataset[0].input == attached[ID]


ODD_SAMPLES: dict[str, tuple[Any, str | None]] = {
    "a score of 400 digits": (sample(scores={"s": {"value": 10**400}}), r"at most 308 digits \(got 401\)"),
    "tokens of 400 digits": (sample(model_usage={"m": {"input_tokens": 10**400}}), "at most 308 digits"),
    "a time of 400 digits": (sample(total_time=10**400), "at most 308 digits"),
    "an id of 4,000 digits": (b'{"id":' + b"9" * 4000 + b',"epoch":1}', "at most 308 digits"),
    "an epoch of 5,000 digits": (b'{"id":1,"epoch":' + b"1" * 5000 + b"}", "at most 308 digits"),
    "100,000 levels": (b'{"id":1,"epoch":1,"input":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 200"),
    "900 levels": (b'{"id":1,"epoch":1,"input":' + b"[" * 900 + b"]" * 900 + b"}", "nested more than 200 levels deep"),
    "190 levels": (b'{"id":1,"epoch":1,"input":' + b"[" * 190 + b"]" * 190 + b"}", None),
    "epoch 2,000,000,000": (sample(epoch=2_000_000_000), r"at most 10,000 planned trials \(got 2,000,000,000\)"),
    "epoch 10^18": (sample(epoch=10**18), "planned trials"),
    "epoch -5": (sample(epoch=-5), None),
    "epoch true": (sample(epoch=True), None),
    "negative tokens": (sample(model_usage={"m": {"input_tokens": -5}}), None),
    "a time before time": (sample(total_time=-1e300), None),
    "an endless time": (sample(total_time=1e308), None),
    "the year 1": (sample(started_at="0001-01-01T00:00:00"), None),
    "the year 9999": (sample(started_at="9999-12-31T23:59:59+00:00"), None),
    "an id of a megabyte": (sample(id="x" * MIB), None),
    "half a character": (b'{"id":"\\ud800","epoch":1,"input":"\\udfff","scores":{"s":{"value":"C"}}}', None),
    "a null character": (b'{"id":"a\\u0000b","epoch":1,"input":"\\u0000","scores":{"s":{"value":"C"}}}', None),
    "not a number": (b'{"id":1,"epoch":1,"input":"i","scores":{"s":{"value":NaN}}}', None),
    "huge scores": (sample(scores={"s": {"value": 1e308}, "t": {"value": -1e308}}), None),
}


@pytest.mark.parametrize("name", ODD_SAMPLES)
def test_an_odd_sample_is_stored_or_refused_with_its_file(tmp_path: Path, name: str) -> None:
    content, problem = ODD_SAMPLES[name]
    path = log(tmp_path / "odd.eval", content)
    if problem is not None:
        with pytest.raises(DataError, match=rf"(?s)odd\.eval.*{problem}"):
            InspectLogs().read(path)
        return
    (suite,) = InspectLogs().read(path).suites
    store = open_store("memory:")
    run = store_run(store, suite, suite.runs[0], "inspect").run
    assert (run.planned, len(list(store.results(run.run_id)))) == (1, 1)


def test_a_member_that_is_beyond_the_end_of_its_file_is_refused(tmp_path: Path) -> None:
    path = log(tmp_path / "log.eval", sample())
    content = bytearray(path.read_bytes())
    end = content.rfind(b"PK\5\6")
    content[end + 16 : end + 20] = struct.pack("<I", 0xFFFFFFF0)
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"log\.eval.* (it is not in the file|ZIP file)"):
        InspectLogs().read(path)


@pytest.mark.parametrize("value", [1, 5], ids=["from 0 to 1", "beyond"])
def test_the_scores_of_a_sample_take_time_in_proportion(tmp_path: Path, value: int) -> None:
    def seconds(count: int) -> float:
        scores = {f"s{n}": {"value": value} for n in range(count)}
        path = log(tmp_path / "log.eval", sample(scores=scores))
        started = time.process_time()
        InspectLogs().read(path)
        return time.process_time() - started

    seconds(1_000)  # Whatever the first call has to load.
    assert seconds(30_000) < 5 + 60 * seconds(1_000)


LARGE_FILES = {
    "results.json": ("promptfoo", b'{"evalId": "'),
    "log.json": ("inspect", b'{"version": 2, "eval": {"task": "'),
    "report.json": ("pydantic-evals", b'{"cases": [{"name": "'),
    "traces.jsonl": ("otlp", b'{"resourceSpans": ['),
    "samples_t_2026-01-01T00-00-00.jsonl": ("lm-eval", b'{"doc_id": 0, "doc": "'),
    "rows.jsonl": ("", b'{"input": "'),
    "rows.json": ("", b'[{"input": "'),
    "rows.csv": ("", b"input,expected\na,"),
    "rows.yaml": ("promptfoo dataset", b"tests:\n- vars: "),
}


@pytest.mark.parametrize("name", LARGE_FILES)
def test_a_file_without_end_is_refused_before_it_has_been_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairtrial.base.foreign._FILE_BYTES", MIB)
    monkeypatch.setattr("fairtrial.base.foreign._LINE_BYTES", MIB)
    format, start = LARGE_FILES[name]
    path = tmp_path / name
    path.write_bytes(start)
    with path.open("r+b") as file:
        file.truncate(50 << 30)  # Takes no room on the disk.
    problem = rf"{name} must have (lines of )?at most 1,048,576 bytes.*\n.*{SETTING}"
    read: Callable[[Path], Any] = partial(Dataset.load, format="promptfoo") if "dataset" in format else Dataset.load
    with pytest.raises(LimitExceededError, match=problem):
        (load_importer(format).read if format in plugin_names("importers") else read)(path)


def test_equal_values_of_a_parquet_file_are_counted_as_often_as_they_occur(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    texts = pyarrow.array(["x" * 10_000] * 1_000).dictionary_encode()
    parquet.write_table(pyarrow.table({"id": [str(n) for n in range(1_000)], "input": texts}), path)
    assert path.stat().st_size < 50_000
    assert len(Dataset.load(path)) == 1_000
    monkeypatch.setattr("fairtrial.data.loaders._PARQUET_BYTES", 5_000_000)
    with pytest.raises(LimitExceededError, match=rf"rows\.parquet must have at most 5,000,000 bytes.*\n.*{SETTING}"):
        Dataset.load(path)


@pytest.mark.parametrize("name", ["a score of 400 digits", "100,000 levels", "epoch 2,000,000,000"])
def test_the_command_says_what_is_wrong_and_reports_no_bug(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = log(tmp_path / "odd.eval", ODD_SAMPLES[name][0])
    assert invoke(["import", str(path), "--store", str(tmp_path / "x.db")]) == 2
    said = capsys.readouterr()
    assert "odd.eval" in said.err + said.out
    assert "bug in Fairtrial" not in said.err + said.out


def test_a_plan_may_not_be_far_larger_than_what_a_file_has(tmp_path: Path) -> None:
    # One row is repeated 150 times, and 150 others are there once: 22,650 planned trials of 300 rows.
    items = [{**answers("evalrun_a", {})[0], "id": f"i{n}", "datasource_item_id": max(n - 150, 0)} for n in range(300)]
    from fairtrial.integrations.model_server import HostedEvals

    for count, fits in ((300, True), (150, True)):
        some = items[:count]
        project = HostedEvals(
            evals=[eval_of("eval_capitals", "C", CRITERIA)],
            runs=[run_of("evalrun_a", some)],
            items={"evalrun_a": some},
        )
        found = load_importer("openai-evals").read(write_archive(project, tmp_path / f"saved{count}"))
        assert bool(found.suites[0].runs) is fits
    samples = [sample(id=n, epoch=20_000 if n == 0 else 1) for n in range(3)]
    with pytest.raises(LimitExceededError, match=r"log\.eval must have at most 10,000 planned trials \(got 60,000\)"):
        InspectLogs().read(log(tmp_path / "log.eval", *samples))


JSON_FILES: dict[str, tuple[str, str, bytes]] = {
    "promptfoo": ("results.json", r"results\.json must be JSON", b'{"evalId": 1,\n"results": ODD}'),
    "pydantic-evals": ("report.json", r"report\.json must be JSON", b'{"cases":\n ODD}'),
    "inspect": ("log.json", r"log\.json must be JSON", b'{"version": 2,\n"samples": ODD}'),
    "lm-eval": ("samples_a_2026-11-16T22-14-33.jsonl", r"33\.jsonl:2: ", b'{"doc_id":1,"metrics":[]}\nODD\n'),
    "otlp": ("traces.jsonl", r"traces\.jsonl:2: ", b'{"resourceSpans":[]}\nODD\n'),
}


@pytest.mark.parametrize("format", JSON_FILES)
@pytest.mark.parametrize("odd", [b"[" * 100_000 + b"]" * 100_000, b"[" + b"9" * 400 + b"]", b"[" * 50_000])
def test_long_numbers_and_depth_are_errors_with_file_and_line(tmp_path: Path, format: str, odd: bytes) -> None:
    name, place, content = JSON_FILES[format]
    path = tmp_path / name
    path.write_bytes(content.replace(b"ODD", odd))
    with pytest.raises(DataError, match=place) as raised:
        load_importer(format).read(path)
    assert path.suffix == ".jsonl" or "line 2" in str(raised.value)


def test_numbers_and_depth_in_saved_evals_have_file_and_line(tmp_path: Path) -> None:
    from fairtrial.integrations.model_server import HostedEvals

    items = answers("evalrun_a", {})[:2]
    project = HostedEvals(
        evals=[eval_of("eval_capitals", "C", CRITERIA)], runs=[run_of("evalrun_a", items)], items={"evalrun_a": items}
    )
    path = write_archive(project, tmp_path / "saved") / "items" / "evalrun_a.jsonl"
    good = path.read_bytes()
    for odd in (b'{"id":' + b"9" * 400 + b"}", b'{"id":' * 100_000):
        path.write_bytes(good + odd + b"\n")
        with pytest.raises(DatasetError, match=r"evalrun_a\.jsonl:3: "):
            load_importer("openai-evals").read(tmp_path / "saved")


def test_foreign_json_allows_what_tools_write() -> None:
    assert parse_foreign_json(b'\xef\xbb\xbf{"a": [1e400, "%s"]}' % (b"9" * 400)) == {"a": [float("inf"), "9" * 400]}
    deep = b'{"a":' * 200 + b"1" + b"}" * 200
    assert parse_foreign_json(deep)
    with pytest.raises(CodecError, match="nested more than 200 levels deep at line 3"):
        parse_foreign_json(b"[\n1,\n" + deep + b"]")
    assert parse_foreign_json(b'"' + b"[" * 1000 + b'"') == "[" * 1000


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in pairwise("abcdefgh")
) + "cases: [{inputs: *h}]\n"  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS, "at most 1,000,000 values"),
        ("cases: &a [*a]\n", "contains itself"),
        ("cases: " + "[" * 600, "nested too deeply"),
    ],
)  # fmt: skip
def test_yaml_that_expands_without_end_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"cases\.yaml.*{problem}"):
        Dataset.load(path, format="pydantic-evals")
