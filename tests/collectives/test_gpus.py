"""Collectives between GPUs: every kind, type and group form, over the fake NCCL. See gpu_ranks.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import cuda
from support.mpi import run_ranks

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
SCRIPT = Path(__file__).with_name("gpu_ranks.py")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return cuda.environment(tmp_path_factory.mktemp("cuda")) | {
        "PYTHONPATH": str(SCRIPT.parents[1])
    }


@pytest.mark.quick("4", "2,1")
@pytest.mark.mpi
@pytest.mark.parametrize("devices", ["1,1", "2,2", "4", "2,1", "1,1,1"])
def test_collectives_between_gpus(fake: dict[str, str], devices: str) -> None:
    ranks = devices.count(",") + 1
    env = fake | {"FAKE_CUDA_DELAY_US": "200", "FAKE_NCCL_DELAY_US": "1"}
    done = run_ranks(ranks, [str(SCRIPT), devices], env=env, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    match = re.search(r"^checked (\d+): (.*)$", done.stdout, re.MULTILINE)
    assert match, done.stdout + done.stderr
    assert int(match[1]) > 60
    assert set(match[2].split()) == {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "reduce-scatter",
    }


def run(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


JOIN = """
from stretto.collectives.gpus import Gpus

gpus = Gpus(None, patience=0.2)
joined = gpus.join({0: 0, 1: 0}, {0: 0, 1: DEVICE})
"""


def test_two_devices_on_one_gpu_are_refused(fake: dict[str, str]) -> None:
    code = JOIN.replace("DEVICE", "0") + "print(joined)"
    refused = run(code, fake | {"NCCL_MULTI_RANK_GPU_ENABLE": "0"})
    assert refused == "several devices are on one GPU, and NCCL_MULTI_RANK_GPU_ENABLE is not 1\n"
    assert "Joined object" in run(code, fake)


def test_lists_of_calls(fake: dict[str, str]) -> None:
    """More than are kept in one go, in their order; one that fails is named, and what follows is left out."""
    code = """
import ctypes
import threading
from stretto.collectives._driver import WRITE_NUMBER
from stretto.collectives.cuda import COPY, RECORD, WAIT, CudaError, cuda

driver = cuda()
driver.use(1)
elsewhere = driver.stream()
driver.use(0)
stream, event = driver.stream(), driver.event()
text = bytes(range(150))
source, made = (ctypes.create_string_buffer(text, 150) for _ in range(2))
number, at, to = ctypes.c_uint(0), ctypes.addressof(source), ctypes.addressof(made)
ctypes.memset(to, 0, 150)
gate = threading.Event()
hold = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gate.wait(60) and None)
ctypes.CDLL("libcuda.so.1").fake_cuda_hold(hold)
copies = [(COPY, to + n, at + n, 1, stream) for n in range(150)]
writes = (WRITE_NUMBER, stream, ctypes.addressof(number), 7)
driver.enqueue(0, [*copies, writes, (RECORD, event, stream), (WAIT, elsewhere, event)])
print(driver.passed(event), made.raw == bytes(150), number.value)
gate.set()
driver.synchronize(elsewhere)
print(driver.passed(event), made.raw == text, number.value)
try:
    failing = (RECORD, event, elsewhere)
    driver.enqueue(0, [(COPY, to, at + 1, 1, stream), failing, (COPY, to, at + 2, 1, stream)])
except CudaError as error:
    print(error)
driver.synchronize(stream)
print(made.raw[0])
"""
    said = run(code, fake | {"FAKE_CUDA_DELAY_US": "20"}).splitlines()
    assert said[:2] == ["False True 0", "True True 7"]
    assert said[2].startswith("cuEventRecord failed: ") and said[2].endswith("(400)")
    assert said[3:] == ["1"]


def test_devices_that_cuda_does_not_show(fake: dict[str, str]) -> None:
    code = JOIN.replace("DEVICE", "8") + "print(joined)"
    assert run(code, fake) == "process 0: CUDA shows 8 GPUs\n"


def test_without_nccl(fake: dict[str, str]) -> None:
    code = "import ctypes\nreal = ctypes.CDLL\n"
    code += "def load(name, **how):\n    if 'nccl' in name: raise OSError('no such library')\n"
    code += "    return real(name, **how)\nctypes.CDLL = load\n" + JOIN.replace("DEVICE", "1")
    assert run(code + "print(joined)", fake) == "process 0: no such library\n"


def test_a_rank_that_does_not_come(fake: dict[str, str]) -> None:
    """A communicator that does not come about is given up, with its devices named."""
    code = JOIN.replace("DEVICE", "1") + (
        """
from stretto.collectives.cuda import CudaError
from stretto.collectives.nccl import nccl

unique_id = nccl().unique_id()
try:
    gpus._make((0, 1), unique_id, {0: 0, 1: 1}, {0: 0})
except CudaError as error:
    print(error)
"""
    )
    assert run(code, fake) == "joining devices [0, 1]: not all ranks came within 0.2 s\n"


FAILING = """
import threading, time
import numpy as np
from stretto.collectives.cuda import CudaError, cuda
from stretto.collectives.bound_on_gpus import Buffers, bind
from stretto.collectives.gpus import Gpus
from stretto.collectives.hierarchy import create_communicator
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType

gpus, owner = Gpus(None), {0: 0, 1: 0}
joined = gpus.join(owner, {0: 0, 1: 1})
type_ = TensorType("f32", (4,))
collective = Collective(Kind.ALL_REDUCE, (type_,), (type_,), ((0, 1),), reduction=Reduction.SUM)
bound = bind(joined, collective, create_communicator(None, 0).bind(collective, owner))
x, y = np.arange(4, dtype=np.float32), [np.zeros(4, np.float32) for _ in owner]
buffers = {i: Buffers([x.ctypes.data], [y[i].ctypes.data]) for i in owner}

def call():
    bound.enqueue(buffers)
    events = []
    for i in owner:
        cuda().use(i)
        events.append(cuda().event())
        cuda().record(events[-1], bound.stream(i))
    return events

def over(events):
    return all(cuda().passed(e) for e in events)

first = call()
while not over(first):
    time.sleep(0.001)
print(y[1].tolist(), repr(bound.failure()))
second = call()
while not bound.failure():
    time.sleep(0.001)
print(bound.failure(), over(second))
gpus.abort("rank 1 is gone")
while not over(second):
    time.sleep(0.001)
try:
    call()
except CudaError as error:
    print(error)
"""


def test_an_error_that_comes_later_and_the_end(fake: dict[str, str]) -> None:
    """The error is seen while the call hangs on its stream, and an abort ends it there."""
    out = run(FAILING, fake | {"FAKE_NCCL_FAIL_AT": "3"})
    assert out.splitlines() == [
        "[0.0, 2.0, 4.0, 6.0] ''",
        "remote process exited (NCCL error 6) False",
        "rank 1 is gone",
    ]
