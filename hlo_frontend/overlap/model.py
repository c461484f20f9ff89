"""A block as a graph of tasks to schedule, each of them a kernel or a collective.

`layout` turns a block into ops, `kernels` groups these into tasks, `pricing` predicts their times.

Invariants: tasks are numbered in a topological order, near that of the module. Two instructions are in one
task only if no path between them leaves the task, so tasks form no cycle. Splitting a task would let no
collective start earlier.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stretto.collectives.ops import Collective

from ..graph import Instruction
from ..values import Node


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory of one array. ``kept`` buffers are never freed: results, and inputs not given up."""

    nbytes: int
    producer: Op | None
    kept: bool = False


@dataclass(eq=False, slots=True)
class Ref:
    """An array as an op reads it: the ops that must run before, its buffer, how many bytes are read.

    ``behind``: ops that only a barrier puts before, and that may be passed (see `values.Barrier`).
    """

    before: tuple[Op, ...]
    buffer: Buffer
    nbytes: int
    renames: tuple[Op, ...] = ()
    behind: tuple[Op, ...] = ()


@dataclass(eq=False, slots=True)
class Op:
    """A node of the block.

    ``arrives``: whether the op stands for the arrival of a collective that the iteration before has started
    (see `Task`).
    """

    index: int
    node: Node
    reads: tuple[Ref, ...] = ()
    order: tuple[Op, ...] = ()
    writes: tuple[Buffer, ...] = ()
    written_bytes: int = 0
    # Renaming ops that this one reads through; they run right before it.
    renames: tuple[Op, ...] = ()
    escapes: bool = False
    task: int = -1
    arrives: bool = False

    @property
    def instruction(self) -> Instruction:
        return self.node.instruction


@dataclass(eq=False, slots=True)
class Task:
    """A kernel, a collective, or an opaque loop or branch.

    ``seconds`` is its time on ``stream``; stream -1 is compute. ``moved_bytes`` go over the wire or to and
    from memory, ``flops`` are a kernel's operations. ``latency_s`` is the part of a collective's time that
    does not grow with its size, ``busy`` the share of it that is taken from compute that runs meanwhile.
    ``extra_bytes`` are used while the task runs or is in flight. A bucket has an op for each member.

    A collective that a loop's body starts for the next iteration is two tasks there: one that ``crosses`` is
    started and not awaited, one that ``arrives`` is awaited and not started. ``seconds`` of the latter are
    the time that may be left of it when the iteration begins.
    """

    index: int
    ops: list[Op]
    seconds: float = 0.0
    stream: int = -1
    moved_bytes: float = 0.0
    latency_s: float = 0.0
    busy: float = 0.0
    collective: Collective | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    extra_bytes: int = 0
    crosses: bool = False
    arrives: bool = False
    flops: float = 0.0

    @property
    def is_collective(self) -> bool:
        return self.collective is not None

    def moved(self, index: int, before: tuple[int, ...], after: tuple[int, ...]) -> Task:
        """The task at another place of another graph. `dataclasses.replace` takes thrice as long."""
        return Task(
            index,
            self.ops,
            self.seconds,
            self.stream,
            self.moved_bytes,
            self.latency_s,
            self.busy,
            self.collective,
            before,
            after,
            self.reads,
            self.writes,
            self.extra_bytes,
            self.crosses,
            self.arrives,
            self.flops,
        )

    @property
    def name(self) -> str:
        """The instruction that stands for the task: the collective, or the kernel's last op."""
        op = self.ops[0] if self.is_collective else self.ops[-1]
        return op.instruction.name


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """The buffers that tasks use, as arrays of integers.

    ``tasks[first[i] : first[i + 1]]`` read or write buffer ``buffers[i]``; the next iteration needs the
    buffers in ``held``. By buffer: ``sizes`` in bytes, and whether it is ``kept``. By task: ``made``, bytes
    that are live from its beginning on, and ``extra``, bytes that are live while it runs.
    """

    tasks: np.ndarray
    buffers: np.ndarray
    first: np.ndarray
    held: np.ndarray
    sizes: np.ndarray
    kept: np.ndarray
    made: np.ndarray
    extra: np.ndarray


@dataclass(eq=False)
class Graph:
    """Tasks of a block. ``buffers[i]`` has the size of buffer i; ``kept`` those never freed.

    ``streams`` names each stream of collectives; ``base_bytes`` are live from the start.
    """

    tasks: list[Task]
    buffers: list[int]
    kept: list[bool]
    streams: list[str]
    base_bytes: int
    initial: list[int] = field(default_factory=list)  # buffers alive from the start

    @property
    def compute_seconds(self) -> float:
        return sum(task.seconds for task in self.tasks if not task.is_collective)

    @cached_property
    def made_bytes(self) -> list[int]:
        """By task: the bytes of its results and of its own scratch memory, live from its beginning on."""
        sizes = self.buffers
        return [sum(sizes[b] for b in task.writes) + task.extra_bytes for task in self.tasks]

    @cached_property
    def memory_use(self) -> MemoryUse:
        pairs = np.array(
            sorted({(b, t.index) for t in self.tasks for b in (*t.reads, *t.writes)}), dtype=np.intp
        ).reshape(-1, 2)
        buffers, first = np.unique(pairs[:, 0], return_index=True)
        return MemoryUse(
            tasks=pairs[:, 1],
            buffers=buffers,
            first=first,
            held=np.array([b for t in self.tasks if t.crosses for b in t.reads], dtype=np.intp),
            sizes=np.array(self.buffers, dtype=np.int64),
            kept=np.array(self.kept, dtype=bool),
            made=np.array(self.made_bytes, dtype=np.int64),
            extra=np.array([t.extra_bytes for t in self.tasks], dtype=np.int64),
        )

    def stream_seconds(self) -> list[float]:
        totals = [0.0] * len(self.streams)
        for task in self.tasks:
            if task.is_collective and not task.arrives:
                totals[task.stream] += task.seconds
        return totals

    def crossings(self) -> dict[int, int]:
        """For each task that crosses into the next iteration: the task that stands for its arrival."""
        arriving = {op.node: task.index for task in self.tasks if task.arrives for op in task.ops}
        return {t.index: arriving[t.ops[0].node] for t in self.tasks if t.crosses}
