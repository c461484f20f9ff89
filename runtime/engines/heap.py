"""The C library's heap, set up for programs that allocate and free the same large arrays in every step.

An engine that allocates with ``malloc`` gives back, with glibc's defaults, at the end of a step what the next
one takes again: the kernel then clears every page anew, which costs a training step of small layers a fifth
of its time. So freed memory is kept up to a bound.

Threads share heaps ("arenas") once there are as many as allowed, and then wait for each other's locks. A
process has some 50 threads that allocate, on few cores; two that compile with one heap take up to half as
long again. So there are enough heaps for all of them, also on few cores; memory does not grow by it.

Settings of the user (``MALLOC_…``, ``GLIBC_TUNABLES``) stand. Other C libraries are left as they are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping

# mallopt(3): number, value. Blocks larger than MMAP_THRESHOLD, here the largest that glibc takes, are mapped
# one by one.
_TRIM_THRESHOLD = -1, 256 << 20
_MMAP_THRESHOLD = -3, 32 << 20
_ARENA_MAX = -8
_ARENAS, _ARENAS_OF_A_CORE = 32, 8  # the fewest; glibc's own measure

MallOpt = Callable[[int, int], int]


def keep_freed(
    cores: int,
    environment: Mapping[str, str] | None = None,
    mallopt: MallOpt | None = None,
) -> bool:
    """Set up the heap of this process, which computes on ``cores`` cores; whether that was done.

    To be called before the threads start that allocate. ``environment`` and ``mallopt`` default to the
    process's own.
    """
    environment = os.environ if environment is None else environment
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in environment):
        return False
    mallopt = mallopt or _mallopt()
    if mallopt is None:
        return False
    arenas = max(_ARENAS, _ARENAS_OF_A_CORE * cores)
    settings = (_MMAP_THRESHOLD, _TRIM_THRESHOLD, (_ARENA_MAX, arenas))
    return all([mallopt(*setting) for setting in settings])


def _mallopt() -> MallOpt | None:
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 (other C libraries have mallopt with other numbers)
        return libc.mallopt
    except (AttributeError, OSError, TypeError):
        return None
