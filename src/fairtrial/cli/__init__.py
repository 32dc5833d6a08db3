"""The command line: `fairtrial`. One file per group of commands; everything heavy is imported when it is needed."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The console script."""
    import sys

    from fairtrial.cli.app import invoke
    from fairtrial.cli.screen import make_printable

    make_printable(sys.stdout)
    make_printable(sys.stderr)
    sys.exit(invoke(sys.argv[1:]))
