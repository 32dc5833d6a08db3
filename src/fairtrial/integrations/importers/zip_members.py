"""Read ZIP files whose members are compressed with Zstandard, which `zipfile` supports only from Python 3.14."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

from fairtrial.base.foreign import ExpansionBudget, Method, check_limit, expand, limit_factor
from fairtrial.errors import DataError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_METHODS: dict[int, Method] = {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflate", 93: "zstd"}
_MAX_MEMBERS = 100_000
# JSON takes up to twenty times its size in memory. Small members may expand further than the ratio allows.
_MEMBER_BYTES, _SMALL_BYTES, _MEMBER_RATIO = 128 << 20, 16 << 20, 200
_FILE_BYTES, _FILE_RATIO = 1 << 30, 20


class ZipMembers:
    """The members of a ZIP file: stored, deflated or Zstandard. What they may expand to is limited."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                # Of two members with one name, the last was written last and replaces the other.
                self._members = {member.filename: member for member in archive.infolist()}
        except (zipfile.BadZipFile, OSError) as error:
            raise DataError(f"{path} must be a complete ZIP file ({error})") from None
        check_limit(str(path), "members", len(self._members), _MAX_MEMBERS)
        self._expanded: dict[str, int] = {}  # By name: members are read several times.
        self._total = 0
        self._size = path.stat().st_size
        self._max_bytes = max(_FILE_BYTES, _FILE_RATIO * self._size)

    @property
    def names(self) -> list[str]:
        """The names of the members, in the order of the file."""
        return list(self._members)

    def read(self, name: str) -> bytes:
        """Return the content of a member."""
        member = self._members[name]
        # The directory of the file is foreign, too: places outside, and sizes that nothing could hold.
        if not 0 <= member.header_offset < self._size or member.compress_size > self._size:
            raise DataError(f"{self.path}: {name} cannot be read: it is not in the file")
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
                raise DataError(f"{self.path}: {name} cannot be read: its header is damaged")
            _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            file.seek(name_length + extra_length, 1)
            content = file.read(member.compress_size)
        plain = self._expand(name, content, member.compress_type)
        if zlib.crc32(plain) != member.CRC:
            raise DataError(f"{self.path}: {name} cannot be read: its checksum differs")
        return plain

    def _expand(self, name: str, content: bytes, compress_type: int) -> bytes:
        if compress_type not in _METHODS:
            problem = f"compression method {compress_type} is not supported"
            raise DataError(f"{self.path}: {name} cannot be read: {problem}")
        largest = min(_MEMBER_BYTES, max(_SMALL_BYTES, _MEMBER_RATIO * len(content)))
        budget = ExpansionBudget(f"{self.path}: {name}", int(largest * limit_factor()))
        plain = expand(content, _METHODS[compress_type], budget)
        self._total += len(plain) - self._expanded.get(name, 0)
        self._expanded[name] = len(plain)
        check_limit(str(self.path), "bytes when it is expanded", self._total, self._max_bytes)
        return plain
