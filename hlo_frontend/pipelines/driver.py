"""Interleaves the pipelines of a module, or reports why it does not."""

from __future__ import annotations

from dataclasses import replace

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Module
from ..interleaved import Interleaved
from ..passes.valid.tensors import MOST_ELEMENTS
from ..passes.valid.trace import GaveUpError
from . import recognize as pipelines
from .inline import inlined
from .parts import Pipeline
from .refusal import Refusal, about
from .rewrite import rewritten
from .timetable import Timetable, timetable
from .verify import check


def interleave(
    serialized: bytes, num_replicas: int, num_partitions: int, chunks: int
) -> tuple[bytes, tuple[Interleaved, ...]]:
    """The module with ``chunks`` chunks of layers for each device of its pipelines, and a report on each
    loop.

    A loop that cannot be interleaved stays as it is, and so do loops that depend on its residuals. ``chunks``
    is at least 2.
    """
    written = Module.parse(serialized)
    entry = flatten(written.entry, CollectiveReader(num_replicas, num_partitions))
    candidates = [n.instruction for n in entry.nodes if pipelines.is_candidate(n)]
    reports = {i.name: Interleaved(i.name, i.source) for i in candidates}
    left = list(reports)
    while left:
        try:
            serialized, found = _all(written, left, num_replicas, num_partitions, chunks)
            break
        except Refusal as refusal:
            name = refusal.loop or left[0]
            reports[name] = replace(reports[name], why=str(refusal))
            left.remove(name)
        except GaveUpError as error:
            why = f"the program is too large to be followed: {error}"
            reports |= {name: replace(reports[name], why=why) for name in left}
            left = []
    else:
        found = []
    for name, report in zip(left, found, strict=True):
        reports[name] = replace(report, name=name, source=reports[name].source)
    return serialized, tuple(reports.values())


def _all(
    written: Module, names: list[str], num_replicas: int, num_partitions: int, chunks: int
) -> tuple[bytes, list[Interleaved]]:
    """All of these loops rewritten. Raises `Refusal`, which names one of them, and `GaveUpError`."""
    module = written
    for name in names:
        module = inlined(module, name)
    entry = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
    nodes = [n for n in entry.nodes if n.instruction.name in names]
    found = pipelines.find(entry, nodes, num_replicas, num_partitions)
    tables: list[Timetable] = []
    for pipeline in found:
        with about(pipeline.loop.name):
            tables.append(_table(pipeline, chunks))
    serialized, done = rewritten(module, found, tables, chunks, num_partitions)
    check(serialized, done, found, chunks, num_partitions)
    return serialized, [
        Interleaved(
            p.loop.name, "", chunks, p.stages, p.microbatches, p.layers.count, p.trips,
            table.iterations, new.moved, new.back, new.taken,
        )
        for p, table, new in zip(found, tables, done, strict=True)
    ]  # fmt: skip


def _table(pipeline: Pipeline, chunks: int) -> Timetable:
    if pipeline.layers.count % chunks:
        raise Refusal(f"{pipeline.layers.count} layers of a device are not {chunks} equal chunks")
    table = timetable(pipeline.stages, chunks, pipeline.enters, pipeline.leaves, pipeline.trips)
    if pipeline.stages * table.iterations > MOST_ELEMENTS:
        raise Refusal(
            f"{table.iterations} iterations of {pipeline.stages} stages are too many to be followed"
        )
    return table
