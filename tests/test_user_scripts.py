"""What a whole user script does on stretto: how it exits, what it prints, what it keeps and deletes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.scripts import passes, run

PRELUDE = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
n = len(jax.devices())
psum = jax.jit(jax.shard_map(lambda v: lax.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x")))
"""


def script(body: str) -> str:
    return PRELUDE + textwrap.dedent(body)


class TestExit:
    def test_with_live_arrays(self) -> None:
        """Arrays, executables and an unfinished computation are alive when the interpreter ends."""
        out = passes(
            script(
                """
                kept = [psum(jnp.ones((n, 4))) for _ in range(5)]
                big = jax.jit(lambda x: jnp.linalg.matrix_power(x, 50))(jnp.eye(300))
                moving = psum(jnp.ones((n, 1 << 20)))
                print(jax.default_backend(), kept[-1][0, 0])
                """
            )
        )
        assert out.split() == ["stretto", "4.0"]

    def test_with_an_exception_at_top_level(self) -> None:
        done = run(
            script(
                """
                kept = psum(jnp.ones((n, 4)))
                raise KeyError("the user's own")
                """
            )
        )
        assert done.returncode == 1
        assert done.stderr.rstrip().endswith('KeyError: "the user\'s own"')
        assert "Fatal Python error" not in done.stderr

    def test_with_an_exception_that_holds_arrays(self) -> None:
        """jaxlib calls into the plugin while the exception unwinds, and the frames keep arrays to the end."""
        done = run(
            script(
                """
                def f(x):
                    y = psum(x)
                    for _ in range(3):
                        z = [psum(y) for _ in range(10)]
                        jnp.zeros(3) + jnp.zeros(4)
                f(jnp.ones((n, 4)))
                """
            )
        )
        assert done.returncode == 1
        assert "TypeError" in done.stderr and "Fatal Python error" not in done.stderr

    def test_with_sys_exit(self) -> None:
        assert run(script("x = psum(jnp.ones((n, 4))); import sys; sys.exit(7)")).returncode == 7

    def test_with_threads(self) -> None:
        """Threads that call programs with collectives at the same time."""
        out = passes(
            script(
                """
                import threading
                results = {}
                def work(i):
                    x = jnp.full((n, 8), i, jnp.float32)
                    for _ in range(20):
                        y = psum(x)
                    results[i] = float(y[0, 0])
                threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
                [t.start() for t in threads]; [t.join() for t in threads]
                assert results == {i: float(n * i) for i in range(4)}, results
                print("done")
                """
            )
        )
        assert out.split() == ["done"]

    def test_after_clearing_backends(self) -> None:
        out = passes(
            script(
                """
                from jax.extend.backend import clear_backends
                x = psum(jnp.ones((n, 4)))
                del x
                clear_backends()
                print(jax.device_count(), jnp.ones(3).sum())
                """
            )
        )
        assert out.split() == ["4", "3.0"]


class TestOtherPlatforms:
    @pytest.mark.parametrize("platforms", [None, "cpu"])
    def test_nothing_changes(self, platforms: str | None) -> None:
        out = passes(
            """
            import sys
            import jax
            print(jax.default_backend(), jax.devices()[0].platform, jax.jit(lambda x: x + 1)(1))
            heavy = ("mpi4py", "stretto.runtime.execution", "stretto.hlo_frontend", "google.protobuf", "rich")
            print([m for m in heavy if m in sys.modules])
            from jax._src import xla_bridge
            print("stretto" in xla_bridge.backends())
            """,
            platforms,
        )
        assert out.splitlines() == ["cpu cpu 2", "[]", "False"]

    def test_cpu_is_there_beside_stretto(self) -> None:
        out = passes(
            """
            import jax, jax.numpy as jnp
            x = jax.device_put(jnp.arange(4.0), jax.devices("cpu")[0])
            y = jax.device_put(x * 2, jax.devices()[1])
            print(jax.default_backend(), x.devices().pop().platform, y.devices().pop().platform, y.sum())
            """,
        )
        assert out.split() == ["stretto", "cpu", "stretto", "12.0"]


class TestErrors:
    def test_mesh_larger_than_the_devices(self) -> None:
        done = run("import jax; jax.make_mesh((64,), ('x',))")
        assert done.returncode == 1
        assert "64" in done.stderr and "ValueError" in done.stderr

    def test_callback_error_reaches_the_array(self) -> None:
        """An exception inside the running program is raised where the result is read, and does not hang."""
        out = passes(
            script(
                """
                def bad(v):
                    raise ValueError("inside the callback")
                f = jax.jit(lambda x: jax.pure_callback(bad, jax.ShapeDtypeStruct((), jnp.float32), x) + 1)
                try:
                    y = f(jnp.float32(1))
                    try:
                        jax.jit(lambda v: v * 2)(y).block_until_ready()
                    except Exception as e:
                        print("dependent:", "inside the callback" in str(e))
                    np.asarray(y)
                except Exception as e:
                    print("result:", "inside the callback" in str(e))
                print(psum(jnp.ones((n, 2)))[0, 0])
                """
            )
        )
        assert "result: True" in out
        assert "dependent: False" not in out
        assert out.splitlines()[-1] == "4.0"

    def test_unsupported_target_is_named(self) -> None:
        """A custom call that the engine does not know is an error with its name, and the process lives on."""
        out = passes(
            script(
                """
                call = jax.ffi.ffi_call("no_such_target_here", jax.ShapeDtypeStruct((2,), jnp.float32))
                try:
                    np.asarray(jax.jit(lambda x: call(x))(jnp.ones(2)))
                except Exception as e:
                    print("no_such_target_here" in str(e))
                print(psum(jnp.ones((n, 2)))[0, 0])
                """
            )
        )
        assert out.split() == ["True", "4.0"]

    def test_deleted_input_is_an_error(self) -> None:
        out = passes(
            script(
                """
                x = jnp.ones((n, 2))
                x.delete()
                try:
                    psum(x)
                except RuntimeError as e:
                    print("deleted" in str(e))
                """
            )
        )
        assert out.split() == ["True"]

    def test_bad_option_names_its_variable(self) -> None:
        env_script = (
            "import os; os.environ['STRETTO_LOCAL_DEVICES'] = 'many'; import jax; jax.devices()"
        )
        done = run(env_script)
        assert done.returncode == 1
        assert "STRETTO_LOCAL_DEVICES" in done.stderr and "many" in done.stderr


class TestMemory:
    def test_donation_deletes_and_reuses(self) -> None:
        out = passes(
            script(
                """
                s = NamedSharding(mesh, P("x"))
                x = jax.device_put(jnp.ones((n, 4)), s)
                y = jax.jit(lambda v: v + v.sum(), donate_argnums=0)(x)
                print(x.is_deleted(), y.is_deleted(), y[0, 0])
                z = jax.device_put(jnp.ones(1 << 20), jax.devices()[0])
                where = z.unsafe_buffer_pointer()
                w = jax.jit(lambda v: v.at[5].set(2.0), donate_argnums=0)(z)
                print(z.is_deleted(), w[5], w.unsafe_buffer_pointer() == where)
                try:
                    x + 1
                except RuntimeError as e:
                    print("deleted" in str(e))
                """
            )
        )
        assert out.split() == ["True", "False", "17.0", "True", "2.0", "True", "True"]

    @pytest.mark.quick("jit")
    @pytest.mark.parametrize(
        "call",
        [
            "x = one(x)",
            "y = psum(ones)",
            "y = np.asarray(jax.device_put(data, jax.devices()[1]))",
        ],
        ids=["jit", "psum", "transfer"],
    )
    def test_ten_thousand_calls_leave_memory_flat(self, call: str) -> None:
        """Resident memory after 10,000 calls against that after 2,000: a leak of 1 KiB a call is 8 MiB."""
        out = passes(
            script(
                f"""
                import gc
                from pathlib import Path
                def resident():
                    gc.collect()
                    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
                one = jax.jit(lambda x: x + 1)
                x, data = jnp.float32(0), np.ones(256)
                ones = jax.device_put(jnp.ones((n, 4)), NamedSharding(mesh, P("x")))
                y = None
                def calls(count):
                    global x, y
                    for i in range(count):
                        {call}
                        if i % 100 == 0:
                            jax.block_until_ready((x, y))
                    jax.block_until_ready((x, y))
                calls(2000)
                before = resident()
                calls(8000)
                print(resident() - before)
                """
            )
        )
        assert int(out) < 4 << 20

    def test_arrays_give_their_memory_back(self) -> None:
        """A hundred results of 16 MiB, each dropped: the process holds a few of them at most."""
        out = passes(
            script(
                """
                import resource
                x = jax.device_put(jnp.ones((n, 1 << 20)), NamedSharding(mesh, P("x")))
                for _ in range(3):
                    psum(x).block_until_ready()
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                for _ in range(100):
                    y = psum(x)
                    y.block_until_ready()
                print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
                """
            )
        )
        assert int(out) < 200 << 10


class TestAsynchronousDispatch:
    def test_calls_return_before_the_work_is_done(self) -> None:
        """A long program is not ready when its call, and one that depends on it, have returned."""
        out = passes(
            script(
                """
                def long(x):
                    return lax.fori_loop(0, 3000, lambda i, v: jnp.tanh(v @ v), x)
                f = jax.jit(long).lower(jnp.eye(256)).compile()
                g = jax.jit(jnp.sum).lower(jnp.eye(256)).compile()
                x = jnp.eye(256).block_until_ready()
                y = f(x)
                z = g(y)
                print(y.is_ready(), z.is_ready())
                print(0 <= z < 256, y.is_ready())
                """
            )
        )
        assert out.split() == ["False", "False", "True", "True"]

    def test_collectives_too(self) -> None:
        out = passes(
            script(
                """
                import threading
                gate = threading.Event()
                def wait(v):
                    assert gate.wait(60)
                    return np.asarray(v)
                def local(x):
                    x = jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
                    return lax.psum(x[0] @ x[0], "x")
                f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
                y = f(jnp.broadcast_to(jnp.eye(64), (n, 64, 64)))
                later = psum(y)
                print(y.is_ready(), later.is_ready())
                gate.set()
                print(y.shape, later[0, 0])
                """
            )
        )
        assert out.splitlines() == ["False False", "(256, 64) 16.0"]


def test_memory_statistics_and_device_facts() -> None:
    out = passes(
        script(
            """
            d = jax.devices()[2]
            print(d.platform, d.id, d.process_index, d.device_kind)
            print(sorted(m.kind for m in d.addressable_memories()), d.default_memory().kind)
            x = jax.device_put(jnp.ones(1 << 20), d)
            stats = d.memory_stats()
            print(stats is None or stats["bytes_in_use"] >= 4 << 20)
            """
        )
    )
    lines = out.splitlines()
    assert lines[0] == "stretto 2 0 stretto"
    assert lines[1] == "['device', 'pinned_host', 'unpinned_host'] device"
    assert lines[2] == "True"


@pytest.mark.parametrize(
    "name", ["dispatch", "psum_two_ranks", "loop_psum", "compile_time", "memory", "all"]
)
def test_benchmarks_explain_themselves(name: str) -> None:
    """Each benchmark is a script with --help; what they measure is not a test's business."""
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(path), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "--quick" in done.stdout
