"""Programs as bytes and back, for caches and for executables that JAX serializes.

Layout, little-endian: ``STRP``, u16 version, u32 CRC-32 of the rest; u32 length and JSON of the program, in
which a segment's module is its index; then each module as u64 length and bytes. In the JSON a data class
is ``[letter, field, …]`` in the order of its fields, a tuple ``["", item, …]``.
"""

from __future__ import annotations

import json
import struct
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType

from ..errors import InvalidProgramError
from . import (
    Block,
    Branch,
    Carried,
    Copy,
    Free,
    LogicalId,
    Loop,
    Prediction,
    Program,
    Run,
    Segment,
    Start,
    Wait,
)
from .check import check
from .envelope import unwrap, wrap

MAGIC = b"STRP"
VERSION = 8  # to be raised whenever a field of one of the classes below changes
_CLASSES: dict[str, type] = {
    "P": Program,
    "p": Prediction,
    "G": Segment,
    "C": Collective,
    "T": TensorType,
    "B": Block,
    "r": Run,
    "s": Start,
    "w": Wait,
    "l": Loop,
    "k": Carried,
    "b": Branch,
    "c": Copy,
    "i": LogicalId,
    "f": Free,
}
_LETTERS = {cls: letter for letter, cls in _CLASSES.items()}


def to_bytes(program: Program) -> bytes:
    """Serialize; equal programs with equal names give equal bytes."""
    modules: list[bytes] = []
    text = json.dumps(_encode(program, modules), separators=(",", ":")).encode()
    parts = [struct.pack("<I", len(text)), text]
    for module in modules:
        parts += [struct.pack("<Q", len(module)), module]
    body = b"".join(parts)
    return wrap(MAGIC, VERSION, body)


def from_bytes(data: bytes) -> Program:
    """Inverse of `to_bytes`. Raises `InvalidProgramError` on damage, other versions and bad programs."""
    body = unwrap(data, MAGIC, VERSION, "program")
    try:
        program = _read(body)
    except (ValueError, TypeError, LookupError, struct.error, AttributeError) as error:
        raise InvalidProgramError(f"the serialized program cannot be read: {error}") from error
    check(program)
    return program


def _read(body: memoryview) -> Program:
    (length,) = struct.unpack_from("<I", body)
    tree = json.loads(bytes(body[4 : 4 + length]))
    modules: list[bytes] = []
    position = 4 + length
    while position < len(body):
        (length,) = struct.unpack_from("<Q", body, position)
        position += 8
        if position + length > len(body):
            raise ValueError("a module is cut off")
        modules.append(bytes(body[position : position + length]))
        position += length
    program = _decode(tree, modules)
    if not isinstance(program, Program):
        raise TypeError("not a program")
    return program


def _encode(value: Any, modules: list[bytes]) -> Any:
    if is_dataclass(value):
        encoded = [_encode(getattr(value, f.name), modules) for f in fields(value)]
        return [_LETTERS[type(value)], *encoded]
    if isinstance(value, tuple):
        return ["", *(_encode(item, modules) for item in value)]
    if isinstance(value, bytes):
        modules.append(value)
        return len(modules) - 1
    return value.value if isinstance(value, StrEnum) else value


def _decode(tree: Any, modules: list[bytes]) -> Any:
    if not isinstance(tree, list):
        return tree
    letter, *items = tree
    decoded = tuple(_decode(item, modules) for item in items)
    if letter == "":
        return decoded
    cls = _CLASSES[letter]
    values = {f.name: value for f, value in zip(fields(cls), decoded, strict=True)}
    if cls is Segment:
        values["module"] = modules[values["module"]]
    elif cls is Collective:
        values["kind"] = Kind(values["kind"])
        if values["reduction"] is not None:
            values["reduction"] = Reduction(values["reduction"])
    return cls(**values)
