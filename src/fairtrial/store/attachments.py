"""The bytes of attachments, stored once under their hash, whatever refers to them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fairtrial.base.codec import dumps
from fairtrial.data.sample import Attachment, BlobFolder, Sample
from fairtrial.errors import CodecError, DataError, SecretInDataError
from fairtrial.trials.result import EvalResult

ATTACHED = re.compile(rb'"sha256":\s*"([0-9a-f]{64})"')
"""The reference to an attachment in samples, outputs and transcripts."""
MAX_BYTES = 32 << 20
"""Larger attachments stay in their folder."""
log = logging.getLogger("fairtrial.store")


class BlobTable(Protocol):
    """The part of a store that keeps attachments."""

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their SHA-256 (hex), once."""
        ...


def attached(texts: Iterable[str | bytes | None]) -> Iterator[str]:
    """Yield the hash of each attachment that JSON refers to, once."""
    known: set[str] = set()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        if data and b'"sha256"' in data:
            new = {found.decode() for found in ATTACHED.findall(data)} - known
            known |= new
            yield from new


def store_attachments(store: BlobTable, results: Sequence[EvalResult], samples: Mapping[int, Sample[Any, Any]]) -> None:
    """Store what these refer to, if it is in a `BlobFolder` of this process: so runs can be shown and exported whole.

    What is in no folder, damaged, too large or secret is left out: results are worth more than their attachments.
    """
    folders = BlobFolder.known()
    if not folders:
        return
    for sha256 in attached(_texts(results, samples)):
        reference = Attachment(sha256)
        for folder in folders:
            try:
                if folder.path(sha256).stat().st_size <= MAX_BYTES:
                    store.put_blob(folder.get(reference))
                break
            except SecretInDataError as error:
                log.warning("an attachment is not stored: %s", error)
            except (OSError, DataError):  # In another folder, or changed.
                continue


def _texts(results: Sequence[EvalResult], samples: Mapping[int, Sample[Any, Any]]) -> Iterator[str | bytes | None]:
    values: list[Any] = [(sample.input, sample.expected) for sample in samples.values()]
    values += [result.output for result in results if result.output_json is None and result.output is not None]
    for value in values:
        try:
            yield dumps(value)
        except CodecError:  # The store says so.
            continue
    for result in results:
        yield from (result.output_json, result.snapshot)
