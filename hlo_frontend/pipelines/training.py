"""Finds steps of training: a pipeline, and a second one that goes back through its layers.

What `recognize` proves of both lets each of them be run in any order of stages and microbatches. To run them
in one loop, a microbatch backwards on a stage while others still go forwards, it must be proved besides that

1. what a microbatch begins with in the forward pass is there before the loop, and depends on no other
   iteration of it (on its carry only where that is never changed, or is known);
2. what it begins with in the backward pass depends on nothing of the forward pass but what the last stage
   gave for the same microbatch: it is one row of an array that is computed between the loops (see `rows`), or
   is computed within them (see `turns`);
3. all else that the backward pass reads is there before the loop;
4. what runs have for themselves needs no other run (see `owned`);
5. what else is read of runs, as losses of layers that are summed up, is small, or no larger than what goes
   from stage to stage, so that it can be kept for each microbatch, and added up behind the loop in the
   written order.

The backward pass, as JAX makes it of a scan, goes through the microbatches from last to first. The loop takes
them in its order, so that sums of gradients keep theirs. All other results of both loops, as they are
written, are made behind it, iteration by iteration, from what the last stages gave (see `merged`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..graph import Instruction, leaf_types
from ..passes.valid.trace import is_transfer
from .chains import Execution, Followed
from .constants import Constants, behind
from .emit import needed_by
from .members import Members
from .owned import Owned, owned
from .parts import Own, Part, Pipeline
from .pieces import Pieces, instructions_of
from .refusal import Refusal, about
from .rows import Rows, separated
from .sameness import Sameness
from .turns import Turn, found

# As many bytes of each microbatch are kept for others wherever they are read.
_SMALL = 1 << 12


@dataclass(frozen=True)
class Begin:
    """What the backward pass begins with: for microbatch m, row ``slots[m]`` of what ``rows`` computes; zeros
    if that is None. ``plus``: whether zeros are added to it on its way, which makes negative zeros positive.

    ``given``: by result of the forward loop that is read, and shift, the layers' value that its row is, and
    whether zeros were added to that.
    """

    rows: Rows | None
    slots: tuple[int, ...]
    plus: bool
    given: dict[tuple[int, int], tuple[int, bool]]


@dataclass(frozen=True, eq=False)
class Training:
    """A pipeline ``forward`` and its gradient ``backward``.

    ``order``: for each microbatch of the backward pass, its number in the forward pass. ``begins``: by
    position in the carry of the layers of the backward pass, what a microbatch begins with there.
    ``known``: by position in the carry of the forward loop, numbers on which the input of a microbatch
    depends, [devices, microbatches], in the order of the backward pass. ``turn``: what the last stage does
    where a microbatch begins its way back within the loop. ``owned``: how runs compute what they have for
    themselves.
    """

    forward: Pipeline
    backward: Pipeline
    order: tuple[int, ...]
    begins: dict[int, Begin]
    known: dict[int, np.ndarray]
    turn: Turn | None = None
    owned: dict[Own, Owned] = field(default_factory=dict)

    def read_by_runs(self, pipeline: Pipeline) -> list[Instruction]:
        """What runs read, for what they have for themselves, that is there before the loops."""
        return list(
            dict.fromkeys(i for own in pipeline.owned.values() for i in self.owned[own].reads)
        )


def owner_of(part: Part, parts: Sequence[Part]) -> Part:
    """The pipeline whose residuals the layers of this one read. Raises `Refusal`."""
    names = {kept.loop for kept in part.pipeline().kept}
    if not names:
        raise Refusal(
            "it reads nothing that the layers of another pipeline keep, and no other reads what its own "
            "layers keep: there are no forward and backward passes to run in turns"
        )
    if len(names) > 1:
        raise Refusal("its layers read what those of more than one pipeline keep")
    (name,) = names
    return next(p for p in parts if p.name == name)


def training(
    followed: Followed, forward: Part, backward: Part, pieces: Pieces, sameness: Sameness
) -> Training:
    """The step that two loops make. ``pieces``: of the forward loop. ``sameness``: for its groups. Raises
    `Refusal`."""
    there, back = forward.pipeline(), backward.pipeline()
    orders = {kept.order for kept in back.kept}
    if len(orders) > 1:
        raise Refusal("its layers read what others kept in more than one order")
    (order,) = orders
    with about(forward.name):
        summed = "what its layers give is summed up over microbatches in the forward pass"
        there = replace(
            there, sums={}, elsewhere=there.elsewhere | dict.fromkeys(there.sums, summed)
        )
        _check_size(there)
        known = _known(followed, forward, pieces, order)
    members = Members(followed, forward, sameness)
    begins: dict[int, Begin] = {}
    inside: list[int] = []
    for i in back.sent:
        begin = _begin(followed, forward, backward, i, order, members)
        if begin is None:
            inside.append(i)
        else:
            begins[i] = begin
    stacked = [why for i, why in back.elsewhere.items() if i in back.layers.stacked]
    if stacked:
        raise Refusal(stacked[0])
    depends = dependents(forward.loop.instruction)
    own = owned(followed, forward, backward, order, depends, sameness)
    turn = found(followed, forward, backward, inside, order, depends) if inside else None
    return Training(there, back, order, begins, known, turn, own)


def _check_size(pipeline: Pipeline) -> None:
    """Check that what is kept of each microbatch for others is small, or takes no more than what goes on with
    it."""
    layers = pipeline.layers
    whole = layers.loop.shape.tuple_shapes
    sizes = {
        i: sum(t.nbytes for t in leaf_types(whole[i], layers.loop) if t) for i in range(len(whole))
    }
    sent = sum(sizes[p] for p in pipeline.sent)
    for i in pipeline.elsewhere:
        if i in layers.stacked and sizes[i] > max(sent, _SMALL):
            raise Refusal(
                f"what the layers of a stage give to {layers.updates[i].describe()} for a microbatch, "
                f"{sizes[i]} bytes, is read by others than their gradient; it would be kept for all "
                f"microbatches, and is larger than what goes on to the next stage, {sent} bytes"
            )


def dependents(loop: Instruction) -> set[Instruction]:
    """The instructions of the entry computation that depend on what a loop computes."""
    unchanged = unchanging(loop)
    found = {loop}
    for instruction in loop.computation.instructions:
        if instruction in unchanged:
            continue
        summed = summed_alone(instruction)
        if any(o in found for o in (needed_by(instruction) if summed is None else (summed,))):
            found.add(instruction)
    return found - {loop}


def summed_alone(instruction: Instruction) -> Instruction | None:
    """The scalar of which this is the sum over devices, as an element of an all-reduce of more than that.

    None if it is anything else.

    XLA makes one all-reduce of the sum of a loss, say, and of that which the gradient of the sum begins with.
    """
    if instruction.opcode != "get-tuple-element" or instruction.operands[0].opcode != "all-reduce":
        return None
    scalar = instruction.operands[0].operands[instruction.proto.tuple_index]
    return None if scalar.shape.dimensions else scalar


def unchanging(loop: Instruction) -> dict[Instruction, Instruction]:
    """Results of a loop that are initial values: by instruction of the entry, the initial value."""
    reads = Constants(loop).reads
    results, init = loop.called[0].root.operands, loop.operands[0].operands
    own = {n for n, result in enumerate(results) if reads.get(behind(result)) == n}
    return {
        i: init[i.proto.tuple_index] for i in loop.computation.instructions
        if i.opcode == "get-tuple-element" and i.operands[0] is loop and i.proto.tuple_index in own
    }  # fmt: skip


def _known(
    followed: Followed, part: Part, pieces: Pieces, order: Sequence[int]
) -> dict[int, np.ndarray]:
    """Numbers of the carry on which a microbatch's input depends; see `Training.known`."""
    origins = followed.origins[part.loop]
    found: dict[int, np.ndarray] = {}
    devices = followed.forward.num_devices
    read = _read(followed, part)
    for position in pieces.taken_in:
        if position in pieces.unchanged or position not in read:
            continue
        parameter = part.loop.blocks[1].parameters[position]
        table = np.zeros((devices, len(order)), np.int32)
        for group in part.groups:
            for k, m in enumerate(order):
                at = Execution(part.enters[m], group[0])
                number = None
                if parameter.type is not None and not parameter.type.shape:
                    number = origins.number(parameter, at)
                if number is None or not -(2**31) <= number < 2**31:
                    raise Refusal(
                        "what a microbatch begins with depends on the iterations before it, by "
                        f"{parameter.type} at position {position} of the carry"
                    )
                table[group[0], k] = number
        found[position] = table
    return found


def _read(followed: Followed, part: Part) -> set[int]:
    """The positions of the carry that the input of a microbatch needs when it enters, on the first stage,
    where predicates are known."""
    origins, block = followed.origins[part.loop], part.loop.blocks[1]
    position = {p: n for n, p in enumerate(block.parameters)}
    found: set[int] = set()
    for chain in part.chains:
        stack = [part.stage.operands[i].root for i in part.pipeline().sent]
        seen = set(stack)
        while stack:
            value = stack.pop()
            node = value.node
            if node is None:
                found.add(position[value])
                continue
            operands = list(node.operands)
            if node.instruction.opcode == "select":
                taken = origins.row(operands[0], chain[0])
                operands = operands if taken is None else [operands[1 if taken else 2]]
            if is_transfer(node):
                operands = []  # nobody reads what is received when a microbatch begins: see `recognize`
            fresh = {o.root for o in operands} - seen
            seen |= fresh
            stack += fresh
    return found


def _begin(
    followed: Followed, forward: Part, backward: Part, i: int, order: Sequence[int],
    members: Members,
) -> Begin | None:  # fmt: skip
    """What microbatches begin with in the backward pass, at position ``i`` of its layers' carry; None if it
    is computed within the loop."""
    value = backward.stage.operands[i]
    origins = followed.origins[backward.loop]
    runs: dict[int, list[Execution]] = {}
    for chain in backward.chains:
        runs.setdefault(backward.places[chain[0]][0], []).append(chain[0])
    flat = [run for m in range(len(order)) for run in runs[m]]
    if all(origins.is_zero(value, run) for run in flat):
        return Begin(None, (), False, {})
    sources = {run: followed.of(backward.loop, value, run) for run in flat}
    first = sources[flat[0]]
    if first.begin is None or first.begin.node is None:
        return None
    for run, source in sources.items():
        if (
            source.begin is not first.begin
            or source.made.slot is None
            or source.made.plus != first.made.plus
            or source.made.at.device != run.device
        ):
            return None
    slots: list[int] = []
    for m in range(len(order)):
        own = {sources[run].made.slot for run in runs[m]}
        if len(own) != 1:
            return None
        slots.append(own.pop() or 0)
    made = first.begin.node.instruction
    if len(first.begin.node.results) != 1 and made.opcode != "reduce":
        return None
    (result, *_) = instructions_of(first.begin)
    taken = backward.stage.instruction.shape.tuple_shapes[i].dimensions
    if [d for d in result.shape.dimensions[1:] if d != 1] != [d for d in taken if d != 1]:
        return None
    loop = forward.loop.instruction
    rows = separated(result, loop, dependents(loop), members)
    rows.check(slots)
    given = {
        (leaf, shift): _given(followed, forward, leaf, [s + shift for s in slots], order)
        for leaf, shift in rows.leaves
    }
    return Begin(rows, tuple(slots), first.made.plus, given)


def _given(
    followed: Followed, part: Part, leaf: int, slots: Sequence[int], order: Sequence[int]
) -> tuple[int, bool]:
    """The value of the layers' carry that these rows of a result of the forward loop are, given by the last
    stage for these microbatches."""
    origins = followed.origins[part.loop]
    result = part.loop.blocks[1].results[leaf]
    last = len(part.groups[0]) - 1
    found: set[tuple[int, bool]] = set()
    for group in part.groups:
        for slot, microbatch in zip(slots, order, strict=True):
            made = origins.of(result, Execution(part.trips - 1, group[last]), slot)
            place = part.places.get(made.at)
            if (
                made.node is not part.stage
                or made.slot is not None
                or made.leaf not in part.layers.passed
                or place != (microbatch, last)
                or made.at.device != group[last]
            ):
                raise Refusal(
                    "what a microbatch begins with in the backward pass depends on more than what the last "
                    f"stage gave for it: row {slot} of the result {leaf} of the loop is not that"
                )
            found.add((made.leaf, made.plus))
    if len(found) != 1:
        raise Refusal("what the last stage gives is collected in more than one way")
    return found.pop()


def kept_bytes(step: Training, chunks: int = 1) -> int:
    """Bytes that a device's layers, or those of one of its chunks, keep of one microbatch for the backward
    pass."""
    layers = step.forward.layers
    total = 0
    for i in {w.leaf for w in step.backward.kept}:
        types = leaf_types(layers.loop.shape.tuple_shapes[i], layers.loop)
        own = sum(t.nbytes for t in types if t is not None)
        total += own // chunks if i in layers.stacked else own
    return total
