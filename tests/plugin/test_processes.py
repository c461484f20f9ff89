"""What only a process of its own shows: registration, start, exit, and memory after many calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest


def run_python(
    code: str,
    *arguments: str,
    platforms: str | None = "stretto",
    local_devices: int = 2,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process; ``platforms`` None leaves JAX_PLATFORMS unset."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    if platforms is not None:
        env["JAX_PLATFORMS"] = platforms
    env |= {"STRETTO_LOCAL_DEVICES": str(local_devices), **settings}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class TestRegistration:
    @pytest.mark.parametrize("platforms", [None, "cpu"])
    def test_nothing_changes_for_who_does_not_ask(self, platforms: str | None) -> None:
        code = """
import sys, jax
from jax._src.interpreters import mlir
lower = mlir.lower_jaxpr_to_module
assert {d.platform for d in jax.devices()} == {"cpu"}
assert jax.default_backend() == "cpu"
assert mlir.lower_jaxpr_to_module is lower
assert "stretto" not in mlir._platforms_with_donation
heavy = ("mpi4py", "stretto.plugin._capi", "stretto.runtime", "stretto.hlo_frontend")
found = [m for m in sys.modules if m.startswith(heavy)]
assert not found, found
"""
        done = run_python(code, platforms=platforms)
        check(done)
        assert "stretto" not in done.stderr

    def test_alone_it_brings_the_cpu_along(self) -> None:
        code = """
import jax
assert jax.default_backend() == "stretto"
assert [d.platform for d in jax.devices()] == ["stretto"] * 2
assert jax.devices("cpu")[0].platform == "cpu"
assert jax.process_count() == 1
import sys
assert not [m for m in sys.modules if m.startswith("mpi4py")]
"""
        done = run_python(code)
        check(done)
        assert done.stderr == ""

    def test_a_new_client_in_the_same_process(self) -> None:
        code = """
import threading
import jax, jax.numpy as jnp, numpy as np
from jax.extend.backend import clear_backends
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def work(k, results):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    placed = jax.device_put(np.full(4, k, np.float32), sharding)
    results[k] = float(jax.jit(lambda a: (a + k).sum())(placed))

for _ in range(2):
    results = {}
    threads = [threading.Thread(target=work, args=(k, results)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: 8.0 * k for k in range(4)}, results
    device = jax.devices()[0]
    clear_backends()
    assert jax.devices()[0] is not device
"""
        done = run_python(code)
        check(done)
        assert done.stderr == ""

    def test_it_can_come_second(self) -> None:
        code = """
import jax
assert jax.default_backend() == "cpu"
assert len(jax.devices("stretto")) == 2
assert float(jax.jit(lambda a: a + 1)(jax.device_put(1.0, jax.devices("stretto")[1]))) == 2
"""
        check(run_python(code, platforms="cpu,stretto"))

    def test_an_option_in_the_program(self) -> None:
        code = """
import jax
jax.config.update("jax_platforms", "stretto")
assert jax.default_backend() == "stretto"
assert jax.devices("cpu")
"""
        check(run_python(code, platforms=None))

    def test_bad_options_say_which(self) -> None:
        done = run_python("import jax; jax.devices()", local_devices=0)
        assert done.returncode == 1
        assert "STRETTO_LOCAL_DEVICES is 0: expected a whole number of devices" in done.stderr


EXIT_WITH_LIVE_ARRAYS = """
import sys
import jax, jax.numpy as jnp, numpy as np
a = jnp.arange(1000.0)
b = jax.jit(lambda v: v @ jnp.outer(v, v))(a)
class Cycle:
    pass
cycle = Cycle()
cycle.self, cycle.array = cycle, jnp.ones(5)
view, buffer = np.asarray(a), memoryview(np.asarray(b))
pending = jax.jit(lambda m: jnp.linalg.inv(m @ m.T + jnp.eye(500)))(jnp.ones((500, 500)))
donated = jax.jit(lambda v: v + 1, donate_argnums=0)(jnp.ones(1000))
for _ in range(3):
    try:
        jax.devices()[0].memory("nope")
    except Exception as error:
        kept = error
def fail():
    local = jnp.ones(10) + 1
    raise ValueError("on its way")
try:
    fail()
except ValueError as error:
    kept_too = error
if sys.argv[1:] == ["raise"]:
    fail()
if sys.argv[1:] == ["exit"]:
    sys.exit(7)
"""


CALLED_BACK_TO_RUN = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
rows, ranks = NamedSharding(mesh, P("x")), np.arange(2, dtype=np.float32)
def mapped(f, out_specs):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=out_specs, check_vma=False))
total = mapped(lambda a: jax.lax.psum(a, "x"), P("x"))
loop = lambda a: jax.lax.fori_loop(0, 3, lambda _, v: jax.lax.psum(v, "x") * 0.5, a)
rounds = mapped(loop, P("x"))
assert rounds(jax.device_put(ranks, rows)).tolist() == [0.5, 0.5]
def call(a):
    halves = rounds(jax.device_put(ranks, rows))
    assert halves.tolist() == [0.5, 0.5]
    return np.asarray(total(jax.device_put(ranks, rows)))[:1] + np.asarray(a)
def f(a):
    return jax.pure_callback(call, jax.ShapeDtypeStruct((1,), jnp.float32), a)
assert jax.jit(f)(ranks[:1]).tolist() == [1]
everywhere = mapped(lambda a: jax.lax.psum(f(a), "x"), P())
assert everywhere(jax.device_put(ranks, rows)).tolist() == [3]
left = everywhere(jax.device_put(ranks, rows))  # may be under way when the process ends
"""


@pytest.mark.thorough
def test_programs_that_communicate_run_in_functions_called_back(tmp_path: Path) -> None:
    """They are part of the run that waits for them, whichever thread calls, wherever they are loaded from."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for _ in range(2):
        done = run_python(CALLED_BACK_TO_RUN, settings=cache)
        check(done)
        assert done.stderr == ""
    assert list(tmp_path.glob("jit__lambda*"))


def test_forked_children_read_arrays() -> None:
    """As workers that load data do. The thread that tells whether they are computed is the parent's."""
    code = """
import os, jax, numpy as np
x = jax.device_put(np.arange(8, dtype=np.float32))
child = os.fork()
if not child:
    os._exit(int(np.asarray(jax.block_until_ready(x)).sum()))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 28
np.testing.assert_array_equal(np.asarray(x), np.arange(8))
"""
    check(run_python(code))


class TestExit:
    @pytest.mark.thorough
    def test_with_live_arrays(self) -> None:
        done = run_python(EXIT_WITH_LIVE_ARRAYS)
        check(done)
        assert done.stderr == ""

    def test_with_an_uncaught_exception(self) -> None:
        done = run_python(EXIT_WITH_LIVE_ARRAYS, "raise")
        assert done.returncode == 1
        assert done.stderr.rstrip().endswith("ValueError: on its way")

    @pytest.mark.thorough
    def test_with_a_code_of_its_own(self) -> None:
        assert run_python(EXIT_WITH_LIVE_ARRAYS, "exit").returncode == 7

    @pytest.mark.thorough
    @pytest.mark.parametrize("ends", [True, False], ids=["that end", "that wait for ever"])
    def test_beside_functions_that_an_error_has_left_behind(self, ends: bool) -> None:
        code = """
import atexit, sys, threading, time
import jax, numpy as np
from jax.sharding import PartitionSpec as P
began, ending = threading.Event(), threading.Event()
def call(v):
    if int(v[0]) == 0:
        began.wait(30)
        raise RuntimeError("the reason")
    began.set()
    ending.wait(30 if sys.argv[1] == "True" else None)
    time.sleep(0.3)
    return np.asarray(v)
def f(v):
    return jax.pure_callback(call, jax.ShapeDtypeStruct(v.shape, v.dtype), v)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
mapped = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
try:
    jax.block_until_ready(jax.jit(mapped)(np.arange(2)))
except RuntimeError as error:
    assert "the reason" in str(error)
else:
    raise SystemExit("no error")
if sys.argv[1] == "True":
    atexit.register(ending.set)
"""
        done = run_python(code, str(ends), settings={"STRETTO_GRACE": "30" if ends else "0.5"})
        check(done)
        assert "abort" not in done.stderr.lower()

    def test_with_failed_arrays(self) -> None:
        code = """
import jax, jax.numpy as jnp
def fail(_):
    raise RuntimeError("the reason")
try:
    jax.block_until_ready(jax.jit(lambda a: jax.pure_callback(fail, a, a))(1.0))
except Exception as error:
    kept = error
else:
    raise SystemExit("no error")
"""
        check(run_python(code))

    def test_with_work_under_way_on_all_devices(self) -> None:
        code = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax, shard_map
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
f = jax.jit(shard_map(
    lambda a: lax.fori_loop(0, 50, lambda i, c: lax.psum(jnp.sin(c), "x"), a),
    mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
a = jax.device_put(np.ones(1 << 16, np.float32), NamedSharding(mesh, P("x")))
for _ in range(5):
    a = f(a)
"""
        check(run_python(code))

    @pytest.mark.thorough
    @pytest.mark.parametrize(("first", "local_devices"), [("the function", 2), ("the devices", 1)])
    def test_functions_that_python_calls_at_its_end_compute(
        self, first: str, local_devices: int
    ) -> None:
        code = """
import atexit, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
def show(where):
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    a = jax.device_put(np.arange(8 * 2048, dtype=np.float32).reshape(8, -1), NamedSharding(mesh, P("x")))
    def f(a):  # several segments, between which arrays are gathered, and a callback
        for _ in range(3):
            a = a - jax.lax.psum(a @ a.T, "x").sum() / 1e9 + jax.lax.ppermute(a, "x", [(0, 0)])
        return jax.pure_callback(lambda v: v + 1, jax.ShapeDtypeStruct(a.shape, a.dtype), a)
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    print(where, np.asarray(mapped(a)).tobytes()[:32].hex(), float(jnp.arange(10.0).mean()))
if sys.argv[1] == "the function":
    atexit.register(show, "late")
jax.devices()
if sys.argv[1] == "the devices":
    atexit.register(show, "late")
atexit.register(jax.clear_caches)
show("before")
"""
        done = run_python(code, first, local_devices=local_devices)
        lines = [line.split() for line in check(done).splitlines()]
        assert done.stderr == ""
        assert [line[0] for line in lines] == ["before", "late"]
        assert lines[0][1:] == lines[1][1:]
        assert lines[0][2] == "4.5"

    @pytest.mark.thorough
    @pytest.mark.parametrize("waited_for", [False, True], ids=["left", "waited for"])
    def test_beside_daemon_threads_that_compute(self, waited_for: bool) -> None:
        code = """
import atexit, sys, threading
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
def wait():
    stop.set()
    for thread in threads:
        thread.join()
    print("ended")
if sys.argv[1] == "True":
    atexit.register(wait)  # ahead of all that runs at the end: it is called last
mesh = jax.make_mesh((2,), ("x",))
f = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
started, stop = threading.Semaphore(0), threading.Event()
def go():
    i = 0
    while not stop.is_set():
        a = jax.device_put(np.full(8, i, np.float32), NamedSharding(mesh, P("x")))
        assert np.asarray(f(a))[0] == 2 * i
        jax.jit(lambda b: b * 2 + 1)(i).block_until_ready()
        i += 1
        if i == 3:
            started.release()
threads = [threading.Thread(target=go, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in threads:
    started.acquire()
"""
        done = run_python(code, str(waited_for))
        assert check(done) == ("ended\n" if waited_for else "")
        assert done.stderr == ""


def test_a_thread_of_c_lets_go_of_a_handle_without_the_gil() -> None:
    """As jaxlib's threads do of executables, also while Python ends: who waits for the GIL then is ended."""
    code = """
import ctypes, time, weakref
from stretto.plugin import _capi

libc, holding = ctypes.CDLL(None), ctypes.PyDLL(None)  # the second one keeps the GIL
start = ctypes.c_void_p(_capi.deleter())  # void (*)(void*), as good as a thread's function

def step():
    libc.getpid()  # the main thread does what was left to it once it has had the GIL anew
    for _ in range(100):
        pass

def thread_for(handle):
    thread = ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, start, ctypes.c_void_p(handle)) == 0
    return thread

kept = _capi.Bytes(b"x")
gone, pointer = weakref.ref(kept), _capi.give(kept)
del kept
until = (ctypes.c_long * 2)(int(time.time()) + 20, 0)
assert holding.pthread_timedjoin_np(thread_for(pointer), None, until) == 0, "it waits for the GIL"
step()
assert gone() is None

several = [_capi.Bytes(b"y") for _ in range(200)]  # more than Python queues
references = [weakref.ref(one) for one in several]
threads = [thread_for(_capi.give(one)) for one in several]
del several
for thread in threads:
    assert libc.pthread_join(thread, None) == 0
step()
assert not any(reference() for reference in references)
"""
    check(run_python(code))


def test_an_exception_on_its_way_survives_destructors() -> None:
    """jaxlib calls into the plugin while it unwinds; the table must leave the exception alone."""
    code = """
import jax, jax.numpy as jnp
f = jax.jit(lambda a: a + 1)
for i in range(300):
    try:
        hold = [f(jnp.ones(3)) for _ in range(3)]
        raise KeyError(i)
    except KeyError as error:
        assert error.args == (i,)
        del hold
    try:
        f(jnp.ones(2), jnp.ones(3))
    except TypeError:
        pass
    else:
        raise SystemExit("no error")
"""
    check(run_python(code))


@pytest.mark.thorough
def test_memory_stays_flat() -> None:
    code = """
import gc
import jax, jax.numpy as jnp, numpy as np
from jax import lax, shard_map
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

increment = jax.jit(lambda a: a + 1)
step = jax.jit(lambda a: a * 2, donate_argnums=0)
mesh = Mesh(np.array(jax.devices()), ("x",))
total = jax.jit(shard_map(lambda a: lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
small, host = jnp.zeros(1000), np.zeros(1000, np.float32)
spread = jax.device_put(np.zeros(1000, np.float32), NamedSharding(mesh, P("x")))

def donate():
    step(step(jnp.zeros(1000)))

def lookup():
    try:
        jax.devices()[0].memory("nope")
    except jax.errors.JaxRuntimeError:
        return
    raise AssertionError("a kind of memory that there is not was found")

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

for name, call, count in (
    ("jit", lambda: increment(small), 10_000),
    ("wait", lambda: increment(small).block_until_ready(), 2_000),
    ("read", lambda: np.asarray(increment(small)), 2_000),
    ("put", lambda: jax.device_put(host), 2_000),
    ("donate", donate, 1_000),
    ("psum", lambda: total(spread).block_until_ready(), 500),
    ("error", lookup, 1_000),
):
    for _ in range(count // 4):
        call()
    # An allocator may take a new arena at any time, once; what leaks does so in every round.
    rounds = []
    for _ in range(4):
        before = resident()
        for _ in range(count // 4):
            call()
        rounds.append((resident() - before) / (count // 4))
    # One leaked array would be 4,000 bytes a call, one handle about 200.
    assert min(rounds) < 150, f"{name}: {rounds} bytes a call in each round"
"""
    check(run_python(code))
