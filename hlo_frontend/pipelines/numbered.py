"""Gives arrays that are divided over the stages, of which each takes rows by number, to all of them.

What belongs to a microbatch and is not handed on with it, as its segments and positions, a stage takes
from an array of all microbatches, by the number of the one that it works on. Where such an array is
divided over the stages, XLA lets all of them gather the numbers in each iteration, look up the rows that
they have, zeros for others, and sum that up. A stage takes its own row of the sum.

`numbered` follows that iteration by iteration and device by device: which row of which device's part each
value holds, where it is known to hold such rows and zeros, and nothing else. Numbers of rows must follow
from the program, the array must not change in the loop, and a sum may have no more than one row at any
place, and zeros beside it. The array is gathered before the loop then, and where anything else reads such
a value it reads rows of the gathered array instead, by a number that is looked up by device and iteration.
So no bit of it changes. Each device holds all rows then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from stretto.collectives.ops import Kind, Reduction

from ..builder import resized
from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Instruction, Module, leaf_types
from ..passes.valid import tensors
from ..passes.valid.known import FOLLOWED, evaluate, is_reshape, is_row_major, starts_of, strides
from ..passes.valid.trace import Trace, is_transfer
from ..values import Node, Value, operand_shape, result_shape
from .chains import Followed
from .chunk import entry_of
from .connected import connected, joined
from .constants import behind
from .emit import Builder, Editor
from .pieces import instructions_of
from .recognize import follow, is_candidate
from .rewrite import laid_out, shaped, without_sign_of_zero
from .travelling import counter_of

# Sums of one number and zeros give that number.
_SUMS = frozenset({Reduction.SUM, Reduction.OR})


@dataclass
class Numbered:
    """A module with such arrays gathered before its loops. ``held``: by name of a loop that takes rows of
    them, bytes of rows that each device holds besides its own; arrays that two loops take rows of count
    once."""

    module: bytes
    held: Mapping[str, int] = field(default_factory=dict)


def numbered(
    serialized: bytes, num_replicas: int, num_partitions: int, but: Collection[str] = ()
) -> Numbered:
    """The module with such arrays gathered before its loops, ``but`` those of these names. Raises
    `GaveUpError`."""
    module = Module.parse(serialized)
    entry = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
    loops = [n for n in entry.nodes if is_candidate(n) and n.instruction.name not in but]
    loops = [n for n in loops if _communicates(n) and _is_plain(module, n)]
    if num_replicas > 1 or not loops:
        return Numbered(serialized)
    followed = follow(entry, num_replicas, num_partitions)
    editor = Editor(module)
    b = editor.within(module.entry)
    gathered: dict[tuple[Any, ...], Any] = {}
    held: dict[str, int] = {}
    for node in loops:
        counter = counter_of(followed, node) if node in followed.origins else None
        taken = [] if counter is None else _taken(followed, node)
        if counter is None or not taken:
            continue
        b.metadata = node.instruction.proto.metadata
        held[node.instruction.name] = 0
        for one in taken:
            if one.key not in gathered:
                gathered[one.key] = one.gather(b)
                held[node.instruction.name] += one.held
        _change(editor, b, node.instruction, counter, taken, gathered)
    if not held:
        return Numbered(serialized)
    editor.sweep(module.entry)
    return Numbered(editor.finish(), held)


def _communicates(node: Node) -> bool:
    """Whether stages of one pipeline communicate in the body of a loop, not only by permutes."""
    ring = connected(node)
    return any(
        len({ring.get(d, frozenset({d})) for d in group}) < len(group)
        for n in node.blocks[1].nodes
        if n.collective is not None and not is_transfer(n)
        for group in n.collective.groups
    )


def _is_plain(module: Module, node: Node) -> bool:
    """Whether a loop carries a tuple of arrays, each element of which is read alone, and its body and
    condition are those of no other."""
    loop = node.instruction
    body = loop.called[0]
    readers = [i for i in loop.computation.instructions if loop in i.operands]
    others = [
        i for c in module.computations for i in c.instructions
        if i is not loop and not set(loop.called).isdisjoint(i.called)
    ]  # fmt: skip
    return (
        not others
        and loop.operands[0].opcode == body.root.opcode == "tuple"
        and len(node.blocks[1].parameters) == len(body.root.operands)
        and all(len(c.parameters) == 1 for c in loop.called)
        and all(i.opcode == "get-tuple-element" for i in readers)
        and loop is not loop.computation.root
        and not any(i.control_predecessors for c in loop.called for i in c.instructions)
    )


@dataclass(frozen=True)
class _Rows:
    """Rows of the array at position ``source`` of the carry, which follow each other in row-major order,
    and zeros. ``numbers``: int64[devices, rows], what each of them is: 1 + device * (rows of its part) +
    row, or 0 for positive zeros; ``source`` is None if all are. ``moved``: whether a collective gave them,
    or the numbers by which they were taken; ``plus``: whether that added zeros to them."""

    source: int | None
    numbers: np.ndarray
    moved: bool = False
    plus: bool = False

    def leading(self, shape: Sequence[int]) -> int | None:
        """How many dimensions of an array of this shape count rows; None if these are no whole dimensions."""
        count = self.numbers.shape[1]
        return next((k for k in range(len(shape), -1, -1) if prod(shape[:k]) == count), None)

    def taking(self, numbers: np.ndarray) -> _Rows:
        """Others of these rows."""
        return replace(self, numbers=numbers.reshape(len(self.numbers), -1))


class _Iteration:
    """What values of the body hold in one iteration. ``rows``: by value, where it is known that they are such
    rows; ``numbers``: known integers of which collectives are a part, in the form of `tensors`."""

    def __init__(
        self, followed: Followed, node: Node, trace: Trace, arrays: Mapping[Value, _Rows]
    ) -> None:
        self.forward, self.trace = followed.forward, trace
        self.devices = followed.forward.num_devices
        self.rows = dict(arrays)
        self.numbers: dict[Value, np.ndarray] = {}
        for inner in node.blocks[1].nodes:
            self._node(inner)

    def known(self, value: Value) -> np.ndarray | None:
        own = self.numbers.get(value.root)
        return self.forward.known(self.trace, value) if own is None else own

    def _zero(self, value: Value) -> bool:
        """Whether a value is positive zeros on all devices."""
        known, rows = self.known(value), self.forward.zero(self.trace, value)
        return (known is not None and not known.any()) or (rows is not None and bool(rows.all()))

    def _of(self, value: Value, count: int) -> _Rows | None:
        """The rows of a value, which are ``count`` if it is nothing but zeros."""
        found = self.rows.get(value.root)
        if found is None and self._zero(value):
            return _Rows(None, np.zeros((self.devices, count), np.int64))
        return found

    def _node(self, node: Node) -> None:
        if node.collective is not None:
            for operand, result in zip(node.operands, node.results, strict=False):
                self._collective(node, operand, result)
            return
        if len(node.results) != 1 or not node.operands:
            return
        (result,) = node.results
        if result.type is None:
            return
        if result.type.dtype in FOLLOWED and self.forward.known(self.trace, result) is None:
            operands = [None if o.type is None else self.known(o) for o in node.operands]
            if any(o.root in self.numbers for o in node.operands):
                value = evaluate(node, operands)
                if value is not None:
                    self.numbers[result] = value
        found = self._moved(node)
        if found is not None and found.source is not None:
            by_numbers = any(o.root in self.numbers for o in node.operands)
            self.rows[result] = replace(found, moved=True) if by_numbers else found

    def _moved(self, node: Node) -> _Rows | None:
        opcode = node.instruction.opcode
        if opcode == "select":
            return self._select(node)
        own = self.rows.get(node.operands[0].root)
        if own is None:
            return None
        if opcode in ("copy", "reshape") or (opcode == "bitcast" and is_reshape(node)):
            return own
        if opcode == "transpose":
            shape = operand_shape(node)
            order = [d for d in node.instruction.proto.dimensions if shape[d] != 1]
            return own if order == sorted(order) else None
        if opcode == "gather":
            return self._gather(node, own)
        if opcode == "broadcast":
            return self._broadcast(node, own)
        if opcode in ("slice", "dynamic-slice"):
            return self._slice(node, own)
        return None

    def _slice(self, node: Node, own: _Rows) -> _Rows | None:
        shape, sizes = operand_shape(node), result_shape(node)
        k = own.leading(shape)
        if k is None or list(shape[k:]) != list(sizes[k:]):
            return None
        whole = own.numbers.reshape(self.devices, *shape[:k])
        if node.instruction.opcode == "slice":
            return own.taking(whole[(slice(None), *strides(node)[:k])])
        starts = starts_of(node, [self.known(o) for o in node.operands], 1)
        if starts is None:
            return None
        return own.taking(tensors.window(whole, shape[:k], starts[:, :k], sizes[:k]))

    def _broadcast(self, node: Node, own: _Rows) -> _Rows | None:
        shape, sizes = operand_shape(node), result_shape(node)
        k, dimensions = own.leading(shape), list(node.instruction.proto.dimensions)
        if k is None:
            return None
        outer = len(sizes) - len(shape[k:])
        if dimensions[k:] != list(range(outer, len(sizes))) or any(
            shape[i] != sizes[d] for i, d in enumerate(dimensions)
        ):
            return None
        if prod(sizes[:outer]) > tensors.MOST_ELEMENTS:
            return None
        whole = own.numbers.reshape(self.devices, *shape[:k])
        whole = tensors.broadcast(whole, outer, dimensions[:k])
        return own.taking(np.broadcast_to(whole, (self.devices, *sizes[:outer])))

    def _gather(self, node: Node, own: _Rows) -> _Rows | None:
        proto, shape = node.instruction.proto, operand_shape(node)
        by, sizes = proto.gather_dimension_numbers, list(proto.gather_slice_sizes)
        k, index = own.leading(shape), self.known(node.operands[1])
        if k is None or index is None or list(by.operand_batching_dims):
            return None
        if any(n != 1 for n in sizes[:k]) or sizes[k:] != list(shape[k:]):
            return None
        # Rows must stay whole, one behind the other.
        given, offsets = result_shape(node), list(by.offset_dims)
        batch = [d for d in range(len(given)) if d not in offsets]
        within = [d for d in offsets if given[d] != 1]
        if batch and within and max(batch) > min(within):
            return None
        dimensions = list(operand_shape(node, 1))
        index = np.broadcast_to(index, (self.devices, *dimensions)).astype(np.int64)
        if by.index_vector_dim == len(dimensions):
            index = index[..., None]
        index = np.moveaxis(index, by.index_vector_dim + 1, -1)
        places = [np.zeros(index.shape[:-1], np.int64) for _ in range(k)]
        for n, d in enumerate(by.start_index_map):
            if d < k:
                places[d] = np.clip(index[..., n], 0, shape[d] - 1)
        device = np.arange(self.devices).reshape(-1, *[1] * (index.ndim - 2))
        whole = own.numbers.reshape(self.devices, *shape[:k])
        return own.taking(whole[(np.broadcast_to(device, index.shape[:-1]), *places)])

    def _select(self, node: Node) -> _Rows | None:
        known = self.known(node.operands[0])
        if known is None:
            return None
        if known.all() or not known.any():
            return self.rows.get(node.operands[1 if known.all() else 2].root)
        shape = result_shape(node)
        tracked = [self.rows.get(o.root) for o in node.operands[1:]]
        count = next((r.numbers.shape[1] for r in tracked if r is not None), 0)
        own = [self._of(o, count) for o in node.operands[1:]]
        found = _alike(own)
        if found is None:
            return None
        k = found.leading(shape)
        if k is None:
            return None
        if known.ndim > 1:
            if any(n != 1 for n in known.shape[1 + k :]):
                return None
            known = known.reshape(known.shape[: 1 + k])
        else:
            known = known.reshape(-1, *[1] * k)
        known = np.broadcast_to(known, (self.devices, *shape[:k])).reshape(self.devices, -1)
        assert own[0] is not None and own[1] is not None
        return found.taking(np.where(known, own[0].numbers, own[1].numbers))

    def _collective(self, node: Node, operand: Value, result: Value) -> None:
        collective = node.collective
        assert collective is not None
        if operand.type is None or result.type is None or is_transfer(node):
            return
        if sorted(d for g in collective.groups for d in g) != list(range(self.devices)):
            return
        own = self.rows.get(operand.root)
        if collective.kind is Kind.ALL_GATHER:
            axis = collective.dimension
            known = self.known(operand)
            if known is not None and prod(result.type.shape) <= tensors.MOST_ELEMENTS:
                whole = np.broadcast_to(known, (self.devices, *operand.type.shape))
                self.numbers[result] = _gathered(whole, collective.groups, axis)
            k = None if own is None else own.leading(operand.type.shape)
            if own is not None and k is not None and axis < k:
                whole = own.numbers.reshape(self.devices, *operand.type.shape[:k])
                found = own.taking(_gathered(whole, collective.groups, axis))
                self.rows[result] = replace(found, moved=True)
        elif own is not None and collective.kind is Kind.ALL_REDUCE:
            floats = result.type.dtype not in FOLLOWED
            # Of a device alone nothing is a sum.
            alone = any(len(group) == 1 for group in collective.groups)
            if collective.reduction not in _SUMS or result.type.dtype[0] == "c" or alone:
                return
            numbers = np.zeros_like(own.numbers)
            for group in collective.groups:
                members = own.numbers[list(group)]
                if ((members != 0).sum(0) > 1).any():
                    return
                numbers[list(group)] = members.sum(0)
            plus = own.plus or floats
            self.rows[result] = replace(own, numbers=numbers, moved=True, plus=plus)


def _unchanged(node: Node, devices: int) -> dict[Value, _Rows]:
    """What a loop carries and does not change, as rows of itself."""
    block = node.blocks[1]
    found = {}
    for position, parameter in enumerate(block.parameters):
        type = parameter.type
        if block.results[position].root is not parameter or type is None or not type.shape:
            continue
        count = type.shape[0]
        if 0 < count * devices <= tensors.MOST_ELEMENTS:
            numbers = 1 + np.arange(devices * count).reshape(devices, count)
            found[parameter] = _Rows(position, numbers)
    return found


def _gathered(whole: np.ndarray, groups: Sequence[Sequence[int]], axis: int) -> np.ndarray:
    """What members of groups have, by device, along dimension ``axis`` of an array for each of them."""
    parts = {d: np.concatenate([whole[m] for m in group], axis) for group in groups for d in group}
    return np.stack([parts[d] for d in range(len(whole))])


def _alike(own: Sequence[_Rows | None]) -> _Rows | None:
    """What is common to two values of which a select takes elements; None if they are of different arrays."""
    found: _Rows | None = None
    for rows in own:
        if rows is None:
            return None
        if rows.source is None:
            continue
        if found is not None and (
            (found.source, found.plus) != (rows.source, rows.plus)
            or found.numbers.shape != rows.numbers.shape
        ):
            return None
        moved = rows.moved or (found is not None and found.moved)
        found = replace(rows, moved=moved)
    return found


@dataclass(eq=False)
class _Taken:
    """A value of the body that is rows of ``array``, a value of the entry computation, and zeros, as it is
    read. ``numbers``: int64[iterations, devices, rows], as in `_Rows`. ``groups``: of devices that take
    rows only of each other's parts, all of one size; a pipeline is within one of them."""

    reads: Sequence[Instruction]
    array: Instruction
    numbers: np.ndarray
    plus: bool
    groups: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What arrays that are gathered alike have in common."""
        return self.array, self.groups if self.crosses else ()

    @property
    def _count(self) -> int:
        """How many rows each device has."""
        return int(self.array.shape.dimensions[0])

    @property
    def crosses(self) -> bool:
        """Whether a device takes rows of others."""
        devices = np.arange(self.numbers.shape[1])[None, :, None]
        of_others = (self.numbers - 1) // self._count != devices
        return bool((of_others & (self.numbers > 0)).any())

    @property
    def held(self) -> int:
        """Bytes of rows that each device holds besides its own."""
        type = leaf_types(self.array.shape, self.array)[0]
        assert type is not None
        return type.nbytes * (len(self.groups[0]) - 1) if self.crosses else 0

    def gather(self, b: Builder) -> Any:
        """Add the array of all rows of a group to the entry computation."""
        sizes, own = list(self.array.shape.dimensions), self.array.proto
        if not is_row_major(self.array.shape):
            own = b.add("copy", resized(self.array.shape, sizes), [own])
        if not self.crosses:
            return own
        sizes[0] *= len(self.groups[0])
        made = b.add(
            "all-gather", resized(self.array.shape, sizes), [own], channel_id=1,
            use_global_device_ids=True, dimensions=[0],
        )  # fmt: skip
        for group in self.groups:
            made.replica_groups.add(replica_ids=group)
        return made

    def emit(self, b: Builder, array: Any, counter: Any) -> Any:
        """Add what stands for it to the body. ``array``: what `gather` gave."""
        shape = self.reads[0].shape
        device = b.device()
        where = [device, counter]
        parts = []
        for n in range(self.numbers.shape[2]):
            numbers = self.numbers[:, :, n].T  # by device and iteration
            part = entry_of(b, array, [b.lookup(self._places(numbers), where)])
            part = b.reshape(part, [1, *part.shape.dimensions])
            is_zero = numbers == 0
            if is_zero.any():
                given = b.is_one(b.lookup((~is_zero).astype(np.int32), where))
                part = b.select(given, part, b.zeros(part.shape))
            parts.append(part)
        value = parts[0]
        if len(parts) > 1:
            whole = resized(value.shape, [len(parts), *list(value.shape.dimensions)[1:]])
            value = b.add("concatenate", whole, parts, dimensions=[0])
        value = shaped(b, value, shape)
        if self.plus:
            value = without_sign_of_zero(b, value)
        return laid_out(b, value, shape)

    def _places(self, numbers: np.ndarray) -> np.ndarray:
        """The rows of what `gather` gives that have these numbers; any row for zeros."""
        device, row = np.divmod(np.maximum(numbers - 1, 0), self._count)
        if not self.crosses:
            return row.astype(np.int32)
        place = np.zeros(self.numbers.shape[1], np.int64)
        for group in self.groups:
            place[list(group)] = range(len(group))
        return (place[device] * self._count + row).astype(np.int32)


def _taken(followed: Followed, node: Node) -> list[_Taken]:
    """What a loop reads of such arrays, where collectives are a part of it."""
    block, body = node.blocks[1], node.instruction.called[0]
    devices = range(followed.forward.num_devices)
    stages = [(d, other) for d, own in connected(node).items() for other in own]
    arrays = _unchanged(node, len(devices))
    followed_by = [
        _Iteration(followed, node, trace, arrays) for trace in followed.origins[node].iterations
    ]
    tracked = {
        value for value in followed_by[0].rows
        if all(value in at.rows for at in followed_by)
        and len({(r.source, r.moved, r.plus) for r in (at.rows[value] for at in followed_by)}) == 1
    }  # fmt: skip
    inits = node.instruction.operands[0].operands
    read = {r.root for r in block.results}
    for inner in block.nodes:
        if not all(result in tracked for result in inner.results):
            read |= {o.root for o in inner.operands}
    found = []
    for value in tracked & read:
        rows = followed_by[0].rows[value]
        reads = [] if value.node is None else instructions_of(value)
        if not rows.moved or rows.source is None or not reads:
            continue
        if reads[0].computation is not body:
            continue
        numbers = np.stack([at.rows[value].numbers for at in followed_by])
        array = behind(inits[rows.source])
        count = array.shape.dimensions[0]
        owners = {
            (d, (number - 1) // count)
            for d in devices for number in np.unique(numbers[:, d]).tolist() if number
        }  # fmt: skip
        joint = joined([*stages, *owners, *((d, d) for d in devices)])
        groups = tuple(dict.fromkeys(tuple(sorted(joint[d])) for d in devices))
        if len(set(map(len, groups))) != 1:
            groups = (tuple(devices),)
        if numbers.shape[2] <= len(groups[0]):
            found.append(_Taken(reads, array, numbers, rows.plus, groups))
    place = {i: n for n, i in enumerate(body.instructions)}
    return sorted(found, key=lambda taken: place[taken.reads[0]])


def _change(
    editor: Editor,
    b: Builder,
    loop: Instruction,
    counter: int,
    taken: Sequence[_Taken],
    gathered: Mapping[tuple[Any, ...], Any],
) -> None:
    """Let a loop carry what is gathered, behind all else, and take rows of it. ``b``: adds to the entry
    computation."""
    keys = list(dict.fromkeys(one.key for one in taken))
    init = [*(o.proto for o in loop.operands[0].operands), *(gathered[key] for key in keys)]
    carried = editor.carry(b, loop, init).shape
    body = loop.called[0]
    inner = editor.within(body)
    parameter, root = inner.own(body.parameters[0]), inner.own(body.root)
    parameter.shape.CopyFrom(carried)
    arrays = {key: inner.element(parameter, n) for n, key in enumerate(keys, len(init) - len(keys))}
    stands: dict[Instruction, Any] = {}
    for one in taken:
        inner.metadata = one.reads[0].proto.metadata
        number = inner.element(parameter, counter)
        value = one.emit(inner, arrays[one.key], number)
        stands |= dict.fromkeys(one.reads, value)
    editor.redirect(body, stands, body.instructions)
    root.operand_ids.extend(array.id for array in arrays.values())
    root.shape.CopyFrom(carried)
    inner.finish(root)
    editor.sweep(body)
