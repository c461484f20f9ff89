"""The header of serialized programs and executables: format, version and checksum.

Layout, little-endian: four bytes that name the format, u16 version, u32 CRC-32 of the rest, the rest.
"""

from __future__ import annotations

import struct
import zlib

from ..errors import InvalidProgramError

_HEADER = struct.Struct("<4sHI")


def wrap(magic: bytes, version: int, body: bytes) -> bytes:
    """The body behind its header."""
    return _HEADER.pack(magic, version, zlib.crc32(body)) + body


def unwrap(data: bytes, magic: bytes, version: int, what: str) -> memoryview:
    """Inverse of `wrap`: the body, not copied. ``what`` names it in errors.

    Raises `InvalidProgramError` where it is something else, of another version, or damaged.
    """
    if len(data) < _HEADER.size or data[:4] != magic:
        raise InvalidProgramError(f"these bytes are not a serialized {what} of stretto")
    _, found, crc = _HEADER.unpack_from(data)
    if found != version:
        raise InvalidProgramError(
            f"the serialized {what} has format {found}, this stretto reads {version}: "
            "compile the program again"
        )
    body = memoryview(data)[_HEADER.size :]
    if zlib.crc32(body) != crc:
        raise InvalidProgramError(f"the serialized {what} is damaged: its checksum does not match")
    return body
