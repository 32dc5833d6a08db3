"""Small things that a newcomer or an operator reads: settings, interrupts, a queue that is down."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fairtrial.cli import main
from fairtrial.errors import MailboxConnectionError
from fairtrial.fleet.client.dispatch import Recovery
from fairtrial.fleet.worker.config import LoopConfig, LoopCounters
from fairtrial.fleet.worker.worker import Worker
from tests.cli.conftest import Cli


def test_settings_are_shown_as_toml_spells_them(cli: Cli) -> None:
    words = cli("doctor", "--settings").out.split()
    assert "false" in words
    assert not {"True", "False"} & set(words)


def test_an_interrupt_while_modules_are_imported_ends_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "fairtrial.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "fairtrial.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_a_second_interrupt_does_not_break_what_closes_at_the_end() -> None:
    program = (
        "import atexit, os, signal, sys\n"
        "from fairtrial.cli import main\n"
        "@atexit.register\n"
        "def close():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('closed')\n"
        "sys.argv = ['fairtrial', '--version']\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.splitlines()[-1], ended.stderr) == (0, "closed", "")


def test_a_worker_says_once_and_then_once_a_minute_that_its_queue_is_down(caplog: pytest.LogCaptureFixture) -> None:
    mailbox: Any = SimpleNamespace(name="s.requests")
    worker: Worker[Any] = Worker(mailbox, lambda _: None, LoopConfig(), LoopCounters(), hold_seconds=1)  # type: ignore[arg-type,return-value]
    error = MailboxConnectionError("cannot connect to 127.0.0.1:9: Connection refused")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            worker._complain(error)
        assert len(caplog.messages) == 1
        assert "cannot connect to 127.0.0.1:9" in caplog.text
        assert "is the server running, and --mailbox right?" in caplog.text
        assert "MailboxConnectionError" not in caplog.text
        worker._complained -= 61
        worker._complain(error)
    assert len(caplog.messages) == 2


def test_a_client_whose_last_results_arrive_while_it_looks_sends_nothing_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def no(*_: object) -> int:
        return 0

    recovery: Any = object.__new__(Recovery)
    recovery._fleet = SimpleNamespace(ask_mailbox=no, results=SimpleNamespace(approximate_count=no))
    recovery._ledger = SimpleNamespace(returned=6, outstanding=0)
    recovery._stored = SimpleNamespace(read=no)
    asyncio.run(recovery._resend_lost())
    assert "lost or never sent" not in caplog.text
