"""A real browser for tests: what a page becomes in it, and everything it asks the network for."""

from __future__ import annotations

import shutil
import socketserver
import struct
import subprocess
import threading
import zlib
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append(self.path)  # type: ignore[attr-defined]  # ours, below
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_CONNECT = do_POST = do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[str] = []


class Browser:
    """Chromium without a window, all of whose requests go to a proxy that notes them and answers 404."""

    def __init__(self, folder: Path) -> None:
        found = [path for name in _NAMES if (path := shutil.which(name))]
        assert found, "these tests need Chromium or Chrome on the PATH"
        self._binary = found[0]
        self._folder = folder
        self._server = _Server()
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Browser:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def requests(self) -> list[str]:
        """What was asked for, other than by the browser for itself."""
        return [path for path in self._server.seen if "google" not in path and "gvt1" not in path]

    def open(self, page: str) -> str:
        """The page as the browser holds it after it has loaded, as HTML."""
        return self._run(page, "--dump-dom", "--virtual-time-budget=2000").decode("utf-8")

    def background(self, page: str, *, dark: bool) -> str:
        """The colour of the page's first pixel, for a reader who prefers dark or light."""
        picture = self._folder / "page.png"
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        self._run(page, f"--screenshot={picture}", "--window-size=400,300", scheme)
        data, pixels, at = picture.read_bytes(), b"", 8
        while at < len(data):
            size, kind = struct.unpack(">I4s", data[at : at + 8])
            pixels += data[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
            at += 12 + size
        # Whatever filter a PNG uses, its first pixel has no neighbours and is stored as it is, after the filter's byte.
        return "#" + zlib.decompress(pixels)[1:4].hex()

    def _run(self, page: str, *options: str) -> bytes:
        path = self._folder / "page.html"
        path.write_text(page, encoding="utf-8")
        port = self._server.server_address[1]
        done = subprocess.run(
            [
                self._binary, "--headless", "--no-sandbox", "--disable-gpu",
                f"--user-data-dir={self._folder / 'profile'}", f"--proxy-server=http://127.0.0.1:{port}",
                "--proxy-bypass-list=<-loopback>", "--no-first-run", "--disable-background-networking",
                "--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-extensions",
                *options, path.as_uri(),
            ],
            capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
        return done.stdout
