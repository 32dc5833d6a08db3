"""The command line: `fairtrial`. One file per group of commands; everything heavy is imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["main"]


def main(program: Callable[..., int] | None = None) -> None:
    """The console script, or a function that is a program of its own."""
    import atexit
    import signal
    import sys

    try:
        from fairtrial.base.formatting import make_printable
        from fairtrial.cli.app import invoke

        make_printable(sys.stdout)
        make_printable(sys.stderr)
        code = invoke(sys.argv[1:], program)
    except KeyboardInterrupt:  # While modules are imported.
        code = 130
    # Registered last, so it comes first: another Ctrl-C must not interrupt what closes stores and connections.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
