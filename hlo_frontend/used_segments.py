"""A program with another body, which lacks the segments that this one does not run, or has one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.collectives.types import TensorType
from stretto.runtime.program import (
    Block,
    Instruction,
    Program,
    Run,
    Segment,
    Slot,
    Start,
    instructions,
    with_blocks,
)


def with_body(program: Program, segments: Sequence[Segment], body: Block) -> Program:
    """``program`` with this body, and those of the segments, by whose numbers it runs them, that it needs."""
    used = {i.segment for i in instructions(body) if isinstance(i, Run)}
    started = {i.collective for i in instructions(body) if isinstance(i, Start)}
    used |= {
        c.reducer
        for i, c in enumerate(program.collectives)
        if c.reducer is not None and i in started
    }
    number = {old: new for new, old in enumerate(sorted(used))}

    def renumbered(block: Block) -> Block:
        return replace(block, instructions=tuple(map(moved, block.instructions)))

    def moved(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Run):
            return replace(instruction, segment=number[instruction.segment])
        return with_blocks(instruction, renumbered)

    return replace(
        program,
        segments=tuple(segments[i] for i in sorted(used)),
        collectives=tuple(
            c if c.reducer is None else replace(c, reducer=number.get(c.reducer, c.reducer))
            for c in program.collectives
        ),
        body=renumbered(body),
    )


def own_slots(body: Block, slot_types: list[TensorType]) -> tuple[Slot, ...]:
    """Slots for what one run gives in the place of this body: its results, but new ones for those that are
    parameters, as a donated argument that is given back as it came. ``slot_types`` gets their types."""
    taken = set(body.parameters)
    found: list[Slot] = []
    for result in body.results:
        if result in taken:
            slot_types.append(slot_types[result])
        slot = len(slot_types) - 1 if result in taken else result
        taken.add(slot)
        found.append(slot)
    return tuple(found)
