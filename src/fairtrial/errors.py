"""Every error Fairtrial raises on purpose, as one tree.

    FairtrialError
    ├── ConfigurationError        a suite, evaluator or option that can't work; raised before the first call
    │   ├── MissingExtraError     an optional dependency is not installed (also an ImportError)
    │   ├── SecretInDataError     a secret in data that is stored unchanged: a sample, a name, parameters
    │   └── RunMismatchError      a run cannot be resumed because what it was made of has changed
    ├── DataError                 data that is not what it was said to be
    │   ├── DatasetError          a dataset file or sample, with its file, line and field
    │   ├── CodecError            a value that cannot be encoded as JSON, or JSON of another type than requested
    │   │   └── NewerFormatError  a message in a format of a newer version
    │   ├── LimitExceededError    data of others that is larger, or expands further, than a limit allows
    │   └── EnvironmentMismatchError  environment state of another kind or of an incompatible version
    ├── SessionError              a session record used against its nature
    ├── StoreError                the store of runs cannot do what was asked
    │   ├── UnknownRunError       no such run
    │   ├── StoreVersionError     written by a newer Fairtrial, or in need of migration
    │   └── StoreUnavailableError the database cannot be reached just now; trying again may help
    │       └── StoreFullError    its disk is full; trying again helps when there is room
    ├── NothingToScoreError       an evaluator has nothing to measure: no reference, no statement, no record
    ├── BrokenUserError           the simulated user of a conversation broke its rules, or could not speak
    ├── RunBusyError              another process is at work on the run
    ├── ModelError                a model call failed
    │   ├── RateLimitedError      the provider asked to slow down (retried, and heard by the limiter)
    │   ├── ModelUnavailableError the provider could not be reached or failed; trying again may help
    │   ├── MalformedReplyError   the provider's answer was not what its protocol says; trying again may help
    │   ├── ModelRefusedError     the model or its filter declined to answer
    │   ├── InvalidCallError      the provider will never accept this call (a bad parameter)
    │   │   └── ContextLengthError  the conversation is longer than the context of the model
    │   ├── ModelAuthError        no key, or a wrong one
    │   ├── OutputParseError      the answer does not have the form that was asked for, even after a repair
    │   └── BudgetExceededError   a budget of tokens, requests or money is used up
    ├── MailboxError              a mailbox cannot do what was asked
    │   ├── MailboxConnectionError  its server cannot be reached just now; trying again may help
    │   ├── MailboxAccessError    its server refuses us: wrong password, or the user may not do this
    │   ├── MailboxNotDurableError  its server may lose what it confirmed (also a ConfigurationError)
    │   ├── MailboxFullError      its server has no memory for another message; trying later may help
    │   ├── MailboxClosedError    it was used after `close()`
    │   ├── LeaseLostError        the lease of the message was lost: it expired, or the message was settled before
    │   ├── ReplyNotAvailableError  there is nobody to reply to
    │   └── BodyError             a body that cannot be sent or read (also a DataError)
    │       └── MessageTooLargeError  a body over the mailbox's limit
    ├── SandboxError              a sandbox has ended, or cannot do what was asked
    │   └── SandboxUnavailableError  this machine does not allow the isolation that was asked for
    ├── ToolServerError           an MCP server cannot be started or reached, or breaks its protocol
    ├── TraceSendError            traces could not be sent to their receiver
    └── LoopCrashedError          a loop of a group crashed more often than the group allows

User code raises plain exceptions; they become data (the outcome of one trial), never one of these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

type Extra = Literal[
    "models", "postgres", "redis", "sqs", "otel", "data", "text", "testing", "inspect", "gepa", "mcp", "objects", "team"
]
"""The optional dependencies: the names in pyproject.toml, except for `all`."""


class FairtrialError(Exception):
    """The root of everything Fairtrial raises on purpose."""


class ConfigurationError(FairtrialError, ValueError):
    """Something was set up in a way that cannot work; nothing has been run yet."""


class MissingExtraError(ConfigurationError, ImportError):
    """An optional dependency is needed and not installed."""

    def __init__(self, purpose: str, extra: Extra) -> None:
        super().__init__(f'{purpose} needs an optional dependency: pip install "fairtrial[{extra}]"')
        self.extra = extra


class SecretInDataError(ConfigurationError):
    """A known secret is in something that is stored unchanged: a sample, a name, parameters or tags."""


class DataError(FairtrialError, ValueError):
    """Data that is not what it was said to be."""


class DatasetError(DataError):
    """A dataset file or sample that cannot be used, and where it is."""

    def __init__(self, problem: str, *, path: Path | str | None = None, line: int | None = None) -> None:
        location = "" if path is None else str(path)
        if line is not None:
            location += f":{line}" if location else f"line {line}"
        super().__init__(f"{location}: {problem}" if location else problem)
        self.path = path
        self.line = line
        self.problem = problem


class CodecError(DataError):
    """A value cannot be encoded as JSON, or JSON does not have the requested type.

    `path` leads to the culprit, as in `$.turns[2].role`.
    """

    def __init__(self, problem: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(problem, path)
        self.problem = problem
        self.path = path

    def under(self, step: str | int) -> CodecError:
        """The same error seen from one level further out."""
        self.path = (step, *self.path)
        self.args = (self.problem, self.path)
        return self

    def __str__(self) -> str:
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        return f"at ${steps}: {self.problem}" if steps else self.problem


class NewerFormatError(CodecError):
    """A message in a format that only a newer version can read."""


class SessionError(FairtrialError):
    """A session was used in a way its record does not allow."""


class LimitExceededError(DataError):
    """Data of others is larger, or expands further, than a limit allows; the message names what raises it."""


class EnvironmentMismatchError(DataError):
    """Serialised environment state of another kind, or of a version this code cannot restore."""


class StoreError(FairtrialError):
    """The store of runs cannot do what was asked."""


class UnknownRunError(StoreError, LookupError):
    """No run of that name."""


class StoreVersionError(StoreError):
    """The store was written by a newer version of Fairtrial, or must be migrated first."""


class StoreUnavailableError(StoreError):
    """The database cannot be reached just now; trying again may help."""


class StoreFullError(StoreUnavailableError):
    """The disk of the database is full; trying again helps when there is room."""


class RunMismatchError(ConfigurationError):
    """A run cannot be resumed because what it was made of has changed."""


class NothingToScoreError(FairtrialError):
    """An evaluator has nothing to measure (no reference, no statement, no record): the trial has no score."""


class BrokenUserError(FairtrialError):
    """The simulated user of a conversation broke its rules, or could not speak: not an error of the agent.

    The outcome of the trial is "user_error".
    """

    retry_after: float | None = None


class RunBusyError(FairtrialError):
    """Another process is at work on the run."""


class MailboxError(FairtrialError):
    """A mailbox cannot do what was asked."""


class MailboxConnectionError(MailboxError):
    """The server behind the mailbox cannot be reached just now; trying again may help.

    What was being asked may or may not have happened: a send may arrive although it raised this.
    """


class MailboxAccessError(MailboxError):
    """The server behind the mailbox refuses us: a wrong password, or a user who may not do this."""


class MailboxNotDurableError(MailboxError, ConfigurationError):
    """Durability was asked for, and the server behind the mailbox may lose messages that it confirmed."""


class MailboxFullError(MailboxError):
    """The server behind the mailbox has no memory for another message; trying later may help."""


class MailboxClosedError(MailboxError):
    """The mailbox was used after it was closed."""


class LeaseLostError(MailboxError):
    """The lease of the message was lost: it expired, or the message was settled before."""


class ReplyNotAvailableError(MailboxError):
    """There is nobody to reply to: no address, one that nobody knows, or a mailbox that is gone."""


class BodyError(MailboxError, DataError):
    """A body that cannot be sent or read."""


class MessageTooLargeError(BodyError):
    """A body over the mailbox's limit."""


class SandboxError(FairtrialError):
    """A sandbox has ended, or cannot do what was asked."""


class SandboxUnavailableError(SandboxError):
    """This machine does not allow the isolation that was asked for; nothing was run."""


class ToolServerError(FairtrialError):
    """An MCP server cannot be started or reached, or breaks its protocol: an error of the trial, not of the agent."""


class TraceSendError(FairtrialError):
    """Traces could not be sent: the server refused them, or could not be reached for too long."""


class LoopCrashedError(FairtrialError):
    """A loop of a group crashed more often than the group allows."""


class ModelError(FairtrialError):
    """A model call failed."""

    retryable = False
    retry_after: float | None = None
    sent = False  # Whether the provider may have answered, and may charge for it, although no answer was usable.
    timed_out = False


class RateLimitedError(ModelError):
    """The provider asked to slow down; `retry_after` is in seconds, where it said."""

    retryable = True

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelUnavailableError(ModelError):
    """The provider could not be reached, or failed; trying again may help.

    `sent` says that it may charge for the call, `timed_out` that it did not answer in time.
    """

    retryable = True

    def __init__(
        self, message: str, *, retry_after: float | None = None, sent: bool = False, timed_out: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.sent = sent or timed_out
        self.timed_out = timed_out


class MalformedReplyError(ModelError):
    """The provider's answer was not what its protocol says; trying again may help."""

    retryable = True
    sent = True


class ModelRefusedError(ModelError):
    """The model, or the filter in front of it, declined to answer. `refusal` is what it said, if anything."""

    def __init__(self, message: str, *, refusal: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal


class InvalidCallError(ModelError):
    """The provider will never accept this call: a parameter is wrong."""


class ContextLengthError(InvalidCallError):
    """The conversation is longer than the context of the model."""


class ModelAuthError(ModelError):
    """There is no key, or it is wrong."""


class OutputParseError(ModelError):
    """The answer does not have the form that was asked for, even after one repair."""

    def __init__(self, message: str, *, raw: str = "") -> None:
        super().__init__(message)
        self.raw = raw


class BudgetExceededError(ModelError):
    """A budget of tokens, requests or money is used up."""


_MISTAKES = (NameError, AttributeError, TypeError, ImportError, KeyError, IndexError)
_TRANSIENT = (OSError, TimeoutError, ModelError)


def is_programming_error(error: BaseException | None) -> bool:
    """Return whether an error is a mistake in code, which the next call would repeat.

    What was raised because of an error of a network, a provider or time is none: the next call may go well.
    """
    if not isinstance(error, _MISTAKES):
        return False
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, _TRANSIENT):
            return False
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return True
