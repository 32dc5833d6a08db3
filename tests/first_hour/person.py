"""A person who has the wheel and the documentation: writes files, types commands, and leaves a list of both."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.redis_server import RedisServer
from tests.servers import PostgresServer, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 900  # A shared machine may be slow; how long a command takes is measured elsewhere.
PERSONAS = {
    "A": "application developer, with a FastAPI service that calls OpenAI",
    "B": "researcher, with a benchmark and a paper to write",
    "C": "platform engineer, with a database and forty colleagues",
}


@dataclass(frozen=True)
class Task:
    """One task: what the person wants, what must come out, and the pages of documentation that it takes."""

    number: str
    wants: str
    outcome: str
    pages: tuple[str, ...]
    program: Callable[[Person], None]


TASKS: list[Task] = []


def task(
    number: str, *, wants: str, outcome: str, pages: tuple[str, ...] = ()
) -> Callable[[Callable[[Person], None]], Callable[[Person], None]]:
    """List a function as the program of a task. Help screens and what commands print are no pages."""

    def listed(program: Callable[[Person], None]) -> Callable[[Person], None]:
        TASKS.append(Task(number, wants, outcome, pages, program))
        return program

    return listed


def pages_needed(tasks: list[Task]) -> dict[str, list[str]]:
    """The pages that each person reads, in the order of the tasks; a page that two people read counts twice."""
    needed: dict[str, list[str]] = {}
    for one in tasks:
        pages = needed.setdefault(one.number[0], [])
        pages += [page for page in one.pages if page not in pages]
    return needed


def unknown_names(program: str, known: str) -> set[str]:
    """The modules and names of Fairtrial that a program imports and no text that its author has read mentions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fairtrial":
            names |= {node.module or "", *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "fairtrial"}
    return {name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}\b", known)}


def start_of(person: Person) -> None:
    """What everybody types first, as README.md says: a project to look at."""
    person.type("fairtrial init example")
    person.look_at("example/evals.py")


class World:
    """The servers that tasks share, each started when it is first asked for."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.programs = folder, programs
        self._stack = contextlib.ExitStack()
        self._postgres: PostgresServer | None = None
        self._browser: Any = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def database(self) -> str:
        """The address of an empty PostgreSQL database."""
        if self._postgres is None:
            self._postgres = self._stack.enter_context(PostgresServer(options=["max_connections=150"]))
        return self._postgres.new_database()

    def reader(self, database: str) -> str:
        """The address of the same database for a role that may only read."""
        with psycopg.connect(database, autocommit=True) as connection:
            with contextlib.suppress(psycopg.errors.DuplicateObject):  # Roles are shared by all databases.
                connection.execute("CREATE ROLE reader LOGIN PASSWORD 'reads-only-password'")
            connection.execute("GRANT USAGE ON SCHEMA public TO reader")
            connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
        return re.sub("//[^@]*@", "//reader:reads-only-password@", database)

    def redis(self) -> str:
        """The address of a Redis of its own."""
        return self._stack.enter_context(RedisServer(self.folder / "redis")).url

    def browser(self) -> Any:
        """A Chromium."""
        if self._browser is None:
            from playwright.sync_api import sync_playwright

            playwright = self._stack.enter_context(sync_playwright())
            self._browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            self._stack.callback(self._browser.close)
        return self._browser


@dataclass
class Person:
    """Types commands in a folder of their own, in a shell that has nothing but the environment of the wheel."""

    world: World
    folder: Path
    read: str
    commands: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def write(self, name: str, text: str) -> Path:
        """Write a file; a program may only import names of Fairtrial that the person has read."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.lstrip("\n")
        if name.endswith(".py"):
            unknown = unknown_names(text, self.read)
            assert not unknown, f"{name} uses what no page that was read mentions: {', '.join(sorted(unknown))}"
        path.write_text(text, encoding="utf-8")
        return path

    def look_at(self, name: str) -> str:
        """Read a file that a command wrote."""
        text = (self.folder / name).read_text(encoding="utf-8")
        self.read += text
        return text

    def type(self, line: str, code: int = 0, *, seconds: float = SECONDS) -> str:
        """Type a command and return what it prints; it must end with this code."""
        self.commands.append(line)
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self._environment(), check=False, capture_output=True, text=True,
            timeout=seconds,
        )  # fmt: skip
        screen = done.stdout + done.stderr
        self.read += screen
        assert done.returncode == code, f"{line} ended with {done.returncode} instead of {code}:\n{screen}"
        assert "Traceback (most recent call last)" not in screen, f"{line} printed a traceback:\n{screen}"
        return screen

    def try_again(self, line: str, code: int = 0, *, until: Callable[[str], bool]) -> str:
        """Type a command until it prints what is awaited; it counts once."""
        screen = ""
        for _ in range(60):
            screen = self.type(line, code)
            if until(screen):
                return screen
            self.commands.pop()
            time.sleep(0.5)
        raise AssertionError(f"{line} still prints:\n{screen}")

    @contextlib.contextmanager
    def start(self, line: str) -> Iterator[Started]:
        """Type a command that goes on until it is stopped; what it prints is in a file."""
        self.commands.append(line)
        number = len(self.commands)
        log = self.folder / f".screen-{number}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"], cwd=self.folder, env=self._environment(), stdout=file, stderr=file,
                stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_hear_signals,
            )  # fmt: skip
        started = Started(line, process, log)
        try:
            yield started
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # Commands that a shell of the person started.

    @contextlib.contextmanager
    def provider(self, script: dict[str, object]) -> Iterator[None]:
        """Let the project's model server stand for the provider: it answers the OpenAI SDK as the script says."""
        file = self.folder.parent / f"{self.folder.name}-provider.json"
        file.write_text(json.dumps(script), encoding="utf-8")
        port = free_port()
        command = [str(self.world.programs / "python"), "-m", "fairtrial.integrations.model_server"]
        process = subprocess.Popen(
            [*command, "--port", str(port), "--script", str(file)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            self.variables |= {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "none"}
            yield
        finally:
            process.terminate()
            process.communicate()

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.world.programs}:/usr/bin:/bin",
            "HOME": str(self.folder.parent),
            "LANG": "C.UTF-8",
            "COLUMNS": "80",
            **self.variables,
        }


def _hear_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Started:
    """A command that runs."""

    line: str
    process: subprocess.Popen[bytes]
    log: Path

    def screen(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, pattern: str, seconds: float = 300) -> re.Match[str]:
        """Wait until a regular expression matches what is printed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = re.search(pattern, self.screen())
            if found is not None:
                return found
            assert self.process.poll() is None, f"{self.line} ended:\n{self.screen()}"
            time.sleep(0.1)
        raise AssertionError(f"{self.line} never printed {pattern!r}:\n{self.screen()}")

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 300) -> int:
        """Send a signal and wait for the exit code."""
        os.kill(self.process.pid, number)
        return self.process.wait(timeout=seconds)
