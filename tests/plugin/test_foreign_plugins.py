"""Engines `pjrt:`: a plugin that is not ours (``support/pjrt``) computes, and stretto does the rest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import pjrt
from support.mpi import run_ranks
from support.scripts import conforming

from stretto.collectives.types import TensorType
from stretto.plugin import abi
from stretto.runtime.engines import pjrt as engines
from stretto.runtime.engines.engine import create_engine
from stretto.runtime.errors import StrettoError

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pjrt.build(tmp_path_factory.mktemp("far"))


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since one that lacks a check crashes."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_places_in_the_table() -> None:
    assert list(engines.REQUIRED.values()) == [abi.FUNCTIONS.index(n) for n in engines.REQUIRED]


@pytest.mark.thorough
def test_the_protocol(library: Path) -> None:
    """Its arrays are in another process, computed late."""
    names = conforming(pjrt.engine(library, 2))
    assert {"transfers", "donation", "runs", "compile_errors", "run_errors", "threads"} <= set(
        names
    )


def test_options() -> None:
    assert engines._options("a=1&b=-0.5&c=true&d=x%26y&e=&f=1e3") == {
        **{"a": 1, "b": -0.5, "c": True, "d": "x&y", "e": "", "f": "1e3"}
    }


@pytest.mark.parametrize("absent", ["PJRT_Client_Compile", "PJRT_Device_MemoryStats"])
def test_a_function_that_is_absent_is_named(library: Path, absent: str) -> None:
    """jaxlib would call it, at null."""
    code = (
        "from stretto.runtime.engines.engine import create_engine\n"
        f"create_engine({pjrt.engine(library)!r}, 1)"
    )
    done = python(code, FAR_LACKS=absent)
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"StrettoError: engine pjrt:\S*libfar.so: the plugin lacks functions that jaxlib \S+ calls: "
        rf"{absent}\n",
        done.stderr,
    )


def test_what_cannot_be_had(library: Path, tmp_path: Path) -> None:
    with pytest.raises(
        StrettoError, match=r"engine pjrt: say which plugin, as pjrt:NAME or pjrt:/"
    ):
        create_engine("pjrt", 1)
    with pytest.raises(
        StrettoError, match=rf"pjrt:{tmp_path}/none.so: there is no file {tmp_path}/none.so"
    ):
        create_engine(f"pjrt:{tmp_path}/none.so", 1)
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(
        StrettoError,
        match=rf"pjrt:{tmp_path}/text.so: .*(too short|invalid ELF header)",
    ):
        create_engine(f"pjrt:{tmp_path}/text.so", 1)
    with pytest.raises(
        StrettoError, match="engine pjrt:nobody: no PJRT plugin registers itself with JAX"
    ):
        create_engine("pjrt:nobody", 1)
    with pytest.raises(StrettoError, match="options `python` and `device` are missing"):
        create_engine(f"pjrt:{library}", 1)
    with pytest.raises(
        StrettoError, match=r"3 devices are asked for .*, from number 0 on, and .* 2$"
    ):
        create_engine(pjrt.engine(library, 2), 3)


def test_which_devices_a_rank_of_several_uses(library: Path) -> None:
    def numbers(found: int, place: tuple[int, int], **more: object) -> list[int]:
        engine = create_engine(pjrt.engine(library, found, **more), 2, place=place)
        put = engines.PjrtEngine.put
        types = [put(engine, np.ones(1, np.float32), F32, ordinal) for ordinal in range(2)]
        return [device.id for array in types for device in array.devices()]

    assert numbers(6, (2, 3)) == [4, 5]
    assert numbers(5, (2, 3)) == [0, 1]  # too few for all three
    assert numbers(5, (2, 3), first=3) == [3, 4]


F32 = TensorType("f32", (1,))

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
n = len(jax.devices())
def f(x, w):
    def step(c, _):
        c = jnp.tanh(c @ w) + lax.ppermute(c, "x", [(i, (i + 1) % n) for i in range(n)])
        return c, lax.pmax(jnp.abs(c).max(), "x")
    c, most = lax.scan(step, x, None, length=3)
    return lax.psum(c.sum(), "x"), most, lax.all_gather(c, "x", tiled=True)
g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(jax.P("x"), jax.P()), out_specs=jax.P(), check_vma=False))
x = np.linspace(-1, 1, 4 * n * 8, dtype=np.float32).reshape(4 * n, 8)
w = np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8)
for array in g(x, w):
    print(np.asarray(array).sum(dtype=np.float64).round(3))
print(sorted(d.platform for d in jax.devices()), jnp.linalg.cholesky(4 * jnp.eye(3))[2, 2])
"""
CPU = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}


def numbers_of(text: str) -> list[float]:
    return [float(line) for line in text.splitlines()[:3]]


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"\"loss\": ([0-9.]+)", text)]


@pytest.mark.thorough
def test_programs_on_several_devices(library: Path) -> None:
    chosen = {"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": "4"}
    done = python(PROGRAM, **chosen, STRETTO_ENGINE=pjrt.engine(library, 4))
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(
        numbers_of(done.stdout), numbers_of(python(PROGRAM, **CPU).stdout), rtol=1e-4
    )
    assert done.stdout.splitlines()[3] == f"{['stretto'] * 4} 2.0"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("jax.ffi.ffi_call('nobody_has_it', x)(x)", "calls nobody_has_it, for which engine pjrt:"),
        ("jax.pure_callback(np.sin, x, x)", "calls back into Python, which engine pjrt:"),
    ],
)
def test_what_the_plugin_lacks_is_unimplemented(library: Path, call: str, said: str) -> None:
    """So that `conform` calls it absent, not broken."""
    code = f"import jax, numpy as np\nx = np.ones(2, np.float32)\njax.jit(lambda x: {call})(x)"
    chosen = {"JAX_PLATFORMS": "stretto", "STRETTO_ENGINE": pjrt.engine(library, lower="cpu")}
    done = python(code, **chosen)
    assert re.search(rf"JaxRuntimeError: UNIMPLEMENTED: segment \S+ {said}", done.stderr)


@pytest.mark.thorough
def test_a_plugin_that_registers_itself_with_jax(library: Path, tmp_path: Path) -> None:
    """By JAX's own variable, as one that is installed does by its entry point."""
    described = tmp_path / "far.json"
    described.write_text(
        json.dumps({"library_path": str(library), "create_options": pjrt.options(4)})
    )
    chosen = {
        "JAX_PLATFORMS": "stretto",
        "STRETTO_LOCAL_DEVICES": "4",
        "STRETTO_ENGINE": "pjrt:far",
    }
    done = python(PROGRAM, **chosen, PJRT_NAMES_AND_LIBRARY_PATHS=f"far:{described}")
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(
        numbers_of(done.stdout), numbers_of(python(PROGRAM, **CPU).stdout), rtol=1e-4
    )


@pytest.mark.thorough
@pytest.mark.mpi
def test_training_on_ranks(library: Path) -> None:
    """An example, unchanged, on four ranks with a far device each, and on JAX's CPU backend."""
    example = [str(EXAMPLES / "train_digits.py"), "--epochs", "1"]
    far = {"JAX_PLATFORMS": "stretto", "STRETTO_ENGINE": pjrt.engine(library)}
    done = run_ranks(4, example, env=far, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    runner = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    want = losses(python(runner, *example, **CPU).stdout)
    assert want
    np.testing.assert_allclose(losses(done.stdout), want, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.mpi
def test_two_engines_in_one_job(library: Path) -> None:
    """Rank 0 computes by itself, rank 1 with two far devices."""
    own = {"STRETTO_ENGINE": "xla:cpu"}, {"STRETTO_ENGINE": pjrt.engine(library, 2)}
    done = run_ranks(
        2,
        ["-c", PROGRAM],
        env={"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": "2"},
        rank_env=dict(enumerate(own)),
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line[0] in "-0123456789"]
    want = numbers_of(python(PROGRAM, **CPU).stdout)
    np.testing.assert_allclose(sorted(map(float, said)), sorted(want * 2), rtol=1e-4)


def test_a_device_that_goes_away(library: Path) -> None:
    """What is computed there fails with the plugin's error; the process goes on."""
    code = """
import os, signal, subprocess
import jax, numpy as np
f = jax.jit(lambda x: x + 1)
print(f(np.ones(2)))
children = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True)
device = children.stdout.split()[0]
os.kill(int(device), signal.SIGKILL)
try:
    print(f(np.ones(2)))
except jax.errors.JaxRuntimeError as error:
    print("caught", error)
"""
    done = python(code, JAX_PLATFORMS="stretto", STRETTO_ENGINE=pjrt.engine(library))
    assert done.returncode == 0, done.stderr
    assert re.search(r"caught UNAVAILABLE: .*the device is gone", done.stdout)
