"""Transfers: arrays sent from a device of one process to a device of another, outside of any program.

The n-th array that is sent from one device to another is the n-th that is received there from it. Transfers
between other devices do not matter, so both sides may ask for theirs in any order. Asking returns at once.
One daemon thread makes all calls of MPI, with tags of their own: no collective waits for a transfer, and no
transfer for a collective. The thread sleeps while no transfer is under way, and polls every millisecond at
least while one is.

To the watchdog each pair of devices is a stream of its own, with a negative number: a
transfer that its other end never asks for is an error after ``STRETTO_TIMEOUT``, on all ranks, which names
both.

Invariants: each transfer ends exactly once, with an array or an error; all state but the queue of what was
asked for belongs to the thread; memory that MPI may still use is never let go.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from stretto.collectives.memory import as_bytes, pool
from stretto.collectives.types import TensorType
from stretto.collectives.waiting import give_way

from ..errors import CollectiveMismatch, StrettoError, WorldError
from ..job import watchdog
from ..job.progress import Progress
from ..job.world import World
from ..recording import statistics
from ..recording.statistics import Counters
from .stream import Event
from .value import Landed, Promise, Value

if TYPE_CHECKING:
    from stretto.collectives.messages import Delivery, Messages

INLINE = 4096  # content of up to so many bytes travels in the message itself
_YIELDS = 100  # looks for news without sleeping, after something has moved
_LONGEST_PAUSE = 1e-3


class Job(Protocol):
    """What transfers need to know of the world: `stretto.runtime.job.world.World`."""

    rank: int
    local_devices: int

    @property
    def num_devices(self) -> int: ...

    def progress(self, stream: int = 0) -> Progress: ...

    def fail(self, error: BaseException) -> None: ...

    def on_failure(self, listener: Callable[[StrettoError], None]) -> None: ...


@dataclass(frozen=True)
class _Asked:
    """One transfer as one side asks for it; ``value`` where it is sent, ``line`` of the user's program."""

    source: int
    target: int
    type: TensorType
    line: str
    end: Callable[[Any, BaseException | None], None]
    value: Value | None = None


@dataclass
class _Arrival:
    """A message that has come. ``content`` is complete once ``delivery`` is through."""

    type: TensorType
    error: str
    content: np.ndarray
    delivery: Delivery | None

    def is_complete(self) -> bool:
        if self.delivery is not None and self.delivery.Test():
            self.delivery = None
        return self.delivery is None


@dataclass
class _Route:
    """All transfers from one device to another, as one of the two processes sees them."""

    source: int
    target: int
    peer: int
    ranks: tuple[int, int]
    progress: Progress
    waiting: deque[_Asked] = field(default_factory=deque)  # to be sent
    sending: deque[tuple[_Asked, list[Delivery], Any]] = field(default_factory=deque)
    expected: deque[_Asked] = field(default_factory=deque)
    arrived: deque[_Arrival] = field(default_factory=deque)
    begun: _Asked | None = None
    sequence: int = 0

    def begin(self, asked: _Asked) -> None:
        """Tell the watchdog which transfer is the next to end."""
        if self.begun is not asked:
            self.begun, self.sequence = asked, self.sequence + 1
            name = f"transfer of {asked.type} from device {self.source} to device {self.target}"
            self.progress.begin(name, asked.line, self.sequence, self.ranks)

    def end(self, asked: _Asked) -> None:
        self.begin(asked)
        self.begun = None
        self.progress.end()

    def pending(self) -> Iterator[_Asked]:
        yield from (asked for asked, _, _ in self.sending)
        yield from self.waiting
        yield from self.expected


class Transfers:
    """The transfers of this process. ``messages()`` makes what they are sent with, at the first one."""

    def __init__(self, world: Job, messages: Callable[[], Messages]) -> None:
        self._world = world
        self._make_messages = messages
        self._asked: deque[_Asked] = deque()
        self._routes: dict[tuple[int, int], _Route] = {}
        self._changed = threading.Condition()
        self._under_way = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._counters = Counters()
        self._abandoned: list[Any] = []
        statistics.include(self)
        world.on_failure(self._fail)

    def send(
        self, value: Value, source: int, target: int, done: Callable[[BaseException | None], None]
    ) -> None:
        """Send an array once it is computed. ``source`` and ``target`` are global device ids.

        ``done`` is called, by another thread, when the array is not needed any more, or could not be sent.
        """

        def end(_: Any, error: BaseException | None) -> None:
            done(error)

        self._ask(_Asked(source, target, value.type, watchdog.calling_line(), end, value))

    def receive(self, type: TensorType, source: int, target: int) -> Promise:
        """The array that the other process sends, or will send."""
        promise = Promise(Event())

        def end(content: Any, error: BaseException | None) -> None:
            promise.content, promise.error = [content], error
            promise.event.set()

        self._ask(_Asked(source, target, type, watchdog.calling_line(), end))
        return promise

    def counters(self) -> Counters:
        """Messages and bytes that this process has sent."""
        return self._counters

    def drain(self) -> None:
        """Wait until all transfers have ended, then end the thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _ask(self, asked: _Asked) -> None:
        with self._changed:
            error = self._error
            if error is None and self._closed:
                error = StrettoError("the process is ending: nothing is transferred any more")
            if error is None:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._work, name="stretto-transfers", daemon=True
                    )
                    self._thread.start()
                self._under_way += 1
                self._asked.append(asked)
                self._changed.notify_all()
        if error is not None:
            asked.end(None, error)

    def _fail(self, error: BaseException) -> None:
        """The job has failed: so has every transfer, which the thread sees to."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # The thread.

    def _work(self) -> None:
        try:
            messages = self._make_messages()
            looks = 0
            while self._wait_for_work():
                looks = 0 if self._advance(messages) else looks + 1
                if looks > _YIELDS:
                    self._rest(min(_LONGEST_PAUSE, 2e-5 * (looks - _YIELDS)))
                else:
                    give_way()
        except BaseException as error:
            self._fail(error)
            self._world.fail(error)
        self._give_up()

    def _wait_for_work(self) -> bool:
        """Whether there is something to do, after waiting for it; not once the job has failed."""
        if self._under_way and self._error is None:
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._under_way or self._closed or self._error)
            return self._error is None and bool(self._under_way)

    def _rest(self, seconds: float) -> None:
        """Leave the core to others, unless something new is asked for."""
        with self._changed:
            if not self._asked:
                self._changed.wait(seconds)

    def _advance(self, messages: Messages) -> bool:
        """Take every step that needs no waiting; whether there was one."""
        moved = bool(self._asked)
        while self._asked:
            asked = self._asked.popleft()
            route = self._route(asked.source, asked.target)
            (route.expected if asked.value is None else route.waiting).append(asked)
        while (message := messages.take()) is not None:
            self._arrive(messages, *message)
            moved = True
        for route in self._routes.values():
            while route.waiting and self._try_to_post(messages, route):
                moved = True
            while route.sending and all(d.Test() for d in route.sending[0][1]):
                asked, _, _ = route.sending.popleft()
                self._end(route, asked, None)
                moved = True
            while route.expected and route.arrived and route.arrived[0].is_complete():
                self._hand_over(route, route.expected.popleft(), route.arrived.popleft())
                moved = True
            if route.expected or route.sending:
                route.begin(route.expected[0] if route.expected else route.sending[0][0])
        return moved

    def _route(self, source: int, target: int) -> _Route:
        found = self._routes.get((source, target))
        if found is None:
            world = self._world
            ranks = (source // world.local_devices, target // world.local_devices)
            peer = ranks[0] if ranks[1] == world.rank else ranks[1]
            # The same number on both sides, and none of an executor's streams.
            progress = world.progress(-1 - (source * world.num_devices + target))
            found = self._routes[source, target] = _Route(source, target, peer, ranks, progress)
        return found

    def _try_to_post(self, messages: Messages, route: _Route) -> bool:
        """Send the first array of those that wait, if it is computed."""
        asked = route.waiting[0]
        assert asked.value is not None
        if not asked.value.is_ready():
            return False
        route.waiting.popleft()
        problem: BaseException | None = None
        content = np.empty(0, np.uint8)
        try:
            content = asked.value.host_view()
        except Exception as error:
            problem = error
        inline = content.nbytes <= INLINE
        about = [route.source, route.target, str(asked.type), str(problem or ""), inline]
        head = json.dumps(about).encode() + b"\n" + (as_bytes(content).tobytes() if inline else b"")
        deliveries = [messages.post(route.peer, head)]
        if not inline:
            deliveries.append(messages.post_content(route.peer, content))
        if problem is not None:
            self._abandoned.append((deliveries, head))
            self._end(route, asked, problem)
            return True
        self._counters += Counters(messages=1, nbytes=content.nbytes)
        route.sending.append((asked, deliveries, (head, content)))
        return True

    def _arrive(self, messages: Messages, process: int, message: bytes) -> None:
        """A message has come: receive what belongs to it, whether or not it is expected yet."""
        about, _, inline = message.partition(b"\n")
        source, target, text, error, is_inline = json.loads(about)
        type = TensorType.parse(text)
        content = pool.empty(type.shape, type.numpy)
        delivery = None
        if not is_inline:
            delivery = messages.take_content(process, content)
        elif not error:
            as_bytes(content)[:] = np.frombuffer(inline, np.uint8)
        self._route(source, target).arrived.append(_Arrival(type, error, content, delivery))

    def _hand_over(self, route: _Route, asked: _Asked, arrival: _Arrival) -> None:
        """Give an arrived array to the receive that expects it, or an error if they do not match."""
        sender, receiver = route.ranks
        if arrival.error:
            problem: BaseException | None = StrettoError(
                f"the {asked.type} that device {route.target} was to get from device {route.source} could "
                f"not be computed there, on rank {sender}: {arrival.error}"
            )
        elif arrival.type != asked.type:
            problem = CollectiveMismatch(
                f"rank {sender} sends {arrival.type} from device {route.source} to device {route.target}, "
                f"where rank {receiver} expects {asked.type}{f' ({asked.line})' if asked.line else ''}: "
                "both must put the same arrays on the other's devices, in the same order"
            )
        else:
            problem = None
        self._end(route, asked, problem, Landed(arrival.content))

    def _end(
        self, route: _Route, asked: _Asked, error: BaseException | None, content: Any = None
    ) -> None:
        route.end(asked)
        self._finish(asked, None if error is not None else content, error)

    def _finish(self, asked: _Asked, content: Any, error: BaseException | None) -> None:
        asked.end(content, error)
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _give_up(self) -> None:
        """End everything that is left with the error, if there is one."""
        error = self._error
        if error is None:
            return
        for route in self._routes.values():
            self._abandoned += [*route.sending, *route.arrived]
            for asked in route.pending():
                self._finish(asked, None, error)
        self._routes = {}
        while self._asked:
            self._finish(self._asked.popleft(), None, error)


_lock = threading.Lock()
_made: dict[World, Transfers] = {}


def transfers_of(world: World) -> Transfers:
    """The transfers of a world, made at the first call. They end when the process leaves the job."""

    def messages() -> Messages:
        from stretto.collectives.messages import MpiMessages

        if world.comm is None:
            raise WorldError("this process is alone: there is nobody to send arrays to")
        return MpiMessages(world.comm)

    with _lock:
        if world not in _made:
            _made[world] = Transfers(world, messages)
            world.before_leaving(_made[world].drain)
        return _made[world]
