"""Settings: `[tool.fairtrial]` in pyproject.toml and FAIRTRIAL_* in the environment, each with its origin."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairtrial.base.foreign import load_toml
from fairtrial.base.frozen import EMPTY
from fairtrial.cli.user_errors import UserError, shown_path

DEFAULT_STORE = Path(".fairtrial") / "runs.db"
_URL = ("://", "memory:")
_TABLES = ("gate", "plan")  # Read by the commands that they are for.
_TRACING = "tracing"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its value and where it came from."""

    name: str
    value: Any
    origin: str
    about: str


@dataclass(frozen=True, slots=True)
class _Setting:
    about: str
    read: Callable[[Any], Any]
    default: Any = None
    path: bool = False  # A relative path in pyproject.toml starts where that file is.


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be text")
    return value.strip()


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of text")
    return tuple(value)


def _whole(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("must be a whole number") from None
    if isinstance(value, bool | float) or number < 1:
        raise ValueError("must be a whole number of at least 1")
    return number


def _count(value: Any) -> int:
    try:
        return 0 if str(value) == "0" else _whole(value)
    except ValueError:
        raise ValueError("must be a whole number of at least 0") from None


def _number(low: float, high: float) -> Callable[[Any], float]:
    """Read a number of a range."""

    def read(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not low <= number <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return number

    return read


def _prices(value: Any) -> Mapping[str, Any]:
    """Prices by model: a table, or the path of a TOML file with one."""
    from fairtrial.errors import ConfigurationError
    from fairtrial.models.pricing import read_prices

    if isinstance(value, str):
        try:
            value = load_toml(Path(value))
        except OSError as error:
            raise ValueError(f"must name a file that can be read ({error.strerror})") from None
        except ValueError as error:
            raise ValueError(f"must name a valid TOML file ({error})") from None
    try:
        return read_prices(value)
    except ConfigurationError as error:
        raise ValueError(f"must be a table of US dollars per million tokens: {error}") from None


def _log_format(value: Any) -> str:
    if value not in ("text", "json"):
        raise ValueError("must be text or json")
    return str(value)


def _flag(value: Any) -> bool:
    if (text := str(value).lower()) not in ("true", "false", "1", "0"):
        raise ValueError("must be true or false")
    return text in ("true", "1")


def _port(value: Any) -> int:
    if (port := _count(value)) > 65535:
        raise ValueError("must be a port from 0 to 65535")
    return port


KNOWN: Mapping[str, _Setting] = {
    "store": _Setting("the store of runs", _text, path=True),
    "transcripts": _Setting("a bucket or a folder for the transcripts of new runs", _text, path=True),
    "suites": _Setting("suites that `fairtrial run` runs by default", _texts, (), path=True),
    "mailbox": _Setting("the queue of worker and fleet, and of run --mailbox", _text),
    "concurrency": _Setting("maximum number of trials in flight; overrides the suite", _whole),
    "processes": _Setting("processes of this machine that share the trials; overrides the suite", _whole),
    "cache": _Setting("cache of model responses: off, read, read-write or refresh", _text, "off"),
    "max-same-errors": _Setting(
        "stop an experiment whose first N trials end in the same programming error; overrides the suite", _count
    ),
    "strict-cost": _Setting("reject models without a known price, whatever the suite says", _flag, False),
    "max-error-share": _Setting("exit 4 if a larger share of trials ends in an error", _number(0, 1), 0.1),
    "log-format": _Setting("text or json: what run, rescore and worker log", _log_format, "text"),
    "health-host": _Setting("interface of --health-port; 0.0.0.0 for probes from other machines", _text, "127.0.0.1"),
    "tracing.sample": _Setting(
        "share of passed trials that run --trace sends; failed ones are always sent", _number(0, 1), 1.0
    ),
    "tracing.content": _Setting("send inputs, outputs, messages and errors in traces (without secrets)", _flag, False),
    "tracing.profile": _Setting("add attributes for langsmith or langfuse to traces", _text),
    "tracing.receive": _Setting("port on which run receives spans of the application (OTLP/HTTP; 0: any free)", _port),
    "tracing.wait": _Setting("seconds that a trial waits for its spans", _number(0.05, 3000), 6.0),
    "prices": _Setting("US dollars per million tokens, by model: a table, or a TOML file with one", _prices, EMPTY),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, by name."""

    found: Mapping[str, Setting]
    root: Path | None  # The folder of the pyproject.toml with [tool.fairtrial].
    gate: bool = False  # Whether it has [tool.fairtrial.gate].
    plan: bool = False  # Whether it has [tool.fairtrial.plan].

    def __getitem__(self, name: str) -> Any:
        return self.found[name].value

    @property
    def store(self) -> str:
        """The address of the store."""
        return str(self["store"])

    @contextmanager
    def prices(self) -> Iterator[None]:
        """Let adapters without prices use those of the settings."""
        from fairtrial.models.pricing import configure_prices

        before = configure_prices(self["prices"])
        try:
            yield
        finally:
            configure_prices(before)


def load_settings(folder: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings in effect in a folder. The environment overrides the file."""
    environ = os.environ if environ is None else environ
    file = _find(Path.cwd() if folder is None else folder)
    table = {} if file is None else _table(file)
    gate, plan = table.pop("gate", None), table.pop("plan", None)
    settings: dict[str, Setting] = {}
    for name, definition in KNOWN.items():
        variable = variable_of(name)
        if environ.get(variable):
            settings[name] = Setting(
                name, _read(definition, environ[variable], variable), f"${variable}", definition.about
            )
        elif name in table and file is not None:
            group, _, key = name.rpartition(".")
            origin = f"{shown_path(str(file))} [tool.fairtrial{group and '.'}{group}]"
            value = _read(definition, table[name], f"{origin} {key}")
            settings[name] = Setting(
                name, _placed(value, file.parent) if definition.path else value, origin, definition.about
            )
        else:
            settings[name] = Setting(name, definition.default, "default", definition.about)
    if settings["store"].value is None:
        default = DEFAULT_STORE if file is None else _relative(file.parent / DEFAULT_STORE)
        settings["store"] = Setting("store", str(default), "default", KNOWN["store"].about)
    return Settings(settings, None if file is None else file.parent, bool(gate), bool(plan))


def _read(definition: _Setting, value: Any, origin: str) -> Any:
    try:
        return definition.read(value)
    except ValueError as error:
        raise UserError(
            f"{origin} {error} (got {value!r})", "`fairtrial doctor --settings` lists every setting"
        ) from None


def _find(folder: Path) -> Path | None:
    """Find the nearest pyproject.toml, here or in a parent folder, with a [tool.fairtrial] table."""
    for parent in (folder, *folder.resolve().parents):
        file = parent / "pyproject.toml"
        if file.is_file() and b"[tool.fairtrial" in file.read_bytes():
            return file
    return None


def _table(file: Path) -> dict[str, Any]:
    try:
        tree = load_toml(file)
    except ValueError as error:
        raise UserError(f"{shown_path(str(file))} is not valid TOML: {error}", "correct that line") from None
    tools = tree.get("tool", {})
    table = tools.get("fairtrial", {}) if isinstance(tools, dict) else tools
    if not isinstance(table, dict):
        raise UserError(f"{shown_path(str(file))}: [tool.fairtrial] must be a table (got {table!r})")
    values: dict[str, Any] = {}
    for name, value in _flat(table):
        plain = name.replace("_", "-")
        if plain not in KNOWN and plain not in _TABLES:
            near = difflib.get_close_matches(plain, [*KNOWN, *_TABLES], 1)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(KNOWN)}"
            raise UserError(f"{shown_path(str(file))}: [tool.fairtrial] has no setting {name!r}", hint)
        values[plain] = value
    return values


def _flat(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a table, and those of the table `tracing` in it with its name before theirs."""
    for name, value in table.items():
        if name == _TRACING and isinstance(value, dict):
            yield from ((f"{_TRACING}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"FAIRTRIAL_{re.sub('[-.]', '_', name).upper()}"


def _placed(value: Any, folder: Path) -> Any:
    if isinstance(value, tuple):
        return tuple(_placed(item, folder) for item in value)
    if any(mark in value for mark in _URL) and not value.startswith("sqlite:///"):
        return value
    scheme = "sqlite:///" if value.startswith("sqlite:///") else ""
    path = Path(value.removeprefix("sqlite:///"))
    first = str(path).partition(":")[0]
    if path.is_absolute() or not (scheme or "/" in first or first.endswith((".py", ".db", ".sqlite", ".sqlite3"))):
        return value  # An importable module, or an absolute path.
    return f"{scheme}{_relative(folder / path)}"


def _relative(path: Path) -> Path:
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path
