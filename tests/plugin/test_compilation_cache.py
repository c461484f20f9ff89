"""JAX's persistent compilation cache: a second process compiles nothing, and computes the same.

What is compiled is counted by XLA itself, which dumps every module that it compiles.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from jaxlib import xla_client
from jaxlib.mlir import ir
from support.mpi import run_ranks

from stretto.plugin import callbacks, jax_private
from stretto.plugin.client import clients
from stretto.plugin.executable import compile_and_load, load
from stretto.runtime.errors import InvalidProgramError
from stretto.runtime.execution.value import Value

# Trains a little on all devices, and computes on one of this process's own.
SCRIPT = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import stretto

mesh = Mesh(np.array(jax.devices()), ("x",))
split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())

def place(shape, sharding, seed):
    values = np.random.default_rng(seed).normal(size=shape).astype("float32")
    return jax.make_array_from_callback(shape, sharding, lambda index: values[index])

def step(w, x):
    def loss(w):
        h, _ = jax.lax.scan(lambda h, w: (jax.numpy.tanh(h @ w), None), x, w)
        return (h**2).mean()
    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value

w, x = place((3, 16, 16), whole, 0), place((8, 16), split, 1)
step = jax.jit(step, out_shardings=(whole, whole))
for _ in range(3):
    w, value = step(w, x)
own = jax.jit(lambda a: jax.numpy.sin(a).sum())(np.arange(5.0, dtype="float32"))
done = stretto.compilations()
line = " ".join([str(jax.process_index()), np.asarray(value.addressable_data(0)).tobytes().hex(),
    np.asarray(own).tobytes().hex(), str(done.programs), str(done.segments), str(done.restored)])
sys.stdout.write(line + chr(10))
"""

ENVIRONMENT = {
    "JAX_PLATFORMS": "stretto",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_RAISE_PERSISTENT_CACHE_ERRORS": "1",
    # Otherwise the folder's name is part of the keys.
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
}


def compilations_seen_by_xla(folder: Path) -> int:
    return len(list(folder.glob("*before_optimizations.txt")))


class Outcome:
    """What each rank wrote."""

    def __init__(self, output: str) -> None:
        rows = sorted(line.split() for line in output.splitlines())
        self.results = [row[1:3] for row in rows]
        self.programs, self.segments, self.restored = (
            [int(row[i]) for row in rows] for i in (3, 4, 5)
        )


def run_alone(cache: Path, dump: Path, code: str = SCRIPT) -> Outcome:
    env = {**os.environ, **ENVIRONMENT, "STRETTO_LOCAL_DEVICES": "4"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "XLA_FLAGS": f"--xla_dump_to={dump}"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Error" not in done.stderr
    assert "arning" not in done.stderr
    return Outcome(done.stdout)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = run_alone(cache, tmp_path / "first")
    assert compilations_seen_by_xla(tmp_path / "first") >= first.programs[0] + 1
    assert first.programs[0] > 0
    assert first.restored == [0]
    second = run_alone(cache, tmp_path / "second")
    assert compilations_seen_by_xla(tmp_path / "second") == 0
    assert second.results == first.results
    assert (second.programs, second.segments) == ([0], [0])
    assert second.restored == first.segments


@pytest.mark.thorough
def test_ranks_that_share_a_cache_and_ranks_that_do_not(tmp_path: Path) -> None:
    def run(rank_env: dict[int, dict[str, str]]) -> Outcome:
        # What ranks of one host share without a cache is another matter.
        env = {**ENVIRONMENT, "STRETTO_LOCAL_DEVICES": "2", "STRETTO_SHARE_COMPILED": "0"}
        done = run_ranks(2, ["-c", SCRIPT], env=env, rank_env=rank_env)
        assert done.returncode == 0, done.stdout + done.stderr
        return Outcome(done.stdout)

    shared = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "shared")}
    first = run({0: shared, 1: shared})
    assert min(first.programs) > 0
    # Programs of both ranks together were written once, by rank 0; each rank's own by itself.
    names = [p.name.split("-")[0] for p in (tmp_path / "shared").iterdir()]
    assert names.count("jit_step") == 1
    assert names.count("jit__lambda") == 2
    # Rank 1 finds its own programs, and has to compile the common one: they run the same.
    part = shutil.copytree(tmp_path / "shared", tmp_path / "part")
    next(part.glob("jit_step*")).unlink()
    second = run({0: shared, 1: {"JAX_COMPILATION_CACHE_DIR": str(part)}})
    assert second.programs == [0, 1]
    assert second.segments[0] == 0 < second.segments[1]
    assert second.results == first.results


def test_programs_that_call_python_call_that_of_their_own_process(tmp_path: Path) -> None:
    """They are kept where JAX's CPU backend keeps them, from jax 0.11.1 on."""
    code = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import stretto

calls = []

def add(a):
    calls.append(a)
    return a + NUMBER

def f(a):
    b = jax.pure_callback(add, jax.ShapeDtypeStruct(a.shape, a.dtype), a)
    return jax.numpy.tanh(jax.lax.psum(b, "x")) + jax.lax.psum(2 * b, "x")

mesh = Mesh(np.array(jax.devices()), ("x",))
x = jax.device_put(np.arange(4, dtype="float32"), NamedSharding(mesh, P("x")))
g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P()))
before = stretto.compilations()
result = g(x).block_until_ready()
done = stretto.compilations()
assert len(calls) == 4
print(0, float(result[0]), len(calls), done.programs - before.programs,
      done.segments - before.segments, done.restored - before.restored)
"""
    kept = jax_private.caches_callbacks()
    for number in (1, 10):
        once = run_alone(tmp_path, tmp_path / "dump", code.replace("NUMBER", str(number)))
        whole = float(4 * number + 6)
        assert once.results == [[str(1.0 + 2 * whole), "4"]]  # tanh of that is 1
        again = kept and number == 10
        assert once.programs == [0 if again else 1]
        # What calls back is compiled anew, all else is restored.
        assert once.segments[0] > 0
        assert (once.restored[0] > 0) == again
    assert len(list(tmp_path.glob("jit_f-*"))) == kept


def test_an_executable_that_calls_python_needs_functions(
    devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = next(iter(clients))
    lowered = jax.jit(
        lambda a: jax.pure_callback(lambda b: b + 1, jax.ShapeDtypeStruct((3,), "float32"), a) * 2
    ).lower(jax.ShapeDtypeStruct((3,), "float32", sharding=SingleDeviceSharding(devices[0])))
    options = xla_client.CompileOptions().SerializeAsString()
    functions = lowered._lowering.compile_args["host_callbacks"]
    module = lowered.compiler_ir("stablehlo")
    with callbacks.registered(functions) as mark, module.context:
        module.operation.attributes[callbacks.ATTRIBUTE] = ir.StringAttr.get(mark)
        file = io.BytesIO()
        module.operation.write_bytecode(file)
        compiled = compile_and_load(client, file.getvalue(), options)
    monkeypatch.setattr(jax_private, "caches_callbacks", lambda: True)
    data = compiled.executable.serialized()
    with pytest.raises(InvalidProgramError, match="came without the functions to call"):
        load(client, data)
    with callbacks.handed_over([lambda a: (np.asarray(a) + 40,)]):
        loaded = load(client, data)
    type = loaded.loaded.input_types[0]
    array = client.engine.put(np.ones(3, np.float32), type, 0)
    ((value,),) = loaded.loaded.execute([[Value.of(client.engine, array, type, 0)]])
    assert value.host_view().tolist() == [82.0] * 3
    with pytest.raises(InvalidProgramError, match="came without the functions to call"):
        load(client, data)  # they were for that once


def test_an_entry_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax.devices("stretto")
    cache = jax._src.compilation_cache.LRUCache(str(tmp_path), max_size=-1)
    cache.put("key", b"value")
    cache.put("key", b"another")
    assert cache.get("key") == b"value"
    writes = []
    kind = type(cache.path)  # of `pathlib` or of etils
    monkeypatch.setattr(kind, "replace", lambda self, to: writes.append((self.read_bytes(), to)))
    cache.put("other", b"all of it")
    assert writes == [(b"all of it", tmp_path / "other-cache")]
    with pytest.raises(TypeError):
        cache.put("third", "not bytes")
    assert [p.name for p in tmp_path.iterdir()] == ["key-cache"]
