"""Finds streams: arrays of microbatches that are divided over the stages, and handed on in a loop.

Instead of giving all microbatches to all stages, a pipeline may divide them, as praxis and MaxText do: each
stage has as many slots as there are microbatches for each of them. In an iteration the first stage takes what
a slot holds; the slot is handed on by one stage towards it, and the last stage puts there what it gives. So
inputs arrive at the first stage when it needs them, and outputs end where inputs were. Going back, JAX makes
the same of it the other way round: gradients of outputs go towards the last stage, those of inputs away from
the first one.

`streams_of` follows such an array iteration by iteration and device by device: what each slot holds, be it a
slot of another device as the loop began, or what a node of the body gave there in some iteration. So it is
known what each read of the array gives, and what the array holds in the end. Where a read gives what a stage
has put there, that is proved to be read by nobody, apart from the stream itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stretto.collectives.ops import Kind

from ..graph import Instruction
from ..values import Node, Value
from .chains import Execution, Followed
from .connected import connected, members
from .emit import carried_position
from .inline import other_communication
from .refusal import Refusal


@dataclass(frozen=True)
class Row:
    """What a slot holds: slot ``slot`` as the loop began, on device ``at.device``, or, if that is None, what
    ``value`` was in execution ``at``. ``plus``: whether zeros were added to it on its way."""

    at: Execution
    slot: int | None = None
    value: Value | None = None
    plus: bool = False


Rows = list[list[Row | None]]  # None: positive zeros


@dataclass(eq=False)
class Stream:
    """The array at ``position`` of what ``loop`` carries, of ``count`` slots along dimension ``axis``.

    ``groups``: the stages of pipelines side by side, in the order of devices. ``reads``: by instruction of
    the body that reads a slot, by iteration and device, what it gives; ``final``: by device and slot, what
    the array holds behind the loop. ``puts``: instructions of the body that write to the array.
    """

    loop: Node
    position: int
    axis: int
    count: int
    groups: list[list[int]]
    reads: dict[Instruction, Rows] = field(default_factory=dict)
    final: Rows = field(default_factory=list)
    puts: set[Instruction] = field(default_factory=set)

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """The dimensions of a slot beside that of the slots."""
        type = self.loop.blocks[1].parameters[self.position].type
        assert type is not None
        return type.shape[: self.axis] + type.shape[self.axis + 1 :]

    def place(self, device: int) -> tuple[int, int]:
        """The pipeline that a device is of, and its place there."""
        (found,) = ((n, g.index(device)) for n, g in enumerate(self.groups) if device in g)
        return found


def streams_of(followed: Followed, loop: Node) -> list[Stream]:
    """The streams that a loop carries. Raises `Refusal` if what one holds is read otherwise."""
    found = []
    for position in range(len(loop.blocks[1].parameters)):
        stream = _followed(followed, loop, position)
        if stream is not None:
            _check_reads(followed, stream)
            found.append(stream)
    return found


def _followed(followed: Followed, loop: Node, position: int) -> Stream | None:
    """The stream at a position of the carry; None if there is none, or if it is not known what it holds."""
    body = loop.instruction.called[0]
    type = loop.blocks[1].parameters[position].type
    if (
        len(body.parameters) != 1
        or body.root.opcode != "tuple"
        or len(loop.blocks[1].parameters) != len(body.root.operands)
        or type is None
        or len(type.shape) < 2
    ):
        return None
    stream = _written(loop, position) or _single(loop, position)
    if stream is None or not _runs(followed, stream):
        return None
    moved = any(
        row is not None and row.slot is not None and row.at.device != device
        for rows in stream.reads.values()
        for own in rows
        for device, row in enumerate(own)
    )
    return stream if moved else None


def _groups(loop: Node) -> list[list[int]]:
    return [sorted(group) for group in dict.fromkeys(connected(loop).values())]


def _written(loop: Node, position: int) -> Stream | None:
    """A stream of several slots, each of which is read by a slice, and written by an update."""
    body = loop.instruction.called[0]
    whole = {i for i in body.instructions if carried_position(i) == position}
    reads: list[Instruction] = []
    for instruction in body.instructions:
        if instruction is body.root or instruction in whole:
            continue
        used = [n for n, o in enumerate(instruction.operands) if o in whole]
        if used and used != [0]:
            return None
        if used and instruction.opcode in ("dynamic-update-slice", "copy"):
            whole.add(instruction)
        elif used and instruction.opcode == "dynamic-slice":
            reads.append(instruction)
        elif used:
            return None
    written = [n for n, o in enumerate(body.root.operands) if o in whole]
    if written != [position] or not reads:
        return None
    array = list(body.root.operands[position].shape.dimensions)
    parts = [list(i.shape.dimensions) for i in reads]
    parts += [list(i.operands[1].shape.dimensions) for i in whole if _updates(i)]
    axes = {
        tuple(n for n, (p, a) in enumerate(zip(own, array, strict=True)) if p != a) for own in parts
    }
    if len(axes) != 1 or any(len(own) != 1 for own in axes):
        return None
    ((axis,),) = axes
    if any(own[axis] != 1 for own in parts):
        return None
    stream = Stream(loop, position, axis, array[axis], _groups(loop))
    stream.reads = {i: [] for i in reads}
    stream.puts = {i for i in whole if carried_position(i) != position}
    return stream if any(map(_updates, stream.puts)) else None


def _single(loop: Node, position: int) -> Stream | None:
    """A stream of a single slot, which is carried as it is."""
    body = loop.instruction.called[0]
    reads = [i for i in body.instructions if carried_position(i) == position]
    if len(reads) != 1:
        return None
    dimensions = list(reads[0].shape.dimensions)
    if dimensions[0] != 1 or body.root.operands[position] is reads[0]:
        return None
    return Stream(loop, position, 0, 1, _groups(loop), {reads[0]: []})


def _updates(instruction: Instruction) -> bool:
    return instruction.opcode == "dynamic-update-slice"


def _runs(followed: Followed, stream: Stream) -> bool:
    """Follow a stream through the iterations of its loop; whether it is known what it holds."""
    origins, block = followed.origins[stream.loop], stream.loop.blocks[1]
    devices = range(followed.forward.num_devices)
    nodes = {n.instruction: n for n in block.nodes}
    if len({d for g in stream.groups for d in g}) != len(devices):
        return False
    if len(set(map(len, stream.groups))) > 1:
        return False
    carried = block.parameters[stream.position]
    values: dict[Value, Instruction] = {}
    for read in stream.reads:
        if read.opcode == "dynamic-slice":
            if read not in nodes:
                return False
            values[nodes[read].results[0].root] = read
        else:
            values[carried.root] = read
    empty = followed.begins_with_zeros(stream.loop, stream.position, len(devices))
    held: Rows = [
        [None if empty else Row(Execution(0, d), slot) for slot in range(stream.count)]
        for d in devices
    ]

    def slot_of(instruction: Instruction, first: int, at: Execution) -> int | None:
        start = origins.number(nodes[instruction].operands[first + stream.axis], at)
        return None if start is None else min(max(start, 0), stream.count - 1)

    def resolved(value: Value, at: Execution) -> Row | None:
        plus = False
        while True:
            if origins.is_zero(value, at):
                return None
            if value.root in values:
                row = stream.reads[values[value.root]][at.iteration][at.device]
                return row if row is None or not plus else Row(row.at, row.slot, row.value, True)
            step = origins.handed(value, at) or beside_nothing(value.root, at)
            if step is None:
                return Row(at, None, value.root, plus)
            value, at, more = step
            plus = plus or more

    def beside_nothing(value: Value, at: Execution) -> tuple[Value, Execution, bool] | None:
        """As `Origins.handed`, for a sum with what an empty slot holds."""
        node = value.node
        if node is None or node.instruction.opcode != "add" or value.type is None:
            return None
        if value.type.dtype[0] == "c":
            return None
        empty = [resolved(o, at) is None for o in node.operands]
        if sum(empty) != 1:
            return None
        return node.operands[empty.index(False)], at, value.type.dtype[0] not in "psu"

    body = stream.loop.instruction.called[0]
    for t in range(len(origins.iterations)):
        if not stream.puts:
            stream.reads[values[carried.root]].append([own[0] for own in held])
            held = [[resolved(block.results[stream.position], Execution(t, d))] for d in devices]
            continue
        versions = {i: held for i in body.instructions if carried_position(i) == stream.position}
        for instruction in body.instructions:
            if instruction in stream.puts and not _updates(instruction):
                versions[instruction] = versions[instruction.operands[0]]
            if instruction not in stream.reads and not (
                instruction in stream.puts and _updates(instruction)
            ):
                continue
            if instruction not in nodes:
                return False
            before = versions[instruction.operands[0]]
            first = 2 if _updates(instruction) else 1
            slots = [slot_of(instruction, first, Execution(t, d)) for d in devices]
            if None in slots:
                return False
            known = [slot for slot in slots if slot is not None]
            if instruction in stream.reads:
                stream.reads[instruction].append([before[d][s] for d, s in enumerate(known)])
                continue
            after = [list(own) for own in before]
            for d, s in enumerate(known):
                after[d][s] = resolved(nodes[instruction].operands[1], Execution(t, d))
            versions[instruction] = after
        held = versions[body.root.operands[stream.position]]
    stream.final = held
    return True


def _check_reads(followed: Followed, stream: Stream) -> None:
    """Check that what a stage has put into a stream is read by nobody in the loop, and that what it holds in
    the end needs none of it. Raises `Refusal`."""
    origins, block = followed.origins[stream.loop], stream.loop.blocks[1]
    kept = {(row.value, row.at) for own in stream.final for row in own if row is not None}
    for t in range(len(origins.iterations)):
        wrong: dict[Value, set[int]] = {}

        def begin(
            value: Value, read: Instruction, t: int = t, wrong: dict[Value, set[int]] = wrong
        ) -> None:
            rows = stream.reads[read][t]
            wrong[value.root] = {
                d for d, row in enumerate(rows) if row is not None and row.slot is None
            }

        for read in stream.reads:
            if read.opcode != "dynamic-slice":
                begin(block.parameters[stream.position], read)
        for node in block.nodes:
            if node.instruction in stream.puts:
                continue
            if node.instruction in stream.reads:
                begin(node.results[0], node.instruction)
                continue
            found = _spread(followed, stream.loop, node, t, wrong)
            if found and node.instruction.has_side_effect and node.collective is None:
                raise _read_otherwise(stream, node.instruction, t)
            for result in node.results:
                wrong[result.root] = found
        for n, result in enumerate(block.results):
            if n != stream.position and wrong.get(result.root):
                made = (
                    result.node.instruction if result.node is not None else stream.loop.instruction
                )
                raise _read_otherwise(stream, made, t)
        for value, at in kept:
            if value is not None and at.iteration == t and at.device in wrong.get(value, ()):
                assert value.node is not None
                raise _read_otherwise(stream, value.node.instruction, t)


def _spread(
    followed: Followed, loop: Node, node: Node, t: int, wrong: dict[Value, set[int]]
) -> set[int]:
    """The devices on which what a node gives needs something that is ``wrong``."""
    origins = followed.origins[loop]
    own = [wrong.get(o.root, set()) for o in node.operands]
    found = set().union(*own)
    collective = node.collective
    if not found:
        return found
    if collective is not None and collective.kind is Kind.PERMUTE:
        return {target for source, target in collective.pairs if source in found}
    among_groups = members([node]).get(node)
    others = any(map(other_communication, node.instruction.called))
    if among_groups is not None and not others:
        return {other for d in found for other in among_groups.get(d, {d})}
    if collective is not None or others:
        return set(range(followed.forward.num_devices))
    if node.instruction.opcode == "select":
        return {
            d for d in found if d in _taken(own, origins.row(node.operands[0], Execution(t, d)))
        }
    return found


def _taken(own: list[set[int]], predicate: bool | None) -> Iterable[int]:
    return set().union(*own) if predicate is None else own[1 if predicate else 2]


def _read_otherwise(stream: Stream, instruction: Instruction, t: int) -> Refusal:
    return Refusal(
        f"a stage reads what another one put into the buffer of microbatches, in iteration {t} at "
        f"{instruction.describe()}: mask the input and the weights of a stage by where in iterations without "
        "a microbatch"
    )
