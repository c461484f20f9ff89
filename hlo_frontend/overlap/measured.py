"""Measured times of instructions, by module.

The times of segments are measured and divided among their instructions (`attribute`). A table of costs that
has them (`CostTable.measured`) uses them for the times of kernels.

A module is identified by its *key*: a digest of names, opcodes, shapes and operands of its instructions.
Source lines and the values of constants do not count: times decide how good a plan is, not what a program
computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from ..graph import Instruction, Module

# How many modules' times are kept, and how many characters of JSON they may take together: every rank is sent
# all of them when it joins a job. The oldest are dropped.
MOST_MODULES = 64
MOST_CHARACTERS = 4_000_000
VERSION = 1


@dataclass(frozen=True)
class Measured:
    """Times of one module's compute on one device.

    ``seconds``: the time of one run of an instruction, by `name_of`. ``ratio``: the measured time of all of
    them over the predicted one; times of other instructions are multiplied by it.
    """

    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    ratio: float = 1.0

    def of(self, instruction: Instruction, modelled: float) -> float:
        """Seconds of an instruction; ``modelled``: as the rates of the table predict them."""
        return self.seconds.get(name_of(instruction), modelled * self.ratio)


def slower(one: Measured, other: Measured) -> Measured:
    """Of two engines that compute the same module, for each instruction the longer time."""
    names = [*one.seconds, *(n for n in other.seconds if n not in one.seconds)]
    seconds = {n: max(m.seconds[n] for m in (one, other) if n in m.seconds) for n in names}
    return Measured(seconds, max(one.ratio, other.ratio))


def name_of(instruction: Instruction) -> str:
    """A name of the instruction that is unique in its module."""
    return f"{instruction.computation.name}/{instruction.name}"


def key_of(module: Module, num_replicas: int, num_partitions: int) -> str:
    """The key of a module that is compiled for this many replicas and partitions."""
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
    """As JSON, the newest modules that fit. Times are not rounded, so that plans are the same again."""
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
