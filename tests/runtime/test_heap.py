"""How the heap is set up: what mallopt is told, and that memory freed is used again without new pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stretto.runtime.engines import heap


@pytest.mark.parametrize(("cores", "arenas"), [(1, 32), (2, 32), (5, 40), (64, 512)])
def test_what_is_set(cores: int, arenas: int) -> None:
    told: dict[int, int] = {}

    def mallopt(number: int, value: int) -> int:
        told[number] = value
        return 1

    assert heap.keep_freed(cores, {}, mallopt)
    # malloc.h: M_TRIM_THRESHOLD -1, M_MMAP_THRESHOLD -3, M_ARENA_MAX -8
    assert told == {-1: 256 << 20, -3: 32 << 20, -8: arenas}


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_settings_stand(name: str) -> None:
    def mallopt(number: int, value: int) -> int:
        raise AssertionError((number, value))

    assert not heap.keep_freed(2, {name: "1"}, mallopt)


FAULTS = """
import ctypes, resource, sys
from stretto.runtime.engines import heap
if sys.argv[1] == "kept":
    if not heap.keep_freed(1, {}):
        sys.exit("not glibc")
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
size = 24 << 20

def steps(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(n):
        blocks = [libc.malloc(size) for _ in range(4)]
        for block in blocks:
            libc.memset(block, 1, size)
        for block in blocks:
            libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

steps(2)
print(steps(10) / (10 * 4 * size / 4096))
"""


def test_steps_get_no_new_pages() -> None:
    share = {}
    for mode in ("kept", "default"):
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=False
        )
        if "not glibc" in done.stderr:
            pytest.skip("this C library is no glibc")
        share[mode] = float(done.stdout)
    # Faults for each page used: none but a few, where the defaults have one for most pages.
    assert share["kept"] < 0.01
    assert share["default"] > 0.2
