"""Block graphs as text, for reading: the same module has the same text in every process.

    (%0: f32[8], %1: s32[]) {
      0 %sum = all-reduce f32[8] (%0) groups {{0,1}} reduction add at step.py:12
      1 %loop = while (s32[], f32[8]) (%1, %sum) trips 3
        condition (%0: s32[], %1: f32[8]) {
          0 %less = compare pred[] (%0, 3)
          yield (%less)
        }
        body …
      yield (%loop#1)
    }

There is one line for each node: position, name, opcode, types of its results, operands, results of passes,
and the nodes that it comes after by order alone. Parameters are numbered, and a number behind a name
(``%loop#1``) says which of several results is read. Nodes of the same name, from a computation that was
inlined twice, have the suffixes ``@2``, ``@3``. Constants and values computed from them have no place in the
order, and are spelled out where they are read: ``3``, ``s32[8](3)`` for a broadcast, ``s32[8](iota)``,
``f32[](half)`` for a constant with the name half that is no integer. A value that is read through an
optimization barrier is in ``fence(…)`` if the barrier is a fence, in ``barrier(…)`` otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from stretto.collectives.ops import attributes, nested
from stretto.collectives.types import TensorType

from .schema import LiteralProto
from .trips import trip_count
from .values import BlockGraph, Node, NodeKind, Value, carried_results

_INDENT = "  "


def to_text(block: BlockGraph) -> str:
    """The block and the blocks inside it."""
    return "\n".join(_lines(block, "", "")) + "\n"


def _lines(block: BlockGraph, head: str, indent: str) -> Iterator[str]:
    names = _Names(block)
    parameters = ", ".join(f"{names.of(p)}: {_type(p.type)}" for p in block.parameters)
    yield f"{indent}{head}({parameters}) {{"
    for node in block.nodes:
        yield f"{indent}{_INDENT}{node.position} {_node(node, names, block)}"
        heads = (
            ("condition", "body") if node.kind is NodeKind.LOOP else ("branch",) * len(node.blocks)
        )
        for i, (what, inner) in enumerate(zip(heads, node.blocks, strict=False)):
            number = f" {i}" if what == "branch" else ""
            yield from _lines(inner, f"{what}{number} ", indent + 2 * _INDENT)
    yield f"{indent}{_INDENT}yield ({', '.join(map(names.read, block.results))})"
    yield f"{indent}}}"


class _Names:
    """The names of a block's values and nodes."""

    def __init__(self, block: BlockGraph) -> None:
        self._nodes: dict[Node, str] = {}
        self._parameters = {p.root: f"%{i}" for i, p in enumerate(block.parameters)}
        seen: dict[str, int] = {}
        for node in block.nodes:
            name = node.instruction.name
            count = seen[name] = seen.get(name, 0) + 1
            self._nodes[node] = f"%{name}" if count == 1 else f"%{name}@{count}"

    def node(self, node: Node) -> str:
        """The node's name; with a question mark where it is not in the block."""
        return self._nodes.get(node) or f"%{node.instruction.name}?"

    def of(self, value: Value) -> str:
        """The name of a value."""
        root = value.root
        if root.node is None:
            return self._parameters.get(root, "token" if root.type is None else "%?")
        if root.type is None:
            return f"token of {self.node(root.node)}"
        if root.node.kind is NodeKind.CHEAP:
            return _cheap(root.node)
        several = len(root.node.results) > 1
        return self.node(root.node) + (f"#{root.index}" if several else "")

    def read(self, value: Value) -> str:
        """A value as it is read: its name, and the barrier through which it is read."""
        if value.barrier is None:
            return self.of(value)
        return f"{'fence' if value.barrier.is_fence else 'barrier'}({self.of(value)})"


def _cheap(node: Node) -> str:
    """A constant, or what is made of constants, spelled out."""
    type, opcode = _types(node.results), node.instruction.opcode
    if opcode == "broadcast" and node.operands:
        source = node.operands[0].root.node
        return f"{type}({'' if source is None else _cheap(source)})"
    if opcode != "constant":
        return f"{type}({opcode})"
    return _scalar(node) or f"{type}({node.instruction.name})"


def _scalar(node: Node) -> str:
    """The value of a constant of one integer or predicate, or an empty string."""
    type = node.results[0].type
    if type is None or type.shape or type.numpy.kind not in "biu":
        return ""
    literal = LiteralProto.FromString(node.instruction.proto.literal)
    field: Any = getattr(literal, {"pred": "preds"}.get(type.dtype, f"{type.dtype}s"))
    if isinstance(field, bytes):
        field = np.frombuffer(field, type.numpy.newbyteorder("<"))
    return str(field[0]) if len(field) == 1 else ""


def _type(type: TensorType | None) -> str:
    return "token" if type is None else str(type)


def _types(values: Iterable[Value]) -> str:
    types = [_type(v.type) for v in values]
    return types[0] if len(types) == 1 else f"({', '.join(types)})"


def _node(node: Node, names: _Names, block: BlockGraph) -> str:
    operands = ", ".join(map(names.read, node.operands))
    text = (
        f"{names.node(node)} = {node.instruction.opcode} {_types(node.results)} ({operands})"
        + "".join(f" {fact}" for fact in _facts(node, block))
    )
    before = [*node.order, *(n for v in node.operands for n in v.order)]
    if before:
        text += f" after ({', '.join(names.node(n) for n in dict.fromkeys(before))})"
    source = node.instruction.source if node.is_runtime else ""
    return text + (f" at {source}" if source else "")


def _facts(node: Node, block: BlockGraph) -> Iterator[str]:
    """Facts about a node besides its data: attributes of its collective or loop, and results of passes."""
    if node.collective is not None:
        if str(node.collective.kind) != node.instruction.opcode:
            yield f"as {node.collective.kind}"
        yield from attributes(node.collective)
    if node.kind is NodeKind.LOOP:
        trips = trip_count(node)
        yield "trips ?" if trips is None else f"trips {trips}"
    unread = block.unread.get(node)
    if unread is not None:  # the iterations in which it is read, for each device
        yield f"read {nested(unread.bounds(unread.cells))}"
    if block.phases.get(node):
        yield f"phase {block.phases[node]}"
    if node in block.crossing:  # (result, carry) pairs
        yield f"carried {nested(carried_results(node, block.results))}"
