"""`Lane`: a stream of the executor, with its communicator and its accounts."""

from __future__ import annotations

from collections.abc import Callable

from stretto.collectives.communicator import Communicator, Request
from stretto.collectives.gpu_mpi import OnDevices
from stretto.collectives.gpus import Gpus
from stretto.collectives.native import Table
from stretto.collectives.staging import Staging

from ..job.progress import Progress
from ..recording.statistics import Counters
from .stream import Stream


class Lane:
    """A stream of the executor.

    ``number``: of the stream. ``communicator`` moves its data, ``progress`` shows the watchdog what it does,
    ``counters`` counts it. ``sequence``: calls so far. ``sends``: sends that may be under way.
    ``gpus`` moves data that stays on GPUs, ``staging`` that of GPUs through the host's memory, ``on_devices``
    theirs by MPI; ``failed`` takes errors of any that come later.
    """

    __slots__ = (
        "_failure",
        "_tables",
        "communicator",
        "counters",
        "failed",
        "gpus",
        "number",
        "on_devices",
        "progress",
        "sends",
        "sequence",
        "staging",
        "stream",
    )

    def __init__(
        self,
        number: int,
        stream: Stream,
        communicator: Communicator,
        progress: Progress,
        gpus: Gpus | None = None,
        failed: Callable[[BaseException], None] = lambda error: None,
        staging: Staging | None = None,
        on_devices: OnDevices | None = None,
    ) -> None:
        self.number = number
        self.gpus = gpus
        self.staging = staging
        self.on_devices = on_devices
        self.failed = failed
        self.stream = stream
        self.communicator = communicator
        self.progress = progress
        self.counters = Counters()
        self.sequence = 0
        self.sends: list[Request] = []
        self._tables: list[Table] = []
        self._failure = ""

    def hand_over(self, table: Table) -> None:
        """Leave the stream's collectives to compiled code, with this table. What that calls back may do so
        again."""
        self._tables.append(table)
        if self._failure:
            table.abort(self._failure)

    def take_back(self) -> None:
        """Compiled code has made its collectives."""
        del self._tables[-1:]  # Ctrl-C may have come before there was one

    def abort(self, reason: str) -> None:
        """The job has failed: what compiled code waits for will not come."""
        self._failure = reason
        if self.gpus is not None:
            self.gpus.abort(reason)
        if self.staging is not None:
            self.staging.abort(reason)
        for table in list(self._tables):
            table.abort(reason)

    def drain(self) -> None:
        """Wait until every send has been received. A task of this stream."""
        sends, self.sends = self.sends, []
        for request in sends:
            request.wait()
