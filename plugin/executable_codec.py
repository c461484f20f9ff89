"""Compiled programs as bytes and back: what JAX's compilation cache keeps, and what it serializes.

Layout, little-endian: ``STRX``, u16 version, u32 CRC-32 of the rest; then sections, each a u64 length and
bytes: JSON, compile options, the program (`stretto.runtime.program.codec`), its schedule, the HLO that it
was lowered from, and the machine code of each segment; the last three are empty where there is none.

Reading runs nothing of what is read. The machine code, of course, is run when the program is: bytes from
others deserve the trust that their programs get.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

from stretto.collectives.order import Schedule
from stretto.hlo_frontend.compile import CompiledModule, PartitionedModule
from stretto.hlo_frontend.passes.split import Decision, Shared
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.runtime.errors import InvalidProgramError, StrettoError
from stretto.runtime.program import codec as program_codec
from stretto.runtime.program.envelope import unwrap, wrap

from .target import difference

MAGIC = b"STRX"
VERSION = 7  # to be raised whenever the layout or the JSON changes
_LENGTH = struct.Struct("<Q")


class OtherTargetError(StrettoError):
    """An executable was compiled for something else than what is here. Compile the program again."""

    code = "FAILED_PRECONDITION"


@dataclass(frozen=True)
class StoredExecutable:
    """A compiled program with all that loading it takes.

    ``target``: what it depends on, see `target.target`. ``options``: a serialized ``CompileOptionsProto``.
    ``code[i]``: segment i as the engine serialized it, or empty.
    """

    target: Mapping[str, str]
    options: bytes
    compiled: CompiledModule
    code: tuple[bytes, ...]
    fingerprint: str


def to_bytes(stored: StoredExecutable) -> bytes:
    """Serialize. Of the program's reports nothing is kept."""
    compiled, source = stored.compiled, stored.compiled.source
    about: dict[str, Any] = {
        "target": dict(stored.target),
        "fingerprint": stored.fingerprint,
        "input_memory_kinds": compiled.input_memory_kinds,
        "output_memory_kinds": compiled.output_memory_kinds,
        "rewritten": compiled.rewritten.hex(),
        "layouts": [compiled.input_layouts, compiled.output_layouts],
    }
    if source is not None:
        about["source"] = {
            "num_replicas": source.num_replicas,
            "num_partitions": source.num_partitions,
            "pseudo_tokens": source.pseudo_tokens,
            "valid": asdict(source.valid),
            "rewrites": source.rewrites,
            "starts": source.starts,
            "splits": [astuple(d) for d in source.splits or ()],
        }
    sections = [
        json.dumps(about, separators=(",", ":")).encode(),
        stored.options,
        program_codec.to_bytes(compiled.program),
        compiled.schedule.to_bytes(),
        b"" if source is None else source.hlo,
        *stored.code,
    ]
    body = b"".join(part for s in sections for part in (_LENGTH.pack(len(s)), s))
    return wrap(MAGIC, VERSION, body)


def from_bytes(data: bytes, here: Mapping[str, str]) -> StoredExecutable:
    """Inverse of `to_bytes`.

    Raises `InvalidProgramError` on damage and on other formats, `OtherTargetError` where the executable was
    compiled for another target than ``here``.
    """
    body = unwrap(data, MAGIC, VERSION, "executable")
    try:
        sections = _sections(body)
        about = json.loads(sections[0])
        other = difference(about["target"], here)
        if other:
            raise OtherTargetError(f"the executable was compiled for {other}. Compile it again")
        return _read(about, sections)
    except (
        ValueError,
        TypeError,
        LookupError,
        struct.error,
        AttributeError,
        RecursionError,
    ) as error:
        raise InvalidProgramError(f"the serialized executable cannot be read: {error}") from error


def _decided(block: int, region: int, *parts: int) -> Decision | Shared:
    """A decision from its fields."""
    if not parts:
        return Shared(int(block), int(region))
    tiles, pieces = parts
    return Decision(int(block), int(region), int(tiles), bool(pieces))


def _sections(body: memoryview) -> list[bytes]:
    sections, position = [], 0
    while position < len(body):
        (length,) = _LENGTH.unpack_from(body, position)
        position += _LENGTH.size
        if position + length > len(body):
            raise ValueError("a section is cut off")
        sections.append(bytes(body[position : position + length]))
        position += length
    return sections


def _read(about: Mapping[str, Any], sections: list[bytes]) -> StoredExecutable:
    _, options, program_bytes, schedule, hlo, *code = sections
    program = program_codec.from_bytes(program_bytes)
    source = None
    if "source" in about:
        how = dict(about["source"])
        how["valid"] = ValidPolicy(**how["valid"])
        how["splits"] = tuple([_decided(*fields) for fields in how["splits"]])
        source = PartitionedModule(hlo, **how)
    kinds = tuple(about["input_memory_kinds"]), tuple(about["output_memory_kinds"])
    if (len(kinds[0]), len(kinds[1])) != (len(program.inputs), len(program.outputs)):
        raise ValueError("memory kinds and program disagree")
    layouts = [tuple(tuple(order) for order in listed) for listed in about["layouts"]]
    for given, types in zip(layouts, (program.inputs, program.outputs), strict=True):
        ranks = [range(len(type.shape)) for type in types] if given else []
        if any(o and sorted(o) != list(r) for o, r in zip(given, ranks, strict=True)):
            raise ValueError("layouts and program disagree")
    if len(code) != len(program.segments):
        raise ValueError(f"code of {len(code)} segments for {len(program.segments)}")
    compiled = CompiledModule(
        program,
        source,
        *kinds,
        schedule=Schedule.from_bytes(schedule),
        rewritten=bytes.fromhex(about["rewritten"]),
        input_layouts=layouts[0],
        output_layouts=layouts[1],
    )
    return StoredExecutable(
        about["target"], options, compiled, tuple(code), str(about["fingerprint"])
    )
