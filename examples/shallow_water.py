"""The shallow-water equations on a mesh of devices: a jet that rolls up into eddies.

A layer of water of variable depth on a rotating plane, periodic in both directions, as Matsuno and Arakawa
discretize it: depth in the middle of a cell, velocities on its sides (C grid), vorticity in its corners, and
three time levels of Adams and Bashforth. The plane is divided over a 2-D mesh of devices by `shard_map`; in
each step every device gives the edges of its part to its four neighbours by `ppermute`, corners included,
since what goes along x goes with what came along y. All steps are one `fori_loop` in one `jit`. Plain JAX;
nothing here is stretto's.

    JAX_PLATFORMS=stretto mpiexec -n 4 python examples/shallow_water.py
    JAX_PLATFORMS=stretto STRETTO_LOCAL_DEVICES=8 python examples/shallow_water.py --picture eddies.png
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/shallow_water.py

Printed: what became of mass and energy, and the steps in a second. The last line is a JSON object with all
of it. The picture is the vorticity.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from picture import write_picture

GRAVITY = 9.81  # m/s²
CORIOLIS = 1e-4  # 1/s
DEPTH = 100.0  # m
SPACING = 5e3  # m between cells
SPEED = 15.0  # m/s, of the jet
VISCOSITY = 2000.0  # m²/s
COURANT = 0.2

# depth, velocity along x, velocity along y: [3, rows, columns]
State = jax.Array
SPEC = P(None, "y", "x")


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


def initial_state(rows: int, columns: int) -> np.ndarray:
    """A jet along x in balance with the slope of the water, with a small bump that breaks it up."""
    y, x = np.mgrid[0:rows, 0:columns]
    length = rows * SPACING
    angle = 2 * np.pi * (y + 0.5) / rows
    u = SPEED * np.sin(angle)
    # -g dh/dy = f u
    depth = DEPTH + CORIOLIS * SPEED * length / (2 * np.pi * GRAVITY) * np.cos(angle)
    middle = ((x - columns / 2) / columns) ** 2 + ((y - rows / 4) / rows) ** 2
    depth = depth + 3 * np.exp(-100 * middle)
    return np.stack([depth, u, np.zeros_like(u)]).astype(np.float32)


def neighbours(size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs that send to the next device along an axis, and to the one before."""
    after = [(i, (i + 1) % size) for i in range(size)]
    return after, [(target, source) for source, target in after]


def with_edges(state: State, mesh: Mesh) -> State:
    """The part with one more row and column on each side, of its neighbours."""
    for axis, name in ((1, "y"), (2, "x")):
        after, before = neighbours(mesh.shape[name])
        first = lax.slice_in_dim(state, 0, 1, axis=axis)
        last = lax.slice_in_dim(state, state.shape[axis] - 1, state.shape[axis], axis=axis)
        state = jnp.concatenate(
            [lax.ppermute(last, name, after), state, lax.ppermute(first, name, before)], axis
        )
    return state


def tendency(wide: State) -> State:
    """What a second changes, of the state without the edges that ``wide`` has."""
    rows, columns = wide.shape[1] - 2, wide.shape[2] - 2

    def at(field: jax.Array, y: int, x: int) -> jax.Array:
        """The field of the cells that lie so many rows and columns further."""
        return field[1 + y : 1 + y + rows, 1 + x : 1 + x + columns]

    h, u, v = wide
    # Fluxes through the sides of a cell.
    east = at(u, 0, 0) * (at(h, 0, 0) + at(h, 0, 1)) / 2
    west = at(u, 0, -1) * (at(h, 0, -1) + at(h, 0, 0)) / 2
    north = at(v, 0, 0) * (at(h, 0, 0) + at(h, 1, 0)) / 2
    south = at(v, -1, 0) * (at(h, -1, 0) + at(h, 0, 0)) / 2

    def vorticity(y: int, x: int) -> jax.Array:
        """At a cell's north-east corner, the planet's included."""
        along_x = at(v, y, x + 1) - at(v, y, x)
        along_y = at(u, y + 1, x) - at(u, y, x)
        return (along_x - along_y) / SPACING + CORIOLIS

    def head(y: int, x: int) -> jax.Array:
        """Energy of a unit of mass, in the middle of a cell."""
        kinetic = at(u, y, x) ** 2 + at(u, y, x - 1) ** 2 + at(v, y, x) ** 2 + at(v, y - 1, x) ** 2
        return GRAVITY * at(h, y, x) + kinetic / 4

    def spread(field: jax.Array) -> jax.Array:
        around = at(field, 0, 1) + at(field, 0, -1) + at(field, 1, 0) + at(field, -1, 0)
        return VISCOSITY * (around - 4 * at(field, 0, 0)) / SPACING**2

    turned_u = (
        vorticity(0, 0) * (at(v, 0, 0) + at(v, 0, 1))
        + vorticity(-1, 0) * (at(v, -1, 0) + at(v, -1, 1))
    ) / 4
    turned_v = (
        vorticity(0, 0) * (at(u, 0, 0) + at(u, 1, 0))
        + vorticity(0, -1) * (at(u, 0, -1) + at(u, 1, -1))
    ) / 4
    return jnp.stack(
        [
            -(east - west + north - south) / SPACING,
            turned_u - (head(0, 1) - head(0, 0)) / SPACING + spread(u),
            -turned_v - (head(1, 0) - head(0, 0)) / SPACING + spread(v),
        ]
    )


def simulation(mesh: Mesh, steps: int):  # type: ignore[no-untyped-def]
    """``f(state)``: the state ``steps`` later, compiled for the mesh."""
    delta = COURANT * SPACING / (GRAVITY * DEPTH) ** 0.5

    def run(state: State) -> State:
        def step(_: jax.Array, carry: tuple[State, State, State]) -> tuple[State, State, State]:
            state, before, earlier = carry
            now = tendency(with_edges(state, mesh))
            change = (23 * now - 16 * before + 5 * earlier) / 12
            return state + delta * change, now, before

        first = tendency(with_edges(state, mesh))
        return lax.fori_loop(0, steps, step, (state, first, first))[0]

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False))


def placed(whole: np.ndarray, mesh: Mesh) -> jax.Array:
    """A host array, the same on every process, divided over the mesh."""
    sharding = NamedSharding(mesh, SPEC)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def gathered(array: jax.Array, mesh: Mesh) -> np.ndarray:
    """The whole array, on every process."""
    return np.asarray(jax.jit(lambda a: a, out_shardings=NamedSharding(mesh, P()))(array))


def mass_and_energy(state: np.ndarray) -> tuple[float, float]:
    """Of the whole plane: m³ of water, and their kinetic and potential energy by density."""
    h, u, v = state.astype(np.float64)
    kinetic = h * (u**2 + np.roll(u, 1, 1) ** 2 + v**2 + np.roll(v, 1, 0) ** 2) / 4
    area = SPACING**2
    return float(h.sum() * area), float((kinetic + GRAVITY * h**2 / 2).sum() * area)


def vorticity_of(state: np.ndarray) -> np.ndarray:
    """In the corners of the cells, by their spacing."""
    _, u, v = state
    return (np.roll(v, -1, 1) - v) - (np.roll(u, -1, 0) - u)


def main(arguments: list[str]) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=128, help="cells along y")
    parser.add_argument("--columns", type=int, default=256, help="cells along x")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--mesh", default="", help="rows x columns of devices, as 2x4")
    parser.add_argument("--picture", default="", help="PNG file for the vorticity")
    args = parser.parse_args(arguments)
    mesh = mesh_of(jax.devices(), args.mesh)
    if args.rows % mesh.shape["y"] or args.columns % mesh.shape["x"]:
        parser.error(f"{args.rows} x {args.columns} cells do not divide over {dict(mesh.shape)}")
    begin = initial_state(args.rows, args.columns)
    state = placed(begin, mesh)
    run = simulation(mesh, args.steps).lower(state).compile()
    run(state).block_until_ready()
    since = time.perf_counter()
    state = run(state).block_until_ready()
    seconds = time.perf_counter() - since
    end = gathered(state, mesh)
    (mass, energy), (mass_after, energy_after) = mass_and_energy(begin), mass_and_energy(end)
    report = {
        "mass_change": mass_after / mass - 1,
        "energy_change": energy_after / energy - 1,
        "speed": float(np.abs(end[1:]).max()),
        "steps_per_second": args.steps / seconds,
    }
    if jax.process_index() == 0:
        if args.picture:
            write_picture(args.picture, vorticity_of(end))
        print(f"mesh {mesh.shape['y']}x{mesh.shape['x']}, {args.rows} x {args.columns} cells")
        print(
            f"mass changed by {report['mass_change']:.1e} of it, energy by {report['energy_change']:.1e}"
        )
        print(f"{report['steps_per_second']:.0f} steps a second")
        print(json.dumps(report), flush=True)
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
