"""Programs as text: ``str(program)`` for reading, and `to_text` with all that a program is.

    program "step" replicas 1 partitions 4 streams 1 donated (0)
    segment "half" (f32[8]) -> (f32[8]) donated (0) module text "…"
    collective all-reduce "psum.1" (f32[8]) -> (f32[8]) groups {{0,1,2,3}} reduction add
    body (%0:f32[8]) {
      run 0 (%0) -> (%1:f32[8]) donated (%0)
      start 0 (%1) -> (%2:f32[8]) event 0 stream 0
      wait 0
      free (%1)
      yield (%2)
    }

A slot's type stands where the slot is written; slots that nothing writes are listed as ``unused``.
Modules that are UTF-8 are written as text, others as base64; ``str(program)`` has their size and digest
instead. That the text says everything is tested with a parser, `tests/support/program_parser.py`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stretto.collectives.ops import Collective
from stretto.collectives.types import TensorType

from . import (
    Block,
    Branch,
    Copy,
    Free,
    Instruction,
    LogicalId,
    Loop,
    Program,
    Run,
    Segment,
    Slot,
    Start,
    Wait,
    blocks,
)


def to_text(program: Program, *, modules: bool = True) -> str:
    """Print a program. Without ``modules`` each is only named by size and digest."""
    return "\n".join(_Printer(program, modules).lines()) + "\n"


def attributes(c: Collective) -> list[str]:
    """What a collective does to its operands, and where and when, one word or phrase each."""
    parts: list[str] = []
    if c.groups:
        parts.append(f"groups {nested(c.groups)}")
    if c.pairs:
        parts.append(f"pairs {nested(c.pairs)}")
    if c.reduction is not None:
        parts.append(f"reduction {c.reduction}")
    if c.reducer is not None:
        parts.append(f"reducer {c.reducer}")
    if c.dimension != -1:
        parts.append(f"dimension {c.dimension}")
    if c.tuple_form:
        parts.append("tuple_form")
    if c.dynamic_root:
        parts.append("dynamic_root")
    if c.channel:
        parts.append(f"channel {c.channel}")
    if c.valid_iterations:
        parts.append(f"valid {nested(c.valid_iterations)}")
    return parts


def nested(groups: Iterable[Iterable[int]]) -> str:
    """Lists of numbers as HLO writes them."""
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


class _Printer:
    def __init__(self, program: Program, modules: bool) -> None:
        self.program = program
        self.modules = modules

    def lines(self) -> Iterator[str]:
        program, p = self.program, self.program.predicted
        yield (
            f"program {_quote(program.name)} replicas {program.num_replicas} "
            f"partitions {program.num_partitions} streams {program.num_streams}"
            + _option("donated", program.donated, _numbers)
            + (f" predicted {p.seconds!r} {p.exposed!r} {p.held!r}" if p is not None else "")
        )
        for segment in program.segments:
            yield self.segment(segment)
        for collective in program.collectives:
            yield self.collective(collective)
        unused = sorted(set(range(len(program.slot_types))) - _written(program.body))
        if unused:
            yield f"unused {self.typed(unused)}"
        yield from self.block("body", program.body, "")

    def segment(self, segment: Segment) -> str:
        return (
            f"segment {_quote(segment.name)} {_signature(segment.inputs, segment.outputs)}"
            + _option("donated", segment.donated, _numbers)
            + (f" arithmetic {segment.arithmetic}" if segment.arithmetic != -1 else "")
            + (f" flops {segment.flops!r}" if segment.flops != -1.0 else "")
            + (" reproducible" if segment.reproducible else "")
            + f" module {self.module(segment.module)}"
        )

    def module(self, module: bytes) -> str:
        if not self.modules:
            digest = hashlib.sha256(module).hexdigest()[:12]
            return f"omitted {_quote(f'{len(module)} bytes, sha256 {digest}')}"
        try:
            return f"text {_quote(module.decode())}"
        except UnicodeDecodeError:
            return f"base64 {_quote(base64.b64encode(module).decode())}"

    def collective(self, c: Collective) -> str:
        parts = [f"collective {c.kind} {_quote(c.name)} {_signature(c.operands, c.results)}"]
        parts += attributes(c)
        if c.source:
            parts.append(f"source {_quote(c.source)}")
        return " ".join(parts)

    def block(self, head: str, block: Block, indent: str) -> Iterator[str]:
        yield f"{indent}{head} {self.typed(block.parameters)} {{"
        for instruction in block.instructions:
            yield from self.instruction(instruction, indent + "  ")
        yield f"{indent}  yield {_slots(block.results)}"
        yield f"{indent}}}"

    def instruction(self, i: Instruction, indent: str) -> Iterator[str]:
        match i:
            case Run():
                yield (
                    f"{indent}run {i.segment} {_slots(i.inputs)} -> {self.typed(i.outputs)}"
                    + _option("donated", i.donated, _slots)
                    + _option("valid", i.valid, nested)
                )
            case Start():
                yield (
                    f"{indent}start {i.collective} {_slots(i.inputs)} -> {self.typed(i.outputs)} "
                    f"event {i.event} stream {i.stream}"
                )
            case Wait():
                yield f"{indent}wait {i.event}"
            case Copy():
                yield f"{indent}copy {_slots((i.input,))} -> {self.typed((i.output,))}"
            case LogicalId():
                yield f"{indent}id {_quote(i.kind)} -> {self.typed((i.output,))}"
            case Free():
                yield f"{indent}free {_slots(i.slots)}"
            case Loop():
                yield (
                    f"{indent}loop {_quote(i.name)} {_slots(i.inputs)} -> {self.typed(i.outputs)}"
                    + (f" trip_count {i.trip_count}" if i.trip_count is not None else "")
                    + _option("donated", i.donated, _slots)
                    + (f" source {_quote(i.source)}" if i.source else "")
                    + "".join(f" carried {c.event} {nested(c.carries)}" for c in i.carried)
                )
                yield from self.block("condition", i.condition, indent + "  ")
                yield from self.block("body", i.body, indent + "  ")
            case Branch():
                yield (
                    f"{indent}branch {_quote(i.name)} {_slots((i.selector,))} -> "
                    f"{self.typed(i.outputs)} of {len(i.branches)}"
                    + (f" source {_quote(i.source)}" if i.source else "")
                )
                for inputs, block in zip(i.inputs, i.branches, strict=True):
                    yield from self.block(f"case {_slots(inputs)} ->", block, indent + "  ")

    def typed(self, slots: Iterable[Slot]) -> str:
        return f"({', '.join(f'%{s}:{self.program.slot_types[s]}' for s in slots)})"


def _written(body: Block) -> set[Slot]:
    written: set[Slot] = set()
    for block in blocks(body):
        written.update(block.parameters)
        for instruction in block.instructions:
            written.update(getattr(instruction, "outputs", ()))
            if isinstance(instruction, Copy | LogicalId):
                written.add(instruction.output)
    return written


def _quote(text: str) -> str:
    return json.dumps(text)


def _numbers(numbers: Iterable[int]) -> str:
    return f"({', '.join(map(str, numbers))})"


def _slots(slots: Iterable[Slot]) -> str:
    return f"({', '.join(f'%{slot}' for slot in slots)})"


def _option(name: str, value: Any, show: Callable[[Any], str]) -> str:
    return f" {name} {show(value)}" if value else ""


def _signature(inputs: Iterable[TensorType], outputs: Iterable[TensorType]) -> str:
    return f"({', '.join(map(str, inputs))}) -> ({', '.join(map(str, outputs))})"
