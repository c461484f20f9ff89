"""JAX programs on engines that packages bring: memory of their own, promises that are not kept."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support import scripts

ENGINES = """
from stretto.runtime.engines.xla_cpu import XlaCpuEngine


class Apart(XlaCpuEngine):
    name = "apart"
    host_memory = False

    def pointer(self, array):
        return 0x1000


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
        "[stretto.engines]\napart = engines_of_others:Apart\n"
        "as-cuda = engines_of_others:LoweredAsCuda\nmiscounting = engines_of_others:Miscounting\n"
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
