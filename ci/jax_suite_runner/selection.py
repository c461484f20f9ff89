"""Which files, and which of their tests, are run.

The yardstick is what one can afford to run often: the files that say most about a backend, the long ones
sampled by a hash of the test's name, so that every version of JAX and every backend runs the same tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

NUM_PROCESSES = 4
DEVICES_PER_PROCESS = 2
DEVICES = 8


@dataclass(frozen=True)
class Selection:
    """Some tests of a file.

    Of tests named ``Class::test``, those are run whose crc32 modulo ``modulus`` is ``residue``, but for
    those in ``left_out``, and if ``only`` names any, of them alone. ``cases`` is how many cases JAX generates
    for one parameterized test.
    """

    file: str
    modulus: int = 1
    residue: int = 0
    cases: int = 1
    left_out: tuple[str, ...] = ()
    only: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The file without folder and suffix; files for several processes keep their folder."""
        return self.file.removeprefix("tests/").removesuffix(".py")

    @property
    def several_processes(self) -> bool:
        return self.file.startswith("tests/multiprocess/")


def _file(name: str, **how: object) -> Selection:
    return replace(Selection(f"tests/{name}_test.py"), **how)  # type: ignore[arg-type]


YARDSTICK = (
    _file("multi_device"),
    _file("array"),
    _file("python_callback"),
    # The one left out waits for a deadlock.
    _file("debugging_primitives", left_out=("test_async_deadlock",)),
    _file("custom_partitioning"),
    _file("layout"),
    _file("aot"),
    _file("lax", cases=1),
    _file("lax_autodiff", cases=1),
    _file("linalg", cases=1),
    _file("random", cases=2),
    _file("shard_map", modulus=4),
    _file("pjit", modulus=4),
    _file("pmap", modulus=4),
    _file("api", modulus=4),
    _file("lax_control_flow", modulus=8),
    _file("multiprocess/all_reduce"),
    _file("multiprocess/array"),
    _file("multiprocess/pjit"),
    _file("multiprocess/pmap"),
)

# Tests of other hardware, of tools, or of files that ship with JAX, whatever the backend.
_NOT_OF_A_BACKEND = (
    "cudnn",
    "gpu",
    "magma",
    "mosaic",
    "tpu",
    "documentation_coverage",
    "local_wheel_smoke",
    "package_structure",
    "pgle",
    "socket_transfer",
    "typing",
    "version",
)


def full(checkout: Path) -> tuple[Selection, ...]:
    """All tests of all files that say something about a backend that is no GPU and no TPU."""
    left_out = {s.file: s.left_out for s in YARDSTICK}
    files = sorted((checkout / "tests").glob("*_test.py"))
    files += sorted((checkout / "tests/multiprocess").glob("*_test.py"))
    names = [str(path.relative_to(checkout)) for path in files]
    return tuple(
        Selection(name, left_out=left_out.get(name, ()))
        for name in names
        if not any(word in name for word in _NOT_OF_A_BACKEND)
    )


def chosen(selections: Iterable[Selection], names: Iterable[str]) -> tuple[Selection, ...]:
    """The selections of the named files, whole files for those that the set lacks.

    A name may be a path, or one without ``tests/``, ``_test`` and ``.py``.
    """
    by_file = {s.file: s for s in selections}
    found = []
    for name in names:
        stem = name.removeprefix("tests/").removesuffix(".py").removesuffix("_test")
        file = f"tests/{stem}_test.py"
        found.append(by_file.get(file, Selection(file)))
    return tuple(found)
