"""Analyses a loop over layers, as `lax.scan` writes it: the roles of its carries.

Every iteration is a layer. The carry has a counter from 0, values that go from layer to layer, stacks that
get one slice from each layer and are not read, and values that do not change: weights, of which each layer
reads only its own slice along the first dimension, and values that all layers share. The slice of layer i has
number i, or number i from the end in a loop that goes through the layers backwards, as a gradient does. Such
a loop may be run on any range of layers: with its counter from a to b it computes iterations ``a … b - 1``.

The slices that the body reads and writes are found by evaluating it for each value of the counter
(`passes.valid.known`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import LOGICAL_IDS, Instruction, leaf_types
from ..passes.valid.known import starts_of
from ..passes.valid.trace import Forward, Trace
from ..schema import TUPLE, LiteralProto
from ..trips import annotated_trips
from ..values import BlockGraph, Node, Value
from .inline import other_communication
from .refusal import Refusal

MOST_LAYERS = 1024


@dataclass(frozen=True, eq=False)
class LayerLoop:
    """``loop`` runs ``count`` layers; the rest are positions in its carry.

    ``slices``: the instructions of its body that read a layer's slice of weights. ``updates``: for the
    position of each stack, the instruction that writes a layer's slice. ``reverse``: whether it begins with
    the last slices.
    """

    loop: Instruction
    count: int
    counter: int
    passed: tuple[int, ...]  # values that go from layer to layer
    weights: tuple[int, ...]
    shared: tuple[int, ...]
    stacked: tuple[int, ...]
    slices: dict[int, tuple[Instruction, ...]]
    updates: dict[int, Instruction]
    reverse: bool

    def first_slice(self, start: int, size: int) -> int:
        """The first of the slices of iterations ``start … start + size - 1``."""
        return self.count - start - size if self.reverse else start


def layer_loop(loop: Instruction, reader: CollectiveReader) -> LayerLoop:
    """The analysis of a loop. Raises `Refusal`."""
    name = f"the loop %{loop.name}"
    body = loop.called[0]
    count = annotated_trips(loop)
    if count is None or count > MOST_LAYERS:
        raise Refusal(f"{name} over layers has no known number of iterations up to {MOST_LAYERS}")
    other = next(filter(None, map(other_communication, loop.called)), None)
    if other is not None:
        what = "read the device's own id" if other.opcode in LOGICAL_IDS else "communicate"
        raise Refusal(f"layers {what} by {other.describe()} in {name}")
    if body.root.opcode != "tuple" or any(
        p.element_type == TUPLE or leaf_types(p, loop) == (None,) for p in loop.shape.tuple_shapes
    ):
        raise Refusal(f"{name} carries tuples or tokens")
    if any(i.operands and i.operands[0] is body.parameters[0] and i.opcode != "get-tuple-element"
           for i in body.instructions):  # fmt: skip
        raise Refusal(f"{name} hands its whole carry on")
    block = flatten(body, reader, in_loop=True)
    parameters, results = block.parameters, block.results
    changing = [i for i, p in enumerate(parameters) if results[i].root is not p]
    counter = _counter(loop, block, changing)
    found = _Slices(block, counter, count)
    first = found.numbered()
    carried = [i for i in changing if i != counter and i not in found.updates]
    for i in [*carried, *found.updates]:
        read = found.updates[i].operands[1].root if i in found.updates else results[i].root
        if read in first:
            raise Refusal(
                f"{name} reads the number of a layer for more than its weights, at "
                f"{first[read].instruction.describe()}"
            )
    unchanged = [i for i in range(len(parameters)) if i not in changing]
    return LayerLoop(
        loop,
        count,
        counter,
        tuple(carried),
        tuple(found.slices),
        tuple(i for i in unchanged if i not in found.slices),
        tuple(found.updates),
        {i: tuple(n.instruction for n in nodes) for i, nodes in found.slices.items()},
        {i: node.instruction for i, node in found.updates.items()},
        found.reverse,
    )


def _counter(loop: Instruction, block: BlockGraph, changing: list[int]) -> int:
    """The position of the carry that counts 0, 1, …"""
    forward = Forward(1, 1, follow_zeros=False)
    init = loop.operands[0]
    for i in changing:
        parameter = block.parameters[i]
        if init.opcode != "tuple" or parameter.type is None or parameter.type.dtype != "s32":
            continue
        start = init.operands[i]
        while start.opcode == "copy":
            start = start.operands[0]
        if parameter.type.shape or start.opcode != "constant":
            continue
        node = block.results[i].root.node
        if node is None or node.instruction.opcode != "add":
            continue
        if parameter not in [o.root for o in node.operands]:
            continue
        if _after(forward, block, i, 0) == 1 and _zero(start):
            return i
    raise Refusal(f"the loop %{loop.name} over layers does not count its iterations from 0")


def _zero(constant: Instruction) -> bool:
    literal = LiteralProto.FromString(constant.proto.literal)
    return list(literal.s32s) == [0]


def _after(forward: Forward, block: BlockGraph, i: int, value: int) -> int | None:
    trace = _with_counter(forward, block, i, value)
    known = forward.known(trace, block.results[i])
    return None if known is None or known.size != 1 else int(known.reshape(-1)[0])


def _with_counter(forward: Forward, block: BlockGraph, i: int, value: int) -> Trace:
    known: list[np.ndarray | None] = [None] * len(block.parameters)
    known[i] = np.array([value], np.int32)
    return forward.once(block, known)


class _Slices:
    """How a body reads and writes slices by its counter.

    ``slices``: by position of weights the nodes that read them; ``updates``: by position of a stack the
    node that writes it.
    """

    def __init__(self, block: BlockGraph, counter: int, count: int) -> None:
        self.block, self.counter = block, counter
        users: dict[Value, list[Node]] = {}
        for node in block.nodes:
            for operand in node.operands:
                users.setdefault(operand.root, []).append(node)
        results = [r.root for r in block.results]
        self.slices: dict[int, list[Node]] = {}
        self.updates: dict[int, Node] = {}
        for i, (parameter, result) in enumerate(zip(block.parameters, results, strict=True)):
            reads, writer = users.get(parameter, []), result.node
            if result is parameter:
                if reads and all(_takes_a_slice(n, parameter, count) for n in reads):
                    self.slices[i] = reads
            elif (
                writer is not None
                and reads == [writer]
                and result not in users
                and results.count(result) == 1
                and _puts_a_slice(writer, parameter, count)
            ):
                self.updates[i] = writer
        starts = self._starts(count)
        upwards = [starts[n] == list(range(count)) for n in starts]
        downwards = [starts[n] == list(range(count))[::-1] for n in starts]
        self.reverse = sum(downwards) > sum(upwards)
        if count == 1:  # which has no direction: what takes slices takes residuals, and goes back
            self.reverse = bool(self.slices)
        fits = dict(zip(starts, downwards if self.reverse else upwards, strict=True))
        self.slices = {i: own for i, own in self.slices.items() if all(fits[n] for n in own)}
        self.updates = {i: node for i, node in self.updates.items() if fits[node]}

    def _starts(self, count: int) -> dict[Node, list[int | None]]:
        """For each node: the slice that it reads or writes in each iteration, None if not known."""
        forward = Forward(1, 1, follow_zeros=False)
        nodes = [(n, 1) for own in self.slices.values() for n in own]
        nodes += [(n, 2) for n in self.updates.values()]
        found: dict[Node, list[int | None]] = {n: [] for n, _ in nodes}
        for value in range(count):
            trace = _with_counter(forward, self.block, self.counter, value)
            for node, first in nodes:
                starts = starts_of(node, [forward.known(trace, o) for o in node.operands], first)
                own = None if starts is None or starts[0][1:].any() else int(starts[0][0])
                found[node].append(own)
        return found

    def numbered(self) -> dict[Value, Node]:
        """For each value that depends on the counter in another way: the node at which that begins."""
        known = {n for own in self.slices.values() for n in own} | set(self.updates.values())
        tainted: dict[Value, Node] = {}
        number = self.block.parameters[self.counter]
        for node in self.block.nodes:
            if node in known:
                continue
            found = [o.root for o in node.operands if o.root is number or o.root in tainted]
            if found:
                first = node if found[0] is number or _is_index(node) else tainted[found[0]]
                tainted |= dict.fromkeys(node.results, first)
        return tainted


def _is_index(node: Node) -> bool:
    """Whether all operands of the node are integer scalars, as in the computation of an index."""
    return all(o.type is not None and not o.type.shape and o.type.dtype in ("s32", "u32", "pred")
               for o in node.operands)  # fmt: skip


def _takes_a_slice(node: Node, value: Value, count: int) -> bool:
    """Whether the node reads one of ``count`` slices along the first dimension, whole in all others."""
    if node.instruction.opcode != "dynamic-slice" or node.operands[0].root is not value:
        return False
    if any(o.root is value for o in node.operands[1:]) or value.type is None:
        return False
    result = node.results[0].type
    assert result is not None
    return _is_slice(result.shape, value.type.shape, count)


def _puts_a_slice(node: Node, value: Value, count: int) -> bool:
    if node.instruction.opcode != "dynamic-update-slice" or node.operands[0].root is not value:
        return False
    part = node.operands[1].type
    if any(o.root is value for o in node.operands[1:]) or value.type is None or part is None:
        return False
    return _is_slice(part.shape, value.type.shape, count)


def _is_slice(part: tuple[int, ...], whole: tuple[int, ...], count: int) -> bool:
    return len(whole) > 0 and whole[0] == count and part == (1, *whole[1:])
