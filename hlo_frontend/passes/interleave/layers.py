"""A loop over layers, as `lax.scan` writes it: what of its carry is what.

Every iteration is a layer. The carry has a counter from 0, values that go from layer to layer, and what does
not change: weights, of which layer i reads slice i along the first dimension and nothing else, and what all
layers share. A loop of that shape may be run on any range of layers: layers ``a … b - 1`` are what it
computes with its counter from a to b.

How weights are read is found by following the counter exactly through the body (`passes.valid.known`), for
each of its values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...collectives import CollectiveReader
from ...flatten import flatten
from ...graph import Instruction, leaf_types, trip_count
from ...schema import TUPLE, LiteralProto
from ...values import BlockGraph, Node, Value
from ..valid.known import starts_of
from ..valid.trace import Forward, Trace
from .refusal import Refusal

MOST_LAYERS = 1024


@dataclass(frozen=True, eq=False)
class LayerLoop:
    """``loop`` runs ``count`` layers; the rest are positions in its carry."""

    loop: Instruction
    count: int
    counter: int
    passed: tuple[int, ...]  # values that go from layer to layer
    weights: tuple[int, ...]
    shared: tuple[int, ...]


def layer_loop(loop: Instruction) -> LayerLoop:
    """The loop taken apart. Raises `Refusal`."""
    name = f"the loop %{loop.name}"
    body = loop.called[0]
    count = trip_count(loop)
    if count is None or count > MOST_LAYERS:
        raise Refusal(f"{name} over layers has no known number of iterations up to {MOST_LAYERS}")
    if any(c.needs_runtime for c in loop.called):
        raise Refusal(f"layers communicate in {name}")
    if body.root.opcode != "tuple" or any(
        p.element_type == TUPLE or leaf_types(p, loop) == (None,) for p in loop.shape.tuple_shapes
    ):
        raise Refusal(f"{name} carries tuples or tokens")
    if any(i.operands and i.operands[0] is body.parameters[0] and i.opcode != "get-tuple-element"
           for i in body.instructions):  # fmt: skip
        raise Refusal(f"{name} hands its whole carry on")
    block = flatten(body, CollectiveReader(1, 1), in_loop=True)
    parameters, results = block.parameters, block.results
    changing = [i for i, p in enumerate(parameters) if results[i].root is not p]
    counter = _counter(loop, block, changing)
    weights, first = _weights(block, counter, count)
    carried = [i for i in changing if i != counter]
    for i in carried:
        if results[i].root in first:
            node = first[results[i].root]
            raise Refusal(
                f"{name} reads the number of a layer for more than its weights, or keeps what "
                f"each layer gives, at {node.instruction.describe()}; a differentiated stage does so"
            )
    unchanged = [i for i in range(len(parameters)) if i not in changing]
    shared = [i for i in unchanged if i not in weights]
    return LayerLoop(loop, count, counter, tuple(carried), tuple(weights), tuple(shared))


def _counter(loop: Instruction, block: BlockGraph, changing: list[int]) -> int:
    """The position that counts 0, 1, …: it is one more after an iteration, whatever it was."""
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


def _weights(block: BlockGraph, counter: int, count: int) -> tuple[list[int], dict[Value, Node]]:
    """Positions of weights; and by value that depends on the counter otherwise, where that begins."""
    users: dict[Value, list[Node]] = {}
    for node in block.nodes:
        for operand in node.operands:
            users.setdefault(operand.root, []).append(node)
    unchanged = {p for p, r in zip(block.parameters, block.results, strict=True) if r.root is p}
    candidates = {
        p for p in unchanged if users.get(p) and all(_takes_a_slice(n, p, count) for n in users[p])
    }
    slices = {n for p in candidates for n in users[p]}
    forward = Forward(1, 1, follow_zeros=False)
    for value in range(count):
        trace = _with_counter(forward, block, counter, value)
        for node in [n for n in slices if n.operands[0].root in candidates]:
            starts = starts_of(node, [forward.known(trace, o) for o in node.operands], 1)
            if starts is None or list(starts[0]) != [value] + [0] * (starts.shape[1] - 1):
                candidates.discard(node.operands[0].root)
    tainted: dict[Value, Node] = {}
    number = block.parameters[counter]
    for node in block.nodes:
        if node in slices and node.operands[0].root in candidates:
            continue
        found = [o.root for o in node.operands if o.root is number or o.root in tainted]
        if found:
            first = node if found[0] is number or _is_index(node) else tainted[found[0]]
            tainted |= dict.fromkeys(node.results, first)
    positions = [i for i, p in enumerate(block.parameters) if p in candidates]
    return positions, tainted


def _is_index(node: Node) -> bool:
    """Whether all that the node computes from are integer scalars: how numbers become indices."""
    return all(o.type is not None and not o.type.shape and o.type.dtype in ("s32", "u32", "pred")
               for o in node.operands)  # fmt: skip


def _takes_a_slice(node: Node, value: Value, count: int) -> bool:
    """A slice of one along the first dimension, of ``count``, and all of the others."""
    if node.instruction.opcode != "dynamic-slice" or node.operands[0].root is not value:
        return False
    if any(o.root is value for o in node.operands[1:]) or value.type is None:
        return False
    result = node.results[0].type
    assert result is not None
    return value.type.shape[0] == count and result.shape == (1, *value.type.shape[1:])
