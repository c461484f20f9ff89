"""Transfers between two ranks that share a post in memory: what meets what, and how it goes wrong."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stretto.collectives.types import TensorType
from stretto.runtime.engines.null import NullEngine
from stretto.runtime.errors import CollectiveMismatch, RankFailed, StrettoError
from stretto.runtime.execution import transfers as transfers_module
from stretto.runtime.execution.stream import Event
from stretto.runtime.execution.transfers import INLINE, Transfers
from stretto.runtime.execution.value import Promise, Value
from stretto.runtime.job.progress import Progress

SMALL, LARGE = TensorType("f32", (3,)), TensorType("f32", (INLINE,))


class Post:
    """Messages by receiver, contents and who waits for them by sender and receiver; what was sent."""

    def __init__(self) -> None:
        self.messages: dict[int, deque[tuple[int, bytes]]] = defaultdict(deque)
        self.contents: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
        self.asked: dict[tuple[int, int], deque[Coming]] = defaultdict(deque)
        self.sent: list[tuple[int, int, str]] = []


class Through:
    def Test(self) -> bool:
        return True


class Never:
    def Test(self) -> bool:
        return False


class Coming:
    """A content that is received when it is there: the first that was asked for gets the first."""

    def __init__(self, box: deque[np.ndarray], asked: deque[Coming], into: np.ndarray) -> None:
        self.box, self.asked, self.into = box, asked, into
        asked.append(self)

    def Test(self) -> bool:
        while self.box and self.asked:
            np.copyto(self.asked.popleft().into, self.box.popleft())
        return self not in self.asked


class MemoryMessages:
    def __init__(self, post: Post, rank: int) -> None:
        self.shared, self.rank = post, rank

    def post(self, process: int, head: bytes) -> Through:
        self.shared.sent.append((self.rank, process, "head"))
        self.shared.messages[process].append((self.rank, head))
        return Through()

    def post_content(self, process: int, content: np.ndarray) -> Through:
        self.shared.sent.append((self.rank, process, "content"))
        self.shared.contents[self.rank, process].append(np.array(content))
        return Through()

    def take(self) -> tuple[int, bytes] | None:
        box = self.shared.messages[self.rank]
        return box.popleft() if box else None

    def take_content(self, process: int, into: np.ndarray) -> Coming:
        key = process, self.rank
        return Coming(self.shared.contents[key], self.shared.asked[key], into)


class Rank:
    """A rank of two, with two devices; also the world of its transfers."""

    local_devices, num_devices = 2, 4

    def __init__(self, post: Post, rank: int, messages: Callable[[], Any] | None = None) -> None:
        self.rank = rank
        self.engine = NullEngine(2)
        self.streams: list[Progress] = []
        self.failures: list[BaseException] = []
        self.listeners: list[Callable[[StrettoError], None]] = []
        self.transfers = Transfers(self, messages or (lambda: MemoryMessages(post, rank)))
        self.done: list[BaseException | None] = []

    def progress(self, stream: int = 0) -> Progress:
        self.streams.append(Progress(stream))
        return self.streams[-1]

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def on_failure(self, listener: Callable[[StrettoError], None]) -> None:
        self.listeners.append(listener)

    def send(self, host: np.ndarray, source: int, target: int) -> None:
        type = TensorType("f32", host.shape)
        array = self.engine.put(host, type, source % 2)
        self.send_value(Value.of(self.engine, array, type, source % 2), source, target)

    def send_value(self, value: Value, source: int, target: int) -> None:
        self.transfers.send(value, source, target, self.done.append)


@pytest.fixture
def ranks() -> tuple[Rank, Rank]:
    post = Post()
    return Rank(post, 0), Rank(post, 1)


def content(promise: Promise) -> list[float]:
    return promise.result().host.tolist()


def numbers(first: float, type: TensorType = SMALL) -> np.ndarray:
    return np.arange(type.size, dtype=np.float32) + np.float32(first)


@pytest.mark.parametrize("type", [SMALL, LARGE, TensorType("f32", ()), TensorType("f32", (0, 3))])
@pytest.mark.parametrize("receiver_first", [False, True])
def test_an_array_arrives(ranks: tuple[Rank, Rank], type: TensorType, receiver_first: bool) -> None:
    sender, receiver = ranks
    host = numbers(7, type).reshape(type.shape)
    if receiver_first:
        promise = receiver.transfers.receive(type, 0, 2)
    sender.send(host, 0, 2)
    if not receiver_first:
        sender.transfers.drain()
        promise = receiver.transfers.receive(type, 0, 2)
    received = promise.result().host
    assert received.shape == type.shape
    assert received.tolist() == host.tolist()
    sender.transfers.drain()
    assert sender.done == [None]
    counted = sender.transfers.counters()
    assert (counted.messages, counted.nbytes) == (1, type.nbytes)


def test_the_nth_meets_the_nth_whatever_other_devices_do(ranks: tuple[Rank, Rank]) -> None:
    sender, receiver = ranks
    # Asked for in the opposite order of the devices, small and large ones mixed.
    promises = {
        (source, target, n): receiver.transfers.receive(LARGE if n == 1 else SMALL, source, target)
        for target in (3, 2)
        for source in (1, 0)
        for n in range(3)
    }
    for n in range(3):
        for source in (0, 1):
            for target in (2, 3):
                first = 100 * source + 10 * target + n
                sender.send(numbers(first, LARGE if n == 1 else SMALL), source, target)
    for (source, target, n), promise in promises.items():
        assert content(promise)[:2] == [100 * source + 10 * target + n + k for k in range(2)]


def test_both_ways_at_once(ranks: tuple[Rank, Rank]) -> None:
    here, there = ranks
    first, second = here.transfers.receive(LARGE, 2, 0), there.transfers.receive(LARGE, 0, 2)
    here.send(numbers(1, LARGE), 0, 2)
    there.send(numbers(2, LARGE), 2, 0)
    assert content(first)[0] == 2
    assert content(second)[0] == 1


def test_what_is_not_computed_yet_holds_up_its_own_way_only(ranks: tuple[Rank, Rank]) -> None:
    sender, receiver = ranks
    late = Promise(Event())
    sender.send_value(Value(SMALL, 0, sender.engine, None, late), 0, 2)
    sender.send(numbers(5), 0, 2)
    sender.send(numbers(9), 1, 2)
    first, second = (receiver.transfers.receive(SMALL, 0, 2) for _ in range(2))
    assert content(receiver.transfers.receive(SMALL, 1, 2))[0] == 9
    assert not first.event.done
    assert not second.event.done
    late.content = [sender.engine.put(numbers(3), SMALL, 0)]
    late.event.set()
    assert content(first)[0] == 3
    assert content(second)[0] == 5


def test_what_cannot_be_computed_is_said_where_it_was_to_arrive(ranks: tuple[Rank, Rank]) -> None:
    sender, receiver = ranks
    failed = Value.failed(sender.engine, ValueError("out of range"), SMALL, 0)
    sender.send_value(failed, 0, 2)
    sender.send(numbers(1), 0, 2)
    first, second = (receiver.transfers.receive(SMALL, 0, 2) for _ in range(2))
    with pytest.raises(
        StrettoError, match=r"device 2 was to get from device 0 .* rank 0: out of r"
    ):
        first.result()
    assert content(second)[0] == 1  # the next one is not touched by it
    sender.transfers.drain()
    assert [str(error) for error in sender.done] == ["out of range", "None"]


def test_another_array_than_was_expected(ranks: tuple[Rank, Rank]) -> None:
    sender, receiver = ranks
    promise = receiver.transfers.receive(TensorType("s32", (2, 2)), 1, 3)
    sender.send(numbers(0), 1, 3)
    message = r"rank 0 sends f32\[3\] from device 1 to device 3, where rank 1 expects s32\[2,2\]"
    with pytest.raises(CollectiveMismatch, match=message):
        promise.result()


def test_to_the_watchdog_both_ends_are_in_the_same_transfer() -> None:
    """The sender's content is never taken, the receiver's never comes."""

    class Stuck(MemoryMessages):
        def post(self, process: int, head: bytes) -> Any:
            return Never()

    post = Post()
    sender, receiver = Rank(post, 0, lambda: Stuck(post, 0)), Rank(post, 1)
    begun = {0: threading.Event(), 1: threading.Event()}
    for rank in (sender, receiver):
        make = rank.progress

        def progress(stream: int = 0, make: Any = make, rank: Rank = rank) -> Progress:
            made = make(stream)

            class Told(Progress):
                __slots__ = ()

                def begin(self, *about: Any) -> None:
                    super().begin(*about)
                    begun[rank.rank].set()

            told = Told(made.stream)
            rank.streams[-1] = told
            return told

        rank.progress = progress  # type: ignore[method-assign]
    sender.send(numbers(0), 1, 2)
    promise = receiver.transfers.receive(SMALL, 1, 2)
    entries = []
    for rank in (sender, receiver):
        assert begun[rank.rank].wait(20)
        (stream,) = rank.streams
        assert stream.stream == -1 - (1 * 4 + 2)
        entry = stream.snapshot().current
        assert entry is not None
        entries.append((entry.name, entry.sequence, entry.ranks))
    name = "transfer of f32[3] from device 1 to device 2"
    assert entries == [(name, 1, (0, 1))] * 2
    for rank in (sender, receiver):
        for listener in rank.listeners:
            listener(RankFailed("rank 2 died"))
        rank.transfers.drain()
    assert [str(error) for error in sender.done] == ["rank 2 died"]
    with pytest.raises(RankFailed, match="rank 2 died"):
        promise.result()
    with pytest.raises(RankFailed):  # and nothing is begun any more
        receiver.transfers.receive(SMALL, 1, 2).result()


def test_when_the_post_fails_the_job_does() -> None:
    class Broken(MemoryMessages):
        def take(self) -> tuple[int, bytes] | None:
            raise OSError("the network is down")

    post = Post()
    rank = Rank(post, 0, lambda: Broken(post, 0))
    with pytest.raises(OSError, match="the network is down"):
        rank.transfers.receive(SMALL, 2, 0).result()
    rank.transfers.drain()
    assert [str(error) for error in rank.failures] == ["the network is down"]


def test_small_arrays_travel_in_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers_module, "INLINE", 12)
    post = Post()
    sender = Rank(post, 0)
    for count in (3, 4):
        sender.send(np.zeros(count, np.float32), 0, 2)
    sender.transfers.drain()
    assert post.sent == [(0, 1, "head"), (0, 1, "head"), (0, 1, "content")]


def test_at_the_end_of_the_process_nothing_is_begun(ranks: tuple[Rank, Rank]) -> None:
    sender, _ = ranks
    sender.transfers.drain()
    with pytest.raises(StrettoError, match="the process is ending"):
        sender.transfers.receive(SMALL, 2, 0).result()
