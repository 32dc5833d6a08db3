"""The command line: `fairtrial`. One file per group of commands; everything heavy is imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["main"]


def main(program: Callable[..., int] | None = None) -> None:
    """The console script, or a function that is a program of its own."""
    import sys

    from fairtrial.cli.app import invoke
    from fairtrial.cli.screen import make_printable

    make_printable(sys.stdout)
    make_printable(sys.stderr)
    sys.exit(invoke(sys.argv[1:], program))
