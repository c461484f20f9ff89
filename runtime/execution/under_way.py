"""Calls of collectives that borrow GPUs' arrays: what NCCL, MPI and the way through the host share.

A call has an `UnderWay` for each device: arrays that are lent, rooms for results, what is to come onto the
streams. A `Borrower` begins calls of one collective and makes registers of what they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from stretto.collectives.bound_on_gpus import Buffers
from stretto.collectives.cuda import Queued, cuda
from stretto.collectives.types import TensorType

from ..engines.engine import StreamedEngine
from ..program import Start
from .call import Call
from .context import Context
from .device_times import Timed
from .frame import Frame, Hosted
from .stream import Event

if TYPE_CHECKING:
    from ..engines.cuda_loans import Loans, Mark

# Memory of collectives whose enqueuing failed: they may be under way in part.
_abandoned: list[Any] = []


class UnderWay:
    """A call on one device: what it borrows until XLA's stream waits for it.

    ``lent``: arrays that are read; ``rooms``: what is written to, results and then scratch; ``queue``: what
    is to come onto streams of the device next.
    """

    __slots__ = (
        "_loans",
        "_places",
        "lent",
        "mark",
        "marks",
        "ordinal",
        "queue",
        "rooms",
        "times",
    )

    def __init__(self, loans: Loans, ordinal: int, lent: list[Any], rooms: list[Any]) -> None:
        self._loans = loans
        self.ordinal = ordinal
        self.lent = lent
        self.rooms = rooms
        self.queue: list[Queued] = []
        self._places: list[int] = []  # addresses of the rooms
        self.mark: Mark | None = None
        self.marks: list[Mark] = []  # the same, for whoever watches
        self.times: list[Timed] = []  # beginning and end, where somebody wants to know

    def buffers(self, source: int, target: int, results: int) -> Buffers:
        """Addresses for a stream that reads what is lent and one that writes to the rooms, which wait for the
        arrays once they come to the queue. ``results``: how many rooms are not scratch."""
        lend, queue = self._loans.lend, self.queue
        operands = [lend(array, source, queue) for array in self.lent]
        self._places = places = [lend(array, target, queue) for array in self.rooms]
        if len(places) == results:
            return Buffers(operands, places)
        return Buffers(operands, places[:results], places[results])

    def marked(self, stream: int) -> None:
        """All of it is on the stream, with what is in the queue."""
        self.mark = self._loans.mark_in(self.queue, self.ordinal, stream)

    def flush(self) -> None:
        """Put the queue onto the streams."""
        queue, self.queue = self.queue, []
        if queue:
            cuda().enqueue(self._loans.device(self.ordinal), queue)

    def arrive(self, types: Sequence[TensorType], deferred: bool) -> list[Any]:
        """The results, for XLA; ends the loans. ``deferred``: only runs and loans read them."""
        mark, self.mark = self.mark, None
        assert mark is not None
        rooms = self.rooms[: len(types)]
        if deferred:
            results = self._loans.defer(self.ordinal, mark, rooms, self._places[: len(types)])
        else:
            results = self._loans.arrive(self.ordinal, mark, rooms, types)
        self.lent = self.rooms = []
        return results

    def __del__(self) -> None:
        if self.mark is not None:  # nobody waited for it, in a walk that has failed
            self._loans.hold(self.ordinal, self.mark)


class Enqueued:
    """What stands for the event of a collective: its wait takes ``result()``, which does not wait.

    ``finish``: what is left to do of the collective, whether or not anybody waits for it.
    """

    __slots__ = ("_finish", "_result", "since")
    done = True
    error: BaseException | None = None

    def __init__(self, result: Callable[[], Any], finish: Callable[[], None] | None = None) -> None:
        self._result = result
        self._finish = finish
        self.since = 0.0

    def result(self) -> Any:
        """The registers of the outputs. To be called once."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return self._result()

    def __del__(self) -> None:
        if self._finish is not None:  # nobody waited for it, in a walk that has failed
            with suppress(Exception):  # whoever watches the collective is told
                self._finish()


class Moving:
    """What stands for the event of a collective: its ``result()`` waits for the task of the stream.

    ``finish`` makes the registers of the outputs then.
    """

    __slots__ = ("_finish", "_moved", "since")

    def __init__(self, moved: Event, finish: Callable[[], Any]) -> None:
        self._moved = moved
        self._finish = finish
        self.since = 0.0

    @property
    def done(self) -> bool:
        return self._moved.done

    @property
    def error(self) -> BaseException | None:
        return self._moved.error

    def wait(self) -> None:
        """As of `Event`."""
        self._moved.wait()

    def result(self) -> Any:
        """The registers of the outputs. To be called once."""
        self._moved.result()
        return self._finish()


class Borrower:
    """The calls of one collective. ``scratch``: bytes that a device needs in a call beside the results."""

    def __init__(
        self, context: Context, start: Start, call: Call, deferred: bool, scratch: int = 0
    ) -> None:
        """``deferred``: only runs and collectives on the GPUs' streams read the results."""
        self._context, self._call, self._deferred = context, call, deferred
        self._inputs = start.inputs
        self._operands = [context.program.slot_types[slot] for slot in start.inputs]
        self._results = [context.program.slot_types[slot] for slot in start.outputs]
        self._loans = cast("StreamedEngine", context.engine).loans
        needed = [TensorType("u8", (scratch,))] if scratch else []
        self._rooms = self._loans.rooms([*self._results, *needed], context.ordinals)

    def _columns(self, frame: Frame) -> list[Sequence[Any]]:
        """The operands, each by position of its device."""
        return [
            _landed(self._context, frame.registers[slot], type)
            for slot, type in zip(self._inputs, self._operands, strict=True)
        ]

    def _borrow(self, columns: Sequence[Sequence[Any]], position: int) -> UnderWay:
        """A call on the device of a position."""
        ordinal = self._context.ordinals[position]
        lent = [column[position] for column in columns]
        return UnderWay(self._loans, ordinal, lent, self._rooms.take(ordinal))

    def _arrived(self, calls: Mapping[int, UnderWay]) -> list[list[Any]]:
        """The registers of the outputs: a run that needs them waits for the collective, on the device."""
        types = self._results
        registers: list[list[Any]] = [[None] * len(self._context.ordinals) for _ in types]
        for position, under_way in calls.items():
            arrays = under_way.arrive(types, self._deferred)
            for register, array in zip(registers, arrays, strict=True):
                register[position] = array
        return registers


def _landed(context: Context, register: Any, type: TensorType) -> Sequence[Any]:
    """A register of engine arrays."""
    if not isinstance(register, Hosted):
        return register
    put = context.engine.put
    return [
        None if host is None else put(host, type, ordinal)
        for host, ordinal in zip(register, context.ordinals, strict=True)
    ]


def abandon(calls: Any) -> None:
    """Keep the memory of calls whose enqueuing failed."""
    _abandoned.append(calls)


def tell(watched: Event, failed: Callable[[BaseException], None]) -> None:
    """Pass on the error of a task, if it has one."""
    if watched.error is not None:
        failed(watched.error)
