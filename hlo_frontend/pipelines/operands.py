"""Traces the operands of a stage's layers to their origins, in each run of the stage."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..graph import Instruction
from ..values import Node
from .chains import Execution, Followed, Made, Source
from .constants import Constant
from .parts import Kept, Own, Part, Recomputed
from .pieces import instructions_of
from .refusal import Refusal


def operand(
    followed: Followed, part: Part, parts: Sequence[Part], node: Node, i: int
) -> Constant | Kept | Recomputed | Own:
    """The origin of an operand of ``node``, a loop over layers in the body of a part's loop, in all live
    runs; what each of them has for itself if it is not the same origin.

    Raises `Refusal`.
    """
    given = node.instruction.operands[0].operands[i]
    if part.constants.has(given):
        return Constant(given, part.loop.instruction)
    value = node.operands[i]
    sources = [followed.of(part.loop, value, run) for run in part.live]
    first = sources[0]
    made = first.made
    same = all(
        (s.loop, s.made.node, s.made.leaf, s.begin) == (first.loop, made.node, made.leaf, first.begin)
        and s.made.slot is None
        and not s.made.plus
        and s.made.at.device == run.device
        for s, run in zip(sources, part.live, strict=True)
    )  # fmt: skip
    own = Own(
        node, i, f"{given.describe()}, which its layers take, changes from iteration to iteration"
    )
    if not same:
        return own
    if made.node is None:
        instruction = first.loop.instruction.operands[0].operands[made.leaf]
        return Constant(instruction, None) if _fits(instruction, given) else own
    owner = next((p for p in parts if p.stage is made.node), None)
    if owner is not None and owner is not part and made.leaf in owner.layers.stacked:
        if value.type != made.node.results[made.leaf].type:
            raise Refusal(own.why)
        order = _order(part, owner, sources, given.describe())
        return Kept(owner.name, made.leaf, order)
    here = all(s.made.at == run for s, run in zip(sources, part.live, strict=True))
    home = next((p for p in parts if p.loop is first.loop), None)
    constant = None if home is None else _constant(home, made)
    if constant is not None and _fits(constant.value, given):
        return constant
    if made.node.instruction.opcode == "while" and first.loop is part.loop and here:
        return Recomputed(made.leaf, made.node)
    if made.node.instruction.opcode == "while":
        raise Refusal(
            f"{given.describe()}, which its layers take, is kept by {made.node.instruction.describe()} "
            f"in the loop %{first.loop.instruction.name}, which is not interleaved"
        )
    return own


def _constant(part: Part, made: Made) -> Constant | None:
    """What is made in the body of a part's loop, if it does not change."""
    assert made.node is not None
    found = instructions_of(made.node.results[made.leaf])
    if not found or found[0].computation is not part.loop.instruction.called[0]:
        return None
    value = found[0]
    return Constant(value, part.loop.instruction) if part.constants.has(value) else None


def _fits(made: Instruction, given: Instruction) -> bool:
    """Whether a value has the elements of the one that is taken, be it in other dimensions."""
    one, other = made.shape, given.shape
    return one.element_type == other.element_type and prod(one.dimensions) == prod(other.dimensions)


def _order(part: Part, owner: Part, sources: Sequence[Source], what: str) -> tuple[int, ...]:
    """For each microbatch of ``part``: its number in the pipeline ``owner``, which keeps its residuals."""
    opposite = part.layers.reverse != owner.layers.reverse
    stages = len(part.groups[0])
    wrong = (
        f"{what}, which its layers take, is not what the same layers kept for the same microbatch"
    )
    if {g[::-1] if opposite else g for g in part.groups} != set(owner.groups) or (
        part.layers.count != owner.layers.count
    ):
        raise Refusal(f"{wrong}: the stages are others")
    order: dict[int, int] = {}
    for run, source in zip(part.live, sources, strict=True):
        microbatch, stage = part.places[run]
        if source.made.at not in owner.places:
            raise Refusal(f"{wrong}{_when(run)}")
        kept, at = owner.places[source.made.at]
        if at != (stages - 1 - stage if opposite else stage):
            raise Refusal(f"{wrong}{_when(run)}")
        if order.setdefault(microbatch, kept) != kept:
            raise Refusal(f"{wrong}{_when(run)}")
    if sorted(order.values()) != list(range(len(owner.enters))):
        raise Refusal(wrong)
    return tuple(order[m] for m in range(len(part.enters)))


def _when(run: Execution) -> str:
    return f": on device {run.device} in iteration {run.iteration}"
