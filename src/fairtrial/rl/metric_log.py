"""Where the numbers of a training run are written."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from fairtrial.errors import ConfigurationError
from fairtrial.scoring.score import Score


class MetricSink(Protocol):
    """Whatever takes the numbers of a training run: `MetricLog`, or an object of yours with this method."""

    def log_metric(self, name: str, value: float, *, step: int) -> None:
        """Take one number."""
        ...


class MetricLog:
    """Writes every number of a training run to its targets.

    Args:
        *targets: Paths of JSONL files, to which lines `{"step": 3, "name": "reward", "value": 0.5}` are appended; open
            text files, such as `sys.stdout`; and functions `(name, value, step)`.
    """

    def __init__(self, *targets: Path | str | IO[str] | Callable[[str, float, int], object]) -> None:
        self._opened: list[IO[str]] = []
        self._write: list[Callable[[str, float, int], object]] = []
        for target in targets:
            if isinstance(target, str | Path):
                file = open(target, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`
                self._opened.append(file)
                self._write.append(_lines(file))
            elif callable(target):
                self._write.append(target)
            elif hasattr(target, "write"):
                self._write.append(_texts(target) if target in (sys.stdout, sys.stderr) else _lines(target))
            else:
                raise ConfigurationError(
                    f"a target of MetricLog must be a path, an open file or a function (got {target!r:.80})"
                )

    def log_metric(self, name: str, value: float, *, step: int) -> None:
        """Write one number."""
        for write in self._write:
            write(name, value, step)

    def log_scores(self, scores: Iterable[Score | None], *, step: int) -> None:
        """Write the reward and all metrics of each score; None, for an unscored rollout, is left out."""
        for score in scores:
            if score is None:
                continue
            self.log_metric("reward", score.reward, step=step)
            for metric in score.metrics:
                self.log_metric(f"score/{metric.name}", metric.value, step=step)

    def close(self) -> None:
        """Close the files that were opened here."""
        for file in self._opened:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _lines(file: IO[str]) -> Callable[[str, float, int], object]:
    def write(name: str, value: float, step: int) -> None:
        # JSON has no infinity and no NaN, and a loss may become one.
        shown = value if math.isfinite(value) else str(value)
        file.write(json.dumps({"step": step, "name": name, "value": shown}) + "\n")
        file.flush()

    return write


def _texts(file: IO[str]) -> Callable[[str, float, int], object]:
    def write(name: str, value: float, step: int) -> None:
        file.write(f"step {step}  {name} {value:g}\n")

    return write
