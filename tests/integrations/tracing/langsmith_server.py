"""A server with LangSmith's endpoint for experiments that ran elsewhere: validates, keeps, and refuses what it has.

    python -m tests.integrations.tracing.langsmith_server FOLDER PORT [--silent-after N]

Experiments are kept as files in the folder, so that a server that was killed and started again has them. With
`--silent-after N` it keeps the experiment that comes after N others and never answers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import jsonschema

from tests.integrations.tracing.collector import Answer

SCHEMA = json.loads(Path(__file__).with_name("upload_experiment.schema.json").read_text())
PATH = "/api/v1/datasets/upload-experiment"
KEY = "lsv2_pt_0123456789abcdef"


class LangSmithServer:
    """Use as a context manager. `answers` are given in order in place of its own; None stands for its own."""

    def __init__(
        self, folder: Path, answers: Sequence[Answer | None] = (), *, port: int = 0, silent_after: int | None = None
    ) -> None:
        self.folder = folder
        self.answers = deque(answers)
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.silent_after = silent_after
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                answer = server.answer(self.path, headers, body)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self._thread = threading.Thread(target=self.http.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
        self._thread.join()

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        tree = json.loads(body)
        with self._lock:
            self.requests.append((headers, tree))
            wanted = self.answers.popleft() if self.answers else None
            if wanted is not None:
                return wanted
            answer = self._take(path, headers, tree)
        if self.silent_after is not None and answer.status == 200 and len(experiments(self.folder)) > self.silent_after:
            threading.Event().wait()
        return answer

    def _take(self, path: str, headers: dict[str, str], tree: Any) -> Answer:
        if path != PATH:
            return Answer(404, b'{"detail":"Not Found"}')
        if headers.get("x-api-key") != KEY:
            return Answer(403, b'{"detail":"Forbidden"}')
        problems = _problems(tree)
        if problems:
            return Answer(422, json.dumps({"detail": problems}).encode())
        file = self.folder / f"{hashlib.sha256(tree['experiment_name'].encode()).hexdigest()}.json"
        if file.exists():
            return Answer(409, b'{"detail":"Session already exists."}')
        aside = file.with_suffix(".new")
        aside.write_text(json.dumps(tree))
        aside.rename(file)  # Whoever looks into the folder finds whole files only.
        created = {"id": str(uuid.uuid4()), "name": tree["experiment_name"]}
        return Answer(200, json.dumps({"experiment": created, "dataset": {"name": tree["dataset_name"]}}).encode())


def _problems(tree: Any) -> list[dict[str, Any]]:
    found = [
        {"loc": ["body", *error.absolute_path], "msg": error.message}
        for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(tree)
    ]
    if found:
        return found
    start, end = (datetime.fromisoformat(tree[f"experiment_{name}_time"]) for name in ("start", "end"))
    for place, row in enumerate(tree["results"]):
        first, last = (datetime.fromisoformat(row[f"{name}_time"]) for name in ("start", "end"))
        if not start <= first <= last <= end:
            found.append({"loc": ["body", "results", place, "start_time"], "msg": "outside of the experiment"})
    if len({row["row_id"] for row in tree["results"]}) < len(tree["results"]):
        found.append({"loc": ["body", "results"], "msg": "row ids must be unique"})
    return found


def experiments(folder: Path) -> list[Any]:
    """The experiments that a server has, by name."""
    trees = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return sorted(trees, key=lambda tree: str(tree["experiment_name"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--silent-after", type=int)
    options = parser.parse_args()
    server = LangSmithServer(options.folder, port=options.port, silent_after=options.silent_after)
    print("ready", flush=True)
    server.http.serve_forever()


if __name__ == "__main__":
    main()
