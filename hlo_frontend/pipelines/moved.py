"""Makes one permute of what collectives, pads, concatenations and slices move together.

Of stages that are one array, XLA's partitioner hands on what they give by a permute where the shift is a
`jnp.roll`. Of other shifts it makes more:

- of `jnp.pad` and a slice, going back: a permute from each stage to each one before it, a concatenation, a
  pad, a slice of two stages by the device's number, a permute of these, and a slice again; or an all-gather
  in the place of the former;
- of `jnp.concatenate([x[None], state[:-1]])`: three all-to-alls, by which each device has some rows of what
  all stages hold, and back; or, of few numbers, a gather, or a sum in which each device has zeros for those
  of others.

Here it is followed where each element of what comes of that is from (`places`): of which value, computed on
which device, and where in it; or a positive zero. Where each device has all elements of a value as they lie
on one device, the value is sent there by one permute, or taken as it is; where it differs from device to
device which value that is, it is selected by the device's number. Nothing but moves is replaced, so all bits
are the same. What is computed with while it lies in another order stays, as where a stage's rows are divided
among the devices and multiplied before they are brought back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from stretto.collectives.ops import Kind

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Instruction, Module
from ..passes.bytes.device_values import DeviceValues
from ..passes.valid.known import is_row_major
from ..values import BlockGraph, Node, NodeKind, Value
from .emit import Builder, Editor
from .places import SHAPES, Places, data, is_zero, kept_whole, moves_between
from .weights import permute

# Elements of one value on all devices together, and nodes that one value may come through, at most.
_MOST, _LONGEST = 1 << 20, 64


def moved(serialized: bytes, num_replicas: int, num_partitions: int) -> bytes | None:
    """The module with such moves in the bodies of loops of its entry computation as permutes; None if there
    are none."""
    if num_replicas > 1:
        return None
    found: bytes | None = None
    while (after := _once(serialized if found is None else found, num_partitions)) is not None:
        found = after
    return found


def _once(serialized: bytes, num_partitions: int) -> bytes | None:
    """The module with one more value made by permutes."""
    module = Module.parse(serialized)
    entry = flatten(module.entry, CollectiveReader(1, num_partitions))
    places: Places | None = None
    for loop in entry.nodes:
        if loop.kind is not NodeKind.LOOP or not any(map(moves_between, loop.blocks[1].nodes)):
            continue
        places = places or Places(DeviceValues(entry, 1, num_partitions), num_partitions)
        made = _Body(loop, places).find()
        if made is not None:
            return _written(module, loop.instruction, made, num_partitions)
    return None


class _Part(NamedTuple):
    """What some devices have of a value of the body: ``pairs`` of the device that computed it, and these."""

    source: Instruction
    pairs: tuple[tuple[int, int], ...]


class _Made(NamedTuple):
    """``values`` of the body that differ in their shapes alone, and of which ``parts`` they are. ``like``: a
    collective that they come through, after which permutes in its place are named."""

    values: list[Instruction]
    parts: list[_Part]
    like: Instruction


@dataclass
class _Cone:
    """The nodes through which a value only moves, in their order, and the values that it is of."""

    nodes: list[Node]
    sources: list[Value]


class _Body:
    """The body of a loop, and what is only moved in it."""

    def __init__(self, loop: Node, places: Places) -> None:
        self.block: BlockGraph = loop.blocks[1]
        self.computation = loop.instruction.called[0]
        self.places = places
        self.moving = {n for n in self.block.nodes if self._moves(n)}
        self.received: set[Node] = set()  # those behind a collective, and itself
        for node in self.block.nodes:
            if node in self.moving and (
                node.collective is not None or not self.received.isdisjoint(self._through(node))
            ):
                self.received.add(node)

    def find(self) -> _Made | None:
        """The last value that is moved so, with all that are the same in other shapes."""
        found: list[Instruction] = []
        parts: list[_Part] = []
        through: list[Instruction] = []
        for node in reversed(self.block.nodes):
            if node not in self.received or len(node.results) != 1:
                continue
            if not is_row_major(node.instruction.shape):
                continue  # a bitcast of it would have to be of the same memory
            cone = self._cone(node)
            if cone is None or not any(map(self._changes_what_was_received, cone.nodes)):
                continue
            own = self._parts(node, cone)
            if own and (not found or own == parts):
                found, parts = [*found, node.instruction], own
                through += [n.instruction for n in cone.nodes if n.collective is not None]
        return _Made(found, parts, through[0]) if found else None

    def _moves(self, node: Node) -> bool:
        own = node.instruction.computation is self.computation
        return own and not node.order and self.places.moves(node)

    def _through(self, node: Node) -> list[Node]:
        """The nodes that move what a node moves."""
        found = [value.root.node for value in data(node)]
        return [n for n in found if n is not None and n in self.moving]

    def _changes_what_was_received(self, node: Node) -> bool:
        """Whether it is more than a permute, a choice, or another shape of what was received."""
        if node.collective is not None and node.collective.kind is not Kind.PERMUTE:
            return True
        if node.instruction.opcode in ("select", *SHAPES):
            return False
        return not self.received.isdisjoint(self._through(node))

    def _cone(self, last: Node) -> _Cone | None:
        """None where that is too much to follow."""
        nodes, sources = {last}, dict[Value, None]()
        stack = [last]
        while stack:
            for value in data(stack.pop()):
                if value.order or value.barrier is not None:
                    return None
                root = value.root
                if root.node is None or root.node not in self.moving:
                    if not is_zero(root):
                        sources[root] = None
                elif root.node not in nodes:
                    nodes.add(root.node)
                    stack.append(root.node)
            if len(nodes) > _LONGEST:
                return None
        return _Cone(sorted(nodes, key=lambda n: n.position), list(sources))

    def _parts(self, last: Node, cone: _Cone) -> list[_Part] | None:
        """What the result of ``last`` is on the devices; None if it is not a whole value on each."""
        count = self.places.count
        whole = min(map(kept_whole, cone.nodes))  # so many last dimensions nothing cuts
        found: dict[Value, np.ndarray] = {}
        following = 1

        def shape_of(value: Value) -> tuple[int, ...]:
            assert value.type is not None
            return value.type.shape[: len(value.type.shape) - whole]

        def own(value: Value) -> np.ndarray:
            """Numbers that no other value has."""
            nonlocal following
            shape = (count, *shape_of(value))
            numbers = np.arange(following, following + prod(shape)).reshape(shape)
            following += numbers.size
            return numbers

        values = [*cone.sources, *(r for n in cone.nodes for r in (*data(n), *n.results))]
        if any(prod(shape_of(v)) * count > _MOST for v in values):
            return None
        found |= {source: own(source) for source in cone.sources}
        for node in cone.nodes:
            given = [
                np.zeros((count, *shape_of(v)), np.int64)
                if (at := found.get(v.root)) is None
                else at
                for v in data(node)
            ]
            after = self.places.after(node, given, whole)
            after = after or [own(result) for result in node.results]
            found |= zip(node.results, after, strict=True)
        return self._wholes(found, last, cone)

    def _wholes(
        self, found: dict[Value, np.ndarray], last: Node, cone: _Cone
    ) -> list[_Part] | None:
        """Values of which one device or another has what the result of ``last`` is on each. Of those that
        have it on most devices, the first one."""
        result = last.results[0]
        assert result.type is not None
        type, size = result.type, prod(result.type.shape)
        before = [v for n in cone.nodes if n not in self.received for v in n.results]
        alike = [
            v for v in (*cone.sources, *before)
            if v.type is not None and v.type.dtype == type.dtype and prod(v.type.shape) == size
        ]  # fmt: skip
        wanted = {d: row.tobytes() for d, row in enumerate(found[result]) if row.any()}
        has: dict[Value, dict[bytes, list[int]]] = {}
        for value in alike:
            rows = has[value] = {}
            for device, row in enumerate(found[value]):
                rows.setdefault(row.tobytes(), []).append(device)
        parts: list[_Part] = []
        while wanted:
            best: list[tuple[int, int]] = []
            for value, rows in has.items():
                pairs = [
                    (d if d in rows[row] else rows[row][0], d)
                    for d, row in wanted.items() if row in rows
                ]  # fmt: skip
                if len({s for s, _ in pairs}) == len(pairs) > len(best):
                    best, source = pairs, value
            read = self._read(source) if best else None
            if read is None:
                return None
            parts.append(_Part(read, tuple(best)))
            for _, device in best:
                del wanted[device]
        return parts or None

    def _read(self, source: Value) -> Instruction | None:
        """An instruction of the body that is this value."""
        node = source.node
        whole = self.computation.parameters[0] if node is None else node.instruction
        index = self.block.parameters.index(source) if node is None else source.index
        if node is not None and len(node.results) == 1:
            return whole if whole.computation is self.computation else None
        return next(
            (i for i in self.computation.instructions if i.opcode == "get-tuple-element"
             and i.operands[0] is whole and i.proto.tuple_index == index),
            None,
        )  # fmt: skip


def _written(module: Module, loop: Instruction, made: _Made, count: int) -> bytes:
    """The module with values of a loop's body made of their parts."""
    editor = Editor(module)
    body = loop.called[0]
    b = editor.within(body)
    b.metadata = made.like.proto.metadata
    shape = list(made.parts[0].source.shape.dimensions)
    whole: Any = None
    for part in made.parts:
        value = _shaped(b, b.own(part.source), shape)
        is_sent = any(source != target for source, target in part.pairs)
        if is_sent:
            value = permute(b, value, part.pairs)
            value.name = editor.name(made.like.name)
        if whole is None and (is_sent or len(part.pairs) == count):
            whole = value  # zeros on others
        else:
            whole = b.on_devices([target for _, target in part.pairs], count, value, whole)
    stands = {v: _shaped(b, whole, list(v.shape.dimensions)) for v in made.values}
    editor.redirect(body, stands, body.instructions)
    if body.root in stands:
        b.finish(stands[body.root])
    editor.sweep(body)
    return editor.finish()


def _shaped(b: Builder, value: Any, dimensions: Sequence[int]) -> Any:
    return value if list(value.shape.dimensions) == dimensions else b.reshape(value, dimensions)
