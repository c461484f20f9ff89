"""What instructions of a module were measured to take, and the modules of which that is known.

Times come from segments (`attribute`), each shared out among its instructions as the table of costs has them.
A table with them (`CostTable.measured`) prices kernels by them.

A module is known by its *key*: names, opcodes, shapes and operands of its instructions. Where it was written
does not matter, nor what constants hold: times say what a plan is worth, never what a program computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from ..graph import Instruction, Module

# Modules whose times are kept for a set of machines, and characters of JSON that all of them may take: every
# rank of a job is sent them when it joins. The oldest are dropped.
MOST_MODULES = 64
MOST_CHARACTERS = 4_000_000
VERSION = 1


@dataclass(frozen=True)
class Measured:
    """Times of one module's compute on one device.

    ``seconds``: what each run of an instruction takes, by `name_of`. ``ratio``: measured to modelled time of
    all of them together, by which those are priced that were not measured.
    """

    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    ratio: float = 1.0

    def of(self, instruction: Instruction, modelled: float) -> float:
        """Seconds of an instruction that the table takes to last ``modelled``."""
        return self.seconds.get(name_of(instruction), modelled * self.ratio)


def name_of(instruction: Instruction) -> str:
    """A name that the module has once."""
    return f"{instruction.computation.name}/{instruction.name}"


def key_of(module: Module, num_replicas: int, num_partitions: int) -> str:
    """By what a module is known, compiled for these counts."""
    digest = sha256(f"{num_replicas} {num_partitions}".encode())
    for computation in module.computations:
        digest.update(f"\n{computation.name}".encode())
        for i in computation.instructions:
            operands = ",".join(operand.name for operand in i.operands)
            digest.update(f"\n {i.name} {i.opcode} {_shape(i.shape)} ({operands})".encode())
    return digest.hexdigest()[:32]


def _shape(shape: Any) -> str:
    if shape.tuple_shapes:
        return "(" + ",".join(_shape(part) for part in shape.tuple_shapes) + ")"
    return f"{shape.element_type}{list(shape.dimensions)}"


def read(text: str) -> dict[str, Measured]:
    """Measured times by key of their modules, oldest first; inverse of `write`. Raises ``ValueError``."""
    try:
        plain = json.loads(text)
        if plain["version"] != VERSION:
            raise ValueError(f"it has version {plain['version']}, not {VERSION}")
        found = {
            str(key): Measured(
                {str(name): float(seconds) for name, seconds in listed["seconds"].items()},
                float(listed["ratio"]),
            )
            for key, listed in plain["modules"].items()
        }
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    times = [t for m in found.values() for t in (m.ratio, *m.seconds.values())]
    if not all(math.isfinite(time) and time >= 0.0 for time in times):
        raise ValueError("it has times that are none")
    return found


def write(modules: Mapping[str, Measured]) -> str:
    """As JSON, the last of them as far as there is room. Nothing is rounded: plans are the same again."""
    kept: list[str] = []
    room = MOST_CHARACTERS
    for key, measured in list(modules.items())[: -MOST_MODULES - 1 : -1]:
        plain = {"ratio": measured.ratio, "seconds": dict(measured.seconds)}
        entry = f"{json.dumps(key)}: {json.dumps(plain)}"
        room -= len(entry)
        if room < 0:
            break
        kept.append(entry)
    return f'{{"version": {VERSION}, "modules": {{{", ".join(reversed(kept))}}}}}'
