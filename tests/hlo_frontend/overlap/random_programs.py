"""Random JAX programs that communicate, for tests of schedules: program n of a seed is always the same.

Compute, collectives of all kinds over all axes, tokens, loops of known and unknown length, branches, barriers
and rematerialization are drawn at random, nested, on values of several dtypes. Every operation is exact,
whatever the compiler fuses and in whatever order sums are taken: values are small integers, brought back
into their range after each step. So results must agree bit for bit.

Invariant: what is drawn depends on the name of the program alone, not on how often JAX traces a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from frontend_support import P, mesh
from jax import lax
from jax.sharding import Mesh, NamedSharding

import stretto.lax as sl

MESHES = ((4,), (2, 2), (2, 4), (8,), (2, 2, 2), (3,), (2,))
DTYPES = ("float32", "float32", "bfloat16", "int32", "int8", "float16", "complex64", "uint8")
MOST_DEPTH = 2
MOST_ROWS = 256
COUNTERS = (0, 1, 2, 3, 5)


@dataclass(frozen=True)
class RandomProgram:
    """``function`` is jitted and takes ``arguments``, laid out over ``over`` by ``specs``."""

    name: str
    function: Any
    over: Mesh
    specs: tuple[Any, ...]
    arguments: tuple[np.ndarray, ...]
    donated: tuple[int, ...]


def draw(name: str) -> RandomProgram:
    """The program of this name."""
    rng = Random(name)
    sizes = rng.choice(MESHES)
    over = mesh(*sizes)
    names = over.axis_names
    width = rng.choice((8, 16, 16, 32))
    rows = width * math.prod(sizes)
    arguments: list[np.ndarray] = []
    specs: list[Any] = []
    numbers = np.random.default_rng(rng.getrandbits(32))
    for _ in range(rng.randint(1, 4)):
        values = numbers.integers(0, 5, (rows, width))
        arguments.append(values.astype(_dtype(rng.choice(DTYPES))))
        specs.append(P(names))
    for _ in range(rng.randint(0, 2)):  # weights of layers
        values = numbers.integers(0, 4, (rng.choice((2, 3, 4, 6)), rows, width))
        arguments.append(values.astype(np.float32))
        specs.append(P(None, names))
    arguments.append(np.int32(rng.choice(COUNTERS)))  # how often a loop runs that does not say so
    specs.append(P())
    most = rng.randint(4, 14)

    def per_device(*given: jax.Array) -> tuple[jax.Array, ...]:
        *arrays, count = given
        stacks = [a for a in arrays if a.ndim == 3]
        pool = [a for a in arrays if a.ndim == 2]
        writer = _Writer(dict(zip(names, sizes, strict=True)), count, width)
        body = writer.block(f"{name}/body", pool, stacks, most, 0)
        last = Random(f"{name}/results")
        chosen = [v for v in body[len(pool) :] if last.random() < 0.5]
        return tuple(_fit(v, (width, width)) for v in (*chosen, body[-1]))

    mapped = jax.shard_map(
        per_device, mesh=over, in_specs=tuple(specs), out_specs=P(names), check_vma=False
    )
    donated = tuple(i for i in range(len(arguments) - 1) if rng.random() < 0.3)
    placed = [NamedSharding(over, s) for s in specs]
    function = jax.jit(mapped, donate_argnums=donated, in_shardings=tuple(placed), keep_unused=True)
    return RandomProgram(name, function, over, tuple(specs), tuple(arguments), donated)


def _dtype(name: str) -> Any:
    return jnp.dtype(name)


def _fit(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return value if value.shape == shape else jnp.resize(value, shape)


def _as(value: jax.Array, dtype: Any) -> jax.Array:
    """The value in another dtype; of complex ones the real part, where it must be real."""
    real = jnp.iscomplexobj(value) and not jnp.issubdtype(dtype, jnp.complexfloating)
    return (value.real if real else value).astype(dtype)


def _small(value: jax.Array) -> jax.Array:
    """The value modulo 5, which every dtype holds, however the compiler divides."""
    if jnp.issubdtype(value.dtype, jnp.integer):
        return value % 5
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return lax.complex(_small(value.real), _small(value.imag))
    wide = value.astype(jnp.float32)
    return (wide - 5 * jnp.round(wide / 5)).astype(value.dtype)


@jax.custom_vjp
def _bounded(value: jax.Array) -> jax.Array:
    """`_small`, of gradients too."""
    return _small(value)


_bounded.defvjp(lambda value: (_small(value), None), lambda _, given: (_small(given),))


class _Writer:
    """Writes the operations of a program for one device. ``sizes``: of the mesh, by axis."""

    def __init__(self, sizes: dict[str, int], count: jax.Array, width: int) -> None:
        self.sizes, self.count, self.width = sizes, count, width

    def block(
        self,
        path: str,
        given: Sequence[jax.Array],
        stacks: Sequence[jax.Array],
        most: int,
        depth: int,
    ) -> list[jax.Array]:
        """Operations on what is given; all values made, those given first."""
        rng = Random(path)
        pool = list(given)
        token = sl.create_token() if rng.random() < 0.15 else None
        for step in range(most):
            inner = f"{path}/{step}"
            what = rng.random()
            if what < 0.36:
                pool.append(self.compute(rng, pool))
            elif what < 0.72:
                made, token = self.communicate(rng, pool, token)
                pool += made
            elif what < 0.76:
                few = rng.sample(pool, min(len(pool), rng.randint(1, 3)))
                pool += lax.optimization_barrier(tuple(few))
            elif what < 0.80:
                value = rng.choice(pool)
                pool.append(lax.dynamic_slice_in_dim(value, self.count % 3, value.shape[0] // 2))
            elif depth < MOST_DEPTH:
                few = rng.sample(pool, min(len(pool), rng.randint(1, 4)))
                forms = [self.scan, self.scan, self.repeat, self.branch]
                form = rng.choice([self.layers] * 4 + forms if stacks else forms)
                pool += form(rng, inner, few, pool, stacks, depth)
        return pool

    # Without communication.

    def compute(self, rng: Random, pool: Sequence[jax.Array]) -> jax.Array:
        a, b = rng.choice(pool), rng.choice(pool)
        what = rng.randrange(8)
        if what < 3:
            wide = a.astype(jnp.float32 if a.dtype != jnp.complex64 else a.dtype)
            other = _as(_fit(b, (wide.shape[1], self.width)), wide.dtype)
            return _small(wide @ other).astype(a.dtype)
        if what == 3:
            return _small(a + _as(_fit(b, a.shape), a.dtype))
        if what == 4:
            return _small(a * _as(_fit(b, a.shape), a.dtype))
        if what == 5:
            return _fit(a.T, a.shape) if rng.random() < 0.5 else jnp.flip(a, 0)
        if what == 6:
            return _as(a, _dtype(rng.choice(DTYPES[:-2])))
        return jnp.concatenate([a, _as(_fit(b, a.shape), a.dtype)])[: min(2 * len(a), MOST_ROWS)]

    # With communication.

    def axes(self, rng: Random) -> tuple[tuple[str, ...], int]:
        names = tuple(self.sizes)
        chosen = rng.sample(names, rng.randint(1, len(names)))
        return tuple(chosen), math.prod(self.sizes[n] for n in chosen)

    def communicate(
        self, rng: Random, pool: Sequence[jax.Array], token: jax.Array | None
    ) -> tuple[list[jax.Array], jax.Array | None]:
        names, n = self.axes(rng)
        x = _fit(rng.choice(pool), (n * self.width, self.width))
        kind = rng.choice(
            ("sum", "sum", "max", "gather", "gather", "scatter", "scatter", "all", "permute")
        )
        if rng.random() < 0.1:  # several at once, which XLA combines
            several = rng.sample(pool, min(len(pool), 4))
            return [_small(lax.psum(v, names)) for v in several], token
        axis = names[0] if len(names) == 1 else names
        groups = None
        size = next(iter(self.sizes.values()))
        if len(self.sizes) == 1 and size % 2 == 0 and rng.random() < 0.3 and kind != "permute":
            order = list(range(size))
            if rng.random() < 0.5:
                rng.shuffle(order)
            groups, n = [order[: size // 2], order[size // 2 :]], size // 2
            x = x[: n * self.width]
        if kind == "permute" and len(names) > 1:  # jax 0.12 insists on the order of the mesh
            axis = tuple(name for name in self.sizes if name in names)
        perm = self.permutation(rng, n)
        chained = token is not None and rng.random() < 0.7
        options: dict[str, Any] = {"token": token} if chained else {}
        module: Any = sl if chained else lax
        if kind in ("sum", "max", "gather", "scatter", "all"):
            options["axis_index_groups"] = groups
        makers: dict[str, Callable[[], Any]] = {
            "sum": lambda: module.psum(x[: self.width], axis, **options),
            "max": lambda: module.pmax(x[: self.width], axis, **options),
            "gather": lambda: module.all_gather(x[: self.width], axis, tiled=True, **options),
            "scatter": lambda: module.psum_scatter(x, axis, tiled=True, **options),
            "all": lambda: module.all_to_all(x, axis, 0, 0, tiled=True, **options),
            "permute": lambda: module.ppermute(x[: self.width], axis, perm, **options),
        }
        if kind == "max" and x.dtype == jnp.complex64:
            kind = "sum"
        made = makers[kind]()
        if chained:
            made, token = made
        made = _small(made)
        if made.shape[0] > MOST_ROWS:
            made = made[:MOST_ROWS]
        return [made], token

    def permutation(self, rng: Random, n: int) -> list[tuple[int, int]]:
        targets = list(range(n))
        if rng.random() < 0.5:
            rng.shuffle(targets)
        else:
            targets = [(i + 1) % n for i in range(n)]
        pairs = list(enumerate(targets))
        return pairs[: rng.randint(1, n)] if rng.random() < 0.3 else pairs

    # Control flow.

    def scan(
        self,
        rng: Random,
        path: str,
        carries: list[jax.Array],
        pool: Sequence[jax.Array],
        stacks: Sequence[jax.Array],
        depth: int,
    ) -> list[jax.Array]:
        """A loop of known length over stacked weights, which may stack results too."""
        length = rng.choice((1, 2, 3, 4, 6))
        usable = [s for s in stacks if len(s) == length]
        over = rng.choice(usable) if usable and rng.random() < 0.8 else None
        if over is None and stacks and rng.random() < 0.8:
            over = rng.choice(list(stacks))
            length = len(over)
        most, stacked = rng.randint(2, 7), rng.random() < 0.5
        free = rng.sample(list(pool), min(len(pool), 2))
        remat, reverse = rng.random() < 0.2, rng.random() < 0.3
        unread = rng.random() < 0.3

        def body(carry: list[jax.Array], x: jax.Array | None) -> tuple[list[jax.Array], Any]:
            given = [*carry, *([] if x is None else [x]), *free]
            made = self.block(path, given, (), most, depth + 1)
            new = made[len(given) :] or made
            last = Random(f"{path}/carries")
            # What is carried on: new values, those that others carried, or itself.
            choices = [new, new, new, carry, made]
            picked = [last.choice(last.choice(choices)) for _ in carry]
            carried = [self.as_before(v, c) for v, c in zip(picked, carry, strict=True)]
            ys = _fit(last.choice(new), (self.width, self.width)) if stacked else None
            return carried, ys

        if remat:
            body = jax.checkpoint(body, prevent_cse=rng.random() < 0.5)
        ended, ys = lax.scan(body, carries, over, length=length, reverse=reverse)
        made = list(ended[:1] if unread else ended)
        return [*made, ys.reshape(-1, self.width)[:MOST_ROWS]] if stacked else made

    def layers(
        self,
        rng: Random,
        path: str,
        carries: list[jax.Array],
        pool: Sequence[jax.Array],
        stacks: Sequence[jax.Array],
        depth: int,
    ) -> list[jax.Array]:
        """Layers whose weights are gathered, in a loop or one after the other, forward and backward."""
        stack = rng.choice(list(stacks))
        ways = [self.axes(rng) for _ in range(rng.randint(1, 3))]
        partial_sums, remat = rng.random() < 0.3, rng.random() < 0.4
        unrolled, backward = rng.random() < 0.3, rng.random() < 0.6
        inner = path if rng.random() < 0.3 else None

        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            for number, (names, n) in enumerate(ways):
                whole = lax.all_gather(_bounded(w + number), names, tiled=True)
                h = _bounded(jnp.resize(h, (self.width, n * self.width)) @ whole)
                if partial_sums:
                    h = _bounded(lax.psum(h, names))
            if inner:
                made = self.block(inner, [lax.stop_gradient(h)], (), 2, depth + 1)
                h = _bounded(h + _fit(made[-1].real.astype(h.dtype), h.shape))
            return h, _bounded(h * w)

        if remat:
            layer = jax.checkpoint(layer, prevent_cse=False)

        def run(h: jax.Array, stack: jax.Array) -> tuple[jax.Array, jax.Array]:
            if not unrolled:
                return lax.scan(layer, h, stack)
            ys = []
            for w in stack:
                h, y = layer(h, w)
                ys.append(y)
            return h, jnp.stack(ys)

        h = self.as_before(carries[0], jnp.zeros((self.width, self.width), jnp.float32))
        if not backward:
            made = run(h, stack)
        else:
            ended, pull = jax.vjp(run, h, stack)
            made = (*ended, *pull(ended))
        return [v.reshape(-1, self.width)[:MOST_ROWS] for v in made]

    def as_before(self, value: jax.Array, carry: jax.Array) -> jax.Array:
        return _as(_fit(value, carry.shape), carry.dtype)

    def repeat(
        self,
        rng: Random,
        path: str,
        carries: list[jax.Array],
        pool: Sequence[jax.Array],
        stacks: Sequence[jax.Array],
        depth: int,
    ) -> list[jax.Array]:
        """A loop whose length is an argument, or known to all devices only as it runs."""
        most = rng.randint(2, 6)
        names = tuple(self.sizes)
        bound = self.count
        if rng.random() < 0.3:
            some = rng.choice(list(pool))
            bound = lax.pmax(jnp.abs(some[0, 0]).astype(jnp.int32) % 4, names)

        def step(i: Any, carry: list[jax.Array]) -> list[jax.Array]:
            made = self.block(path, carry, (), most, depth + 1)
            new = made[len(carry) :] or made
            last = Random(f"{path}/carries")
            picked = [last.choice(last.choice([new, new, carry])) for _ in carry]
            return [self.as_before(v, c) for v, c in zip(picked, carry, strict=True)]

        if rng.random() < 0.3:
            # The condition reads what the body communicates.
            def goes_on(state: Any) -> Any:
                i, carry = state
                return (i < bound) & (jnp.abs(carry[0][0, 0]).astype(jnp.int32) < 9)

            def alike(state: Any) -> Any:
                i, carry = state
                new = step(i, carry)
                new[0] = self.as_before(_small(lax.psum(new[0], names)), new[0])
                return i + 1, new

            carries = [
                self.as_before(_small(lax.psum(carries[0], names)), carries[0]),
                *carries[1:],
            ]
            return list(lax.while_loop(goes_on, alike, (jnp.int32(0), carries))[1])
        return list(lax.fori_loop(0, bound, step, carries))

    def branch(
        self,
        rng: Random,
        path: str,
        carries: list[jax.Array],
        pool: Sequence[jax.Array],
        stacks: Sequence[jax.Array],
        depth: int,
    ) -> list[jax.Array]:
        """Branches that all devices take alike."""
        ways = rng.randint(2, 3)
        most = rng.randint(1, 5)

        def way(number: int, *given: jax.Array) -> tuple[jax.Array, ...]:
            made = self.block(f"{path}/{number}", list(given), (), most, depth + 1)
            new = made[len(given) :] or made
            last = Random(f"{path}/{number}/results")
            return tuple(self.as_before(last.choice(new), c) for c in given)

        chosen = self.count % ways
        return list(lax.switch(chosen, [partial(way, k) for k in range(ways)], *carries))
