"""`fairtrial view`: runs as pages in a browser."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fairtrial.cli import options
from fairtrial.cli.screen import note
from fairtrial.cli.user_errors import UserError
from fairtrial.runs.events import EvalRunStarted

_VARIABLE = "FAIRTRIAL_VIEW_TOKEN"
_IN_TERMINALS = ("www-browser", "links", "elinks", "lynx", "w3m")


def view(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="The run to open first; by default the list of all runs.",
            autocompletion=options.complete_run,
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Interface to listen on; others than this machine need it.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port (default: 7878 or the next free one)."),
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option("--socket", metavar="FILE", help="Listen on a Unix socket instead, for ssh -L."),
    ] = None,
    trusted_host: Annotated[
        list[str] | None,
        typer.Option("--trusted-host", metavar="NAME", help="Also answer to this host name, such as a proxy's."),
    ] = None,
    secure: Annotated[bool, typer.Option("--secure", help="A proxy ends TLS in front of the server.")] = False,
    reviewers: Annotated[
        str | None,
        typer.Option("--reviewers", metavar="NAMES", help="People who get an address for reviews alone: ann,ben."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="Sign in with the token in this file (or in FAIRTRIAL_VIEW_TOKEN)."
        ),
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Open the store for reading only.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address and open no browser.")] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Show runs, trials and comparisons as pages in a browser.

    The server answers only this machine, and only people who sign in. The browser that it opens is already signed in.
    Stop it with Ctrl-C.

    \b
    Examples:
      fairtrial view                              all runs
      fairtrial view support@3                    the report of one run
      fairtrial view --port 8080 --no-browser
      fairtrial view --reviewers ann,ben          an address for each reviewer
      fairtrial view --socket view.sock           for ssh -L to a remote machine
    """
    from fairtrial.base.garbage import loading
    from fairtrial.cli.options import find_run
    from fairtrial.cli.screen import print_json

    with loading():
        from fairtrial.viewer.serve import ServeOptions, ViewServer

        opened = options.open_existing(store)
    name = "" if run is None else str(find_run(opened, run))
    opened.close()
    _, url = options.settings_with(store)
    names = tuple((reviewers or "").split(","))
    token, origin = _given_token(token_file)
    server = ViewServer(
        ServeOptions(
            url, host, port, socket, tuple(trusted_host or ()), secure, read_only, reviewers=names, token=token
        )
    )

    def started() -> None:
        address = server.address(name)
        own = None if token else server.access.token
        if json:
            more = {"reviewers": server.reviewer_addresses()} if server.access.reviewers else {}
            facts = {"address": address, "port": server.port, "token": own, **more}
            print_json({"format": "fairtrial.view/1", **facts})
        else:
            if host not in ("127.0.0.1", "localhost", "::1") and socket is None:
                note(
                    f"listening on {host} over plain HTTP: anyone who reads the traffic can read the token and all runs"
                )
            if socket is not None:
                note(f"listening on {socket}; forward it with: ssh -L PORT:{socket.absolute()} HOST")
            note(f"open {address}")
            note(f"sign in with the token {own or origin}")
            for reviewer, place in server.reviewer_addresses().items():
                note(f"{reviewer} reviews at {place}")
            note("stop with Ctrl-C")
        if not no_browser and socket is None:
            _open_browser(Path(folder), server.invitation(name))

    with tempfile.TemporaryDirectory(prefix="fairtrial-") as folder:
        server.run(started)
    return 0


def _given_token(file: Path | None) -> tuple[str, str]:
    """Return the token that people sign in with and where it comes from; empty if none is given."""
    from fairtrial.viewer.access import check_token

    given = os.environ.get(_VARIABLE, "")
    if file is None:
        return (check_token(given, _VARIABLE), f"in {_VARIABLE}") if given else ("", "")
    try:
        return check_token(file.read_text(encoding="utf-8"), str(file)), f"in {file}"
    except UnicodeDecodeError:
        raise UserError(f"the token in {file} must be text in UTF-8") from None


def _open_browser(folder: Path, invitation: str) -> None:
    """Open a browser by a file that only this user can read: everybody can read the command line of a process."""
    import webbrowser
    from html import escape

    if not _has_window(webbrowser):
        return
    page = folder / "open.html"
    link = escape(invitation)
    with open(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(
            '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>Fairtrial</title>'
            f'<meta http-equiv="refresh" content="0;url={link}"><p><a href="{link}">Open Fairtrial</a>\n'
        )
    webbrowser.open(page.absolute().as_uri())


def _has_window(webbrowser: Any) -> bool:
    """Return whether the browser opens a window of its own: one that takes the terminal is not opened."""
    try:
        found = webbrowser.get()
    except webbrowser.Error:
        return True  # None is known: opening it does nothing.
    return os.path.basename(getattr(found, "name", "")) not in _IN_TERMINALS


class LiveViewer:
    """The viewer beside a run, in a thread; an observer of the run, which says where to watch it.

    Args:
        url: The store of the run.
        opens: Whether to open a browser at the first run.
    """

    def __init__(self, url: str, *, opens: bool) -> None:
        from fairtrial.viewer.serve import ServeOptions, ViewServer

        token, origin = _given_token(None)
        self._server = ViewServer(ServeOptions(url, token=token))
        self._token = origin or self._server.access.token
        if not (origin or (sys.stdout.isatty() and sys.stderr.isatty())):  # Logs are read by many.
            place = self._server.folder
            self._token = f"{'' if place is None else f'in {place / "view.json"}, or '}of your own in {_VARIABLE}"
        self._opens = opens
        self._folder = ""
        self._address = ""

    @contextmanager
    def serving(self) -> Iterator[LiveViewer]:
        """Serve while the block runs."""
        ready = threading.Event()
        thread = threading.Thread(target=self._server.run, args=(ready.set,), name="fairtrial viewer", daemon=True)
        thread.start()
        with tempfile.TemporaryDirectory(prefix="fairtrial-") as self._folder:
            try:
                ready.wait(10)
                yield self
            finally:
                self._server.stop()
                thread.join(10)

    def publish(self, event: object) -> None:
        """Say where to watch a run that starts."""
        if isinstance(event, EvalRunStarted):
            self._announce(event.run.name)

    def _announce(self, run: str) -> None:
        is_first, self._address = not self._address, self._server.address(run)
        note(f"watch it at {self._address}")
        if is_first:
            note(f"sign in with the token {self._token}")
        if is_first and self._opens:
            _open_browser(Path(self._folder), self._server.invitation(run))

    def wait(self) -> None:
        """Go on serving until somebody at the terminal presses Enter or Ctrl-C; without a terminal, nobody can."""
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return
        if self._address:
            note(f"the viewer goes on at {self._address}")
        else:
            self._announce("")  # The run of a key had ended before: none was started.
        try:
            note("stop it with Enter or Ctrl-C")
            sys.stdin.readline()
        except KeyboardInterrupt:
            pass
