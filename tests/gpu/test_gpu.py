"""The engine `xla:cuda`, on GPUs or on the fake CUDA driver, where the CPU computes what kernels would.

``ci/gpu`` runs this, installs jax's CUDA plugin and sets these variables; skipped without the plugin.

    STRETTO_TEST_GPU    ``fake`` (default) or ``real``
    STRETTO_TEST_FORM   processes and devices of each on which conformance programs run, as ``2x4`` (1x8)
    STRETTO_TEST_NCCL   0: their collectives go through the host's memory
    STRETTO_TEST_CUDA_MPI   1: or MPI moves them on the GPUs' memory, as if its library had said that it can
    STRETTO_TEST_ROUNDS how often each race is run (20)
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import cuda

from stretto.conformance import judge
from stretto.conformance.programs import PROGRAMS

TESTS = Path(__file__).parents[1]
FOUND = any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))
pytestmark = pytest.mark.skipif(
    not FOUND, reason="no CUDA plugin of jax: ci/gpu --fake installs it"
)
DELAY_US = "300"

REAL = os.environ.get("STRETTO_TEST_GPU", "fake") == "real"
ROUNDS = os.environ.get("STRETTO_TEST_ROUNDS", "20")
ENGINE = "xla:cuda" if REAL else "cuda-fake"
SETTINGS = (
    ("STRETTO_ENGINE", ENGINE),
    # GPUs multiply f32 as TF32 by default, with errors of 1e-3. The fake has no CUDA graphs.
    ("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    if REAL
    else ("XLA_FLAGS", "--xla_gpu_enable_command_buffer="),
)
FORM_NAME = os.environ.get("STRETTO_TEST_FORM", "1x8")
PROCESSES, DEVICES = map(int, FORM_NAME.split("x"))
FORM = judge.Form(
    "gpu",
    PROCESSES,
    DEVICES,
    settings=(
        *SETTINGS,
        ("STRETTO_NCCL", os.environ.get("STRETTO_TEST_NCCL", "1")),
        ("STRETTO_CUDA_MPI", os.environ.get("STRETTO_TEST_CUDA_MPI", "0")),
    ),
)
# Ways of collectives between GPUs. MPI on their memory is tried on the fake, whose memory any MPI reads.
NCCL = {"STRETTO_NCCL": "1"}
STAGED = {"STRETTO_NCCL": "0", "STRETTO_CUDA_MPI": "0"}
BY_MPI = {"STRETTO_NCCL": "0", "STRETTO_CUDA_MPI": "1"}
WAYS = {"nccl": NCCL, "staged": STAGED, "direct": BY_MPI}
only_fake = pytest.mark.skipif(REAL, reason="asks the fake what happened, or has it fail")
# JAX's Python callback for GPUs, with which the fake computes, misreads packed elements. That is not the
# engine's doing, whose transfers of these types are tried. So programs that compute with them are left out.
PACKED = ("/int4", "/uint4", "/float4_e2m1fn")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process needs in its environment to have eight fake GPUs, and an engine for them.

    With real ones only what lets ranks share them.
    """
    if REAL:
        return {"PYTHONPATH": str(TESTS), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    folder = tmp_path_factory.mktemp("cuda")
    environment = cuda.environment(folder / "libraries")
    metadata = folder / "cuda_fake-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cuda_fake\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[stretto.engines]\ncuda-fake = support.cuda.engine:create\n"
    )
    return environment | {"PYTHONPATH": f"{folder}:{TESTS}", "TF_CPP_MIN_LOG_LEVEL": "3"}


def python(
    code: str, environment: dict[str, str], platforms: str = "cpu"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment | {"JAX_PLATFORMS": platforms},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def gpus() -> int:
    """How many an engine is asked for: two where there are."""
    if not REAL:
        return 2
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return min(2, listed.stdout.count("GPU "))


@pytest.mark.parametrize("delay", ["0"] if REAL else ["0", DELAY_US])
@pytest.mark.parametrize("engine", ["xla", "pjrt"])
def test_cuda_conforms(fake: dict[str, str], engine: str, delay: str) -> None:
    on_fake = {"xla": "create", "pjrt": "create_pjrt"}[engine]
    named = f"{engine}:cuda" if REAL else f"support.cuda.engine:{on_fake}"
    code = f"""
import jax
from stretto.engine_check import Unsupported, checks_of
from stretto.runtime.engines.engine import create_engine

jax.devices()  # XLA restores code for GPUs where JAX has loaded its own plugins, as in every program
checks = checks_of(lambda count: create_engine("{named}", count), devices={gpus()})
for name, check in checks.items():
    if name != "growth" or {delay == "0"}:  # runs too often to wait for each
        try:
            check()
            print(name)
        except Unsupported:
            pass
"""
    done = python(code, fake | {"FAKE_CUDA_DELAY_US": delay})
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"donation", "runs", "outputs", "types/f32"} <= set(done.stdout.split())
    assert ("restores" in done.stdout) == (engine == "xla")


@pytest.mark.skipif(not REAL, reason="results of code for GPUs")
def test_what_programs_do_on_one_device(fake: dict[str, str]) -> None:
    done = ranks(fake, 1, 1, "one_device.py")
    print(done.stdout)
    assert "right more_memory_than_there_is" in done.stdout, done.stderr[-3000:]
    assert "wrong" not in done.stdout


@only_fake
def test_runs_are_enqueued_ahead(fake: dict[str, str]) -> None:
    """Beyond what XLA allows by default, and without waiting: a function of the host holds the stream up."""
    code = '''
import ctypes, os, threading
import numpy as np
from stretto.collectives.types import TensorType
from stretto.runtime.engines import xla_cuda
from stretto.runtime.program import Segment

F32 = TensorType("f32", (16,))
COPY = b"""module @copy {
  func.func public @main(%a: tensor<16xf32>) -> tensor<16xf32> { return %a : tensor<16xf32> }
}"""
engine = xla_cuda.create(1)
loaded = engine.compile(Segment((F32,), (F32,), COPY), name="copy")
array = engine.put(np.arange(16, dtype=np.float32), F32, 0)
(first,) = loaded.run(0, [array])
engine.block(first)
driver = ctypes.CDLL("libcuda.so.1")
gate = threading.Event()
hold = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gate.wait(60) and None)
assert driver.fake_cuda_hold(hold) == 0
waits = driver.fake_cuda_host_waits()
for _ in range(1000):
    (array,) = loaded.run(0, [array])
print(engine.is_ready(array), driver.fake_cuda_host_waits() - waits)
gate.set()
print(engine.host_view(array).tolist() == list(range(16)), flush=True)
os._exit(0)  # a function that still holds up another stream could not return once Python ends
'''
    done = python(code, fake)
    assert (done.stdout, done.returncode) == ("False 0\nTrue\n", 0), done.stderr[-3000:]


@only_fake
def test_an_array_deleted_while_it_is_copied_is_an_error(fake: dict[str, str]) -> None:
    code = '''
import numpy as np
from stretto.collectives.types import TensorType
from stretto.runtime.engines import xla_cuda
from stretto.runtime.errors import StrettoError

class Late:
    """The driver, where another thread deletes the array while the copy is under way."""

    def __getattr__(self, name):
        return getattr(driver, name)

    def synchronize(self, stream):
        driver.synchronize(stream)
        array.delete()

F32 = TensorType("f32", (16,))
engine = xla_cuda.create(1)
array = engine.put(np.arange(16, dtype=np.float32), F32, 0)
found = np.zeros(16, np.float32)
engine.read_into(array, found)
print(found.tolist() == list(range(16)))
driver = xla_cuda.cuda()
xla_cuda.cuda = Late
try:
    engine.read_into(array, found)
except StrettoError as error:
    print(error)
'''
    done = python(code, fake)
    assert done.stdout.startswith("True\nthe array was deleted or donated"), done.stderr[-3000:]


@only_fake
def test_more_devices_than_gpus(fake: dict[str, str]) -> None:
    code = """
from stretto.runtime.engines import xla_cuda
from stretto.runtime.errors import StrettoError

try:
    xla_cuda.create(3)
except StrettoError as error:
    print(error)
"""
    done = python(code, fake | {"FAKE_CUDA_DEVICES": "2"})
    assert "3 devices are asked for (STRETTO_LOCAL_DEVICES), and CUDA shows 2 GPUs" in done.stdout


@only_fake
def test_ranks_of_a_host_use_gpus_of_their_own(fake: dict[str, str]) -> None:
    """The second of three uses GPUs 2 and 3: their memory and streams. XLA is shown no other."""
    code = """
import ctypes
import numpy as np
from stretto.collectives.cuda import cuda
from stretto.collectives.types import TensorType
from stretto.runtime.engines import xla_cuda

engine = xla_cuda.create(2, place=(1, 3))
print([engine.loans.device(n) for n in (0, 1)], engine._client.device_count())
F32, driver = TensorType("f32", (4,)), ctypes.CDLL("libcuda.so.1")
for ordinal, device in enumerate((2, 3)):
    array = engine.put(np.arange(4, dtype=np.float32), F32, ordinal)
    cuda().use(device)
    stream, number = cuda().stream(), ctypes.c_int()
    address = engine.loans.lend(array, stream, [])
    driver.cuPointerGetAttribute(ctypes.byref(number), 9, ctypes.c_void_p(address))  # the device's number
    engine.loans.hold(ordinal, engine.loans.mark(ordinal, stream))  # an event of that device
    print(number.value)
"""
    done = python(code, fake)
    assert done.stdout == "[2, 3] 2\n2\n3\n", done.stderr[-3000:]


def ranks(
    environment: dict[str, str],
    processes: int,
    devices: int,
    *arguments: str,
    engine: str = ENGINE,
) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder on the fake."""
    settings = (*environment.items(), *SETTINGS, ("STRETTO_ENGINE", engine))
    form = judge.Form("ranks", processes, devices, settings=settings)
    script, *rest = arguments
    return subprocess.run(
        judge.command(form, [str(Path(__file__).parent / script), *rest]),
        env=judge.environment(form),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.parametrize(
    ("processes", "devices"), [(2, 1), (4, 1)] if REAL else [(1, 2), (2, 1), (1, 4), (2, 2)]
)
@pytest.mark.parametrize(
    ("driver", "nccl", "way", "kind"),
    [
        ("300", "10000", "nccl", "sums"),
        ("1000", "0", "nccl", "sums"),
        ("300", "0", "staged", "sums"),
        ("300", "0", "staged", "moves"),
        pytest.param("300", "0", "direct", "moves", marks=only_fake),
    ],
)
def test_memory_is_not_reused_too_early(
    fake: dict[str, str],
    processes: int,
    devices: int,
    driver: str,
    nccl: str,
    way: str,
    kind: str,
) -> None:
    """XLA waits for collectives that write what it reads, and read what it writes; they wait for XLA. Over
    NCCL, through the host's memory, and by MPI on the GPUs'. Two processes share one, four have their own."""
    delays = {"FAKE_CUDA_DELAY_US": driver, "FAKE_NCCL_DELAY_US": nccl}
    shared = {"FAKE_CUDA_DEVICES": "1"} if (processes, devices) == (2, 1) and not REAL else {}
    done = ranks(fake | delays | shared | WAYS[way], processes, devices, "races.py", ROUNDS, kind)
    assert done.stdout.count(f"right {ROUNDS}") == processes, done.stderr[-3000:]


@pytest.mark.parametrize("way", ["nccl", "staged"])
def test_memory_is_taken_and_code_loaded_meanwhile(fake: dict[str, str], way: str) -> None:
    """By a driver that waits for all streams then, and serves nobody else: they go on all the same."""
    slow = {"FAKE_CUDA_LOCKS": "1", "FAKE_CUDA_DELAY_US": "20000"}
    done = ranks(fake | slow | WAYS[way], 2, 1, "loading.py", "6")
    assert done.stdout.count("right 6") == 2, done.stderr[-3000:]


@only_fake
@pytest.mark.parametrize(("processes", "devices"), [(4, 1), (2, 2)])
def test_mpi_moves_what_the_host_would(fake: dict[str, str], processes: int, devices: int) -> None:
    """On the GPUs' memory and through the host's: the same bytes, which are checked against NumPy's too."""
    slow = fake | {"FAKE_CUDA_DELAY_US": "300"}
    said = re.compile(r"(\w+ rank \d+): ([^;]*); ([0-9a-f]{64})")  # ranks may write to one line
    found = {}
    for way in ("direct", "staged"):
        done = ranks(slow | WAYS[way], processes, devices, "ways.py")
        assert done.returncode == 0, done.stderr[-3000:]
        found[way] = sorted(said.findall(done.stdout))
        assert len(found[way]) == 3 * processes
    direct, staged = found["direct"], found["staged"]
    assert [digest for *_, digest in direct] == [digest for *_, digest in staged]
    ways = "7 by MPI on the GPUs' memory + 3 through the host's memory"
    assert {way for _, way, _ in direct} == {ways}
    assert {way for _, way, _ in staged} == {"10 through the host's memory"}


@only_fake
@pytest.mark.parametrize(("processes", "devices"), [(1, 2), (2, 1)])
def test_collectives_do_not_wait_on_the_host(
    fake: dict[str, str], processes: int, devices: int
) -> None:
    # Kernels that compute nothing: those of the other engine are functions that the host waits for.
    slow = {"FAKE_NCCL_DELAY_US": "20000", "FAKE_CUDA_DELAY_US": "300", "STRETTO_NCCL": "1"}
    done = ranks(fake | slow, processes, devices, "ahead.py", engine="xla:cuda")
    assert done.stdout.count("0 waits, 200 over NCCL") == processes, done.stderr[-3000:]


@pytest.mark.parametrize("processes", [2])
def test_the_host_time_of_a_step(fake: dict[str, str], processes: int) -> None:
    """What `benchmarks/gpu_host.py` prints, which asserts that the host has waited for nothing."""
    script = str(TESTS.parent / "benchmarks" / "gpu_host.py")
    done = ranks(fake | NCCL, processes, 1, script, engine="xla:cuda")
    print(done.stdout)
    assert done.stdout.count(" 0 waits of the host") == processes, done.stderr[-3000:]


@only_fake
def test_without_nccl_collectives_go_through_the_host(fake: dict[str, str]) -> None:
    """Where ranks share a GPU, with one warning a process however many programs there are."""
    one = {"NCCL_MULTI_RANK_GPU_ENABLE": "0", "FAKE_CUDA_DEVICES": "1"}
    done = ranks(fake | one, 2, 1, "faults.py", "none", "sums")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("[2.0]") == 2  # ranks write at the same time
    assert done.stderr.count("not over NCCL: several devices are on one GPU") == 2


@pytest.mark.parametrize("processes", [2, 4])
def test_code_on_gpus_calls_collectives(fake: dict[str, str], processes: int) -> None:
    """Over NCCL, on the stream that it runs on: all kinds that NCCL has, and others where the loop is
    walked."""
    shared = {} if REAL else {"FAKE_CUDA_DEVICES": "1", "FAKE_CUDA_DELAY_US": "100"}
    done = ranks(fake | shared | NCCL, processes, 1, "loops.py", str(processes))
    # Complex numbers are the executor's. Of two ranks a pair is all of them, and its sum part of another.
    said = f"72 of 72 right, {5 * (11 if processes == 2 else 12)} by compiled code"
    assert done.stdout.count(said) == processes, done.stdout + done.stderr[-3000:]


KILLED = "rank 1 (pid"
LATE = "timed out after 5 s (STRETTO_TIMEOUT): rank 1 did not reach it"


@pytest.mark.parametrize(
    ("fault", "way", "message"),
    [
        ("killed", "nccl", KILLED),
        ("killed", "staged", KILLED),
        pytest.param("killed", "direct", KILLED, marks=only_fake),
        ("late", "nccl", LATE),
        ("late", "staged", LATE),
        pytest.param("late", "direct", LATE, marks=only_fake),
        pytest.param("error", "nccl", "remote process exited (NCCL error 6)", marks=only_fake),
        ("killed", "loops", KILLED),
        ("killed", "endless", KILLED),
        ("late", "loops", LATE),
        pytest.param("error", "loops", "remote process exited (NCCL error 6)", marks=only_fake),
    ],
)
def test_a_fault_ends_all_ranks(fake: dict[str, str], fault: str, way: str, message: str) -> None:
    """Nobody gets content of a collective that was not completed, and the message names what failed. Over
    NCCL, through the host's memory, and by MPI on the GPUs'."""
    kind = {"direct": "moves", "loops": "loops", "endless": "endless"}.get(way, "sums")
    settings = {"STRETTO_TIMEOUT": "5", "STRETTO_GRACE": "1"} | WAYS.get(way, NCCL)
    processes = 4 if fault == "killed" else 2
    done = ranks(fake | settings, processes, 1, "faults.py", fault, kind)
    assert done.returncode != 0
    assert "content:" not in done.stdout
    assert message in done.stderr
    for rank in {*range(processes)} - {1}:
        assert f"stretto: rank {rank} ends:" in done.stderr
    if fault != "killed":
        name = "all-gather %all_gather" if kind == "moves" else "all-reduce %psum"
        assert name in done.stderr and "faults.py:" in done.stderr


def test_segments_compile_without_a_device(tmp_path: Path) -> None:
    """What the suite's programs compute, lowered as for CUDA and compiled for an H100 that is not there."""
    log = tmp_path / "compiled.jsonl"
    settings = {
        "STRETTO_ENGINE": "support.cuda.compiling:create",
        "STRETTO_TEST_COMPILED": str(log),
        "PYTHONPATH": str(TESTS),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    form = judge.Form("compiling", 1, 8, settings=tuple(settings.items()))
    chosen = [n for n, program in PROGRAMS.items() if not program.only_full]
    outcomes = judge.run_programs(form, chosen, tmp_path)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    problems = [f"{name}: {problem[:600]}" for name, problem in lines if problem]
    # Programs that wait for what a callback of theirs was told, or look at results, fail on zeros.
    refused = [
        f"{name}: {outcome.problem[-600:]}"
        for name, outcome in outcomes.items()
        if outcome.problem and "JaxRuntimeError" in outcome.problem
    ]
    print(f"{len(lines)} segments of {len(chosen)} programs, {len(problems)} refused")
    assert len(lines) > 400
    assert not problems + refused, "\n".join(problems + refused)


def test_a_program_is_compiled_for_a_gpu_that_is_not_there() -> None:
    """With collectives, linear algebra and donation, and serialized."""
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import serialize_executable, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

devices = topologies.get_topology_desc("2x4", platform="stretto", target_config="sm_90").devices
sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
shape = jax.ShapeDtypeStruct((8, 16, 16), np.float32, sharding=sharding)
step = lambda a: (jnp.linalg.cholesky(a) + a.sum(0), jnp.linalg.eigh(a)[0])
compiled = jax.jit(step, donate_argnums=0).lower(shape).compile()
print(compiled.memory_analysis().temp_size_in_bytes > 0)
print(len(serialize_executable.serialize(compiled)[0]) > 10000)
for wrong in ("sm_00", "gpu_device_info { speed: 3 }"):
    try:
        topologies.get_topology_desc("1x1", platform="stretto", target_config=wrong)
    except jax.errors.JaxRuntimeError as error:
        print("cannot compile for target_config" in str(error))
"""
    settings = {"STRETTO_ENGINE": "xla:cuda", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = python(code, settings, platforms="stretto,cpu")
    assert done.stdout.split() == ["True"] * 4, done.stderr[-3000:]


TRACE = """
import glob, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("i",))
split = NamedSharding(mesh, PartitionSpec("i"))
total = jax.jit(
    jax.shard_map(
        lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec()
    )
)
x = jax.device_put(np.ones(len(jax.devices()), np.float32), split)
total(x).block_until_ready()
with jax.profiler.trace(sys.argv[1]):
    for _ in range(3):
        y = total(x)
    y.block_until_ready()
(path,) = glob.glob(f"{sys.argv[1]}/**/*.xplane.pb", recursive=True)
(plane,) = [p for p in jax.profiler.ProfileData.from_file(path).planes if "stretto rank" in p.name]
lines = {line.name: [(e.start_ns, e.duration_ns) for e in line.events] for line in plane.lines}
moved, walked = lines["stream 0"], [begin + took for begin, took in lines["programs"]]
print(len(moved), moved == sorted(moved), all(took > 0 for _, took in moved))
print(all(a + took <= b + 1000 for (a, took), (b, _) in zip(moved, moved[1:])))
print(sum(moved[-1]) > max(walked))
"""


@only_fake
def test_traces_show_when_collectives_ran_on_the_gpu(fake: dict[str, str], tmp_path: Path) -> None:
    """By events of the streams: the last one ends behind the walk that put it there."""
    script = tmp_path / "script.py"
    script.write_text(TRACE)
    settings = {"STRETTO_ENGINE": ENGINE, "STRETTO_LOCAL_DEVICES": "2"} | dict(SETTINGS)
    slow = fake | settings | {"FAKE_NCCL_DELAY_US": "50000", "JAX_PLATFORMS": "stretto,cpu"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "trace")],
        env=os.environ | slow,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.split() == ["3", *["True"] * 4], done.stderr[-3000:]


LENDING = """
import ctypes
import jax, jax.numpy as jnp, numpy as np
from stretto.collectives.cuda import cuda

class Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32))

cuda().use(0)
stream = cuda().stream()
count_up = jax.jit(lambda x: x + 1)
x = jax.device_put(np.zeros(1000, np.float32))
for _ in range(20):
    x = count_up(x)
print(x.is_ready(), x.__dlpack_device__() == (2, 0))
capsule = x.__dlpack__(stream=stream)
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
tensor = Tensor.from_address(pointer(capsule, b"dltensor"))
to = np.zeros(1000, np.float32)
cuda().copy(to.ctypes.data, tensor.data, 4000, stream)
cuda().synchronize(stream)
print(set(to.tolist()) == {20.0}, list(tensor.device) == [2, 0], tensor.ndim)
try:
    x.__dlpack__(dl_device=(1, 0))
except BufferError as error:
    print("own device only" in str(error))
"""


@only_fake
def test_arrays_are_lent_by_dlpack_where_they_are(fake: dict[str, str]) -> None:
    """To CuPy, PyTorch and others: without a copy, and on their stream behind what computes the array."""
    settings = fake | dict(SETTINGS) | {"FAKE_CUDA_DELAY_US": "20000"}
    done = python(LENDING, settings, platforms="stretto,cpu")
    assert done.stdout.split() == ["False", "True", "True", "True", "1", "True"], done.stderr[
        -3000:
    ]


def names() -> list[str]:
    packed = {n for n in PROGRAMS if n.endswith(PACKED) and not n.startswith("roundtrip/")}
    chosen = [n for n, program in PROGRAMS.items() if n not in packed and not program.only_full]
    like = {"4x2": "2x4"}.get(FORM_NAME, FORM_NAME)  # what the suite runs on several processes
    return [n for n in chosen if like in PROGRAMS[n].forms]


Outcomes = dict[str, judge.Outcome]


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[str]:
    """The programs that this session collected."""
    items = [i for i in request.session.items if i.name.startswith("test_program[")]
    return [i.callspec.params["name"] for i in items if i.path == Path(__file__)]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def references(chosen: list[str], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    judged = [n for n in chosen if PROGRAMS[n].expected is None]
    return judge.run_programs(judge.REFERENCE, judged, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def outcomes(
    fake: dict[str, str], chosen: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (fake | {"FAKE_CUDA_DELAY_US": "50"}).items():
            patch.setenv(name, value)
        # A program may take minutes where the fake's threads and the ranks share two busy cores.
        folder, seconds = (
            tmp_path_factory.mktemp("fake"),
            judge.PROGRAM_SECONDS * (1 if REAL else 4),
        )
        return judge.run_programs(FORM, chosen, folder, seconds)


@pytest.mark.parametrize("name", names())
def test_program(name: str, outcomes: Outcomes, references: Outcomes) -> None:
    program, outcome = PROGRAMS[name], outcomes[name]
    if program.expected is not None:
        want: dict[str, np.ndarray] = dict(program.expected())
    else:
        want = judge.assemble(references[name].load())
    if outcome.problem:
        pytest.fail(outcome.problem, pytrace=False)
    problems = judge.differences(want, outcome.load(), program.exact, program.rtol)
    assert not problems, "\n".join(problems[:8])
