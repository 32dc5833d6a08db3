"""The settings of batches, and where an adapter finds the batches of its run."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fairtrial.errors import ConfigurationError

if TYPE_CHECKING:
    from fairtrial.models.batches.sender import RunBatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Send the calls of an adapter in its provider's batches, at half price: `OpenAIAdapter(..., batch=Batching())`.

    A batch is sent when it is full, when no trial can go on before it, or when its oldest request has waited for
    `max_wait_seconds`. The provider has a day to answer it; trials wait, and a run that was killed continues with the
    batches it has sent.

    Attributes:
        max_requests: The largest number of requests of a batch; the limits of the provider apply too.
        max_wait_seconds: How long a request waits for company while other trials are still at work. The first batch
            is sent after one second, so that an error of all requests shows early.
        window: How many trials may wait at once; it takes the place of `max_concurrent`, which limits the others.
        fallback: "live" sends a request at full price if three batches came back without an outcome for it; None makes
            that an error of its trial.
        poll_seconds: When to look at a batch for the first time; later looks are further apart, up to ten minutes.
        list_lag_seconds: How long the provider may take to show a new batch. If the answer to a batch was lost, the
            batch is looked for in the list that long before it is sent again; a batch that the provider says it does
            not have is asked for again until it is that old.
        keep_files: Keep the files with requests and replies at the provider. By default they are deleted there as soon
            as the replies are stored.
    """

    max_requests: int = 20_000
    max_wait_seconds: float = 600.0
    window: int = 20_000
    fallback: Literal["live"] | None = None
    poll_seconds: float = 30.0
    list_lag_seconds: float = 600.0
    keep_files: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_requests", 1), ("window", 1)):
            value: object = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"Batching.{name} must be a whole number of at least {least} (got {value!r})")
        for name in ("max_wait_seconds", "poll_seconds", "list_lag_seconds"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _DAY:
                raise ConfigurationError(f"Batching.{name} must be a number from 0 to {_DAY} (got {value!r})")
        if self.fallback not in (None, "live"):
            raise ConfigurationError(f'Batching.fallback must be "live" or None (got {self.fallback!r})')


_DAY = 86_400
_allowed = False
_shared: Batching | None = None

current_batches: ContextVar[RunBatches | None] = ContextVar("fairtrial_batches", default=None)


def share_batching(batching: Batching | None) -> Batching | None:
    """Let adapters without batches of their own use these; returns the previous ones. As `fairtrial run --batch`."""
    global _shared
    before, _shared = _shared, batching
    if batching is not None:
        allow_batches()
    return before


def shared_batching() -> Batching | None:
    """Return the batches of adapters without batches of their own."""
    return _shared


def allow_batches() -> None:
    """Note that an adapter of this process may send its calls in batches."""
    global _allowed
    _allowed = True


def batches_allowed() -> bool:
    """Return whether an adapter of this process may send its calls in batches. Its trials say whether a run has any."""
    return _allowed
