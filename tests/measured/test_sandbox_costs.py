"""The time of a command in a sandbox, against bwrap on its own with the same mounts."""

from __future__ import annotations

import subprocess
from functools import partial

import anyio
import pytest

from fairtrial.integrations.sandbox import Sandbox
from tests.figures import Figure
from tests.measured.test_costs import medians

pytestmark = pytest.mark.measured

BARE = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
BARE += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--tmpfs", "/tmp", "--tmpfs", "/work"]


def test_a_command_takes_at_most_one_and_a_half_times_as_long_as_with_bare_bwrap(figure: Figure) -> None:
    with anyio.from_thread.start_blocking_portal() as portal:
        box = Sandbox()
        command = partial(portal.call, box.exec, ["/usr/bin/true"])
        bare = partial(subprocess.run, [*BARE, "/usr/bin/true"], check=True, capture_output=True)
        assert command().success
        ours, theirs = medians(60, command, bare)
        portal.call(box.close)
    figure("sandbox: time of a command, x bare bwrap", ours / theirs, at_most=1.5)
