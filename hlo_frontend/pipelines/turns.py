"""Heads within the loops: what the last stage does to a microbatch between its way there and its way back.

A loss may be computed by the scan itself, on the last stage, for the microbatch that leaves it. The backward
loop then begins each microbatch's way back in its body: with what the head of the forward body has kept. In
the one loop of a schedule this is done at once, when the last stage *turns* a microbatch: the written
computation of both bodies, for the numbers that their carries have in the iterations in which that microbatch
leaves and comes back. Nothing is kept for it. `found` proves that a turn needs nothing else: it walks from
what the layers begin with in the backward pass back to

- what the last stage gave for the same microbatch,
- what is there before the loops,
- numbers that are known, such as the iteration's, and values that are known to be zeros there.

Predicates are known, so the walk goes only through the branches that are taken. Sums of the head's gradients,
which get zeros in all other iterations, are added up by the turns too, in the written order. So are results
of the forward loop that are no larger than what a stage gives, losses above all, left by the turns for the
loop behind that puts them where they belong (`Turn.gives`); larger ones are computed again there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..builder import tuple_shape
from ..graph import Instruction
from ..passes.valid.trace import is_transfer
from ..values import Value
from .chains import Execution, Followed
from .constants import behind
from .emit import Builder, fenced
from .gradients import adds_up
from .parts import Part
from .pieces import instructions_of
from .refusal import Refusal, about
from .walks import Walk


@dataclass(eq=False)
class Turn:
    """``begins``: by position in the carry of the layers of the backward pass, what a microbatch begins with
    there, in the backward loop's body. ``sums``: by position in that loop's carry, what its sums get."""

    there: Walk
    back: Walk
    begins: dict[int, Instruction]
    sums: dict[int, Instruction]

    @property
    def held(self) -> list[Instruction]:
        """What it reads that is there before both loops."""
        return self.back.reads

    @property
    def rounds(self) -> bool:
        """Whether an engine may round a turn otherwise than the written loops: what stands in their bodies
        may be one kernel with what stands beside it there. What is in a branch of a conditional stands
        apart in both."""
        return self.back.rounds

    def gives(self, needed: Iterable[int]) -> list[Value]:
        """Values of the forward body that turns leave for the loop behind, of which positions ``needed`` of
        the carry are wanted there: the largest parts of them that are no larger than what the last stage
        gives, and that are read for its microbatches alone."""
        walk = self.there
        part, block = walk.part, walk.block
        largest = sum(
            t.nbytes for i in part.layers.passed if (t := part.stage.results[i].type) is not None
        )
        wanted = [block.results[n].root for n in needed if block.results[n].root.node is not None]
        depends = self._depend_on_the_stage()
        found: dict[Value, None] = {}
        seen = set(wanted)
        stack = [v for v in wanted if v in depends]
        reached: dict[int, set[tuple[Value, int]]] = {}
        while stack:
            value = stack.pop()
            node = value.node
            if node is None or node is part.stage or value not in depends or is_transfer(node):
                continue
            if (
                value.type is not None
                and value.type.nbytes <= largest
                and node.instruction.computation is part.loop.instruction.called[0]
                and self._is_read_by_turns_alone(value, wanted, reached)
            ):
                try:
                    with about(part.name):
                        walk.needs([value])
                except Refusal:
                    pass
                else:
                    found[value] = None
                    continue
            fresh = [o.root for o in node.operands if o.root not in seen]
            seen |= set(fresh)
            stack += fresh
        return list(found)

    def _depend_on_the_stage(self) -> set[Value]:
        part = self.there.part
        found = set(part.stage.results)
        for node in self.there.block.nodes:
            if not is_transfer(node) and any(o.root in found for o in node.operands):
                found |= set(node.results)
        return found - set(part.stage.results)

    def _is_read_by_turns_alone(
        self, value: Value, wanted: Sequence[Value], reached: dict[int, set[tuple[Value, int]]]
    ) -> bool:
        """Whether a value is zeros, or not read, but where a microbatch leaves the last stage. ``reached``:
        by iteration, what is read."""
        walk = self.there
        own = {at for _, _, at in walk.flat}
        for t in range(len(walk.origins.iterations)):
            for d in range(walk.followed.forward.num_devices):
                at = Execution(t, d)
                if at in own or walk.origins.is_zero(value, at):
                    continue
                if t not in reached:
                    reached[t] = self._reached(wanted, t, own)
                if (value, d) in reached[t]:
                    return False
        return True

    def _reached(
        self, wanted: Sequence[Value], t: int, own: set[Execution]
    ) -> set[tuple[Value, int]]:
        """What devices need in an iteration for these values, but for those of ``own``."""
        walk = self.there
        devices = range(walk.followed.forward.num_devices)
        stack = [(v, d) for d in devices if Execution(t, d) not in own for v in wanted]
        seen = set(stack)
        while stack:
            value, device = stack.pop()
            node = value.node
            if node is None or node is walk.part.stage or is_transfer(node):
                continue
            operands = walk.selected(node, Execution(t, device))
            together = walk.members.get(node, {}).get(device, {device})
            fresh = {(o.root, d) for o in operands for d in together} - seen
            seen |= fresh
            stack += fresh
        return seen

    def emit(
        self, b: Builder, k: Any, device: Any, ys: Mapping[int, Any], held: Mapping[Instruction, Any],
        gives: Sequence[Value],
    ) -> tuple[dict[int, Any], dict[int, Any], list[Any]]:  # fmt: skip
        """Add the turn of microbatch ``k``, of which the last stage gave ``ys``: what the backward pass
        begins with, what its sums get, and ``gives``.

        What is done there and back are two computations, since a compiler may make one operation of a product
        in the one and a sum in the other, which are rounded apart as the loops are written.
        """
        values = list(dict.fromkeys([*self.back.kept, *gives]))
        there = [instructions_of(v)[0] for v in values]
        shapes = [i.shape for i in there]
        arguments = [k, device, *ys.values(), *held.values()]
        inner = b.editor.computation("schedule.head")
        own = inner.elements(inner.parameter(tuple_shape([a.shape for a in arguments])))
        here = dict(zip(ys, own[2:], strict=False))
        before = dict(zip(held, own[2 + len(ys) :], strict=True))
        inner.finish(inner.tuple(self.there.emit(inner, own[0], own[1], here, {}, before, there)))
        made = dict(zip(values, fenced(b, inner, k, arguments, shapes), strict=True))
        wanted = [*self.begins.values(), *self.sums.values()]
        arguments = [k, device, *(made[v] for v in values), *held.values()]
        inner = b.editor.computation("schedule.gradient")
        own = inner.elements(inner.parameter(tuple_shape([a.shape for a in arguments])))
        given = dict(zip(values, own[2:], strict=False))
        before = dict(zip(held, own[2 + len(values) :], strict=True))
        inner.finish(inner.tuple(self.back.emit(inner, own[0], own[1], {}, given, before, wanted)))
        found = fenced(b, inner, k, arguments, [i.shape for i in wanted])
        begins = dict(zip(self.begins, found, strict=False))
        sums = dict(zip(self.sums, found[len(begins) :], strict=True))
        return begins, sums, [made[v] for v in gives]


def found(
    followed: Followed, forward: Part, backward: Part, positions: Sequence[int],
    order: Sequence[int], depends: set[Instruction],
) -> Turn:  # fmt: skip
    """The turn of a step. ``positions``: those in the carry of the layers of the backward pass for which a
    microbatch begins within the loop. ``order``: for each microbatch of the backward pass, its number in the
    forward pass. ``depends``: what depends on the forward loop. Raises `Refusal`."""
    ways = [group[-1] for group in forward.groups]
    there_runs = [{d: Execution(forward.leaves[m], d) for d in ways} for m in order]
    back_runs = [{d: Execution(backward.enters[k], d) for d in ways} for k in range(len(order))]
    there = Walk(followed, forward, there_runs)
    back = Walk(followed, backward, back_runs, there, depends)
    given = backward.layers.loop.operands[0].operands
    back.needs([backward.stage.operands[i] for i in positions])
    sums: dict[int, Instruction] = {}
    body = backward.loop.instruction.called[0]
    taken = set(backward.sums.values())
    for carry, result in enumerate(backward.loop.blocks[1].results):
        node = result.root.node
        added = None if carry in taken else adds_up(backward, carry)
        if (
            added is None
            or node is None
            or node.instruction is not behind(body.root.operands[carry])
        ):
            continue
        if not _is_zero_but_at_turns(
            followed, backward, added, back
        ) or not followed.begins_with_zeros(backward.loop, carry, followed.forward.num_devices):
            continue
        try:
            back.needs([added])
        except Refusal:
            continue
        place = [o.root for o in node.operands].index(added.root)
        sums[carry] = node.instruction.operands[place]
    return Turn(there, back, {i: given[i] for i in positions}, sums)


def _is_zero_but_at_turns(followed: Followed, part: Part, added: Value, walk: Walk) -> bool:
    """Whether a value is known to be zeros but where a microbatch turns."""
    own = {at for _, _, at in walk.flat}
    return all(
        Execution(t, d) in own or walk.origins.is_zero(added, Execution(t, d))
        for t in range(part.trips)
        for d in range(followed.forward.num_devices)
    )
