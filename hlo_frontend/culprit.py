"""Finds the instruction on which XLA crashes, by giving it parts of the module in forked processes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from jaxlib import _hlo, _jax

from .forked import forked
from .graph import COLLECTIVES, LOGICAL_IDS, Module
from .segments import ModuleBuilder
from .text import INSTRUCTION

# Ops that are not tried alone: XLA never gets them so, or they only hand on their operands.
_NOT_ALONE = COLLECTIVES | LOGICAL_IDS.keys() | {"parameter", "tuple", "get-tuple-element"}
_UNFINISHED = re.compile(r"-(?:start|update|done)\Z")


def in_text(text: str) -> str | None:
    """The first instruction behind which the text can be cut off and still crashes XLA's parser."""
    instructions = list(INSTRUCTION.finditer(text))

    def ends(count: int) -> bool:
        cut = f"{text[: instructions[count].end()]}\n}}"
        return _last_begun(1, lambda _: _hlo.hlo_module_from_text(cut)) is not None

    if not instructions or not ends(len(instructions) - 1):
        return None
    low, high = 0, len(instructions) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if ends(middle) else (middle + 1, high)
    line, name = instructions[low].groups()
    return f"{name} ({line.strip()})"


def in_module(serialized: bytes) -> str | None:
    """The first instruction of an ``HloModuleProto`` on which XLA crashes in converting it to StableHLO."""
    if _last_begun(1, lambda _: Module.parse(serialized)) is not None:
        return None
    alone = [
        instruction
        for computation in Module.parse(serialized).computations
        for instruction in computation.instructions
        if instruction.opcode not in _NOT_ALONE and not _UNFINISHED.search(instruction.opcode)
        if not any(called.needs_runtime for called in instruction.called)
    ]

    def write(index: int) -> None:
        module = ModuleBuilder().single(alone[index])
        _jax.mlir.hlo_to_stablehlo(module.SerializeToString())

    found = _last_begun(len(alone), write)
    return None if found is None else alone[found].describe()


def _last_begun(count: int, step: Callable[[int], object]) -> int | None:
    """The step, of ``count``, in which a forked process crashes; None if none does."""

    def run(pipe: BinaryIO) -> None:
        for index in range(count):
            pipe.write(index.to_bytes(4, "little"))
            pipe.flush()
            with suppress(Exception):  # an error is no end
                step(index)

    begun, status = forked(run)
    return int.from_bytes(begun[-4:], "little") if os.WIFSIGNALED(status) and begun else None
