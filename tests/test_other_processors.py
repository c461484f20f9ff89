"""The tests of equal bits once more, with XLA compiling for an older processor.

XLA:CPU's kernels and its libraries round alike on some processors and not on others; equal bits are promised
on all. ``STRETTO_TEST_FULL=1`` goes through all older ones, else it is the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CPUINFO = Path("/proc/cpuinfo")


def features() -> set[str]:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


@pytest.mark.thorough
def test_equal_bits_on_older_processors():
    """On those older than this one. The flag narrows what XLA compiles, not what its libraries run."""
    has = features()
    older = [isa for isa, beyond in (("AVX2", "avx512f"), ("AVX", "avx2")) if beyond in has]
    if not os.environ.get("STRETTO_TEST_FULL"):
        older = older[:1]
    if not older:
        pytest.skip(
            "this processor has nothing beyond AVX, or is no x86: the suite itself is this test"
        )
    tests = Path(__file__).parent
    marked = [p for p in sorted(tests.rglob("test_*.py")) if "@pytest.mark.bits" in p.read_text()]
    assert len(marked) > 1
    command = (sys.executable, "-m", "pytest", "-q", "-m", "bits", "-p", "no:cacheprovider")
    given = os.environ.get("XLA_FLAGS", "")
    running = [
        subprocess.Popen(
            [*command, *marked],
            cwd=tests.parent,
            env=os.environ | {"XLA_FLAGS": f"{given} --xla_cpu_max_isa={isa}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for isa in older
    ]
    told = [process.communicate()[0] for process in running]
    for process, output in zip(running, told, strict=True):
        assert process.returncode == 0, output[-20000:]
        assert " passed" in output
