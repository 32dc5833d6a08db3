"""Options and arguments that several commands share, and completion for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fairtrial.cli.settings import Settings
    from fairtrial.store.protocol import RunStore


def complete_run(incomplete: str) -> list[str]:
    """Names of runs that begin like this, for the shell."""
    try:
        store = open_existing(None)
        names = {name for run in store.runs(limit=200) for name in (run.suite, f"{run.suite}@{run.number}")}
    except Exception:
        return []  # Nothing to offer is no reason to disturb a shell.
    return sorted(name for name in names if name.startswith(incomplete))


Store = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="Where runs are kept: a .db file or postgresql://...; .fairtrial/runs.db else."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print facts as JSON, for programs.")]
MailboxUrl = Annotated[
    str | None,
    typer.Option("--mailbox", metavar="URL", help="The fleet's queue: redis://host:port; or FAIRTRIAL_MAILBOX."),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format", metavar="FORMAT", help="text, or json: one object a line, with the ids of run and trial."
    ),
]
HealthPort = Annotated[
    int | None,
    typer.Option("--health-port", metavar="PORT", min=0, max=65535, help="Answer /health and /metrics here."),
]
HealthHost = Annotated[
    str,
    typer.Option("--health-host", metavar="HOST", help="The interface to answer on; 0.0.0.0 for probes outside."),
]
MaxCost = Annotated[
    float | None,
    typer.Option("--max-cost", metavar="USD", min=0, help="Stop, resumably, at this cost; judges count too."),
]
StrictCost = Annotated[bool, typer.Option("--strict-cost", help="Refuse models whose price is not known.")]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="suite, suite:experiment, suite@3, suite@latest, or the start of an id.",
        autocompletion=complete_run,
        show_default=False,
    ),
]


def start_logging(log_format: str | None, *, quiet: bool = False, text: bool = False) -> None:
    """Log to standard error until the command ends: as JSON if that is wanted, as text if the command logs `text`."""
    import logging

    from fairtrial.cli import screen
    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.settings import load_settings

    chosen = load_settings()["log-format"] if log_format is None else log_format
    if chosen not in ("text", "json"):
        raise Mistake(f"--log-format must be text or json (got {chosen!r})")
    if text or chosen == "json":
        screen.start_logging("json" if chosen == "json" else "text", logging.WARNING if quiet else logging.INFO)


def settings_with(store: str | None) -> tuple[Settings, str]:
    """The settings, and the store's address: the option's, or else the settings'."""
    from fairtrial.cli.settings import load_settings

    settings = load_settings()
    return settings, store or settings.store


def open_existing(store: str | None) -> RunStore:
    """Open a store to look at it. One that is not there is not made: an empty one would only hide the mistake."""
    from fairtrial.cli.faults import Mistake

    _, url = settings_with(store)
    path = url.removeprefix("sqlite:///") if url.startswith("sqlite:///") or "://" not in url else None
    if path is not None and path != "memory:" and not Path(path).exists():
        given = "--store" if store else "`fairtrial config` says where this place comes from; --store"
        raise Mistake(f"there is no store at {path}", f"make one with: fairtrial run SUITE ({given} names another)")
    return open_named(url)


def open_named(url: str) -> RunStore:
    """Open a store, or make it."""
    from fairtrial.store import open_store

    return translate_open_errors(url, open_store)


def translate_open_errors[T](url: str, open: Callable[[str], T]) -> T:
    """Do something with the store at `url`; a file that is something else is the user's mistake."""
    from fairtrial.cli.faults import Mistake
    from fairtrial.errors import StoreError

    try:
        return open(url)
    except StoreError as error:
        if "is not a database" not in str(error):
            raise
        place = url.removeprefix("sqlite:///")
        raise Mistake(
            f"{place} is a file, but no store", "move it away, or name another with --store or FAIRTRIAL_STORE"
        ) from None


def mailbox_url(given: str | None) -> str:
    """The address of the fleet's queue: the option's, or else the settings'."""
    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.settings import load_settings

    url: str | None = given or load_settings()["mailbox"]
    if not url:
        raise Mistake(
            "no queue is named",
            'name one: --mailbox redis://host:6379, FAIRTRIAL_MAILBOX, or mailbox = "..." under [tool.fairtrial]',
        )
    return url
