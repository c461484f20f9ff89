"""Products around collectives over two devices; their compute and their messages alone (see `chunked`).

- ``gather``: rows of all devices times a weight: all-gather, then a product.
- ``scatter``: a product whose rows are summed and shared out: a product, then reduce-scatter.
- ``experts``: a layer of `EXPERTS` experts, half of them on each device, with dense dispatch by capacity and
  skewed routing: all-to-all, two products and a GELU for each expert, all-to-all.
- ``ragged``: an expert on each device, to which its tokens are sent by `ragged_all_to_all`, 60% of them to
  one; with room for one and a half times the tokens of a device.

``size`` is what makes compute longer while messages stay: columns of the weight, summed columns, hidden
width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PROGRAMS = ("gather", "scatter", "experts", "ragged")
PARTS = ("step", "compute", "messages")
ROWS, WIDTH = 1024, 512  # of a device: 2 MiB
EXPERTS, CAPACITY, DEPTH = 8, 128, 256
TOKENS, ROOM = 4096, 6144  # of a device, ragged

Array = jax.Array


def _gather(part: str, x: Array, w: Array) -> Array:
    if part == "messages":
        return lax.all_gather(x, "x", axis=0, tiled=True)
    rows = (
        jnp.concatenate([x, x]) if part == "compute" else lax.all_gather(x, "x", axis=0, tiled=True)
    )
    return rows @ w


def _scatter(part: str, x: Array, w: Array) -> Array:
    if part == "messages":
        return lax.psum_scatter(x, "x", scatter_dimension=0, tiled=True)
    product = x @ w
    if part == "compute":
        return sum(jnp.split(product, 2))
    return lax.psum_scatter(product, "x", scatter_dimension=0, tiled=True)


def _exchanged(part: str, x: Array) -> Array:
    return x if part == "compute" else lax.all_to_all(x, "x", 0, 0)


def _experts(part: str, x: Array, chosen: Array, up: Array, down: Array) -> Array:
    """``x``: tokens [T, DEPTH]; ``chosen``: the expert of each. What exceeds the capacity is dropped."""
    one_hot = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)
    place = (jnp.cumsum(one_hot, axis=0) * one_hot).sum(-1) - 1
    kept = place < CAPACITY
    slot = jnp.where(kept, chosen * CAPACITY + place, EXPERTS * CAPACITY)
    sent = jnp.zeros((EXPERTS * CAPACITY + 1, DEPTH), x.dtype).at[slot].set(x)[:-1]
    sent = sent.reshape(2, EXPERTS // 2, CAPACITY, DEPTH)
    arrived = _exchanged(part, sent)
    if part == "messages":
        back = _exchanged(part, arrived)
    else:
        tokens = arrived.swapaxes(0, 1).reshape(EXPERTS // 2, 2 * CAPACITY, DEPTH)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", tokens, up))
        out = jnp.einsum("ecf,efd->ecd", hidden, down)
        out = out.reshape(EXPERTS // 2, 2, CAPACITY, DEPTH).swapaxes(0, 1)
        back = _exchanged(part, out)
    flat = back.reshape(EXPERTS * CAPACITY, DEPTH)
    return jnp.where(kept[:, None], flat[jnp.minimum(slot, EXPERTS * CAPACITY - 1)], 0.0)


def _ragged(part: str, x: Array, sizes: Array, up: Array, down: Array) -> Array:
    """``x``: tokens [T, DEPTH], in the order of their experts; ``sizes``: how many are for each."""
    every, me = lax.all_gather(sizes, "x"), lax.axis_index("x")
    landing, home = (jnp.cumsum(every, axis) - every for axis in (0, 1))
    there = jnp.pad(x, ((0, ROOM - TOKENS), (0, 0)))
    if part != "compute":
        places = home[me], sizes, landing[me], every[:, me]
        there = lax.ragged_all_to_all(x, jnp.zeros_like(there), *places, axis_name="x")
    if part != "messages":
        there = jax.nn.gelu(there @ up) @ down
    if part == "compute":
        return there[:TOKENS]
    places = landing[:, me], every[:, me], home[:, me], sizes
    return lax.ragged_all_to_all(there, jnp.zeros_like(x), *places, axis_name="x")


_LOCAL: dict[str, Callable[..., Any]] = {
    "gather": _gather,
    "scatter": _scatter,
    "experts": _experts,
    "ragged": _ragged,
}


def flops(program: str) -> float:
    """Operations of a device for each unit of ``size``."""
    if program == "experts":
        return 2.0 * 2 * EXPERTS * CAPACITY * DEPTH
    if program == "ragged":
        return 2.0 * 2 * ROOM * DEPTH
    return 2.0 * 2 * ROWS * WIDTH


def build(
    program: str, part: str, size: int, mesh: Mesh, rows: int = ROWS, width: int = WIDTH
) -> Callable[[], Any]:
    """A call that runs one part of a program once and waits for it. ``rows``, ``width``: those of a device's
    operand where there are no experts."""
    function, arguments = jitted(program, part, size, mesh, rows, width)
    return lambda: jax.block_until_ready(function(*arguments))


def jitted(
    program: str, part: str, size: int, mesh: Mesh, rows: int = ROWS, width: int = WIDTH
) -> tuple[Any, list[Array]]:
    """The part of a program and what it is called with."""
    rng = np.random.default_rng(0)

    def placed(*shape: int, scale: float = 1.0) -> Array:
        """Each device has what is behind the first dimension."""
        data = (rng.standard_normal((2, *shape)) * scale).astype(np.float32)
        spec = NamedSharding(mesh, P("x"))
        return jax.make_array_from_callback(data.shape, spec, lambda i: data[i])

    if program == "gather":
        arguments = [placed(rows, width), placed(width, size, scale=0.05)]
    elif program == "scatter":
        columns = width if part == "messages" else size
        arguments = [placed(2 * rows, columns), placed(size, width, scale=0.05)]
    elif program == "ragged":
        most = TOKENS * 6 // 10
        numbers = np.array([[most, TOKENS - most]] * 2, np.int32)
        arguments = [
            placed(TOKENS, DEPTH),
            jax.make_array_from_callback(
                numbers.shape, NamedSharding(mesh, P("x")), lambda i: numbers[i]
            ),
            placed(DEPTH, size, scale=0.05),
            placed(size, DEPTH, scale=0.05),
        ]
    else:
        skewed = rng.zipf(1.5, size=(2, 4 * CAPACITY)) % EXPERTS
        chosen = jax.make_array_from_callback(
            skewed.shape, NamedSharding(mesh, P("x")), lambda i: skewed[i].astype(np.int32)
        )
        arguments = [
            placed(4 * CAPACITY, DEPTH),
            chosen,
            placed(EXPERTS // 2, DEPTH, size, scale=0.05),
            placed(EXPERTS // 2, size, DEPTH, scale=0.05),
        ]

    def local(*given: Array) -> Array:
        return _LOCAL[program](part, *(a[0] for a in given))[None]

    specs = (P("x"),) * len(arguments)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)
    return jax.jit(mapped), arguments
