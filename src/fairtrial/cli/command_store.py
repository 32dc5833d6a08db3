"""`fairtrial store`: the database itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fairtrial.cli import options

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look after the store: what is in it, and its schema.",
    epilog="Examples: fairtrial store stats; fairtrial store migrate --store postgresql://db/evals",
)


def register(parent: typer.Typer) -> None:
    """Add the group."""
    parent.add_typer(app, name="store")


@app.command("stats")
def stats(store: options.Store = None, json: options.Json = False) -> int:
    """Print how much is in the store.

    \b
    Examples:
      fairtrial store stats
      fairtrial store stats --store postgresql://db/evals --json
    """
    from fairtrial.cli.facts import moment
    from fairtrial.cli.screen import add_row, make_table, out, print_json, print_table

    _, url = options.settings_with(store)
    opened = options.open_existing(store)
    suites: dict[str, dict[str, Any]] = {}
    for run in reversed(opened.runs()):
        stored = sum(sum(part.outcomes.values()) for part in opened.totals(run.run_id))
        known = suites.setdefault(run.suite, {"suite": run.suite, "runs": 0, "unfinished": 0, "results": 0})
        known["runs"] += 1
        known["unfinished"] += run.status not in ("finished", "stopped")
        known["results"] += stored
        known["latest"] = moment(run.created_at)
    place = _place(url)
    size = _size(url)
    rows = list(suites.values())
    if json:
        print_json({"format": "fairtrial.store/1", "store": place, "bytes": size, "suites": rows})
        return 0
    console = out()
    console.print(f"{place}{'' if size is None else f', {_bytes(size)}'}", soft_wrap=True)
    table = make_table("suite", "runs", "unfinished", "results", "latest", right=("runs", "unfinished", "results"),
                       cut=("suite",))  # fmt: skip
    for row in rows:
        add_row(table, row["suite"], f"{row['runs']:,}", f"{row['unfinished']:,}", f"{row['results']:,}", row["latest"])
    if rows:
        print_table(console, table)
    else:
        console.print("no runs yet")
    return 0


@app.command("migrate")
def migrate(store: options.Store = None, json: options.Json = False) -> int:
    """Create the store, or bring its schema up to date.

    No other command changes the schema of a store that exists. Stop the processes of older versions first: they cannot
    use the store afterwards. Stores of the previous version can be read without this.

    \b
    Examples:
      fairtrial store migrate
      fairtrial store migrate --store postgresql://db/evals
    """
    from fairtrial.cli.screen import note, print_json
    from fairtrial.store.open import migrate_store

    _, url = options.settings_with(store)
    before, version = options.translate_open_errors(url, migrate_store)
    if json:
        print_json({"format": "fairtrial.migrated/1", "store": _place(url), "version": version, "before": before})
    elif before in (0, version):
        note(f"{_place(url)} is up to date: schema {version}")
    else:
        note(f"{_place(url)} is up to date: schema {version} (it had {before})")
    return 0


def _place(url: str) -> str:
    from fairtrial.store.redact import current

    return current().text(url.removeprefix("sqlite:///"))


def _size(url: str) -> int | None:
    """What an SQLite file takes on disk, with the log beside it."""
    path = url.removeprefix("sqlite:///")
    if "://" in path:
        return None
    files = [Path(path + ending) for ending in ("", "-wal", "-shm")]
    return sum(file.stat().st_size for file in files if file.exists())


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
