"""Masks padding in steps of training that do not mask it themselves, or elsewhere than the passes want it.

A pipeline may compute on padding as on microbatches, and drop what it gives, as MaxText does. Its gradients
of weights then get, in iterations without a microbatch, products of what was computed on padding with zeros:
what begins the backward pass there is zero, since nothing of it is read. The schedules want to know that
these are zeros (see `recognize`), and 0 * x is NaN where x is. `masked` writes the masks that the program
does not have, in two steps:

1. Where a stage goes back on padding, all that it gives to sums of gradients, and to the stage before, is
   replaced by zeros. These are the devices and iterations in which all of that is proved to be zeros: by
   masks that the program has, or else provided that no NaN and no infinity meets zeros there (`Vanishing`).
2. In the program that this is, what a stage takes on padding is read by nobody (`Liveness`). It is replaced
   by zeros too, so that padding needs nothing of other stages.

The second step changes no result, nor does the first one where the program has masks. Where it has none, the
first one changes the sign of zeros at most, except where padding gives NaN or infinities: gradients of the
program as it is written are NaN then, and those with masks are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Instruction, Module
from ..passes.valid.liveness import Liveness
from ..passes.valid.trace import is_transfer
from ..values import Node, Value
from .constants import behind
from .emit import Builder, Editor, carried_position, needed_by, slice_of
from .inline import handed_on
from .one_layer import MOVES, moves
from .recognize import follow, is_candidate
from .rewrite import laid_out, shaped
from .travelling import counter_of
from .vanishing import Vanishing

# Opcodes by which arrays are moved, or parts of them put together.
_MOVED = MOVES | {"slice", "dynamic-slice", "collective-permute"}

Counts = tuple[int, ...]


def masked(
    serialized: bytes, num_replicas: int, num_partitions: int, *, finite: bool
) -> bytes | None:
    """The module with masks of padding in the loops of its steps; None if it is not proved where its padding
    is. ``finite``: whether no NaN and no infinity is taken to meet zeros there. Raises `GaveUpError`."""
    if num_replicas > 1:
        return None
    made = _Masks(serialized, num_partitions)
    backward = [n for n in made.loops if any(made.follows(n, other) for other in made.loops)]
    counts = made.mask_gradients(backward, finite=finite)
    if not counts:
        return None
    names = {n.instruction.name for n in backward}
    made = _Masks(made.editor.finish(), num_partitions)
    others = made.mask_inputs([n for n in made.loops if n.instruction.name not in names])
    # What is zero for another reason is no padding: what stages take there is read, at least for a loss.
    return made.editor.finish() if counts <= others else None


class _Masks:
    """A module that was followed, to which masks are added."""

    def __init__(self, serialized: bytes, num_partitions: int) -> None:
        self.module = Module.parse(serialized)
        self.editor = Editor(self.module)
        entry = flatten(self.module.entry, CollectiveReader(1, num_partitions))
        self.followed = follow(entry, 1, num_partitions)
        self.loops = [
            n for n in entry.nodes
            if is_candidate(n) and n in self.followed.origins and self._is_alone(n)
        ]  # fmt: skip

    def _is_alone(self, node: Node) -> bool:
        """Whether a loop carries a tuple of arrays, and has its body for itself."""
        loop = node.instruction
        body = loop.called[0]
        callers = [
            i for c in self.module.computations for i in c.instructions if body in i.called
        ]  # fmt: skip
        return (
            callers == [loop]
            and body.root.opcode == "tuple"
            and len(body.parameters) == 1
            and len(node.blocks[1].parameters) == len(body.root.operands)
            and not any(i.control_predecessors for i in body.instructions)
        )

    def follows(self, node: Node, other: Node) -> bool:
        """Whether a loop needs what another one gives."""
        loop = node.instruction
        return node is not other and other.instruction in slice_of(loop.operands, set())

    def mask_gradients(self, nodes: Sequence[Node], *, finite: bool) -> set[Counts]:
        """Replace what stages give on padding in these loops by zeros. Gives, for each loop with masks, in
        how many iterations each device has padding."""
        zeros = Vanishing(self.followed.forward, exact=not finite)
        zeros.program(self.followed.entry)
        found: set[Counts] = set()
        for node in nodes:
            counter = counter_of(self.followed, node)
            body = _Body(node)
            given = body.given(zeros)
            if counter is None or not given:
                continue
            padding = np.array(
                [
                    np.all([zeros.rows(*at, value) for value in given.values()], axis=0)
                    for at in zeros.seen[node]
                ]
            ).T
            if padding.any():
                found.add(_counts(padding))
                self._mask(node, counter, dict.fromkeys(given, padding))
        return found

    def mask_inputs(self, nodes: Sequence[Node]) -> set[Counts]:
        """Replace what stages take on padding in these loops by zeros. Gives, for each value that they take,
        in how many iterations nobody reads it on each device."""
        taken = {n: _Body(n).taken() for n in nodes}
        watched = {n.blocks[1]: list(own.values()) for n, own in taken.items()}
        liveness = Liveness(self.followed.forward, watched=watched)
        liveness.program(self.followed.entry)
        count = self.followed.forward.num_devices
        found: set[Counts] = set()
        for node, own in taken.items():
            counter = counter_of(self.followed, node)
            tables: dict[Instruction, np.ndarray] = {}
            for value, result in own.items():
                live = liveness.live.get(result.root, {})
                padding = np.ones((count, len(self.followed.origins[node].iterations)), bool)
                for t, mask in live.items():
                    assert t is not None
                    padding[:, t] = ~mask.any(tuple(range(1, mask.ndim)))
                found.add(_counts(padding))
                if padding.any() and not padding.all():
                    tables[value] = padding
            if counter is not None and tables:
                self._mask(node, counter, tables)
        return found

    def _mask(self, node: Node, counter: int, tables: Mapping[Instruction, np.ndarray]) -> None:
        """Let all that reads these values read zeros on these devices in these iterations."""
        body = node.instruction.called[0]
        b = self.editor.within(body)
        parameter = b.own(body.parameters[0])
        stands: dict[Instruction, Any] = {}
        works: dict[bytes, Any] = {}
        for value, padding in tables.items():
            b.metadata = value.proto.metadata
            key = padding.tobytes()
            if key not in works:
                device = b.device()
                where = [device, b.element(parameter, counter)]
                works[key] = b.is_one(b.lookup((~padding).astype(np.int32), where))
            stands[value] = _or_zeros(b, works[key], value)
        self.editor.redirect(body, stands, body.instructions)
        self.editor.sweep(body)


def _counts(padding: np.ndarray) -> Counts:
    return tuple(int(n) for n in padding.sum(1))


def _or_zeros(b: Builder, works: Any, value: Instruction) -> Any:
    own = shaped(b, value.proto, value.shape)
    return laid_out(b, b.select(works, own, b.zeros(own.shape)), value.shape)


class _Body:
    """The body of a loop of a pipeline that was followed: what its stages take and give."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.body = node.instruction.called[0]
        self.values = {n.instruction: n for n in node.blocks[1].nodes}
        self.permutes = [n.instruction for n in node.blocks[1].nodes if is_transfer(n)]

    def value(self, instruction: Instruction) -> Value | None:
        """The array of floats that an instruction gives, as it was followed."""
        index = 0
        source = handed_on(instruction)
        position = carried_position(source)
        if position is not None:
            found = self.node.blocks[1].parameters[position]
        else:
            if source.opcode == "get-tuple-element":
                index, source = int(source.proto.tuple_index), source.operands[0]
            node = self.values.get(source)
            if node is None or index >= len(node.results):
                return None
            found = node.results[index]
        return found if found.type is not None and found.type.dtype[0] in "fb" else None

    def given(self, zeros: Vanishing) -> dict[Instruction, Value]:
        """What is computed and then only moved, added to sums or zeros, or sent: what stages give."""
        found: dict[Instruction, Value] = {}
        stack = [*self.body.root.operands, *(o for p in self.permutes for o in p.operands)]
        seen = set(stack)
        while stack:
            top = stack.pop()
            sources = None if self._is_mask(top, zeros) else self._moved(top)
            if sources is None and self._is_added(top, zeros):
                sources = top.operands
            if sources is None:
                value = self.value(top)
                if value is not None:
                    found[top] = value
                continue
            fresh = [s for s in dict.fromkeys(sources) if s not in seen]
            seen |= set(fresh)
            stack += fresh
        return found

    def _moved(self, value: Instruction) -> Sequence[Instruction] | None:
        """What a value is moved from, or put together of; None if it is computed."""
        if carried_position(value) is not None or value.opcode in ("constant", "parameter"):
            return ()
        source = handed_on(value)
        if source is not value:
            return (source,)
        if moves(value) or value.opcode in _MOVED:
            return value.operands[:1]
        if value.opcode in ("concatenate", "pad"):
            return value.operands
        if value.opcode == "broadcast":
            return None if value.operands[0].shape.dimensions else value.operands
        if value.opcode == "select":
            return value.operands[1:]
        if value.opcode == "dynamic-update-slice":
            return value.operands[:2]
        return None

    def _is_mask(self, value: Instruction, zeros: Vanishing) -> bool:
        """Whether a value is masked as written, what is computed or zeros; that counts where products with
        zeros do not."""
        node = self.values.get(value)
        if value.opcode != "select" or node is None or not zeros.exact:
            return False
        others = [
            operand
            for operand, own in zip(value.operands[1:], node.operands[1:], strict=True)
            if not np.all([zeros.rows(*at, own) for at in zeros.seen[self.node]])
        ]
        if len(others) != 1:
            return False
        (source,) = others
        while moves(source):
            source = source.operands[0]
        return self._moved(source) is None and not self._is_added(source, zeros)

    def _is_added(self, value: Instruction, zeros: Vanishing) -> bool:
        """Whether a value is the sum of what the loop carries and something, or of zeros and something in
        each iteration."""
        if value.opcode != "add":
            return False
        positions = [carried_position(behind(o)) for o in value.operands]
        if any(n is not None and behind(self.body.root.operands[n]) is value for n in positions):
            return True
        terms = self.values[value].operands if value in self.values else ()
        rows = [[zeros.rows(*at, o) for o in terms] for at in zeros.seen[self.node]]
        return bool(terms) and bool(np.all([np.any(own, axis=0) for own in rows]))

    def taken(self) -> dict[Instruction, Value]:
        """What is received and moved, where it is computed with: what stages take."""
        moved = set(self.permutes)
        while True:
            before = len(moved)
            positions = {n for n, r in enumerate(self.body.root.operands) if r in moved}
            for instruction in self.body.instructions:
                if instruction is self.body.root:
                    continue
                sources = self._moved(instruction) or ()
                if carried_position(instruction) in positions or any(s in moved for s in sources):
                    moved.add(instruction)
            if len(moved) == before:
                break
        found: dict[Instruction, Value] = {}
        for instruction in self.body.instructions:
            if instruction in moved or instruction is self.body.root:
                continue
            for operand in needed_by(instruction):
                taken = operand
                while moves(taken) and taken.operands[0] in moved:
                    taken = taken.operands[0]
                value = self.value(taken) if taken in moved else None
                if value is not None:
                    found[taken] = value
        return found
