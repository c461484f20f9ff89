"""Programs as text and back; ``parse(to_text(program)) == program``, names included.

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
Modules that are UTF-8 are written as text, others as base64; `to_text` can leave them out for reading.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType

from .errors import InvalidProgramError
from .program import (
    Block,
    Branch,
    Carried,
    Copy,
    Free,
    Instruction,
    LogicalId,
    Loop,
    Prediction,
    Program,
    Run,
    Segment,
    Slot,
    Start,
    Wait,
    blocks,
)

Item = TypeVar("Item")


def to_text(program: Program, *, modules: bool = True) -> str:
    """Print a program. Without ``modules`` each is only named by size and digest: not to be parsed."""
    return "\n".join(_Printer(program, modules).lines()) + "\n"


def parse(text: str) -> Program:
    """Inverse of `to_text`. Raises `InvalidProgramError` with the line of what it does not understand."""
    return _Parser(text).program()


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
        if c.groups:
            parts.append(f"groups {_nested(c.groups)}")
        if c.pairs:
            parts.append(f"pairs {_nested(c.pairs)}")
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
            parts.append(f"valid {_nested(c.valid_iterations)}")
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
                    + _option("valid", i.valid, _nested)
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
                    + "".join(f" carried {c.event} {_nested(c.carries)}" for c in i.carried)
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


def _nested(groups: Iterable[Iterable[int]]) -> str:
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def _signature(inputs: Iterable[TensorType], outputs: Iterable[TensorType]) -> str:
    return f"({', '.join(map(str, inputs))}) -> ({', '.join(map(str, outputs))})"


_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<arrow>->)|(?P<mark>[(){},:])"""
    r"""|(?P<slot>%\d+)|(?P<type>[a-z]\w*\[[\d,]*\])|(?P<word>[^\s(){},:"%\[\]]+))"""
)


class _Parser:
    """Recursive descent over the tokens; every method reads one construct."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []  # kind, text, position
        position, end = 0, len(text.rstrip())
        while position < end:
            found = _TOKEN.match(text, position)
            if found is None:
                self.tokens.append(("?", text[position:end].split(maxsplit=1)[0], position))
                break
            assert found.lastgroup is not None
            kind = found.lastgroup
            self.tokens.append((kind, found[kind], found.start(kind)))
            position = found.end()
        self.next = 0
        self.types: dict[Slot, TensorType] = {}

    def program(self) -> Program:
        self.expect("program")
        name = self.string()
        counts = [self.after("replicas"), self.after("partitions"), self.after("streams")]
        donated = self.option("donated", lambda: self.items(self.number), ())
        predicted = self.option("predicted", self.prediction, None)
        segments, collectives = [], []
        while self.accept("segment"):
            segments.append(self.segment())
        while self.accept("collective"):
            collectives.append(self.collective())
        if self.accept("unused"):
            self.items(self.typed)
        self.expect("body")
        body = self.block()
        if self.next != len(self.tokens):
            self.fail("the end")
        if sorted(self.types) != list(range(len(self.types))):
            raise InvalidProgramError(
                "program text: the slots are not numbered from 0 without gaps"
            )
        slot_types = tuple(self.types[slot] for slot in range(len(self.types)))
        replicas, partitions, streams = counts
        return Program(
            name,
            replicas,
            partitions,
            slot_types,
            tuple(segments),
            tuple(collectives),
            body,
            donated,
            streams,
            predicted,
        )

    def prediction(self) -> Prediction:
        return Prediction(self.real(), self.real(), self.real())

    def segment(self) -> Segment:
        name = self.string()
        inputs, outputs = self.signature()
        donated = self.option("donated", lambda: self.items(self.number), ())
        arithmetic = self.option("arithmetic", self.number, -1)
        flops = self.option("flops", self.real, -1.0)
        reproducible = self.accept("reproducible")
        self.expect("module")
        module = self.module()
        return Segment(inputs, outputs, module, donated, arithmetic, flops, name, reproducible)

    def module(self) -> bytes:
        if self.accept("text"):
            return self.string().encode()
        if self.accept("base64"):
            return base64.b64decode(self.string())
        return self.fail("module text or base64")

    def collective(self) -> Collective:
        kind = self.member(Kind)
        name = self.string()
        operands, results = self.signature()
        return Collective(
            kind,
            operands,
            results,
            groups=self.option("groups", self.nested, ()),
            pairs=self.option("pairs", self.nested, ()),
            reduction=self.option("reduction", lambda: self.member(Reduction), None),
            reducer=self.option("reducer", self.number, None),
            dimension=self.option("dimension", self.number, -1),
            tuple_form=self.accept("tuple_form"),
            dynamic_root=self.accept("dynamic_root"),
            channel=self.option("channel", self.number, 0),
            valid_iterations=self.option("valid", self.nested, ()),
            name=name,
            source=self.option("source", self.string, ""),
        )

    def block(self) -> Block:
        parameters = self.items(self.typed)
        self.expect("{")
        instructions = []
        while not self.accept("yield"):
            instructions.append(self.instruction())
        results = self.items(self.slot)
        self.expect("}")
        return Block(parameters, tuple(instructions), results)

    def instruction(self) -> Instruction:
        for word in ("run", "start", "wait", "copy", "id", "free", "loop", "branch"):
            if self.accept(word):
                return getattr(self, f"_{word}")()
        return self.fail("an instruction")

    def _run(self) -> Run:
        segment, inputs = self.number(), self.items(self.slot)
        outputs, donated = self.outputs(), self.donated()
        return Run(segment, inputs, outputs, donated, self.option("valid", self.nested, ()))

    def _start(self) -> Start:
        collective, inputs, outputs = self.number(), self.items(self.slot), self.outputs()
        return Start(collective, inputs, outputs, self.after("event"), self.after("stream"))

    def _wait(self) -> Wait:
        return Wait(self.number())

    def _copy(self) -> Copy:
        (source,), (target,) = self.items(self.slot), self.outputs()
        return Copy(source, target)

    def _id(self) -> LogicalId:
        kind, (output,) = self.string(), self.outputs()
        return LogicalId(kind, output)

    def _free(self) -> Free:
        return Free(self.items(self.slot))

    def _loop(self) -> Loop:
        name, inputs, outputs = self.string(), self.items(self.slot), self.outputs()
        trip_count = self.option("trip_count", self.number, None)
        donated, source = self.donated(), self.option("source", self.string, "")
        carried = []
        while self.accept("carried"):
            carried.append(Carried(self.number(), self.nested()))
        self.expect("condition")
        condition = self.block()
        self.expect("body")
        body, given = self.block(), tuple(carried)
        return Loop(inputs, outputs, condition, body, trip_count, donated, name, source, given)

    def _branch(self) -> Branch:
        name, (selector,), outputs = self.string(), self.items(self.slot), self.outputs()
        count, source = self.after("of"), self.option("source", self.string, "")
        inputs, cases = [], []
        for _ in range(count):
            self.expect("case")
            inputs.append(self.items(self.slot))
            self.expect("->")
            cases.append(self.block())
        return Branch(selector, tuple(inputs), outputs, tuple(cases), name, source)

    def outputs(self) -> tuple[Slot, ...]:
        self.expect("->")
        return self.items(self.typed)

    def donated(self) -> tuple[Slot, ...]:
        return self.option("donated", lambda: self.items(self.slot), ())

    def signature(self) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
        inputs = self.items(self.type)
        self.expect("->")
        return inputs, self.items(self.type)

    def typed(self) -> Slot:
        slot = self.slot()
        self.expect(":")
        self.types[slot] = self.type()
        return slot

    def items(self, item: Callable[[], Item], marks: str = "()") -> tuple[Item, ...]:
        self.expect(marks[0])
        found: list[Item] = []
        while not self.accept(marks[1]):
            if found:
                self.expect(",")
            found.append(item())
        return tuple(found)

    def nested(self) -> Any:
        return self.items(lambda: self.items(self.number, "{}"), "{}")

    def option(self, name: str, read: Callable[[], Any], default: Any) -> Any:
        return read() if self.accept(name) else default

    def after(self, name: str) -> int:
        self.expect(name)
        return self.number()

    def slot(self) -> Slot:
        return int(self.take("slot", "a slot")[1:])

    def type(self) -> TensorType:
        return self.read(TensorType.parse, "type", "a type")

    def string(self) -> str:
        return self.read(json.loads, "string", "a string")

    def number(self) -> int:
        return self.read(int, "word", "a number")

    def real(self) -> float:
        return self.read(float, "word", "a number")

    def member(self, enum: Any) -> Any:
        return self.read(enum, "word", f"one of {', '.join(enum)}")

    def read(self, convert: Callable[[str], Item], kind: str, what: str) -> Item:
        text = self.take(kind, what)
        try:
            return convert(text)
        except ValueError:
            self.next -= 1
            return self.fail(what)

    def take(self, kind: str, what: str) -> str:
        if self.next < len(self.tokens) and self.tokens[self.next][0] == kind:
            self.next += 1
            return self.tokens[self.next - 1][1]
        return self.fail(what)

    def accept(self, text: str) -> bool:
        if self.next < len(self.tokens):
            kind, found, _ = self.tokens[self.next]
            if found == text and kind in ("word", "mark", "arrow"):
                self.next += 1
                return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(repr(text))

    def fail(self, expected: str) -> Any:
        if self.next < len(self.tokens):
            _, found, position = self.tokens[self.next]
        else:
            found, position = "the end", len(self.text)
        line = self.text.count("\n", 0, position) + 1
        raise InvalidProgramError(f"program text, line {line}: expected {expected}, found {found}")
