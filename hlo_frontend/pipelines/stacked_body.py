"""The body of a loop that XLA partitioned from one array of all stages: what in it is the same on all
devices, and what becomes of its collectives (see `partitioned`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from stretto.collectives.ops import Kind

from ..collectives import CollectiveReader
from ..graph import Instruction, Module
from ..passes.valid.known import is_reshape
from ..passes.valid.trace import Forward, LoopTrace
from ..values import BlockGraph, Node, Value
from .chains import Execution, Origins
from .connected import connected
from .constants import Constants, behind, zero_constant
from .emit import Builder, Editor, carried_position, divided
from .refusal import Refusal
from .sameness import Class, Sameness

# Opcodes by which a value is put away, apart from those that take other values too.
_MOVES = frozenset({"bitcast", "broadcast", "copy", "reshape", "slice", "transpose"})


class UsedOtherwise(Refusal):
    """What one device gives to an all-reduce is used for more than to be put away."""


class Body:
    """The body of a loop that was followed, and what in it is the same on all devices that permutes
    connect. ``sums``: as of `Sameness`."""

    def __init__(
        self, module: Module, loop: Node, forward: Forward, trace: LoopTrace, *, sums: bool
    ) -> None:
        self.module, self.loop, self.forward, self.trace = module, loop, forward, trace
        self.block: BlockGraph = loop.blocks[1]
        self.origins = Origins(forward, loop, trace)
        self.computation = loop.instruction.called[0]
        self.count = forward.num_devices
        found = connected(loop)
        self.pipeline_of = [found.get(d, frozenset({d})) for d in range(self.count)]
        groups = [sorted(group) for group in dict.fromkeys(self.pipeline_of)]
        sameness = Sameness(module, groups, CollectiveReader(*forward.shape), sums=sums)
        self.classes = sameness.within(loop.instruction)
        self.carried = sameness.carried(loop.instruction)
        self.nodes = {n.instruction: n for n in self.block.nodes}

    def reads(self, position: int) -> list[Instruction]:
        """The reads of what the loop carries at a position."""
        return [i for i in self.computation.instructions if carried_position(i) == position]

    # Where a value comes from, on a device, in the same way in all iterations.

    def _source(self, value: Value, device: int, *, until_same: bool) -> tuple[Value, int] | None:
        """The value of the body that this one is on a device, and the device that computed it; None for
        positive zeros. ``until_same``: stop at the first one that is the same on all devices."""
        while True:
            if self._is_zero(value, device):
                return None
            root = value.root
            node = root.node
            if node is None or (until_same and self.is_same(root)):
                return root, device
            opcode = node.instruction.opcode
            if opcode == "select":
                taken = self.taken(node.operands[0], device)
                if taken is None:
                    return root, device
                value = node.operands[1 if taken else 2]
            elif opcode == "reshape" or (opcode == "bitcast" and is_reshape(node)):
                value = node.operands[0]
            elif opcode == "dynamic-slice":
                inner = self._cut_out(node, device)
                if inner is None:
                    return root, device
                value = inner
            elif node.collective is not None and node.collective.kind is Kind.PERMUTE:
                sources = [s for s, target in node.collective.pairs if target == device]
                if not sources:
                    return None
                value, device = node.operands[root.index], sources[0]
            else:
                return root, device

    def _everywhere(self, device: int) -> Iterable[Execution]:
        return (Execution(t, device) for t in range(len(self.trace.iterations)))

    def _is_zero(self, value: Value, device: int) -> bool:
        return all(self.origins.is_zero(value, at) for at in self._everywhere(device))

    def taken(self, predicate: Value, device: int) -> bool | None:
        """A predicate that is known, and the same in all iterations."""
        found = {self.origins.row(predicate, at) for at in self._everywhere(device)}
        return found.pop() if len(found) == 1 else None

    def _cut_out(self, node: Node, device: int) -> Value | None:
        """The operand of a padding that a slice cuts out of it, whole."""
        padded = node.operands[0].root.node
        if padded is None or padded.instruction.opcode != "pad":
            return None
        own = padded.instruction.proto.padding_config.dimensions
        (shape,) = (r.type.shape for r in node.results if r.type is not None)
        inner = padded.operands[0].type
        if inner is None or inner.shape != shape or any(d.interior_padding for d in own):
            return None
        for axis, (d, start) in enumerate(zip(own, node.operands[1:], strict=True)):
            whole = padded.results[0].type
            assert whole is not None
            most = whole.shape[axis] - shape[axis]
            found = {self.origins.number(start, at) for at in self._everywhere(device)}
            number = found.pop() if len(found) == 1 else None
            if number is None or min(max(number, 0), most) != d.edge_padding_low:
                return None
        return padded.operands[0]

    def is_same(self, value: Value) -> bool:
        """Whether a value of the body is the same on all devices that permutes connect."""
        read = self._read(value)
        return read is not None and self.classes.get(read) is Class.SAME

    def _read(self, value: Value) -> Instruction | None:
        """An instruction of the body that is this value."""
        root = value.root
        if root.node is not None and len(root.node.results) == 1:
            made = root.node.instruction
            return made if made.computation is self.computation else None
        position = self.block.parameters.index(root) if root.node is None else root.index
        whole = self.computation.parameters[0] if root.node is None else root.node.instruction
        return next(
            (i for i in self.computation.instructions if i.opcode == "get-tuple-element"
             and i.operands[0] is whole and i.proto.tuple_index == position),
            None,
        )  # fmt: skip

    # Permutes of what all have.

    def is_local(self, permute: Node) -> bool:
        """Whether what a permute brings is the same on its target, and found there as one value."""
        return self._brought(permute) is not None

    def _brought(self, permute: Node) -> tuple[Value, list[int]] | None:
        """The value that targets of a permute take, each from a source on which it is the same as its own,
        and these targets; all others take zeros."""
        assert permute.collective is not None
        found: set[Value] = set()
        targets = []
        for source, target in permute.collective.pairs:
            given = self._source(permute.operands[0], source, until_same=True)
            if given is None:
                continue
            value, _ = given
            if not self.is_same(value):
                return None
            found.add(value)
            targets.append(target)
        if len(found) != 1 or len(permute.operands) != 1:
            return None
        (value,) = found
        type = permute.results[0].type
        if value.type is None or type is None or prod(value.type.shape) != prod(type.shape):
            return None
        return (value, targets) if value.type.dtype == type.dtype else None

    def taken_locally(self, permute: Node) -> bytes:
        """The module without a permute: its targets take their own value."""
        brought = self._brought(permute)
        assert brought is not None
        editor = Editor(self.module)
        b = editor.replace(permute.instruction)
        b.stand_in(self.on(b, *brought, permute.instruction))
        return editor.finish()

    def on(self, b: Builder, value: Value, devices: Sequence[int], like: Instruction) -> Any:
        """A value in the shape of ``like`` on these devices, zeros on others."""
        read = self._read(value)
        if read is None:
            raise Refusal(f"what {like.describe()} moves is not a value of the loop's body")
        part = b.reshape(read.proto, list(like.shape.dimensions))
        return self.only_on(b, devices, part)

    def only_on(self, b: Builder, devices: Sequence[int], array: Any) -> Any:
        """An array on these devices, zeros on others."""
        return b.on_devices(devices, self.count, array)

    # All-reduces of what one device has.

    def behind_the_loop(self, node: Node) -> bytes:
        """The module with an all-reduce behind the loop instead of in it. Raises `Refusal`."""
        value, devices = self.given(node)
        try:
            positions = self._put_away(node.instruction)
        except Refusal as refusal:
            raise UsedOtherwise(str(refusal)) from refusal
        editor = Editor(self.module)
        b = editor.replace(node.instruction)
        b.stand_in(self.on(b, value, devices, node.instruction))
        loop = self.loop.instruction
        for read in loop.computation.instructions:
            if loop in read.operands and read.proto.tuple_index in positions:
                b = editor.replace(read)
                b.metadata = node.instruction.proto.metadata
                whole = b.element(loop.proto, read.proto.tuple_index)
                summed = b.copy(node.instruction, [whole])
                summed.shape.CopyFrom(whole.shape)
                b.stand_in(summed)
        return editor.finish()

    def from_one(self, node: Node) -> list[int]:
        """The arrays of an all-reduce of several to which one device of each group gives something."""
        found = []
        for n in range(len(node.results)):
            with contextlib.suppress(Refusal):
                self.given(node, n)
                found.append(n)
        return found

    def apart(self, node: Node, alone: Sequence[int]) -> bytes:
        """The module with an all-reduce of several arrays as one for each of ``alone``, and one for the
        others. XLA combines them."""
        editor, reduced = Editor(self.module), node.instruction
        results = divided(editor.replace(reduced), reduced, [[n] for n in alone])
        read = [
            i
            for i in self.computation.instructions
            if i.opcode == "get-tuple-element" and i.operands[0] is reduced
        ]
        stands = {i: results[i.proto.tuple_index] for i in read}
        editor.redirect(self.computation, stands, self.computation.instructions)
        editor.sweep(self.computation)
        return editor.finish()

    def given(self, node: Node, n: int = 0) -> tuple[Value, list[int]]:
        """What one device of each group gives to an all-reduce, as its array ``n``, and these devices."""
        assert node.collective is not None
        what = f"what {node.instruction.describe()} sums up"
        found: set[Value] = set()
        devices: list[int] = []
        for group in node.collective.groups:
            if len({self.pipeline_of[d] for d in group}) > 1:
                raise Refusal(f"{what} is of devices that no permute connects")
            own = {
                d: s for d in group if (s := self._source(node.operands[n], d, until_same=False))
            }
            if len(own) != 1:
                raise Refusal(f"{what} is given by {len(own)} devices of a group, not by one alone")
            ((value, device),) = own.values()
            if device not in group:
                raise Refusal(f"{what} is of a device that is not of its group")
            found.add(value)
            devices.append(device)
        if len(found) != 1:
            raise Refusal(f"{what} is not one value of the loop's body")
        (value,) = found
        type = node.results[n].type
        if (
            type is None or value.type is None or value.type.dtype != type.dtype
            or prod(value.type.shape) != prod(type.shape)
        ):  # fmt: skip
            raise Refusal(f"{what} is computed of what one device has")
        return value, devices

    def _put_away(self, reduced: Instruction) -> list[int]:
        """The positions of the carry in which the result of an all-reduce is put away, and for nothing else.
        Raises `Refusal`."""
        body, constants = self.computation, Constants(self.loop.instruction)
        users: dict[Instruction, list[Instruction]] = {}
        for instruction in body.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        reads = constants.reads
        positions: list[int] = []
        flow = {reduced: None}
        others: list[Instruction] = []
        stack = [reduced]
        while stack:
            value = stack.pop()
            fresh: list[Instruction] = []
            for user in users.get(value, []):
                if user is body.root:
                    own = [
                        n for n, o in enumerate(user.operands) if o is value and n not in positions
                    ]
                    positions += own
                    fresh += [r for r, n in reads.items() if n in own]
                    continue
                if user.opcode == "get-tuple-element" and user.operands[0] is value:
                    raise self._read_otherwise(reduced, user)
                data = self._data_of(user)
                if data is None or any(o is value for o in user.operands if o not in data):
                    raise self._read_otherwise(reduced, user)
                if any(
                    self.classes.get(o) is not Class.SAME for o in user.operands if o not in data
                ):
                    raise Refusal(
                        f"where {reduced.describe()} is put away differs from device to device, at "
                        f"{user.describe()}"
                    )
                others += data
                fresh.append(user)
            stack += [f for f in fresh if f not in flow]
            flow |= dict.fromkeys(fresh)
        inits = self.loop.instruction.operands[0].operands
        kept = set(body.root.operands[n] for n in positions)
        for other in [*others, *kept]:
            if other not in flow and not self._zeros(other, constants):
                raise Refusal(
                    f"{reduced.describe()} is put away together with {other.describe()}, which is not known "
                    "to be zeros"
                )
        for n in positions:
            if not zero_constant(inits[n]):
                raise Refusal(f"what {reduced.describe()} is put away in does not begin with zeros")
            condition = self.loop.instruction.called[1]
            if any(i.opcode == "get-tuple-element" and i.proto.tuple_index == n
                   for i in condition.instructions):  # fmt: skip
                raise Refusal(f"the loop's condition reads where {reduced.describe()} is put away")
        return positions

    def _data_of(self, user: Instruction) -> list[Instruction] | None:
        """The operands of which an instruction's result has elements, or sums of them; None for others."""
        operands, opcode = user.operands, user.opcode
        if opcode in _MOVES:
            return list(operands)
        if opcode == "select":
            return list(operands[1:])
        if opcode == "dynamic-slice":
            return [operands[0]]
        if opcode == "dynamic-update-slice":
            return list(operands[:2])
        if opcode in ("add", "concatenate", "pad"):
            return list(operands)
        return None

    def _read_otherwise(self, reduced: Instruction, user: Instruction) -> Refusal:
        return Refusal(
            f"what {reduced.describe()} gives to all stages is read in the loop by {user.describe()}; put it "
            "away in an array, or give it out by the scan, and go on with it behind the loop"
        )

    def _zeros(self, value: Instruction, constants: Constants) -> bool:
        """Whether a value of the body is a constant of positive zeros."""
        value = behind(value)
        if value in constants.inits:
            return zero_constant(constants.inits[value])
        return zero_constant(value)
