"""What works without that which Windows and macOS lack; `without_posix` takes it away."""

from __future__ import annotations

import _thread
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest

from fairtrial.base import system
from tests.cli.test_interrupt import SLOW

ROOT = Path(__file__).parent.parent.parent
HOOK = Path(__file__).parent / "without_posix"
PATHS = os.pathsep.join((str(HOOK), str(ROOT / "src")))  # Of these tests, also in a copy.
DEEP = "/".join(["a-folder-with-a-long-name-" + "x" * 40] * 4)  # More than 260 characters.
SCRIPT = """
import sys

from fairtrial import Dataset, Sample, evaluate_sync, exact_match, task


def shout(text: str) -> str:
    return text.upper()


shouting = task(isolate=True)(shout) if "isolate" in sys.argv else shout
print(evaluate_sync(Dataset([Sample("s1", "\u4e2d\u00e9", "\u4e2d\u00c9")]), shouting, exact_match))
"""
COLUMNS = """
import sys

from fairtrial import open_store
from fairtrial.reports.figures.column_file import forget, open_columns

store = open_store(sys.argv[1])
run = store.runs()[0]
made = open_columns(store, run)
forget()
print(open_columns(store, run, build=False) is not None)
store.close()
"""
# What only these files may use: the rest of the source asks fairtrial.base.system, or uses what every system has.
POSIX = re.compile(
    r"\bos\.(fork|getpgrp|geteuid|getuid|kill|killpg|preadv?|pwrite|register_at_fork|replace|setsid|sysconf|uname|waitpid)\("
    r"|\bimport (fcntl|grp|pwd|resource|termios)\b|\bsignal\.(SIG(KILL|IO|HUP|CHLD)\b|alarm\()|\btime\.CLOCK_"
    r"|\b(AF_UNIX|O_ASYNC|SO_REUSEADDR|add_reader|add_signal_handler|pass_fds|start_new_session|process_group)\b"
)
MAY_USE_POSIX = ("base/system.py", "base/isolation/", "integrations/sandbox/", "fleet/ops/stall_watcher.py")
# Each of these lines is behind a condition, or after a refusal.
GUARDED = {
    "fleet/local/channel.py": 1,
    "fleet/ops/watchdog.py": 2,
    "mailbox/postgres/connection.py": 1,
    "runs/code.py": 1,
    "runs/run_lease.py": 1,
    "viewer/serve.py": 2,
}


def environment(**more: str) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "FAIRTRIAL_", "PYTHON"))}
    return known | {"PYTHONPATH": PATHS, "PYTHONIOENCODING": "cp1252", "PYTHONWARNDEFAULTENCODING": "1"} | more


def python(*words: str, folder: Path, code: int = 0, **more: str) -> str:
    """Run Python without what Windows lacks, with a console of Western Europe."""
    ran = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment(**more), capture_output=True, timeout=100, check=False
    )
    text = (ran.stdout + ran.stderr).decode("cp1252")
    assert ran.returncode == code, text
    assert "Traceback" not in text, text
    assert not [line for line in text.splitlines() if "EncodingWarning" in line and "fairtrial" in line], text
    return text


def command(*words: str, folder: Path, code: int = 0, **more: str) -> str:
    return python("-m", "fairtrial.cli", *words, folder=folder, code=code, **more)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as Git checks it out on Windows: the lines of templates and data end with CR LF."""
    copy = tmp_path_factory.mktemp("checkout") / "fairtrial"
    shutil.copytree(ROOT / "src/fairtrial", copy)
    for path in copy.rglob("*"):
        if path.suffix in (".csv", ".jsonl", ".md", ".txt", ".html", ".css", ".js", ".sql", ".toml") or (
            path.suffix == ".py" and "templates" in path.parts
        ):
            path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    return copy.parent


@pytest.fixture(scope="module")
def project(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of the tutorial, after its run."""
    folder = tmp_path_factory.mktemp("deep") / DEEP
    folder.mkdir(parents=True)
    paths = os.pathsep.join((str(HOOK), str(checkout)))
    command("init", "demo", folder=folder, PYTHONPATH=paths)
    assert "careful   89.7%" in command("run", folder=folder / "demo", PYTHONPATH=paths)
    return folder / "demo"


@pytest.mark.long
def test_the_help_needs_nothing_that_only_posix_has(tmp_path: Path) -> None:
    assert "compare" in command("--help", folder=tmp_path)


@pytest.mark.long
def test_the_tutorial_works_without_what_windows_lacks(project: Path) -> None:
    assert "q20" in command("show", "support:baseline", "--sample", "q20", folder=project)
    compared = command("compare", "support:baseline", "support:careful", "--by", "kind", folder=project)
    assert "87.5% against 75.0%" in " ".join(compared.split())
    assert "pass: pass rate 87.5%" in command("gate", "support:careful", "--floor", "passed=0.7", folder=project)
    assert "wrote r.html" in command("export", "support", "--format", "html", "--output", "r.html", folder=project)
    assert "you can write to" in command("doctor", folder=project)
    assert max(len(str(path.relative_to(project))) for path in project.rglob("*")) < 100


@pytest.mark.long
def test_a_column_file_is_read_without_what_windows_lacks(project: Path) -> None:
    (stored,) = project.rglob("*.db")
    assert python("-c", COLUMNS, f"sqlite:///{stored}", folder=project).split() == ["True"]


@pytest.mark.long
def test_the_viewer_serves_and_ends_without_what_windows_lacks(project: Path) -> None:
    words = ["-m", "fairtrial.cli", "view", "--no-browser", "--port", "0"]
    server = subprocess.Popen(
        [sys.executable, *words], cwd=project, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        assert server.stderr is not None
        lines = (line.decode() for line in server.stderr)
        address = next(line.split()[-1] for line in lines if line.startswith("open "))
        with pytest.raises(urllib.error.HTTPError) as asked:
            urllib.request.urlopen(address, timeout=60)
        assert asked.value.code == 401  # It asks for the token.
        asked.value.close()
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert server.returncode == 0


@pytest.mark.long
def test_a_run_in_python_prints_its_report_and_refuses_isolation_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    assert "100.0%" in python("script.py", folder=tmp_path)
    refusing = (
        "try:\n    exec(open('script.py', encoding='utf-8').read())\nexcept Exception as error:\n    print(error)"
    )
    told = python("-c", refusing, "isolate", folder=tmp_path)
    assert told.splitlines() == ["isolate=True works on Linux and macOS, not on Windows: remove it, or run this there"]


@pytest.mark.long
def test_an_interrupted_run_continues_without_what_windows_lacks(tmp_path: Path) -> None:
    interrupting = SLOW.replace("import asyncio\n", "import asyncio\nimport os\nimport signal\n").replace(
        "    await asyncio",
        "    if number == 5 and 'STOP' in os.environ:\n        signal.raise_signal(signal.SIGINT)\n    await asyncio",
    )
    (tmp_path / "slow.py").write_text(interrupting, encoding="utf-8")
    stopped = command("run", "slow.py", folder=tmp_path, code=130, STOP="1")
    assert "resume it with: " in stopped.splitlines()[-1]
    assert "of 60 trials are stored" in command("run", "slow.py", folder=tmp_path)


REFUSED = """
import asyncio
from pathlib import Path

from fairtrial.integrations.sandbox import Sandbox
from fairtrial.mailbox.postgres.connection import PostgresConnection
from fairtrial.suites.worker import run_worker
from fairtrial.viewer.serve import _listen_on_path

for call in (
    Sandbox,
    lambda: _listen_on_path(Path("x")),
    lambda: asyncio.run(run_worker("", "", signals=True)),
    lambda: PostgresConnection("postgresql://host/database"),
):
    try:
        call()
    except Exception as error:
        print(error)
"""


@pytest.mark.long
def test_what_cannot_work_is_refused_in_one_sentence(tmp_path: Path) -> None:
    told = python("-c", REFUSED, folder=tmp_path).splitlines()
    assert [line.partition(", not on Windows: ")[0] for line in told] == [
        "a sandbox works on Linux and macOS",
        "--socket works on Linux and macOS",
        "a worker process runs on Linux and macOS",
        "a mailbox on PostgreSQL works on Linux and macOS",
    ]


@pytest.mark.long
@pytest.mark.parametrize("ends_by", ["a signal", "the end of its input"])
def test_a_model_server_ends_without_signal_handlers_and_readers_of_the_loop(ends_by: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "fairtrial.integrations.model_server", "--attached"],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(b"{}\n")
    server.stdin.flush()
    assert server.stdout.readline().startswith(b"http://")
    if ends_by == "a signal":
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    _, errors = server.communicate(timeout=60)
    assert (server.returncode, errors) == (0, b"")


def test_ctrl_c_is_handled_while_windows_waits_for_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    # `interrupt_main` does what Ctrl-C does on Windows: it notes the signal, and does not interrupt the wait.
    monkeypatch.setattr(system, "_LOOK_SECONDS", 0.01)
    future: Future[str] = Future()
    before = signal.signal(signal.SIGINT, lambda *_: future.set_result("handled"))
    late = threading.Timer(5.0, future.set_exception, [TimeoutError("the signal was not handled")])
    late.start()
    threading.Timer(0.05, _thread.interrupt_main).start()
    try:
        assert system.result_of(future) == "handled"
    finally:
        late.cancel()
        signal.signal(signal.SIGINT, before)


def test_a_file_that_a_scanner_reads_is_replaced_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [PermissionError("read by another process")] * 2
    replace = os.replace

    def refuse(aside: str, target: str) -> None:
        if refusals:
            raise refusals.pop()
        replace(aside, target)

    monkeypatch.setattr(system, "_REPLACE_SECONDS", 5.0)
    monkeypatch.setattr(os, "replace", refuse)
    (tmp_path / "new").write_text("new", encoding="utf-8")
    (tmp_path / "old").write_text("old", encoding="utf-8")
    system.replace_file(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text(encoding="utf-8") == "new"


def test_no_second_server_shares_a_port_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "IS_POSIX", False)
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_KEEPALIVE, raising=False)
    with socket.socket() as made:
        system.keep_port(made)
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 0


def test_only_the_layer_uses_what_windows_lacks() -> None:
    found = Counter[str]()
    for path in (ROOT / "src/fairtrial").rglob("*.py"):
        name = path.relative_to(ROOT / "src/fairtrial").as_posix()
        if not name.startswith(MAY_USE_POSIX):
            found[name] = len(POSIX.findall(path.read_text(encoding="utf-8")))
    assert {name: count for name, count in found.items() if count} == GUARDED


def test_every_file_of_the_repository_can_be_checked_out_on_windows() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    names = [name for name in listed.split("\0") if name]
    assert len({name.casefold() for name in names}) == len(names)
    assert not [name for name in names if set(name) & set('<>:"\\|?*') or name.endswith((" ", "."))]
    reserved = {"con", "prn", "aux", "nul", "com1", "lpt1"}
    assert not [name for name in names if {part.partition(".")[0].casefold() for part in name.split("/")} & reserved]
    assert max(map(len, names)) < 150
