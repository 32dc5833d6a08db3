"""Addresses of Redis: one server, the master of a group that Sentinels watch, or a Cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode

from fairtrial.errors import ConfigurationError

type Node = tuple[str, int] | None
"""Host and port of a server; None is the one server of a plain URL."""

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_PORTS = {"sentinel": 26379, "cluster": 6379}
_FORMS = (
    "invalid Redis URL: write redis://[user:password@]host[:port][/db], rediss://... for TLS, unix://path, "
    "redis+sentinel://[user:password@]host[:port],host[:port]/name[/db] or "
    "redis+cluster://[user:password@]host[:port],host[:port], with / ? # @ : % in a password percent-encoded"
)


def invalid_address() -> ConfigurationError:
    """Return the error of an address that cannot be read. It quotes nothing, because a part may be a password."""
    return ConfigurationError(_FORMS)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed address.

    Attributes:
        mode: What the address leads to.
        url: The address of one server as redis-py reads it; empty in the other modes.
        seeds: The Sentinels, or the nodes of a Cluster that are asked for the others.
        service: The name by which the Sentinels know the master.
    """

    mode: Literal["server", "sentinel", "cluster"]
    url: str = field(default="", repr=False)
    seeds: tuple[tuple[str, int], ...] = ()
    service: str = ""
    tls: bool = False
    credentials: str = field(default="", repr=False)
    database: int = 0
    query: str = field(default="", repr=False)
    sentinel_credentials: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Read an address.

        Raises:
            ConfigurationError: it is not an address of Redis.
        """
        scheme, separator, rest = url.partition("://")
        plain, _, mode = scheme.partition("+")
        if not separator or scheme not in SCHEMES:
            raise invalid_address()
        if not mode:
            return cls("server", url)
        location, _, query = rest.partition("?")
        authority, _, path = location.partition("/")
        credentials, at, hosts = authority.rpartition("@")
        seeds = tuple(_host_and_port(host, _PORTS[mode]) for host in hosts.split(","))
        options = dict(parse_qsl(query, keep_blank_values=True))
        own = [options.pop(name, "") for name in ("sentinel_username", "sentinel_password")]
        service, _, database = path.partition("/") if mode == "sentinel" else ("", "", path)
        database = database or "0"
        if not database.isdecimal() or (mode == "sentinel" and not service):
            raise invalid_address()
        if mode == "cluster" and database != "0":
            raise ConfigurationError(f"the database of a Redis Cluster must be 0 (got {database})")
        return cls(
            "sentinel" if mode == "sentinel" else "cluster",
            seeds=seeds,
            service=unquote(service),
            tls=plain == "rediss",
            credentials=credentials + at,
            database=int(database),
            query=urlencode(options),
            sentinel_credentials=f"{quote(own[0], safe='')}:{quote(own[1], safe='')}@" if any(own) else "",
        )

    def url_of(self, node: Node) -> str:
        """Return the address of one server with messages."""
        return self.url if node is None else self._url(node, self.credentials, f"/{self.database}")

    def url_of_seed(self, seed: tuple[str, int]) -> str:
        """Return the address of a server that knows where the messages are."""
        return self._url(seed, self.sentinel_credentials if self.mode == "sentinel" else self.credentials, "")

    def _url(self, node: tuple[str, int], credentials: str, path: str) -> str:
        url = f"{'rediss' if self.tls else 'redis'}://{credentials}{_shown(node)}{path}"
        return f"{url}?{self.query}" if self.query else url

    def __str__(self) -> str:
        """Return the address without credentials and options."""
        if self.mode == "server":
            scheme, _, rest = self.url.partition("://")
            authority = rest.partition("?")[0].partition("/")[0].rpartition("@")[2]
            host, port = ("", 6379) if scheme == "unix" or not authority else _host_and_port(authority, 6379)
            return f"{scheme}://{host}:{port}"
        name = f"/{quote(self.service)}" if self.service else ""
        return f"{'rediss' if self.tls else 'redis'}+{self.mode}://{','.join(map(_shown, self.seeds))}{name}"


def _host_and_port(text: str, default: int) -> tuple[str, int]:
    """Split `host`, `host:port` or `[IPv6]:port`."""
    host, separator, port = text.rpartition(":")
    if not separator or port.endswith("]"):
        host, port = text, str(default)
    host = unquote(host.removeprefix("[").removesuffix("]"))
    if not host or not port.isdecimal() or int(port) > 65535:
        raise invalid_address()
    return host, int(port)


def _shown(node: tuple[str, int]) -> str:
    host, port = node
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
