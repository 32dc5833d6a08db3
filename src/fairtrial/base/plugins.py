"""What packages add to Fairtrial: found by entry points, imported when they are named. Ours are registered likewise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_args

from fairtrial.errors import ConfigurationError

type Group = Literal["providers", "evaluators", "stores", "mailboxes", "importers", "exporters", "sandboxes"]
GROUPS: tuple[Group, ...] = get_args(Group.__value__)


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point of the group `fairtrial.<group>`."""

    group: Group
    name: str
    package: str
    version: str
    value: str


def plugins() -> Iterator[Plugin]:
    """Yield what is installed, ours included, by group and name; imports nothing of it."""
    for group in GROUPS:
        for name, points in sorted(_installed(group).items()):
            for point in points:
                package, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
                yield Plugin(group, name, package, version, point.value)


def plugin_names(group: Group) -> list[str]:
    """Return the names in a group, sorted."""
    return sorted(_installed(group))


def find_plugin(group: Group, name: str) -> Any | None:
    """Import and return what is installed under a name, or None.

    Raises:
        ConfigurationError: Two packages have the name, or what it names cannot be imported.
    """
    points = _installed(group).get(name, [])
    if len(points) > 1:
        packages = " and ".join(sorted(point.dist.name if point.dist else point.value for point in points))
        raise ConfigurationError(f"{packages} both have {name!r} among fairtrial.{group}\nuninstall one of them")
    if not points:
        return None
    try:
        return points[0].load()
    except (ImportError, AttributeError) as error:
        package = points[0].dist.name if points[0].dist else points[0].value
        raise ConfigurationError(f"{name!r} of {package} (fairtrial.{group}) cannot be imported: {error}") from error


def load_plugin(group: Group, name: str, what: str) -> Any:
    """Return what is installed under a name; `what` is what errors call the name.

    Raises:
        ConfigurationError: Nothing has the name.
    """
    found = find_plugin(group, name)
    if found is None:
        known = plugin_names(group)
        near = get_close_matches(name, known, 1)
        remedy = f" did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"{what} must be one of {', '.join(known)} (got {name!r}){remedy}")
    return found


@cache
def _installed(group: Group) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"fairtrial.{group}"):
        same = found.setdefault(point.name, [])
        if point.value not in [other.value for other in same]:  # A package may be found on two paths.
            same.append(point)
    return found
