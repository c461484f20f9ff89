"""`stretto doctor` on GPUs: what is there, what is missing, and the line that installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest
from support import cuda

CODE = """
import sys
from importlib import metadata
from stretto.commands import doctor
from stretto.runtime.options import Options

known = dict(pair.split("=") for pair in sys.argv[3:])
real = metadata.version

def version(name):
    if name.startswith(("jax-cuda", "cupy")) and name not in known:
        raise metadata.PackageNotFoundError(name)
    return known.get(name) or real(name)

metadata.version = version
for f in doctor.gpus(Options(engine=sys.argv[1], local_devices=int(sys.argv[2]))):
    print(f.subject, "|", f.value, "|", f.good, "|", f.advice)
"""


def look(environment: dict[str, str], *arguments: str) -> dict[str, list[str]]:
    """The findings by subject: value, whether it is good, advice."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" | ") for line in done.stdout.splitlines()]
    return {subject.strip(): [part.strip() for part in rest] for subject, *rest in lines}


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    return cuda.environment(tmp_path_factory.mktemp("cuda"), devices=2)


def nothing(folder: Path) -> dict[str, str]:
    """An environment without CUDA's libraries, whatever the machine has."""
    for name in ("libcuda.so.1", "libnccl.so.2"):
        (folder / name).write_text("")
    return {"LD_LIBRARY_PATH": str(folder)}


def test_all_is_there(fake: dict[str, str]) -> None:
    have = [f"jax-cuda12-plugin={jaxlib.__version__}", "cupy-cuda12x=14.2.0"]
    found = look(fake, "xla:cuda", "2", *have)
    assert found["GPU driver"] == ["supports CUDA 13.0", "True", ""]
    assert found["GPUs"] == ["2: fake CUDA device, fake CUDA device", "True", ""]
    assert found["CUDA plugin of jax"][0].endswith("for cuda12")
    assert found["NCCL"] == ["2.30.7", "True", ""]
    assert found["CuPy"] == ["14.2.0 (not needed)", "True", ""]
    asked = found.pop("MPI on GPUs' memory")
    assert asked[:2] == ["no, by MPIX_GPU_query_support", "None"] and "STRETTO_CUDA_MPI" in asked[2]
    assert {good for _, good, _ in found.values()} == {"True"}


def test_the_plugin_is_missing_or_another_release(fake: dict[str, str]) -> None:
    found = look(fake, "xla:cuda", "3")
    assert found["CUDA plugin of jax"] == [
        "not installed",
        "False",
        "pip install 'stretto[cuda13]'",
    ]
    assert found["STRETTO_LOCAL_DEVICES"][0] == "3 devices are asked for, CUDA shows 2 GPUs"
    release = jaxlib.__version__
    found = look(fake, "xla:cuda", "1", "jax-cuda12-plugin=0.1.0")
    assert found["CUDA plugin of jax"][1:] == ["False", f"pip install 'jax[cuda12]=={release}'"]


def test_nothing_is_there(tmp_path: Path) -> None:
    found = look(nothing(tmp_path), "xla:cuda", "1")
    assert found["GPU driver"][1] == "False" and "NVIDIA's driver" in found["GPU driver"][2]
    assert found["NCCL"][1] == "None" and "pip install nvidia-nccl-cu13" in found["NCCL"][2]
    assert look(nothing(tmp_path), "xla:cpu", "1") == {}
