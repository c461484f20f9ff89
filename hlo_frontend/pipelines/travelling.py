"""Takes what travels with a microbatch, and is no work of the stages, out of what they send.

Labels, a mask of tokens or a number may go from stage to stage along with an activation. What a device
receives is then, in each iteration, a known number, or what one instruction of the body gave on another
device in an earlier iteration, or a row of an array that was there before the loop, handed on bit for bit.
Where that is made of nothing but known numbers and of values from before the loop that all of these devices
have, `at_home` lets each device compute it where it would have received it, with tables of the numbers by
device and iteration. Then a stage, a head or a loss may read it as anything that a device has itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..builder import array_shape, resized
from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Instruction, Module
from ..passes.valid.trace import is_transfer
from ..values import Node, Value
from .chains import Execution, Followed, Made
from .chunk import entry_of
from .connected import connected
from .emit import Builder, Editor
from .inline import inlined, opened
from .parts import Part
from .pieces import instructions_of
from .recognize import follow, part_in
from .refusal import Refusal
from .rewrite import shaped
from .sameness import Sameness
from .walks import SCALAR, Walk


def at_home(
    module: Module, names: Sequence[str], num_replicas: int, num_partitions: int
) -> tuple[Module, bool]:
    """The module, with what travels through loops of these names computed where it is read, and whether an
    engine may round it otherwise there. Raises `GaveUpError`."""
    rounds = False
    for name in names:
        if num_replicas > 1 or len(_permutes(_loop(module, name))) < 2:
            continue
        whole = opened(inlined(module, name), name)
        found = _found(whole, _loop(whole, name), CollectiveReader(num_replicas, num_partitions))
        if not found:
            continue
        editor = Editor(whole)
        b = editor.replace(found[0].read)
        for sent in found:
            b.go_on_to(sent.read)
            b.stand_in(sent.emit(b))
        rounds = rounds or any(sent.walk is not None and sent.walk.rounds for sent in found)
        module = Module.parse(editor.finish())
    return module, rounds


def _loop(module: Module, name: str) -> Instruction:
    return next(i for i in module.entry.instructions if i.name == name)


def _permutes(loop: Instruction) -> list[Instruction]:
    return [
        i for i in loop.called[0].instructions
        if i.opcode == "collective-permute" and not i.shape.tuple_shapes
    ]  # fmt: skip


@dataclass(eq=False)
class _Sent:
    """What was received, as ``read`` in the body. ``counter``: the position in the carry of the number of the
    iteration.

    Tables by device and iteration: ``numbers``, where ``is_number``; elsewhere it is one of ``rows`` of the
    initial value at position ``array`` of the carry, or what ``made`` gives, from which ``walk`` goes back.
    """

    read: Instruction
    counter: int
    numbers: np.ndarray
    is_number: np.ndarray
    rows: np.ndarray
    array: int | None = None
    walk: Walk | None = None
    made: Instruction | None = None

    def emit(self, b: Builder) -> Any:
        """Add it to the body."""
        shape = self.read.shape
        carry = self.read.computation.parameters[0].proto

        def element(position: int) -> Any:
            return b.element(carry, position)

        device, k = b.add("partition-id", array_shape("u32")), element(self.counter)
        where = [b.convert(device, array_shape(SCALAR)), k]
        value = None
        if self.array is not None:
            value = entry_of(b, element(self.array), [b.lookup(self.rows, where)])
        elif self.walk is not None and self.made is not None:
            inits = self.walk.part.loop.instruction.operands[0].operands
            held = {inits[p]: element(p) for p in self.walk.held}
            (value,) = self.walk.emit(b, k, device, {}, {}, held, [self.made])
        if value is not None:
            value = shaped(b, value, shape)
        if self.is_number.any():
            number = b.convert(b.lookup(self.numbers, where), resized(shape, []))
            whole = b.broadcast(number, shape) if shape.dimensions else number
            known = b.is_one(b.lookup(self.is_number, where))
            value = whole if value is None else b.select(known, whole, value)
        return value


def _found(module: Module, loop: Instruction, reader: CollectiveReader) -> list[_Sent]:
    """All that the devices of a loop can compute of what it sends, in the order of its body."""
    entry = flatten(module.entry, reader)
    node = next(n for n in entry.nodes if n.instruction is loop)
    try:
        followed = follow(entry, reader.num_replicas, reader.num_partitions)
        if node not in followed.origins:
            return []
        part = part_in(followed, node)
    except Refusal:  # it is reported where the loop is analyzed
        return []
    block, body = node.blocks[1], loop.called[0]
    counter = counter_of(followed, node)
    flat = len(block.parameters) == len(loop.shape.tuple_shapes)
    if counter is None or not flat or loop.operands[0].opcode != "tuple":
        return []
    part.groups = tuple({tuple(sorted(own)) for own in connected(node).values()})
    sameness = Sameness(module, part.groups, reader)
    permutes = set(_permutes(loop))
    received = {
        node.results[0]: [node.instruction] for node in block.nodes
        if is_transfer(node) and node.instruction in permutes
    }  # fmt: skip
    for position, result in enumerate(block.results):
        if result.root in received:  # read in the next iteration
            received[block.parameters[position]] = [
                i for i in body.instructions
                if body.parameters[0] in i.operands and i.proto.tuple_index == position
            ]  # fmt: skip
    found = []
    for value, reads in received.items():
        sent = _sent(followed, part, value, reads[0], counter, sameness) if reads else None
        if sent is not None:
            found += [replace(sent, read=read) for read in reads]
    place = {i: n for n, i in enumerate(body.instructions)}
    return sorted(found, key=lambda sent: place[sent.read])


def counter_of(followed: Followed, loop: Node) -> int | None:
    """The position in the carry of a number that is that of the iteration."""
    origins, devices = followed.origins[loop], range(followed.forward.num_devices)
    for position, parameter in enumerate(loop.blocks[1].parameters):
        if parameter.type is None or parameter.type.shape or parameter.type.dtype != SCALAR:
            continue
        if all(
            origins.number(parameter, Execution(t, d)) == t
            for t in range(len(origins.iterations))
            for d in devices
        ):
            return position
    return None


def _sent(
    followed: Followed,
    part: Part,
    value: Value,
    read: Instruction,
    counter: int,
    sameness: Sameness,
) -> _Sent | None:
    """How each device can compute what it has received; None if it is not known to be able to."""
    origins, devices = followed.origins[part.loop], followed.forward.num_devices
    assert value.type is not None
    counts = value.type.dtype[0] in "psu"
    numbers, is_number, rows = (np.zeros((devices, part.trips), np.int32) for _ in range(3))
    runs: list[dict[int, Execution]] = [{} for _ in range(part.trips)]
    sources: set[tuple[Node | None, int, bool]] = set()
    made: Made | None = None
    for t in range(part.trips):
        for d in range(devices):
            at = Execution(t, d)
            number = 0 if origins.is_zero(value, at) else None
            if number is None and counts:
                number = origins.number(value, at)
            if number is not None and -(2**31) <= number < 2**31:
                numbers[d, t], is_number[d, t] = number, 1
                continue
            made = origins.of(value, at)
            sources.add((made.node, made.leaf, made.slot is None))
            if len(sources) > 1 or made.plus:
                return None
            runs[t][d] = made.at
            rows[d, t] = made.slot or 0
    sent = _Sent(read, counter, numbers, is_number, rows)
    if made is None:
        return sent
    walk = Walk(followed, part, runs, sameness=sameness, ends=False)
    if made.node is None:
        init = part.loop.instruction.operands[0].operands[made.leaf]
        body = part.loop.blocks[1]
        is_held = body.results[made.leaf].root is body.parameters[made.leaf]
        if not is_held or made.slot is None:
            return None
        if not all(walk.has(device, init, at.device) for _, device, at in walk.flat):
            return None
        sent.array = made.leaf
        return sent
    if (
        made.slot is not None
        or made.node.instruction.computation is not part.loop.instruction.called[0]
    ):
        return None
    try:
        walk.needs([made.node.results[made.leaf]])
    except Refusal:
        return None
    walked = [v.node.instruction for v, _, _ in walk.finished if v.node is not None]
    if any(i.has_side_effect or any(c.needs_runtime for c in i.called) for i in walked):
        return None
    sent.walk, (sent.made, *_) = walk, instructions_of(made.node.results[made.leaf])
    return sent
