"""A disk that becomes full while a file is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from tests.cli.conftest import Cli
from tests.cli.test_screens import environment

FULL = dedent(
    """
    import contextlib, io, json, os, subprocess, sys
    from fairtrial.cli.app import invoke

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", "full"], check=True)
    found = {}
    for kind in sys.argv[1:]:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = invoke(["export", "doubles", "--format", kind, "--output", f"full/out.{kind}"])
        found[kind] = [code, said.getvalue(), os.listdir("full")]
    print(json.dumps(found))
    """
)


def test_an_export_to_a_full_disk_says_so_with_the_path_and_leaves_nothing(cli: Cli, evals: Path) -> None:
    assert cli("run", "evals.py", "--quiet", "--repeats", "30").code == 0
    Path("full").mkdir()
    kinds = ("csv", "jsonl", "html", "json", "junit", "otlp", "site", "run")
    alone = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    command = [*alone, sys.executable, "-c", FULL, *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kind in kinds:
        code, said, left = found[kind]
        assert (code, left) == (2, []), (kind, said)
        assert f"full/out.{kind}" in said, said
        assert re.search("No space left on device|disk I/O error|disk is full", said), said
