"""`Dispatcher`: the order in which this process walks its programs, and the thread that walks them.

Programs are walked one after the other, in the order of the calls, by the dispatch thread or by a caller
that has its turn. An error in a walk fails the outputs that are not issued yet; those that are arrive. If the
program spans processes the world is told, and its other ranks fail too. When the job fails, all who wait get
the error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from time import perf_counter
from typing import Any, Protocol

from ..errors import StrettoError
from ..job.assembly import Assembly
from ..job.progress import Progress
from ..job.run_log import RunLogs
from ..options import Options
from ..recording.instrument import Instrument
from . import called_back
from .stream import Event, Stream

# Programs queued ahead of the dispatch thread. Enough to hide its latency; a caller that is further ahead
# waits, or values of runs not begun would pile up without bound.
MAX_QUEUED = 32


class Processes(Protocol):
    """What an executor needs to know of the world: `stretto.runtime.job.world.World`, or one in memory."""

    rank: int
    size: int
    local_devices: int
    comm: Any
    patience: float
    patience_of_code: float
    patience_of_callers: float
    options: Options
    engines: str

    @property
    def error(self) -> StrettoError | None: ...

    def fail(self, error: BaseException) -> None: ...

    def on_failure(self, listener: Callable[[StrettoError], None]) -> None: ...

    def progress(self, stream: int = 0) -> Progress: ...

    @property
    def runs(self) -> RunLogs: ...

    def assembly(self, processes: tuple[int, ...]) -> Assembly: ...


class Caller(threading.local):
    """Whose a run is: each thread has a ``mark`` of its own, which no later thread is given."""

    def __init__(self) -> None:
        self.mark = object()


caller = Caller()


class Dispatched(Protocol):
    """What the dispatcher needs to know of a run of a program: `execution.Execution`.

    ``caller``: the mark of the thread that asked for it.
    """

    event: Event
    end: Event
    caller: object

    @property
    def must_agree(self) -> bool:
        """Whether other processes run it too."""
        ...

    @property
    def is_prompt(self) -> bool:
        """Whether it takes a moment, once the other processes are there."""
        ...

    def walk(self) -> None: ...

    def land(self, error: BaseException) -> None: ...


class Dispatcher:
    """Keeps the turn to walk a program, and the executions that have not ended.

    ``stream`` has the dispatch thread. ``next_run()`` numbers the executions. ``instrument`` observes them;
    ``observing`` is held while it is exchanged, also in programs that are loaded. ``closed``: no run may
    begin. ``late``: Python is ending, and a run is over when its call returns: where Python ends a thread in
    the middle of one, the process aborts.
    """

    def __init__(self, world: Processes, instrument: Instrument | None) -> None:
        self.world = world
        self.patience = world.patience_of_callers  # for runs that are about to end
        self.instrument = instrument
        self.observing = threading.Lock()
        self.stream = Stream("stretto-dispatch")
        self.next_run: Callable[[], int] = count(1).__next__
        self.closed = self.late = False
        self._executions: dict[int, Dispatched] = {}
        self._nested = threading.RLock()  # held by runs within a run, where they span processes
        world.on_failure(self._fail)

    def enqueue(self, execution: Dispatched) -> None:
        """Have the dispatch thread walk a run. A run asked for by a host callback is walked at once."""
        nested = called_back.inside()
        if not nested:
            self.check_open()
        if not nested and len(self._executions) >= MAX_QUEUED:
            oldest = list(self._executions.values())[:1]
            for ahead in oldest:
                ahead.event.wait()
        self._executions[id(execution)] = execution
        error = self.world.error
        if error is not None:
            execution.land(error)
        elif nested:
            # The functions of several devices may run the same programs at once: in one order on all ranks.
            with self._nested if execution.must_agree else nullcontext():
                execution.walk()
        else:
            self.stream.submit(execution.walk)
            if self.late:
                execution.end.wait()

    def check_open(self) -> None:
        """Raises `StrettoError` where no run may begin any more."""
        if self.closed:
            raise StrettoError(
                "the executor is closed: the process is ending, and other ranks do not wait for it. "
                "Functions that Python calls at its end can compute where they are registered after JAX "
                "made its devices"
            )

    @property
    def idle(self) -> bool:
        """Whether all runs are over; the dispatch thread may still be tidying up behind the last."""
        return not self._executions

    def catch_up(self) -> bool:
        """Whether all runs are over, after a moment's wait for those that take no more.

        Otherwise a caller that has fallen behind once would queue one small program behind the other, each
        with two thread switches, for as long as it does not wait for a result.
        """
        if not self._executions:
            return True
        ahead = list(self._executions.values())
        if called_back.inside() or not all(execution.is_prompt for execution in ahead):
            return False
        until = perf_counter() + self.patience
        for execution in ahead:
            if not execution.event.wait_for(until - perf_counter()):
                return False
        return not self._executions

    def take_turn(self) -> bool:
        """Have the caller be the dispatch thread until it calls `end_turn`, if no run is under way."""
        if self._executions or self._ending or self.world.error is not None or called_back.inside():
            return False
        return self.stream.try_turn(self.patience)

    @property
    def _ending(self) -> bool:
        return self.closed or self.late

    def may_overtake(self) -> bool:
        """Whether runs under way are other threads', so that the order of the caller's does not forbid it to
        run a program beside them."""
        if self._ending or self.world.error is not None or called_back.inside():
            return False
        mark = caller.mark
        return all(execution.caller is not mark for execution in list(self._executions.values()))

    def end_turn(
        self, execution: Dispatched | None = None, rest: Callable[[], None] | None = None
    ) -> None:
        """End the turn. ``rest``: what the dispatch thread is to do of the run that became an execution."""
        if execution is not None:
            self.admit(execution)
        if rest is None:
            self.stream.end_turn()
        else:
            self.stream.hand_over(rest)

    def admit(self, execution: Dispatched) -> None:
        """A run that has been issued is under way until it has its results."""
        self._executions[id(execution)] = execution
        error = self.world.error
        if error is not None:
            execution.land(error)

    def walk_here(self, execution: Dispatched) -> None:
        """Walk a run, in the caller's thread unless others are queued."""
        self._executions[id(execution)] = execution
        if called_back.inside():
            execution.walk()
        else:
            self.stream.run(execution.walk)

    def walk_beside(self, execution: Dispatched) -> None:
        """Walk a run in the caller's thread, whatever others run: one that `may_overtake`."""
        self._executions[id(execution)] = execution
        execution.walk()

    def claim(self, execution: Dispatched) -> bool:
        """Whether the caller is the one to end this execution."""
        return self._executions.pop(id(execution), None) is not None

    def report(self, error: BaseException | None) -> None:
        """Tell the other ranks that a program that they run too has failed here."""
        if error is not None and self.world.size > 1:
            self.world.fail(error)

    def report_failure_of(self, event: Event) -> None:
        """`report` as a callback."""
        self.report(event.error)

    def _fail(self, error: StrettoError) -> None:
        """The job has failed: all outputs that are waited for get the error, at once."""
        for execution in list(self._executions.values()):
            execution.land(error)
