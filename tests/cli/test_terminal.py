"""A run in a real terminal that is interrupted by Ctrl-C and resumed, with the same report in the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.test_interrupt import SLOW
from tests.cli.tmux import PROMPT, terminal

TRIALS = 300
SUITE = SLOW.replace("range(60)", f"range({TRIALS})").replace("max_concurrent=2", "max_concurrent=4")
BAR = re.compile(rf"slow [━╸╺ ]+ (\d+)/{TRIALS} +\d+% eta")


def done_of(lines: list[str]) -> int:
    """How many trials the bar says are done; -1 if there is no bar."""
    found = BAR.search("\n".join(lines))
    return int(found[1]) if found else -1


@pytest.mark.proves("R91")
@pytest.mark.long
def test_ctrl_c_in_tmux_then_the_offered_command_goes_on_and_the_report_is_the_same(cli: Cli, place: Path) -> None:
    (place / "slow.py").write_text(SUITE)
    with terminal(place) as pane:
        pane.type("fairtrial run slow.py")
        pane.wait("a bar with some trials done", lambda lines: done_of(lines) >= 20)
        pane.press("C-c")
        lines = pane.wait_for_prompt()
        offered = lines[-2]
        assert offered == "resume it with: fairtrial run slow.py"
        interrupted = re.fullmatch(rf"interrupted: slow@1 has (\d+) of {TRIALS} trials stored", lines[-3])
        assert interrupted is not None
        stored = int(interrupted[1])
        assert 20 <= stored < TRIALS
        assert done_of(lines) == -1  # Nothing of the bar is left behind.
        assert pane.tmux("display-message", "-p", "#{cursor_flag}").strip() == "1"

        before = len(pane.drawn())
        pane.type(offered.removeprefix("resume it with: "))
        lines = pane.wait("the report", lambda seen: seen[-1] == PROMPT and any("--full" in line for line in seen))
        bars = [int(number) for number in re.findall(rf"(\d+)/{TRIALS}\b", pane.drawn()[before:])]
        assert bars, "no bar was drawn"
        assert stored <= bars[0] < TRIALS  # It starts where it stopped, not at 0,
        assert bars == sorted(bars)  # and only ever grows.
        assert re.search(rf"resuming slow@1 \(\w{{12}}\): {stored} of {TRIALS} trials are stored", "\n".join(lines))

    resumed = cli("show", "slow", "--json").json
    cli("run", "slow.py", "--quiet", "--resume", "never")
    whole = cli("show", "slow", "--json").json
    assert resumed["run"]["run_id"] != whole["run"]["run_id"]
    for report in (resumed, whole):
        report["experiments"][0].pop("per_trial")
        report["experiments"][0].pop("latency_ms")  # The one thing that a clock says.
    assert resumed["experiments"] == whole["experiments"]
