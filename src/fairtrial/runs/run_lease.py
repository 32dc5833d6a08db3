"""The lease of a run: one process at a time executes it, and a process that loses the lease stops.

The run's row has its owner, an epoch that every change of owner increments, and the time of the last heartbeat.
Ownership is taken by compare-and-swap. Every commit carries the epoch and is refused in its own transaction once the
run has been taken over, so a process that was frozen and is resumed stores nothing and starts nothing.

A run is taken over only when its owner has released it, when the owner's process has provably ended (same kernel, same
process namespace), or when its heartbeat is stale: by the database's clock, or by not changing while it is watched.
The wall clocks of two machines are never compared, and process numbers of other machines mean nothing here.

Two clients of a fleet are harmless, because every trial is executed by the worker that receives it: the second one
joins without the lease and logs a warning.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import uuid4

import anyio
from anyio import to_thread

from fairtrial.base.offload import loop_caller
from fairtrial.errors import RunBusyError, StoreError, StoreUnavailableError
from fairtrial.runs.events import log
from fairtrial.runs.writer import ask_store
from fairtrial.store.protocol import RESUMABLE, RunOwner, RunRecord, RunStatus, RunStore

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
_VALID = 2 / 3  # Share of the stale time after which a lease without renewal must be confirmed before it is used.
_POLL_SECONDS = 0.5


async def acquire(store: RunStore, run_id: str, *, client: bool = False) -> RunLease:
    """Acquire the lease of a run; waits while its owner may have died.

    Args:
        store: The store of the run.
        run_id: The run.
        client: Whether this process is a fleet client, which executes nothing itself.

    Raises:
        RunBusyError: another process executes it.
    """
    token = uuid4().hex
    owner = json.dumps(_describe_process() | {"token": token} | ({"client": True} if client else {}))
    first: RunOwner | None = None
    began = _monotonic()
    while True:
        seen = await ask_store(lambda: store.run_owner(run_id), "reading the owner of the run")
        if seen.owner is None or _has_ended(seen.owner) or _is_stale(seen, first, began):
            epoch = await ask_store(partial(_swap, store, run_id, owner, seen), "acquiring the run")
            if epoch is not None:
                return RunLease(store, run_id, epoch, token, client, seen.owner is not None)
        elif first is not None and (seen.epoch, seen.heartbeat_at) != (first.epoch, first.heartbeat_at):
            raise RunBusyError(
                f"run {run_id} is being executed by {_name(seen.owner)}; a second process would execute its trials "
                "twice. Wait for it, or start a new run with resume='never' (--resume never)"
            )
        elif first is None:
            first = seen
            log.warning(
                "run %s was being executed by %s: waiting at most %g s to see whether it still is",
                run_id,
                _name(seen.owner),
                STALE_SECONDS,
            )
        await anyio.sleep(_POLL_SECONDS)


def _swap(store: RunStore, run_id: str, owner: str, seen: RunOwner) -> int | None:
    return store.acquire_run(run_id, owner, seen)


def _is_stale(seen: RunOwner, first: RunOwner | None, began: float) -> bool:
    """Return whether a heartbeat is too old for its owner to be alive."""
    if seen.age_seconds is not None:
        return seen.age_seconds > STALE_SECONDS
    # SQLite has no server clock: a heartbeat is stale if it does not change while it is observed.
    return first is not None and seen == first and _monotonic() - began > STALE_SECONDS


def active_owner(store: RunStore, run_id: str) -> str | None:
    """Describe the process that executes a run, without waiting; None if there seems to be none."""
    seen = store.run_owner(run_id)
    if seen.owner is None or _has_ended(seen.owner):
        return None
    age = seen.age_seconds
    if age is None and seen.heartbeat_at is not None:
        age = time.time() - seen.heartbeat_at  # Only for display.
    return None if age is None or age > STALE_SECONDS else _name(seen.owner)


def current_status(store: RunStore, run: RunRecord) -> RunStatus:
    """Return the status of a run; "interrupted" if it is marked "running" but no process executes it."""
    if run.status != "running" or active_owner(store, run.run_id) is not None:
        return run.status
    # A run that never had an owner is executed by workers only, or was executed by an earlier version.
    owned = store.run_owner(run.run_id).epoch > 0 or run.noted.had_owner
    return "interrupted" if owned else "running"


def with_current_status(store: RunStore, run: RunRecord) -> RunRecord:
    """Return a run with its current status."""
    status = current_status(store, run)
    return run if status == run.status else replace(run, status=status)


def is_client(store: RunStore, run_id: str) -> bool:
    """Return whether the owner of a run is a fleet client."""
    return is_client_owner(store.run_owner(run_id).owner)


def is_client_owner(owner: str | None) -> bool:
    """Return whether the owner in a run's row is a fleet client."""
    return owner is not None and _read(owner).get("client") is True


@dataclass(slots=True)
class RunLease:
    """The lease of one run, renewed by a thread until it is released or lost."""

    store: RunStore
    run_id: str
    epoch: int
    token: str
    client: bool = False  # Whether the owner is a fleet client.
    replaced_owner: bool = False  # Whether the previous owner died without releasing the lease.
    lost: RunBusyError | None = None
    _renewed: float = field(default_factory=lambda: _monotonic())
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        _held.add(self.token)

    @property
    def is_current(self) -> bool:
        """Whether no other process can have taken the run over since the last heartbeat."""
        return self.lost is None and _monotonic() - self._renewed < _VALID * STALE_SECONDS

    def heartbeat(self) -> None:
        """Renew the lease.

        Raises:
            RunBusyError: another process has taken the run over.
        """
        asked = _monotonic()
        try:
            self.store.renew_run(self.run_id, self.epoch)
        except RunBusyError as error:
            self.lost = error
            raise
        self._renewed = asked

    async def confirm(self) -> None:
        """Wait until the lease is known to be valid; at once, unless this process was frozen or the store is
        unavailable.

        Raises:
            RunBusyError: another process has taken the run over.
        """
        while not self.is_current:
            if self.lost is not None:
                raise self.lost
            try:
                await to_thread.run_sync(self.heartbeat)
            except StoreUnavailableError:
                await anyio.sleep(_POLL_SECONDS)  # The writer waits too, and raises when its time limit is over.

    async def watch(self) -> None:
        """Renew the lease until this is cancelled.

        Raises:
            RunBusyError: another process has taken the run over.
        """
        taken_over = anyio.Event()
        self._thread = threading.Thread(
            target=self._keep, args=(loop_caller(), taken_over.set), name="fairtrial lease", daemon=True
        )
        self._thread.start()
        try:
            await taken_over.wait()
        finally:
            self._ended.set()
        if self.lost is not None:
            raise self.lost

    def _keep(self, call: Any, tell: Any) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            try:
                self.heartbeat()
            except RunBusyError:
                break
            except StoreError as error:  # `is_current` prevents that trials are started meanwhile.
                log.debug("a heartbeat of run %s failed: %s", self.run_id, error)
        if self.lost is not None and not self._ended.is_set():
            try:
                call(tell)
            except RuntimeError:
                pass  # The event loop has ended.

    def stop(self) -> None:
        """Stop the heartbeats. Another process can take the run when they are stale, this one at once."""
        self._ended.set()
        _held.discard(self.token)

    def release(self) -> None:
        """Stop the heartbeats and release the lease."""
        self.stop()
        self.store.release_run(self.run_id, self.epoch)


_held: set[str] = set()  # The tokens of the leases that this process holds.


def _monotonic() -> float:
    """Read a clock that includes the time while the machine is suspended, if there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _describe_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": _start_time(pid), **_kernel()}


def _read(owner: str) -> dict[str, Any]:
    try:
        facts = json.loads(owner)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _name(owner: str) -> str:
    facts = _read(owner)
    return f"process {facts.get('pid', '?')} on {facts.get('host', 'an unknown host')}"


def _kernel() -> dict[str, str]:
    """Identify the running kernel and the process namespace; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return {"boot": file.read().strip(), "namespace": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {}


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot; None if there is none, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def _has_ended(owner: str) -> bool:
    """Return whether the process of an owner has provably ended; False if unknown."""
    facts, kernel = _read(owner), _kernel()
    pid = facts.get("pid")
    if not kernel or {name: facts.get(name) for name in kernel} != kernel or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # A process of another user, which cannot be inspected.
    if _start_time(pid) != facts.get("started"):
        return True  # The process number has been reused.
    return pid == os.getpid() and facts.get("token") not in _held


def old_runs(store: RunStore, before: float, *, keep_last: int = 0, suite: str | None = None) -> list[RunRecord]:
    """Return runs that may be deleted, oldest first: ended before that time, not kept, executed or being rescored."""
    every = store.runs()
    read = {run.parent_run for run in every if run.status in ("running", *RESUMABLE)}
    kept: dict[str, int] = {}
    chosen: list[RunRecord] = []
    for run in every:  # Newest first.
        if run.status not in ("finished", "stopped") or (suite is not None and run.suite != suite):
            continue
        # A run that was stopped takes no place of a finished one, and stays as long as those after it.
        finished = kept[run.suite] = kept.get(run.suite, 0) + (run.status == "finished")
        is_kept = run.noted.kept or (finished <= keep_last if run.status == "finished" else finished < keep_last)
        if is_kept or (run.finished_at or run.created_at) >= before or run.run_id in read:
            continue
        if active_owner(store, run.run_id) is None:
            chosen.append(run)
    return chosen[::-1]
