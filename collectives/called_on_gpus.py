"""Collectives that code on a GPU calls itself, over NCCL: their table.

`table_of` describes to the compiled handler (`_called.pxi`), whose address `handler` gives for an engine
to register, what `bound_on_gpus` has bound. A collective goes onto the stream on which the code runs.
Which collectives can be called `native.refusal` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from ._launches import CLEARS, COPIES, Called, handler, place, stream_found, stream_handler
from .bound_on_gpus import BoundOnGpus, Buffers
from .cuda import cuda
from .gpus import Gpus

__all__ = ["Called", "handler", "stream_found", "stream_handler", "table_of"]


class _Noted:
    """Copies as `Called.add` takes them, in the place of a driver that makes them."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, ...]] = []

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        self.steps.append((CLEARS, target, nbytes))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copy_rows(target, nbytes, source, nbytes, nbytes, 1, stream)

    def copy_rows(self, *row: int) -> None:
        self.steps.append((COPIES, *row[:-1]))  # but for the stream


def table_of(
    gpus: Gpus,
    sites: Sequence[BoundOnGpus],
    i: int,
    device: int,
    scratch: int = 0,
    stream: int = 0,
) -> Called:
    """The table of these sites for the local logical id ``i``, which is CUDA's ``device``.

    ``scratch``: the address of as many bytes as each site needs (`BoundOnGpus.scratch`), which no other
    stream uses. ``stream``: see `Called`. Raises `CudaError` once the job has failed.
    """
    driver = cuda()
    driver.use(device)
    functions, event = driver.addresses(Called.NAMES), driver.event()
    table = Called(gpus.launches(), functions, driver.context(device), event, stream)
    for bound in sites:
        collective = bound.collective
        operands = [place(False, n) for n in range(len(collective.operands))]
        results = [place(True, n) for n in range(len(collective.results))]
        before, behind = _Noted(), _Noted()
        buffers = Buffers(operands, results, scratch)
        calls = [call[:-1] for call in bound.on_one(i, buffers, before, behind)]
        where = f" at {collective.source}" if collective.source else ""
        name = f"{collective.kind} %{collective.name}{where}"
        table.add(before.steps, calls, behind.steps, name)
    return table
