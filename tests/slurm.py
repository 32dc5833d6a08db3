"""A real Slurm on one node, for tests: munged, slurmctld and slurmd in a folder of their own, as the current user."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.redis_server import free_port

_START_SECONDS = 30

_SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=2000
PartitionName=all Nodes={host} Default=YES State=UP
"""


class Slurm:
    """One node with four processors, in a folder whose path is short enough for a socket."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fairtrial-slurm-"))
        self._stack = ExitStack()

    @property
    def environment(self) -> dict[str, str]:
        """What the commands of Slurm need to find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Self:
        with self._stack as stack:
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            for name in ("munge", "state", "spool"):
                (self.folder / name).mkdir()
            (self.folder / "munge").chmod(0o755)
            key = self.folder / "munge" / "key"
            key.write_bytes(secrets.token_bytes(1024))
            key.chmod(0o400)
            files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
            places = [
                f"--{name}{'' if name == 'socket' else '-file'}={key.parent / file}" for name, file in files.items()
            ]
            self._start("munged", "--force", "--foreground", *places)
            (self.folder / "slurm.conf").write_text(
                _SETTINGS.format(
                    host=socket.gethostname().partition(".")[0],
                    user=getpass.getuser(),
                    controller=free_port(),
                    node=free_port(),
                    folder=self.folder,
                )
            )
            self._wait(lambda: (self.folder / "munge" / "socket").exists())
            self._start("slurmctld", "-D", "-c")
            self._start("slurmd", "-D")
            self._wait(lambda: self.command("sinfo", "--noheader", "--format=%t") == "idle")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def command(self, *words: str, **settings: str) -> str:
        """Run a command of Slurm; returns what it prints."""
        environment = {**os.environ, **self.environment, **settings}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, cwd=self.folder)
        return done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr}"

    def logs(self) -> str:
        """What the daemons and jobs wrote, for the message of a failed test."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def _start(self, name: str, *options: str) -> None:
        binary = shutil.which(name) or shutil.which(name, path="/usr/sbin")
        assert binary is not None, f"the tests of Slurm need {name}: run scripts/setup"
        environment = {**os.environ, **self.environment}
        with open(self.folder / f"{name}-output.log", "w") as log:
            process = subprocess.Popen([binary, *options], stdout=log, stderr=log, env=environment)
        self._stack.callback(_end, process)

    def _wait(self, happened: object) -> None:
        assert callable(happened)
        end = time.monotonic() + _START_SECONDS
        while not happened():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
