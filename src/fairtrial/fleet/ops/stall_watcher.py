"""A helper process that kills a worker whose interpreter stalls. Run as a script; imports nothing of Fairtrial.

stall_watcher.py DESCRIPTOR PID SECONDS    reads heartbeats from a pipe until it is closed
"""

import os
import select
import signal
import sys
import time


def main() -> None:
    """Kill the process that started this one when its heartbeats stop for the given time."""
    descriptor, pid, limit = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    tick = min(1.0, limit / 4)
    silence = 0.0
    queue = RunQueue(pid)
    while silence < limit:
        began = time.monotonic()
        is_ready = select.select([descriptor], [], [], tick)[0]
        waited = time.monotonic() - began
        starved = queue.starved_seconds(waited)
        if is_ready:
            if not os.read(descriptor, 65536):
                return  # The process ended or stopped being watched.
            silence = 0.0
        elif waited > 2 * tick + 1 or _is_stopped(pid):
            silence = 0.0  # A machine or a process that was suspended is not stalled.
        else:
            silence += waited - starved
        if os.getppid() != pid:
            return
    sys.stderr.write(
        f"CRITICAL killing worker process {pid}: its interpreter has been stalled for {silence:.1f} s by code that "
        "holds the interpreter lock; its messages will be redelivered\n"
    )
    sys.stderr.flush()
    os.kill(pid, signal.SIGABRT)  # Its fault handler writes the stack of every thread.
    time.sleep(1)
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


class RunQueue:
    """How long the threads of a process wait for a processor, by the scheduler of Linux; elsewhere it is not known.

    A process that gets no processor is not stalled: code that holds the interpreter lock uses one, or sleeps.
    """

    def __init__(self, pid: int) -> None:
        self._folder = f"/proc/{pid}/task"
        self._before: dict[str, tuple[int, int]] = {}
        self.starved_seconds(0.0)

    def starved_seconds(self, elapsed: float) -> float:
        """Return for how many of the seconds since the last call a thread was ready and had no processor."""
        try:
            threads = os.listdir(self._folder)
        except OSError:
            return 0.0
        return min(elapsed, max((self._starved(thread, elapsed) for thread in threads), default=0.0))

    def _starved(self, thread: str, elapsed: float) -> float:
        try:
            with open(f"{self._folder}/{thread}/schedstat") as file:
                ran, delayed = map(int, file.read().split()[:2])
            state = _state(f"{self._folder}/{thread}")
        except (OSError, ValueError):
            return 0.0  # The thread has ended, or this kernel does not count.
        ran_before, delayed_before = self._before.get(thread, (ran, delayed))
        self._before[thread] = ran, delayed
        if ran == ran_before and state == "R":
            return elapsed  # The scheduler adds a delay when it is over.
        return (delayed - delayed_before) / 1e9


def _is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal; always False outside Linux."""
    try:
        return _state(f"/proc/{pid}") in "Tt"
    except OSError:
        return False


def _state(folder: str) -> str:
    with open(f"{folder}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


if __name__ == "__main__":
    main()
