"""An all-reduce of which every device reads only its own part becomes a reduce-scatter.

Half the bytes on the wire. XLA's CPU pipeline never does it, so that every program with sharded weights and
plain `jit` has such all-reduces for its gradients.

Bits: within a process, and between two processes, both add in the same order. Among more processes MPI adds
small arrays in an order of its own (`collectives.mpi`), so that sums of floats may round differently.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.collectives.ops import Kind

from ...values import Node, Value
from .context import Context, Rewritten
from .edit import Editor
from .own_parts import give_parts, own_parts, places
from .steps import part_of


def scatter(editor: Editor, node: Node, context: Context) -> Rewritten | None:
    """Rewrite ``node``; None where it stays."""
    collective = node.collective
    if collective is None or collective.kind is not Kind.ALL_REDUCE:
        return None
    where = places(collective) if context.has_slices else None
    if where is None:
        return None
    found = []
    for result in node.results:
        taken, others = own_parts(editor, context.known, result, where)
        if others or not taken:
            return None
        found.append(taken)
    dimensions = {own.dimension for taken in found for own in taken}
    if len(dimensions) != 1:
        return None
    (dimension,) = dimensions
    types = tuple(part_of(t, dimension, where.parts) for t in collective.results)
    results = [Value(t, node, i) for i, t in enumerate(types)]
    scattered = replace(collective, kind=Kind.REDUCE_SCATTER, results=types, dimension=dimension)
    editor.change(node, node.operands, results, scattered)
    for part, taken in zip(results, found, strict=True):
        give_parts(editor, node, part, taken, where.parts)
    slices = ", ".join(own.node.instruction.name for taken in found for own in taken)
    return Rewritten(f"becomes a reduce-scatter: every device reads its own part only ({slices})")
