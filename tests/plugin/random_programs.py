"""Draws jitted programs at random and compares stretto with JAX's CPU backend, both on the devices of a mesh.

    JAX_PLATFORMS=stretto,cpu STRETTO_LOCAL_DEVICES=8 XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python tests/plugin/random_programs.py values --first 0 --count 500

Under ``mpiexec -n 4``, with 2 devices a rank, each rank compares its own shards. The mesh has 8 devices, or
2 or 4 with ``--devices``. A seed and a number of devices are always the same program. It runs twice: the
first run is agreed on among processes, the second may go other ways. There are four kinds:

``values``: arrays of small whole numbers in types that hold them exactly, so that results are equal bit for
bit whatever the order of sums; signs of zeros may differ. Where XLA chooses the shardings of results, these
are equal, too.

``steps``: programs of such values that take one another's results, often donated, with arrays moved, read
and indexed in between, and nothing awaited.

``gradients``: a value and its gradient by float32 arrays, equal to `TOLERANCE`.

``floats``: transforms, decompositions and solvers, which round: equal to `TOLERANCE`.

A line tells of each program that differs; one at the end counts. The exit code is 1 if any differs. The
number of the seed goes to stderr ahead of its program, in case this process does not survive it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from random_operations import (
    EXACT_TYPES,
    OPERATIONS,
    WIDE_TYPES,
    Draw,
    apply,
    inner,
    small,
)

TOLERANCE = 1e-4  # of the largest number of an array
LARGEST = 1 << 15  # elements of a value
MESHES = {2: ((2,),), 4: ((4,), (2, 2)), 8: ((8,), (4, 2), (2, 4), (2, 2, 2))}


@dataclass(frozen=True)
class Program:
    """A program on a platform: drawn anew for each, for it names the platform's mesh."""

    function: Callable[..., Any]
    arguments: list[Any]
    out_shardings: Any  # None: XLA chooses
    donated: tuple[int, ...]
    exported: bool

    def run(self) -> list[Any]:
        how = {} if self.out_shardings is None else {"out_shardings": self.out_shardings}
        jitted = jax.jit(self.function, donate_argnums=self.donated, **how)
        if self.exported:
            jitted = jax.jit(
                jax.export.deserialize(jax.export.export(jitted)(*self.arguments).serialize()).call
            )
        kept = [jnp.copy(a) if n in self.donated else a for n, a in enumerate(self.arguments)]
        return jax.tree.leaves([jitted(*kept), jitted(*self.arguments)])


def draw_arguments(kind: str, seed: int, devices: list[Any]) -> tuple[Draw, list[Any]]:
    """Arrays on a mesh, and a draw to go on with."""
    shapes = MESHES[len(devices)]
    shape = shapes[np.random.default_rng(seed).integers(len(shapes))]
    mesh = Mesh(np.array(devices).reshape(shape), ("a", "b", "c")[: len(shape)])
    draw = Draw(seed, mesh, kind)
    sizes = [draw.one([8, 16, 24, 32]) for _ in range(3)] + [draw.one([1, 3, 5, 12])]
    shapes = [
        tuple(draw.one(sizes) for _ in range(1 + draw.below(3))) for _ in range(2 + draw.below(3))
    ]
    dtypes = [draw.one(types_of(kind)) for _ in shapes]
    same = draw.chance(0.5)  # of a type, so that more of them meet
    whole = [draw.data(s, dtypes[0] if same else d) for s, d in zip(shapes, dtypes, strict=True)]
    return draw, [placed(draw, a) for a in whole]


def draw_program(kind: str, seed: int, devices: list[Any]) -> Program:
    draw, arguments = draw_arguments(kind, seed, devices)
    mesh = draw.mesh
    steps, seed_within = 4 + draw.below(9), draw.below(1 << 30)

    def forward(*arrays: Any) -> list[Any]:
        inside = Draw(seed_within, mesh, kind)
        inside.values = list(arrays)
        for _ in range(steps):
            made = apply(inside, inside.one(OPERATIONS[kind]), inside.one(inside.values))
            if made.size <= LARGEST:
                inside.values.append(made)
        return inside.values[len(arrays) :] or [arrays[0]]

    def loss(*arrays: Any) -> Any:
        return sum(weighed(v) for v in forward(*arrays))

    function = (
        jax.value_and_grad(loss, tuple(range(len(arguments)))) if kind == "gradients" else forward
    )
    results = jax.eval_shape(function, *arguments)
    chosen = draw.chance(0.6)
    shardings = jax.tree.map(lambda r: draw.sharding(r.shape), results) if chosen else None
    donated = (
        tuple(n for n in range(len(arguments)) if draw.chance(0.3)) if draw.chance(0.3) else ()
    )
    return Program(function, arguments, shardings, donated, chosen and draw.chance(0.15))


def run_steps(seed: int, devices: list[Any]) -> list[Any]:
    """Results of programs that take each other's."""
    draw, state = draw_arguments("values", seed, devices)
    steps = []
    for _ in range(2):
        bodies = [inner(draw, array) for array in state]

        def step(*arrays: Any, bodies: list[Any] = bodies) -> list[Any]:
            made = [body(array) for body, array in zip(bodies, arrays, strict=True)]
            hint = sum(jnp.sum(jnp.real(array) > 0) for array in made)
            return [
                array if array.dtype == jnp.bool_ else small(array + (hint % 3).astype(array.dtype))
                for array in made
            ]

        donated = tuple(n for n in range(len(state)) if draw.chance(0.6))
        where = [draw.sharding(array.shape) for array in state] if draw.chance(0.7) else None
        steps.append((jax.jit(step, donate_argnums=donated, out_shardings=where), donated))
    kept: list[Any] = []
    for _ in range(6):
        step, donated = draw.one(steps)
        kept += [array for n, array in enumerate(state) if n not in donated]
        state = step(*state)
        array = draw.one(state)
        match draw.below(4):
            case 0:
                kept.append(jax.device_put(jnp.flip(array, 0), draw.sharding(array.shape)))
            case 1:
                kept.append(array[0])
            case 2:
                np.asarray(array.addressable_shards[0].data)
    return [*kept, *state]


def types_of(kind: str) -> tuple[str, ...]:
    if kind != "values":
        return ("float32",)
    return (*EXACT_TYPES, *(WIDE_TYPES if jax.config.jax_enable_x64 else ()))


def placed(draw: Draw, whole: np.ndarray) -> Any:
    """An array on the mesh, at times by way of another sharding."""
    first, last = draw.sharding(whole.shape), draw.sharding(whole.shape)
    array = jax.make_array_from_callback(whole.shape, first, lambda index: whole[index])
    return jax.device_put(array, last) if draw.chance(0.3) else array


def weighed(x: Any) -> Any:
    return (x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum() / max(1, x.size)


def differences(kind: str, got: list[Any], want: list[Any], placed: bool) -> list[str]:
    """What is not equal, of the shards of this process."""
    found = []
    if len(got) != len(want):
        return [f"{len(got)} results where {len(want)} are right"]
    for n, (array, right) in enumerate(zip(got, want, strict=True)):
        if (array.shape, array.dtype) != (right.shape, right.dtype):
            found.append(f"result {n}: {array.aval} where {right.aval} is right")
            continue
        if placed and indices(array) != indices(right):
            found.append(f"result {n}: {array.sharding} where {right.sharding} is right")
        if indices(array) == indices(right):
            # Shard by shard: of uneven ones that XLA chose, JAX does not always make a whole.
            parts = [s.data for s in sorted(right.addressable_shards, key=lambda s: s.device.id)]
        else:
            parts = [np.asarray(right)[index] for index in indices(array)]
        places = sorted(array.sharding.device_set, key=lambda device: device.id)
        for shard in array.addressable_shards:
            part, wanted = np.asarray(shard.data), np.asarray(parts[places.index(shard.device)])
            if not same(kind, part, wanted):
                found.append(f"result {n}, {array.aval} at {shard.index}: {shown(part, wanted)}")
                break
    return found


def indices(array: Any) -> list[Any]:
    """The part that each device has, in the order of the mesh."""
    parts = array.sharding.devices_indices_map(array.shape)
    return [parts[d] for d in sorted(parts, key=lambda d: d.id)]


def same(kind: str, part: np.ndarray, wanted: np.ndarray) -> bool:
    if part.shape != wanted.shape:
        return False
    if kind in ("values", "steps"):
        return np.array_equal(part, wanted)
    least = TOLERANCE * max(1.0, float(np.max(np.abs(wanted), initial=0.0)))
    return np.allclose(part, wanted, rtol=TOLERANCE, atol=least, equal_nan=True)


def shown(part: np.ndarray, wanted: np.ndarray) -> str:
    if part.shape != wanted.shape:
        return f"{part.shape} where {wanted.shape} is right"
    place = tuple(np.argwhere(part != wanted)[0])
    return f"{part[place]} at {place} where {wanted[place]} is right"


def outcome(kind: str, seed: int, devices: list[Any]) -> tuple[list[Any], Exception | None, bool]:
    """Results, what was raised, and whether XLA chose the results' shardings."""
    try:
        if kind == "steps":
            return jax.block_until_ready(run_steps(seed, devices)), None, False
        program = draw_program(kind, seed, devices)
        results = jax.block_until_ready(program.run())
    except Exception as error:
        return [], error, False
    return results, None, program.out_shardings is None and not program.exported


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kind", choices=[*OPERATIONS, "steps"])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--wide", action="store_true", help="with types of 64 bits")
    parser.add_argument("--devices", type=int, choices=MESHES, default=8)
    chosen = parser.parse_args()
    jax.config.update("jax_enable_x64", chosen.wide)
    platforms = [jax.devices(name)[: chosen.devices] for name in ("stretto", "cpu")]
    counts: Counter[str] = Counter()
    for seed in range(chosen.first, chosen.first + chosen.count):
        print(f"{chosen.kind} {seed}", file=sys.stderr, flush=True)
        got, want = (outcome(chosen.kind, seed, devices) for devices in platforms)
        if want[1] is not None:
            kind, found = "refused", []
            if type(got[1]) is not type(want[1]):
                kind, found = "differ", [f"raised {got[1]!r} where {want[1]!r} is right"]
        elif got[1] is not None:
            kind, found = "differ", [f"raised {got[1]!r}"]
        else:
            found = differences(chosen.kind, got[0], want[0], want[2])
            kind = "differ" if found else "equal"
        counts[kind] += 1
        if found:
            print(
                f"{chosen.kind} {seed} on process {jax.process_index()}:",
                *found,
                sep="\n  ",
                flush=True,
            )
        if seed % 10 == 9:
            jax.clear_caches()
    print(*(f"{n} {kind}" for kind, n in sorted(counts.items())), sep=", ", flush=True)
    return int(counts["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
