"""Pictures made here, and a run with good, damaged, missing and hostile ones."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from fairtrial import Attachment, ChatMessage, EvalResult, Sample, Score, Session, TrialKey
from fairtrial.data.session.events import ToolInvoked
from fairtrial.store import RunStore
from tests.viewer.conftest import record

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" onload="window.hit=1"><script>window.hit=1</script></svg>'
HTML = b"<!doctype html><script>parent.hit=1</script>"
POLYGLOT = b"GIF89a\x0a\x00\x0a\x00<script>window.hit=1</script>;"
"""A script with the head of a picture."""
GIF = (
    b"GIF89a\x02\x00\x01\x00\x80\x00\x00\xd0\x20\x30\x20\x30\xd0\x2c\x00\x00\x00\x00\x02\x00\x01\x00\x00\x02\x02\x44\x0a"
    b"\x00\x3b"
)


def png(
    width: int, height: int, colour: tuple[int, int, int] = (40, 90, 200), *, claims: tuple[int, int] = (0, 0)
) -> bytes:
    """Return a picture: a frame of a colour around a transparent area. `claims` is a size that it only says to have."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    border = max(2, height // 8)
    solid, clear = bytes((*colour, 255)), bytes((*colour, 0))
    rows = bytearray()
    for y in range(height):
        inside = border <= y < height - border
        sides = min(border, width // 2)
        rows += b"\0" + (solid * sides + clear * (width - 2 * sides) + solid * sides if inside else solid * width)
    size = claims if claims[0] else (width, height)
    head = struct.pack(">IIBBBBB", *size, 8, 6, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(rows))) + chunk(b"IEND", b"")
    )


WIDE, SMALL, TALL = png(1600, 500), png(64, 48, (200, 40, 60)), png(90, 900, (30, 140, 70))
BOMB = png(1, 1, claims=(60_000, 60_000))
CUT = WIDE[: len(WIDE) * 2 // 3]
NAMES = {
    "wide.png": (WIDE, "image/png"), "small.png": (SMALL, "image/png"), "tall.png": (TALL, "image/png"),
    "two pixels.gif": (GIF, "image/gif"), "wrong type.jpg": (SMALL, "image/jpeg"), "cut.png": (CUT, "image/png"),
    "bomb.png": (BOMB, "image/png"), "drawing.svg": (SVG, "image/svg+xml"), "svg as png.png": (SVG, "image/png"),
    "html as gif.gif": (HTML, "image/gif"), "polyglot.gif": (POLYGLOT, "image/gif"), "page.html": (HTML, "text/html"),
    "notes.txt": (b"plain <b>text</b>", "text/plain"), "cut in its head.png": (WIDE[:20], "image/png"),
}  # fmt: skip
MISSING = Attachment.of(b"never stored", media_type="image/png", name="missing.png")


def add_picture_run(store: RunStore, names: dict[str, tuple[bytes, str]] | None = None) -> dict[str, Attachment]:
    """Add a run of one trial with these attachments in its sample, messages and tool results; returns them by name."""
    files = {
        name: Attachment.of(content, media_type=media_type, name=name)
        for name, (content, media_type) in (NAMES if names is None else names).items()
    }
    for content, _ in (NAMES if names is None else names).values():
        store.put_blob(content)
    files["missing.png"] = MISSING
    files["huge.png"] = Attachment("ab" * 32, "image/png", 900_000_000, "huge.png")
    run = store.create_run(record("picture-run", "pictures", 1, experiments=("baseline",)))
    session = Session(tags={})
    for file in files.values():
        session.record(ChatMessage("user", ("What is this?", file)))
    session.record(ToolInvoked("screenshot", {"page": 1}, list(files.values())[:3], True, duration_ms=30.0))
    result = EvalResult(
        key=TrialKey(run.run_id, "baseline", "q0", 0), ordinal=0, outcome="scored", score=Score(0.0, False, "wrong"),
        output={"drawn": files["missing.png"]}, execution=1, snapshot=session.snapshot(),
    )  # fmt: skip
    sample: Sample[Any, Any] = Sample("q0", {"text": "Describe it.", "picture": next(iter(files.values()))})
    store.commit(run.run_id, [result], {0: sample})
    store.update_run(run.run_id, status="finished", finished_at=1005.0)
    return files
