"""What each run of a stage has for itself, beside what the stage before gave, weights and residuals.

A stage may begin something of its own anew in each run: the sum of its layers' losses, or a random key that
it folds from its number and the microbatch's. Going back it may take what depends on these numbers too, as
the gradient of such a loss, which is zeros on padding. The new loop computes it in each run as the written
body does, with tables of numbers by device and microbatch. `owned` proves that a run needs nothing else for
it: no other run, no other stage, and nothing of the forward pass but what a run there had for itself.

What goes from stage to stage with a microbatch and is the same on all of them, as a mask of its tokens, is
computed in each run as the first stage does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..graph import LOGICAL_IDS, Instruction
from ..values import Node, Value
from .chains import Execution, Followed
from .emit import Builder
from .parts import Own, Part
from .pieces import instructions_of
from .refusal import Refusal, about
from .rewrite import shaped, without_sign_of_zero
from .sameness import NEVER_SAME, Class, Sameness, draws
from .walks import Walk

Runs = Sequence[Mapping[int, Execution]]  # by microbatch and device


@dataclass(frozen=True, eq=False)
class Owned:
    """A value that each run computes: ``value`` of the body that ``walk`` goes through. ``plus``: whether
    zeros are added to it, which makes negative zeros positive. ``shape``: that which the layers take."""

    walk: Walk
    value: Instruction
    plus: bool
    shape: Any

    @property
    def reads(self) -> list[Instruction]:
        """What it reads that is there before the loops."""
        return self.walk.reads

    def emit(self, b: Builder, k: Any, device: Any, held: Mapping[Instruction, Any]) -> Any:
        """Add it for microbatch ``k``, an s32 scalar. ``held``: `reads`."""
        (found,) = self.walk.emit_all(b, k, device, held, [self.value])
        found = shaped(b, found, self.shape)
        return without_sign_of_zero(b, found) if self.plus else found


def owned(
    followed: Followed, forward: Part, backward: Part, order: Sequence[int],
    depends: set[Instruction], sameness: Sameness,
) -> dict[Own, Owned]:  # fmt: skip
    """How runs of both pipelines of a step compute what they have for themselves. ``order``: for each
    microbatch of the backward pass, its number in the forward pass. ``depends``: what depends on the forward
    loop. Raises `Refusal`."""
    there, back = _runs(forward, order), _runs(backward, range(len(order)))
    first = {d: group[0] for group in forward.groups for d in group}
    found: dict[Own, Owned] = {}

    def on_first_stages(runs: Runs) -> Runs:
        return [{d: by[first[d]] for d in by} for by in runs]

    def walked(part: Part, own: Own, runs: Runs, before: Runs) -> Owned:
        other = None
        if part is not forward:
            other = Walk(followed, forward, before, sameness=sameness, ends=False)
        return _owned(followed, part, own, runs, other, depends, sameness)

    def either(part: Part, own: Own, runs: Runs) -> Owned:
        try:
            return walked(part, own, runs, there)
        except Refusal:
            value, firsts = own.node.operands[own.position], on_first_stages(runs)
            pairs = [(by[d], at[d]) for by, at in zip(runs, firsts, strict=True) for d in by]
            if not _is_alike(followed, part, value, pairs, sameness):
                raise
        return walked(part, own, firsts, on_first_stages(there))

    for part, runs in ((forward, there), (backward, back)):
        for own in part.pipeline().owned.values():
            with about(part.name):
                try:
                    found[own] = either(part, own, runs)
                except Refusal as why:
                    raise Refusal(f"{own.why}: {why}") from None
    return found


def _is_alike(
    followed: Followed, part: Part, value: Value, pairs: Iterable[tuple[Execution, Execution]],
    sameness: Sameness,
) -> bool:  # fmt: skip
    """Whether a value has the same bits in both runs of each pair, of devices of one pipeline: both were sent
    from one place, as a mask that goes from stage to stage with its microbatch, or computed of what is the
    same on all stages."""
    group = {d: n for n, own in enumerate(part.groups) for d in own}
    stack = [(part.loop, value.root, at, other) for at, other in pairs]
    seen = set(stack)
    while stack:
        loop, value, at, other = stack.pop()
        origins = followed.origins[loop]
        if at == other:
            continue
        number = origins.number(value, at)
        if number is not None:
            if number != origins.number(value, other):
                return False
            continue
        one, two = (followed.of(loop, value, run) for run in (at, other))
        if one == two:
            continue
        node = one.made.node
        if (one.loop, one.begin) != (two.loop, two.begin) or one.made != replace(
            two.made, at=one.made.at
        ):
            return False
        devices = one.made.at.device, two.made.at.device
        if node is None:
            init = one.loop.instruction.operands[0].operands[one.made.leaf]
            if devices[0] != devices[1] and (
                group.get(devices[0], -1) != group.get(devices[1])
                or sameness.of(init) is not Class.SAME
            ):
                return False
            continue
        if not _is_function_of_operands(node):
            return False
        fresh = {(one.loop, o.root, one.made.at, two.made.at) for o in node.operands} - seen
        seen |= fresh
        stack += fresh
    return True


def _is_function_of_operands(node: Node) -> bool:
    """Whether what a node gives depends on nothing but its operands."""
    instruction = node.instruction
    return not (
        node.has_side_effect
        or instruction.opcode in NEVER_SAME
        or instruction.opcode in LOGICAL_IDS
        or any(c.needs_runtime or draws(c) for c in instruction.called)
    )


def _runs(part: Part, numbers: Sequence[int]) -> Runs:
    """By microbatch, the runs on each device. ``numbers``: those that the loop's microbatches have."""
    found: list[dict[int, Execution]] = [{} for _ in numbers]
    for run, (m, _) in part.places.items():
        found[list(numbers).index(m)][run.device] = run
    return found


def _owned(
    followed: Followed, part: Part, own: Own, runs: Runs,
    there: Walk | None, depends: set[Instruction], sameness: Sameness,
) -> Owned:  # fmt: skip
    """Where what all runs take was made by one instruction of the body, be it on another device, it is walked
    from there, else from where they take it."""
    value = own.node.operands[own.position]
    shape = own.node.instruction.operands[0].operands[own.position].shape
    origins = followed.origins[part.loop]
    made = [{d: origins.of(value, at) for d, at in by_device.items()} for by_device in runs]
    flat = [m for by_device in made for m in by_device.values()]
    plus = False
    body = part.loop.instruction.called[0]
    node, leaf = flat[0].node, flat[0].leaf
    same = {(m.node, m.leaf, m.slot, m.plus) for m in flat} == {(node, leaf, None, flat[0].plus)}
    group = {d: n for n, own_group in enumerate(part.groups) for d in own_group}
    side = all(group.get(m.at.device) == group[d] for by in made for d, m in by.items())
    if same and side and (node is None or node.instruction.computation is body):
        value = part.loop.blocks[1].parameters[leaf] if node is None else node.results[leaf]
        plus = flat[0].plus
        runs = [{d: m.at for d, m in by_device.items()} for by_device in made]
    walk = Walk(followed, part, runs, there, depends, sameness, ends=False)
    walk.needs([value])
    if value.root.node is not None:
        (instruction, *_) = instructions_of(value.root)
        return Owned(walk, instruction, plus, shape)
    position = walk.position[value.root]
    (instruction, *_) = (
        i for i in body.instructions
        if i.opcode == "get-tuple-element" and i.operands[0] is body.parameters[0]
        and i.proto.tuple_index == position
    )  # fmt: skip
    return Owned(walk, instruction, plus, shape)
