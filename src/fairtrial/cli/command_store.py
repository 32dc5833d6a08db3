"""`fairtrial store`: maintain the store."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import ExitCode, UserError

if TYPE_CHECKING:
    from fairtrial.store.protocol import RunRecord, RunStore
    from fairtrial.store.sql import SqlStore

_UNITS = {"h": 3600.0, "d": 86_400.0, "w": 604_800.0}

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Maintain the store: contents, schema, old runs, backups.",
    epilog="Examples: fairtrial store stats; fairtrial store prune --older-than 90d; fairtrial store backup FILE",
)


@app.command("stats")
def stats(store: options.Store = None, json: options.Json = False) -> int:
    """Print the number of runs and results in the store.

    \b
    Examples:
      fairtrial store stats
      fairtrial store stats --store postgresql://db/evals --json
    """
    from fairtrial.cli.screen import add_row, make_table, out, print_json, print_table
    from fairtrial.reports.report.run_json import moment
    from fairtrial.store.sql import SqlStore

    _, url = options.settings_with(store)
    opened = options.open_existing(store)
    counts = opened.result_counts() if isinstance(opened, SqlStore) else {}
    suites: dict[str, dict[str, Any]] = {}
    for run in reversed(opened.runs()):
        totals = suites.setdefault(run.suite, {"suite": run.suite, "runs": 0, "unfinished": 0, "results": 0})
        totals["runs"] += 1
        totals["unfinished"] += run.status not in ("finished", "stopped")
        totals["results"] += counts.get(run.run_id, 0)
        totals["latest"] = moment(run.created_at)
    address = _address(url)
    size = opened.size() if isinstance(opened, SqlStore) else None
    rows = list(suites.values())
    if json:
        print_json({"format": "fairtrial.store/1", "store": address, "bytes": size, "suites": rows})
        return 0
    console = out()
    console.print(f"{address}{'' if size is None else f', {_bytes(size)}'}", soft_wrap=True)
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
        print_json({"format": "fairtrial.migrated/1", "store": _address(url), "version": version, "before": before})
    elif before in (0, version):
        note(f"{_address(url)} is up to date: schema {version}")
    else:
        note(f"{_address(url)} is up to date: schema {version} (it had {before})")
    return 0


@app.command("prune")
def prune(
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than", metavar="AGE", help="Delete runs that ended longer ago than this: 90d, 12h or 2w."
        ),
    ],
    keep_last: Annotated[
        int,
        typer.Option(
            "--keep-last",
            metavar="N",
            min=0,
            help="Keep the last N finished runs of each suite, and what was stopped since.",
        ),
    ] = 0,
    suite: Annotated[str | None, typer.Option("--suite", metavar="NAME", help="Only runs of this suite.")] = None,
    claim_check: Annotated[
        Path | None,
        typer.Option("--claim-check", metavar="DIR", help="Also delete message bodies of that age from this folder."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be deleted; delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Delete old runs and free their space. Asks first.

    Only finished and stopped runs are deleted; runs that `store keep` names, that can be resumed, that a process
    executes or whose outputs are being scored again are kept. Cached model responses of that age and unreferenced
    attachments are deleted too, and segments of transcripts that are older than a day and belong to no result.

    \b
    Examples:
      fairtrial store prune --older-than 90d --dry-run
      fairtrial store prune --older-than 90d --keep-last 10 --suite support --yes
    """
    from fairtrial.base.formatting import count
    from fairtrial.cli.running import cache_file
    from fairtrial.cli.screen import confirm, note, print_json
    from fairtrial.reports.run_names import name_of
    from fairtrial.runs.run_lease import old_runs

    age = _seconds(older_than)
    if claim_check is not None and not claim_check.is_dir():
        raise UserError(f"--claim-check must be a folder (got {claim_check})", "name the folder that the workers share")
    settings, _url = options.settings_with(store)
    opened = _database(store)
    chosen = old_runs(opened, time.time() - age, keep_last=keep_last, suite=suite)
    counts = opened.result_counts()
    trials = {run.run_id: counts.get(run.run_id, 0) for run in chosen}
    names = ", ".join(name_of(run) for run in chosen)
    what = f"{count(len(chosen), 'run')} with {count(sum(trials.values()), 'result')}{f': {names}' if names else ''}"
    before = opened.size()
    facts: dict[str, Any] = {
        "format": "fairtrial.pruned/1", "dry_run": dry_run, "runs": list(trials), "results": sum(trials.values()),
        "attachments": 0, "segments": 0, "responses": 0, "bodies": 0, "bytes_before": before, "bytes_after": before,
    }  # fmt: skip
    if dry_run:
        if json:
            print_json(facts)
        else:
            note(f"would delete {what}")
        return 0
    if chosen and not yes and not confirm(f"permanently delete {what}?"):
        note("nothing was deleted (use --yes in scripts)")
        return int(ExitCode.USAGE)
    for run_id in trials:
        opened.delete_run(run_id)
    facts["attachments"], _size = opened.delete_unnamed_blobs()
    facts["segments"], _size = opened.delete_unnamed_segments()
    cache = cache_file(settings.root)
    if cache.exists():
        facts["responses"] = _prune_cache(cache, age)
    if claim_check is not None:
        facts["bodies"] = _prune_bodies(claim_check, age)
    opened.vacuum()
    facts["bytes_after"] = opened.size()
    if json:
        print_json(facts)
        return 0
    others = [
        count(facts[key], noun, plural)
        for key, noun, plural in (
            ("attachments", "attachment", ""),
            ("segments", "unused segment of transcripts", "unused segments of transcripts"),
            ("responses", "cached response", ""),
            ("bodies", "message body", "message bodies"),
        )
        if facts[key]
    ]
    note(f"deleted {what}{''.join(f', {other}' for other in others)}")
    note(f"store size: {_bytes(before)} before, {_bytes(facts['bytes_after'])} after")
    return 0


@app.command("delete")
def delete(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs to delete.", autocompletion=options.complete_run),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Delete runs with their results, transcripts and labels. Asks first.

    \b
    Examples:
      fairtrial store delete support@3
      fairtrial store delete support@1 support@2 --yes
    """
    from fairtrial.base.formatting import count
    from fairtrial.cli.screen import confirm, note, print_json
    from fairtrial.reports.run_names import name_of

    opened = options.open_existing(store)
    chosen = {(found := _idle_run(opened, text, "delete")).run_id: found for text in runs}
    names = ", ".join(f"{name_of(run)} ({run.run_id}, {run.status})" for run in chosen.values())
    if not yes and not confirm(f"permanently delete {names}?"):
        note("nothing was deleted (use --yes in scripts)")
        return int(ExitCode.USAGE)
    for run_id in chosen:
        opened.delete_run(run_id)
    if json:
        print_json({"format": "fairtrial.deleted/1", "deleted": list(chosen)})
    else:
        note(f"deleted {count(len(chosen), 'run')}: {names}")
    return 0


@app.command("keep")
def keep(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs to keep.", autocompletion=options.complete_run),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Let them be deleted when they are old.")] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Keep runs when old runs are deleted, by `store prune` or by a server's schedule.

    \b
    Examples:
      fairtrial store keep support@3
      fairtrial store keep support@3 --undo
    """
    from fairtrial.cli.screen import note, print_json
    from fairtrial.reports.run_names import name_of
    from fairtrial.store.notes import write_notes

    opened = options.open_existing(store)
    chosen = {(found := options.find_run(opened, text).run).run_id: found for text in runs}
    for run_id in chosen:
        opened.update_run(run_id, notes=write_notes(kept=not undo))
    if json:
        print_json({"format": "fairtrial.kept/1", "runs": list(chosen), "kept": not undo})
    else:
        names = ", ".join(map(name_of, chosen.values()))
        note(f"{names}: deleted when old, like others" if undo else f"{names}: kept when old runs are deleted")
    return 0


@app.command("check")
def check(store: options.Store = None, json: options.Json = False) -> int:
    """Compare results with the segments of transcripts in buckets and folders. Exit 1 if one is missing.

    Names and sizes are compared; the bytes of a transcript are checked whenever it is read.

    \b
    Examples:
      fairtrial store check
      fairtrial store check --store postgresql://db/evals --json
    """
    from fairtrial.base.formatting import count
    from fairtrial.cli.screen import note, print_json

    checked = _database(store).check_segments()
    lost = [one for one in checked if one.unreadable]
    rows = [
        {
            "run_id": one.run.run_id, "run": one.run.name, "transcripts": one.run.noted.transcripts,
            "segments": one.segments, "bytes": one.size, "unnamed": one.unnamed, "unreadable": list(one.unreadable),
        }
        for one in checked
    ]  # fmt: skip
    if json:
        print_json({"format": "fairtrial.segments/1", "runs": rows})
        return 1 if lost else 0
    for one in lost:
        note(
            f"{one.run.name}: {count(len(one.unreadable), 'transcript')} cannot be read, the first of trial "
            f"{one.unreadable[0]}: segments in {one.run.noted.transcripts} are missing or cut off"
        )
    segments, size = sum(one.segments for one in checked), sum(one.size for one in checked)
    unnamed = sum(one.unnamed for one in checked)
    unused = (
        f", {count(unnamed, 'segment')} without a result: fairtrial store prune deletes old ones" if unnamed else ""
    )
    note(f"{count(segments, 'segment')} of {count(len(checked), 'run')}, {_bytes(size)}{unused}")
    if lost:
        note("restore the missing segments from a backup of that place; figures do not need them")
    return 1 if lost else 0


@app.command("move")
def move(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run.", autocompletion=options.complete_run, show_default=False)
    ],
    transcripts: Annotated[
        str,
        typer.Option(
            "--transcripts", metavar="URL", help="s3://, gs:// or az://bucket/prefix, a folder, or `store`: the store."
        ),
    ],
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Move the transcripts of a run to a bucket or a folder, or back into the store.

    The run can be read meanwhile. If this is interrupted, the same command completes it.

    \b
    Examples:
      fairtrial store move support@3 --transcripts s3://bucket/evals
      fairtrial store move support@3 --transcripts store
    """
    from fairtrial.cli.screen import note, print_json

    opened = _database(store)
    chosen = _idle_run(opened, run, "move")
    moved: list[int] = []
    opened.move_transcripts(chosen.run_id, None if transcripts == "store" else transcripts, done=moved.append)
    place = opened.get_run(chosen.run_id).noted.transcripts
    if json:
        facts = {"run_id": chosen.run_id, "run": chosen.name, "transcripts": place, "moved": sum(moved)}
        print_json({"format": "fairtrial.moved/1", **facts})
    else:
        note(f"the transcripts of {chosen.name} are in {place or 'the store'} ({sum(moved):,} moved)")
    return 0


@app.command("vacuum")
def vacuum(
    full: Annotated[
        bool, typer.Option("--full", help="Shrink the files of PostgreSQL, too; meanwhile nobody can use the store.")
    ] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Free the space of deleted runs.

    An SQLite file shrinks. Meanwhile runs that write to it wait, and the disk needs space for a second copy.
    PostgreSQL returns the space at the end of its files and reuses the rest. With --full it copies what is left to new
    files, which needs space for that copy; others wait until it is done.

    \b
    Examples:
      fairtrial store vacuum
      fairtrial store vacuum --full --store postgresql://db/evals
    """
    from fairtrial.cli.screen import note, print_json

    opened = _database(store)
    before = opened.size()
    opened.vacuum(full=full)
    after = opened.size()
    if json:
        print_json({"format": "fairtrial.vacuumed/1", "bytes_before": before, "bytes_after": after})
    else:
        note(f"store size: {_bytes(before)} before, {_bytes(after)} after")
    return 0


@app.command("backup")
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to create.")],
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Copy the store to a new file, even while runs write to it.

    The copy is a consistent snapshot. Use pg_dump for a store in PostgreSQL.

    \b
    Examples:
      fairtrial store backup runs-backup.db
    """
    from fairtrial.cli.screen import note, print_json

    _, url = options.settings_with(store)
    opened = _database(store)
    if "://" in url.removeprefix("sqlite:///"):
        raise UserError("only stores in SQLite are copied (this one is in PostgreSQL)", "use pg_dump -Fc -f FILE URL")
    if file.exists():
        raise UserError(f"FILE must be a new file (got {file}, which exists)", "name another, or remove it first")
    opened.backup(file)
    if json:
        print_json({"format": "fairtrial.backup/1", "file": str(file), "bytes": file.stat().st_size})
    else:
        note(f"copied {_address(url)} to {file} ({_bytes(file.stat().st_size)})")
    return 0


@app.command("columns")
def columns(
    clear: Annotated[bool, typer.Option("--clear", help="Delete the files; they are built again when needed.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Column files of all stores, also of those that are gone.")
    ] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """List or delete the column files of runs, a cache that makes reports of large runs quick.

    They are in the cache folder of the user (FAIRTRIAL_CACHE_DIR), not in the store.

    \b
    Examples:
      fairtrial store columns
      fairtrial store columns --clear --all
    """
    from fairtrial.base.formatting import count
    from fairtrial.cli.screen import add_row, make_table, note, out, print_json, print_table
    from fairtrial.reports.report.run_json import moment
    from fairtrial.store.column_cache import cached_columns, clear_columns

    opened = None if every else _database(store)
    address = None if opened is None else opened.identity
    found = cached_columns(address)
    if clear:
        number, size = clear_columns(address)
        if json:
            print_json({"format": "fairtrial.columns/1", "cleared": number, "bytes": size, "files": []})
        else:
            note(f"deleted {count(number, 'column file')} ({_bytes(size)})")
        return 0
    names = {} if opened is None else {run.run_id: run.name for run in opened.runs()}
    rows = [
        {
            "run_id": one.run_id,
            "run": names.get(one.run_id or ""),
            "file": str(one.path),
            "bytes": one.size,
            "written_at": moment(one.written_at),
        }
        for one in found
    ]
    total = sum(one.size for one in found)
    if json:
        print_json({"format": "fairtrial.columns/1", "cleared": 0, "bytes": total, "files": rows})
        return 0
    console = out()
    console.print(f"{count(len(rows), 'column file')}, {_bytes(total)}")
    if rows:
        table = make_table("run", "size", "written", right=("size",), cut=("run",))
        for row, one in zip(rows, found, strict=True):
            add_row(table, str(row["run"] or row["run_id"] or "damaged"), _bytes(one.size), str(row["written_at"]))
        print_table(console, table)
    return 0


def _database(store: str | None) -> SqlStore:
    """Open a store that is a database."""
    from fairtrial.store.sql import SqlStore

    opened = options.open_existing(store)
    if not isinstance(opened, SqlStore):
        raise UserError("a store in memory has nothing to maintain", "name a .db file or postgresql://... with --store")
    return opened


def _idle_run(opened: RunStore, text: str, command: str) -> RunRecord:
    """Find a run that no process executes."""
    from fairtrial.reports.run_names import name_of
    from fairtrial.runs.run_lease import active_owner

    named = options.find_run(opened, text)
    if named.experiment is not None:
        raise UserError(
            f"{text} is one experiment, but only whole runs can be {command}d",
            f"as in: fairtrial store {command} {name_of(named.run)}",
        )
    owner = active_owner(opened, named.run.run_id)
    if owner is not None:
        raise UserError(
            f"{text} is being executed by {owner}, whose results could no longer be stored",
            f"stop that process first (Ctrl-C), then {command} the run",
        )
    return named.run


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", age.strip())
    if match is None:
        raise UserError(
            f"--older-than must be a number of hours, days or weeks (got {age!r})", "as in: --older-than 90d, 12h or 2w"
        )
    return float(match[1]) * _UNITS[match[2]]


def _prune_cache(path: Path, age: float) -> int:
    from fairtrial.models.cache import ResponseCache

    cache = ResponseCache(path)
    try:
        return cache.prune(age)
    finally:
        cache.close()


def _prune_bodies(folder: Path, age: float) -> int:
    import anyio

    from fairtrial.mailbox.body import ClaimCheck

    return anyio.run(ClaimCheck(folder).prune, age)


def _address(url: str) -> str:
    from fairtrial.store.redact import current

    return current().text(url.removeprefix("sqlite:///"))


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
