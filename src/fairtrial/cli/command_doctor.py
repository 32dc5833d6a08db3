"""The command doctor: what works here, and what is missing."""

from __future__ import annotations

import asyncio
import difflib
import itertools
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fairtrial._version import __version__
from fairtrial.base.backoff import PATIENCE_VARIABLE, patience_seconds
from fairtrial.base.foreign import limit_factor
from fairtrial.base.plugins import plugins
from fairtrial.base.system import IS_POSIX
from fairtrial.cli import options
from fairtrial.cli.settings import KNOWN, Settings, load_settings, variable_of
from fairtrial.cli.user_errors import ExitCode, explain
from fairtrial.errors import FairtrialError, MailboxAccessError
from fairtrial.mailbox.body import KEY_VARIABLE
from fairtrial.store.redact import NOT_SECRET_VARIABLES, SECRET_VARIABLES, current

if TYPE_CHECKING:
    from rich.console import Console
    from sqlalchemy import Engine

    from fairtrial.mailbox.postgres import PostgresConnection
    from fairtrial.mailbox.redis.connection import RedisConnection


type Status = Literal["ok", "warning", "failed"]

_LOW_DISK_BYTES = 1_000_000_000
_LEAST_DISK_BYTES = 100_000_000
_CLOCK_SECONDS = 2.0
_QUEUE_SECONDS = 5.0
_PROVIDER_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
_OTHER_VARIABLES = (
    PATIENCE_VARIABLE, KEY_VARIABLE, SECRET_VARIABLES, NOT_SECRET_VARIABLES,
    "FAIRTRIAL_CACHE_DIR", "FAIRTRIAL_CLAIM_CHECK", "FAIRTRIAL_DEBUG", "FAIRTRIAL_FILE_LIMITS", "FAIRTRIAL_VIEW_TOKEN",
)  # fmt: skip
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?>=([\d.]+)(?:; *extra == ['\"]([\w-]+)['\"])?")
_NOT_FROM = re.compile(r"python_version < ['\"](\d+)\.(\d+)['\"]")  # Newer ones do not need it.


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check, and the remedy."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def run_checks(store: str | None, mailbox: str | None) -> list[Check]:
    """Run all applicable checks; `store` and `mailbox` override the settings."""
    checks = [_python(), _libraries(), *_redis_library(), *_plugins()]
    try:
        settings = load_settings()
        patience_seconds()
        limit_factor()
    except FairtrialError as error:
        return [*checks, _failed("settings", error), _credentials()]
    checks += [_settings(settings), _credentials()]
    checks += _guarded("store", lambda: _store(store or settings.store))
    queue = mailbox or settings["mailbox"]
    if queue:
        checks += _guarded("queue", lambda: iter(asyncio.run(_queue(queue))))
        if not any(check.status == "failed" for check in checks if check.name in ("store", "queue")):
            checks += _guarded("results", lambda: iter(asyncio.run(_way_of_results(store or settings.store, queue))))
    redact = current().text
    return [Check(check.name, check.status, redact(check.detail), redact(check.remedy)) for check in checks]


def _failed(name: str, error: BaseException) -> Check:
    explained = explain(error)
    return Check(name, "failed", explained.what, explained.remedy)


def _guarded(name: str, checks: Callable[[], Iterator[Check]]) -> list[Check]:
    """Collect the checks of one part; an exception becomes the last, failed check."""
    found: list[Check] = []
    try:
        found.extend(checks())
    except (FairtrialError, OSError) as error:
        found.append(_failed(name, error))
    return found


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _libraries() -> Check:
    """Compare installed libraries with the versions that Fairtrial requires; extras only if installed."""
    missing, old, checked = [], [], 0
    for line in metadata.requires("fairtrial") or ():
        match, end = _REQUIREMENT.match(line), _NOT_FROM.search(line)
        if match is None or (end is not None and sys.version_info >= (int(end[1]), int(end[2]))):
            continue
        name, least, extra = match.groups()
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if extra is None:
                missing.append(name)
            continue
        checked += 1
        if _version(version) < _version(least):
            old.append(f"{name} {version} (needs {least})")
    problems = [f"not installed: {', '.join(missing)}"] * bool(missing) + [f"too old: {', '.join(old)}"] * bool(old)
    if problems:
        return Check("fairtrial", "failed", f"{__version__}; {'; '.join(problems)}", "pip install --upgrade fairtrial")
    return Check("fairtrial", "ok", f"{__version__}, with {checked} libraries in supported versions")


def _plugins() -> Iterator[Check]:
    """List what packages add by entry points, those of others with their package."""
    for group, found in itertools.groupby(plugins(), lambda plugin: plugin.group):
        listed = list(found)
        names = Counter(plugin.name for plugin in listed)
        twice = [name for name, number in names.items() if number > 1]
        texts = [
            plugin.name if plugin.package == "fairtrial" else f"{plugin.name} ({plugin.package} {plugin.version})"
            for plugin in listed
        ]
        remedy = f"uninstall one of the packages that have {', '.join(twice)}" if twice else ""
        yield Check(group, "warning" if twice else "ok", ", ".join(texts), remedy)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _redis_library() -> Iterator[Check]:
    try:
        version = metadata.version("redis")
    except metadata.PackageNotFoundError:
        return
    # redis-py issue 4287; fixed on Python's side by 3.13.10 and 3.14.1.
    affected = sys.version_info[:2] == (3, 12) or (3, 13) <= sys.version_info < (3, 13, 10) or (
        (3, 14) <= sys.version_info < (3, 14, 1)
    )  # fmt: skip
    if _version(version) <= (8, 1, 0) and affected:
        yield Check(
            "redis-py",
            "warning",
            f"{version} raises wrong errors for reset connections on this Python (redis-py issue 4287); Fairtrial "
            "retries those",
            "use a redis-py newer than 8.1.0, or Python 3.13.10, 3.14.1 or newer",
        )
    else:
        yield Check("redis-py", "ok", version)


def _settings(settings: Settings) -> Check:
    variables = {*map(variable_of, KNOWN)} | set(_OTHER_VARIABLES)
    unknown = [name for name, value in os.environ.items() if name.startswith("FAIRTRIAL_") and value]
    if unknown := sorted(set(unknown) - variables):
        near = difflib.get_close_matches(unknown[0], variables, 1)
        remedy = (
            f"did you mean {near[0]}?" if near else "remove it, or see docs/reference/configuration.md for the names"
        )
        return Check("settings", "warning", f"unknown in the environment: {', '.join(unknown)}", remedy)
    origins = dict.fromkeys(setting.origin for setting in settings.found.values() if setting.origin != "default")
    return Check("settings", "ok", f"from {', '.join(origins)}" if origins else "the defaults")


def _credentials() -> Check:
    values = {name: os.environ.get(name, "") for name in _PROVIDER_KEYS}
    broken = [name for name, value in values.items() if value != value.strip(" \t\r\n\"'")]
    if broken:
        detail = f"{', '.join(broken)} starts or ends with a space, a line break or a quotation mark"
        return Check("credentials", "warning", detail, "set it to the key alone")
    states = [f"{name} is {'set' if value else 'not set'}" for name, value in values.items()]
    return Check("credentials", "ok", ", ".join(states))


def _store(url: str) -> Iterator[Check]:
    from fairtrial.store import engine as engines
    from fairtrial.store.open import find_database, open_store

    database = find_database(url)
    if database is None:
        yield Check(
            "store",
            "warning",
            "in memory: results are lost when the process ends",
            "name a file or a database: --store",
        )
    elif isinstance(database, Path):
        yield from _sqlite(database)
    elif not database.startswith("postgresql:"):
        with closing(open_store(database)) as store:
            yield Check("store", "ok", f"a {type(store).__name__} opened by {database.partition(':')[0]}")
    else:
        engine = engines.postgres_engine(database)
        try:
            yield from _postgres(engine)
        finally:
            engine.dispose()


def _sqlite(path: Path) -> Iterator[Check]:
    from fairtrial.store import engine as engines

    if not path.exists():
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if os.access(folder, os.W_OK):
            yield Check("store", "ok", f"{path} does not exist yet; the first run creates it")
        else:
            yield Check(
                "store", "failed", f"{path} cannot be created in {folder}", "change the permissions, or use --store"
            )
        yield _disk(folder)
        return
    engine = engines.sqlite_engine(path, read_only=True)
    try:
        yield _schema(_version_of_schema(engine, str(path)), f"{path}, SQLite")
    finally:
        engine.dispose()
    mode = stat.S_IMODE(path.stat().st_mode)
    if not os.access(path, os.W_OK):
        yield Check("permissions", "warning", f"{path} can only be read", "make it writable: runs are written to it")
    elif mode & 0o077 and IS_POSIX:  # On Windows, the folder decides who can read.
        yield Check("permissions", "warning", f"{path} can be read by others (mode {mode:o})", f"chmod 600 {path}")
    else:
        yield Check("permissions", "ok", f"only you can read {path}" if IS_POSIX else f"you can write to {path}")
    yield _disk(path.absolute().parent)


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    detail = f"{free / 1e9:.1f} GB free for the store"
    if free < _LOW_DISK_BYTES:
        status: Status = "failed" if free < _LEAST_DISK_BYTES else "warning"
        return Check("disk", status, detail, "free disk space, delete old runs (fairtrial store prune), or use --store")
    return Check("disk", "ok", detail)


def _version_of_schema(engine: Engine, address: str) -> int:
    from fairtrial.store import engine as engines

    with engines.translated():
        return engines.found_version(engine, address)


def _schema(version: int, described: str) -> Check:
    from fairtrial.store import schema

    if version == 0:
        return Check("store", "ok", f"{described}, empty; the first run creates the tables")
    if version < schema.VERSION:
        detail = f"{described}, schema {version}: it can be read, but new runs need schema {schema.VERSION}"
        return Check("store", "warning", detail, "stop processes of older versions, then: fairtrial store migrate")
    return Check("store", "ok", f"{described}, schema {version}")


def _postgres(engine: Engine) -> Iterator[Check]:
    from sqlalchemy import text

    from fairtrial.store import engine as engines

    address = engine.url.render_as_string(hide_password=True).replace("postgresql+psycopg", "postgresql")
    with engines.translated(), engine.begin() as connection:
        version = str(connection.execute(text("SHOW server_version")).scalar_one()).split(" ")[0]
        before = time.time()
        there = float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
        ahead = there - (before + time.time()) / 2
    found = _version_of_schema(engine, address)
    yield _schema(found, f"{address}, PostgreSQL {version}")
    with engines.translated(), engine.begin() as connection:
        right, query = (
            ("CREATE on the schema", "SELECT has_schema_privilege(current_schema(), 'CREATE')")
            if found == 0
            else ("INSERT and UPDATE on the tables", "SELECT has_table_privilege('results', 'INSERT') AND "
                  "has_table_privilege('results', 'UPDATE') AND has_table_privilege('runs', 'INSERT, UPDATE')")
        )  # fmt: skip
        allowed = bool(connection.execute(text(query)).scalar_one())
    if allowed:
        yield Check("permissions", "ok", f"the user of the store has {right}")
    else:
        remedy = "grant it to the user, or name another user in the address of the store"
        yield Check("permissions", "failed", f"the user of the store lacks {right}", remedy)
    yield _clock("store clock", ahead)


def _clock(name: str, ahead: float) -> Check:
    if abs(ahead) < _CLOCK_SECONDS:
        return Check(name, "ok", f"within {_CLOCK_SECONDS:g} s of this machine's")
    side = "ahead of" if ahead > 0 else "behind"
    detail = f"{abs(ahead):.1f} s {side} this machine's: times in logs and reports do not agree"
    return Check(name, "warning", detail, "synchronise both clocks (NTP)")


async def _queue(url: str) -> list[Check]:
    if url.startswith("sqs:"):
        return [check async for check in _sqs(url)]
    if url.partition(":")[0] in ("postgresql", "postgres"):
        from fairtrial.mailbox.postgres import PostgresConnection

        async with PostgresConnection(url, timeout_seconds=_QUEUE_SECONDS) as database:
            return [check async for check in _postgres_queue(database)]
    try:
        from fairtrial.mailbox.redis.connection import RedisConnection
    except ImportError:
        from fairtrial.errors import MissingExtraError

        raise MissingExtraError("a queue on Redis", "redis") from None
    async with RedisConnection(url, timeout_seconds=_QUEUE_SECONDS) as connection:
        return [check async for check in _redis(connection)]


async def _sqs(url: str) -> Any:
    """Send, receive and acknowledge one message in a separate queue, which is then deleted."""
    try:
        from fairtrial.mailbox.sqs import SqsConnection, SqsMailbox
    except ImportError:
        from fairtrial.errors import MissingExtraError

        raise MissingExtraError("a queue on SQS", "sqs") from None
    async with SqsConnection(url, timeout_seconds=_QUEUE_SECONDS) as connection:
        async with SqsMailbox(f"doctor.{secrets.token_hex(6)}", str, connection, ttl_seconds=60.0) as mailbox:
            yield Check("queue", "ok", str(connection.address))
            await mailbox.send("a message of fairtrial doctor")
            for message in await mailbox.receive(1, 30.0, _QUEUE_SECONDS):
                await message.extend_visibility(30.0)
                await message.acknowledge()
        yield Check("queue rights", "ok", "a message was sent, received and acknowledged")


async def _redis(connection: RedisConnection) -> Any:
    from redis.exceptions import NoPermissionError, RedisError

    from fairtrial.mailbox.redis.topology import translated

    address = repr(connection).removeprefix("RedisConnection(").removesuffix(")")
    try:
        ahead = await connection.clock_difference()
    except NoPermissionError:
        ahead = 0.0
    except (RedisError, OSError) as error:
        raise translated(error, f"asking {address}") from None
    await connection.check_server()
    try:
        server: Any = await connection.command("INFO")
    except NoPermissionError:
        detail = f"{address}; its version and settings cannot be checked"
        yield Check("queue", "warning", detail, "grant the user +info")
    else:
        yield Check("queue", "ok", f"{address}, Redis {server.get('redis_version')}")
        yield _persistence(server, await _flushing(connection))
    yield await _rights(connection)
    yield _clock("queue clock", ahead)


async def _postgres_queue(connection: PostgresConnection) -> Any:
    from fairtrial.mailbox.postgres.statements import SERVER

    doing = f"asking {connection.address}"
    before = time.time()
    ((version, clock, limit, used, table, may_create),) = await connection.ask(doing, SERVER)
    yield Check("queue", "ok", f"{connection.address}, PostgreSQL {version}, {used} of {limit} connections in use")
    if table is not None:
        yield await _message_passes(_postgres_mailbox(connection), "grant the user the rights of the tables' owner")
    elif may_create:
        yield Check("queue rights", "ok", "the first worker or client can create the tables")
    else:
        remedy = "grant CREATE on the schema, or let an owner start the first worker"
        yield Check("queue rights", "failed", "there are no tables, and the user may not create them", remedy)
    yield _clock("queue clock", clock - (before + time.time()) / 2)


async def _way_of_results(store: str, queue: str) -> list[Check]:
    """Tell who stores the results of a fleet, if that could be its workers."""
    from fairtrial.store.open import find_database

    database = find_database(store)
    if (
        not isinstance(database, str)
        or not database.startswith("postgresql:")
        or queue.partition(":")[0] not in ("postgresql", "postgres")
    ):
        return []
    from fairtrial.fleet.client.fleet_run import find_shared_database
    from fairtrial.fleet.queues import PostgresBroker
    from fairtrial.store import engine as engines
    from fairtrial.store.sql import SqlStore

    opened, broker = SqlStore(engines.postgres_engine(database), "the store"), PostgresBroker(queue)
    try:
        shared = await find_shared_database(broker, opened)
    finally:
        await broker.close()
        opened.close()
    if shared is not None:
        return [Check("results", "ok", "stored by workers, as they acknowledge the requests: one database for both")]
    return [Check("results", "ok", "sent to the client, which stores them: queue and store are separate")]


def _postgres_mailbox(connection: PostgresConnection) -> Any:
    from fairtrial.mailbox.postgres import PostgresMailbox

    return PostgresMailbox(f"doctor.{secrets.token_hex(6)}", str, connection, ttl_seconds=60.0)


async def _flushing(connection: RedisConnection) -> str:
    """Return when the server flushes its append-only file, as a part of a sentence; empty if we may not ask."""
    from redis.exceptions import NoPermissionError

    try:
        settings = await connection.command("CONFIG GET", "appendfsync")
    except NoPermissionError:
        return ""
    policy = str(settings.get("appendfsync"))
    waits = " and each send waits for it (durable=yes, WAITAOF)" if connection.durable and policy != "always" else ""
    return f", appendfsync {policy}{waits}"


def _persistence(server: Any, flushing: str) -> Check:
    limit, policy = int(server.get("maxmemory", 0)), str(server.get("maxmemory_policy", "noeviction"))
    memory = f"maxmemory {limit / 1e6:,.0f} MB, {policy}" if limit else "no maxmemory"
    if not int(server.get("aof_enabled", 0)):
        detail = f"no append-only file: a restart of Redis loses the queue, and clients send again ({memory})"
        return Check("queue data", "warning", detail, "set appendonly yes and appendfsync everysec")
    if not limit:
        detail = f"append-only file{flushing}; no maxmemory: a full machine kills Redis instead of making senders wait"
        return Check("queue data", "warning", detail, "set maxmemory, and maxmemory-policy noeviction")
    return Check("queue data", "ok", f"append-only file{flushing}, {memory}")


async def _rights(connection: RedisConnection) -> Check:
    """Try the rights of the user in a separate queue, which is then deleted."""
    from fairtrial.mailbox.redis.mailbox import RedisMailbox

    mailbox = RedisMailbox(f"doctor.{secrets.token_hex(6)}", str, connection, ttl_seconds=60.0, sweep_seconds=None)
    remedy = "give the user the rights in deploy/redis-user.acl; a user limited to one suite cannot pass this check"
    return await _message_passes(mailbox, remedy)


async def _message_passes(mailbox: Any, remedy: str) -> Check:
    """Send, receive and acknowledge one message; the mailbox is then deleted."""
    try:
        async with mailbox:
            await mailbox.send("a message of fairtrial doctor")
            measured = await mailbox.oldest_waiting_seconds() is not None
            for message in await mailbox.receive(1, 30.0, _QUEUE_SECONDS):
                await message.extend_visibility(30.0)
                await message.acknowledge()
    except MailboxAccessError as error:
        return Check("queue rights", "warning", str(error), remedy)
    if not measured:
        detail = "a message passes; the age of waiting messages cannot be measured"
        return Check("queue rights", "warning", detail, "grant the user +xinfo|groups")
    return Check("queue rights", "ok", "a message was sent, received and acknowledged")


def doctor(
    settings: Annotated[
        bool, typer.Option("--settings", help="Only print the settings in effect and where each comes from.")
    ] = False,
    store: options.Store = None,
    mailbox: options.MailboxUrl = None,
    json: options.Json = False,
) -> int:
    """Check installation, settings, store and queue.

    Nothing is changed: a store that does not exist is not created. Keys and passwords are never printed. The queue is
    checked if one is configured, by sending a message through a separate test queue. Exits with 1 if a check failed.

    Settings come from [tool.fairtrial] in pyproject.toml or from environment variables such as FAIRTRIAL_STORE.
    Options on the command line override the environment, and the environment overrides the file.

    \b
    Examples:
      fairtrial doctor
      fairtrial doctor --settings
      fairtrial doctor --store postgresql://db/evals --mailbox redis://queue:6379
      fairtrial doctor --json
    """
    from fairtrial.cli.screen import out, print_json

    if settings:
        return _print_settings(load_settings(), json=json)
    checks = run_checks(store, mailbox)
    failed = any(check.status == "failed" for check in checks)
    if json:
        facts = [
            {"name": check.name, "status": check.status, "detail": check.detail, "remedy": check.remedy or None}
            for check in checks
        ]
        print_json({"format": "fairtrial.doctor/1", "ok": not failed, "checks": facts})
    else:
        _show(checks, out())
    return int(ExitCode.FAILED if failed else ExitCode.OK)


def _print_settings(settings: Settings, *, json: bool) -> int:
    from fairtrial.base.codec import to_json
    from fairtrial.cli.screen import add_row, make_table, out, print_json, print_table

    redact = current().text
    if json:
        facts = [
            {
                "name": setting.name,
                "value": redact(setting.value) if isinstance(setting.value, str) else to_json(setting.value),
                "origin": setting.origin,
                "about": setting.about,
            }
            for setting in settings.found.values()
        ]
        print_json({"format": "fairtrial.config/1", "settings": facts})
        return 0
    console = out()
    wide = console.width >= 120
    columns = ("setting", "value", "origin", "what it is") if wide else ("setting", "value", "origin")
    table = make_table(*columns, prose=("value", "what it is"))
    for setting in settings.found.values():
        value = setting.value
        listed = isinstance(value, tuple | Mapping)  # For prices: the names of the models.
        shown = "-" if value is None or (listed and not value) else ", ".join(value) if listed else str(value)
        shown = shown.lower() if isinstance(value, bool) else shown  # As in TOML.
        cells = (setting.name, redact(shown), setting.origin, setting.about)
        add_row(table, *cells[: len(columns)])
    print_table(console, table)
    return 0


_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def _show(checks: list[Check], console: Console) -> None:
    """Print one line for each check, wrapped under its column in a terminal, with the remedy below."""
    from rich.text import Text

    from fairtrial.base.formatting import count
    from fairtrial.reports.render.safe_text import plain

    name_width = max(len(check.name) for check in checks) + 2
    indent = max(map(len, _STYLES)) + 2 + name_width
    # A pipe keeps lines whole, for grep.
    width = max(20, console.width - indent) if console.is_terminal else 10_000
    for check in checks:
        lines = textwrap.wrap(plain(check.detail), width) or [""]
        if check.remedy:
            lines += textwrap.wrap(f"fix: {plain(check.remedy)}", width, break_on_hyphens=False)
        status = (check.status.ljust(indent - name_width), _STYLES[check.status])
        console.print(Text.assemble(status, check.name.ljust(name_width), lines[0]), soft_wrap=True)
        for line in lines[1:]:
            console.print(Text(" " * indent + line), soft_wrap=True)
    counts = {status: sum(check.status == status for check in checks) for status in _STYLES}
    console.print()
    if counts["failed"] or counts["warning"]:
        summary = [count(counts["failed"], "check") + " failed"] if counts["failed"] else []
        summary += [count(counts["warning"], "warning")] if counts["warning"] else []
        console.print(", ".join(summary), soft_wrap=True)
    else:
        console.print(f"{count(len(checks), 'check')}, no problems", soft_wrap=True)
