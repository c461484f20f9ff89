"""The roll call: all processes go on together, or all raise the same."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.memory_store import MemoryStore

from stretto.runtime.errors import WorldError
from stretto.runtime.job.rendezvous import Rendezvous, Roll, call_roll

LONG = 60.0


def call(
    store: MemoryStore, rank: int, size: int, problem: str = "", timeout: float = LONG
) -> Roll | str:
    """The roll, or what was raised instead."""
    try:
        return call_roll(Rendezvous("a test", rank, size, store), problem, timeout)
    except WorldError as error:
        return str(error)


def all_call(store: MemoryStore, size: int, **of_rank: str) -> list[Roll | str]:
    with ThreadPoolExecutor(size) as pool:
        calls = [
            pool.submit(call, store, rank, size, of_rank.get(f"r{rank}", ""))
            for rank in range(size)
        ]
        return [done.result(LONG) for done in calls]


def test_all_see_the_same_roll() -> None:
    store = MemoryStore()
    first, *others = all_call(store, 4)
    assert isinstance(first, Roll) and len(first.present) == 4
    assert others == [first] * 3
    # Threads of one process share memory, whatever the host.
    assert len({process.memory for process in first.present}) == 1
    again = all_call(store, 4)
    assert again == [again[0]] * 4
    assert isinstance(again[0], Roll) and again[0].job != first.job


def test_a_problem_of_one_is_raised_by_all() -> None:
    said = all_call(MemoryStore(), 3, r1="MPI is not installed")
    assert said == ["rank 1 cannot join: MPI is not installed"] * 3


@pytest.mark.parametrize("present", [[0, 2], [2], [0]])
def test_who_does_not_come_is_named_by_all_and_to_those_who_come_late(present: list[int]) -> None:
    store, size = MemoryStore(), 4
    missing = [rank for rank in range(size) if rank not in present]
    with ThreadPoolExecutor(size) as pool:
        calls = [pool.submit(call, store, rank, size, timeout=0.1) for rank in present]
        said = [done.result(LONG) for done in calls]
    names = ", ".join(map(str, missing))
    beginning = (
        f"processes {names} of the 4 that a test joined did not make JAX's devices within 0.1 s "
    )
    assert isinstance(said[0], str) and said[0].startswith(beginning)
    late = [call(store, rank, size) for rank in missing]
    assert set(said + late) == {said[0]}


def test_one_that_gave_up_decides_for_the_first_process_too() -> None:
    """Process 0 comes last, and would find everybody there."""
    store = MemoryStore()
    early = call(store, 1, 2, timeout=0.05)
    assert isinstance(early, str) and early.startswith("process 0 of the 2 ")
    assert call(store, 0, 2) == early


def test_an_attempt_that_failed_can_be_repeated() -> None:
    store = MemoryStore()
    assert isinstance(call(store, 0, 2, timeout=0.05), str)
    assert isinstance(call(store, 1, 2), str)
    first, second = all_call(store, 2)
    assert isinstance(first, Roll) and first == second


def test_a_first_process_that_dies_before_it_has_spoken_is_named() -> None:
    store = MemoryStore()
    store.put("stretto/roll/0/here/0", json.dumps({"host": "h", "memory": "m"}))
    said = call(store, 1, 2, timeout=0.05)
    assert isinstance(said, str) and said.startswith("process 0 of the 2 ")


def test_the_first_process_asks_for_all() -> None:
    """The others ask for one key until all are there: the service is one process too."""
    asked: list[str] = []
    lock = threading.Lock()

    class Counting(MemoryStore):
        def get(self, key: str, timeout: float) -> str:
            with lock:
                asked.append(key)
            return super().get(key, timeout)

    size = 6
    all_call(Counting(), size)
    assert sum(key.endswith("/verdict") for key in asked) == size
