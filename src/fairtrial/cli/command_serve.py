"""`fairtrial serve`: the viewer of a team."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from fairtrial.viewer.team.database import TeamDatabase

app = typer.Typer()
Config = Annotated[
    Path,
    typer.Option("--config", metavar="FILE", help="The projects, roles and identity of the team.", show_default=False),
]


@app.callback(invoke_without_command=True)
def serve(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The projects, roles and identity of the team."),
    ] = None,
    health_port: options.HealthPort = None,
    json: options.Json = False,
) -> int:
    """Serve the projects of a team: sign-in, roles, an audit.

    People sign in at an OpenID provider or through a proxy; their groups say what they may do in each project.

    \b
    Examples:
      fairtrial serve --config team.toml
      fairtrial serve audit --config team.toml --since 2026-11-01
      fairtrial serve revoke SUB --config team.toml
    """
    if ctx.invoked_subcommand is not None:
        return 0
    if config is None:
        raise UserError(
            "serve needs the file of a team", "name it with --config, or view your own runs: fairtrial view"
        )
    from fairtrial.cli.screen import note, print_json
    from fairtrial.cli.settings import load_settings
    from fairtrial.viewer.team.config import read_settings
    from fairtrial.viewer.team.serve import TeamServer

    settings = read_settings(config)
    server = TeamServer(settings, None if health_port is None else (load_settings()["health-host"], health_port))

    def started() -> None:
        if json:
            print_json({"format": "fairtrial.serve/1", "url": settings.origin, "projects": sorted(settings.projects)})
        else:
            note(
                f"serving {', '.join(sorted(settings.projects))} at {settings.origin} (listening on {settings.listen})"
            )

    server.run(started)
    return 0


@app.command(short_help="Print what people did: logins, reads, exports, labels, deletions.")
def audit(
    config: Config,
    since: Annotated[
        str | None, typer.Option("--since", metavar="DATE", help="From this day on, in UTC: 2026-11-01.")
    ] = None,
    json: options.Json = False,
) -> int:
    """Print what people did: logins, reads of transcripts, exports, labels, deletions. Oldest first.

    \b
    Examples:
      fairtrial serve audit --config team.toml
      fairtrial serve audit --config team.toml --since 2026-11-01 --json
    """
    from fairtrial.cli.screen import print_json
    from fairtrial.reports.render.safe_text import plain

    database = _database(config)
    try:
        if json:
            entries = [{**entry._asdict(), "at": _time(entry.at)} for entry in database.audit(_day(since))]
            print_json({"format": "fairtrial.audit/1", "entries": entries})
            return 0
        for entry in database.audit(_day(since)):
            who = f"{entry.name} ({entry.person})" if entry.person and entry.name != entry.person else entry.person
            where = " ".join(filter(None, (entry.project, entry.object)))
            typer.echo(
                plain(f"{_time(entry.at)}  {entry.address or '-'}  {who or '-'}  {entry.action}  {where}".rstrip())
            )
    finally:
        database.close()
    return 0


@app.command(short_help="End all sessions of a person.")
def revoke(
    person: Annotated[str, typer.Argument(metavar="SUB", help="The person's id, as the audit shows it.")],
    config: Config,
    json: options.Json = False,
) -> int:
    """End all sessions of a person, at once. Whether they may sign in again is the provider's to say.

    \b
    Examples:
      fairtrial serve revoke 248289761001 --config team.toml
    """
    from fairtrial.base.formatting import count
    from fairtrial.cli.screen import note, print_json

    database = _database(config)
    try:
        ended = database.end_sessions(person)
        database.record("session revoked", "", "the command line", object=person)
    finally:
        database.close()
    if json:
        print_json({"format": "fairtrial.revoked/1", "person": person, "sessions": ended})
    else:
        note(f"ended {count(ended, 'session')} of {person}")
    return 0


def _database(config: Path) -> TeamDatabase:
    from fairtrial.viewer.team.config import read_settings
    from fairtrial.viewer.team.database import TeamDatabase

    return TeamDatabase(read_settings(config).database)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _day(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"--since must be a day or a time (got {text!r})", "as in: --since 2026-11-01") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
