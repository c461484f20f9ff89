"""The segments of a program as an engine has compiled them: their machine code and their memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..engines.engine import (
    CallingEngine,
    Engine,
    LoadedSegment,
    RestoringEngine,
    SideBySideEngine,
)
from ..errors import CompileError
from ..program import Program, Run, Segment, calls_back, instructions
from ..program.memory_plan import MemoryPlan, plan
from ..recording import statistics
from .regions import register
from .side_by_side import among


@dataclass(frozen=True)
class CompiledSegments:
    """``segments[i]`` is ``program.segments[i]``, compiled; empty if the program has no device here."""

    program: Program
    engine: Engine
    segments: Sequence[LoadedSegment]
    has_host_callbacks: bool = False

    def code(self, program: Program | None = None) -> tuple[bytes, ...]:
        """The segments as the engine serializes them; ``program``: the same in another order.

        Empty for those that cannot be serialized: they will be compiled again.
        """
        wanted = (program or self.program).segments
        engine = self.engine
        if not isinstance(engine, RestoringEngine):
            return (b"",) * len(wanted)
        compiled = dict(zip(self.program.segments, self.segments, strict=False))
        code = []
        for segment in wanted:
            # Segments that call back are compiled anew: the process that loads them has other functions.
            wants = segment in compiled and not calls_back(segment.module)
            try:
                code.append(engine.serialize(compiled[segment]) if wants else b"")
            except CompileError:
                code.append(b"")
        return tuple(code)

    def memory(self) -> MemoryPlan:
        """Memory that a run needs on each device."""
        return plan(self.program, [getattr(s, "scratch_bytes", 0) for s in self.segments])


def compile_segments(
    program: Program,
    engine: Engine,
    host_callbacks: Sequence[Any] = (),
    code: Sequence[bytes] = (),
    ordinals: Sequence[int] | None = None,
) -> CompiledSegments:
    """Compile the segments, those with ``code`` excepted, which are restored. Raises `CompileError`.

    ``ordinals``: the local devices of the program, by default the first ones, of which nothing is expected:
    the program may be for other processes.
    """
    together = range(program.num_devices) if ordinals is None else ordinals
    if any(segment.sites for segment in program.segments) and not register(engine):
        raise CompileError(
            f"program {program.name} has segments that call their collectives, which engine {engine.name} "
            "cannot run"
        )
    restoring = engine if isinstance(engine, RestoringEngine) else None

    def compile_one(index: int) -> Any:  # a `LoadedSegment`, of those with sites a `LoadedTogether`
        segment = program.segments[index]
        name = segment.name or f"{program.name}.{index}"
        kept = code[index] if restoring is not None and code else b""
        if segment.sites:
            assert isinstance(engine, CallingEngine)
            return engine.compile_together(
                segment, together, name=name, code=kept, host_callbacks=host_callbacks
            )
        several = engine if len(together) > 1 and isinstance(engine, SideBySideEngine) else None
        if several is not None and (
            several.goes_side_by_side(segment)
            or (index in everywhere and several.rather_side_by_side(segment))
        ):
            return several.compile_side_by_side(
                segment, together, host_callbacks, name=name, code=kept
            )
        if kept and restoring is not None:
            return on_all(restoring.restore(kept, segment, name=name))
        return on_all(engine.compile(segment, name=name, host_callbacks=host_callbacks))

    def on_all(made: Any) -> Any:
        """The segment, ready on all devices: no part of compiling is left to the first run."""
        if ordinals is not None and hasattr(made, "make_ready"):
            made.make_ready(ordinals)
        return made

    homes = _homes(program)
    everywhere = _everywhere(program, homes)
    indices = sorted(set(homes))
    restored = 0 if restoring is None or not code else sum(bool(code[i]) for i in indices)
    statistics.compiled(segments=len(indices) - restored, restored=restored)
    workers = min(len(indices), os.cpu_count() or 1)
    if workers < 2:
        compiled = {index: compile_one(index) for index in indices}
    else:
        # The largest first: one that is left to the end would be compiled by one thread alone.
        by_size = sorted(indices, key=lambda index: -len(program.segments[index].module))
        made = among(workers, [partial(compile_one, index) for index in by_size])
        compiled = dict(zip(by_size, made, strict=True))
    segments = [compiled[home] for home in homes]
    return CompiledSegments(program, engine, segments, bool(host_callbacks))


def _everywhere(program: Program, homes: Sequence[int]) -> set[int]:
    """Those of ``homes`` that run on all devices whenever they run: outside of loops and branches, which
    devices may leave."""
    always = [i for i in program.body.instructions if isinstance(i, Run) and not i.valid]
    runs = [i for i in instructions(program.body) if isinstance(i, Run)]
    often, once = (Counter(homes[run.segment] for run in some) for some in (runs, always))
    return {home for home, count in often.items() if count == once[home]}


def _homes(program: Program) -> list[int]:
    """For each segment the first one that is compiled to the same code.

    Regions of equal layers differ only in which of the program's collectives their sites are, and the code is
    told that when it runs.
    """
    first: dict[Segment, int] = {}
    numbered = [replace(s, sites=tuple(range(len(s.sites)))) for s in program.segments]
    return [first.setdefault(segment, index) for index, segment in enumerate(numbered)]
