"""Teams: processes with a communicator of their own, and the collectives of host memory between them.

What is sent and how much of it is planned beforehand: all processes of a team must make the same calls with
the same plans in the same order.

Reductions give the same bits on every process. MPI's own all-reduce is used where MPI reduces as HLO
means it and latency is what counts. Elsewhere (types MPI does not know or would round at every step; float
minimum and maximum, where MPI_MAX need not propagate NaN; large arrays) each process reduces its part of
the array from all others' and the parts are gathered: every element travels twice at most, in its own
type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from .memory import as_bytes, pool
from .ops import PROMPT, Reduction
from .posted import Postable, Posted, post_swap, swap
from .reduce import combiner
from .types import ELEMENT_TYPES
from .waiting import Waiting

# combine(partial, out): flat arrays of the planned size; they may share memory.
AllReduce = Callable[[np.ndarray, np.ndarray], None]
# (bytes, process) of a team.
_Messages = list[tuple[np.ndarray, int]]

# Above this many bytes for each process, reducing by parts beats MPI_Allreduce (MPICH 5, shared memory).
_LARGE_PART = 1 << 18
# Up to this many bytes in all, each process gathers all operands and reduces them itself.
_SMALL_GATHER = 1 << 16
# In teams of at most this many, direct messages beat MPI's collectives with counts and displacements.
_FEW = 16
# Bytes of one part reduced at a time, so that what was received is still in the cache.
_BLOCK = 1 << 20
# Tags within a team: of what may be posted while others are under way, and of what is sent once those posted
# before are through. All processes have one order of each, but not of both together. The others are those of
# collectives that compiled code calls.
_AHEAD, _IN_TURN, FIRST_FREE_TAG = 0, 1, 2

_MPI_TYPES: dict[str, MPI.Datatype] = {
    "pred": MPI.UINT8_T,
    "s8": MPI.INT8_T,
    "s16": MPI.INT16_T,
    "s32": MPI.INT32_T,
    "s64": MPI.INT64_T,
    "u8": MPI.UINT8_T,
    "u16": MPI.UINT16_T,
    "u32": MPI.UINT32_T,
    "u64": MPI.UINT64_T,
    "f32": MPI.FLOAT,
    "f64": MPI.DOUBLE,
    "c64": MPI.C_FLOAT_COMPLEX,
    "c128": MPI.C_DOUBLE_COMPLEX,
}
_INEXACT = {Reduction.SUM: MPI.SUM, Reduction.PRODUCT: MPI.PROD}
_INTEGER = _INEXACT | {
    Reduction.MIN: MPI.MIN,
    Reduction.MAX: MPI.MAX,
    Reduction.AND: MPI.BAND,
    Reduction.OR: MPI.BOR,
    Reduction.XOR: MPI.BXOR,
}
# A pred is a byte, 0 or 1.
_PRED = {
    Reduction.SUM: MPI.BOR,
    Reduction.PRODUCT: MPI.BAND,
    Reduction.MIN: MPI.BAND,
    Reduction.MAX: MPI.BOR,
    Reduction.AND: MPI.BAND,
    Reduction.OR: MPI.BOR,
    Reduction.XOR: MPI.BXOR,
}


# Sums of narrow integers wrap around in HLO; MPI leaves that open, and Open MPI's vector code saturates.
_NARROW_INTEGERS = frozenset({"s8", "s16", "u8", "u16"})


def native(dtype: str, reduction: Reduction) -> tuple[MPI.Datatype, MPI.Op] | None:
    """MPI's datatype and operation, where MPI reduces as HLO does."""
    if dtype not in _MPI_TYPES:
        return None
    if dtype in _NARROW_INTEGERS and reduction in (Reduction.SUM, Reduction.PRODUCT):
        return None
    table = _PRED if dtype == "pred" else _INTEGER if dtype[0] in "su" else _INEXACT
    op = table.get(reduction)
    return None if op is None else (_MPI_TYPES[dtype], op)


class Team:
    """A set of processes, in ascending order, with a communicator of their own.

    ``index`` is this process's place in ``processes``.
    """

    def __init__(self, comm: MPI.Intracomm, processes: tuple[int, ...], waiting: Waiting) -> None:
        self.comm = comm
        self.waiting = waiting
        self.processes = processes
        self.size = len(processes)
        self.index = comm.Get_rank()

    def all_reduce(self, dtype: str, reduction: Reduction, count: int, wire: str) -> AllReduce:
        """Plan the reduction of ``count`` elements of ``dtype`` whose partial results, of type ``wire``
        (``dtype``, or f32 for narrow floats), are one for each process.
        """
        mpi = native(dtype, reduction) if dtype == wire else None
        nbytes = count * ELEMENT_TYPES[wire].numpy.itemsize
        if mpi is not None and nbytes < _LARGE_PART * self.size:
            return self._native_all_reduce(count, *mpi)
        if nbytes * self.size <= _SMALL_GATHER:
            return self._gathered_all_reduce(dtype, reduction, count, wire)
        return self._all_reduce_by_parts(dtype, reduction, count, wire)

    def _native_all_reduce(self, count: int, datatype: MPI.Datatype, op: MPI.Op) -> AllReduce:
        comm, waiting, in_place = self.comm, self.waiting, MPI.IN_PLACE
        call, start = comm.Allreduce, comm.Iallreduce

        def placed(partial: np.ndarray, out: np.ndarray) -> list[Any]:
            """The buffer of a reduction in place, as it must be on all processes or on none (MPI 4.1,
            All-Reduce). Those with one device have the partial result elsewhere."""
            if partial is not out:
                np.copyto(out, partial)
            return [out, count, datatype]

        def post(partial: np.ndarray, out: np.ndarray) -> Posted:
            return Posted([start(in_place, placed(partial, out), op)], waiting)

        prompt = count * datatype.Get_size() <= PROMPT
        if prompt or not waiting.blocks:
            return Postable(post, prompt)

        def run(partial: np.ndarray, out: np.ndarray) -> None:
            waiting.run(comm, call, start, in_place, placed(partial, out), op)

        return run

    def _gathered_all_reduce(
        self, dtype: str, reduction: Reduction, count: int, wire: str
    ) -> AllReduce:
        combine, shape = combiner(dtype, reduction), (self.size, count)
        start, wire_dtype = self.comm.Iallgather, ELEMENT_TYPES[wire].numpy
        waiting = self.waiting

        def post(partial: np.ndarray, out: np.ndarray) -> Posted:
            gathered = pool.empty(shape, wire_dtype)
            request = start([as_bytes(partial), MPI.BYTE], [as_bytes(gathered), MPI.BYTE])
            return Posted([request], waiting, lambda: combine(list(gathered), out))

        return Postable(post, prompt=True)

    def _all_reduce_by_parts(
        self, dtype: str, reduction: Reduction, count: int, wire: str
    ) -> AllReduce:
        size, index = self.size, self.index
        itemsize = ELEMENT_TYPES[dtype].numpy.itemsize
        per_part = -(-count // (size * 64)) * 64  # whole cache lines
        starts = [min(q * per_part, count) for q in range(size + 1)]
        lengths = [b - a for a, b in pairwise(starts)]
        scatter = self.reduce_parts(dtype, reduction, starts[:-1], lengths, wire)
        counts, displacements = [n * itemsize for n in lengths], [s * itemsize for s in starts[:-1]]
        gather = self.gather(counts, displacements, in_turn=True)
        own = slice(starts[index], starts[index + 1])

        def run(partial: np.ndarray, out: np.ndarray) -> None:
            scatter(partial, out[own])
            gather(None, as_bytes(out))

        def post(partial: np.ndarray, out: np.ndarray) -> Posted:
            assert isinstance(scatter, Postable)
            return scatter.post(partial, out[own]).then(lambda: gather(None, as_bytes(out)))

        # What ends it must not be MPI's: those have one order, which what is posted ahead would change.
        ends_by_messages = self._by_messages(sum(counts))
        return Postable(post) if isinstance(scatter, Postable) and ends_by_messages else run

    def reduce_parts(
        self,
        dtype: str,
        reduction: Reduction,
        starts: Sequence[int],
        lengths: Sequence[int],
        wire: str,
    ) -> AllReduce:
        """Plan a reduce-scatter: process q gets the elements at ``starts[q]``, ``lengths[q]`` of them.

        It reads a flat partial result of type ``wire`` and writes this process's part, which may be the
        partial's own memory.
        """
        combine, wire_dtype = combiner(dtype, reduction), ELEMENT_TYPES[wire].numpy
        size, index = self.size, self.index
        block = min(_BLOCK // wire_dtype.itemsize, max(lengths))
        begins = range(0, max(lengths), max(block, 1))
        others = [q for q in range(size) if q != index]
        start, mine = starts[index], lengths[index]
        # by step: (process, elements to send), and the elements received from each
        steps = [
            (
                [
                    (q, slice(starts[q] + begin, starts[q] + min(begin + block, lengths[q])))
                    for q in others
                    if begin < lengths[q]
                ],
                slice(begin, max(begin, min(begin + block, mine))),
            )
            for begin in begins
        ]
        comm, waiting, swap = self.comm, self.waiting, self.swap

        def messages(
            step: tuple[list[tuple[int, slice]], slice], partial: np.ndarray, received: np.ndarray
        ) -> tuple[_Messages, _Messages]:
            sends, part = step
            length = part.stop - part.start
            return (
                [(as_bytes(partial[piece]), q) for q, piece in sends],
                [(as_bytes(received[q, :length]), q) for q in others] if length else [],
            )

        def reduce(part: slice, partial: np.ndarray, received: np.ndarray, out: np.ndarray) -> None:
            if part.stop == part.start:
                return
            pieces = list(received[:, : part.stop - part.start])
            own = partial[start + part.start : start + part.stop]
            if index < 2:
                pieces[index] = own
            else:  # what is written may be the same memory, and is so before this is read
                np.copyto(pieces[index], own)
            combine(pieces, out[part])

        def run_from(
            first: int, partial: np.ndarray, received: np.ndarray, out: np.ndarray
        ) -> None:
            for step in steps[first:]:
                swap(*messages(step, partial, received))
                reduce(step[1], partial, received, out)

        def run(partial: np.ndarray, out: np.ndarray) -> None:
            run_from(0, partial, pool.empty((size, block), wire_dtype), out)

        def post(partial: np.ndarray, out: np.ndarray) -> Posted:
            received = pool.empty((size, block), wire_dtype)

            def finish() -> None:
                reduce(steps[0][1], partial, received, out)
                run_from(1, partial, received, out)

            outgoing, incoming = messages(steps[0], partial, received)
            return post_swap(comm, outgoing, incoming, _AHEAD, waiting, finish)

        return Postable(post) if steps and not waiting.blocks else run

    def _by_messages(self, nbytes: int) -> bool:
        """Whether messages gather so many bytes, rather than MPI."""
        return self.size <= _FEW and nbytes >= _SMALL_GATHER

    def gather(
        self, counts: Sequence[int], displacements: Sequence[int], in_turn: bool = False
    ) -> Callable[[np.ndarray | None, np.ndarray], None]:
        """Plan an all-gather of bytes: process q gives ``counts[q]`` for ``displacements[q]``.

        It takes this process's bytes, or None on all processes if they are in their place already.
        ``in_turn``: it is the end of something else.
        """
        counts, displacements = list(counts), list(displacements)
        if not any(counts):
            return lambda send, out: None
        index, others = self.index, [q for q in range(self.size) if q != self.index]
        places = [slice(d, d + n) for n, d in zip(counts, displacements, strict=True)]
        uniform = [q * counts[0] for q in range(self.size)] == displacements and len(
            set(counts)
        ) == 1
        swap, comm, waiting = self.swap, self.comm, self.waiting

        def by_messages(send: np.ndarray | None, out: np.ndarray) -> None:
            if send is not None:
                np.copyto(out[places[index]], send)
            own = out[places[index]]
            swap([(own, q) for q in others], [(out[places[q]], q) for q in others])

        def post(send: np.ndarray | None, out: np.ndarray) -> Posted:
            own = out[places[index]]
            sent = own if send is None else send
            posted = post_swap(
                comm,
                [(sent, q) for q in others],
                [(out[places[q]], q) for q in others],
                _AHEAD,
                waiting,
            )
            if send is not None:
                np.copyto(own, send)
            return posted

        def by_mpi(send: np.ndarray | None, out: np.ndarray) -> None:
            source = MPI.IN_PLACE if send is None else [send, MPI.BYTE]
            if uniform:
                result = [out, counts[0], MPI.BYTE]
                waiting.run(comm, comm.Allgather, comm.Iallgather, source, result)
            else:
                result = [out, (counts, displacements), MPI.BYTE]
                waiting.run(comm, comm.Allgatherv, comm.Iallgatherv, source, result)

        if not self._by_messages(sum(counts)):
            return by_mpi
        return by_messages if in_turn or waiting.blocks else Postable(post)

    def exchange(
        self,
        send_counts: Sequence[int],
        send_displacements: Sequence[int],
        receive_counts: Sequence[int],
        receive_displacements: Sequence[int],
    ) -> Callable[[np.ndarray, np.ndarray], None]:
        """Plan an all-to-all of bytes between the processes, this one included."""
        if self.size > _FEW:
            sends = (list(send_counts), list(send_displacements))
            receives = (list(receive_counts), list(receive_displacements))
            comm, waiting = self.comm, self.waiting
            call, start = comm.Alltoallv, comm.Ialltoallv

            def by_mpi(send: np.ndarray, out: np.ndarray) -> None:
                given, result = [send, sends, MPI.BYTE], [out, receives, MPI.BYTE]
                waiting.run(comm, call, start, given, result)

            return by_mpi

        def places(
            counts: Sequence[int], displacements: Sequence[int]
        ) -> tuple[slice, list[tuple[int, slice]]]:
            slices = [slice(d, d + n) for n, d in zip(counts, displacements, strict=True)]
            others = [(q, s) for q, s in enumerate(slices) if q != index and s.stop > s.start]
            return slices[index], others

        index, swap = self.index, self.swap
        own_from, sent = places(send_counts, send_displacements)
        own_to, received = places(receive_counts, receive_displacements)

        def by_messages(send: np.ndarray, out: np.ndarray) -> None:
            if own_to.stop > own_to.start:
                np.copyto(out[own_to], send[own_from])
            swap([(send[s], q) for q, s in sent], [(out[s], q) for q, s in received])

        return by_messages

    def swap(
        self, sends: Sequence[tuple[np.ndarray, int]], receives: Sequence[tuple[np.ndarray, int]]
    ) -> None:
        """Send and receive bytes in turn, at most once to and from each process, named by index."""
        swap(self.comm, sends, receives, _IN_TURN, self.waiting)

    def broadcast(self, content: np.ndarray, root: int) -> None:
        """Bytes from the process at index ``root``, in place."""
        comm = self.comm
        self.waiting.run(comm, comm.Bcast, comm.Ibcast, [content, MPI.BYTE], root)
