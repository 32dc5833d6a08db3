"""Sandboxes as users see them: commands, files, limits, saved states, refusals."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import ConfigurationError, Dataset, Environment, EvalConfig, EvalSuite, Sample, evaluate_sync
from fairtrial.errors import EnvironmentMismatchError, SandboxError, SandboxUnavailableError
from fairtrial.integrations.sandbox import Sandbox, SandboxLimits, SandboxSettings, extract_code, runs_tests
from fairtrial.integrations.sandbox.bwrap import Cgroup
from fairtrial.integrations.sandbox.bwrap_arguments import unused_uid
from fairtrial.integrations.sandbox.container import exec_arguments, run_arguments
from fairtrial.integrations.sandbox.environment import describe_result
from fairtrial.integrations.sandbox.settings import ExecResult, SandboxCommand, find_obstacles
from fairtrial.scoring import Case, resolve
from fairtrial.testing import check_environment
from tests.integrations.sandbox.another_user import ROOT


async def test_a_command_gets_input_arguments_variables_and_a_directory() -> None:
    async with Sandbox(env={"GREETING": "hello"}) as box:
        await box.exec(["mkdir", "-p", "a/b"])
        script = 'cat; echo "$GREETING $NAME $1"; pwd; echo wrong >&2; exit 3'
        result = await box.exec(["sh", "-c", script, "sh", "$x y"], input="in\n", cwd="a/b", env={"NAME": "é"})
    assert result == ExecResult(3, "in\nhello é $x y\n/box/a/b\n", "wrong\n")
    assert not result.success


async def test_files_last_between_commands_and_a_missing_one_is_not_found() -> None:
    data = bytes(range(256)) * 1000
    async with Sandbox() as box:
        await box.write_file("deep/er/data.bin", data)
        await box.write_file("/tmp/text", "é\n")
        assert await box.read_bytes("deep/er/data.bin") == data
        assert await box.read_file("/tmp/text") == "é\n"
        for path, error in (("none", FileNotFoundError), ("deep", IsADirectoryError), ("/etc/gshadow", OSError)):
            with pytest.raises(error, match="cannot read"):
                await box.read_file(path)


async def test_reading_a_pipe_ends_with_the_time_limit() -> None:
    async with Sandbox(limits=SandboxLimits(seconds=0.5)) as box:
        await box.exec(["mkfifo", "pipe"])
        with pytest.raises(SandboxError, match="limit of time exceeded"):
            await box.read_file("pipe")


@pytest.mark.parametrize(
    ("cmd", "status", "message"),
    [
        (["no-such-program"], 127, "no-such-program: No such file or directory\n"),
        (["/etc"], 126, "/etc: Permission denied\n"),
        (["echo", "null\0byte"], 126, "embedded null byte\n"),
        (["echo", "x" * 5_000_000], 126, "echo: Argument list too long\n"),
    ],
    ids=["missing", "directory", "null", "too-long"],
)
async def test_a_command_that_cannot_be_started_is_a_result(cmd: list[str], status: int, message: str) -> None:
    async with Sandbox() as box:
        assert await box.exec(cmd) == ExecResult(status, "", message)
        assert (await box.exec(["true"], cwd="/none")).stderr == "/none: No such file or directory\n"
        assert (await box.exec(["true"])).success


async def test_input_that_is_not_read_and_output_beyond_the_limit_are_no_error() -> None:
    async with Sandbox(limits=SandboxLimits(output=1000)) as box:
        assert (await box.exec(["true"], input=b"x" * 5_000_000)).success
        result = await box.exec(["cat"], input="é" * 5000)
    assert (result.success, result.truncated, len(result.stdout.encode())) == (True, True, 1000)


async def test_commands_of_one_sandbox_run_one_at_a_time() -> None:
    async with Sandbox() as box:
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(
                    box.exec, ["sh", "-c", "n=$(cat n 2>/dev/null || echo 0); sleep 0.05; echo $((n+1)) > n"]
                )
        assert await box.read_file("n") == "5\n"


async def test_the_network_can_be_allowed() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); print('connected')"
        async with Sandbox(network=True) as box:
            assert (await box.exec(["python3", "-c", code])).stdout == "connected\n"


async def test_readable_files_can_be_read_and_not_written(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").write_text("content")
    async with Sandbox(readable=[str(data)]) as box:
        assert await box.read_file(f"{data}/file") == "content"
        with pytest.raises(OSError, match="cannot write"):
            await box.write_file(f"{data}/file", "changed")
        with pytest.raises(FileNotFoundError):
            await box.read_file(f"{tmp_path}/other")
    with pytest.raises(ConfigurationError, match="must be absolute and exist"):
        await Sandbox(readable=["data"]).exec(["true"])


async def test_a_directory_is_read_as_it_is_when_each_of_many_sandboxes_starts(tmp_path: Path) -> None:
    data = tmp_path / "data"
    seen: list[str] = []

    async def read() -> None:
        async with Sandbox(readable=[str(data)]) as box:
            seen.append(await box.read_file(f"{data}/file"))

    for content in ("first", "second"):
        data.mkdir()
        (data / "file").write_text(content)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(read)
        (data / "file").unlink()
        data.rmdir()
    assert seen == ["first"] * 3 + ["second"] * 3
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


async def test_a_closed_sandbox_and_one_whose_first_process_was_killed_say_so() -> None:
    box = Sandbox()
    await box.exec(["true"])
    os.kill(box._backend.pid, 9)  # type: ignore[attr-defined]
    with pytest.raises(SandboxError, match="the sandbox has ended"):
        await box.exec(["true"])
    await box.close()
    await box.close()
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        await box.exec(["true"])


async def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be one of bwrap, docker, inspect, podman, unsafe-local"):
        Sandbox("chroot")
    with pytest.raises(ConfigurationError, match="positive and finite"):
        SandboxLimits(memory=0)
    async with Sandbox() as box:
        with pytest.raises(ConfigurationError, match="for a shell"):
            await box.exec("ls -l")
        with pytest.raises(ConfigurationError, match="has one user"):
            await box.exec(["id"], user="root")


def test_a_sandbox_is_an_environment_that_can_be_saved_restored_and_forked() -> None:
    assert isinstance(Sandbox(), Environment)
    check_environment(
        Sandbox, [("bash", {"command": "echo one >> log"}), ("python", {"code": "print(open('log').read())"})]
    )


async def test_settings_and_broken_states_do_not_come_from_data() -> None:
    async with Sandbox(network=True) as box:
        with pytest.raises(EnvironmentMismatchError, match="settings of its class"):
            await box.serialize()
    for files in ("", "####", "eJwDAAAAAAE=", 3):
        with pytest.raises(EnvironmentMismatchError):
            await Sandbox.deserialize({"env_kind": "fairtrial.sandbox", "version": "1", "files": files})


async def test_tools_return_output_and_how_it_ended() -> None:
    async with Sandbox(limits=SandboxLimits(seconds=1)) as box:
        assert await box.bash("echo out; echo err >&2; exit 2") == "out\nstderr:\nerr\n[exit status 2]"
        assert await box.python("print(6 * 7)") == "42"
        assert await box.bash("true") == "[no output]"
        assert await box.bash("sleep 60") == "[killed after 1 s]"
    long = describe_result(ExecResult(0, "x" * 50_000), SandboxLimits())
    assert len(long) < 21_000
    assert "[... 30000 characters left out ...]" in long


async def test_unsafe_local_runs_here_with_a_time_limit_and_its_own_directory() -> None:
    async with Sandbox("unsafe-local", limits=SandboxLimits(seconds=5, output=10)) as box:
        await box.write_file("a/b", "text")
        assert await box.read_file("a/b") == "text"
        assert (await box.exec(["cat"], input="x" * 1_000_000)).stdout == "x" * 10
        assert (await box.exec(["no-such-program"])).returncode == 127
        result = await box.exec(["sh", "-c", "trap '' TERM; sleep 60"], timeout=0.5)
        assert (result.limit, result.success) == ("time", False)
        assert box.enforcement == "none"
        work = Path(box._backend.work)
        assert work.is_dir()
    assert not work.exists()


REFUSED = """
import ctypes, sys
import anyio
from fairtrial.errors import SandboxUnavailableError
from fairtrial.integrations.sandbox import Sandbox
from fairtrial.integrations.sandbox.bwrap_arguments import seccomp_filter

def forbid_namespaces():
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]
    code = seccomp_filter()
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Program(len(code) // 8, code)), 0, 0) == 0

async def main():
    if sys.argv[1] == "seccomp":
        forbid_namespaces()
    try:
        await Sandbox().exec(["sh", "-c", "echo ran > /dev/stderr"])
    except SandboxUnavailableError as error:
        print(error)

anyio.run(main)
"""


def test_a_machine_without_user_namespaces_is_refused_with_the_setting_to_change() -> None:
    script = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    argv = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh", sys.executable, "-c", REFUSED, "sysctl"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.stdout.startswith("cannot make a bwrap sandbox: "), done
    assert "user.max_user_namespaces=0" in done.stdout
    assert "ran" not in done.stderr


def test_a_container_whose_seccomp_filter_forbids_namespaces_is_refused_by_name() -> None:
    argv = [sys.executable, "-c", REFUSED, "seccomp"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert "runs under a seccomp filter" in done.stdout, done
    assert "ran" not in done.stderr


def test_apparmor_and_debian_switches_are_named(tmp_path: Path) -> None:
    for name, value in (("apparmor_restrict_unprivileged_userns", "1"), ("unprivileged_userns_clone", "0")):
        path = tmp_path / "sys/kernel" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    found = "\n".join(find_obstacles(tmp_path))
    assert "kernel.apparmor_restrict_unprivileged_userns=1" in found
    assert "kernel.unprivileged_userns_clone=0" in found


async def test_a_machine_without_bwrap_is_refused_and_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="bwrap is not installed"):
        await Sandbox().exec(["true"])


def test_user_ids_come_from_the_upper_half_of_those_that_exist() -> None:
    assert all(2**30 - 1 <= unused_uid("0 0 4294967295") < 2**31 for _ in range(100))
    assert all(32_000 < unused_uid("0 100000 65536\n70000 5 1") < 65_535 for _ in range(100))
    with pytest.raises(SandboxError, match="no unprivileged user id"):
        unused_uid("0 1000 1")


def test_a_writable_cgroup_gets_the_limits_and_leftovers_are_removed(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("1:cpu:/x\n0::/user/session\n")
    parent = tmp_path / "root/user/session"
    (parent / "fairtrial-sandbox-left").mkdir(parents=True)
    limits = SandboxLimits(memory=2**30, processes=10, disk=2**20)
    assert Cgroup.create(limits, root=tmp_path / "root", membership=membership) is None
    (parent / "cgroup.controllers").write_text("cpu memory pids\n")
    group = Cgroup.create(limits, root=tmp_path / "root", membership=membership)
    assert group is not None
    assert (parent / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (group.path / "memory.max").read_text() == str(2**30 + 2 * 2**20 + 128 * 2**20)
    assert (group.path / "pids.max").read_text() == "12"
    assert not (parent / "fairtrial-sandbox-left").exists()


async def test_a_provider_that_inspect_does_not_have_is_refused() -> None:
    with pytest.raises(SandboxUnavailableError, match="no-such-provider"):
        await Sandbox("inspect:no-such-provider").exec(["true"])


# Code of models, scored by tests in a sandbox.


TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```bash\npip install y\n```\n```py\nx = 1\n```\n```python\nprint(x)\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```Python title=a.py\nx = 1\n```", "x = 1\n"),
        ("```{python}\nx = 1\n```", "x = 1\n"),
        ("1. Like this:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"),
        ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("Cut off:\n```python\nx = 1\ny =", "x = 1\ny =\n"),
        ("```json\n{}\n```", "```json\n{}\n```"),
        ("", ""),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_code_is_found_in_an_answer(text: str, code: str) -> None:
    assert extract_code(text) == code


def test_the_last_or_all_blocks_can_be_taken() -> None:
    text = "```python\nx = 1\n```\n```js\n0\n```\n```python\nx = 2\n```"
    assert extract_code(text, block="last") == "x = 2\n"
    assert extract_code(text, block="all") == "x = 1\n\nx = 2\n"
    assert extract_code(text, "javascript") == "0\n"


async def score(answer: str, tests: str = TESTS, **options: Any) -> tuple[bool, str]:
    result = await resolve(runs_tests(**options)).score(Case(Sample("q", "", tests), answer))
    return result.passed, result.reason


async def test_code_passes_only_if_its_tests_ran_to_their_end() -> None:
    good = "```python\nfrom __future__ import annotations\ndef add(a, b): return a + b\n"
    assert await score(good + "```") == (True, "")
    assert await score(good + "if __name__ == '__main__': input()\n```") == (True, "")
    assert await score("def add(a, b): return a - b") == (False, "exit status 1: AssertionError")
    assert await score(good + "import sys; sys.exit(0)\n```") == (
        False,
        "the code ended the process before its tests had ended",
    )
    assert await score("def add(a, b): return") == (False, "exit status 1: AssertionError")
    passed, reason = await score("def add(a, b) return a")
    assert (passed, reason.split(":")[1]) == (False, " SyntaxError")
    assert await score("while True: pass", timeout=0.5) == (False, "killed after 0.5 s")


async def test_limits_programs_and_other_commands() -> None:
    small = SandboxLimits(memory=100 * 2**20)
    passed, reason = await score("x = b'x' * (1 << 30)", sandbox=lambda: Sandbox(limits=small))
    assert (passed, reason) == (False, "exit status 1: MemoryError")
    sample: Sample[str, str] = Sample("q", "def add(a, b):\n", TESTS)
    continued = runs_tests(prepare=lambda code, given: f"{given.input}{code}")
    assert (await continued("    return a + b", sample)).passed
    shell = runs_tests(language="bash", files=("add.sh", "test.sh"), command=["sh", "test.sh"])
    tests = '[ "$(sh add.sh 2 3)" = 5 ]'
    in_shell: Sample[str, str] = Sample("q", "", tests)
    assert (await shell("```bash\necho $(($1 + $2))\n```", in_shell)).passed
    assert not (await shell("echo 6", in_shell)).passed


def answer(question: str) -> str:
    return {"add": "```python\ndef add(a, b): return a + b\n```", "wrong": "def add(a, b): return 0"}[question]


@pytest.mark.proves("R145")
def test_a_run_scores_code_and_reports_pass_at_k() -> None:
    samples = Dataset([Sample(name, name, TESTS) for name in ("add", "wrong")])
    report = EvalSuite("code", samples, answer, runs_tests(), config=EvalConfig(repeats=2)).run_sync(store="memory:")
    assert report.pass_rate == 0.5
    assert "pass@2" in str(report.in_detail())


def test_a_sandbox_that_is_not_available_is_an_error_and_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    report = evaluate_sync(Dataset([Sample("a", "add", TESTS)]), answer, runs_tests(), store="memory:")
    (result,) = report.results
    assert result.outcome == "scorer_error"
    assert "bwrap is not installed" in str(result.error)


# The command lines of docker and podman. No container is started here: no engine is part of the test environment.


def pairs(argv: list[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(argv))


def test_a_container_starts_without_network_privileges_or_writable_image_and_with_limits() -> None:
    limits = SandboxLimits(memory=2**30, processes=50, disk=2**20, files=100)
    settings = SandboxSettings(kind="podman", limits=limits, readable=("/data",), image="python:3.13")
    argv = run_arguments("podman", settings, "box-1")
    assert argv[:6] == ["podman", "run", "--interactive", "--rm", "--init", "--name"]
    assert pairs(argv) >= {
        ("--network", "none"),
        ("--user", "1000:1000"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--memory", "1073741824"),
        ("--memory-swap", "1073741824"),
        ("--pids-limit", "52"),
        ("--ulimit", "nofile=1024"),
        ("--ulimit", "fsize=1048576"),
        ("--tmpfs", "/box:rw,exec,nosuid,nodev,size=1048576,nr_inodes=100,mode=1777"),
        ("--mount", "type=bind,source=/data,target=/data,readonly"),
        ("--entrypoint", "sh"),
    }
    assert "--read-only" in argv
    assert argv[-3:] == ["python:3.13", "-c", "echo fairtrial-sandbox-ready; read _"]
    assert ("--network", "bridge") in pairs(run_arguments("docker", SandboxSettings(network=True), "box-1"))


def test_a_command_runs_in_its_directory_with_its_variables_and_its_time_limit() -> None:
    command = SandboxCommand(("ls", "-l"), b"", "/box/a", {"KEY": "a b"}, SandboxLimits(seconds=2.5), "root")
    assert exec_arguments("docker", "box-1", command) == [
        *("docker", "exec", "--interactive", "--workdir", "/box/a", "--env", "KEY=a b", "--user", "root"),
        *("box-1", "timeout", "-s", "KILL", "2.5", "ls", "-l"),
    ]


async def test_a_missing_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for kind in ("docker", "podman"):
        with pytest.raises(SandboxUnavailableError, match=f"{kind} not found"):
            await Sandbox(kind).exec(["true"])


async def test_an_engine_that_fails_is_refused_with_its_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = tmp_path / "docker"
    engine.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 125\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxUnavailableError, match="Cannot connect to the Docker daemon"):
        await Sandbox("docker").exec(["true"])
