"""A machine without a GPU, for tests of the engine `xla:cuda`.

A fake CUDA driver (``driver.c`` says what it does), CUDA runtime and NVML (``runtime.c``, ``nvml.c``), under
which XLA's real CUDA client runs; and an engine whose segments XLA's CPU client computes (``engine.py``),
since the fake's kernels compute nothing.

Needs jax's CUDA plugin; ``ci/gpu --fake`` installs it and runs what is tested with it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def build(folder: Path) -> Path:
    """Compile the fake libraries into a folder that ``LD_LIBRARY_PATH`` can name, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-pthread"]
    driver = folder / "libcuda.so.1"
    over_driver = [str(driver), "-Wl,-rpath,$ORIGIN"]
    for source, made, linked in (
        (HERE / "driver.c", driver, ["-ldl"]),
        (HERE / "runtime.c", folder / "libcudart.so.12", over_driver),
        (HERE / "nvml.c", folder / "libnvidia-ml.so.1", over_driver),
    ):
        if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
            soname = f"-Wl,-soname,{made.name}"
            subprocess.run([*compiler, str(source), "-o", str(made), soname, *linked], check=True)
    other = folder / "libcudart.so.13"
    if not other.exists():
        other.symlink_to("libcudart.so.12")
    return folder
