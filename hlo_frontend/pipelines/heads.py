"""Takes heads in a loop of one array of all stages apart from the stages, where both communicate.

A head whose rows an axis of the mesh divides has collectives of its own, among groups of devices of one
stage. They may stand under a conditional, and an all-reduce of what all stages have alike, as the gradient of
the head's weights, may be one with that of what each stage has for itself, since XLA combines them. `apart`
lets all devices take part, whatever they choose by, and makes two of such an all-reduce: so what a head
computes can be left to one stage (`by_owner`), and the stages keep theirs.
"""

from __future__ import annotations

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Module
from ..passes.valid.trace import is_transfer
from ..values import Node, NodeKind
from .connected import connected, side_by_side
from .emit import Editor, divided
from .inline import all_take_part
from .sameness import Class, Sameness


def apart(serialized: bytes, num_partitions: int) -> bytes:
    """The module with heads apart from stages in loops of its entry computation that have transfers."""
    module = Module.parse(serialized)
    reader = CollectiveReader(1, num_partitions)
    for name in [n.instruction.name for n in _loops(module, reader)]:
        module = all_take_part(module, name)
    editor = Editor(module)
    for node in _loops(module, reader):
        found = connected(node)
        groups = {found.get(d, frozenset({d})) for d in range(num_partitions)}
        sameness = Sameness(module, [sorted(group) for group in groups], reader, sums=True)
        classes = sameness.within(node.instruction)
        for collective in side_by_side(node):
            reduced = collective.instruction
            alike = [classes.get(o) is Class.SAME for o in reduced.operands]
            if reduced.opcode == "all-reduce" and len(set(alike)) == 2:
                same = [n for n, is_alike in enumerate(alike) if is_alike]
                divided(editor.replace(reduced), reduced, [same])
    return editor.finish()


def _loops(module: Module, reader: CollectiveReader) -> list[Node]:
    return [
        n for n in flatten(module.entry, reader).nodes
        if n.kind is NodeKind.LOOP and any(map(is_transfer, n.blocks[1].nodes))
    ]  # fmt: skip
