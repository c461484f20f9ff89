"""Cuts ops that work on an array batch by batch, where XLA gathers all of it on every device.

XLA's partitioner gathers an array whole for an op that it cannot partition, runs the op on all of it on every
device, and cuts out each device's part. Here each device computes a part of its own. The *region* of a gather
is what follows from it up to those slices, with the other gathers that it needs. Along the region each value
is cut along one dimension, as the table of ops says (`batches`):

- Where that is the dimension of the gather, nothing is sent: the device has its part already.
- Where it is another one, devices exchange parts by an all-to-all, as for transforms in `fourier`; and again
  at a slice along another dimension than that.
- What is read whole behind the region is gathered there. Ops from which no slice follows stay whole.

The rewrite is done where no gather of the region is left and no more bytes are sent than before. Exchanged
and gathered values must be the same on all devices of a group: nothing in such a region reads the device's
own values.

Bits: each element is computed from the same numbers by the same op. XLA chooses kernels by shapes, so
libraries may round differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stretto.collectives.ops import Collective, Kind
from stretto.collectives.types import TensorType

from ...edit import Editor
from ...graph import Instruction
from ...values import BlockGraph, Node, NodeKind, Value
from .batches import Batch, batches
from .context import Context, Rewritten
from .cut import Slicer, cut_node, cut_type, exchanged, gathered, recut
from .own_parts import OwnPart, Places, cut_more, own_part, places
from .placed import is_placed, placed_batches, placed_nodes
from .rows import Rows, index_dims
from .steps import Step, emit
from .windows import all_windows, own_windows

# The most nodes of a region.
_LARGEST = 512
# How much more than before may be sent, where a dimension is filled up.
_TOLERANCE = 1.1
# Collectives whose results are the same on all members of a group.
_EQUAL = frozenset({Kind.ALL_GATHER, Kind.ALL_REDUCE})


def cut_regions(editor: Editor, nodes: Sequence[Node], context: Context) -> dict[Node, Rewritten]:
    """Rewrite those of ``nodes``, the collectives of a block, whose regions can be cut."""
    found: dict[Node, Rewritten] = {}
    gathers = [n for n in nodes if n.collective and n.collective.kind is Kind.ALL_GATHER]
    if not gathers or not context.known.has_id:
        return found
    facts: dict[tuple[tuple[int, ...], ...], _Facts] = {}
    taken: set[Node] = set()
    for node in gathers:
        collective = node.collective
        assert collective is not None
        where = places(collective)
        if node in taken or where is None or len(where.place) != context.num_devices:
            continue
        if collective.groups not in facts:
            rows = Rows(context.known, collective, where)
            facts[collective.groups] = _Facts.of(editor.block, collective.groups, rows)
        plan = _planned(editor, node, context, where, facts[collective.groups], taken)
        if plan is None:
            continue
        _Cutting(editor, plan, context, where).apply()
        taken.update(plan.gathers)
        taken.update(plan.batch)
        taken.update(plan.ends)
        found |= dict.fromkeys(plan.gathers, Rewritten(plan.said))
    return found


@dataclass(frozen=True)
class _Facts:
    """What is known of the values of a block for groups of devices: which follow from gathers over them, and
    which may differ between members of a group. ``rows``: the bounds of values."""

    groups: tuple[tuple[int, ...], ...]
    derived: set[Value]
    varying: set[Value]
    rows: Rows

    @classmethod
    def of(cls, block: BlockGraph, groups: tuple[tuple[int, ...], ...], rows: Rows) -> _Facts:
        derived: set[Value] = set()
        varying: set[Value] = set(block.parameters)
        for node in block.nodes:
            collective = node.collective
            if collective is not None:
                if collective.kind is Kind.ALL_GATHER and collective.groups == groups:
                    derived.update(node.results)
                if collective.kind not in _EQUAL or not _covers(collective.groups, groups):
                    varying.update(node.results)
            elif node.kind is NodeKind.COMPUTE and not node.has_side_effect:
                roots = {v.root for v in node.operands}
                if not roots.isdisjoint(derived):
                    derived.update(node.results)
                if not roots.isdisjoint(varying):
                    varying.update(node.results)
            else:
                varying.update(node.results)
        return cls(groups, derived, varying, rows)


def _covers(larger: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> bool:
    around = {d: i for i, group in enumerate(larger) for d in group}
    return all(len({around.get(d, -1 - d) for d in group}) == 1 for group in groups)


class _Failed(Exception):
    """The region cannot be cut in this way."""


@dataclass
class _Plan:
    """A region. ``dims``: the dimension along which each value is cut. ``batch``: the batch of each node.
    ``slices``: the own parts that are read of each value. ``whole``: values that are read whole behind it.
    ``anchors``: nodes that are not in the block, and behind which of its nodes they belong.
    ``ends``: scatters into what each device has, which need only its part of indices and updates."""

    gathers: list[Node]
    dims: dict[Value, int]
    batch: dict[Node, Batch]
    slices: dict[Value, list[OwnPart]]
    whole: list[Value] = field(default_factory=list)
    anchors: dict[Node, Node | None] = field(default_factory=dict)
    ends: dict[Node, Batch] = field(default_factory=dict)
    said: str = ""


def _planned(
    editor: Editor,
    gather: Node,
    context: Context,
    where: Places,
    facts: _Facts,
    taken: set[Node],
) -> _Plan | None:
    collective = gather.collective
    assert collective is not None
    if not _is_plain(gather, editor, taken):
        return None
    shape = collective.results[0].shape
    own = collective.dimension
    others = [d for d, n in enumerate(shape) if d != own and n > 1]
    others.sort(key=lambda d: (shape[d] % where.parts != 0, d))
    for dimension in (own, *others):
        exchange = dimension != own
        try:
            search = _Search(editor, context, where, facts, taken, exchange=exchange)
            plan = search.plan(gather, dimension)
        except _Failed:
            continue
        before, after = _bytes(plan, where.parts)
        if after <= before * _TOLERANCE:
            plan.said = _said(plan)
            return plan
    return None


def _is_plain(gather: Node, editor: Editor, taken: set[Node]) -> bool:
    collective = gather.collective
    assert collective is not None
    alone = len(gather.results) == 1 and gather not in taken and gather not in editor.ordered
    return alone and bool(collective.results[0].size)


class _Search:
    """Finds how the region of a gather is cut, from the dimension of its result on. ``exchange``: whether
    values are sent, and so must be equal on all devices."""

    def __init__(
        self,
        editor: Editor,
        context: Context,
        where: Places,
        facts: _Facts,
        taken: set[Node],
        *,
        exchange: bool,
    ) -> None:
        self._editor, self._context, self._where = editor, context, where
        self._facts, self._taken, self._exchange = facts, taken, exchange
        self._rows = facts.rows
        self._dims: dict[Value, int] = {}
        self._batch: dict[Node, Batch] = {}
        self._slices: dict[Value, list[OwnPart]] = {}
        self._gathers: list[Node] = []
        self._todo: list[Value] = []
        self._anchors: dict[Node, Node | None] = {}
        self._ends: dict[Node, Batch] = {}
        self._through: set[Node] = set()

    def plan(self, gather: Node, dimension: int) -> _Plan:
        self._assign(gather.results[0], dimension)
        while self._todo:
            value = self._todo.pop()
            for use in self._editor.uses(value):
                node = use.node
                if node is None or use.value.barrier is not None:
                    continue
                part = None
                if node.instruction.opcode == "dynamic-slice" and use.position == 0:
                    part = own_part(node, self._context.known, self._where)
                if part is not None and node not in self._taken:
                    self._slices.setdefault(value, []).append(part)
                elif (found := self._window(value, node)) is not None:
                    whole, part = found
                    if self._visit(whole):
                        self._slices.setdefault(whole.results[0], []).append(part)
                        self._through.add(node)
                elif self._end(node):
                    continue
                elif self._may_be_cut(node):
                    self._visit(node)
            if len(self._batch) > _LARGEST:
                raise _Failed
        return self._pruned()

    def _window(self, value: Value, node: Node) -> tuple[Node, OwnPart] | None:
        """The windows of a whole array of which only those of the own part are read: XLA cuts out what they
        cover. Gives a node for all windows, and the part that is read of its result."""
        uses = self._editor.uses(node.results[0]) if len(node.results) == 1 else ()
        reader = uses[0].node if len(uses) == 1 else None
        if node.instruction.opcode != "dynamic-slice" or reader is None or reader in self._taken:
            return None
        opcode = reader.instruction.opcode
        if opcode != "reduce-window" or len(reader.operands) != 2 or uses[0].position:
            return None
        if uses[0].value.barrier is not None or reader in self._editor.ordered:
            return None
        found = own_windows(node, reader, self._context.known, self._where)
        if found is None:
            return None
        part, type = found
        whole = all_windows(reader, value, type)
        self._anchors[whole] = value.node
        return whole, part

    def _end(self, node: Node) -> bool:
        """Whether the region ends at a scatter: into an array of the device's own, and rows of other parts
        are outside of it."""
        count = len(node.operands) // 2
        if node.instruction.opcode != "scatter" or not self._is_free(node):
            return False
        derived = self._facts.derived
        if any(v.root in derived for v in node.operands[:count]):
            return False
        known = self._ends.get(node)
        for index, update in index_dims(node):
            batch = known or Batch((None,) * count + (index,) + (update,) * count, ())
            dims = list(zip(node.operands, batch.operands, strict=True))[count:]
            read = [(v, d) for v, d in dims if d is not None and v.root in derived]
            if any(self._dims.get(v.root, d) != d for v, d in read):
                continue
            if known is None and not self._rows.misses(node, index):
                continue
            self._ends[node] = batch
            for value, d in read:
                self._assign(value, d)
            return True
        if known is not None:
            raise _Failed
        return False

    def _assign(self, value: Value, dimension: int) -> None:
        value = value.root
        if value in self._dims:
            if self._dims[value] != dimension:
                raise _Failed
            return
        self._dims[value] = dimension
        self._todo.append(value)
        node = value.node
        assert node is not None
        if node.kind is NodeKind.COLLECTIVE:
            if not _is_plain(node, self._editor, self._taken):
                raise _Failed
            self._gathers.append(node)
        elif not self._may_be_cut(node) or not self._visit(node):
            raise _Failed

    def _is_free(self, node: Node) -> bool:
        if node.kind is not NodeKind.COMPUTE or node.has_side_effect:
            return False
        if node in self._taken or node in self._editor.ordered:
            return False
        return all(v.barrier is None and v.type is not None for v in node.operands)

    def _may_be_cut(self, node: Node) -> bool:
        if not self._is_free(node):
            return False
        return not (self._exchange and any(v in self._facts.varying for v in node.results))

    def _visit(self, node: Node) -> bool:
        """Choose the batch of a node of which an operand or a result is cut; whether there is one."""
        known = self._batch.get(node)
        found = next((b for b in self._batches(node) if self._fits(node, b)), None)
        if known is not None:
            if not self._fits(node, known):
                raise _Failed
            return True
        if found is None:
            return False
        self._batch[node] = found
        for value, along in zip(node.results, found.results, strict=True):
            self._assign(value, along)
        for value, d in zip(node.operands, found.operands, strict=True):
            if d is not None and value.root in self._facts.derived:
                self._assign(value, d)
        return True

    def _batches(self, node: Node) -> Iterator[Batch]:
        operands = [_type(v) for v in node.operands]
        results = [_type(v) for v in node.results]
        yield from batches(node.instruction, operands, results, self._where.parts)
        yield from placed_batches(node, self._rows)

    def _fits(self, node: Node, batch: Batch) -> bool:
        some = False
        for value, d in zip(node.operands, batch.operands, strict=True):
            if value.root not in self._facts.derived:
                continue
            if d is None or self._dims.get(value.root, d) != d:
                return False
            some = some or value.root in self._dims
        for value, along in zip(node.results, batch.results, strict=True):
            if self._dims.get(value.root, along) != along:
                return False
            some = some or value.root in self._dims
        return some

    def _pruned(self) -> _Plan:
        """The part of the region from which slices follow."""
        useful: set[Value] = {v.root for end in self._ends for v in end.operands}
        nodes: dict[Node, Batch] = {}
        for node in sorted(self._batch, key=lambda n: -n.position):
            if any(v in self._slices or v in useful for v in node.results):
                nodes[node] = self._batch[node]
                useful.update(v.root for v in node.operands if v.root in self._dims)
        useful.update(self._slices)
        gathers = [g for g in self._gathers if g.results[0] in useful]
        if not (self._slices or self._ends) or not gathers:
            raise _Failed
        dims = {v: d for v, d in self._dims.items() if v in useful}
        for node in nodes:
            for value in node.results:
                dims[value] = self._dims[value]
        plan = _Plan(gathers, dims, nodes, self._slices, anchors=self._anchors, ends=self._ends)
        cut = {own.node for parts in self._slices.values() for own in parts} | self._through
        cut.update(self._ends)
        for value in dims:
            uses = self._editor.uses(value)
            if all(u.node in nodes or u.node in cut for u in uses):
                continue
            if value.node in gathers or value in self._facts.varying:
                raise _Failed
            plan.whole.append(value)
        self._check(plan)
        return plan

    def _check(self, plan: _Plan) -> None:
        """Whatever is sent is the same on all devices of a group."""
        sends = bool(plan.whole) or _exchanges(plan)
        if sends and any(v in self._facts.varying for n in plan.batch for v in n.results):
            raise _Failed


def _moved(gather: Node, plan: _Plan) -> bool:
    collective = gather.collective
    assert collective is not None
    return plan.dims[gather.results[0]] != collective.dimension


def _bytes(plan: _Plan, parts: int) -> tuple[int, int]:
    """The bytes that a device sends, times ``parts / (parts - 1)``: before and after. An all-gather and an
    all-to-all send all but one part of what the device has then."""
    before = after = 0
    for gather in plan.gathers:
        value = gather.results[0]
        before += _type(value).nbytes
        if _moved(gather, plan):
            after += _filled(_type(value), plan.dims[value], parts)
    for value, slices in plan.slices.items():
        others = {part.dimension for part in slices} - {plan.dims[value]}
        after += len(others) * _filled(_type(value), plan.dims[value], parts)
    for value in plan.whole:
        after += cut_type(_type(value), plan.dims[value], parts).nbytes * parts
    return before, after


def _filled(whole: TensorType, dimension: int, parts: int) -> int:
    return cut_type(whole, dimension, parts).nbytes


def _said(plan: _Plan) -> str:
    names = list(dict.fromkeys(n.instruction.name for n in (*plan.batch, *plan.ends)))
    more = ", …" if len(names) > 4 else ""
    what = f" ({', '.join(names[:4])}{more})" if names else ""
    if not _exchanges(plan):
        return f"goes: every device computes its own part{what}"
    if not names:
        return "becomes an all-to-all: every device reads its own part of another dimension"
    return f"becomes all-to-alls: every device computes a part along another dimension{what}"


def _exchanges(plan: _Plan) -> int:
    """How many all-to-alls there are."""
    moved = sum(_moved(gather, plan) for gather in plan.gathers)
    return moved + sum(
        len({part.dimension for part in slices} - {plan.dims[value]})
        for value, slices in plan.slices.items()
    )


class _Cutting:
    """Puts the nodes of a plan into the block."""

    def __init__(self, editor: Editor, plan: _Plan, context: Context, where: Places) -> None:
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
            _type(value), collective.dimension, dimension, self._parts, gather.instruction
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
        if is_placed(node, batch):
            made = placed_nodes(node, batch, operands, self._slicer(node), self._parts)
        else:
            made = [cut_node(node, batch, operands, self._parts)]
        self._editor.put_behind(self._place(node), made)
        self._cut.update(zip(node.results, made[-1].results, strict=True))

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
        ahead, behind = recut(_type(value), given, wanted, self._parts, self._like)
        first, sent = emit(ahead, self._cut[value])
        node = self._communicating(sent, exchanged(self._collective, sent))
        last, part = emit(behind, node.results[0])
        self._editor.put_behind(behind_of, [*first, node, *last])
        return part

    def _whole(self, value: Value) -> None:
        part, behind_of = self._cut[value], value.node
        assert behind_of is not None
        dimension, whole = self._plan.dims[value], _type(value)
        node = self._communicating(part, gathered(self._collective, part, dimension, self._parts))
        result = node.results[0]
        nodes = [node]
        if result.type != whole:
            more, result = emit([Step("slice", _type(result), whole, self._like)], result)
            nodes += more
        self._editor.put_behind(behind_of, nodes)
        self._editor.replace(value, result)

    def _communicating(self, operand: Value, collective: Collective) -> Node:
        node = Node(NodeKind.COLLECTIVE, self._like, -1, [operand])
        node.collective = collective
        node.results = [Value(collective.results[0], node, 0)]
        return node


def _type(value: Value) -> TensorType:
    assert value.type is not None
    return value.type
