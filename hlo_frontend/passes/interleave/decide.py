"""Interleaves the pipelines of a module, or says why not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...collectives import CollectiveReader
from ...flatten import flatten
from ...graph import Module
from ...values import Node
from ..valid.tensors import MOST_ELEMENTS
from ..valid.trace import GaveUpError
from . import pipeline as pipelines
from .inline import inlined
from .refusal import Refusal
from .rewrite import Rewriter
from .timetable import timetable
from .verify import check


@dataclass(frozen=True)
class Interleaved:
    """What became of a loop that moves data in each of its iterations.

    ``chunks`` of layers a device has, and ``stages``, ``microbatches``, ``layers`` of a device. ``before``
    and ``after``: its iterations; one of the latter does 1/chunks of the work. ``moved``: bytes of weights
    that all devices together send before the loop, in every run; ``taken``: arrays of weights that need not
    be moved. ``why``: why the loop is left as it is written, or an empty string.
    """

    name: str
    source: str
    chunks: int = 0
    stages: int = 0
    microbatches: int = 0
    layers: int = 0
    before: int = 0
    after: int = 0
    moved: int = 0
    taken: int = 0
    why: str = ""

    def describe(self) -> str:
        """A sentence for people."""
        where = f"loop %{self.name}{' at ' + self.source if self.source else ''}"
        if self.why:
            return f"{where} is not interleaved: {self.why}"
        bubble = (self.stages - 1) / self.before
        left = 1 - self.microbatches * self.chunks / self.after
        return (
            f"{where} is interleaved: {self.stages} stages x {self.chunks} chunks of "
            f"{self.layers // self.chunks} layers, {self.microbatches} microbatches, {self.before} "
            f"iterations became {self.after} of 1/{self.chunks} of the work each, bubble {bubble:.0%} "
            f"became {left:.0%}; {self.moved} bytes of weights are moved before it in each run"
        )


def apply(
    serialized: bytes, num_replicas: int, num_partitions: int, chunks: int
) -> tuple[bytes, tuple[Interleaved, ...]]:
    """The module, where its pipelines have ``chunks`` chunks of layers a device, and what was found.

    A loop that cannot be interleaved stays as it is. ``chunks`` of 1 leaves all as it is.
    """
    reports: list[Interleaved] = []
    done: set[str] = set()
    while chunks > 1:
        written = Module.parse(serialized)
        reader = CollectiveReader(num_replicas, num_partitions)
        entry = flatten(written.entry, reader)
        left = [
            n for n in entry.nodes if pipelines.is_candidate(n) and n.instruction.name not in done
        ]
        if not left:
            break
        name = left[0].instruction.name
        done.add(name)
        report = Interleaved(name, left[0].instruction.source)
        try:
            serialized, found, new = _one(written, name, num_replicas, num_partitions, chunks)
            done.add(new)
            reports.append(replace(found, name=name, source=report.source))
        except Refusal as refusal:
            reports.append(replace(report, why=str(refusal)))
        except GaveUpError as error:
            reports.append(replace(report, why=f"the program is too large to be followed: {error}"))
    return serialized, tuple(reports)


def _one(
    written: Module, name: str, num_replicas: int, num_partitions: int, chunks: int
) -> tuple[bytes, Interleaved, str]:
    module = inlined(written, name)
    entry = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
    node = _loop(entry.nodes, name)
    found = pipelines.find(entry, node, num_replicas, num_partitions)
    if found.layers.count % chunks:
        raise Refusal(f"{found.layers.count} layers of a device are not {chunks} equal chunks")
    table = timetable(found.stages, chunks, found.enters, found.leaves, found.trips)
    if found.stages * table.iterations > MOST_ELEMENTS:
        raise Refusal(
            f"{table.iterations} iterations of {found.stages} stages are too many to be followed"
        )
    done = Rewriter(module, found, chunks, table, num_partitions).rewritten()
    check(done, found, chunks, num_partitions)
    report = Interleaved(
        name, "", chunks, found.stages, found.microbatches, found.layers.count, found.trips,
        table.iterations, done.moved, done.taken,
    )  # fmt: skip
    return done.module, report, done.loop


def _loop(nodes: list[Node], name: str) -> Node:
    return next(n for n in nodes if n.instruction.name == name)
