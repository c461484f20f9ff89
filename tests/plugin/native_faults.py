"""The ranks' side of the faults in `test_native_ranks`: what goes wrong while compiled code communicates.

``python native_faults.py CASE`` on every rank; the case says what rank 1 does wrong.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.shield import behind_a_shield

if __name__ == "__main__" and sys.argv[1].startswith("dies"):
    behind_a_shield(__file__, sys.argv[1])

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LONG = 1 << 40


def looped(rounds: int) -> jax.Array:
    """A sum in each round on all devices; rounds of the second half of the devices are the negative ones."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    n = len(jax.devices())

    def f(x: jax.Array) -> jax.Array:
        late = lax.axis_index("x") >= n // 2
        last = jnp.where(late, max(-rounds, 1), 3) if rounds < 0 else rounds

        def step(c: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            total = lax.psum(c[1], "x") / n  # the line that messages name
            return c[0] + 1, total

        count, total = lax.while_loop(lambda c: c[0] < last, step, (jnp.int64(0), x))
        return total + 0 * count

    with jax.enable_x64(True):
        spec = PartitionSpec("x")
        whole = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        ones = np.ones(n)
        return whole(
            jax.make_array_from_callback(ones.shape, NamedSharding(mesh, spec), ones.__getitem__)
        )


def a_row_each() -> jax.Array:
    """A one on each device."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    ones = np.ones(len(jax.devices()), np.float32)
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    return jax.make_array_from_callback(ones.shape, sharding, ones.__getitem__)


def single(x: jax.Array) -> jax.Array:
    return lax.psum(x, "x")


def on_rows(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """``f`` of each device's row, on the devices of ``x``, jitted."""
    spec = PartitionSpec("x")
    return jax.jit(jax.shard_map(f, mesh=x.sharding.mesh, in_specs=spec, out_specs=spec))


def one() -> jax.Array:
    """One sum of few bytes, which all ranks have made before."""
    x = a_row_each()
    whole = on_rows(single, x)
    whole(x).block_until_ready()
    if jax.process_index() == 1:
        if sys.argv[1] == "dies before one":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(60)
    return whole(x)


def unread() -> jax.Array:
    """One sum, of which rank 0 cannot read what rank 1 sent. Of what the ranks ran before, rank 1 has its
    memory for messages, and rank 0, which received nothing, has not mapped it."""
    x = a_row_each()
    whole = on_rows(single, x)
    on_rows(lambda x: lax.ppermute(x, "x", [(0, len(jax.devices()) - 1)]), x)(x).block_until_ready()
    if jax.process_index() == 1:
        after_a_second(lambda: os.kill(os.getpid(), signal.SIGKILL))
        without_its_files()
        whole(x).block_until_ready()
        threading.Event().wait(60)
    return whole(x)


def without_its_files() -> None:
    """From here on others cannot map more of this process's memory, as when it has ended."""
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and "memfd:stretto" in str(link.readlink()):
            os.close(int(link.name))


def after_a_second(action: object) -> None:
    threading.Timer(1.0, action).start()  # type: ignore[arg-type]


def main() -> None:
    rank = jax.process_index()
    if sys.argv[1] != "dies unread":  # in which no rank may have mapped another's memory
        looped(3).block_until_ready()
    match sys.argv[1]:
        case "dies":
            if rank == 1:
                after_a_second(lambda: os.kill(os.getpid(), signal.SIGKILL))
            looped(LONG).block_until_ready()
        case "raises":
            running = looped(LONG)
            if rank == 1:
                raise ValueError("something else went wrong")
            running.block_until_ready()
        case "dies unread":
            unread().block_until_ready()
        case "dies before one" | "never comes to one":
            one().block_until_ready()
        case "diverges":
            looped(-LONG).block_until_ready()
            threading.Event().wait(60)
        case "never comes":
            if rank == 1:
                threading.Event().wait(60)
            looped(LONG).block_until_ready()
    raise AssertionError("no end of the job")


if __name__ == "__main__":
    main()
