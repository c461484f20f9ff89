"""Solve Poisson's equation on a mesh of devices by conjugate gradients, to a tolerance.

The potential of some point charges in a grounded square: minus the 5-point Laplacian, zero on the boundary,
never written down as a matrix. The square is divided over a 2-D mesh of devices by `shard_map`; a product
takes the edges of the four neighbours by `ppermute` (who has no neighbour there receives zeros, which is the
boundary), an iteration two sums over all devices. The iterations are a `while_loop` that ends when the
residual is small enough. Plain JAX; nothing here is stretto's.

    JAX_PLATFORMS=stretto mpiexec -n 4 python examples/conjugate_gradient.py
    JAX_PLATFORMS=stretto STRETTO_LOCAL_DEVICES=8 python examples/conjugate_gradient.py --picture a.png
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/conjugate_gradient.py

Printed: iterations, the residual as NumPy computes it from the solution, and the time of an iteration. The
last line is a JSON object with all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from picture import write_picture

SPEC = P("y", "x")


def mesh_of(devices: list[jax.Device], shape: str = "") -> Mesh:
    """A mesh of ``rows x columns``; without a shape as square as the number of devices allows."""
    count = len(devices)
    if shape:
        rows, columns = (int(part) for part in shape.lower().split("x"))
    else:
        rows = max(r for r in range(1, int(count**0.5) + 1) if count % r == 0)
        columns = count // rows
    if rows * columns != count:
        raise SystemExit(f"a mesh of {rows}x{columns} does not have the {count} devices there are")
    return Mesh(np.array(devices).reshape(rows, columns), ("y", "x"))


def charges(size: int) -> np.ndarray:
    """Four charges of both signs, in a square of ``size`` cells a side."""
    density = np.zeros((size, size), np.float32)
    for y, x, charge in ((0.25, 0.3, 1.0), (0.7, 0.35, -1.0), (0.6, 0.8, 1.0), (0.2, 0.75, -0.5)):
        density[int(y * size), int(x * size)] = charge
    return density


def product(part: jax.Array, mesh: Mesh) -> jax.Array:
    """Minus the 5-point Laplacian of a part, in units of the spacing."""
    total = 4 * part
    for axis, name in enumerate(("y", "x")):
        size, length = mesh.shape[name], part.shape[axis]
        after = [(i, i + 1) for i in range(size - 1)]
        first = lax.slice_in_dim(part, 0, 1, axis=axis)
        last = lax.slice_in_dim(part, length - 1, length, axis=axis)
        wide = jnp.concatenate(
            [
                lax.ppermute(last, name, after),
                part,
                lax.ppermute(first, name, [(t, s) for s, t in after]),
            ],
            axis,
        )
        total -= lax.slice_in_dim(wide, 0, length, axis=axis)
        total -= lax.slice_in_dim(wide, 2, length + 2, axis=axis)
    return total


def solver(
    mesh: Mesh, tolerance: float, most: int
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """``f(density)``: the potential and the number of iterations, at most ``most``.

    The residual is at most ``tolerance`` times the density, in the 2-norm, or the iterations are used up.
    """

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.psum(jnp.vdot(a, b), ("y", "x"))

    def solve(density: jax.Array) -> tuple[jax.Array, jax.Array]:
        begin = dot(density, density)

        def goes_on(carry: tuple[jax.Array, ...]) -> jax.Array:
            *_, squared, count = carry
            return (squared > tolerance**2 * begin) & (count < most)

        def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            potential, residual, direction, squared, count = carry
            image = product(direction, mesh)
            length = squared / dot(direction, image)
            potential = potential + length * direction
            residual = residual - length * image
            new = dot(residual, residual)
            return potential, residual, residual + new / squared * direction, new, count + 1

        start = jnp.zeros_like(density), density, density, begin, jnp.int32(0)
        potential, *_, count = lax.while_loop(goes_on, step, start)
        return potential, count

    return jax.jit(
        jax.shard_map(solve, mesh=mesh, in_specs=SPEC, out_specs=(SPEC, P()), check_vma=False)
    )


def placed(whole: np.ndarray, mesh: Mesh) -> jax.Array:
    """A host array, the same on every process, divided over the mesh."""
    sharding = NamedSharding(mesh, SPEC)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def gathered(array: jax.Array, mesh: Mesh) -> np.ndarray:
    """The whole array, on every process."""
    return np.asarray(jax.jit(lambda a: a, out_shardings=NamedSharding(mesh, P()))(array))


def residual_of(potential: np.ndarray, density: np.ndarray) -> float:
    """By its definition, as a part of the density's norm."""
    wide = np.pad(potential.astype(np.float64), 1)
    image = (
        4 * wide[1:-1, 1:-1] - wide[:-2, 1:-1] - wide[2:, 1:-1] - wide[1:-1, :-2] - wide[1:-1, 2:]
    )
    return float(np.linalg.norm(density - image) / np.linalg.norm(density))


def main(arguments: list[str]) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=256, help="cells of a side of the square")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--most", type=int, default=5000, help="iterations")
    parser.add_argument("--mesh", default="", help="rows x columns of devices, as 2x4")
    parser.add_argument("--picture", default="", help="PNG file for the potential")
    args = parser.parse_args(arguments)
    mesh = mesh_of(jax.devices(), args.mesh)
    if args.size % mesh.shape["y"] or args.size % mesh.shape["x"]:
        parser.error(f"{args.size} cells a side do not divide over {dict(mesh.shape)}")
    density = charges(args.size)
    given = placed(density, mesh)
    solve = solver(mesh, args.tolerance, args.most).lower(given).compile()
    jax.block_until_ready(solve(given))
    since = time.perf_counter()
    potential, count = jax.block_until_ready(solve(given))
    seconds = time.perf_counter() - since
    whole, iterations = gathered(potential, mesh), int(count)
    report = {
        "iterations": iterations,
        "residual": residual_of(whole, density),
        "largest": float(np.abs(whole).max()),
        "microseconds_an_iteration": 1e6 * seconds / max(iterations, 1),
    }
    if jax.process_index() == 0:
        if args.picture:
            write_picture(args.picture, whole)
        print(f"mesh {mesh.shape['y']}x{mesh.shape['x']}, {args.size} x {args.size} cells")
        print(f"{iterations} iterations, residual {report['residual']:.1e}")
        print(f"{report['microseconds_an_iteration']:.1f} us an iteration")
        print(json.dumps(report), flush=True)
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
