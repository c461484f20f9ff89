"""JAX programs on engines that packages bring: memory of their own, promises that are not kept."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support import scripts

ENGINES = """
import threading

from stretto.runtime.engines.xla_cpu import XlaCpuEngine


class Apart(XlaCpuEngine):
    name = "apart"
    host_memory = False

    def pointer(self, array):
        return 0x1000


class Reading(Apart):
    jax_arrays = False  # so that it is asked

    def read_into(self, array, host):
        print("read", host.shape, flush=True)
        host[...] = self.host_view(array)


class Copying:  # not a `CopyingEngine`, which XlaCpuEngine is
    unaligned = "{given}" == "True"

    def __init__(self, num_devices):
        self._engine = XlaCpuEngine(num_devices)

    def __getattr__(self, name):
        if name == "put_copy":
            raise AttributeError(name)
        return getattr(self._engine, name)

    def put(self, host, type, ordinal):
        if type.shape == (1000,):
            print(host.ctypes.data, flush=True)
        return self._engine.put(host.copy(), type, ordinal)


class Late(XlaCpuEngine):
    jax_arrays = False  # so that it is asked
    host_memory = "{given}" == "True"
    asked, ready = 0, lambda asked: False

    def is_ready(self, array):
        Late.asked += threading.current_thread() is threading.main_thread()
        return Late.ready(Late.asked)


class LoweredAsCuda(XlaCpuEngine):
    lowered_as = "cuda"


class Miscounting(XlaCpuEngine):
    def compile(self, segment, **more):
        compiled = super().compile(segment, **more)

        class Segment:
            def run(self, ordinal, inputs):
                outputs = compiled.run(ordinal, inputs)
                return {given}

        return Segment()
"""


def run(
    folder: Path, engine: str, script: str, given: str = "outputs", **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on one of ``ENGINES``, registered as an installed package registers its own."""
    (folder / "engines_of_others.py").write_text(ENGINES.replace("{given}", given))
    metadata = folder / "engines_of_others-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: engines_of_others\nVersion: 1\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[stretto.engines]\napart = engines_of_others:Apart\ncopying = engines_of_others:Copying\n"
        "late = engines_of_others:Late\nas-cuda = engines_of_others:LoweredAsCuda\n"
        "miscounting = engines_of_others:Miscounting\nreading = engines_of_others:Reading\n"
    )
    brought = {"PYTHONPATH": str(folder), "STRETTO_ENGINE": engine, **settings}
    return scripts.run(script, "stretto,cpu", 2, **brought)


def test_arrays_are_not_read_where_the_host_cannot(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "apart",
        """
        import jax, jax.numpy as jnp, numpy as np

        mesh = jax.make_mesh((2,), ("x",))
        rows = jax.NamedSharding(mesh, jax.P("x"))
        a = jax.device_put(np.arange(8.0, dtype=np.float32), rows)
        b = jax.jit(lambda a: a - a.sum())(a)
        print(np.asarray(b), float(jnp.ones(3)[1]), np.from_dlpack(jnp.arange(3)))
        print(hex(jnp.ones(3).unsafe_buffer_pointer()))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[-28. -27. -26. -25. -24. -23. -22. -21.] 1.0 [0 1 2]\n0x1000\n"


def test_large_arrays_are_copied_to_where_they_are_wanted(tmp_path: Path) -> None:
    """Not those that are small."""
    done = run(
        tmp_path,
        "reading",
        """
        import jax, jax.numpy as jnp, numpy as np

        host = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
        double = jax.jit(lambda x: x * 2)
        print((np.asarray(double(host)) == 2 * host).all())
        print((np.asarray(double(host[:8])) == 2 * host[:8]).all())
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "read (512, 512)\nTrue\nTrue\n"


@pytest.mark.parametrize("unaligned", [True, False])
def test_host_arrays_are_lent_from_any_address_to_engines_that_copy(
    tmp_path: Path, unaligned: bool
) -> None:
    done = run(
        tmp_path,
        "copying",
        """
        import gc, sys
        import jax, numpy as np

        raw = np.arange(1020, dtype=np.float32)
        host = raw[-raw.ctypes.data % 64 // 4 + 1 :][:1000]  # 4 bytes behind a multiple of 64
        references = sys.getrefcount(raw)
        a = jax.device_put(host)
        b = jax.device_put(host.reshape((2, 2, 2, 5, 25) + (1,) * 5))  # too many dimensions for the C face
        print(host.ctypes.data, (np.asarray(a) == host).all(), (np.asarray(b).ravel() == host).all())
        del a, b
        gc.collect()
        print(sys.getrefcount(raw) == references)
        """,
        given=str(unaligned),
    )
    assert done.returncode == 0, done.stderr
    given, here, *right = done.stdout.split()
    assert (given == here) == unaligned
    assert right == ["True"] * 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("given", "found"),
    [("outputs[1:]", "0 arrays"), ("2 * outputs", "2 arrays"), ("tuple(outputs)", "a tuple")],
)
def test_runs_that_give_something_else_than_their_results(
    tmp_path: Path, given: str, found: str
) -> None:
    done = run(
        tmp_path,
        "miscounting",
        """
        import jax, numpy as np

        def attempt(a):
            try:
                print(jax.jit(lambda a: a + a.sum())(a))
            except jax.errors.JaxRuntimeError as error:
                print(str(error).partition("\\n")[0])

        attempt(np.arange(4.0))
        rows = jax.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x"))
        attempt(jax.device_put(np.arange(4.0), rows))
        """,
        given,
        STRETTO_NATIVE="0",  # else all devices are called at once
    )
    assert done.returncode == 0, done.stderr
    alone, sharded = done.stdout.splitlines()
    assert f"the engine's run gave {found}; a list of 1 is due" in alone
    assert "segment " in sharded and f"the engine's run gave {found}" in sharded


def test_programs_are_lowered_as_the_engine_says(tmp_path: Path) -> None:
    """Callbacks too, for which JAX asks for a backend of the platform, and there is none."""
    done = run(
        tmp_path,
        "as-cuda",
        """
        import jax, jax.numpy as jnp, numpy as np

        x = np.ones((4, 4), np.float32)
        branch = lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos)
        print("cosine" in jax.jit(branch).lower(x).as_text())
        print("cusolver_syevd_ffi" in jax.jit(jnp.linalg.eigh).lower(x).as_text())
        call = lambda x: jax.pure_callback(np.sin, x, x)
        print("python_gpu_callback" in jax.jit(call).lower(x).as_text())
        """,
    )
    assert done.stdout.split() == ["True"] * 3, done.stderr[-2000:]


@pytest.mark.parametrize("on_host", [True, False])
def test_what_is_computed_in_a_moment_is_awaited_by_the_call(tmp_path: Path, on_host: bool) -> None:
    done = run(
        tmp_path,
        "late",
        """
        import jax, numpy as np
        from engines_of_others import Late

        x = jax.device_put(np.ones(4, np.float32))
        f = jax.jit(lambda x: x + 1)
        kept = [f(x).block_until_ready()]  # which is not computed in a moment
        begun = []
        for run in range(50):
            begun.append(Late.asked)
            if run == 20:
                Late.ready = lambda asked: asked - begun[-1] > 2
            kept.append(f(x))
            if run < 40:
                kept[-1].block_until_ready()
        begun.append(Late.asked)
        # By the call, and by jaxlib's question that follows, if need be.
        print([run for run in range(50) if begun[run + 1] - begun[run] > 2])
        Late.ready = lambda asked: True
        assert all((np.asarray(k) == 2).all() for k in kept)
        """,
        str(on_host),
    )
    assert done.returncode == 0, done.stderr
    # One run is left out, then two, four, eight, sixteen; once one is there in time, none that is waited for.
    looked_for = [0, 2, 5, 10, 19, *range(36, 41)] if on_host else []
    assert done.stdout == f"{looked_for}\n"
