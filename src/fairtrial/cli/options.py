"""Options and arguments that several commands share, and completion for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairtrial.cli.user_errors import NOTHING_EXECUTED, EndedEarly, UserError

if TYPE_CHECKING:
    from fairtrial.cli.settings import Settings
    from fairtrial.store.protocol import RunStore


def complete_run(incomplete: str) -> list[str]:
    """Return names of runs with this prefix, for shell completion."""
    try:
        store = open_existing(None)
        names = {name for run in store.runs(limit=200) for name in (run.suite, run.name)}
    except Exception:
        return []  # Completion must not print errors into the shell.
    return sorted(name for name in names if name.startswith(incomplete))


Store = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="Store of runs: a .db file or postgresql://... (default: .fairtrial/runs.db)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Bounds = Annotated[
    list[str] | None,
    typer.Option("--bounds", metavar="METRIC=LOW:HIGH", help="Range of a metric that declares none, such as f1=0:1."),
]
MailboxUrl = Annotated[
    str | None,
    typer.Option(
        "--mailbox",
        metavar="URL",
        help="Queue of the fleet: redis://host:port, postgresql://host/database or sqs://region/prefix (default: "
        "FAIRTRIAL_MAILBOX).",
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format", metavar="FORMAT", help="text, or json: one object per line, with the ids of run and trial."
    ),
]
HealthPort = Annotated[
    int | None,
    typer.Option("--health-port", metavar="PORT", min=0, max=65535, help="Serve /health and /metrics on this port."),
]
HealthHost = Annotated[
    str,
    typer.Option(
        "--health-host", metavar="HOST", help="Interface to serve on; 0.0.0.0 for probes from other machines."
    ),
]
MaxCost = Annotated[
    float | None,
    typer.Option(
        "--max-cost", metavar="USD", min=0, help="Stop at this cost, judges included; the run can be resumed."
    ),
]
MaxSameErrors = Annotated[
    int | None,
    typer.Option(
        "--max-same-errors",
        metavar="N",
        min=0,
        help="Stop an experiment whose first N trials all end in the same programming error (default: 20; 0: never).",
    ),
]
StrictPackages = Annotated[
    bool, typer.Option("--strict-packages", help="Start a new run if the version of an imported package has changed.")
]
StrictCost = Annotated[bool, typer.Option("--strict-cost", help="Reject models without a known price.")]
TraceContent = Annotated[
    bool,
    typer.Option("--trace-content", help="Include inputs, outputs, messages and errors in traces (without secrets)."),
]
TraceProfile = Annotated[
    str | None,
    typer.Option("--trace-profile", metavar="NAME", help="Add attributes for langsmith or langfuse to traces."),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="suite, suite:experiment, suite@3, suite@latest, or the start of a run id.",
        autocompletion=complete_run,
        show_default=False,
    ),
]


def start_logging(log_format: str | None, *, quiet: bool = False, text: bool = False) -> None:
    """Log to standard error until the command ends: as JSON if requested, or as text if `text` is set."""
    import logging

    from fairtrial.cli import screen
    from fairtrial.cli.settings import load_settings

    chosen = load_settings()["log-format"] if log_format is None else log_format
    if chosen not in ("text", "json"):
        raise UserError(f"--log-format must be text or json (got {chosen!r})")
    if text or chosen == "json":
        screen.start_logging("json" if chosen == "json" else "text", logging.WARNING if quiet else logging.INFO)


def settings_with(store: str | None) -> tuple[Settings, str]:
    """Return the settings and the address of the store: from the option, or else from the settings."""
    from fairtrial.cli.settings import load_settings

    settings = load_settings()
    return settings, store or settings.store


def open_existing(store: str | None) -> RunStore:
    """Open an existing store. A missing one is not created: an empty store would hide a wrong path."""
    _, url = settings_with(store)
    path = url.removeprefix("sqlite:///") if url.startswith("sqlite:///") or "://" not in url else None
    if path is not None and path != "memory:" and not Path(path).exists():
        origin = "" if store else "; `fairtrial config` shows where this path comes from"
        raise UserError(
            f"there is no store at {path}",
            f"create one with: fairtrial run SUITE, or choose another with --store{origin}",
        )
    return open_named(url)


def open_named(url: str) -> RunStore:
    """Open a store; create it if it does not exist."""
    from fairtrial.store import open_store

    return translate_open_errors(url, open_store)


_REFUSALS = ("authentication failed", "does not exist", "no pg_hba.conf entry", "Name or service not known")
"""What a database says to an address that is wrong: waiting would not help."""


def open_when_available(url: str) -> RunStore:
    """Open a store; one that is unavailable is waited for, as during a run.

    Raises:
        EndedEarly: it was unavailable for too long.
    """
    from fairtrial.errors import StoreUnavailableError
    from fairtrial.runs.writer import call_store

    def attempt() -> RunStore | StoreUnavailableError:
        try:
            return open_named(url)
        except StoreUnavailableError as error:
            if any(words in str(error) for words in _REFUSALS):
                return error
            raise

    try:
        opened = call_store(attempt, "opening the store")
    except StoreUnavailableError as error:
        raise EndedEarly(str(error), NOTHING_EXECUTED) from None
    if isinstance(opened, StoreUnavailableError):
        raise opened
    return opened


def translate_open_errors[T](url: str, open: Callable[[str], T]) -> T:
    """Call `open(url)`; a file that is not a database raises a `UserError`."""
    from fairtrial.errors import StoreError

    try:
        return open(url)
    except StoreError as error:
        if "is not a database" not in str(error):
            raise
        path = url.removeprefix("sqlite:///")
        raise UserError(
            f"{path} exists but is not a Fairtrial database",
            "move it, or choose another with --store or FAIRTRIAL_STORE",
        ) from None


def mailbox_url(option: str | None) -> str:
    """Return the address of the fleet's queue: from the option, or else from the settings."""
    from fairtrial.cli.settings import load_settings

    url: str | None = option or load_settings()["mailbox"]
    if not url:
        raise UserError(
            "no queue is configured",
            'set --mailbox redis://host:6379, FAIRTRIAL_MAILBOX, or mailbox = "..." under [tool.fairtrial]',
        )
    return url
