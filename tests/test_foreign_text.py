"""Text from models, datasets and files takes time in proportion to its length, whatever it contains."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fairtrial import Dataset
from fairtrial.errors import CodecError, DatasetError
from fairtrial.models.judges.fence import read_fences
from fairtrial.models.schema import parse_output
from fairtrial.models.tools import split_data_url
from fairtrial.reports.render import markdown
from fairtrial.reports.render.files import content
from fairtrial.reports.render.safe_text import lines, plain
from fairtrial.scoring import fuzzy_match
from fairtrial.store.redact import Redactor

MEGABYTE = 1_000_000
# What a megabyte may take, in times of `reference_work`: 0.1 s on a core where that takes 12.5 ms.
LIMIT = 8.0
TRIES = 10

# Each repeated to fill the text: what regular expressions of the project could be led to backtrack over.
HOSTILE = (
    "\n", " ", "`", "```\n", "a", "a-", "a+", "a.", "a:", "://", "://a:", "a@", "=", "#", "#1", "1.", "\x1b[", "\x1b[0",
    "\x1b]", "a\x1b[0m", "\x1b", "a\x00", "<<<BEGIN ", "$", "${", "{", "[", "|a", '"', "\\", "data:a/", ";base64",
    "www.",
    "mailto:", "\u200b", "\ufdd0", "a\ufdd0", "sk-", "eyJ", "AKIA", "Bearer ", "password=", "-----BEGIN ", "?api_key=",
)  # fmt: skip

# What the formats of credentials could be led to read again and again, or to match most often.
CREDENTIALS = (
    "://:a@", "://a:b@", "://a:b/", "://a:1/", "http://", "http://a1", "?", "&", "&token=", "?token=a", "_", "-----",
    "gh", "ghp_", "z", "authorization: ", "d=", "password=abcd;", "uid=pwd=abcd;", "pwd=abcd user=", "host=", "earer",
    "Bearer a.", "basic", "sk-proj-", "sk-a1b2c3d4e5f6g7h8i9j0 ", "-----BEGIN PRIVATE KEY-----", "eyJaaaaaaaa.", "\\\\",
    "\\nsk-", "sk_live_", "xoxb-",
)  # fmt: skip
SIGNS = " =@_z earer asic sk-k_live_ eyJ"  # Without one of these, most formats are not looked for.

READERS: dict[str, Callable[[str], object]] = {
    "a reply as JSON": lambda text: parse_output(dict, text),
    "a fenced reply": lambda text: parse_output(dict, f"```json\n{text}"),
    "a fenced reply that is closed twice": lambda text: parse_output(dict, f"```json\n{text}\n```x\n```"),
    "Markdown": markdown.escaped,
    "a code span": lambda text: markdown.quoted(text, MEGABYTE),
    "JUnit": lambda text: content(text, MEGABYTE),
    "terminal lines": lines,
    "a terminal line": plain,
    "fenced material": read_fences,
    "redacted text": Redactor(["a-secret-that-is-registered"]).text,
    "redacted JSON": lambda text: Redactor(["a-secret-that-is-registered"]).json(
        f'"{text.encode("ascii", "replace")!r}"'
    ),
    "redacted JSON of many strings": lambda text: Redactor().json(
        '["' + 'ab","' * (len(text) // 5) + 'sk-proj-0123456789abcdef"]'
    ),
    "a data URL": lambda text: split_data_url("data:image/" + text),
}


@pytest.mark.parametrize("reader", READERS)
def test_foreign_text_is_read_within_a_tenth_of_a_second_per_megabyte(reader: str) -> None:
    check_speed(reader, MEGABYTE // 10)


@pytest.mark.long
@pytest.mark.parametrize("reader", READERS)
def test_a_megabyte_of_foreign_text_is_read_within_a_tenth_of_a_second(reader: str) -> None:
    check_speed(reader, MEGABYTE)


def check_speed(reader: str, size: int) -> None:
    limit = LIMIT * size / MEGABYTE
    texts = {piece: (piece * (size // len(piece) + 1))[:size] for piece in HOSTILE}
    if reader == "redacted JSON of many strings":
        texts = {"ab": "a" * size}
    elif "redacted" in reader:
        texts.update((piece, (piece * (size // len(piece) + 1))[:size] + SIGNS) for piece in CREDENTIALS)
    reference = min(cpu_seconds(reference_work, "") for _ in range(3))
    slow: dict[str, float] = {}
    for piece, text in texts.items():
        times = cpu_seconds(READERS[reader], text) / reference
        assert times < 20 * limit, piece  # No neighbour explains that.
        if times > limit:
            slow[piece] = times
    for _ in range(TRIES):  # A neighbour of the core may have been busy: measured again, each beside its reference.
        for piece, times in slow.items():
            reference = cpu_seconds(reference_work, "")
            slow[piece] = min(times, cpu_seconds(READERS[reader], texts[piece]) / reference)
        slow = {piece: times for piece, times in slow.items() if times > limit}
    assert slow == {}


def reference_work(_text: str) -> int:
    return sum(number * number for number in range(200_000))


def cpu_seconds(read: Callable[[str], object], text: str) -> float:
    gc.disable()  # A collection takes as long as all that other tests left in this process is large.
    try:
        begin = time.thread_time()
        with contextlib.suppress(CodecError, ValueError):
            read(text)
        return time.thread_time() - begin
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ('  ```\n{"a": 1}```  ', {"a": 1}),
        ('\n```JSON-schema \n\n{"a": 1}\n\n ```\n', {"a": 1}),
        ('{"a": "```"}', {"a": "```"}),
        ('```json\n{"a": "x ``` y"}\n```', {"a": "x ``` y"}),
    ],
)
def test_a_reply_is_read_with_and_without_its_code_fence(text: str, parsed: object) -> None:
    assert parse_output(dict, text) == parsed


@pytest.mark.parametrize("text", ["```json", "```json\n", "``````", "```{}```", "```a b\n{}\n```"])
def test_a_fence_that_holds_no_json_is_refused(text: str) -> None:
    with pytest.raises(CodecError):
        parse_output(dict, text)


def test_a_csv_header_of_thirty_thousand_columns_is_read_quickly(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text("id,input," + ",".join(f"c{number}" for number in range(30_000)) + "\n")
    begin = time.thread_time()
    assert len(Dataset.load(path, str)) == 0
    assert time.thread_time() - begin < 1


def test_a_dataset_that_is_a_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    os.mkfifo(path)
    with pytest.raises(DatasetError, match="must be a regular file"):
        Dataset.load(path, str)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_row_that_names_a_field_twice_is_refused(tmp_path: Path, suffix: str) -> None:
    row = '{"id": "a", "input": "x", "expected": "y", "expected": "z"}'
    path = tmp_path / f"samples{suffix}"
    path.write_text(row if suffix == ".jsonl" else f"[{row}]")
    with pytest.raises(DatasetError, match="'expected' occurs twice"):
        Dataset.load(path, str)


def test_fuzzy_match_refuses_texts_that_would_take_minutes() -> None:
    with pytest.raises(ValueError, match="50,000 characters"):
        fuzzy_match()("a" * 60_000, "b" * 60_000)
