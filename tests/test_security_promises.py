"""What SECURITY.md says and no other test proves; tests/attacks.toml names the proof of every clause."""

from __future__ import annotations

import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.scripts import load_script
from tests.viewer.conftest import start_server

ROOT = Path(__file__).resolve().parent.parent


def test_the_viewer_listens_on_the_loopback_address_only(tmp_path: Path) -> None:
    server, thread = start_server(tmp_path / "runs.db")
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10):
            pass
        with pytest.raises(ConnectionRefusedError):  # Also of this machine, and it would be accepted by 0.0.0.0.
            socket.create_connection(("127.0.0.2", server.port), timeout=10)
    finally:
        server.stop()
        thread.join(60)


def test_releases_are_built_twice_and_published_without_a_stored_token() -> None:
    workflow: Any = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert not any("password" in step.get("with", {}) for step in publish["steps"])
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()
    assert any("nox -s release" in step.get("run", "") for step in build["steps"])
    assert '"python", "scripts/release", "--check"' in (ROOT / "noxfile.py").read_text()


@pytest.fixture
def script() -> ModuleType:
    return load_script("attacks")


@pytest.mark.parametrize(
    ("policy", "entry", "problem"),
    [
        ("We promise much. It holds.", 'text = "It holds"', "attacks, tests or advice must be given"),
        ("It holds, and more.", 'text = "It holds"\nadvice = "a"', "SECURITY.md says 'and more'"),
        ("It holds.", 'text = "It held"\nadvice = "a"', "it must be in SECURITY.md"),
        ("It holds.", 'text = "It holds"\nattacks = ["gone"]', "no attack gone"),
        ("It holds.", 'text = "It holds"\ntests = ["tests/test_gone.py"]', "no test tests/test_gone.py"),
        (
            "| a | b | c |\n|-|-|-|\n| x | y | It holds; so does this |",
            'text = "It holds"\nadvice = "a"',
            "'so does this'",
        ),
        ("It holds.\n\n- And\n  this.", 'text = "It holds"\nadvice = "a"', "SECURITY.md says 'And this'"),
    ],
)
def test_a_clause_without_a_proof_is_an_error(
    script: ModuleType, tmp_path: Path, policy: str, entry: str, problem: str
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "attacks.toml").write_text(f"[[promise]]\n{entry}\n")
    (tmp_path / "SECURITY.md").write_text(f"# Security\n\n## Report\n\nText.\n\n## Threat model\n\n{policy}\n")
    with pytest.raises(script.ListError) as error:
        script.read_promises(tmp_path, [])
    assert problem in str(error.value)
