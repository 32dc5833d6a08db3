"""Read ZIP files whose members are compressed with Zstandard, which `zipfile` supports only from Python 3.14."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

import zstandard

from fairtrial.errors import DataError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ZSTANDARD = 93


class ZipMembers:
    """The members of a ZIP file: stored, deflated or Zstandard."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                # Of two members with one name, the last was written last and replaces the other.
                self._members = {member.filename: member for member in archive.infolist()}
        except (zipfile.BadZipFile, OSError) as error:
            raise DataError(f"{path} must be a complete ZIP file ({error})") from None

    @property
    def names(self) -> list[str]:
        """The names of the members, in the order of the file."""
        return list(self._members)

    def read(self, name: str) -> bytes:
        """Return the content of a member."""
        member = self._members[name]
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
                raise DataError(f"{self.path}: {name} cannot be read: its header is damaged")
            _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            file.seek(name_length + extra_length, 1)
            content = file.read(member.compress_size)
        try:
            plain = _decompress(content, member.compress_type)
        except (zlib.error, zstandard.ZstdError, ValueError) as error:
            raise DataError(f"{self.path}: {name} cannot be read: {error}") from None
        if zlib.crc32(plain) != member.CRC:
            raise DataError(f"{self.path}: {name} cannot be read: its checksum differs")
        return plain


def _decompress(content: bytes, method: int) -> bytes:
    if method == zipfile.ZIP_STORED:
        return content
    if method == zipfile.ZIP_DEFLATED:
        return zlib.decompress(content, -zlib.MAX_WBITS)
    if method == _ZSTANDARD:
        with zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True) as reader:
            return reader.read()
    raise ValueError(f"compression method {method} is not supported")
