"""Addresses of mailboxes on SQS: `sqs://region/prefix?endpoint=...&bucket=...&shards=...`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import parse_qsl, urlsplit

from fairtrial.base.frozen import first_is
from fairtrial.errors import ConfigurationError

MAX_POLL_SECONDS: Final = 20
MAX_SHARDS: Final = 64
_MAX_LINGER: Final = 5
_FORM: Final = "sqs://region/prefix[?endpoint=URL&bucket=NAME&shards=NUMBER&poll=SECONDS&linger=SECONDS&lag=SECONDS]"
_REGION: Final = re.compile(r"[a-z]{2,}(-[a-z0-9]+)+")
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,19}")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@first_is(str)
@dataclass(frozen=True, slots=True)
class SqsAddress:
    """Where the queues of a fleet are. Credentials are not part of it: they come from the AWS credential chain.

    Attributes:
        region: The AWS region, such as `eu-central-1`.
        prefix: The names of all queues begin with this, so that permissions can be limited to them.
        endpoint: The URL of another server, such as an emulator or a VPC endpoint.
        bucket: The S3 bucket for large bodies; without one, they are refused.
        shards: The number of queues that requests are spread over; one queue has at most 120,000 messages in flight.
        poll_seconds: The longest single long poll: shorter ones cost more, longer ones delay the end of a worker.
        linger_seconds: How long a request that is not full waits for more messages: SQS bills requests, and up to ten
            messages share one.
        lag_seconds: How late the counts of SQS may be: for this long, an empty queue is no sign of lost requests.
    """

    region: str
    prefix: str = "fairtrial"
    endpoint: str | None = None
    bucket: str | None = None
    shards: int = 1
    poll_seconds: int = 10
    linger_seconds: float = 0.2
    lag_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not _REGION.fullmatch(self.region):
            raise ConfigurationError(f"the region of an SQS address must be like eu-central-1 (got {self.region!r})")
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigurationError(
                f"the prefix of an SQS address must have 1 to 20 letters, digits, _ or - (got {self.prefix!r})"
            )
        if self.bucket is not None and not _BUCKET.fullmatch(self.bucket):
            raise ConfigurationError(f"invalid name of an S3 bucket: {self.bucket!r}")
        if not 1 <= self.shards <= MAX_SHARDS:
            raise ConfigurationError(f"shards must be from 1 to {MAX_SHARDS} (got {self.shards})")
        if not 1 <= self.poll_seconds <= MAX_POLL_SECONDS:
            raise ConfigurationError(f"poll must be from 1 to {MAX_POLL_SECONDS} seconds (got {self.poll_seconds})")
        if not 0 <= self.linger_seconds <= _MAX_LINGER:
            raise ConfigurationError(f"linger must be from 0 to {_MAX_LINGER} seconds (got {self.linger_seconds})")
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return the parts of a URL.

        Raises:
            ConfigurationError: the URL is invalid.
        """
        parts = urlsplit(url)
        if parts.scheme != "sqs" or "@" in parts.netloc:
            # The URL is not repeated: someone may have put credentials into it.
            raise ConfigurationError(
                f"invalid SQS address: write {_FORM}, without credentials: they come from the AWS credential chain"
            )
        try:
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError:
            raise ConfigurationError(f"invalid SQS address: write {_FORM}") from None
        endpoint, bucket = options.pop("endpoint", None), options.pop("bucket", None)
        shards, poll = int(_number(options, "shards", "1")), int(_number(options, "poll", "10"))
        linger = float(_number(options, "linger", "0.2", form=r"[0-9]{1,2}(\.[0-9]{1,3})?"))
        lag = float(_number(options, "lag", "60"))
        if options:
            raise ConfigurationError(f"unknown option of an SQS address: {sorted(options)[0]!r}; write {_FORM}")
        prefix = parts.path.strip("/") or "fairtrial"
        return cls(parts.netloc, prefix, endpoint or None, bucket or None, shards, poll, linger, lag)

    def __str__(self) -> str:
        return f"sqs://{self.region}/{self.prefix}"


def _number(options: dict[str, str], name: str, default: str, form: str = r"[0-9]{1,4}") -> str:
    text = options.pop(name, default)
    if not re.fullmatch(form, text):
        raise ConfigurationError(f"{name} of an SQS address must be a number (got {text!r})")
    return text


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
        valid = valid and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise ConfigurationError("endpoint of an SQS address must be like http://127.0.0.1:4566, without credentials")
