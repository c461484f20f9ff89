"""Puts the nodes of a region that is cut (`regions`) into its block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stretto.collectives.ops import Collective
from stretto.collectives.types import TensorType

from ...edit import Editor
from ...graph import Instruction
from ...values import Node, NodeKind, Value
from .batches import Batch
from .context import Context
from .cut import Slicer, cut_node, exchanged, gathered, recut
from .loops import cut_loop
from .own_parts import OwnPart, Places, cut_more
from .placed import is_placed, placed_nodes
from .steps import Step, emit


@dataclass
class Plan:
    """A region. ``dims``: the dimension along which each value is cut. ``batch``: the batch of each node.
    ``slices``: the own parts that are read of each value. ``whole``: values that are read whole behind it.
    ``anchors``: nodes that are not in the block, and behind which of its nodes they belong.
    ``ends``: scatters into what each device has, which need only its part of indices and updates.
    ``windows``: what makes updates of rows from the same rows."""

    gathers: list[Node]
    dims: dict[Value, int]
    batch: dict[Node, Batch]
    slices: dict[Value, list[OwnPart]]
    whole: list[Value] = field(default_factory=list)
    anchors: dict[Node, Node | None] = field(default_factory=dict)
    ends: dict[Node, Batch] = field(default_factory=dict)
    windows: dict[Node, set[Node]] = field(default_factory=dict)
    said: str = ""


def is_moved(gather: Node, plan: Plan) -> bool:
    collective = gather.collective
    assert collective is not None
    return plan.dims[gather.results[0]] != collective.dimension


class Cutting:
    """Puts the nodes of a plan into the block."""

    def __init__(self, editor: Editor, plan: Plan, context: Context, where: Places) -> None:
        self._editor, self._plan, self._parts = editor, plan, where.parts
        self._where, self._context = where, context
        self._cut: dict[Value, Value] = {}
        self._own: Value | None = None
        collective = plan.gathers[0].collective
        assert collective is not None
        self._collective: Collective = collective
        self._like: Instruction = plan.gathers[0].instruction

    def apply(self) -> None:
        for gather in self._plan.gathers:
            self._gather(gather)
        for node in sorted(self._plan.batch, key=lambda n: n.position):
            self._node(node, self._plan.batch[node])
        for value, slices in self._plan.slices.items():
            self._slices(value, slices)
        for node in sorted(self._plan.ends, key=lambda n: n.position):
            self._end(node, self._plan.ends[node])
        for value in self._plan.whole:
            self._whole(value)

    def _gather(self, gather: Node) -> None:
        (value,) = gather.results
        collective = gather.collective
        assert collective is not None
        operand = gather.operands[0]
        dimension = self._plan.dims[value]
        if dimension == collective.dimension:
            self._cut[value] = operand.view(gather.order)
            self._editor.remove(gather)
            return
        ahead, behind = recut(
            type_of(value), collective.dimension, dimension, self._parts, gather.instruction
        )
        nodes, sent = emit(ahead, operand)
        self._editor.put_ahead(gather, nodes)
        result = Value(sent.type, gather, 0)
        self._editor.change(gather, [sent], [result], exchanged(collective, sent))
        nodes, self._cut[value] = emit(behind, result)
        self._editor.put_behind(gather, nodes)

    def _end(self, node: Node, batch: Batch) -> None:
        made = cut_node(node, batch, self._operands(node, batch), self._parts)
        self._editor.put_behind(node, [made])
        for old, new in zip(node.results, made.results, strict=True):
            self._editor.replace(old, new)
        self._editor.remove(node)

    def _node(self, node: Node, batch: Batch) -> None:
        operands = self._operands(node, batch)
        if node.instruction.opcode == "while":
            made = [cut_loop(node, batch, operands, self._parts)]
        elif is_placed(node, batch):
            windows = self._plan.windows.get(node, set())
            made = placed_nodes(node, batch, operands, self._slicer(node), self._parts, windows)
        else:
            made = [cut_node(node, batch, operands, self._parts)]
        self._editor.put_behind(self._place(node), made)
        for old, new, d in zip(node.results, made[-1].results, batch.results, strict=True):
            if d is None:
                self._editor.replace(old, new)
            else:
                self._cut[old] = new

    def _operands(self, node: Node, batch: Batch) -> list[Value]:
        operands: list[Value] = []
        for value, d in zip(node.operands, batch.operands, strict=True):
            if d is None:
                operands.append(value)
            elif value.root in self._cut:
                operands.append(self._cut[value.root].view(value.order))
            else:
                nodes, part = self._slicer(node).part(value, d, self._parts)
                self._editor.put_ahead(node, nodes)
                operands.append(part)
        return operands

    def _place(self, node: Node) -> Node:
        return self._plan.anchors.get(node) or node

    def _slicer(self, before: Node) -> Slicer:
        slicer, own_id = Slicer.of(self._context.known, self._where.place, before.instruction)
        if self._own is None:
            self._own = own_id.results[0]
            first = min((*self._plan.batch, *self._plan.ends), key=lambda n: n.position)
            self._editor.put_ahead(first, [own_id])
        slicer.own = self._own
        return slicer

    def _slices(self, value: Value, slices: Sequence[OwnPart]) -> None:
        given = self._plan.dims[value]
        parts: dict[int, Value] = {given: self._cut[value]}
        for own in slices:
            if own.dimension not in parts:
                parts[own.dimension] = self._exchange(value, given, own.dimension)
            part = parts[own.dimension]
            if own.cuts_more:
                self._editor.replace(own.node.results[0], cut_more(self._editor, own, part))
            else:
                assert part.type == own.node.results[0].type
                self._editor.replace(own.node.results[0], part.view(own.order))
            self._editor.remove(own.node)

    def _exchange(self, value: Value, given: int, wanted: int) -> Value:
        assert value.node is not None
        behind_of = self._place(value.node)
        ahead, behind = recut(type_of(value), given, wanted, self._parts, self._like)
        first, sent = emit(ahead, self._cut[value])
        node = self._communicating(sent, exchanged(self._collective, sent))
        last, part = emit(behind, node.results[0])
        self._editor.put_behind(behind_of, [*first, node, *last])
        return part

    def _whole(self, value: Value) -> None:
        part, behind_of = self._cut[value], value.node
        assert behind_of is not None
        dimension, whole = self._plan.dims[value], type_of(value)
        node = self._communicating(part, gathered(self._collective, part, dimension, self._parts))
        result = node.results[0]
        nodes = [node]
        if result.type != whole:
            more, result = emit([Step("slice", type_of(result), whole, self._like)], result)
            nodes += more
        self._editor.put_behind(behind_of, nodes)
        self._editor.replace(value, result)

    def _communicating(self, operand: Value, collective: Collective) -> Node:
        node = Node(NodeKind.COLLECTIVE, self._like, -1, [operand])
        node.collective = collective
        node.results = [Value(collective.results[0], node, 0)]
        return node


def type_of(value: Value) -> TensorType:
    assert value.type is not None
    return value.type
