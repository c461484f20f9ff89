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

from stretto.collectives.ops import Kind
from stretto.collectives.types import TensorType

from ...edit import Editor
from ...values import BlockGraph, Node, NodeKind, Value
from .batches import Batch, batches
from .context import Context, Rewritten
from .cut import cut_type
from .cutting import Cutting, Plan, is_moved, type_of
from .loops import loop_batches
from .own_parts import OwnPart, Places, own_part, places
from .placed import placed_batches, windows_read
from .rows import Rows, index_dims
from .windows import all_windows, own_windows

# The most nodes of a region.
_LARGEST = 512
# Where a region ends.
_ENDS = frozenset({"dynamic-slice", "scatter"})
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
    ends = _before_ends(editor.block)
    for node in gathers:
        if not any(value in ends for value in node.results):
            continue
        collective = node.collective
        assert collective is not None
        where = places(collective)
        if node in taken or where is None or len(where.place) != context.num_devices:
            continue
        if collective.groups not in facts:
            rows = Rows.of_group(context.known, where)
            facts[collective.groups] = _Facts.of(editor.block, collective.groups, rows)
        plan = _planned(editor, node, context, where, facts[collective.groups], taken)
        if plan is None:
            continue
        Cutting(editor, plan, context, where).apply()
        taken.update(plan.gathers)
        taken.update(plan.batch)
        taken.update(plan.ends)
        found |= dict.fromkeys(plan.gathers, Rewritten(plan.said))
    return found


def _before_ends(block: BlockGraph) -> set[Value]:
    """The values behind which compute leads to a slice or a scatter, where regions end. Few gathers give
    such values, and a search takes much longer than this."""
    found: set[Value] = set()
    for node in reversed(block.nodes):
        if node.kind is not NodeKind.COMPUTE:
            continue
        if node.instruction.opcode in _ENDS or not found.isdisjoint(node.results):
            found.update([value.root for value in node.operands])
    return found


@dataclass(frozen=True)
class _Facts:
    """What is known of the values of a block for groups of devices: which follow from gathers over them, and
    which may differ between members of a group. ``rows``: the bounds of values. ``loops``: their batches."""

    groups: tuple[tuple[int, ...], ...]
    derived: set[Value]
    varying: set[Value]
    rows: Rows
    loops: dict[Node, list[Batch]] = field(default_factory=dict)

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


def _planned(
    editor: Editor,
    gather: Node,
    context: Context,
    where: Places,
    facts: _Facts,
    taken: set[Node],
) -> Plan | None:
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
        self._windows: dict[Node, set[Node] | None] = {}

    def plan(self, gather: Node, dimension: int) -> Plan:
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
            batch = known or Batch((None,) * count + (index,) + (update,) * count, (None,) * count)
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
            if along is not None:
                self._assign(value, along)
        for value, d in zip(node.operands, found.operands, strict=True):
            if d is not None and value.root in self._facts.derived:
                self._assign(value, d)
        return True

    def _batches(self, node: Node) -> Iterator[Batch]:
        operands = [type_of(v) for v in node.operands]
        results = [type_of(v) for v in node.results]
        yield from placed_batches(node, self._rows)
        yield from batches(node.instruction, operands, results, self._where.parts)
        if node.instruction.opcode == "while":
            loops = self._facts.loops
            if node not in loops:
                loops[node] = list(loop_batches(node.instruction, self._where.parts))
            yield from loops[node]

    def _fits(self, node: Node, batch: Batch) -> bool:
        some = False
        for value, d in zip(node.operands, batch.operands, strict=True):
            if value.root not in self._facts.derived:
                continue
            if d is None and self._is_made_of_windows(node, value):
                continue
            if d is None or self._dims.get(value.root, d) != d:
                return False
            some = some or value.root in self._dims
        for value, along in zip(node.results, batch.results, strict=True):
            if self._dims.get(value.root, along) != along:
                return False
            some = some or value.root in self._dims
        return some

    def _is_made_of_windows(self, node: Node, value: Value) -> bool:
        """Whether an operand is an update of rows that is made of the same rows of the array (`placed`)."""
        if node.instruction.opcode != "dynamic-update-slice" or value is not node.operands[1]:
            return False
        if node not in self._windows:
            self._windows[node] = windows_read(
                self._editor, node, self._context.known, self._facts.derived
            )
        return self._windows[node] is not None

    def _pruned(self) -> Plan:
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
            dims |= {v: self._dims[v] for v in node.results if v in self._dims}
        plan = Plan(gathers, dims, nodes, self._slices, anchors=self._anchors, ends=self._ends)
        cut = {own.node for parts in self._slices.values() for own in parts} | self._through
        cut.update(self._ends)
        for node in nodes:
            made = self._windows.get(node)
            if made is not None and self._batch[node].operands[1] is None:
                plan.windows[node] = made
                cut |= made
        for value in dims:
            uses = self._editor.uses(value)
            if all(u.node in nodes or u.node in cut for u in uses):
                continue
            if value.node in gathers or value in self._facts.varying:
                raise _Failed
            plan.whole.append(value)
        self._check(plan)
        return plan

    def _check(self, plan: Plan) -> None:
        """Whatever is sent is the same on all devices of a group."""
        sends = bool(plan.whole) or _exchanges(plan)
        if sends and any(v in self._facts.varying for n in plan.batch for v in n.results):
            raise _Failed


def _bytes(plan: Plan, parts: int) -> tuple[int, int]:
    """The bytes that a device sends, times ``parts / (parts - 1)``: before and after. An all-gather and an
    all-to-all send all but one part of what the device has then."""
    before = after = 0
    for gather in plan.gathers:
        value = gather.results[0]
        before += type_of(value).nbytes
        if is_moved(gather, plan):
            after += _filled(type_of(value), plan.dims[value], parts)
    for value, slices in plan.slices.items():
        others = {part.dimension for part in slices} - {plan.dims[value]}
        after += len(others) * _filled(type_of(value), plan.dims[value], parts)
    for value in plan.whole:
        after += cut_type(type_of(value), plan.dims[value], parts).nbytes * parts
    return before, after


def _filled(whole: TensorType, dimension: int, parts: int) -> int:
    return cut_type(whole, dimension, parts).nbytes


def _said(plan: Plan) -> str:
    names = list(dict.fromkeys(n.instruction.name for n in (*plan.batch, *plan.ends)))
    more = ", …" if len(names) > 4 else ""
    what = f" ({', '.join(names[:4])}{more})" if names else ""
    if not _exchanges(plan):
        return f"goes: every device computes its own part{what}"
    if not names:
        return "becomes an all-to-all: every device reads its own part of another dimension"
    return f"becomes all-to-alls: every device computes a part along another dimension{what}"


def _exchanges(plan: Plan) -> int:
    """How many all-to-alls there are."""
    moved = sum(is_moved(gather, plan) for gather in plan.gathers)
    return moved + sum(
        len({part.dimension for part in slices} - {plan.dims[value]})
        for value, slices in plan.slices.items()
    )
