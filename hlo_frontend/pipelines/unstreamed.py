"""Gives microbatches that are divided over the stages, and handed on in a loop, to all stages before it.

A schedule runs microbatches in other iterations than they are written in. A stream (see `streams`) arrives
when the written loop needs it. `unstreamed` takes it out of the loop:

- What it holds as the loop begins is gathered before the loop. A read of it becomes a read of the gathered
  array, by a number that is looked up by device and iteration.
- What a stage puts there is put away instead, by iteration, and behind the loop sent to the stages that hold
  it in the end: to each of them what it holds, by a permute.

That is what the program computes, bit for bit: elements are moved in other ways, and zeros are added to them
where they were. But each device holds all microbatches then, and of those it puts away as many rows as the
loop has iterations. Gradients of outputs, with which the stream of a backward pass begins, are computed by
each stage for its own microbatches, between the loops. They are computed for all microbatches instead, by
each stage (`undivided`), so that it can be proved that a microbatch needs nothing of others (`rows`); where
that is not possible, they are gathered too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..builder import resized
from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import COLLECTIVES, Instruction, Module, leaf_types
from ..values import Node
from .chains import Followed
from .chunk import entry_of
from .emit import Builder, Editor
from .pieces import instructions_of
from .recognize import follow, is_candidate
from .refusal import Refusal, about
from .rewrite import laid_out, shaped, without_sign_of_zero
from .sameness import Sameness
from .streams import Row, Stream, streams_of
from .training import dependents
from .travelling import counter_of
from .undivided import Undivided, Whole
from .weights import permute


@dataclass
class Unstreamed:
    """A module without streams. ``held``: by name of a loop that had some, bytes of microbatches that each
    device holds, of what goes into it and comes out of it, and did not; ``whys``: why streams of other loops
    stay."""

    module: bytes
    held: Mapping[str, int] = field(default_factory=dict)
    whys: tuple[str, ...] = ()


def unstreamed(
    serialized: bytes,
    num_replicas: int,
    num_partitions: int,
    *,
    computes: bool,
    but: Collection[str] = (),
) -> Unstreamed:
    """The module with streams taken out of its loops, ``but`` of those of these names. ``computes``: whether
    each stage is to compute what a backward pass begins with for all microbatches. Raises `GaveUpError`."""
    module = Module.parse(serialized)
    entry = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
    loops = [n for n in entry.nodes if is_candidate(n) and n.instruction.name not in but]
    if num_replicas > 1 or not any(map(_has_streams, loops)):
        return Unstreamed(serialized)
    followed = follow(entry, num_replicas, num_partitions)
    left = {n.instruction.name: n for n in loops if n in followed.origins}
    whys: list[str] = []
    while True:
        try:
            found: list[Stream] = []
            for name, loop in left.items():
                with about(name):
                    found += streams_of(followed, loop)
            made = Unstreamed(serialized)
            if found:
                made = _rewritten(module, followed, found, computes)
        except Refusal as refusal:
            whys.append(str(refusal))
            if left.pop(refusal.loop, None) is None:
                return Unstreamed(serialized, whys=tuple(whys))
        else:
            return replace(made, whys=tuple(whys))


def _has_streams(loop: Node) -> bool:
    """Whether a loop sends more than one value in an iteration, as each with a stream does."""
    sent = [i for i in loop.instruction.called[0].instructions if i.opcode == "collective-permute"]
    return len(sent) > 1


def _rewritten(
    module: Module, followed: Followed, streams: Sequence[Stream], computes: bool
) -> Unstreamed:
    """The module without these streams. Raises `Refusal`."""
    editor = Editor(module)
    b = editor.within(module.entry)
    loops = list(dict.fromkeys(s.loop for s in streams))
    held: dict[str, int] = {}
    collected: dict[Instruction, Whole] = {}  # by what reads the result of a loop
    stands: dict[Instruction, Any] = {}
    groups, count = streams[0].groups, streams[0].count
    sameness = Sameness(module, groups, followed.reader)
    undivided = Undivided(b, followed, sameness, groups, count, collected, computes=computes)
    for loop in loops:
        with about(loop.instruction.name):
            _check_effects(loop.instruction)
            own = [_Taken(followed, s) for s in streams if s.loop is loop]
            if any((s.groups, s.count) != (groups, count) for s in streams if s.loop is loop):
                raise Refusal(
                    "its buffers of microbatches are divided otherwise than those of other loops"
                )
            b.metadata = loop.instruction.proto.metadata
            for taken in own:
                taken.gather(b, undivided)
            held[loop.instruction.name] = sum(taken.held for taken in own)
            new = _Loop(editor, loop.instruction, own)
            new.emit(b)
            for taken in own:
                stands |= taken.give(b, new, collected)
                if taken.made is not None:
                    undivided.owners.add(taken.owner)
            undivided.depends |= dependents(loop.instruction)
    users = [i for i in module.entry.instructions if any(o in stands for o in i.operands)]
    editor.redirect(module.entry, stands, users)
    if module.entry.root in stands:
        b.proto.root_id = stands[module.entry.root].id
    editor.sweep(module.entry)
    return Unstreamed(editor.finish(), held)


def _check_effects(loop: Instruction) -> None:
    """Check that nothing in a loop is there for more than what it gives, and that it is no other's too."""
    for other in loop.computation.instructions:
        if other is not loop and not set(other.called).isdisjoint(loop.called):
            raise Refusal(f"{other.describe()} has the same body or condition")
    for instruction in (i for c in loop.called for i in c.instructions):
        if instruction.control_predecessors:
            raise Refusal(f"{instruction.describe()} has control dependencies")
        if instruction.has_side_effect and instruction.opcode not in COLLECTIVES:
            raise Refusal(f"{instruction.describe()} has an effect")


class _Taken:
    """A stream that is taken out of its loop.

    ``made``: what is put away, in the body, on the device at place ``owner`` of each pipeline; None if
    nobody reads what the stream holds in the end. ``times``: by place and slot, the row in which it is put
    away; ``backwards``: whether rows are counted from the last iteration on.
    """

    def __init__(self, followed: Followed, stream: Stream) -> None:
        self.followed, self.stream = followed, stream
        loop = stream.loop.instruction
        self.trips = len(followed.origins[stream.loop].iterations)
        counter = counter_of(followed, stream.loop)
        if counter is None:
            raise Refusal("it carries no number that counts its iterations from 0 on")
        self.counter = counter
        self.users = [
            i for i in loop.computation.instructions
            if i.opcode == "get-tuple-element" and i.operands[0] is loop
            and i.proto.tuple_index == stream.position
        ]  # fmt: skip
        if any(
            i.opcode != "get-tuple-element"
            for i in loop.computation.instructions
            if loop in i.operands
        ):
            raise Refusal("all that it gives is handed on as a whole")
        if any(
            i.opcode == "get-tuple-element" and i.proto.tuple_index == stream.position
            for i in loop.called[1].instructions
        ):
            raise Refusal("its condition reads a buffer of microbatches")
        self.order: tuple[int, ...] = tuple(range(stream.count * len(stream.groups[0])))
        self.backwards = False
        self.made: Instruction | None = None
        if self.users:
            self._find_collected()

    def _find_collected(self) -> None:
        """Find what is put away, on whom, where, and whether zeros are added to it (``plus``)."""
        stream = self.stream
        kinds = set()
        times: list[list[list[int]]] = [[[] for _ in g] for g in stream.groups]
        for device, own in enumerate(stream.final):
            pipeline, place = stream.place(device)
            for row in own:
                if row is None or row.value is None or row.value.node is None:
                    raise Refusal(
                        "not all slots of its buffer of microbatches get what a stage gives"
                    )
                other, owner = stream.place(row.at.device)
                if other != pipeline:
                    raise Refusal("its buffer of microbatches is of more than one pipeline")
                kinds.add((row.value, owner, row.plus))
                times[pipeline][place].append(row.at.iteration)
        if len(kinds) != 1 or any(t != times[0] for t in times):
            raise Refusal("its buffer of microbatches gets more than one value of a stage")
        ((value, self.owner, self.plus),) = kinds
        made = instructions_of(value)
        if not made or made[0].computation is not stream.loop.instruction.called[0]:
            raise Refusal("its buffer of microbatches gets what is no value of its body")
        self.made = made[0]
        flat = [t for own in times[0] for t in own]
        self.backwards = min(times[0][0]) > min(times[0][-1])
        last = self.trips - 1
        self.times = [[last - t if self.backwards else t for t in own] for own in times[0]]
        self.first = min(t for own in self.times for t in own)
        if sorted(t for own in self.times for t in own) != list(
            range(self.first, self.first + len(flat))
        ):
            raise Refusal("its buffer of microbatches does not get one of them in each iteration")

    # Before the loop.

    def gather(self, b: Builder, undivided: Undivided) -> None:
        """Add the array of all microbatches: ``whole``, by row and slot's dimensions."""
        stream = self.stream
        init = stream.loop.instruction.operands[0].operands[stream.position]
        found = undivided.whole(init, stream.axis)
        array = (
            b.transpose(found.array, [stream.axis, *self._others()]) if stream.axis else found.array
        )
        self.whole = array
        if found.order is not None:
            self.order = found.order
        own = leaf_types(init.shape, init)[0]
        assert own is not None
        slot = own.nbytes // stream.count
        into = 0 if init in undivided.depends and undivided.computes else len(self.order)
        out = self.trips if self.made is not None else 0
        self.held = sum(slot * (rows - stream.count) for rows in (into, out) if rows)

    def _others(self) -> list[int]:
        axis, rank = self.stream.axis, len(self.stream.slot_shape) + 1
        return [d for d in range(rank) if d != axis]

    # In the loop.

    def reading(self, b: Builder, read: Instruction, array: Any, counter: Any) -> Any:
        """What stands for a read of the stream. ``array``: ``whole``, as the loop carries it."""
        rows = self.stream.reads[read]
        devices = len(rows[0])
        number, zero, plus = (np.zeros((devices, self.trips), np.int32) for _ in range(3))
        for t, own in enumerate(rows):
            for d, row in enumerate(own):
                zero[d, t] = row is None
                if row is not None and row.slot is not None:
                    number[d, t], plus[d, t] = self._row(row), row.plus
        shape = read.shape
        if zero.all():
            return laid_out(b, b.zeros(shape), shape)
        device = b.device()
        where = [device, counter]
        value = shaped(b, entry_of(b, array, [b.lookup(number, where)]), shape)
        if plus.any():
            added = b.is_one(b.lookup(plus, where))
            value = b.select(added, without_sign_of_zero(b, value), value)
        if zero.any():
            value = b.select(b.is_one(b.lookup(zero, where)), b.zeros(value.shape), value)
        return laid_out(b, value, shape)

    def _row(self, row: Row) -> int:
        """The row of ``whole`` that a slot has, as the loop begins."""
        assert row.slot is not None
        _, place = self.stream.place(row.at.device)
        return self.order[place * self.stream.count + row.slot]

    def rows_shape(self) -> Any:
        """The shape of what is put away."""
        assert self.made is not None
        return resized(self.made.shape, [self.trips, *self.stream.slot_shape])

    def put_away(self, b: Builder, made: Any, array: Any, counter: Any) -> Any:
        slots = resized(made.shape, [1, *self.stream.slot_shape])
        own = b.reshape(made, list(slots.dimensions))
        owners = [g[self.owner] for g in self.stream.groups]
        own = b.select(self._is_one_of(b, owners), own, b.zeros(own.shape))
        if self.plus:
            own = without_sign_of_zero(b, own)
        if self.backwards:
            counter = b.add("subtract", counter.shape, [b.constant(self.trips - 1), counter])
        return b.update(array, own, [counter, *(b.constant(0) for _ in self.stream.slot_shape)])

    def _is_one_of(self, b: Builder, devices: Sequence[int]) -> Any:
        table = np.zeros(len(self.stream.final), np.int32)
        table[list(devices)] = 1
        device = b.device()
        return b.is_one(b.lookup(table, [device]))

    # Behind the loop.

    def give(
        self, b: Builder, new: _Loop, collected: dict[Instruction, Whole]
    ) -> dict[Instruction, Any]:
        """Add what each stage holds in the end; gives it by what reads it. ``collected`` gets what was put
        away."""
        if self.made is None:
            return {}
        stream, rows = self.stream, new.rows[self]
        groups = stream.groups
        total = stream.count * len(groups[0])
        shape = list(stream.slot_shape)
        # An array like the stream, but of all microbatches.
        bounds = [(self.first, self.first + total)] + [(0, n) for n in shape]
        taken = _slice(b, rows, bounds)
        array = b.transpose(taken, _back(stream.axis, len(shape) + 1)) if stream.axis else taken
        order = tuple(t - self.first for own in self.times for t in own)
        (read, *_) = self.users
        collected |= dict.fromkeys(self.users, Whole(array, stream.axis, 1, order))
        result = None
        for place in sorted(range(len(groups[0])), key=lambda p: p != self.owner):
            part = self._rows_of(b, rows, self.times[place])
            if place == self.owner:
                result = part
                continue
            sent = permute(b, part, sorted((g[self.owner], g[place]) for g in groups))
            result = b.select(self._is_one_of(b, [g[place] for g in groups]), sent, result)
        if stream.axis:
            result = b.transpose(result, _back(stream.axis, len(shape) + 1))
        result = laid_out(b, result, read.shape)
        return dict.fromkeys(self.users, result)

    def _rows_of(self, b: Builder, rows: Any, times: Sequence[int]) -> Any:
        """These rows, in this order."""
        runs: list[list[int]] = []
        for t in times:
            if runs and runs[-1][-1] + 1 == t:
                runs[-1].append(t)
            else:
                runs.append([t])
        whole = [(0, n) for n in self.stream.slot_shape]
        parts = [_slice(b, rows, [(run[0], run[-1] + 1), *whole]) for run in runs]
        if len(parts) == 1:
            return parts[0]
        shape = resized(rows.shape, [len(times), *self.stream.slot_shape])
        return b.add("concatenate", shape, parts, dimensions=[0])


class _Loop:
    """A loop without these streams, in place of the written one: at their positions it carries what is
    gathered, and behind all others what is put away."""

    def __init__(self, editor: Editor, written: Instruction, taken: Sequence[_Taken]) -> None:
        self.editor, self.written, self.taken = editor, written, taken
        self.rows: dict[_Taken, Any] = {}

    def emit(self, b: Builder) -> None:
        """Change the loop in the entry computation, to which ``b`` adds."""
        written = self.written
        init = [o.proto for o in written.operands[0].operands]
        for taken in self.taken:
            init[taken.stream.position] = taken.whole
        puts = [taken for taken in self.taken if taken.made is not None]
        init += [b.zeros(taken.rows_shape()) for taken in puts]
        proto = self.editor.carry(b, written, init)
        self._change_body(proto.shape, puts)
        self.rows = {
            taken: b.element(proto, len(written.operands[0].operands) + n)
            for n, taken in enumerate(puts)
        }

    def _change_body(self, carried: Any, puts: Sequence[_Taken]) -> None:
        body = self.written.called[0]
        b = self.editor.within(body)
        parameter, root = b.own(body.parameters[0]), b.own(body.root)
        parameter.shape.CopyFrom(carried)
        stands: dict[Instruction, Any] = {}
        for taken in self.taken:
            array, counter = (
                b.element(parameter, n) for n in (taken.stream.position, taken.counter)
            )
            for read in taken.stream.reads:
                b.metadata = read.proto.metadata
                stands[read] = taken.reading(b, read, array, counter)
            root.operand_ids[taken.stream.position] = array.id
        self.editor.redirect(body, stands, body.instructions)
        for n, taken in enumerate(puts, len(body.root.operands)):
            assert taken.made is not None
            b.metadata = taken.made.proto.metadata
            array, counter = (b.element(parameter, n) for n in (n, taken.counter))
            put = taken.put_away(b, taken.made.proto, array, counter)
            root.operand_ids.append(put.id)
        root.shape.CopyFrom(carried)
        b.finish(root)
        self.editor.sweep(body)


def _slice(b: Builder, array: Any, bounds: Sequence[tuple[int, int]]) -> Any:
    made = b.add("slice", resized(array.shape, [high - low for low, high in bounds]), [array])
    for low, high in bounds:
        made.slice_dimensions.add(start=low, limit=high, stride=1)
    return made


def _back(axis: int, rank: int) -> list[int]:
    """The permutation that brings the first dimension to ``axis``."""
    return [*range(1, axis + 1), 0, *range(axis + 1, rank)]
