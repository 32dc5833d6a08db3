"""Objects in a bucket or a folder: bytes under a name, written whole and never changed."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from fairtrial.base.system import replace_file
from fairtrial.errors import ConfigurationError, MissingExtraError, StoreError, StoreUnavailableError

_BUCKETS = ("s3", "gs", "az")
_FORMS = "s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix, or a folder"
_TIMEOUT = timedelta(seconds=30)
_RETRIES = 3
_MULTIPART = 64 << 20
"""Larger objects are sent in parts."""
_DELETED_AT_ONCE = 1_000
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
UNFINISHED = ".part"
"""The end of the names of files that are being written, or were when their process was killed."""
_S3_ERROR = re.compile("<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
_DENIED = re.compile("status code: 40[13]|<Code>(Expired|Invalid)Token</Code>")
"""Errors of some requests that obstore does not recognize as those of keys."""
_NO_KEYS = re.compile("/latest/(api/token|meta-data)|/computeMetadata/|/metadata/identity")
"""Where keys are looked for, at last, if the environment has none."""
_MISCONFIGURED = re.compile(
    "status code: (400(?!(?s:.*)<Code>RequestTimeout)|405|501)|Received redirect without LOCATION"
)
"""No repetition changes these: a bucket in another region, or an endpoint that is none of this service."""


class ObjectMissingError(StoreError):
    """There is no object with a name."""


class StoredObject(NamedTuple):
    """An object: its name, its size in bytes and when it was written, in seconds since 1970."""

    name: str
    size: int
    written_at: float


class Objects(Protocol):
    """A place for objects.

    Its methods raise `StoreUnavailableError` if a repetition may succeed, else `StoreError`.
    """

    def put(self, name: str, data: bytes) -> None:
        """Write an object durably. Names are made of hashes: one that exists has these bytes already."""
        ...

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return a part of an object, shorter at its end. Raises `ObjectMissingError`."""
        ...

    def list(self, folder: str) -> Iterator[StoredObject]:
        """Yield the objects whose names begin with `folder` and a slash."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; one that does not exist is no error."""
        ...


def full_address(address: str | os.PathLike[str]) -> str:
    """Return the address of a place for objects as it is stored: folders as `file://` with an absolute path.

    Raises:
        ConfigurationError: it is none, or contains a password or settings, which are read from the environment.
    """
    text = os.fspath(address)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return Path(text).expanduser().absolute().as_uri()
    parts = urlsplit(text)
    if scheme == "file" and parts.path.startswith("/") and not parts.netloc:
        return Path(unquote(parts.path)).as_uri()
    if scheme not in _BUCKETS or not parts.netloc:
        raise ConfigurationError(f"the address of transcripts must be {_FORMS} (got the scheme {scheme!r})")
    if "@" in parts.netloc or parts.query or parts.fragment:  # Not repeated: it may have a password.
        raise ConfigurationError(
            f"the address of transcripts must be {_FORMS}, with nothing else\n"
            "keys, region and endpoint come from the environment, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
        )
    return f"{scheme}://{parts.netloc}/{parts.path.strip('/')}".rstrip("/")


def open_objects(address: str) -> Objects:
    """Open a place for objects by the address that `full_address` returned."""
    if address.startswith("file://"):
        return FolderObjects(Path(unquote(urlsplit(address).path)))
    return BucketObjects(full_address(address))


class FolderObjects:
    """Objects as files of a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, name: str, data: bytes) -> None:
        """Write a file beside its place, then move it there: a crash leaves no part of it."""
        target = self._path / name
        with self._translated():
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                os.utime(target)  # Written now, as in a bucket: what is young is not pruned.
            except FileNotFoundError:
                self._write(target, data)
            _sync_folder(target.parent)

    def read(self, name: str, start: int, length: int) -> bytes:
        """Read a part of a file."""
        try:
            with self._translated(), open(self._path / name, "rb") as file:
                file.seek(start)
                return file.read(min(length, os.fstat(file.fileno()).st_size))
        except FileNotFoundError:
            raise ObjectMissingError(f"{self._path / name} does not exist") from None

    def list(self, folder: str) -> Iterator[StoredObject]:
        """Yield the files of a folder."""
        place = self._path / folder
        with suppress(FileNotFoundError), self._translated():
            for entry in sorted(place.iterdir()):
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    yield StoredObject(f"{folder}/{entry.name}", found.st_size, found.st_mtime)

    def delete(self, names: Sequence[str]) -> None:
        """Delete files, and their folder when it is empty."""
        with self._translated():
            for name in names:
                (self._path / name).unlink(missing_ok=True)
            for folder in {(self._path / name).parent for name in names}:
                with suppress(OSError):
                    folder.rmdir()

    def _write(self, target: Path, data: bytes) -> None:
        handle, aside = tempfile.mkstemp(dir=target.parent, suffix=UNFINISHED)
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            replace_file(aside, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(aside)
            raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in _REFUSED:
                raise StoreError(
                    f"the folder of transcripts {self._path}: {error.strerror or error}\n"
                    "choose a folder in which this user may write: --transcripts, or the setting `transcripts`"
                ) from None
            # A full disk, or a network drive that is away.
            raise StoreUnavailableError(f"the folder of transcripts {self._path}: {error.strerror or error}") from error


def _sync_folder(path: Path) -> None:
    """Make the names of new files durable; where folders cannot be opened, the system does that."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class BucketObjects:
    """Objects in a bucket of S3, Google or Azure."""

    def __init__(self, address: str) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise MissingExtraError(f"a store with transcripts in {address}", "objects") from None
        self._obstore = obstore
        self._address = address
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        options: Any = {"timeout": _TIMEOUT, "allow_http": endpoint.startswith("http://")}
        retries: Any = {"max_retries": _RETRIES, "retry_timeout": _TIMEOUT}
        # A hash for the signature would take 16 us for 20 kB. TLS protects what is sent, and rows have hashes of it.
        config: Any = {"unsigned_payload": True} if address.startswith("s3://") else {}
        with self._translated():
            self._store: Any = from_url(address, client_options=options, retry_config=retries, **config)

    def put(self, name: str, data: bytes) -> None:
        """Write an object. The service shows it whole or not at all, and replaces equal bytes by equal bytes."""
        try:
            with self._translated():
                self._obstore.put(self._store, name, data, use_multipart=len(data) > _MULTIPART)
        except FileNotFoundError:
            raise self._no_bucket() from None

    def read(self, name: str, start: int, length: int) -> bytes:
        """Read a part of an object, with one request."""
        from obstore.exceptions import GenericError

        try:
            with self._translated():
                try:
                    return bytes(self._obstore.get_range(self._store, name, start=start, length=length))
                except GenericError as error:  # A part that begins behind the end is "not satisfiable".
                    if "status code: 416" not in str(error) or start < self._obstore.head(self._store, name)["size"]:
                        raise
                    return b""
        except FileNotFoundError:
            raise ObjectMissingError(f"{self._address}/{name} does not exist") from None

    def list(self, folder: str) -> Iterator[StoredObject]:
        """Yield the objects with a prefix."""
        try:
            with self._translated():
                for page in self._obstore.list(self._store, prefix=folder):
                    for found in page:
                        written: datetime = found["last_modified"]
                        yield StoredObject(found["path"], found["size"], written.astimezone(UTC).timestamp())
        except FileNotFoundError:
            raise self._no_bucket() from None

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, many with one request."""
        for start in range(0, len(names), _DELETED_AT_ONCE):
            with suppress(FileNotFoundError), self._translated():
                self._obstore.delete(self._store, list(names[start : start + _DELETED_AT_ONCE]))

    def _no_bucket(self) -> StoreError:
        return StoreError(f"there is no bucket for the transcripts in {self._address}: create it first")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        from obstore import exceptions

        try:
            yield
        except FileNotFoundError:
            raise
        except (exceptions.BaseError, OSError) as error:
            denied = exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError
            text, problem = str(error), _problem(str(error))
            if _NO_KEYS.search(text):
                raise StoreError(
                    f"there are no keys for the transcripts in {self._address}: {problem}\n"
                    "set them in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                ) from None
            if isinstance(error, denied) or _DENIED.search(text):
                raise StoreError(
                    f"access to the transcripts in {self._address} was denied: {problem}\n"
                    "check the keys in the environment, and that they may read, write, list and delete there"
                ) from None
            if "status code: 404" in text:  # Of lists, obstore has no exceptions for each.
                raise FileNotFoundError(self._address) from None
            if _MISCONFIGURED.search(text):
                raise StoreError(
                    f"the service refuses requests for the transcripts in {self._address}: {problem}\n"
                    "check the address, the region of the bucket (AWS_REGION) and the endpoint (AWS_ENDPOINT_URL)"
                ) from None
            raise StoreUnavailableError(f"the transcripts in {self._address}: {problem}") from None


def _problem(text: str) -> str:
    """Return an error in a line: the code and the message of a service, if it has them."""
    match = _S3_ERROR.search(text)
    return (f"{match[1]}: {match[2]}" if match else text.strip().partition("\n")[0])[:300]
