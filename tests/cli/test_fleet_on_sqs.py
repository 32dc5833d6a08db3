"""What `fairtrial fleet` cannot do on SQS."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli

pytestmark = pytest.mark.proves("R70")


def test_purging_single_runs_is_refused_on_sqs_with_what_happens_instead(cli: Cli, evals: Path, sqs_url: str) -> None:
    assert cli("run", "evals.py", "--quiet").code == 0  # There is a store.
    for flags in (["--purge", "--yes"], ["--purge", "--dry-run"], ["--purge", "--yes", "--json"]):
        refused = cli("fleet", "doubles", "--mailbox", sqs_url, *flags)
        assert (refused.code, refused.out) == (2, "")
        assert "the requests of single runs cannot be removed from a queue on SQS" in refused.err
        assert "workers drop them" in refused.err
