"""Regions of a program on a GPU: compiled code that calls its collectives itself, over NCCL.

The code runs on XLA's stream, and its collectives come onto the same one, as XLA calls for them on the
host. When all of them have been called the walk goes on, as after any run: it waits for the GPU only
where the code itself reads what it has computed, as a loop does that ends by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from stretto.collectives.bound_on_gpus import BoundOnGpus
from stretto.collectives.called_on_gpus import Called, table_of
from stretto.collectives.gpus import Gpus
from stretto.collectives.native import Peers, Table
from stretto.collectives.types import TensorType

from ..engines.cuda_loans import ROOM
from ..engines.engine import Column, StreamedEngine
from ..errors import StrettoError
from ..job.progress import Raw
from ..program import Run, Slot
from .call import describe
from .context import Context
from .frame import Frame, Operation, named
from .regions import Region


class RegionOnGpu(Region):
    """A run of a segment with sites on the GPU of this process.

    ``bound[i]``: what NCCL is to do for site i.
    """

    def __init__(
        self, context: Context, run: Run, bound: Sequence[BoundOnGpus], peers: Peers
    ) -> None:
        self._bound = bound
        self._scratch: Any = None  # kept as long as the table
        super().__init__(context, run, bound, peers)

    @property
    def _gpus(self) -> Gpus:
        gpus = self.lane.gpus
        assert gpus is not None  # who has bound them
        return gpus

    def _table(self, positions: dict[int, int]) -> Table:
        engine = cast("StreamedEngine", self.context.engine)
        ((logical, ordinal),) = self.context.local
        address, nbytes = 0, max((b.scratch for b in self._bound), default=0)
        if nbytes:
            types = (TensorType("u8", (nbytes,)),)
            (self._scratch,) = engine.loans.segment(ROOM, types).run(ordinal, [])
            address = self.context.engine.pointer(self._scratch)
        made: Called = table_of(
            self._gpus,
            self._bound,
            logical,
            engine.loans.device(ordinal),
            address,
            getattr(engine, "call_stream", 0),
        )
        return cast("Table", made)  # which it is, for a region

    def operation(self, land: Callable[[list[Any], Slot], list[Any]]) -> Operation:
        run = super().operation(land)

        def run_region(frame: Frame) -> None:
            gpus = self._gpus
            with gpus.lock:
                gpus.finish()
                table = cast("Called", self.table)
                try:
                    run(frame)
                finally:
                    table.end()

        return run_region

    def _block(self, results: Sequence[Column]) -> None:
        """The walk goes on: what comes onto the stream next comes behind it."""

    def _forsake(self, reason: str) -> None:
        """The job ends by what has failed on a GPU."""
        self.table.abort(reason)

    def _failure(self) -> str:
        """With what the communicators say, unless they say nothing or are given up."""
        if self._gpus.aborted:
            return self.table.failure
        of_nccl = next(filter(None, (bound.failure() for bound in self._bound)), "")
        return f"{self.table.failure}: {of_nccl}" if of_nccl else self.table.failure

    def _look(self) -> Raw | None:
        """What is under way on the GPU. An error that a communicator has met meanwhile ends the job."""
        waiting = self.table.waiting()
        if waiting is None:
            return None
        if not self._gpus.aborted:
            failure = self._bound[waiting[0]].failure()
            if failure:
                what = describe(self.collectives[waiting[0]])
                self.lane.failed(named(StrettoError(failure), what))
        return self._raw(waiting[0], self.table.executed, waiting[1])
