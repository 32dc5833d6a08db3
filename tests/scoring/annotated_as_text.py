"""Evaluators whose annotations are text, some of which name what exists only for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from fairtrial import Score, ToolInvoked
from fairtrial import SessionView as View

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]

    from fairtrial import SessionView, Trajectory


def renamed(output: Any, expected: Any, where: View | None = None) -> Score:
    assert where is not None
    return Score(1.0, len(where[ToolInvoked].all()) == 1)


def unresolvable(output: Missing, expected: Missing, record: SessionView | None = None) -> Score:
    assert record is not None
    return Score(1.0, len(record[ToolInvoked].all()) == 1)


def optional(output: Missing, expected: Any, record: Optional[SessionView] = None) -> Score:  # noqa: UP045
    assert record is not None
    return Score(1.0)


def by_trajectory(talk: Trajectory, sample: Missing) -> Score:
    return Score(1.0, talk.last_reply == "hello")


def plain(output: Missing, expected: dict[str, SessionView] | None = None, threshold: float = 0.5) -> Score:
    return Score(1.0, threshold == 0.5)
