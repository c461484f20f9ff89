"""The file in which a rank writes what it does, and reading it back.

``rank-00003.trace``: the line ``stretto trace 3``, a line of JSON (`Header`), then chunks: a letter, u32
length and u32 CRC-32 of the content, little-endian, and the content. ``P`` is a loaded program: a line of
JSON with the logical ids and ordinals of its local devices, then `program.codec`'s bytes, its segments
without their modules. ``S`` is JSON: a set of pairs that moved nothing. Programs and sets are numbered from
0 as they come. ``M`` is JSON: a program that was measured (`Profiled`). ``E`` is events: rows of `WIDTH`
float64. ``C`` is calls, of which there may be very many: records of 24 bytes, `CALL`.

A row is (kind, program, number, where, begin, end, extra). Times are ``perf_counter`` of the rank, plus the
header's ``offset`` they are rank 0's. A call is u32 program, u16 segment, u16 ordinal, float64 begin and end;
who reads it gets the row of kind CALLED that says the same.

    kind          number              where     extra
    SEGMENT       segment             ordinal   how long before its end it was last seen to
                                                run; end NaN: before the next one's
    LEFT_OUT      segment             ordinal                           not run: nobody reads it
    COLLECTIVE    collective          stream    bits of the positions of active local devices (all set: all of
                                                them) + 2**24 * (number of a set of pairs + 1)
    AWAITED       collective          stream    since its start         its wait
    PROGRAM       run                 0 or 1    1 if it failed          the walk, or 1: one segment that ran
                                                on when it had been called
    CALLED        segment             ordinal                           one segment called without a walk

A file that was cut off is read as far as it goes.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import StrettoError
from ..program import Program
from ..program import codec as program_codec
from .statistics import Profiled

VERSION = 3
WIDTH = 7
CALL = struct.Struct("<IHHdd")
_CALL = np.dtype(
    [("program", "<u4"), ("segment", "<u2"), ("ordinal", "<u2"), ("begin", "<f8"), ("end", "<f8")]
)
_MAGIC = b"stretto trace "
_CHUNK = struct.Struct("<cII")
SET_UNIT = 1 << 24
ALL_ACTIVE = SET_UNIT - 1


class TraceError(StrettoError):
    """A folder or file is no trace that can be read. Says which, and what to do."""

    code = "INVALID_ARGUMENT"


class Kind(IntEnum):
    SEGMENT = 0
    LEFT_OUT = 1
    COLLECTIVE = 2
    AWAITED = 3
    PROGRAM = 4
    CALLED = 5


@dataclass(frozen=True)
class Header:
    """What a rank is. ``offset``: seconds to add for rank 0's clock. ``costs``: the job's table, as JSON.

    ``job``: a name that its ranks share, and no other job.
    """

    rank: int
    size: int
    host: str
    pid: int
    local_devices: int
    engine: str
    offset: float
    started: float  # Unix time
    costs: str = ""
    job: str = ""


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.trace"


def beginning(header: Header) -> bytes:
    return _MAGIC + b"%d\n" % VERSION + json.dumps(asdict(header)).encode() + b"\n"


def chunk(letter: bytes, content: bytes) -> bytes:
    return _CHUNK.pack(letter, len(content), zlib.crc32(content)) + content


def program_chunk(program: Program, local: tuple[tuple[int, int], ...]) -> bytes:
    """``program`` has segments without modules."""
    return chunk(b"P", json.dumps(local).encode() + b"\n" + program_codec.to_bytes(program))


def head(letter: bytes, parts: Iterable[memoryview]) -> bytes:
    """What goes before the parts of a chunk's content."""
    crc = size = 0
    for part in parts:
        crc, size = zlib.crc32(part, crc), size + part.nbytes
    return _CHUNK.pack(letter, size, crc)


def rows_of(events: bytes, calls: bytes) -> np.ndarray:
    """float64 [n, WIDTH]: what chunks of events and of calls say. Raises ValueError if cut off."""
    found = np.frombuffer(calls, _CALL)
    rows = np.zeros((len(found), WIDTH))
    rows[:, 0] = Kind.CALLED
    for column, name in enumerate(("program", "segment", "ordinal", "begin", "end"), 1):
        rows[:, column] = found[name]
    return np.concatenate([np.frombuffer(events, "<f8").reshape(-1, WIDTH), rows])


@dataclass
class RankTrace:
    """What one rank wrote. ``events``: float64 [n, WIDTH] on rank 0's clock. ``warning``: what is missing."""

    header: Header
    programs: list[Program] = field(default_factory=list)
    local: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    sets: list[frozenset[int]] = field(default_factory=list)
    events: np.ndarray = field(default_factory=lambda: np.empty((0, WIDTH)))
    profiles: list[Profiled] = field(default_factory=list)
    warning: str = ""


def read(path: Path) -> RankTrace:
    """Read a rank's file. Raises `TraceError` where it is none, or of another version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    first, _, rest = data.partition(b"\n")
    line, _, rest = rest.partition(b"\n")
    if not first.startswith(_MAGIC):
        raise TraceError(f"{path} is not a trace of stretto")
    if first != _MAGIC + b"%d" % VERSION:
        version = first[len(_MAGIC) :].decode(errors="replace")
        raise TraceError(
            f"{path} is a trace of version {version}, this stretto reads version {VERSION}: read it with "
            "the stretto that wrote it, or record it again"
        )
    try:
        known = {f.name for f in fields(Header)}
        header = Header(**{k: v for k, v in json.loads(line).items() if k in known})
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: its header cannot be read ({error})") from None
    found = RankTrace(header)
    rows: list[np.ndarray] = []
    at = 0
    while at < len(rest):
        content = _content(rest, at)
        if content is None:
            found.warning = (
                f"{path} ends in the middle ({len(rest) - at} bytes cannot be read): the process was ended "
                "while it wrote; what comes before is used"
            )
            break
        letter = rest[at : at + 1]
        at += _CHUNK.size + len(content)
        try:
            _take(found, rows, letter, content)
        except (ValueError, StrettoError, KeyError, TypeError) as error:
            raise TraceError(f"{path}: a part of it cannot be read ({error})") from None
    if rows:
        found.events = np.concatenate(rows)
        found.events[:, 4:6] += header.offset
    return found


def _content(data: bytes, at: int) -> bytes | None:
    if at + _CHUNK.size > len(data):
        return None
    _, length, crc = _CHUNK.unpack_from(data, at)
    content = data[at + _CHUNK.size : at + _CHUNK.size + length]
    return content if len(content) == length and zlib.crc32(content) == crc else None


def _take(found: RankTrace, rows: list[Any], letter: bytes, content: bytes) -> None:
    match letter:
        case b"P":
            line, _, program = content.partition(b"\n")
            found.local.append(tuple((int(a), int(b)) for a, b in json.loads(line)))
            found.programs.append(program_codec.from_bytes(program))
        case b"S":
            found.sets.append(frozenset(json.loads(content)))
        case b"M":
            found.profiles.append(Profiled(**json.loads(content)))
        case b"E":
            rows.append(rows_of(content, b""))
        case b"C":
            rows.append(rows_of(b"", content))
