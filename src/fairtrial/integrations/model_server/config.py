"""What a model server is to do: settings and plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

from pydantic import ConfigDict, TypeAdapter, with_config

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.batches import BatchOptions
from fairtrial.integrations.model_server.faults import Fault, RateLimited
from fairtrial.integrations.model_server.reply import Engine, FixedLatency, Latency, ParsedRequest, Record, draw
from fairtrial.integrations.model_server.rules import (
    HostedEvals,
    Predicate,
    Replies,
    Rule,
    Where,
    check_pattern,
    matches,
    normalise,
)


@first_is(Record)
@dataclass(frozen=True, slots=True)
class FaultRule(Record):
    """A fault for requests that meet all given conditions; without conditions, for all requests.

    - `numbers`: these requests, counted from 1 in order of arrival. `every`: every n-th request.
    - `attempts`: these attempts of the same request body, counted from 1: `attempts=(1,)` fails each request once.
    - `when`: a regular expression that is searched in the text that `where` names, or a predicate. `model`: this model.
    - `probability`: a random share of the remaining requests, drawn from the seed and the number of the request, or,
      with `by="content"`, from the seed, the request's body and its attempt, whatever the order of arrival.
    """

    fault: Fault
    probability: float = 1.0
    by: Literal["number", "content"] = field(default="number", kw_only=True)
    numbers: tuple[int, ...] | None = field(default=None, kw_only=True)
    every: int | None = field(default=None, kw_only=True)
    attempts: tuple[int, ...] | None = field(default=None, kw_only=True)
    when: str | Predicate | None = field(default=None, kw_only=True)
    where: Where = field(default="last_user", kw_only=True)
    model: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"the probability of a FaultRule must be from 0 to 1 (got {self.probability!r})")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1 (got {self.every})")
        if isinstance(self.when, str):
            check_pattern(self.when)


class FaultPlan:
    """The faults of a server: a pure function from (seed, request) to a fault."""

    def __init__(
        self,
        rules: Sequence[FaultRule],
        *,
        seed: int = 0,
        applies: Callable[[Fault, ParsedRequest], bool] = lambda fault, request: True,
    ) -> None:
        self._seed = seed
        self._applies = applies
        # Sets, because a schedule may name thousands of requests and is searched for each request.
        self._rules = [(rule, None if rule.numbers is None else frozenset(rule.numbers)) for rule in rules]
        self.counts_attempts = any(rule.attempts is not None or rule.by == "content" for rule in rules)

    def fault(self, request: ParsedRequest) -> Fault | None:
        """Return the fault of the first rule that matches a request; None if no rule does."""
        for index, (rule, numbers) in enumerate(self._rules):
            if self._holds(index, rule, numbers, request) and self._applies(rule.fault, request):
                return rule.fault
        return None

    def _holds(self, index: int, rule: FaultRule, numbers: frozenset[int] | None, request: ParsedRequest) -> bool:
        if numbers is not None and request.number not in numbers:
            return False
        if rule.every is not None and request.number % rule.every:
            return False
        if rule.attempts is not None and request.attempt not in rule.attempts:
            return False
        if rule.model is not None and request.model != rule.model:
            return False
        if rule.when is not None and not matches(rule.when, rule.where, request):
            return False
        if rule.probability >= 1:
            return True
        key = (request.number,) if rule.by == "number" else (request.digest, request.attempt)
        return draw(self._seed, "fault", index, *key) < rule.probability


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
    batches: BatchOptions | None
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
    - `batches`: how batches of OpenAI and Anthropic are executed; without it, their routes answer 404.
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
    batches: BatchOptions | None = None
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
