"""Random histories of runs with transcripts in a bucket: processes are killed, it fails, objects are damaged.

    python -m tests.store.transcript_histories 500              # the histories 0 to 499, in an SQLite store each
    python -m tests.store.transcript_histories 41 42            # the history 41
    python -m tests.store.transcript_histories 500 --postgres --seconds 600

Beside the store, a history keeps the transcript that each trial must have. Whatever happens, a transcript that is read
is this one, or there is an error; and there is an error only while the bucket fails or if the object was damaged.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from fairtrial import ChatMessage, EvalResult, Session
from fairtrial.errors import StoreError, StoreUnavailableError
from fairtrial.store import RunRecord, objects, open_store, save_run, upkeep
from fairtrial.store.commit import RunState
from fairtrial.store.objects import BucketObjects, Objects, open_objects
from fairtrial.store.protocol import Committed
from fairtrial.store.rows import OUTCOMES, replaces
from fairtrial.store.segments import reference
from fairtrial.store.sql import SqlStore
from tests.bucket_proxy import DENIED, SLOW_DOWN, BucketProxy
from tests.servers import PostgresServer
from tests.sqs_server import CREDENTIALS, REGION, SqsServer
from tests.store.build import result, run_record, samples

STEPS = 14
SIZE = 6
BUCKET = "evals"
_DAMAGED = re.compile("a transcript of run .* is (damaged|missing)")


class KilledError(BaseException):
    """The process ends here."""


class Meanwhile:
    """Does something between the writing of a segment and the commit of its rows."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def begin(self, connection: sa.Connection) -> None:
        """Change nothing."""

    def check(self, connection: sa.Connection, committed: Committed, run: RunState) -> None:
        """Do it."""
        self._action()


@dataclass
class Known:
    """A run and what must be stored of it: by ordinal, the result and its transcript."""

    run: RunRecord
    results: dict[int, EvalResult] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)


class History:
    """One random history. The same seed gives the same history."""

    def __init__(self, url: str, address: str, proxy: BucketProxy, seed: int, folder: Path) -> None:
        self.url, self.address, self.proxy, self.folder = url, address, proxy, folder
        self.chance = random.Random(seed)
        self.seed = seed
        self.stores = [self._open(), self._open()]
        self.direct: Objects = open_objects(address)
        self.runs: dict[str, Known] = {}
        self.made = 0
        self.steps: list[str] = []
        self.seen: Counter[str] = Counter()

    def _open(self) -> SqlStore:
        store = open_store(self.url, transcripts=self.address if self.chance.random() < 0.8 else None)
        assert isinstance(store, SqlStore)
        return store

    def close(self) -> None:
        for store in self.stores:
            store.close()

    @property
    def store(self) -> SqlStore:
        """One of two processes."""
        return self.chance.choice(self.stores)

    def step(self) -> None:
        """Let something happen."""
        actions: dict[Callable[[Known], None], int] = {
            self.commit: 8, self.read: 4, self.move: 3, self.damage: 1, self.prune: 2, self.delete: 1, self.copy: 1,
            self.reopen: 1,
        }  # fmt: skip
        if len(self.runs) < 2:
            self.start()
        action = self.chance.choices(list(actions), list(actions.values()))[0]
        self.seen[action.__name__] += 1
        self.steps.append(action.__name__)
        action(self.chance.choice(list(self.runs.values())))

    def start(self) -> None:
        self.made += 1
        # Folders of runs whose names begin with another's must not be taken for it.
        run = self.store.create_run(run_record(f"r{'1' * self.made}", size=SIZE))
        self.runs[run.run_id] = Known(run)

    def transcript(self) -> bytes | None:
        size = self.chance.choice((None, 5, 500, 5_000))
        if size is None:
            return None
        session = Session(tags={})
        session.record(ChatMessage("assistant", self.chance.randbytes(size).hex()))
        return session.snapshot()

    def batch(self, known: Known) -> list[EvalResult]:
        made = []
        for ordinal in self.chance.sample(range(known.run.planned), self.chance.randint(1, 8)):
            self.seen["results"] += 1
            outcome: Any = self.chance.choice(("scored", "scored", "task_error"))
            changes: dict[str, Any] = {"attempt": self.chance.randint(1, 3), "execution": self.seen["results"]}
            made.append(result(known.run, ordinal, outcome, snapshot=self.transcript(), **changes))
        return made

    def committed(self, known: Known, batch: list[EvalResult]) -> None:
        """Remember what the store has by the rules of `RunStore.commit`."""
        for one in batch:
            old = known.results.get(one.ordinal)
            if old is None or replaces(OUTCOMES[one.outcome], one.attempt, OUTCOMES[old.outcome], old.attempt):
                known.results[one.ordinal] = one
                known.damaged.discard(one.ordinal)

    @contextmanager
    def fault(self, known: Known | None = None) -> Iterator[None]:
        """Let the bucket fail, or not; the error must be of the right kind. The objects of a run may be damaged."""
        proxy = self.proxy
        name = self.chance.choice(("none", "none", "none", "slow down", "away", "unanswered", "denied"))
        self.seen[name] += 1
        self.steps.append(name)
        if name in ("slow down", "denied"):
            proxy.refusal = DENIED if name == "denied" else SLOW_DOWN
        proxy.away, proxy.unanswered = name == "away", name == "unanswered"
        try:
            yield
        except StoreUnavailableError:
            if name in ("none", "denied"):
                raise
        except StoreError as error:
            left = name != "none" and "is deleted, but not its transcripts" in str(error)
            damaged = known is not None and known.damaged and _DAMAGED.search(str(error))
            if not (left or damaged or (name == "denied" and "was denied" in str(error))):
                raise
        finally:
            proxy.calm()

    def commit(self, known: Known) -> None:
        batch, store = self.batch(known), self.store
        given = samples(range(SIZE))
        if self.chance.random() < 0.3:
            with self.fault():
                store.commit(known.run.run_id, batch, given)
                self.committed(known, batch)
        elif self.chance.random() < 0.3:
            self.steps.append("killed")
            with suppress(KilledError):
                store.commit_with(known.run.run_id, batch, given, Meanwhile(_kill))
        else:
            other = self.store
            meanwhile = Meanwhile(lambda: _prune(other))
            store.commit_with(known.run.run_id, batch, given, meanwhile)
            self.committed(known, batch)

    def read(self, known: Known) -> None:
        with self.fault():
            self.check(self.store, known, self.chance.sample(range(known.run.planned), 4))

    def check(self, store: SqlStore, known: Known, ordinals: list[int]) -> None:
        """Read transcripts: each is right, or its object was damaged."""
        for ordinal in ordinals:
            if ordinal in known.results:
                try:
                    found = store.snapshot(known.run.run_id, ordinal)
                except StoreUnavailableError:
                    raise
                except StoreError as error:
                    if ordinal in known.damaged and _DAMAGED.search(str(error)):
                        continue
                    raise
                assert found == known.results[ordinal].snapshot, f"another transcript of trial {ordinal}"
                self.seen["transcripts"] += 1

    def move(self, known: Known) -> None:
        store, other = self.store, self.store
        address = self.chance.choice((None, self.address))
        kill_after = self.chance.choice((1, 2, 5, 99))
        steps = [0]

        def meanwhile(_count: int) -> None:
            steps[0] += 1
            if not (self.proxy.away or self.proxy.refusal or self.proxy.unanswered):
                self.check(other, known, self.chance.sample(range(known.run.planned), 3))
                batch = self.batch(known)  # By a process that has read the plan before.
                other.commit(known.run.run_id, batch, samples(range(SIZE)))
                self.committed(known, batch)
            if steps[0] == kill_after:
                raise KilledError

        reading = iter(other.results(known.run.run_id, snapshots=True))
        with suppress(KilledError), self.fault(known):
            store.move_transcripts(known.run.run_id, address, done=meanwhile)
        if not known.damaged:
            for one in reading:
                if one.execution == known.results[one.ordinal].execution:
                    assert one.snapshot == known.results[one.ordinal].snapshot

    def damage(self, known: Known) -> None:
        if self.chance.random() < 0.5:  # Others go on with whole objects.
            return
        names = sorted(found.name for found in self.direct.list(known.run.run_id) if found.name.endswith(".segment"))
        if not names:
            return
        name = self.chance.choice(names)
        assert isinstance(self.direct, BucketObjects)
        old = self.direct.read(name, 0, 1 << 24)
        self.direct.delete([name])
        new = b""
        way = self.chance.choice(("deleted", "cut off", "emptied", "swapped"))
        if way == "cut off":
            new = old[: self.chance.randrange(max(1, len(old)))]
        elif way == "swapped":
            new = self.direct.read(other, 0, 1 << 24) if (other := self.chance.choice(names)) != name else old[::-1]
        if way != "deleted":
            self.direct.put(name, new)
        for ordinal, column in _columns(self.stores[0], known.run.run_id):
            part = reference(column)
            if (
                part is not None
                and part.segment.hex() in name
                and old[part.offset : part.end] != new[part.offset : part.end]
            ):
                known.damaged.add(ordinal)
                self.seen["damaged"] += 1

    def prune(self, _known: Known) -> None:
        with self.fault():
            self.store.delete_unnamed_segments(older_than_seconds=self.chance.choice((86_400.0, -3_600.0)))

    def delete(self, known: Known) -> None:
        del self.runs[known.run.run_id]
        with self.fault():
            self.store.delete_run(known.run.run_id)

    def copy(self, known: Known) -> None:
        if known.damaged:
            return
        path = self.folder / f"copy-{self.seed}-{len(self.steps)}.db"
        save_run(self.store, known.run.run_id, path)
        with closing(open_store(path)) as copied:
            assert isinstance(copied, SqlStore)
            self.check(copied, known, list(range(known.run.planned)))
        path.unlink()

    def reopen(self, _known: Known) -> None:
        self.stores.pop(self.chance.randrange(2)).close()
        self.stores.append(self._open())

    def check_all(self) -> None:
        """Read everything, before and after what no row names was deleted."""
        for store in self.stores:
            for known in self.runs.values():
                self.check(store, known, list(range(known.run.planned)))
            for check in store.check_segments():
                assert set(check.unreadable) <= self.runs[check.run.run_id].damaged
            store.delete_unnamed_segments(older_than_seconds=-3_600.0)
            assert not any(check.unnamed for check in store.check_segments())


def _kill() -> None:
    raise KilledError


def _prune(store: SqlStore) -> None:
    store.delete_unnamed_segments()


def _columns(store: SqlStore, run_id: str) -> list[tuple[int, bytes]]:
    number, _run = store._run(run_id)
    query = sa.text("SELECT ordinal, transcript FROM details WHERE run = :run AND transcript IS NOT NULL")
    with store._engine.connect() as connection:
        return [(row[0], bytes(row[1])) for row in connection.execute(query, {"run": number})]


def play(url: str, address: str, proxy: BucketProxy, seed: int, folder: Path, *, steps: int = STEPS) -> Counter[str]:
    """Play a history; raises at the first wrong transcript or error. Returns what happened."""
    history = History(url, address, proxy, seed, folder)
    try:
        for _ in range(steps):
            history.step()
        history.check_all()
    except BaseException as error:
        error.add_note(f"history {seed}, after {'; '.join(history.steps)}")
        raise
    finally:
        proxy.calm()
        history.close()
    return history.seen


@contextmanager
def emulated_bucket() -> Iterator[BucketProxy]:
    """A bucket of the emulator behind a proxy, which the environment names."""
    import botocore.session

    with SqsServer() as server, BucketProxy(server.port) as proxy:
        client = botocore.session.get_session().create_client(
            "s3", region_name=REGION, endpoint_url=server.endpoint,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip
        client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
        client.close()
        before = {name: os.environ.get(name) for name in (*CREDENTIALS, "AWS_REGION", "AWS_ENDPOINT_URL")}
        os.environ.update({**CREDENTIALS, "AWS_REGION": REGION, "AWS_ENDPOINT_URL": proxy.endpoint})
        try:
            yield proxy
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def main() -> None:
    """Play histories and print what happened in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", type=int, nargs="*", default=[500], help="how many, or the first and the end")
    parser.add_argument("--postgres", action="store_true", help="a database each of a server that it starts")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after this time")
    options = parser.parse_args()
    first, end = (0, *options.numbers)[-2:]
    seen: Counter[str] = Counter()
    upkeep._MOVED_AT_ONCE, objects._RETRIES = 3, 0
    began = time.monotonic()
    played = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy = stack.enter_context(emulated_bucket())
        server = stack.enter_context(PostgresServer()) if options.postgres else None
        for seed in range(first, end):
            if time.monotonic() - began > options.seconds:
                break
            url = str(folder / f"{seed}.db") if server is None else server.new_database()
            seen += play(url, f"s3://{BUCKET}/{seed}", proxy, seed, folder)
            played += 1
            if server is None:
                (folder / f"{seed}.db").unlink()
            else:
                server.drop_database(url)
    print(f"{played} of {end - first} histories in {time.monotonic() - began:.0f} s: {dict(seen)}")
    sys.exit(played < end - first)


if __name__ == "__main__":
    main()
