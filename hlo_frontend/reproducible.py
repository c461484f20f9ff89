"""Which segments an engine must compile reproducibly (`runtime.program.Segment`).

The loop of a pipeline computes its layers in inner loops. Interleaving replaces these by loops over fewer
layers, and promises the same bits. That needs two things: the layers' computation is the same HLO in both,
which `pipelines` proves, and the engine compiles it in the same way in loops of any length, which
`reproducible` asks for. Pipelines that are not interleaved ask for it too, so that both forms can be
compared.
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
