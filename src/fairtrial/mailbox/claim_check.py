"""Claim checks: large bodies are kept in a shared folder, and the message carries their hash.

Large messages would delay all others in the queue. The message contains only a SHA-256, which is looked up in the
configured folder; a message can never name a path.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from fairtrial.base.offload import in_thread
from fairtrial.data.attachment import Attachment, BlobFolder
from fairtrial.errors import BodyError, ConfigurationError, DataError, MessageTooLargeError

THRESHOLD = 64 * 1024
MAX_BYTES = 64 * 1024 * 1024
_BLOB = re.compile(r"[0-9a-f]{64}")


class ClaimCheck:
    """Stores large bodies in a folder that all workers of a fleet share.

    Args:
        root: The folder.
        threshold: Larger bodies, in bytes, are stored here.
        max_bytes: Larger bodies are refused.
    """

    def __init__(
        self, root: Path | str | BlobFolder, *, threshold: int = THRESHOLD, max_bytes: int = MAX_BYTES
    ) -> None:
        if not 0 < threshold <= max_bytes:
            raise ConfigurationError(f"threshold must be between 1 and max_bytes (got {threshold})")
        self.folder = root if isinstance(root, BlobFolder) else BlobFolder(root)
        self.threshold = threshold
        self.max_bytes = max_bytes

    async def keep(self, body: bytes) -> str:
        """Store a body; returns its hash."""
        if len(body) > self.max_bytes:
            raise MessageTooLargeError(f"the body must have at most {self.max_bytes} bytes (got {len(body)})")
        return await in_thread(lambda: self._keep(body))

    async def fetch(self, sha256: str) -> bytes:
        """Return the body with this hash.

        Raises:
            BodyError: the hash is invalid or not found, or the body is damaged or too large.
            OSError: the folder cannot be read at present.
        """
        try:
            return await in_thread(lambda: self._fetch(Attachment(sha256)))
        except DataError as error:
            raise BodyError(str(error)) from None

    async def prune(self, older_than_seconds: float) -> int:
        """Delete bodies that were last sent longer ago than this; returns their number.

        Use a longer time than any message can exist: a body may belong to several messages, so it is not deleted when
        one of them is settled.
        """
        return await in_thread(lambda: self._prune(time.time() - older_than_seconds))

    def _keep(self, body: bytes) -> str:
        sha256 = self.folder.put(body).sha256
        os.utime(self.folder.path(sha256))  # Sent again: update its age.
        return sha256

    def _fetch(self, attachment: Attachment) -> bytes:
        try:
            size = self.folder.path(attachment.sha256).stat().st_size
        except FileNotFoundError:
            size = 0
        if size > self.max_bytes:  # Checked before it is read, because the folder is shared.
            raise BodyError(f"the body must have at most {self.max_bytes} bytes (got {size})")
        return self.folder.get(attachment)

    def _prune(self, before: float) -> int:
        removed = 0
        for path in self.folder.root.glob("??/*"):
            if _BLOB.fullmatch(path.name) and path.stat().st_mtime < before:
                path.unlink(missing_ok=True)
                removed += 1
        return removed
