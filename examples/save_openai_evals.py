"""Save all evals, graders, data sources, runs and output items of an OpenAI project.

    pip install openai
    OPENAI_API_KEY=... python save_openai_evals.py DIRECTORY

Run the same command again after an interruption: it continues where it stopped, and nothing is saved twice.
Exit codes: 0 everything is saved, 1 something is missing and another run may get it, 2 the key was refused.
"""

from __future__ import annotations

import email.utils
import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai

ATTEMPTS = 8  # How often one request is tried.
FINISHED = {"completed", "failed", "canceled", "cancelled"}  # Runs that change no more.


class GaveUpError(Exception):
    """A request that failed too often."""


def seconds_to_wait(error: Exception, attempt: int) -> float:
    """What the server asks for in Retry-After, or an exponential backoff with jitter."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return max(float(headers[name]) * unit, 0.0)
        except (KeyError, ValueError):
            continue
    try:
        return max(email.utils.parsedate_to_datetime(headers["retry-after"]).timestamp() - time.time(), 0.0)
    except (KeyError, TypeError, ValueError):
        return min(2.0 ** (attempt - 1), 60.0) * random.uniform(0.5, 1.0)


def request(call: Callable[[], Any]) -> Any:
    """Call the API, and try again when it is busy, broken or out of reach."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return call()
        except (openai.APIError, ValueError) as error:  # ValueError: the answer is not what it should be.
            status = getattr(error, "status_code", None)
            if status is not None and status < 500 and status not in (408, 409, 429):
                raise
            if attempt == ATTEMPTS:
                raise GaveUpError(f"gave up after {ATTEMPTS} attempts: {error}") from error
            wait = seconds_to_wait(error, attempt)
            if wait > 5:
                print(f"waiting {wait:.0f} s: {error}", flush=True)
            time.sleep(wait)


def pages(list_page: Callable[..., Any], after: str | None = None) -> Iterator[list[dict[str, Any]]]:
    """The objects of a list, page by page, exactly as the server sends them."""

    def fetch() -> dict[str, Any]:
        cursor = {"after": after} if after else {}
        page = list_page(limit=100, order="asc", **cursor).http_response.json()
        if isinstance(page, dict) and isinstance(page.get("data"), list):
            return page
        raise ValueError("the answer is not a list of objects")

    while True:
        page = request(fetch)
        if not page["data"]:
            return
        yield page["data"]
        last = page["data"][-1]["id"]
        if page.get("has_more") is False or last == after:
            return
        after = last


class Lines:
    """A JSONL file that grows by whole lines. What a kill cut off is removed when the file is opened again."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.objects: dict[str, dict[str, Any]] = {}  # By id, without what is long; the last line of an id counts.
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            self._remember(json.loads(line))
        self.file = path.open("ab")
        self.file.truncate(len(whole))

    def _remember(self, one: dict[str, Any]) -> None:
        self.objects.pop(one["id"], None)
        self.objects[one["id"]] = {key: one.get(key) for key in ("id", "eval_id", "status")}

    def add(self, objects: list[dict[str, Any]]) -> None:
        """Append the objects that are new or have another status, and have the disk confirm it."""
        new = [
            one
            for one in {one["id"]: one for one in objects}.values()
            if one["id"] not in self.objects or self.objects[one["id"]]["status"] != one.get("status")
        ]
        self.file.write(b"".join(json.dumps(one).encode() + b"\n" for one in new))
        self.file.flush()
        os.fsync(self.file.fileno())
        for one in new:
            self._remember(one)


class Archive:
    """The saved project: evals.jsonl, runs.jsonl, items/RUN.jsonl, files/FILE and missing.jsonl."""

    def __init__(self, client: openai.OpenAI, folder: Path) -> None:
        self.client = client
        self.folder = folder
        self.evals = Lines(folder / "evals.jsonl")
        self.runs = Lines(folder / "runs.jsonl")
        self.missing: list[dict[str, Any]] = []

    def miss(self, what: str, reason: str, *, again: bool) -> None:
        """Note what is not saved, and whether another run of this script may get it."""
        self.missing.append({"what": what, "reason": reason, "try_again": again})

    def attempt(self, what: str, save: Callable[[], None], gone: str = "deleted on the server") -> None:
        """Save one object; if that fails, note it and continue with the next."""
        try:
            save()
        except openai.NotFoundError:
            self.miss(what, gone, again=False)
        except GaveUpError as error:
            if isinstance(error.__cause__, openai.APIConnectionError):
                raise  # Nothing else can be reached either.
            self.miss(what, str(error), again=True)
        except openai.APIStatusError as error:
            if error.status_code == 401:
                raise
            self.miss(what, str(error), again=True)

    def save(self) -> None:
        """Save everything that is not on disk yet."""
        for page in pages(self.client.evals.with_raw_response.list):
            self.evals.add(page)
        for eval_id in list(self.evals.objects):
            gone = "deleted on the server; what was saved before is kept"
            self.attempt(f"eval {eval_id}", functools.partial(self.save_runs, eval_id), gone)

    def save_runs(self, eval_id: str) -> None:
        """Save the runs of an eval, each with its items and its data source."""
        listed = set()
        for page in pages(functools.partial(self.client.evals.runs.with_raw_response.list, eval_id)):
            self.runs.add(page)
            for run in page:
                listed.add(run["id"])
                self.attempt(f"run {run['id']}", functools.partial(self.save_items, run))
                self.save_source(run)
        for run_id, run in self.runs.objects.items():
            if run["eval_id"] == eval_id and run_id not in listed and not self.items_of(run_id).exists():
                self.miss(f"run {run_id}", "deleted on the server before all of its items were saved", again=False)

    def items_of(self, run_id: str) -> Path:
        """The file of a run whose items are all saved."""
        return self.folder / "items" / f"{run_id}.jsonl"

    def save_items(self, run: dict[str, Any]) -> None:
        """Save the output items of a run. The file gets its name when all of them are in it."""
        done = self.items_of(run["id"])
        unfinished = done.with_suffix(".unfinished")
        if not done.exists():
            finished = run["status"] in FINISHED
            lines = Lines(done.with_suffix(".part") if finished else unfinished)
            # The items of an unfinished run may still change, so all of them are looked at again.
            after = next(reversed(lines.objects), None) if finished else None
            items = self.client.evals.runs.output_items.with_raw_response
            for page in pages(functools.partial(items.list, run["id"], eval_id=run["eval_id"]), after):
                lines.add(page)
            lines.file.close()
            count = len(lines.objects)
            print(f"eval {run['eval_id']}: run {run['id']}: {count:,} output items", flush=True)
            if not finished:
                self.miss(f"run {run['id']}", f"still {run['status']}; {count:,} items so far", again=True)
                return
            os.replace(lines.file.name, done)
            unfinished.unlink(missing_ok=True)
        total = (run.get("result_counts") or {}).get("total")
        count = done.read_bytes().count(b"\n")
        if total is not None and total != count:
            self.miss(f"run {run['id']}", f"the server counts {total:,} items and lists {count:,}", again=False)

    def save_source(self, run: dict[str, Any]) -> None:
        """Save the file a run was made from. Inline rows are in the run; the rows of queries are in its items."""
        source = (run.get("data_source") or {}).get("source") or {}
        kind, name = source.get("type"), f"run {run['id']}: data source"
        if kind == "file_id":
            gone = f"file {source['id']} was deleted; its rows are in the output items"
            self.attempt(name, functools.partial(self.save_file, source["id"]), gone)
        elif kind != "file_content":
            reason = f"a query ({kind or 'unknown'}), not a file; its rows are in the output items"
            self.miss(name, reason, again=False)

    def save_file(self, file_id: str) -> None:
        """Save an uploaded file."""
        path = self.folder / "files" / file_id
        if path.exists():
            return
        content = request(lambda: self.client.files.content(file_id).content)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, content)

    def summary(self) -> int:
        """Say what is saved and what is missing; the exit code."""
        items = sum(len(Lines(path).objects) for path in (self.folder / "items").glob("*.*"))
        files = len(list((self.folder / "files").glob("[!.]*")))
        write(self.folder / "missing.jsonl", b"".join(json.dumps(one).encode() + b"\n" for one in self.missing))
        counts = {
            "evals": len(self.evals.objects),
            "runs": len(self.runs.objects),
            "output items": items,
            "files": files,
        }
        print(f"saved in {self.folder}: {', '.join(f'{name} {count:,}' for name, count in counts.items())}")
        for one in self.missing:
            print(f"missing: {one['what']}: {one['reason']}")
        again = any(one["try_again"] for one in self.missing)
        if again:
            print("run the same command again to get what is missing")
        return 1 if again else 0


def write(path: Path, content: bytes) -> None:
    """Write a file that is never seen half written."""
    aside = path.with_name(f".{path.name}")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def main(arguments: list[str]) -> int:
    """Save the project that OPENAI_API_KEY belongs to."""
    if len(arguments) != 1:
        print("usage: python save_openai_evals.py DIRECTORY", file=sys.stderr)
        return 2
    try:
        client = openai.OpenAI(max_retries=0, timeout=120)
        archive = Archive(client, Path(arguments[0]))
        try:
            archive.save()
        except GaveUpError as error:
            archive.miss("everything after this", str(error), again=True)
        except KeyboardInterrupt:
            archive.miss("everything after this", "interrupted", again=True)
    except openai.OpenAIError as error:
        print(f"error: OPENAI_API_KEY must be a key that may read the project's evals: {error}", file=sys.stderr)
        return 2
    return archive.summary()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
