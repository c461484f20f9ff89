"""What JAX's CPU backend cannot run (it has no such collective, or aborts): judged by numpy.

Collective broadcast, ragged all-to-all, send and recv, reducers of one's own, and permutes in a branch
that only some devices take.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from .common import manual, mesh, normal, small
from .registry import CORE, program

RING = [(i, (i + 1) % 8) for i in range(8)]


def broadcast_expected() -> dict[str, np.ndarray]:
    x = normal((8, 5), seed=20)
    grid = x.reshape(2, 4, 5)
    by_b = np.broadcast_to(grid[:, 2:3], grid.shape).reshape(8, 5)
    by_a = np.broadcast_to(grid[1:2], grid.shape).reshape(8, 5)
    return {"b": by_b, "a": by_a}


@program("pbroadcast", expected=broadcast_expected, exact=True, **CORE)
def pbroadcast() -> dict[str, Any]:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.pbroadcast(x, "b", 2), lax.pbroadcast(x, "a", 1)

    out = manual(mesh(a=2, b=4), f, normal((8, 5), seed=20), check_vma=False)
    return {"b": out[0], "a": out[1]}


def ragged_inputs() -> tuple[np.ndarray, ...]:
    """Sizes[i, j] rows from device i to j; offsets such that each receiver packs them by sender."""
    rng = np.random.default_rng(21)
    sizes = rng.integers(0, 4, (8, 8)).astype(np.int32)
    sizes[3] = 0
    send_offsets = (np.cumsum(sizes, 1) - sizes).astype(np.int32)
    landing = (np.cumsum(sizes, 0) - sizes).astype(np.int32)
    rows = normal((8, 32, 2), seed=22)
    return rows, sizes, send_offsets, landing


def ragged_expected() -> dict[str, np.ndarray]:
    rows, sizes, send_offsets, landing = ragged_inputs()
    out = np.full((8, 40, 2), -1, np.float32)
    for i in range(8):
        for j in range(8):
            n = sizes[i, j]
            out[j, landing[i, j] : landing[i, j] + n] = rows[
                i, send_offsets[i, j] : send_offsets[i, j] + n
            ]
    return {"out": out}


@program("ragged_all_to_all", expected=ragged_expected, exact=True, **CORE)
def ragged_all_to_all() -> dict[str, Any]:
    """Rows that nobody writes keep what the output operand held (-1)."""
    rows, sizes, send_offsets, landing = ragged_inputs()

    def f(
        x: jax.Array, n: jax.Array, at: jax.Array, to: jax.Array, receive: jax.Array
    ) -> jax.Array:
        out = jnp.full((40, 2), -1, x.dtype)
        return lax.ragged_all_to_all(x[0], out, at[0], n[0], to[0], receive[0], axis_name="x")[None]

    arrays = (rows, sizes, send_offsets, landing, np.ascontiguousarray(sizes.T))
    return {"out": manual(mesh(x=8), f, *arrays, check_vma=False)}


def ring_expected() -> dict[str, np.ndarray]:
    return {"out": np.roll(small((8, 6), seed=23), 1, 0)}


@program("send_recv/ring", expected=ring_expected, exact=True, **CORE)
def send_recv_ring() -> dict[str, Any]:
    """Every device sends, then receives, with the send's token in between: blocking sends would deadlock."""

    def f(x: jax.Array) -> jax.Array:
        token = lax.psend(x, "x", RING)
        return lax.precv(token, jax.ShapeDtypeStruct(x.shape, x.dtype), "x", RING)

    return {"out": manual(mesh(x=8), f, small((8, 6), seed=23), check_vma=False)}


def chain_expected() -> dict[str, np.ndarray]:
    x = small((8, 6), seed=24)
    first = np.zeros_like(x)
    first[1], first[3] = x[0], x[2]
    second = np.zeros_like(x)
    second[2], second[5] = first[1] * 2 + x[1], first[4] * 2 + x[4]
    return {"first": first, "second": second}


@program("send_recv/chain", expected=chain_expected, exact=True)
def send_recv_chain() -> dict[str, Any]:
    """Only some devices send; what is received is sent on."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        hop = [(0, 1), (2, 3)]
        first = lax.precv(lax.psend(x, "x", hop), shape, "x", hop)
        hop = [(1, 2), (4, 5)]
        return first, lax.precv(lax.psend(first * 2 + x, "x", hop), shape, "x", hop)

    out = manual(mesh(x=8), f, small((8, 6), seed=24), check_vma=False)
    return dict(zip(("first", "second"), out, strict=True))


def loop_expected() -> dict[str, np.ndarray]:
    x = small((8, 6), "int32", 25)
    for i in range(5):
        x = np.roll(x, 1, 0) + i
    return {"out": x}


@program("send_recv/loop", expected=loop_expected, exact=True, **CORE)
def send_recv_loop() -> dict[str, Any]:
    def f(x: jax.Array) -> jax.Array:
        def body(i: jax.Array, v: jax.Array) -> jax.Array:
            shape = jax.ShapeDtypeStruct(v.shape, v.dtype)
            return lax.precv(lax.psend(v, "x", RING), shape, "x", RING) + i

        return lax.fori_loop(0, 5, body, x)

    return {"out": manual(mesh(x=8), f, small((8, 6), "int32", 25), check_vma=False)}


def divergent_permute_expected() -> dict[str, np.ndarray]:
    x = small((8, 3), "int32", 26).reshape(4, 2, 3)
    out = x.copy()
    out[0::2] = x[0::2, ::-1] * 2
    out[1::2] += 1
    loop = x.copy()
    for a in range(4):
        for i in range(a):
            loop[a] = loop[a, ::-1] + i
    return {"cond": out.reshape(8, 3), "loop": loop.reshape(8, 3)}


@program("divergence/permute", expected=divergent_permute_expected, exact=True, **CORE)
def divergent_permute() -> dict[str, Any]:
    """A permute that only half of the devices reach, and one in a loop with a trip count of its own."""
    swap = [(0, 1), (1, 0)]

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        a = lax.axis_index("a")
        taken = lax.cond(a % 2 == 0, lambda v: lax.ppermute(v, "b", swap) * 2, lambda v: v + 1, x)
        return taken, lax.fori_loop(0, a, lambda i, v: lax.ppermute(v, "b", swap) + i, x)

    out = manual(mesh(a=4, b=2), f, small((8, 3), "int32", 26), check_vma=False)
    return {"cond": out[0], "loop": out[1]}


# HLO's reducer is a computation; jax.lax has no surface for one of the user's own.
reduce_with_p = Primitive("reduce_with")
REDUCERS = {
    "probabilistic_or": lambda a, b: a + b + a * b,
    "largest_magnitude": lambda a, b: jnp.maximum(jnp.abs(a), jnp.abs(b)),
}


@reduce_with_p.def_abstract_eval
def _reduce_with_shape(x: Any, *, reducer: str) -> Any:
    return x


def _reduce_with_lowering(ctx: Any, x: Any, *, reducer: str) -> list[Any]:
    """An all-reduce over all eight partitions whose region is the reducer."""
    groups = ir.DenseIntElementsAttr.get(np.arange(8, dtype=np.int64).reshape(1, 8))
    op = stablehlo.AllReduceOp(
        [x.type],
        [x],
        replica_groups=groups,
        channel_handle=stablehlo.ChannelHandle.get(1, 1),
        use_global_device_ids=ir.BoolAttr.get(True),
    )
    scalar = ctx.avals_in[0].update(shape=())
    scalar_type = ir.RankedTensorType.get((), ir.RankedTensorType(x.type).element_type)
    block = op.regions[0].blocks.append(scalar_type, scalar_type)
    with ir.InsertionPoint(block):
        body = mlir.lower_fun(REDUCERS[reducer], multiple_results=False)
        inner = ctx.replace(primitive=None, avals_in=[scalar] * 2, avals_out=[scalar])
        stablehlo.return_(jax.tree.leaves(body(inner, *block.arguments)))
    return list(op.results)


mlir.register_lowering(reduce_with_p, _reduce_with_lowering)


def custom_expected() -> dict[str, np.ndarray]:
    x = small((8, 7), seed=27)
    either = np.prod(1 + x.astype(np.float64), 0) - 1
    largest = np.abs(x).max(0)
    return {
        "or": np.broadcast_to(either.astype(np.float32), x.shape),
        "largest": np.broadcast_to(largest, x.shape),
    }


@program("reducer/custom", expected=custom_expected, exact=True, **CORE)
def custom_reducer() -> dict[str, Any]:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (
            reduce_with_p.bind(x, reducer="probabilistic_or"),
            reduce_with_p.bind(x, reducer="largest_magnitude"),
        )

    out = manual(mesh(x=8), f, small((8, 7), seed=27), out_specs=(P("x"), P("x")), check_vma=False)
    return {"or": out[0], "largest": out[1]}
