"""Which segments an engine must compile reproducibly (`runtime.program.Segment`).

A pipeline's loop computes its layers in inner loops. Interleaving replaces these by loops over fewer layers,
and promises the same bits. That rests on two things: the layers' computation is the same HLO in both, which
`pipelines` proves, and the engine compiles it the same in loops of any length, which is asked of it
here. It is asked of pipelines as they are written too, or the two could not be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stretto.collectives.ops import Kind
from stretto.runtime.program import Block, Loop, Program, Run, Start, instructions

_HOPS = frozenset({Kind.PERMUTE, Kind.SEND, Kind.RECV})


def marked(program: Program) -> Program:
    """The program, with the segments that loops with point-to-point transfers run ``reproducible``."""
    wanted = set(_segments(program, program.body))
    return replace(
        program,
        segments=tuple(
            replace(segment, reproducible=True) if index in wanted else segment
            for index, segment in enumerate(program.segments)
        ),
    )


def _segments(program: Program, block: Block) -> Iterator[int]:
    for instruction in instructions(block):
        if isinstance(instruction, Loop):
            inner = list(instructions(instruction.body))
            started = {i.collective for i in inner if isinstance(i, Start)}
            if any(program.collectives[c].kind in _HOPS for c in started):
                yield from (i.segment for i in inner if isinstance(i, Run))
