"""Waits for MPI: what they do in which order, with requests that count how often they are asked."""

from __future__ import annotations

import ctypes
import math
import platform
import struct
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from stretto.collectives import waiting
from stretto.collectives.waiting import Waiting


class Request:
    """Complete after ``polls`` tests; every test takes ``seconds`` of the clock."""

    def __init__(self, polls: int, seconds: float = 0.0) -> None:
        self.polls, self.seconds = polls, seconds
        self.calls: list[str] = []
        self.now = 0.0
        self.sleeps: list[float] = []

    def Test(self) -> bool:
        self.calls.append("Test")
        self.now += self.seconds
        return self.calls.count("Test") > self.polls

    def Wait(self) -> None:
        self.calls.append("Wait")

    def Waitall(self, requests: list[Request]) -> None:
        self.calls.append(f"Waitall {len(requests)}")

    def Testall(self, requests: list[Request]) -> bool:
        done = [request.Test() for request in requests]
        return all(done)

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def waited(request: Request, patience: float, requests: list[Request] | None = None) -> Request:
    waiting = Waiting(patience, lambda: request.now, request.sleep)
    waiting.all(requests or [request])  # type: ignore[arg-type]
    return request


def test_without_end_of_patience_mpi_waits_itself() -> None:
    assert waited(Request(5), math.inf).calls == ["Wait"]
    request = Request(5)
    assert waited(request, math.inf, [request, Request(1)]).calls == ["Waitall 2"]


def test_what_is_there_costs_one_poll() -> None:
    request = waited(Request(0), 0.0)
    assert request.calls == ["Test"]
    assert request.sleeps == []


def test_sleeps_begin_when_patience_ends() -> None:
    request = waited(Request(32, seconds=25e-6), 5e-4)
    assert len(request.calls) == 33
    # It looks at the clock every 8 polls: goes on at 200 and 400 us, sleeps a tenth of 600 and of 860 us.
    assert request.sleeps == pytest.approx([60e-6, 86e-6])


def test_sleeps_are_a_tenth_of_the_wait_within_bounds() -> None:
    request = waited(Request(800), 0.0)
    assert request.sleeps[0] == 10e-6
    assert request.sleeps[-1] == 500e-6
    now = 0.0
    for slept in request.sleeps:
        assert slept == pytest.approx(min(max(now / 10, 10e-6), 500e-6))
        now += slept


BULK = 1 << 20


class Transfer(Request):
    """Complete when its clock says ``end``; a test takes a microsecond."""

    def __init__(self, end: float) -> None:
        super().__init__(0, 1e-6)
        self.end = end

    def Test(self) -> bool:
        self.now += self.seconds
        return self.now >= self.end


def transferred(waiting_of: list[Waiting], patience: float, took: float, nbytes: int) -> Transfer:
    """One transfer of a row: the waits of all share what they learn. ``took`` in seconds."""
    transfer = Transfer(took)
    if not waiting_of:
        waiting_of.append(Waiting(patience))
    (waiting,) = waiting_of
    waiting._clock, waiting._sleep = lambda: transfer.now, transfer.sleep
    waiting.all([transfer], nbytes)  # type: ignore[list-item]
    return transfer


def test_bulk_is_slept_through_once_its_pace_is_known() -> None:
    row: list[Waiting] = []
    first = transferred(row, 50e-6, 4e-3, BULK)
    assert len(first.sleeps) > 20  # a tenth more each time
    # What a byte took is an upper estimate, as late as the end was noticed; it falls until it is one below.
    for _ in range(9):
        last = transferred(row, 50e-6, 4e-3, BULK)
    assert len(last.sleeps) <= 12
    assert max(last.sleeps) == 500e-6
    assert last.now <= 4.5e-3


def test_a_few_fast_transfers_do_not_change_the_pace() -> None:
    row: list[Waiting] = []
    for k in range(40):
        transferred(row, 50e-6, 1e-4 if k % 8 == 7 else 4e-3, BULK)
    assert len(transferred(row, 50e-6, 4e-3, BULK).sleeps) <= 16


@pytest.mark.parametrize(("patience", "nbytes"), [(50e-6, 64), (300e-6, BULK)])
def test_short_messages_and_longer_patience_poll_as_ever(patience: float, nbytes: int) -> None:
    row: list[Waiting] = []
    counts = {len(transferred(row, patience, 4e-3, nbytes).sleeps) for _ in range(5)}
    assert len(counts) == 1


def test_waits_for_other_peers_learn_apart() -> None:
    row: list[Waiting] = []
    for _ in range(5):
        transferred(row, 50e-6, 4e-3, BULK)
    other = [row[0].apart()]
    assert transferred(other, 50e-6, 1e-4, BULK).now <= 1.3e-4


def test_all_of_several_requests_are_awaited() -> None:
    first, second = Request(1), Request(3)
    waited(first, 0.0, [first, second])
    assert second.calls == ["Test"] * 4
    assert first.sleeps == []


def test_nothing_to_wait_for() -> None:
    Waiting(0.0).all([])
    Waiting().all([])


@pytest.mark.parametrize(
    ("patience", "calls"),
    [
        (math.inf, ["block 1 2"]),
        (300e-6, ["meet", "Test", "block 1 2"]),
        (50e-6, ["start 1 2", "Test"]),
    ],
)
def test_collectives_block_only_where_a_core_is_to_spare(patience: float, calls: list[str]) -> None:
    made: list[str] = []

    class There:
        def Test(self) -> bool:
            made.append("Test")
            return True

    class Comm:
        def Ibarrier(self) -> There:
            made.append("meet")
            return There()

    def start(*arguments: int) -> There:
        made.append(f"start {arguments[0]} {arguments[1]}")
        return There()

    def block(*arguments: int) -> None:
        made.append(f"block {arguments[0]} {arguments[1]}")

    Waiting(patience).run(Comm(), block, start, 1, 2)  # type: ignore[arg-type]
    assert made == calls


def test_after_a_yield_that_others_used_waits_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    now, did = [0.0], []

    def spend(name: str, seconds: float) -> None:
        did.append(name)
        now[0] += seconds

    slices = iter([1e-6, 2e-3, 1e-6])
    monkeypatch.setattr(waiting, "_taken_until", 0.0)
    monkeypatch.setattr(waiting.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(waiting, "sched_yield", lambda: spend("yield", next(slices)))
    monkeypatch.setattr(waiting, "_sleep_precisely", lambda seconds: spend("sleep", 8e-3))
    monkeypatch.setattr(waiting, "short_slices", lambda: None)  # not of the tests' own thread
    for _ in range(5):
        waiting.give_way()
    # The second yield took 2 ms, for eight times as long as which two sleeps of 8 ms last.
    assert did == ["yield", "yield", "sleep", "sleep", "yield"]


# The numbers of sched_setattr(2) and sched_getattr(2).
CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
ATTR = "IIQiIQQQ"  # its first version: size, policy, flags, nice value, priority, slice in nanoseconds, …


def attributes() -> list[int]:
    """Those of the calling thread."""
    if sys.platform != "linux" or platform.machine() not in CALLS:
        pytest.skip("slices are Linux's")
    attr = ctypes.create_string_buffer(struct.calcsize(ATTR))
    number = CALLS[platform.machine()][1]
    if ctypes.CDLL(None).syscall(number, 0, attr, len(attr.raw), 0) != 0:
        pytest.skip("sched_getattr is not permitted here")
    found = list(struct.unpack(ATTR, attr.raw))
    if found[5] == 0:
        pytest.skip("before Linux 6.12 threads have no slices of their own")
    return found


def in_a_thread_with_slices_of(slice_ns: int, work: Callable[[], None]) -> tuple[list, list]:
    """What attributes a thread had before and after ``work``. A thread begins with those of the one that made
    it, which may have waited for its core."""
    found: list[list[int]] = []

    def whole() -> None:
        wanted = attributes()
        wanted[0], wanted[5] = struct.calcsize(ATTR), slice_ns
        ctypes.CDLL(None).syscall(
            CALLS[platform.machine()][0],
            0,
            ctypes.create_string_buffer(struct.pack(ATTR, *wanted)),
            0,
        )
        found.append(attributes())
        work()
        found.append(attributes())

    attributes()  # skips in the test's own thread
    thread = threading.Thread(target=whole)
    thread.start()
    thread.join()
    before, after = found
    assert before[5] == slice_ns
    return before, after


def test_one_thread_has_short_slices_and_is_else_as_before() -> None:
    ours = attributes()
    before, after = in_a_thread_with_slices_of(3_000_000, waiting.short_slices)
    assert after == [*before[:5], 100_000, *before[6:]]
    assert attributes() == ours


@pytest.mark.parametrize(("took", "slice_ns"), [(1e-6, 3_000_000), (100e-6, 100_000)])
def test_a_thread_whose_core_others_want_has_short_slices(
    monkeypatch: pytest.MonkeyPatch, took: float, slice_ns: int
) -> None:
    """``took``: seconds of a yield."""
    clock = iter((0.0, took))
    monkeypatch.setattr(waiting, "_taken_until", 0.0)
    monkeypatch.setattr(waiting, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(waiting, "sched_yield", lambda: None)
    _, after = in_a_thread_with_slices_of(3_000_000, waiting.give_way)
    assert after[5] == slice_ns
