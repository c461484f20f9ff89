"""Keeps what stages gave where the backward pass computes it again for others than their own layers.

With `jax.checkpoint` around a whole iteration, a head in the loop is computed again in the backward pass, of
what its stage gives, which is computed again too. In a schedule a microbatch turns round on the last stage,
which has what it gave. So the forward loop keeps that, in a stack with a row for each iteration, and all that
reads it in the backward loop reads the row: as where the stage alone is under `jax.checkpoint`. It must be
proved that it is computed again in the same way of the same values, in all iterations and on all devices
(see `alike`); an engine may round it otherwise there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Instruction, Module
from ..passes.valid.trace import is_transfer
from ..values import Node, Value
from .alike import Again, is_computed, rows_read
from .chains import Followed, Origins
from .emit import Editor
from .kept_stacks import Stack, beside, is_row, stacks, users_of
from .one_layer import MOVES
from .pieces import instructions_of
from .recognize import follow
from .sunk import with_constants


def as_given(
    module: Module, names: Sequence[str], num_replicas: int, num_partitions: int
) -> Module | None:
    """The module with what stages of these loops give in stacks, where it is computed again; None if none
    is. Raises `GaveUpError`."""
    for name in names:
        module = with_constants(module, name)
    entry = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
    followed = follow(entry, num_replicas, num_partitions)
    loops = {n.instruction: n for n in followed.origins if n.instruction.name in names}
    editor = Editor(module)
    found = False
    for loop, node in loops.items():
        for stack in stacks(loop):
            if stack.there in loops:
                kept = _kept(followed, loops[stack.there], node, stack)
                if kept is not None:
                    beside(editor, stack, *kept)
                    found = True
                    break
    return Module.parse(editor.finish()) if found else None


def _kept(
    followed: Followed, there: Node, back: Node, stack: Stack
) -> tuple[Instruction, Mapping[Instruction, Sequence[Instruction]]] | None:
    """A row of a stack that is read, and what the loops are to keep beside it, as of `beside`."""
    nodes = {n.instruction: n for loop in (there, back) for n in loop.blocks[1].nodes}
    row = next((r for r in stack.rows() if r in nodes and is_row(r, stack.update)), None)
    if row is None:
        return None
    when = rows_read(followed, (there, back), nodes[stack.update], nodes[row])
    iterations = {(at.iteration, before.iteration) for at, before in when.items()}
    if len(iterations) != len(followed.origins[back].iterations):
        return None
    again = Again(followed, there, back, when)
    kept: dict[Instruction, list[Instruction]] = {}
    for sent in filter(is_transfer, there.blocks[1].nodes):
        for given in _given(followed.origins[there], sent):
            alike = [
                i
                for node in back.blocks[1].nodes
                for value in node.results
                if value.type == given.type and again.is_same(given, value)
                for i in instructions_of(value)
                if users_of(i)
            ]
            if alike:
                kept[instructions_of(given)[0]] = alike
                break
    return (row, kept) if kept else None


def _given(origins: Origins, sent: Node) -> Iterator[Value]:
    """What a stage may have given of what a loop sends: what that is handed on from, or chosen from by
    numbers that are known, and is computed in floats."""
    block = origins.block
    position = {p: n for n, p in enumerate(block.parameters)}
    root = sent.operands[0].root
    if root in position:  # it is sent in the next iteration
        root = block.results[position[root]].root
    todo, seen = [root], set()
    while todo:
        value = todo.pop()
        if value in seen or value.node is None:
            continue
        seen.add(value)
        made, operands = value.node.instruction, value.node.operands
        if made.opcode == "select" and all(
            origins.row(operands[0], at) is not None for at in origins.executions()
        ):
            todo += [o.root for o in operands[1:]]
        elif made.opcode in MOVES:
            todo.append(operands[0].root)
        elif not is_transfer(value.node) and is_computed(value):
            yield value
