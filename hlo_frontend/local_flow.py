"""Loops and branches without collectives that were left to the walk, since they read the device's own id.

XLA's partitioner puts device ids into loops: where a sharded constant or iota is read in one, for example. A
module has no way to ask for them, so the loop was walked, its body a segment that ran once in each iteration.
Here such control flow becomes one segment that is given the ids.

So does a program that hands arguments on: XLA leaves no instruction of a reshape, or of what a step of
training returns as it was, and copying them to arrays of their own was the walk's, one by one.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.runtime.program import (
    Block,
    Branch,
    Copy,
    Free,
    Instruction,
    LogicalId,
    Loop,
    Program,
    Run,
    Segment,
    Slot,
    Start,
    calls_back,
    instructions,
    with_blocks,
)

from .region_module import plain_module
from .used_segments import own_slots, with_body
from .work import work_of


def as_segments(program: Program) -> Program:
    """The program with its outermost loops and branches that neither communicate nor call back as segments;
    with one segment, if there is nothing else, or nothing but copies of arguments."""
    state = _Rewriting(program)
    flows = [i for i in program.body.instructions if isinstance(i, Loop | Branch)]
    whole = (bool(flows) or _hands_on(program)) and state.is_local(program.body)
    body = state.whole() if whole else state.block(program.body)
    if len(state.segments) == len(program.segments):
        return program
    program = replace(program, slot_types=tuple(state.slot_types))
    return with_body(program, state.segments, body)


def _hands_on(program: Program) -> bool:
    """Whether it gives some arguments as they came, and what one segment makes of others, or no more."""
    body = program.body
    runs = sum(isinstance(i, Run) for i in body.instructions)
    copies = any(isinstance(i, Copy) for i in body.instructions)
    return runs <= 1 and (copies or not set(body.parameters).isdisjoint(body.results))


class _Rewriting:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.segments = list(program.segments)
        self.slot_types = list(program.slot_types)

    def whole(self) -> Block:
        body, program = self.program.body, self.program
        donated = tuple(body.parameters[i] for i in program.donated)
        made = self.segment(program.name, body, body.parameters, body.results, donated)
        results = own_slots(body, self.slot_types)
        own = [replace(i, outputs=results) if isinstance(i, Run) else i for i in made]
        return Block(body.parameters, tuple(own), results)

    def block(self, block: Block) -> Block:
        made: list[Instruction] = []
        for instruction in block.instructions:
            flow = instruction if isinstance(instruction, Loop | Branch) else None
            if flow is not None and self.is_local(Block((), (flow,), ())):
                made += self.flow(flow)
            else:
                made.append(with_blocks(instruction, self.block))
        return replace(block, instructions=tuple(made))

    def is_local(self, block: Block) -> bool:
        """Whether it neither communicates nor calls back, and nothing in it is left out."""
        for instruction in instructions(block):
            if isinstance(instruction, Start):
                return False
            if isinstance(instruction, Run):
                segment = self.program.segments[instruction.segment]
                if instruction.valid or segment.sites or calls_back(segment.module):
                    return False
        return True

    def flow(self, flow: Loop | Branch) -> list[Instruction]:
        donated: tuple[Slot, ...] = ()
        if isinstance(flow, Loop):
            given, donated = flow.inputs, flow.donated
        else:
            given = (flow.selector, *(s for taken in flow.inputs for s in taken))
        inputs = tuple(dict.fromkeys(given))
        return self.segment(flow.name, Block((), (flow,), ()), inputs, flow.outputs, donated)

    def segment(
        self,
        name: str,
        block: Block,
        inputs: tuple[Slot, ...],
        outputs: tuple[Slot, ...],
        donated: tuple[Slot, ...],
    ) -> list[Instruction]:
        """What runs the block's instructions as a segment, which is added."""
        program = self.program
        ids: dict[str, Slot] = {}
        ran: set[int] = set()
        for instruction in instructions(block):
            if isinstance(instruction, LogicalId) and instruction.kind not in ids:
                ids[instruction.kind] = len(self.slot_types)
                self.slot_types.append(program.slot_types[instruction.output])
            elif isinstance(instruction, Run):
                ran.add(instruction.segment)
        inputs = (*inputs, *ids.values())
        whole = replace(program, slot_types=tuple(self.slot_types))
        work = work_of(self.program, block.instructions)
        made = Segment(
            tuple(self.slot_types[s] for s in inputs),
            tuple(program.slot_types[s] for s in outputs),
            plain_module(whole, ids, inputs, outputs, donated, block.instructions),
            donated=tuple(sorted(inputs.index(s) for s in donated)),
            arithmetic=work.arithmetic,
            flops=work.flops,
            name=name,
            reproducible=any(program.segments[i].reproducible for i in ran),
            once=any(program.segments[i].once for i in ran),
            iterations=work.iterations,
        )
        self.segments.append(made)
        run = Run(len(self.segments) - 1, inputs, outputs, donated)
        before = [LogicalId(kind, slot) for kind, slot in ids.items()]
        return [*before, run, *([Free(tuple(ids.values()))] if ids else [])]
