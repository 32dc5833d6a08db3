"""Large bodies travel beside the mailbox: the message carries their hash, the bytes lie under a shared folder.

A megabyte in the queue makes every other message wait. What comes over the wire is a SHA-256 and nothing else: it is
looked up under the folder this process was configured with, never at a place a message names.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import anyio.to_thread

from fairtrial.data.attachment import Attachment, BlobFolder
from fairtrial.errors import BodyError, ConfigurationError, DataError, MessageTooLargeError

THRESHOLD = 64 * 1024
MAX_BYTES = 64 * 1024 * 1024
_BLOB = re.compile(r"[0-9a-f]{64}")


class ClaimCheck:
    """Keeps large bodies under one folder that all workers of a fleet share.

    Args:
        root: The folder.
        threshold: Bodies of more bytes than this are kept here.
        max_bytes: Bodies of more bytes than this are refused.
    """

    def __init__(
        self, root: Path | str | BlobFolder, *, threshold: int = THRESHOLD, max_bytes: int = MAX_BYTES
    ) -> None:
        if not 0 < threshold <= max_bytes:
            raise ConfigurationError(f"the threshold lies between 1 and max_bytes, not {threshold}")
        self.folder = root if isinstance(root, BlobFolder) else BlobFolder(root)
        self.threshold = threshold
        self.max_bytes = max_bytes

    async def keep(self, body: bytes) -> str:
        """Keep a body; returns its hash."""
        if len(body) > self.max_bytes:
            raise MessageTooLargeError(f"bodies of {self.max_bytes} bytes can be kept; this has {len(body)}")
        return await anyio.to_thread.run_sync(self._keep, body)

    async def fetch(self, sha256: str) -> bytes:
        """The body with that hash.

        Raises:
            BodyError: it is no hash, nothing under the folder has it, or what has it is damaged or too large.
            OSError: the folder cannot be read just now.
        """
        try:
            return await anyio.to_thread.run_sync(self._fetch, Attachment(sha256))
        except DataError as error:
            raise BodyError(str(error)) from None

    async def prune(self, older_than_seconds: float) -> int:
        """Delete bodies that were last sent longer ago than this; returns how many.

        Choose longer than any message can live: a body may belong to several messages, so nothing is deleted when
        one of them is settled.
        """
        return await anyio.to_thread.run_sync(self._prune, time.time() - older_than_seconds)

    def _keep(self, body: bytes) -> str:
        sha256 = self.folder.put(body).sha256
        os.utime(self._path(sha256))  # Sent again just now: not old, although it may have been written long ago.
        return sha256

    def _fetch(self, attachment: Attachment) -> bytes:
        try:
            size = self._path(attachment.sha256).stat().st_size
        except FileNotFoundError:
            size = 0
        if size > self.max_bytes:  # Looked at before it is read: the folder is shared.
            raise BodyError(f"{size} bytes are more than {self.max_bytes}")
        return self.folder.get(attachment)

    def _path(self, sha256: str) -> Path:
        return self.folder.root / sha256[:2] / sha256

    def _prune(self, before: float) -> int:
        removed = 0
        for path in self.folder.root.glob("??/*"):
            if _BLOB.fullmatch(path.name) and path.stat().st_mtime < before:
                path.unlink(missing_ok=True)
                removed += 1
        return removed
