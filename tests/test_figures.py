"""Measured figures: asserted against their limits, kept for the history, and plotted on the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.figures import Figure, keep
from tests.scripts import load_script


@pytest.mark.parametrize(("value", "limits"), [(2.5, {"at_most": 2}), (0.5, {"at_least": 1})])
def test_a_figure_beyond_its_limit_fails(figure: Figure, value: float, limits: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match=rf"speed must be at (most|least) \d \(got {value}\)"):
        figure("speed", value, **limits)


def test_a_figure_within_its_limits_passes(figure: Figure) -> None:
    figure("speed", 1.5, at_least=1, at_most=2)


def test_the_history_shows_the_last_value_with_its_commit_and_plots_all(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    for value in (1.25, 1.5, 1.75):
        keep(history, "speed, x <bare>", value, at_most=2, at_least=None)
    keep(history, "another", 3, at_most=None, at_least=1)
    page = load_script("site").history_page(history)
    assert page.index("## another") < page.index("## speed, x <bare>")
    assert "1.75 at commit `" in page
    assert "must be at most 2." in page
    assert page.count("<circle") == 4
    assert page.count("stroke-dasharray") == 2
    assert 'aria-label="speed, x &lt;bare&gt;"' in page
