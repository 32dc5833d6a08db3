"""Translates errors of botocore and of single entries of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from botocore import exceptions as theirs

from fairtrial.errors import (
    LeaseLostError,
    MailboxAccessError,
    MailboxConnectionError,
    MailboxError,
    MailboxFullError,
    MessageTooLargeError,
)

_GONE: Final = ("NonExistentQueue", "QueueDoesNotExist")
_LOST: Final = (
    "ReceiptHandleIsInvalid",
    "MessageNotInflight",
    "InvalidParameterValue",
    "InvalidParameterValueException",
)
_TOO_LARGE: Final = ("BatchRequestTooLong", "MessageTooLong")
_ACCESS: Final = (
    "AccessDenied",
    "AccessDeniedException",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSecurity",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
)
_PASSING: Final = (
    "InternalError",
    "InternalFailure",
    "PriorRequestNotComplete",
    "RequestThrottled",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
)
_CREDENTIALS: Final = (
    theirs.NoCredentialsError,
    theirs.PartialCredentialsError,
    theirs.CredentialRetrievalError,
    theirs.NoAuthTokenError,
    theirs.TokenRetrievalError,
)
FAILURES: Final = (theirs.ClientError, theirs.BotoCoreError, OSError)
"""What a call of a client may raise."""


def code_of(error: BaseException) -> str:
    """Return the error code of the server, without its namespace; empty if the error is not the server's."""
    if not isinstance(error, theirs.ClientError):
        return ""
    return _plain(str(error.response.get("Error", {}).get("Code", "")))


def is_gone(error: BaseException) -> bool:
    """Return whether the error means that the queue does not exist."""
    return code_of(error) in _GONE


def translated(error: BaseException, doing: str) -> MailboxError:
    """Return an error of a call as a `MailboxError`. The texts of botocore contain no secret."""
    if isinstance(error, MailboxError):
        return error
    if isinstance(error, _CREDENTIALS):
        return MailboxAccessError(f"{doing}: {error}; configure credentials as for any AWS client")
    if not isinstance(error, theirs.ClientError):
        if isinstance(error, theirs.ParamValidationError):
            return MailboxError(f"{doing}: {error}")
        return MailboxConnectionError(f"{doing}: {str(error) or type(error).__name__}")
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = error.response.get("Error", {})
    return _by_code(code_of(error), str(said.get("Message", "")), doing, passing=status >= 500 or status == 429)


def entry_error(entry: Mapping[str, Any], doing: str) -> MailboxError:
    """Return the error of one entry of a batch, whose other entries may have succeeded."""
    code, text = _plain(str(entry.get("Code", ""))), str(entry.get("Message", ""))
    return _by_code(code, text, doing, passing=not entry.get("SenderFault", False))


def is_lost_lease(entry: Mapping[str, Any]) -> bool:
    """Return whether the error of an entry means that its receipt is no longer valid."""
    return _plain(str(entry.get("Code", ""))) in _LOST


def _by_code(code: str, text: str, doing: str, *, passing: bool) -> MailboxError:
    told = f"{doing}: {code}: {text}" if text else f"{doing}: {code}"
    if code in _ACCESS:
        return MailboxAccessError(told)
    if code == "OverLimit":
        return MailboxFullError(f"{told}\nspread the requests over more queues: shards=... in the address")
    if code in _TOO_LARGE:
        return MessageTooLargeError(told)
    if code in _LOST[:2]:
        return LeaseLostError(told)
    return (MailboxConnectionError if passing or code in _PASSING else MailboxError)(told)


def _plain(code: str) -> str:
    return code.rpartition(".")[2].rpartition("#")[2]
