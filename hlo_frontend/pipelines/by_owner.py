"""Heads that all stages compute in the loop of a pipeline that is one array of all stages.

A loss in the loop is one of what leaves the last stage. Where the program is written for all stages at once
they all compute it: XLA gives them what the last one has, by an all-reduce in every iteration, and all get
the same. `left_to_owner` leaves it to the device of each group that has it:

- That one takes its own value, as the all-reduce gives it. The others take zeros. What they compute of them
  is *wrong*, and must not come back: no collective may move it to a device that owns something, no loop may
  end by it, be it one of their own that might then never end, and where it meets what the pipeline computes
  each of these devices must take the other operand of a select. Groups of which all members own something,
  or none does, may communicate.
- Values that are wrong may be carried out of the loop, and into the loop of the backward pass. What else
  reads them behind the loops gets the owner's, in one all-reduce for each array: they were the same on all
  stages in the written program (`Sameness`).

All bits are those of the written program: the owner computes what it did, and gives its bits as integers, to
which the others add zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..builder import array_shape, resized
from ..graph import Instruction, all_instructions
from ..schema import ShapeProto
from ..trips import annotated_trips
from ..values import Node, Value
from .connected import groups_of, is_in_step
from .emit import Builder, Editor, needed_by
from .inline import GROUPED, other_communication
from .refusal import Refusal
from .sameness import INTEGERS, NEVER_SAME, Class
from .stacked_body import Body

_PRED, _U8 = (array_shape(name).element_type for name in ("pred", "u8"))
# By types of floats, unsigned integers of as many bits.
_BITS = {
    array_shape(floats).element_type: array_shape(bits).element_type
    for floats, bits in (("f16", "u16"), ("bf16", "u16"), ("f32", "u32"), ("f64", "u64"))
}


def left_to_owner(
    bodies: Mapping[Instruction, Body], body: Body, node: Node, value: Value, owners: Sequence[int]
) -> bytes:
    """The module without an all-reduce in a loop to which ``owners``, one device of each group, give
    ``value``. ``bodies``: by their loops, in the order of the entry computation. Raises `Refusal`."""
    reduced, entry = node.instruction, body.module.entry
    wrong = {loop: _Wrong(own, owners) for loop, own in bodies.items()}
    wrong[body.loop.instruction].given.add(reduced)
    users: dict[Instruction, list[Instruction]] = {}
    for instruction in entry.instructions:
        for operand in dict.fromkeys(instruction.operands):
            users.setdefault(operand, []).append(instruction)
    inits = {loop.operands[0]: loop for loop in bodies if users[loop.operands[0]] == [loop]}
    wanted: list[tuple[Instruction, list[Instruction]]] = []  # reads of the owner's, and by whom
    for loop in bodies:
        flow = wrong[loop]
        if not flow.given and not flow.positions:
            continue
        flow.spread()
        for read in users.get(loop, []):
            if read.opcode != "get-tuple-element":
                raise Refusal(f"{loop.describe()} is handed on whole, by {read.describe()}")
            if read.proto.tuple_index not in flow.positions:
                continue
            others = []
            for user in users.get(read, []):
                if user in inits and inits[user] is not loop:
                    into = wrong[inits[user]].positions
                    into |= {n for n, o in enumerate(user.operands) if o is read}
                else:
                    others.append(user)
            if others or read is entry.root:
                flow.check_same(read.proto.tuple_index, reduced)
                wanted.append((read, others))
    editor = Editor(body.module)
    _take_own(editor, body, reduced, value, owners)
    for loop, own in bodies.items():
        _add_zeros(editor, own, wrong[loop], owners)
    b = editor.within(entry)
    b.metadata = reduced.proto.metadata
    for read, others in wanted:
        given = _given_to_all(b, body, read, reduced, owners)
        editor.redirect(entry, {read: given}, others)
        if read is entry.root:
            b.proto.root_id = given.id
    editor.sweep(entry)
    return editor.finish()


class _Wrong:
    """What in the body of a loop is wrong on devices that own nothing. ``given``: instructions that are to
    begin with; ``positions``: of what the loop carries."""

    def __init__(self, body: Body, owners: Sequence[int]) -> None:
        self.body = body
        self.owners = frozenset(owners)
        self.others = [d for d in range(body.count) if d not in self.owners]
        self.given: set[Instruction] = set()
        self.positions: set[int] = set()

    def spread(self) -> None:
        """Find all positions. Raises `Refusal` where something wrong would come back."""
        computation = self.body.computation
        (parameter,), root = computation.parameters, computation.root
        while True:
            found = set(self.given)
            for instruction in computation.instructions:
                operands = instruction.operands
                if operands and operands[0] is parameter:
                    if instruction.opcode != "get-tuple-element":
                        raise Refusal(f"{instruction.describe()} reads all that the loop carries")
                    if instruction.proto.tuple_index in self.positions:
                        found.add(instruction)
                elif (
                    instruction is not root
                    and any(o in found for o in needed_by(instruction))
                    and not self._takes_other(instruction, found)
                ):
                    self._check_apart(instruction)
                    found.add(instruction)
            positions = {n for n, o in enumerate(root.operands) if o in found}
            if positions <= self.positions:
                break
            self.positions |= positions
        condition = self.body.loop.instruction.called[1]
        for read in condition.instructions:
            if read.opcode == "get-tuple-element" and read.proto.tuple_index in self.positions:
                raise Refusal(f"the loop's condition reads {read.describe()}")

    def _takes_other(self, instruction: Instruction, found: set[Instruction]) -> bool:
        """Whether a select takes an operand that is not wrong on each of these devices."""
        node = self.body.nodes.get(instruction)
        if instruction.opcode != "select" or node is None:
            return False
        taken = {self.body.taken(node.operands[0], device) for device in self.others}
        return None not in taken and not any(
            instruction.operands[1 if t else 2] in found for t in taken
        )

    def _check_apart(self, instruction: Instruction) -> None:
        """Raises `Refusal` for what brings something wrong to an owner, and for what devices of a group may
        differ in, or never end, by what they are given."""
        node = self.body.nodes.get(instruction)
        among_groups = instruction.opcode in GROUPED or (
            instruction.opcode == "while"
            and is_in_step(instruction)
            and not any(map(other_communication, instruction.called))
        )
        if node is None or not among_groups or not groups_of(node):
            _check_alone(instruction)
            return
        for inner, group in groups_of(node):
            if len({d in self.owners for d in group}) > 1:
                raise Refusal(
                    f"{inner.instruction.describe()} is among devices of which only some have it"
                )

    def check_same(self, position: int, reduced: Instruction) -> None:
        """Raises `Refusal` unless all stages carry the same at a position."""
        if self.body.carried[position] is not Class.SAME:
            raise Refusal(
                f"what is made of {reduced.describe()} in the loop is not known to be the same on all stages"
            )


def _check_alone(instruction: Instruction) -> None:
    """Raises `Refusal` for what one device does with others, or with the world, and for loops that may end by
    what they are given."""
    if (
        instruction.opcode in NEVER_SAME
        or instruction.has_side_effect
        or any(c.needs_runtime for c in instruction.called)
    ):
        raise Refusal(f"{instruction.describe()} is not computed by each device alone")
    inner = [instruction, *(i for c in instruction.called for i in all_instructions(c))]
    for loop in inner:
        if loop.opcode == "while" and annotated_trips(loop) is None:
            raise Refusal(f"it is not known how long {loop.describe()} goes on")


def _take_own(
    editor: Editor, body: Body, reduced: Instruction, value: Value, owners: Sequence[int]
) -> None:
    b = editor.replace(reduced)
    own = body.on(b, value, owners, reduced)
    if own.shape.element_type not in INTEGERS:
        # The sum of a -0 and of others' zeros is 0.
        zeros = b.zeros(own.shape)
        like = resized(array_shape("pred"), own.shape.dimensions)
        none = b.add("compare", like, [own, zeros], comparison_direction="EQ")
        own = b.add("select", own.shape, [none, zeros, own])
    b.stand_in(own)


def _add_zeros(editor: Editor, body: Body, flow: _Wrong, owners: Sequence[int]) -> None:
    """Have devices that own nothing add zeros to sums of what is wrong on them: so their sums need nothing of
    any microbatch."""
    computation = body.computation
    b: Builder | None = None
    for position in sorted(flow.positions):
        added = computation.root.operands[position]
        terms = [o for o in added.operands if o not in body.reads(position)]
        if added.opcode == "add" and len(terms) == 1:
            b = b or editor.within(computation)
            b.metadata = added.proto.metadata
            own = body.only_on(b, owners, terms[0].proto)
            editor.redirect(computation, {terms[0]: own}, [added])
    if b is not None:
        editor.sweep(computation)


def _given_to_all(
    b: Builder, body: Body, read: Instruction, reduced: Instruction, owners: Sequence[int]
) -> Any:
    """What owners have, on all devices of the groups of an all-reduce."""
    kind = read.shape.element_type
    bits: Any = read.proto
    if kind == _PRED or kind in _BITS:
        shape = ShapeProto()
        shape.CopyFrom(read.shape)  # with its layout
        shape.element_type = _BITS.get(kind, _U8)
        bits = b.add("convert" if kind == _PRED else "bitcast-convert", shape, [bits])
    elif kind not in INTEGERS:
        raise Refusal(f"{read.describe()} has elements of a type whose bits are not summed up")
    scalar = resized(bits.shape, ())
    total = b.editor.computation("add.bits")
    total.finish(total.add("add", scalar, [total.parameter(scalar), total.parameter(scalar)]))
    summed = b.copy(reduced, [body.only_on(b, owners, bits)])
    summed.shape.CopyFrom(bits.shape)
    summed.called_computation_ids[:] = [total.id]
    if kind == _PRED:
        zeros = b.zeros(bits.shape)
        return b.add("compare", read.shape, [summed, zeros], comparison_direction="NE")
    return summed if kind in INTEGERS else b.add("bitcast-convert", read.shape, [summed])
