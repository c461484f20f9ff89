"""A machine without a GPU, for tests of the engine `xla:cuda`.

A fake CUDA driver (``driver.c`` says what it does), CUDA runtime, NVML and NCCL (``runtime.c``, ``nvml.c``,
``nccl.c``), under which XLA's real CUDA client runs; and an engine whose segments XLA's CPU client computes
(``engine.py``), since the fake's kernels compute nothing.

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
        (HERE / "nccl.c", folder / "libnccl.so.2", [*over_driver, "-lrt"]),
    ):
        if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
            soname = f"-Wl,-soname,{made.name}"
            subprocess.run([*compiler, str(source), "-o", str(made), soname, *linked], check=True)
    other = folder / "libcudart.so.13"
    if not other.exists():
        other.symlink_to("libcudart.so.12")
    return folder


def environment(folder: Path, devices: int = 8) -> dict[str, str]:
    """What a process needs in its environment to have so many fake GPUs, each its own to NCCL."""
    return {
        "LD_LIBRARY_PATH": str(build(folder)),
        "FAKE_CUDA_DEVICES": str(devices),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
