"""Wrong stores, disks, servers, queues and viewers."""

# ruff: noqa: E501
from __future__ import annotations

import os

from tests.first_hour.mistakes.case import GOOD, RAN, RUN, Mistake, program, suite

ALONE = "unshare --mount" if os.getuid() == 0 else "unshare --user --map-root-user --mount"
READ_ONLY = f"{ALONE} sh -c 'mount --bind $PWD $PWD; mount -o remount,bind,ro $PWD; cd $PWD; "
NO_REDIS = "redis://127.0.0.1:9/0"
BUSY = """
import socket, sys
from fairtrial.cli.app import invoke
with socket.create_server(("127.0.0.1", 0)) as taken:
    sys.exit(invoke(["view", "--port", str(taken.getsockname()[1]), "--no-browser"]))
"""
SLOW = """
import time
def slow(x):
    print("started", flush=True)
    time.sleep(1)
    return x.replace("q", "a")
suite = EvalSuite("s", data, slow, exact_match, config=EvalConfig(max_concurrent=1, grace_seconds=0.1))
"""
TWICE = """
import subprocess, time, signal, sys
run = subprocess.Popen([sys.executable, "-m", "fairtrial.cli", "run", "evals.py"], stdout=subprocess.PIPE)
run.stdout.readline()
run.send_signal(signal.SIGINT)
time.sleep(0.3)
run.send_signal(signal.SIGINT)
sys.exit(run.wait(30))
"""

CASES = (
    Mistake("store-bad-url", GOOD, f"{RUN} --store mysql://x/y", 2, ("invalid store URL", "postgresql://host/database"),
            "lists the forms"),
    Mistake("store-pg-down", GOOD, f"{RUN} --store postgresql://u:secretpw@127.0.0.1:9/db", 130,
            ("port 9 failed: Connection refused", "trying again for"), "the address, the reason, how long it waits",
            never=("secretpw",), interrupt="trying again", needs=("psycopg",)),
    Mistake("store-not-a-db", {**GOOD, "x.db": "hello"}, f"{RUN} --store x.db", 2,
            ("x.db exists but is not a Fairtrial database", "--store"), "the file, and the remedy"),
    Mistake("store-missing-folder", GOOD, f"{RAN} --store no/such/folder/x.db", 0, ("100.0%",), "the folder is made"),
    Mistake("store-is-folder", GOOD, f"mkdir x.db\n{RUN} --store x.db", 2, ("cannot open the store x.db", "directory"),
            "the path, and what it is"),
    Mistake("store-csv", GOOD, f"{RUN} --store results.csv", 2, ("invalid store URL", ".db"), "lists the forms"),
    Mistake("store-spaces", GOOD, f"{RAN} --store 'a b.db'\nfairtrial runs --store 'a b.db'", 0, ("s@1",),
            "spaces in paths work"),
    Mistake("readonly-folder", GOOD, f"{READ_ONLY}fairtrial run evals.py'", 2, (".fairtrial", "ead-only file system"),
            "the path of the store, and why", programs=("unshare",), slow=True),
    Mistake("readonly-db", GOOD, f"{RAN} --store r.db\n{READ_ONLY}fairtrial run evals.py --store r.db'", 2,
            ("the store r.db is read-only here", "--store"), "the path, and the remedy", programs=("unshare",), slow=True),
    Mistake("readonly-export", GOOD, f"{RAN}\n{READ_ONLY}fairtrial export s --format html --output s.html'", 2,
            ("s.html: Read-only file system",), "the name that was typed", never=(".s.html.",), programs=("unshare",),
            slow=True),
    Mistake("disk-full", GOOD, f"mkdir m\n{ALONE} sh -c 'mount -t tmpfs -o size=300k none m; "
            "head -c 250000 /dev/zero > m/fill; exec fairtrial run evals.py --store m/r.db'", 130, ("the disk of the store is full", "trying again for"),
            "says so, and waits for room", programs=("unshare",), interrupt="trying again", slow=True),
    Mistake("view-port-in-use", program(BUSY), f"{RAN}\npython x.py", 2, ("port",), "names the port"),
    Mistake("view-no-store", GOOD, "fairtrial view --store nothing.db", 2, ("there is no store at nothing.db",),
            "the path, and how a store comes to be"),
    Mistake("view-unknown-run", GOOD, f"{RAN}\nfairtrial view support --no-browser", 2, ("there is no run 'support'",),
            "before a server starts"),
    Mistake("fleet-redis-down", GOOD, f"{RUN} --mailbox {NO_REDIS}", 3, ("cannot connect to 127.0.0.1:9",
            "trying again for 30 s"), "the address, the reason, how long it waits", interrupt="trying again",
            needs=("redis",)),
    Mistake("worker-redis-down", GOOD, f"fairtrial worker evals.py --mailbox {NO_REDIS}", 0,
            ("cannot connect to 127.0.0.1:9", "is the server running, and --mailbox right?"),
            "one line with the address and what to check; then one a minute",
            never=("MailboxConnectionError(", "retrying in"), interrupt="--mailbox right", needs=("redis",)),
    Mistake("worker-no-mailbox", GOOD, "fairtrial worker evals.py", 2, ("no queue is configured", "FAIRTRIAL_MAILBOX"),
            "the option, the variable, the setting"),
    Mistake("fleet-memory-store", GOOD, f"{RUN} --store memory: --mailbox {NO_REDIS}", 3, ("cannot connect", "nothing was executed"),
            "the queue is reached first; a store in memory is fine for a client", interrupt="trying again",
            needs=("redis",)),
    Mistake("two-runs-at-once", suite(SLOW.replace("sleep(1)", "sleep(0.3)").replace("print(\"started\", flush=True)",
            "open('log', 'a').write(x)")), "fairtrial run evals.py > a & fairtrial run evals.py > b; wait; wc -c < log; "
            "fairtrial runs", 0, ("12", "s@1"), "six samples were executed once each", never=("s@2",), slow=True),
    Mistake("ctrl-c-import", {"evals.py": "import time\nprint('started', flush=True)\ntime.sleep(3)\n"}, RUN, 130, (),
            "ends at once, without a trace of imports", never=("KeyboardInterrupt",), interrupt="started"),
    Mistake("ctrl-c-run", suite(SLOW), f"{RUN}\nfairtrial runs", 0, ("interrupted",), "what is done is stored",
            interrupt="started", steps_after=1),
    Mistake("ctrl-c-twice", suite(SLOW, **program(TWICE)) | suite(SLOW), "python x.py", 130, (), "ends within seconds",
            never=("KeyboardInterrupt",), slow=True),
    Mistake("changed-code-resume", suite(SLOW), f"{RUN}\nsed -i s/started/begun/ evals.py\n{RAN}", 0, ("note:",),
            "a new run, and how to resume the old one", interrupt="started", steps_after=2),
    # New ones.
    Mistake("store-env-folder", GOOD, f"mkdir data\nFAIRTRIAL_STORE=data {RUN}", 2, ("invalid store URL",),
            "lists the forms; doctor shows where a path comes from"),
    Mistake("store-sqlite-two-slashes", GOOD, f"{RUN} --store sqlite://runs.db", 2, ("invalid store URL", "sqlite:///path"),
            "lists the forms, with three slashes"),
    Mistake("env-mailbox-typo", GOOD, f"FAIRTRIAL_MAILBOX=localhost:6379 {RUN} --mailbox", 2, ("redis://",),
            "lists the forms of addresses"),
    Mistake("env-unknown", GOOD, "FAIRTRIAL_STOR=x.db fairtrial doctor", 0, ("FAIRTRIAL_STOR",),
            "doctor names a variable that nothing reads"),
    Mistake("mailbox-kafka", GOOD, f"{RUN} --mailbox kafka://localhost:9092", 2, ("redis://", "sqs://"), "lists the forms"),
    Mistake("worker-no-suite", {}, f"fairtrial worker --mailbox {NO_REDIS}", 2, ("missing argument 'SUITE'",), "what is missing",
            needs=("redis",)),
    Mistake("worker-processes-zero", GOOD, f"fairtrial worker evals.py --mailbox {NO_REDIS} --processes 0", 2,
            ("--processes",), "the option and its limit"),
    Mistake("fleet-no-mailbox", GOOD, "fairtrial fleet", 2, ("no queue is configured", "FAIRTRIAL_MAILBOX"),
            "the option, the variable, the setting"),
    Mistake("view-port-text", GOOD, f"{RAN}\nfairtrial view --port http", 2, ("--port must be a whole number (got 'http')",),
            "the option and the value"),
)  # fmt: skip
