"""Leaves barriers out of the bodies of pipelined loops.

`jax.checkpoint` puts what it computes again behind an optimization barrier, so that no compiler finds that
the forward pass has computed the same (``prevent_cse``). A loop's body has nothing of that: the forward pass
is a loop of its own, and in the loop of a schedule the runs of both are computations of their own. A barrier
changes no value, but around a whole iteration it hides what stages take, give and hand on.
"""

from __future__ import annotations

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Instruction, Module
from .emit import Editor
from .inline import before_barrier
from .recognize import is_candidate


def without_barriers(serialized: bytes, num_replicas: int, num_partitions: int) -> bytes | None:
    """The module without barriers in the bodies of loops of its entry computation that have transfers; None
    if there are none."""
    module = Module.parse(serialized)
    entry = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
    editor, found = Editor(module), False
    for loop in (n.instruction for n in entry.nodes if is_candidate(n)):
        body = loop.called[0]
        sources = {i: _source(i) for i in body.instructions}
        stands = {i: editor.within(body).own(s) for i, s in sources.items() if s is not i}
        if stands and body.root not in stands:
            editor.redirect(body, stands, body.instructions)
            editor.sweep(body)
            found = True
    return editor.finish() if found else None


def _source(value: Instruction) -> Instruction:
    """What goes into the first of the barriers of which this comes out, or itself."""
    while (given := before_barrier(value)) is not None:
        value = given
    return value
