"""What each run of a stage has for itself, beside what the stage before gave, weights and residuals.

A stage may begin something of its own anew in each run: the sum of its layers' losses, or a random key that
it folds from its number and the microbatch's. Going back it may take what depends on these numbers too, as
the gradient of such a loss, which is zeros on padding. The new loop computes it in each run as the written
body does, with tables of numbers by device and microbatch. `owned` proves that a run needs nothing else for
it: no other run, no other stage, and nothing of the forward pass but what a run there had for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..graph import Instruction
from .chains import Execution, Followed
from .emit import Builder
from .parts import Own, Part
from .pieces import instructions_of
from .refusal import Refusal, about
from .rewrite import shaped, without_sign_of_zero
from .sameness import Sameness
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
    found: dict[Own, Owned] = {}
    for part, runs in ((forward, there), (backward, back)):
        for own in part.pipeline().owned.values():
            with about(part.name):
                try:
                    other = None
                    if part is not forward:
                        other = Walk(followed, forward, there, sameness=sameness, ends=False)
                    found[own] = _owned(followed, part, own, runs, other, depends, sameness)
                except Refusal as why:
                    raise Refusal(f"{own.why}: {why}") from None
    return found


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
