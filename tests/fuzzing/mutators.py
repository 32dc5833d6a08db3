"""Changes valid files at random: bytes, tokens and values, also inside ZIP, gzip, zstd, SQLite and column files."""

from __future__ import annotations

import gzip
import io
import json
import re
import sqlite3
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote_from_bytes

import zstandard

from fairtrial.base.foreign import ExpansionBudget, expand
from fairtrial.errors import FairtrialError
from fairtrial.store.column_cache import HEAD

type Mutator = Callable[[Random, bytes, Sequence[bytes]], bytes]
"""Returns a changed copy of the second argument; the third has other inputs, parts of which may be used."""

MAX_BYTES = 1 << 18
# Written as they are: `json` would refuse some, and recursion could not make the deep ones.
RAW = [
    "null", "true", "false", "0", "-1", "-0.0", "1e308", "-1e308", "1e999", "NaN", "-Infinity", "9" * 400, "9" * 5000,
    "2000000000", "9223372036854775808", "18446744073709551616", "0.1", "[]", "{}", "[[]]", '{"a": {}}', '""', '"x"',
    '"\\ud800"', '"a\\u0000b"', '"\\ufdd0nan"', '"\\ufdd0bytes:zz"', '"\\ufdd0d800"', '"../../secret"', '"/etc/passwd"',
    '"{0}"', '"\\n\\u2028"', '"NaN"', '"1e999"', '"0001-01-01T00:00:00"', '"9999-12-31T23:59:59+00:00"', '["a", 1]',
    '"attachment://0123456789abcdef0123456789abcdef"', "[" * 150 + "]" * 150, "[" * 250 + "]" * 250,
    "[" * 900 + "]" * 900, "[" * 20_000,
    '{"a":' * 3_000 + "1" + "}" * 3_000, '{"a": 1, "a": 2}', '"' + "x" * 70_000 + '"', "[" + "0," * 5_000 + "0]",
]  # fmt: skip
KEYS = ["", "id", "a\0", "\ud800", "__class__", "x" * 5000, "name", "\ufdd0inf"]
TOKENS = [
    b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r\n", b"\n", b'"', b"'", b",", b"\t", b"[", b"]", b"{", b"}",
    b"<<: *a", b"&a ", b"*a", b"- ", b": ", b"!!python/object/apply:os.abort []", b"!!binary x", b"---\n", b"=", b"#",
    b"%", b"%00", b"%ff", b"..", b"/", b"?", b"\x80\x80\x80\x80\x01", b"\xff\xff\xff\x7f", b"\0\0\0\0\0\0\0\x80",
    b"9" * 400, b"1e999", b"nan", b"inf", b"2026-13-45", b"0x", b"[" * 3000, b"a." * 3000,
    b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n", b"true", b"null", b"~", b"1:60", b"0o777", b"-", b"1979-05-27T07:32:00Z",
]  # fmt: skip


TOML = [
    "inf", "-inf", "nan", "1e999", "9" * 400, "9" * 5000, "-1", "0", "1.5", "true", "1979-05-27", "07:32:00", "[]",
    "{}", "''", '"a\\u0000b"', '"x"', '"~"', "[[1]]", "[1, 'a']", "{a = {b = 1}}", "[" * 900 + "]" * 900,
    '"/etc/shadow"', "{a=" * 900 + "1" + "}" * 900, f'"{"x" * 5000}"',
    "{m = {input = nan, output = 1}}", "0x7fffffffffffffffff",
]  # fmt: skip


def mutate_bytes(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change bits, bytes and tokens; cut, repeat and splice."""
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        data = _change_bytes(random, data, others)[:MAX_BYTES]
    return data


def _change_bytes(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start = random.randint(0, len(data))
    end = min(len(data), start + random.choice((1, 4, 16, 256, 4096)))
    match random.randrange(8):
        case 0 if data:
            at = min(start, len(data) - 1)
            return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:start]
        case 2:
            return data[:start] + data[end:]
        case 3:
            return data[:end] + data[start:end] * random.choice((1, 2, 50)) + data[end:]
        case 4 if others:
            other = random.choice(others)
            return data[:start] + other[random.randint(0, len(other)) :]
        case 5:
            return data[:start] + random.randbytes(end - start) + data[end:]
        case 6:
            size = random.choice((1, 2, 4, 8))
            number = random.choice((0, 1, 1 << (size * 8 - 1), (1 << size * 8) - 1))
            return data[:start] + number.to_bytes(size, random.choice(("little", "big"))) + data[start + size :]
        case _:
            return data[:start] + random.choice(TOKENS) + data[random.choice((start, end)) :]


def mutate_json(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change values of a JSON document, or of one line of JSON lines; one time in six, its bytes."""
    if random.randrange(6) == 0:
        return mutate_bytes(random, data, others)
    tree, lines, at = _parsed(data), data.splitlines(keepends=True), 0
    if tree is None and len(lines) > 1:
        at = random.randrange(len(lines))
        tree = _parsed(lines[at])
    if tree is None:
        return mutate_bytes(random, data, others)
    raw: list[str] = []
    holder = {"": tree}
    for _ in range(random.choice((1, 1, 2, 3, 8))):
        _change_tree(random, holder, raw)
    text = json.dumps(holder[""])
    for number, value in enumerate(raw):
        text = text.replace(f'"@raw {number}@"', value)
    changed = text.encode()[:MAX_BYTES]
    return changed if _parsed(data) is not None else b"".join((*lines[:at], changed, b"\n", *lines[at + 1 :]))


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _places(node: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any, int]]:
    """Every (container, key, depth) of a document."""
    for key, inner in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key, len(way)
        if isinstance(inner, dict | list) and len(way) < 60:
            yield from _places(inner, (*way, key))


def _change_tree(random: Random, tree: Any, raw: list[str]) -> None:
    # By depth first: else, all changes would be deep in the longest part.
    places = list(_places(tree))
    depth = random.randint(0, max(depth for _, _, depth in places))
    node, key, _ = random.choice([place for place in places if place[2] == depth])
    match random.randrange(8):
        case 0 if depth and isinstance(node, dict):
            del node[key]
        case 1 if depth and isinstance(node, dict):
            node[random.choice(KEYS)] = node.pop(key)
        case 2 if isinstance(node, list):
            node.insert(random.randint(0, len(node)), node[key])
        case 3 if depth and isinstance(node, list):
            del node[key]
        case 4:
            other, place, _ = random.choice(places)
            if place in (other if isinstance(other, dict) else range(len(other))) and not _holds(other[place], node):
                node[key] = other[place]
        case 5 if isinstance(node, dict):
            node[random.choice(KEYS)] = None
        case _:
            node[key] = f"@raw {len(raw)}@"
            raw.append(random.choice(RAW))


def _holds(tree: Any, node: Any) -> bool:
    return tree is node or (isinstance(tree, dict | list) and any(inner[0] is node for inner in _places(tree)))


def mutate_toml(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change the values of settings; one time in three, bytes."""
    lines = data.decode("utf-8", "replace").split("\n")
    places = [at for at, line in enumerate(lines) if "=" in line]
    if not places or random.randrange(3) == 0:
        return mutate_bytes(random, data, others)
    at = random.choice(places)
    lines[at] = f"{lines[at].partition('=')[0]}= {random.choice(TOML)}"
    return "\n".join(lines).encode()


def mutate_request(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change the target and the body of an HTTP request, so that the head stays valid; one time in three, bytes."""
    head, _, body = data.partition(b"\r\n\r\n")
    line, _, fields = head.partition(b"\r\n")
    if line.count(b" ") != 2 or random.randrange(3) == 0:
        return mutate_bytes(random, data, others)
    method, target, version = line.split(b" ")
    changed = mutate_bytes(random, target.removeprefix(b"/@prefix@/"), ())
    target = b"/@prefix@/" + quote_from_bytes(changed, safe="/?&=@%:+.,")[:4000].encode()
    body = mutate_bytes(random, body, ()) if body else b""
    fields = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), fields)
    return b"%s %s %s\r\n%s\r\n\r\n%s" % (method, target, version, fields, body)


def in_zip(change: Mutator) -> Mutator:
    """Change a member of a ZIP file."""

    def mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = [(info.filename, archive.read(info)) for info in archive.infolist()]
            at = random.randrange(len(members))
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, RuntimeError, zlib.error, EOFError):
            return mutate_bytes(random, data, others)
        name, content = members[at]
        members[at] = (
            random.choice((name, name, name, "header.json", "samples/../x.json")),
            change(random, content, ()),
        )
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for member, content in members:
                archive.writestr(member, content)
        return target.getvalue()

    return _mostly(mutate)


def in_gzip(change: Mutator) -> Mutator:
    """Change what is compressed."""
    return _mostly(lambda random, data, _: gzip.compress(change(random, gzip.decompress(data), ()), 1))


def in_zstd(change: Mutator) -> Mutator:
    """Change what is compressed."""

    def mutate(random: Random, data: bytes, _others: Sequence[bytes]) -> bytes:
        plain = expand(data, "zstd", ExpansionBudget("it", MAX_BYTES))
        return zstandard.ZstdCompressor(write_content_size=random.random() < 0.8).compress(change(random, plain, ()))

    return _mostly(mutate)


def mutate_columns(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change the header of a column file, or an array, with checksums that fit."""
    magic, offset, length, _ = HEAD.unpack(data[: HEAD.size])
    header = json.loads(data[offset : offset + length])
    arrays = bytearray(data[:offset])
    if random.random() < 0.5:
        name = random.choice(sorted(header["arrays"]))
        dtype, start, count, _ = header["arrays"][name]
        size = int(dtype[1:]) * count
        changed = mutate_bytes(random, bytes(arrays[start : start + size]), ())[:size].ljust(size, b"\0")
        arrays[start : start + size] = changed
        header["arrays"][name][3] = zlib.crc32(changed)
        text = json.dumps(header).encode()
    else:
        text = mutate_json(random, json.dumps(header).encode(), ())
    head = HEAD.pack(magic, offset, len(text), zlib.crc32(text))
    return head + bytes(arrays[HEAD.size :]) + text


def mutate_sqlite(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change a few values of an SQLite database."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.db")
        path.write_bytes(data)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.text_factory = bytes
            tables = [
                name.decode() for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
            ]
            for _ in range(random.choice((1, 1, 3))):
                _change_cell(random, connection, random.choice(tables))
        return path.read_bytes()


def _change_cell(random: Random, connection: sqlite3.Connection, table: str) -> None:
    columns = [name.decode() for _, name, *_ in connection.execute(f'PRAGMA table_info("{table}")')]
    rows = connection.execute(f'SELECT rowid, * FROM "{table}" LIMIT 50').fetchall()
    if not rows:
        return
    rowid, *values = random.choice(rows)
    at = random.randrange(len(columns))
    value = values[at]
    if isinstance(value, bytes) and random.random() < 0.7:
        change = in_zstd(mutate_json) if value[:4] == b"\x28\xb5\x2f\xfd" else mutate_json
        new: Any = change(random, value, ())
        new = new.decode("utf-8", "surrogateescape") if random.random() < 0.6 and new.isascii() else new
    else:
        new = random.choice((None, -1, 0, 2**62, 1.5, float("inf"), "x", "", b"\xff", "\ufdd0nan", "[]", "{}"))
    try:
        connection.execute(f'UPDATE "{table}" SET "{columns[at]}" = ? WHERE rowid = ?', (new, rowid))
    except sqlite3.Error:
        pass  # A constraint of the table.


def _mostly(mutate: Mutator) -> Mutator:
    """Change the content; one time in four, or if that is not possible, the bytes of the file."""

    def either(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        if random.randrange(4):
            try:
                return mutate(random, data, others)
            except (ValueError, KeyError, TypeError, OSError, EOFError, struct.error, sqlite3.Error, zlib.error,
                    FairtrialError, zstandard.ZstdError, AttributeError, IndexError):  # fmt: skip
                pass  # What an earlier change has left is no such file.
        return mutate_bytes(random, data, others)

    return either


mutate_column_file = _mostly(mutate_columns)
mutate_database = _mostly(mutate_sqlite)
