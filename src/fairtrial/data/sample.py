"""Samples, and the files attached to them."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from fairtrial.base.foreign import inside
from fairtrial.base.frozen import EMPTY, JSON, FrozenDict, allow_type_arguments, first_is, freeze
from fairtrial.base.system import replace_file
from fairtrial.errors import DataError, DatasetError


class _NotGiven:
    """The default of arguments for which None is a value."""

    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Any = _NotGiven()
"""No expected value, where None would be one."""


@first_is()
@dataclass(frozen=True, slots=True, init=False)
class Sample[I, E]:
    """One test case: input, expected value (if known) and metadata to slice by.

    A sample without an expected value reads as None, and `has_expected` is False: evaluators that compare with a
    reference refuse to score it. With `expected=None`, None is the right answer. `ground_truth` is another name for
    `expected`, for reading and for writing.
    """

    id: str
    input: I
    expected: E | None = None
    metadata: Mapping[str, JSON] = EMPTY
    has_expected: bool = field(default=False, repr=False)

    def __init__(
        self,
        id: str,
        input: I,
        expected: E | None = NOT_GIVEN,
        metadata: Mapping[str, JSON] = EMPTY,
        *,
        ground_truth: E | None = NOT_GIVEN,
        has_expected: bool | None = None,
    ) -> None:
        if type(id) is not str or not id:
            raise DatasetError(f"the id of a sample must be text that is not empty (got {id!r})")
        if ground_truth is not NOT_GIVEN:
            if expected is not NOT_GIVEN and expected is not None:
                raise DatasetError(f"sample {id!r}: expected and ground_truth are the same value; give one of them")
            expected = ground_truth
        # `dataclasses.replace` passes what the sample has: None with has_expected=False is still no value.
        known = expected is not NOT_GIVEN and (expected is not None or has_expected is not False)
        if type(metadata) is not FrozenDict:
            if not isinstance(metadata, Mapping):
                raise DatasetError(f"sample {id!r}: metadata must be a mapping (got {type(metadata).__name__})")
            for key in metadata:
                if not isinstance(key, str):
                    raise DatasetError(f"sample {id!r}: metadata keys must be text (got {key!r})")
            metadata = freeze(dict(metadata))
        set_field = object.__setattr__
        set_field(self, "id", id)
        set_field(self, "input", input)
        set_field(self, "expected", expected if known else None)
        set_field(self, "metadata", metadata)
        set_field(self, "has_expected", known)

    @property
    def ground_truth(self) -> E | None:
        """The same value as `expected`, under the name reinforcement learning uses."""
        return self.expected


allow_type_arguments(Sample)


_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEPT_FOLDERS = 16


@first_is(str)
@dataclass(frozen=True, slots=True)
class Attachment:
    """A reference to binary data by its SHA-256. The data itself is stored elsewhere; see `BlobFolder`."""

    sha256: str
    media_type: str = "application/octet-stream"
    size: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        # The hash becomes a file name, so nothing but a hash may pass.
        if not _SHA256.fullmatch(self.sha256):
            raise DataError(f"the sha256 of an attachment must be 64 lower-case hex digits (got {self.sha256!r})")

    @classmethod
    def of(cls, content: bytes, *, media_type: str = "application/octet-stream", name: str = "") -> Self:
        """Return the reference to these bytes."""
        return cls(hashlib.sha256(content).hexdigest(), media_type, len(content), name)


class BlobFolder:
    """A folder of binary data, each file named by its hash. Attachments are looked up only in this folder.

    What results and samples refer to is also stored with their run, if this process has made the folder's object.
    """

    _recent: ClassVar[dict[Path, BlobFolder]] = {}

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._recent.pop(self.root.absolute(), None)
        self._recent[self.root.absolute()] = self
        if len(self._recent) > _KEPT_FOLDERS:
            self._recent.pop(next(iter(self._recent)), None)

    @classmethod
    def known(cls) -> list[BlobFolder]:
        """Return the folders that this process used last, the latest first."""
        return list(cls._recent.values())[::-1]

    def put(self, content: bytes, *, media_type: str = "application/octet-stream", name: str = "") -> Attachment:
        """Store bytes and return their reference. Storing them twice changes nothing."""
        attachment = Attachment.of(content, media_type=media_type, name=name)
        target = self.path(attachment.sha256)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Written aside and renamed: a reader never sees half a file.
            handle, aside = tempfile.mkstemp(dir=target.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            replace_file(aside, target)
        return attachment

    def put_file(self, path: Path | str, *, media_type: str | None = None) -> Attachment:
        """Store the content of a file; by default the media type is guessed from its name."""
        import mimetypes  # Brings urllib with it, which few people need.

        path = Path(path)
        guessed = media_type or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return self.put(path.read_bytes(), media_type=guessed, name=path.name)

    def get(self, attachment: Attachment) -> bytes:
        """Return the bytes, verified against their hash."""
        try:
            content = self.path(attachment.sha256).read_bytes()
        except FileNotFoundError:
            raise DataError(f"attachment {attachment.name or attachment.sha256} is not under {self.root}") from None
        if hashlib.sha256(content).hexdigest() != attachment.sha256:
            raise DataError(
                f"attachment {attachment.name or attachment.sha256} is damaged: its content has another hash"
            )
        return content

    def path(self, sha256: str) -> Path:
        """Return the file with this hash, whether it exists or not."""
        return inside(self.root, Path(sha256[:2], sha256))
