"""Run by every rank of test_gpu.py: loops whose compiled code calls collectives, against JAX's CPU backend.

Each loop ends by what it has computed, and makes collectives of all kinds, along both dimensions, of one
type. A rank prints how many were right.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "stretto,cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={sys.argv[1]}"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stretto

SIZE = int(sys.argv[1])
HERE = Mesh(np.array(jax.devices()), ("i",))
THERE = Mesh(np.array(jax.devices("cpu")), ("i",))
Moved = Callable[[jax.Array], jax.Array]


def slides(x: jax.Array) -> jax.Array:
    """Who is first receives zeros."""
    return lax.ppermute(x, "i", [(k, k + 1) for k in range(SIZE - 1)])


def turned(x: jax.Array) -> jax.Array:
    return lax.ppermute(x, "i", [(k, (k + 1) % SIZE) for k in range(SIZE)])


def pair(x: jax.Array) -> jax.Array:
    total, most = lax.psum((x, x[0] * 2), "i")
    return total + most[None]


# Each gives an array of the operand's shape, (4 SIZE, 2 SIZE).
KINDS: dict[str, Moved] = {
    "sum": lambda x: lax.psum(x, "i"),
    "sums": pair,
    "gather of rows": lambda x: lax.all_gather(x[: x.shape[0] // SIZE], "i", tiled=True),
    "gather of columns": lambda x: lax.all_gather(
        x[:, : x.shape[1] // SIZE], "i", axis=1, tiled=True
    ),
    "scatter of rows": lambda x: jnp.tile(lax.psum_scatter(x, "i", tiled=True), (SIZE, 1)),
    "scatter of columns": lambda x: jnp.tile(
        lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True), (1, SIZE)
    ),
    "exchange of rows": lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
    "exchange of columns": lambda x: lax.all_to_all(x, "i", 1, 1, tiled=True),
    "exchange": lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True).reshape(x.shape),
    "ring": turned,
    "shift": slides,
    "pairs": lambda x: lax.psum(x, "i", axis_index_groups=[[k, k ^ 1] for k in range(0, SIZE, 2)]),
}
DTYPES = (np.float32, np.int32, jnp.bfloat16, np.int8, np.complex64, np.float16)


def program(mesh: Mesh) -> Callable[[jax.Array], tuple[jax.Array, dict[str, jax.Array]]]:
    """Applies each of them to what it gave before, until what all devices have in common is 3."""

    def part(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        def body(carry: tuple[jax.Array, dict]) -> tuple[jax.Array, dict]:
            count, before = carry
            moved = {kind: apply(before[kind]) for kind, apply in KINDS.items()}
            kept = {
                kind: jnp.where(jnp.abs(y) > 30, 1, y).astype(x.dtype) for kind, y in moved.items()
            }
            return lax.pmax(count + 1, "i"), kept

        return lax.while_loop(lambda carry: carry[0] < 3, body, (0, dict.fromkeys(KINDS, x)))

    return jax.jit(
        jax.shard_map(part, mesh=mesh, in_specs=P("i"), out_specs=(P(), P("i")), check_vma=False)
    )


right, by_code = 0, 0
for dtype in DTYPES:
    whole = np.random.default_rng(1).integers(-4, 5, (4 * SIZE * SIZE, 2 * SIZE)).astype(dtype)

    def placed(mesh: Mesh, whole: np.ndarray = whole) -> jax.Array:
        split = NamedSharding(mesh, P("i"))
        return jax.make_array_from_callback(whole.shape, split, lambda index: whole[index])

    x = placed(HERE)
    compiled = program(HERE).lower(x).compile()
    by_code += str(stretto.explain(compiled)).count("called by compiled code")
    for _ in range(2):  # in one place twice
        count, found = compiled(x)
    assert int(count) == 3
    expected = program(THERE)(placed(THERE))[1]
    for kind in KINDS:
        (shard,) = found[kind].addressable_shards
        if np.asarray(shard.data).tobytes() == np.asarray(expected[kind])[shard.index].tobytes():
            right += 1
        else:
            print(f"wrong: {kind} of {np.dtype(dtype)}", file=sys.stderr)
print(f"{right} of {len(KINDS) * len(DTYPES)} right, {by_code} by compiled code", flush=True)
