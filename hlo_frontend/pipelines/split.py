"""Splits a backward run of layers into what the next stage waits for, and what only weights' gradients need.

A layer's gradients of its weights are often products of their own, which nothing else of the layer reads.
The run backwards leaves for them what they read of it (`Split.left`), and a run of weights makes them
later. Of what they read, that which a compiler would make one kernel of with them is computed again, so
that they are rounded alike; what the layers keep and their weights are read again. So left are results of
products, of collectives and the like, and the values that go from layer to layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph import Instruction
from ..ops import op_of
from ..schema import TUPLE
from .emit import needed_by, slice_of
from .layers import LayerLoop


@dataclass(frozen=True)
class Split:
    """``left``: by key of `LayerRun`, values of a layer's body that are left for runs of weights."""

    left: dict[int, Instruction]


FIRST_KEY = 1 << 20  # behind all positions in a carry


def split(layers: LayerLoop, sums: Sequence[int], cut: Sequence[int]) -> Split:
    """How layers backwards are split. ``sums``: positions of stacks that are gradients; ``cut``: those of
    stacks that are computed again before the run, and not kept."""
    body = layers.loop.called[0]
    goes_on = set(slice_of([body.root.operands[p] for p in layers.passed], set()))
    reads = {
        i for i in body.instructions
        if i.opcode == "get-tuple-element" and i.operands[0] is body.parameters[0]
    }  # fmt: skip
    changes = {r for r in reads if r.proto.tuple_index in layers.passed}
    changes |= {s for position in cut for s in layers.slices[position]}
    left: dict[Instruction, None] = {}
    stack = [layers.updates[i].operands[1] for i in sums]
    seen = set(stack)
    while stack:
        value = stack.pop()
        made = goes_on.intersection([value, *_made_by(value)])
        if value in changes or (made and not _is_computed_again(value, reads)):
            left[value] = None
            continue
        fresh = [o for o in needed_by(value) if o not in seen and o not in reads - changes]
        seen |= set(fresh)
        stack += [o for o in fresh if o is not body.parameters[0]]
    place = {i: n for n, i in enumerate(body.instructions)}
    ordered = sorted(left, key=lambda i: place[i])
    return Split({FIRST_KEY + n: i for n, i in enumerate(ordered)})


def _made_by(value: Instruction) -> tuple[Instruction, ...]:
    """The loop or the like of which it is a result: that which goes on gives the others at once."""
    return value.operands if value.opcode == "get-tuple-element" else ()


def _is_computed_again(value: Instruction, reads: set[Instruction]) -> bool:
    if value in reads or value.shape.element_type == TUPLE:
        return True
    if value.opcode == "get-tuple-element":
        return _moves_only(value.operands[0])
    op = op_of(value.opcode)
    return op.fuses or op.renames or value.opcode in ("constant", "iota", "dynamic-slice")


def _moves_only(made: Instruction) -> bool:
    """Whether a tuple is made of other values as they are. Of what a loop or a conditional gives, its arrays
    are left."""
    op = op_of(made.opcode)
    return op.fuses or op.renames or made.opcode in ("tuple", "get-tuple-element", "parameter")
