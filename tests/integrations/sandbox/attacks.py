"""Attempts to escape from a sandbox or to disturb its host, each with what must be true afterwards.

`python -m tests.integrations.sandbox.attacks` runs them all in a process of its own, which can be another user's.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from fairtrial.errors import SandboxError
from fairtrial.integrations.sandbox import Sandbox, SandboxLimits

MIB = 1024 * 1024
LIMITS = SandboxLimits(seconds=10, memory=256 * MIB, processes=40, output=MIB, disk=32 * MIB, files=500)
SECRET = "s3cr3t-of-the-host"

type Attack = Callable[[Sandbox], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__] = function
    return function


async def python(box: Sandbox, code: str, *args: str, timeout: float | None = None) -> str:
    result = await box.exec(["python3", "-c", code, *args], timeout=timeout)
    assert result.success, result
    return result.stdout.strip()


def processes_of(pid: int) -> list[int]:
    """The descendants of a process on the host."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            found += [int(child), *processes_of(int(child))]
    return found


def pid_of(box: Sandbox) -> int:
    pid: int = box._backend.pid  # type: ignore[attr-defined]
    return pid


@attack
async def fork_bomb(box: Sandbox) -> None:
    result = await box.exec(["bash", "-c", ":(){ :|:& };: ; while :; do sleep 0.1; done"], timeout=2)
    assert not result.success
    assert processes_of(pid_of(box)) == []


@attack
async def fork_counts_its_children(box: Sandbox) -> None:
    code = (
        "import os, time\nn = 0\n"
        "try:\n    while True:\n        if os.fork() == 0: time.sleep(60)\n        n += 1\n"
        "except BlockingIOError: print(n)"
    )
    count = int(await python(box, code))
    assert 30 <= count <= LIMITS.processes


@attack
async def one_process_takes_all_memory(box: Sandbox) -> None:
    result = await box.exec(["python3", "-c", "x = bytearray(4 << 30)"])
    assert "MemoryError" in result.stderr


@attack
async def many_processes_take_memory(box: Sandbox) -> None:
    code = (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0: x = b'x' * (100 << 20); time.sleep(60)\nos.wait()"
    )
    result = await box.exec(["python3", "-c", code])
    assert result.limit == "memory", result
    assert processes_of(pid_of(box)) == []


@attack
async def memory_that_no_process_owns(box: Sandbox) -> None:
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "try: os.memfd_create('x'); print('memfd')\nexcept OSError as e: print(e.errno)\n"
        "print(libc.shmget(0, 1 << 30, 0o1600), ctypes.get_errno())"
    )
    assert (await python(box, code)).split() == [str(errno.EPERM), "-1", str(errno.EPERM)]


@attack
async def writes_outside(box: Sandbox) -> None:
    places = ["/x", "/usr/x", "/usr/bin/x", "/etc/x", "/etc/passwd", "/dev/x", "/root/x", "/proc/sys/kernel/hostname"]
    places += [f"{sys.base_prefix}/x", "/proc/1/oom_score_adj", "/sys/x"]
    code = "import sys\nfor p in sys.argv[1:]:\n    try: open(p, 'w').write('x'); print(p)\n    except OSError: pass"
    assert await python(box, code, *places) == ""
    assert not Path("/usr/x").exists()


@attack
async def reads_the_environment_of_the_host(box: Sandbox) -> None:
    os.environ["FAIRTRIAL_TEST_SECRET"] = SECRET
    code = (
        "import glob, os\nprint(dict(os.environ))\n"
        "for f in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: print(open(f, 'rb').read())\n    except OSError as e: print(f, e)"
    )
    try:
        seen = await python(box, code)
    finally:
        del os.environ["FAIRTRIAL_TEST_SECRET"]
    assert SECRET not in seen
    assert "/proc/1/environ [Errno 13]" in seen


@attack
async def reads_files_of_the_host(box: Sandbox) -> None:
    with tempfile.TemporaryDirectory() as folder:
        credentials = Path(folder, ".aws", "credentials")
        credentials.parent.mkdir()
        credentials.write_text(SECRET)
        code = (
            "import os, sys\n"
            "for p in [*sys.argv[1:], '/proc/1/root' + sys.argv[1], '/proc/self/cwd/../..' + sys.argv[1]]:\n"
            "    try: print(open(p).read())\n    except OSError: pass\n"
            "print(os.listdir('/home') if os.path.exists('/home') else [])"
        )
        seen = await python(box, code, str(credentials), "/etc/shadow", "/etc/hosts", "/proc/kcore")
        assert seen == "[]"
        found = await box.exec(["find", "/", "-xdev", "-name", "credentials", "-not", "-path", "/usr/*"])
        assert "credentials" not in found.stdout


@attack
async def reads_descriptors_of_the_host(box: Sandbox) -> None:
    with tempfile.NamedTemporaryFile("w+") as secret:
        os.set_inheritable(secret.fileno(), True)
        code = (
            "import os\nprint(sorted(map(int, os.listdir('/proc/self/fd')))[:3], len(os.listdir('/proc/self/fd')))\n"
            "try: print(os.listdir('/proc/1/fd'))\nexcept OSError as e: print(e.errno)"
        )
        assert await python(box, code) == f"[0, 1, 2] 4\n{errno.EACCES}"
        # A sandbox that starts while the descriptor is inheritable.
        async with Sandbox(limits=LIMITS) as other:
            assert os.readlink(f"/proc/self/fd/{secret.fileno()}") == secret.name
            links = (
                [os.readlink(link) for link in Path(f"/proc/{pid_of(other)}/fd").iterdir()] if os.getuid() == 0 else []
            )
            assert secret.name not in links


@attack
async def connects_to_the_host(box: Sandbox) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        os.chmod(folder, 0o755)
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        udp.bind(("127.0.0.1", 0))
        path, abstract = f"{folder}/socket", f"\0fairtrial-{os.getpid()}"
        with socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as hidden:
            unix.bind(path)
            hidden.bind(abstract)
            for listener in (unix, hidden):
                listener.listen()
            code = (
                "import socket, sys\n"
                "for family, address in ((socket.AF_INET, ('127.0.0.1', int(sys.argv[1]))),"
                " (socket.AF_UNIX, sys.argv[3]), (socket.AF_UNIX, chr(0) + sys.argv[4]),"
                " (socket.AF_INET, ('192.0.2.1', 80))):\n"
                "    s = socket.socket(family); s.settimeout(2)\n"
                "    try: s.connect(address); print('connected', address)\n    except OSError: pass\n"
                "try: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', int(sys.argv[2])))\n"
                "except OSError: pass\n"
                "try: socket.socket(40, socket.SOCK_STREAM); print('vsock')\nexcept OSError as e: print(e.errno)"
            )
            ports = (str(tcp.getsockname()[1]), str(udp.getsockname()[1]))
            assert await python(box, code, *ports, path, abstract[1:]) == str(errno.EAFNOSUPPORT)
            for listener in (tcp, udp, unix, hidden):
                listener.setblocking(False)
                with pytest.raises(BlockingIOError):
                    listener.recv(1) if listener is udp else listener.accept()


@attack
async def symlinks_to_the_host(box: Sandbox) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "target")
        target.write_text(SECRET)
        await box.exec(["ln", "-s", str(target), "link"])
        await box.exec(["ln", "-s", folder, "folder"])
        for path in ("link", "folder/target", f"../../..{target}", "/proc/1/root" + str(target), "/proc/1/cwd/x"):
            with pytest.raises((FileNotFoundError, PermissionError)):
                await box.read_file(path)
        for path in ("link", "folder/target"):
            with pytest.raises((OSError, SandboxError), match="sandbox"):
                await box.write_file(path, "changed")
        await box.write_file(str(target), "in the sandbox's own /tmp")
        assert target.read_text() == SECRET
        await box.exec(["rm", "link", "folder"])


@attack
async def signals_to_the_host(box: Sandbox) -> None:
    code = (
        "import os, signal, sys\n"
        "for pid in (1, -1, int(sys.argv[1]), int(sys.argv[2]), os.getppid()):\n"
        "    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):\n"
        "        try: os.kill(pid, number)\n        except OSError: pass"
    )
    await python(box, code, str(os.getpid()), str(pid_of(box)))


@attack
async def a_gigabyte_of_output(box: Sandbox) -> None:
    before = _resident()
    result = await box.exec(["sh", "-c", "head -c 500000000 /dev/zero; head -c 500000000 /dev/zero >&2"], timeout=50)
    assert result.success, result.limit
    assert result.truncated
    assert (len(result.stdout), len(result.stderr)) == (LIMITS.output, LIMITS.output)
    assert _resident() - before < 64 * MIB


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


@attack
async def zombies_and_orphans(box: Sandbox) -> None:
    code = (
        "import os, time\n"
        "for n in range(10):\n"
        "    if os.fork() == 0:\n"
        "        if n % 2 and os.fork() == 0: os.setsid(); time.sleep(60)\n        os._exit(0)\n"
        "print('done')"
    )
    for _ in range(5):
        assert await python(box, code) == "done"
        assert processes_of(pid_of(box)) == []


@attack
async def ignores_signals_until_the_time_limit(box: Sandbox) -> None:
    code = (
        "import os, signal, time\n"
        "for n in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(n, signal.SIG_IGN)\n"
        "os.fork(); os.setsid() if os.getpid() != os.getpgrp() else 0\nprint('started', flush=True)\n"
        "while True: time.sleep(60)"
    )
    started = time.monotonic()
    result = await box.exec(["python3", "-c", code], timeout=1)
    assert result.limit == "time"
    assert "started" in result.stdout
    assert time.monotonic() - started < 4
    assert processes_of(pid_of(box)) == []


@attack
async def gains_privileges(box: Sandbox) -> None:
    code = (
        "import os, shutil\n"
        "try: os.setuid(0); print('root')\nexcept OSError: pass\n"
        "shutil.copy('/usr/bin/id', 'mine'); os.chmod('mine', 0o6755)\n"
        "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('NoNewPrivs')))\n"
        "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('CapBnd')), flush=True)\n"
        "os.system('./mine -u; unshare --user true 2>/dev/null && echo namespace; mount -t tmpfs x /tmp 2>/dev/null')"
    )
    assert (await python(box, code)).split() == ["1", "0000000000000000", "1000"]


@attack
async def asks_the_kernel_for_more(box: Sandbox) -> None:
    """Raw sockets, mounts, namespaces, keys, io_uring, terminals, clock, host name, switches of the whole machine.

    Also the network's own settings by netlink, and a control group that starts a program when it is empty.
    """
    code = (
        "import ctypes, fcntl, os, socket, struct, termios, time\n"
        "libc = ctypes.CDLL(None)\n"
        "def zero(code):\n    if code != 0: raise OSError(code)\n"
        "def some(code):\n    if code < 0: raise OSError(code)\n"
        "def netlink():\n"
        "    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:\n"
        "        link.send(struct.pack('=IHHIIBxHiII', 32, 16, 5, 1, 0, 0, 0, 1, 0, 1))\n"  # Take the first one down.
        "        zero(struct.unpack_from('=i', link.recv(4096), 16)[0])\n"
        "ways = {\n"
        "    'packets': lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),\n"
        "    'mount': lambda: zero(libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0)),\n"
        "    'namespace': lambda: zero(libc.unshare(0x10000000)),\n"
        "    'uring': lambda: some(libc.syscall(425, 4, ctypes.create_string_buffer(200))),\n"
        "    'keys': lambda: some(libc.syscall(250, 0, 0, 0, 0, 0)),\n"
        "    'bpf': lambda: some(libc.syscall(321, 0, 0, 0)),\n"
        "    'terminal': lambda: fcntl.ioctl(0, termios.TIOCSTI, b'x'),\n"
        "    'clock': lambda: time.clock_settime(time.CLOCK_REALTIME, 1),\n"
        "    'name': lambda: socket.sethostname('owned'),\n"
        "    'sysrq': lambda: open('/proc/sysrq-trigger', 'w'),\n"
        "    'netlink': netlink,\n"
        "    'core': lambda: open('/proc/sys/kernel/core_pattern', 'w'),\n"
        "    'modules': lambda: open('/proc/sys/kernel/modprobe', 'w'),\n"
        "    'memory': lambda: open('/proc/sys/vm/overcommit_memory', 'w'),\n"
        "    'forward': lambda: open('/proc/sys/net/ipv4/ip_forward', 'w'),\n"
        "    'release': lambda: open('/sys/fs/cgroup/release_agent', 'w'),\n"
        "    'notify': lambda: open('/sys/fs/cgroup/notify_on_release', 'w'),\n"
        "    'group': lambda: os.mkdir('/sys/fs/cgroup/new'),\n"
        "    'system': lambda: open('/usr/bin/new', 'w'),\n"
        "}\n"
        "for name, way in ways.items():\n"
        "    try: way(); print(name)\n"
        "    except OSError: pass\n"
    )
    assert await python(box, code) == ""
    for signal in ("-9 1", "-STOP 1"):  # The first process of the sandbox; `run_attack` asks whether it still works.
        await box.exec(["sh", "-c", f"kill {signal}"])


@attack
async def traces_the_first_process(box: Sandbox) -> None:
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())\n"
        "try: open('/proc/1/mem', 'rb'); print('memory')\nexcept OSError as e: print(e.errno)"
    )
    assert await python(box, code) == f"-1 {errno.EPERM}\n{errno.EACCES}"


@attack
async def fills_the_disk(box: Sandbox) -> None:
    code = (
        "import os\n"
        "for place in ('/box', '/tmp', '/dev/shm'):\n"
        "    total, kept = 0, []\n"
        "    try:\n"
        "        for n in range(100):\n"
        "            kept.append(open(f'{place}/f{n}', 'wb')); os.unlink(f'{place}/f{n}')\n"
        "            for _ in range(16): total += kept[-1].write(b'x' * (1 << 20)); kept[-1].flush()\n"
        "    except OSError as e: print(e.errno, total >> 20)"
    )
    lines = [tuple(map(int, line.split())) for line in (await python(box, code)).splitlines()]
    assert [number for number, _ in lines] == [errno.ENOSPC] * 3
    assert all(size <= 64 for _, size in lines), lines
    assert await python(box, "print(open('/box/new', 'w').write('room again'))") == "10"


@attack
async def makes_too_many_files(box: Sandbox) -> None:
    code = "import time\nfor n in range(3000):\n    open(f'many{n}', 'w').close()\nwhile True: time.sleep(1)"
    result = await box.exec(["python3", "-c", code])
    assert result.limit == "files"
    assert (await box.exec(["sh", "-c", "rm -f many*"])).success
    assert (await box.exec(["touch", "one"])).success


async def run_attack(function: Attack) -> None:
    """Carry out an attack; the sandbox must work afterwards."""
    async with Sandbox(limits=LIMITS) as box:
        assert (await box.exec(["echo", "before"])).stdout == "before\n"
        await function(box)
        assert (await box.exec(["echo", "after"])).stdout == "after\n"


def main() -> None:
    results = {}
    for name, function in ATTACKS.items():
        try:
            anyio.run(functools.partial(run_attack, function))
            results[name] = "contained"
        except BaseException:
            results[name] = traceback.format_exc()
    print(json.dumps({"uid": os.getuid(), "results": results}))


if __name__ == "__main__":
    main()
