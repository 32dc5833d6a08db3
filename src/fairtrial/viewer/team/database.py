"""What the server keeps of its own: people, sessions, sign-ins that have ended, and the audit."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from fairtrial.errors import ConfigurationError, StoreUnavailableError
from fairtrial.store.engine import WRITE, postgres_engine, sqlite_engine
from fairtrial.store.open import find_database
from fairtrial.viewer.access import digest_of

SIGN_IN_SECONDS = 600.0
_MAX_TO = 2_000  # It is a part of addresses.
_MAX_DETAIL = 400
_LOCK = 0x7465616D  # The key of an advisory lock.

_tables = sa.MetaData()
_people = sa.Table(
    "team_people",
    _tables,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("form_key", sa.Text, nullable=False),
)
_sessions = sa.Table(
    "team_sessions",
    _tables,
    sa.Column("digest", sa.Text, primary_key=True),
    sa.Column("person", sa.Text, nullable=False, index=True),
    sa.Column("groups", sa.Text, nullable=False),
    sa.Column("opened_at", sa.Float, nullable=False),
    sa.Column("seen_at", sa.Float, nullable=False),
)
_sign_ins = sa.Table(
    "team_sign_ins",
    _tables,
    sa.Column("digest", sa.Text, primary_key=True),  # Of a state that has been used.
    sa.Column("used_at", sa.Float, nullable=False, index=True),
)
_keys = sa.Table(
    "team_keys",
    _tables,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, nullable=False),
)
_audit = sa.Table(
    "team_audit",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("at", sa.Float, nullable=False, index=True),
    sa.Column("person", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("object", sa.Text, nullable=False),
    sa.Column("address", sa.Text, nullable=False),
)
_REFUSED = "the audit is append-only"
_GUARDS = {
    "sqlite": [
        f"CREATE TRIGGER IF NOT EXISTS team_audit_no_{name} BEFORE {change} "
        f"BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END"
        for name, change in {
            "update": "UPDATE ON team_audit",
            "delete": "DELETE ON team_audit",
            # INSERT OR REPLACE deletes without a trigger of its own.
            "replace": "INSERT ON team_audit WHEN EXISTS (SELECT 1 FROM team_audit WHERE id = NEW.id)",
        }.items()
    ],
    "postgresql": [
        "CREATE OR REPLACE FUNCTION team_audit_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_REFUSED}'; END $$",
        "CREATE OR REPLACE TRIGGER team_audit_guard BEFORE UPDATE OR DELETE OR TRUNCATE ON team_audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION team_audit_refuse()",
    ],
}


class Person(NamedTuple):
    """Who makes a request; `secret` is what the forms of this person's session follow from."""

    id: str
    name: str
    groups: tuple[str, ...]
    secret: str


class SignIn(NamedTuple):
    """A sign-in that goes on at the provider; `browser` is a digest."""

    state: str
    browser: str
    nonce: str
    verifier: str
    to: str


class AuditEntry(NamedTuple):
    """Who did what, when. `object` is the page's address below its project, `address` where the request came from."""

    at: float
    person: str
    name: str
    action: str
    project: str = ""
    object: str = ""
    address: str = ""


class TeamDatabase:
    """The tables of one server, or of several that share them; every method blocks."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time) -> None:
        found = find_database(url)
        if found is None:
            raise ConfigurationError("database must be a file of SQLite or in PostgreSQL: sessions and the audit stay")
        self._engine = sqlite_engine(found) if isinstance(found, Path) else postgres_engine(found)
        self._clock = clock
        with self._transaction() as connection:
            self._wait_for_others(connection)
            _tables.create_all(connection)
            if not self._is_guarded(connection):
                for statement in _GUARDS[self._engine.dialect.name]:
                    connection.exec_driver_sql(statement)
            query = sa.select(_keys.c.key).where(_keys.c.name == "sign-ins")
            if (key := connection.execute(query).scalar()) is None:
                key = secrets.token_hex(32)
                connection.execute(sa.insert(_keys).values(name="sign-ins", key=key))
        self._key = bytes.fromhex(key)

    def _wait_for_others(self, connection: sa.Connection) -> None:
        """Let one server at a time make what is missing; SQLite has one writer anyway."""
        if self._engine.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})

    def _is_guarded(self, connection: sa.Connection) -> bool:
        """Return whether the audit has its trigger, which in PostgreSQL only the owner of the table may replace."""
        if self._engine.dialect.name != "postgresql":
            return False
        trigger = "SELECT 1 FROM pg_trigger WHERE tgname = 'team_audit_guard' AND tgrelid = 'team_audit'::regclass"
        return connection.exec_driver_sql(trigger).scalar() is not None

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        with self._connected(**{WRITE: True}) as connection, connection.begin():
            yield connection

    @contextmanager
    def _connected(self, **options: Any) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect().execution_options(**options) as connection:
                yield connection
        except SQLAlchemyError as error:
            what = str(error).partition("\n")[0]  # What follows is the statement.
            raise StoreUnavailableError(f"the database of sessions and of the audit: {what}") from None

    def begin_sign_in(self, browser: str, to: str) -> SignIn:
        """Begin a sign-in in a browser. All about it is in its state, sealed: anybody may begin any number of them."""
        from joserfc import jwe
        from joserfc.jwk import OctKey

        nonce, verifier = (secrets.token_urlsafe(32) for _ in range(2))
        facts = (digest_of(browser), nonce, verifier, to if len(to) <= _MAX_TO else "")
        sealed = json.dumps([*facts, self._clock()]).encode()
        state = jwe.encrypt_compact({"alg": "dir", "enc": "A256GCM"}, sealed, OctKey.import_key(self._key))
        return SignIn(state, *facts)

    def end_sign_in(self, state: str, browser: str) -> SignIn | None:
        """Return the sign-in of this state, which ends; None unless this browser has begun it, a short time ago."""
        from joserfc import jwe
        from joserfc.errors import JoseError
        from joserfc.jwk import OctKey

        try:
            opened = jwe.decrypt_compact(state, OctKey.import_key(self._key), algorithms=["dir", "A256GCM"])
            *facts, began_at = json.loads(opened.plaintext or b"")
        except (JoseError, ValueError, TypeError):
            return None  # Not of ours.
        now = self._clock()
        if facts[0] != digest_of(browser) or began_at < now - SIGN_IN_SECONDS:
            return None
        use = "INSERT INTO team_sign_ins (digest, used_at) VALUES (:digest, :now) ON CONFLICT DO NOTHING"
        with self._transaction() as connection:
            connection.execute(sa.delete(_sign_ins).where(_sign_ins.c.used_at < now - SIGN_IN_SECONDS))
            used = connection.execute(sa.text(use), {"digest": digest_of(state), "now": now}).rowcount
        return SignIn(state, *facts) if used else None

    def meet(self, person: str, name: str) -> str:
        """Remember a person's name; returns the secret of forms of people without a session of ours."""
        query = sa.select(_people.c.name, _people.c.form_key).where(_people.c.id == person)
        with self._transaction() as connection:
            if (known := connection.execute(query).one_or_none()) is None:
                self._wait_for_others(connection)
                known = connection.execute(query).one_or_none()
            if known is None:
                made = secrets.token_urlsafe(32)
                connection.execute(sa.insert(_people).values(id=person, name=name, form_key=made))
                return made
            if known.name != name:
                connection.execute(sa.update(_people).where(_people.c.id == person).values(name=name))
            return str(known.form_key)

    def names(self) -> dict[str, str]:
        """Return the names of all people, by id."""
        with self._connected() as connection:
            return dict(connection.execute(sa.select(_people.c.id, _people.c.name)).tuples().all())

    def open_session(self, person: str, groups: Sequence[str]) -> str:
        """Open a session and return its secret; only a digest of it is kept."""
        made, now = secrets.token_urlsafe(32), self._clock()
        row = {"digest": digest_of(made), "person": person, "groups": json.dumps([*groups])}
        with self._transaction() as connection:
            connection.execute(sa.insert(_sessions).values(**row, opened_at=now, seen_at=now))
        return made

    def session(self, secret: str, *, idle: float, absolute: float) -> Person | None:
        """Return whose session this is, if it has neither ended nor been idle for too long."""
        now, mine = self._clock(), _sessions.c.digest == digest_of(secret)
        query = sa.select(_sessions, _people.c.name).join(_people, _people.c.id == _sessions.c.person).where(mine)
        with self._connected() as connection:
            row = connection.execute(query).one_or_none()
        if row is None or now - row.opened_at >= absolute or now - row.seen_at >= idle:
            return None
        if now - row.seen_at > min(60.0, idle / 10):
            with self._transaction() as connection:
                connection.execute(sa.update(_sessions).where(mine).values(seen_at=now))
        return Person(row.person, row.name, tuple(json.loads(row.groups)), secret)

    def open_sessions(self, *, idle: float, absolute: float) -> int:
        """Return the number of sessions that have neither ended nor been idle for too long."""
        now = self._clock()
        valid = sa.and_(_sessions.c.opened_at > now - absolute, _sessions.c.seen_at > now - idle)
        with self._connected() as connection:
            return int(connection.execute(sa.select(sa.func.count()).select_from(_sessions).where(valid)).scalar_one())

    def end_session(self, secret: str) -> None:
        """End a session."""
        with self._transaction() as connection:
            connection.execute(sa.delete(_sessions).where(_sessions.c.digest == digest_of(secret)))

    def end_sessions(self, person: str = "", *, before: float = 0.0) -> int:
        """End all sessions of a person, or all that were opened before a time; returns their number."""
        which = _sessions.c.person == person if person else _sessions.c.opened_at < before
        with self._transaction() as connection:
            return connection.execute(sa.delete(_sessions).where(which)).rowcount

    def record(
        self, action: str, person: str, name: str, project: str = "", object: str = "", address: str = ""
    ) -> None:
        """Add to the audit."""
        entry = AuditEntry(self._clock(), person, name, action, project, object[:_MAX_DETAIL], address)
        with self._transaction() as connection:
            connection.execute(sa.insert(_audit).values(**entry._asdict()))

    def audit(self, since: float = 0.0) -> Iterator[AuditEntry]:
        """Yield the audit, oldest first."""
        columns = [_audit.c[name] for name in AuditEntry._fields]
        query = sa.select(*columns).where(_audit.c.at >= since).order_by(_audit.c.id)
        with self._connected() as connection:
            for row in connection.execution_options(yield_per=1_000).execute(query):
                yield AuditEntry._make(row)
