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
    while silence < limit:
        began = time.monotonic()
        is_ready = select.select([descriptor], [], [], tick)[0]
        waited = time.monotonic() - began
        if is_ready:
            if not os.read(descriptor, 65536):
                return  # The process ended or stopped being watched.
            silence = 0.0
        elif waited > 2 * tick + 1 or _is_stopped(pid):
            silence = 0.0  # A machine or a process that was suspended is not stalled.
        else:
            silence += waited
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


def _is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal; always False outside Linux."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


if __name__ == "__main__":
    main()
