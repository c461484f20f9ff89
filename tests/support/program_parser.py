"""Programs read back from text: ``parse(to_text(program)) == program``, names included."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType
from stretto.runtime.program import (
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
)

Item = TypeVar("Item")


class ProgramTextError(ValueError):
    """The text is no program's."""


def parse(text: str) -> Program:
    """Raises `ProgramTextError` with the line of what it does not understand."""
    return _Parser(text).program()


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
            raise ProgramTextError("program text: the slots are not numbered from 0 without gaps")
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
        sites = self.option("sites", lambda: self.items(self.number), ())
        once = self.accept("once")
        iterations = self.option("iterations", self.number, -1)
        calls = self.option("calls", lambda: self.items(self.number), ())
        self.expect("module")
        module = self.module()
        return Segment(
            inputs,
            outputs,
            module,
            donated,
            arithmetic,
            flops,
            name,
            reproducible,
            sites,
            once,
            iterations,
            calls,
        )

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
        raise ProgramTextError(f"program text, line {line}: expected {expected}, found {found}")
