"""Read a log that Fairtrial wrote: python inspect_reads.py LOG. Prints what Inspect and `inspect view` say of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from inspect_ai.log import read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries

path = Path(sys.argv[1]).resolve()
log = read_eval_log(str(path))
header = read_eval_log(str(path), header_only=True)
one = read_eval_log_sample(str(path), log.samples[0].id, 1)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
command = [sys.executable, "-m", "inspect_ai", "view", "--log-dir", str(path.parent), "--host", "127.0.0.1"]
server = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    listed = None
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/logs", timeout=5) as answer:
                listed = json.load(answer)
            break
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
        page = answer.read().decode()
    name = urllib.parse.quote(listed["files"][0]["name"], safe="")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/logs/{name}?header-only=0", timeout=5) as answer:
        served = json.load(answer)
finally:
    server.terminate()
    server.wait(20)
print(json.dumps({
    "status": log.status,
    "samples": [[s.id, s.epoch, s.error.message if s.error else None, {k: v.value for k, v in (s.scores or {}).items()}]
                for s in log.samples],
    "roles": [message.role for message in one.messages],
    "summaries": len(read_eval_log_sample_summaries(str(path))),
    "metrics": {f"{s.name}/{k}": m.value for s in header.results.scores for k, m in s.metrics.items()},
    "listed": [Path(entry["name"]).name for entry in listed["files"]],
    "page": "<html" in page,
    "served": served["eval"]["task"],
}))  # fmt: skip
