"""Serve the projects of a team: their stores, the schedule of deletions, the start and the end."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from anyio import to_thread

from fairtrial.errors import ConfigurationError, FairtrialError, StoreError, UnknownRunError
from fairtrial.fleet.ops.health import STALL_SECONDS, Family, Probe, Reading, exposition, families_of
from fairtrial.fleet.ops.watchdog import Watchdog
from fairtrial.runs.events import log
from fairtrial.runs.run_lease import old_runs
from fairtrial.store.open import find_database
from fairtrial.viewer.access import Access
from fairtrial.viewer.pages.context import Viewer
from fairtrial.viewer.serve import ServeOptions, listen_on, make_server, to_its_end
from fairtrial.viewer.team.app import AGAIN_SECONDS, REQUEST_SECONDS, SIGN_INS, TeamApp
from fairtrial.viewer.team.config import OidcSettings, TeamSettings
from fairtrial.viewer.team.database import TeamDatabase
from fairtrial.viewer.team.identity import open_identity
from fairtrial.viewer.work import open_viewed
from fairtrial.viewer.working import Workbench

_SCHEDULE_SECONDS = 3_600.0
_DAY = 86_400.0
_LAST_PORT = 65_535


class TeamServer:
    """A server of several stores; `run` blocks until it is stopped.

    Args:
        settings: The file of the team.
        health: The interface and the port for `/live`, `/ready`, `/health` and `/metrics`; None for no such port.
    """

    def __init__(self, settings: TeamSettings, health: tuple[str, int] | None = None) -> None:
        try:
            import aiohttp  # noqa: F401 - asked here, so that a missing extra is known before anything starts
            from joserfc.errors import SecurityWarning
        except ImportError:
            from fairtrial.errors import MissingExtraError

            raise MissingExtraError("fairtrial serve", "team") from None
        warnings.filterwarnings("ignore", "EdDSA is deprecated", SecurityWarning)  # A name: issuers still use it.
        self._settings = settings
        self._health = health
        host, _, port = settings.listen.rpartition(":")
        if settings.socket_path is None and not (host and port.isdecimal() and int(port) <= _LAST_PORT):
            raise ConfigurationError(f'listen must be "HOST:PORT" or "unix:FILE" (got {settings.listen!r})')
        place = settings.socket_path
        self._options = ServeOptions("", host.strip("[]"), None if place else int(port), place)
        self._database = TeamDatabase(settings.database)
        self.app = TeamApp(settings, open_identity(settings, self._database), self._database)
        self.viewers: dict[str, Viewer] = {}
        self._problem = ""  # Of the database of the server itself.
        self._problems: dict[str, str] = {}  # Of the stores of projects that are away.
        with ThreadPoolExecutor() as threads:  # Each may take as long as it takes to give up.
            for _ in threads.map(self._open, settings.projects):
                pass

    def _open(self, name: str) -> None:
        """Serve a project from now on, if its store can be opened."""
        url = self._settings.projects[name].store
        database = find_database(url)
        if database is None:
            raise ConfigurationError(f"projects.{name}: a store in memory cannot be viewed by another process")
        access = Access(f"p/{name}", secrets.token_urlsafe(24), frozenset(), self._settings.secure)
        title = self._settings.projects[name].title or name
        try:
            if isinstance(database, Path) and not database.exists():
                raise StoreError(f"there is no store at {database}")  # An empty one would hide a wrong path.
            store = open_viewed(url, read_only=False)
        except StoreError as error:
            problem = str(error).partition("\n")[0]
            if problem != self._problems.get(name):
                log.warning("project %s is away, and is tried again every %d s: %s", name, AGAIN_SECONDS, problem)
            self._problems[name] = problem
            return
        viewer = Viewer(
            store, Workbench(url, read_only=False), access, store_name=title,
            read_only=False,
        )  # fmt: skip
        self.viewers[name] = viewer
        self.app.open_project(name, viewer)
        if self._problems.pop(name, ""):
            log.warning("project %s is back", name)

    async def _try_again(self) -> None:
        """Open what is away, and ask whether the server's own database answers, again and again."""
        while True:
            await asyncio.sleep(AGAIN_SECONDS)
            for name in self.app.away:
                try:
                    await to_thread.run_sync(self._open, name, abandon_on_cancel=True)
                except FairtrialError as error:
                    log.warning("project %s is away, and its settings are wrong: %s", name, error)
            try:
                await to_thread.run_sync(self._database.names, abandon_on_cancel=True)
                self._problem = ""
            except StoreError:
                self._problem = "the database of sessions and of the audit is away"

    @contextmanager
    def _probed(self) -> Iterator[None]:
        """Answer probes and Prometheus at a port of their own, if there is one."""
        if self._health is None:
            yield
            return
        watchdog = Watchdog(STALL_SECONDS)
        probe = Probe(
            *self._health, watchdog=watchdog, not_ready=lambda: self._problem, render=self._metrics,
            details=lambda: {"projects_away": self.app.away},
        )  # fmt: skip
        probe.start()
        watchdog.start()
        try:
            yield
        finally:
            probe.close()
            watchdog.stop()

    async def _metrics(self) -> str:
        away = [Reading(name in self.app.away, {"project": name}) for name in self._settings.projects]
        families = families_of((REQUEST_SECONDS,), (SIGN_INS,))
        families.append(Family("fairtrial_serve_project_away", "gauge", "1 if it cannot be opened.", tuple(away)))
        identity = self._settings.identity
        if isinstance(identity, OidcSettings):
            limits = {"idle": 60 * identity.idle_minutes, "absolute": 3_600 * identity.absolute_hours}
            with suppress(StoreError):  # Its absence is what `/ready` says.
                number = await to_thread.run_sync(
                    partial(self._database.open_sessions, **limits), abandon_on_cancel=True
                )
                families.append(Family("fairtrial_serve_sessions", "gauge", "Open sessions.", (Reading(number),)))
        return exposition(families)

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until Ctrl-C or SIGTERM."""
        listening = listen_on(self._options, "change listen in the file of the team")
        try:
            asyncio.run(self._serve(listening, started))
        finally:
            listening.close()
            if self._options.socket_path is not None:
                self._options.socket_path.unlink(missing_ok=True)
            for viewer in self.viewers.values():
                viewer.store.close()
            self._database.close()

    async def _serve(self, listening: socket.socket, started: Callable[[], None]) -> None:
        def close_streams() -> None:
            for viewer in [*self.viewers.values()]:
                viewer.streams.close()

        server = make_server(self.app, close_streams)
        asyncio.get_running_loop().call_soon(started)
        tasks = [asyncio.create_task(one) for one in (self._keep_the_schedule(), self._try_again())]
        try:
            with self._probed():
                await server.serve(sockets=[listening])
        finally:
            for task in tasks:
                task.cancel()
            for viewer in [*self.viewers.values()]:
                await to_its_end(viewer.workbench.close())

    async def _keep_the_schedule(self) -> None:
        while True:
            try:
                await to_thread.run_sync(self.delete_old)
            except FairtrialError as error:
                log.warning("old runs could not be deleted: %s", error)
            await asyncio.sleep(_SCHEDULE_SECONDS)

    def delete_old(self) -> int:
        """Delete runs older than their project keeps them, and sessions that have ended; returns the number of runs."""
        identity = self._settings.identity
        if isinstance(identity, OidcSettings):
            self._database.end_sessions(before=time.time() - 3_600 * identity.absolute_hours)
        days = {name: project.keep_days for name, project in self._settings.projects.items()}
        return sum(self._delete_older(name, kept) for name, kept in days.items() if kept and name in self.viewers)

    def _delete_older(self, name: str, days: float) -> int:
        """Delete old runs of one project. Whatever its store raises, those of the others are deleted too."""
        store, deleted = self.viewers[name].store, 0
        try:
            for listed in old_runs(store, time.time() - days * _DAY):
                try:
                    if (run := store.get_run(listed.run_id)).noted.kept:
                        continue  # Since it was listed.
                    self._database.record("deleted", "", "the schedule", name, f"{run.name} ({run.run_id})")
                    store.delete_run(run.run_id)
                    deleted += 1
                except UnknownRunError:
                    continue  # Another server has deleted it.
        except Exception as error:
            log.warning("old runs of %s could not be deleted: %s", name, error)
        return deleted
