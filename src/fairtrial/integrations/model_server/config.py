"""The configuration of a server, which can be written as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from pydantic import ConfigDict, TypeAdapter, with_config

from fairtrial.integrations.model_server.faults import Fault, RateLimited
from fairtrial.integrations.model_server.hosted_evals import HostedEvals
from fairtrial.integrations.model_server.latency import FixedLatency, Latency
from fairtrial.integrations.model_server.plan import FaultRule
from fairtrial.integrations.model_server.record import Record
from fairtrial.integrations.model_server.rules import Replies, Rule, normalise
from fairtrial.integrations.model_server.token_ids import Engine


@with_config(ConfigDict(extra="forbid"))
class ServerOptions(TypedDict, total=False):
    """The options of a server besides its replies: the fields of `ServerConfig`, in convenient forms."""

    faults: Fault | FaultRule | Sequence[Fault | FaultRule]
    latency: float | Latency
    max_concurrent: int | None
    requests_per_second: float | None
    burst: int | None
    refusal: RateLimited
    seed: int
    models: Sequence[str]
    stream_interval: float
    log_limit: int
    log_bytes: int
    evals: HostedEvals | None
    token_ids: Engine | None


@with_config(ConfigDict(extra="forbid"))
class _ScriptFile(ServerOptions, total=False):
    replies: Replies


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Record):
    """The settings of one server.

    - `replies`, `faults`: rules, of which the first that matches a request is used.
    - `latency`: how long each admitted request takes, with or without a fault. `stream_interval`: seconds between the
      events of a stream.
    - `max_concurrent`: the most requests in flight; others are refused. `requests_per_second` and `burst`: a token
      bucket; requests beyond it are refused. `refusal` is the answer to refused requests.
    - `log_limit`, `log_bytes`: how many requests are kept for `requests()`, and how much of them.
    - `evals`: what `GET /v1/evals...` and `GET /v1/files/ID/content` return; without it, 404.
    - `token_ids`: the engine whose token ids chat completions return to clients that ask for `return_token_ids`.
    """

    replies: tuple[Rule, ...] = ()
    faults: tuple[FaultRule, ...] = ()
    latency: Latency = FixedLatency()  # noqa: RUF009 - it is frozen
    max_concurrent: int | None = None
    requests_per_second: float | None = None
    burst: int | None = None
    refusal: RateLimited = RateLimited()  # noqa: RUF009 - it is frozen
    seed: int = 0
    models: tuple[str, ...] = ("test-model",)
    stream_interval: float = 0.0
    log_limit: int = 10_000
    log_bytes: int = 256 * 1024 * 1024
    evals: HostedEvals | None = None
    token_ids: Engine | None = None

    def __post_init__(self) -> None:
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1 (got {self.max_concurrent})")
        if self.requests_per_second is not None and self.requests_per_second <= 0:
            raise ValueError(f"requests_per_second must be more than 0 (got {self.requests_per_second})")
        if self.burst is not None and (self.requests_per_second is None or self.burst < 1):
            raise ValueError(f"burst must be at least 1 and needs requests_per_second (got {self.burst})")
        if self.stream_interval < 0:
            raise ValueError(f"stream_interval must be at least 0 seconds (got {self.stream_interval})")
        if self.log_limit < 0:
            raise ValueError(f"log_limit must be at least 0 (got {self.log_limit})")

    @classmethod
    def of(cls, replies: Replies, options: ServerOptions) -> ServerConfig:
        """Create the configuration from replies and options."""
        given = dict(options)
        faults = options.get("faults", ())
        several = faults if isinstance(faults, Sequence) else (faults,)
        given["faults"] = tuple(fault if isinstance(fault, FaultRule) else FaultRule(fault) for fault in several)
        latency = options.get("latency", FixedLatency())
        given["latency"] = FixedLatency(latency) if isinstance(latency, int | float) else latency
        if "models" in options:
            given["models"] = tuple(options["models"])
        return cls(replies=normalise(replies), **given)  # type: ignore[arg-type]  # a TypedDict's values, widened by dict()

    def to_json(self) -> bytes:
        """Return the configuration as one line of JSON; raises TypeError if it contains functions."""
        functions = [rule for rule in self.replies if callable(rule.when) or callable(rule.reply)]
        functions_of_faults = [rule for rule in self.faults if callable(rule.when)]
        if functions or functions_of_faults:
            raise TypeError(
                "the replies of a server in another process must be patterns, replies and scripts (got a function); "
                "use ModelServer in this process for functions"
            )
        return _CONFIG.dump_json(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> ServerConfig:
        """Parse a script file: an object with `replies` and any of `ServerOptions`."""
        script = _SCRIPT.validate_json(text)
        replies = script.pop("replies", None)
        return cls.of(replies, script)

    @classmethod
    def load(cls, path: Path) -> ServerConfig:
        """Load a script file."""
        return cls.from_json(path.read_bytes())


_CONFIG = TypeAdapter(ServerConfig)
_SCRIPT = TypeAdapter(_ScriptFile)
