"""Where what is moved between devices is from, in one computation: see `moved` and `given_out`.

A value is followed back through ops that only move elements, to the values that these are of. Where each
device has all elements of one of those as they lie on one device, or zeros, it can be made of them, by
permutes or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..graph import Computation, Instruction, Module
from ..passes.bytes.copies import Copies
from ..passes.valid.known import is_row_major
from ..values import BlockGraph, Node, Value
from .emit import Builder, Editor
from .kept_stacks import users_of
from .pieces import instructions_of
from .places import Places, data, is_zero, kept_whole
from .weights import permute

# Elements of one value on all devices together, and nodes that one value may come through, at most.
_MOST, _LONGEST = 1 << 20, 64


class Share(NamedTuple):
    """What some devices have of a value: ``pairs`` of the device that computed it, and these."""

    source: Instruction
    pairs: tuple[tuple[int, int], ...]


class Made(NamedTuple):
    """``values`` of a computation that differ in their shapes alone, and of which ``parts`` they are.
    ``like``: a collective that they come through, after which permutes in its place are named."""

    values: list[Instruction]
    parts: list[Share]
    like: Instruction


@dataclass
class Cone:
    """The nodes through which a value only moves, in their order, and the values that it is of."""

    nodes: list[Node]
    sources: list[Value]

    @property
    def collectives(self) -> list[Instruction]:
        return [n.instruction for n in self.nodes if n.collective is not None]


class Moving:
    """What is only moved in a computation, and ``block``, which is its graph. ``copies``: which devices have
    the same of what is moved; without, each has its own."""

    def __init__(
        self,
        block: BlockGraph,
        computation: Computation,
        places: Places,
        copies: Copies | None = None,
    ) -> None:
        self.block, self.computation, self.places, self.copies = block, computation, places, copies
        self.moving = {n for n in block.nodes if self._moves(n)}
        self.received: set[Node] = set()  # those behind a collective, and itself
        for node in block.nodes:
            if node in self.moving and (
                node.collective is not None or not self.received.isdisjoint(self.through(node))
            ):
                self.received.add(node)

    def _moves(self, node: Node) -> bool:
        own = node.instruction.computation is self.computation
        return own and not node.order and self.places.moves(node)

    def last_first(self) -> Iterator[Node]:
        """The nodes behind a collective that give one array, the last one first."""
        for node in reversed(self.block.nodes):
            # A bitcast of it would have to be of the same memory.
            if (
                node in self.received
                and len(node.results) == 1
                and is_row_major(node.instruction.shape)
            ):
                yield node

    def through(self, node: Node) -> list[Node]:
        """The nodes that move what a node moves."""
        found = [value.root.node for value in data(node)]
        return [n for n in found if n is not None and n in self.moving]

    def cone(self, last: Node) -> Cone | None:
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
        return Cone(sorted(nodes, key=lambda n: n.position), list(sources))

    def parts(self, last: Node, cone: Cone) -> list[Share] | None:
        """What the result of ``last`` is on the devices; None if it is not a whole value on each."""
        count = self.places.count
        whole = min(map(kept_whole, cone.nodes))  # so many last dimensions nothing cuts
        found: dict[Value, np.ndarray] = {}
        following = 1

        def shape_of(value: Value) -> tuple[int, ...]:
            assert value.type is not None
            return value.type.shape[: len(value.type.shape) - whole]

        def own(value: Value) -> np.ndarray:
            """Numbers that no other value has; the same for copies."""
            nonlocal following
            shape = (count, *shape_of(value))
            numbers = np.arange(following, following + prod(shape)).reshape(shape)
            following += numbers.size
            return numbers if self.copies is None else numbers[list(self.copies.of(value))]

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

    def _wholes(self, found: dict[Value, np.ndarray], last: Node, cone: Cone) -> list[Share] | None:
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
        parts: list[Share] = []
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
            parts.append(Share(read, tuple(best)))
            for _, device in best:
                del wanted[device]
        return parts or None

    def _read(self, source: Value) -> Instruction | None:
        """An instruction of the computation that is this value."""
        if source.node is not None:
            made = instructions_of(source)
            return made[0] if made and made[0].computation is self.computation else None
        parameters, index = self.computation.parameters, self.block.parameters.index(source)
        if not any(p.shape.tuple_shapes for p in parameters):
            return parameters[index]
        if len(parameters) > 1:
            return None
        reads = [i for i in users_of(parameters[0]) if i.opcode == "get-tuple-element"]
        return next((i for i in reads if i.proto.tuple_index == index), None)


def written(module: Module, body: Computation, made: Made, count: int) -> bytes:
    """The module with values of a computation made of their parts."""
    editor = Editor(module)
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
