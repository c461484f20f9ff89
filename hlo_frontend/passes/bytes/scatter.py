"""Makes an all-reduce a reduce-scatter if every device reads only its own part.

That halves the bytes on the wire. XLA's CPU pipeline never does it, so every program with sharded weights and
plain `jit` has such all-reduces for its gradients.

Bits: within a process, and between two processes, both add in the same order. Among more processes MPI adds
small arrays in an order of its own (`collectives.team`), so that sums of floats may round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.collectives.ops import Collective, Kind

from ...edit import Editor, restricted
from ...values import Node, Value
from .context import Context, Rewritten
from .own_parts import OwnPart, give_parts, own_parts, places
from .steps import part_of

# From how many bytes on a part of a combined all-reduce is worth a message of its own.
_WORTH_SPLITTING = 1 << 15  # bytes


def scatter(editor: Editor, node: Node, context: Context) -> Rewritten | None:
    """Rewrite ``node``; None if it stays.

    XLA combines all-reduces into one with several operands. The operands whose own parts are read along one
    dimension become one reduce-scatter; the others, if any, stay an all-reduce.
    """
    collective = node.collective
    if collective is None or collective.kind is not Kind.ALL_REDUCE:
        return None
    where = places(collective) if context.has_slices else None
    if where is None:
        return None
    slices: dict[int, list[OwnPart]] = {}
    along: dict[int, list[int]] = {}  # dimension -> operands that are read in parts along it
    for k, result in enumerate(node.results):
        taken, others = own_parts(editor, context.known, result, where)
        dimensions = {own.dimension for own in taken}
        if not others and len(dimensions) == 1 and not any(own.cuts_more for own in taken):
            along.setdefault(dimensions.pop(), []).append(k)
            slices[k] = taken
    if len(along) == 1 and len(slices) == len(node.results):
        (dimension,) = along
        chosen = list(slices)
        results = _scattered(collective, chosen, dimension, where.parts, node)
        editor.change(node, node.operands, *results)
        for k, part in zip(chosen, results[0], strict=True):
            give_parts(editor, node, part, slices[k], where.parts)
        return _said(slices, chosen)
    return _split(editor, node, collective, slices, along, where.parts)


def _split(
    editor: Editor,
    node: Node,
    collective: Collective,
    slices: dict[int, list[OwnPart]],
    along: dict[int, list[int]],
    parts: int,
) -> Rewritten | None:
    """Put reduce-scatters of the operands that are worth it right behind ``node``."""
    worth = {
        dimension: chosen
        for dimension, chosen in along.items()
        if sum(collective.operands[k].nbytes for k in chosen) >= _WORTH_SPLITTING
    }
    if not worth or node.reducer is not None or node in editor.ordered:
        return None
    split = [k for chosen in worth.values() for k in chosen]
    for dimension, chosen in worth.items():
        new = Node(node.kind, node.instruction, -1, [node.operands[k] for k in chosen], node.order)
        new.results, new.collective = _scattered(collective, chosen, dimension, parts, new)
        editor.put_behind(node, [new])
        for k, part in zip(chosen, new.results, strict=True):
            give_parts(editor, node, part, slices[k], parts)
    left = [k for k in range(len(node.results)) if k not in split]
    if left:
        editor.restrict(node, left)
    else:
        editor.remove(node)
    return _said(slices, split)


def _scattered(
    collective: Collective, chosen: Sequence[int], dimension: int, parts: int, node: Node
) -> tuple[list[Value], Collective]:
    """The results and the collective of ``node`` as a reduce-scatter of these operands."""
    types = tuple(part_of(collective.results[k], dimension, parts) for k in chosen)
    scattered = replace(
        restricted(collective, chosen),
        kind=Kind.REDUCE_SCATTER,
        results=types,
        dimension=dimension,
    )
    return [Value(t, node, i) for i, t in enumerate(types)], scattered


def _said(slices: dict[int, list[OwnPart]], chosen: Sequence[int]) -> Rewritten:
    names = ", ".join(own.node.instruction.name for k in chosen for own in slices[k])
    return Rewritten(f"becomes a reduce-scatter: every device reads its own part only ({names})")
