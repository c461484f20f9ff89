"""What `random_programs` makes programs of: operations, each with details drawn at random.

An operation takes a draw and an array with at least one dimension and one element, and returns an array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEEPEST = 2  # operations within operations
EXACT_TYPES = ("int32", "float32", "uint8", "int8", "bfloat16", "float16", "complex64", "bool")
WIDE_TYPES = ("int64", "float64", "complex128", "uint64")

Array = Any
Operation = Callable[["Draw", Array], Array]
Body = Callable[[Array], Array]


class Draw:
    """What an operation draws from: random numbers, the mesh, and the values so far."""

    def __init__(self, seed: int, mesh: Mesh, kind: str) -> None:
        self.random = np.random.default_rng(seed)
        self.mesh = mesh
        self.kind = kind
        self.values: list[Array] = []
        self.depth = 0  # operations that hold this one
        self.taken: tuple[str, ...] = ()  # axes of the mesh that a `vmap` has

    def below(self, end: int) -> int:
        return int(self.random.integers(end))

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def one(self, of: Sequence[Any]) -> Any:
        return of[self.below(len(of))]

    def axis(self, x: Array) -> int:
        return self.below(x.ndim)

    def spec(self, shape: Sequence[int], uneven: bool = False) -> P:
        """A sharding for this shape. ``uneven``: also by axes that do not divide it."""
        sizes: list[Any] = [None] * len(shape)
        names = [name for name in self.mesh.axis_names if name not in self.taken]
        for name in self.random.permutation(names):
            free = [
                d
                for d, size in enumerate(shape)
                if sizes[d] is None and size and (uneven or size % self.mesh.shape[name] == 0)
            ]
            if free and self.chance(0.65):
                sizes[self.one(free)] = str(name)
        whole = [d for d, size in enumerate(shape) if size and size % self.mesh.size == 0]
        if whole and names and self.chance(0.15):
            sizes = [None] * len(shape)
            sizes[self.one(whole)] = tuple(names)
        return P(*sizes)

    def sharding(self, shape: Sequence[int], uneven: bool = False) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(shape, uneven))

    def index(self, end: int) -> Array:
        """A traced number below ``end``, out of the first value."""
        first = self.values[0]
        number = first.reshape(-1)[0] if first.size else jnp.zeros((), first.dtype)
        return jnp.abs(jnp.real(number)).astype(jnp.int32) % end

    def indices(self, count: int, end: int) -> Array:
        """Traced numbers below ``end``, out of the first value."""
        numbers = jnp.resize(jnp.real(self.values[0]).reshape(-1), (count,))
        return (jnp.abs(numbers).astype(jnp.int32) + jnp.arange(count)) % end

    def data(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        if self.kind != "values":
            return (self.random.standard_normal(shape) * 0.5).astype(dtype)
        numbers = self.random.integers(-3, 4, shape)
        if dtype.startswith("complex"):
            numbers = numbers + 1j * self.random.integers(-3, 4, shape)
        elif dtype.startswith("uint"):
            numbers = abs(numbers)
        return np.asarray(numbers).astype(jnp.dtype(dtype))


# Operations on values of whole numbers, which keep them small and exact.


def small(x: Array) -> Array:
    """Numbers of -3 to 3, or 0 to 6, for numbers that their type holds exactly."""
    if x.dtype == jnp.bool_:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(small(x.real), small(x.imag))
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x % 7
    return x % 7 - 3


def real(x: Array) -> Array:
    """Its real parts: what has an order."""
    return x.real if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def arithmetic(x: Array) -> Array:
    """An array of a type that can be added and multiplied."""
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def total(draw: Draw, x: Array) -> Array:
    x = arithmetic(x)
    return small(x.sum(axis=draw.axis(x), keepdims=draw.chance(0.5), dtype=x.dtype))


def extreme(draw: Draw, x: Array) -> Array:
    return draw.one([jnp.max, jnp.min])(real(x), axis=draw.axis(x))


def truth(draw: Draw, x: Array) -> Array:
    return draw.one([jnp.any, jnp.all])(real(x) > 0, axis=draw.axis(x))


def cumulative(draw: Draw, x: Array) -> Array:
    x = arithmetic(x)
    axis, reverse = draw.axis(x), draw.chance(0.3)
    if draw.chance(0.3):
        return draw.one([lax.cummax, lax.cummin])(real(x), axis=axis, reverse=reverse)
    return small(lax.cumsum(x, axis=axis, reverse=reverse))


def associative(draw: Draw, x: Array) -> Array:
    return lax.associative_scan(jnp.maximum, real(x), axis=draw.axis(x))


def ordered(draw: Draw, x: Array) -> Array:
    return jnp.sort(real(x), axis=draw.axis(x), descending=draw.chance(0.3))


def order(draw: Draw, x: Array) -> Array:
    return jnp.argsort(real(x), axis=draw.axis(x)).astype(jnp.int32)


def sorted_together(draw: Draw, x: Array) -> Array:
    axis = draw.axis(x)
    return lax.sort((real(x), jnp.flip(x, axis)), dimension=axis, num_keys=1, is_stable=True)[1]


def largest(draw: Draw, x: Array) -> Array:
    numbers, places = lax.top_k(real(arithmetic(x)), min(3, x.shape[-1]))
    return numbers if draw.chance(0.5) else places


def where_largest(draw: Draw, x: Array) -> Array:
    return draw.one([jnp.argmax, jnp.argmin])(real(x), axis=draw.axis(x)).astype(jnp.int32)


def flip(draw: Draw, x: Array) -> Array:
    return jnp.flip(x, axis=draw.axis(x))


def roll(draw: Draw, x: Array) -> Array:
    return jnp.roll(x, draw.below(11) - 5, axis=draw.axis(x))


def rolled_by(draw: Draw, x: Array) -> Array:
    return jnp.roll(x, draw.index(5), axis=draw.axis(x))


def transpose(draw: Draw, x: Array) -> Array:
    return jnp.transpose(x, draw.random.permutation(x.ndim))


def product(draw: Draw, x: Array) -> Array:
    """A product with a value whose first dimension is as long as the last of this one."""
    for n in draw.random.permutation(len(draw.values)):
        y = draw.values[n]
        if y.ndim and y.dtype == x.dtype and x.shape[-1] == y.shape[0] and x.ndim + y.ndim <= 5:
            return factors(draw, x, y)
    return x


def factors(draw: Draw, x: Array, y: Array) -> Array:
    if draw.kind != "values":
        return jnp.tanh(jnp.tensordot(x, y, 1))
    return small(jnp.tensordot(signs(arithmetic(x)), signs(arithmetic(y)), 1))


def signs(x: Array) -> Array:
    """-1, 0 and 1, of real and of imaginary parts: sums of 32 products are exact in each type."""
    parts = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return lax.complex(jnp.sign(x.real), jnp.sign(x.imag)) if parts else jnp.sign(x)


def gram(draw: Draw, x: Array) -> Array:
    return jnp.einsum("...ij,...kj->...ik", x, x)[..., :8] if x.ndim > 1 else x


def taken(draw: Draw, x: Array) -> Array:
    axis = draw.axis(x)
    rows = draw.random.integers(-2, x.shape[axis] + 2, draw.one([4, 7, 8, 16]))
    mode = draw.one(["clip", "wrap", "fill"])
    filled = {"fill_value": 1} if mode == "fill" else {}
    return jnp.take(x, rows, axis=axis, mode=mode, **filled)


def taken_by_value(draw: Draw, x: Array) -> Array:
    return x[draw.indices(draw.one([5, 8]), x.shape[0])]


def taken_along(draw: Draw, x: Array) -> Array:
    axis = draw.axis(x)
    return jnp.take_along_axis(x, jnp.argsort(real(x), axis=axis), axis=axis)


def put(draw: Draw, x: Array) -> Array:
    x = arithmetic(x)
    count = min(8, x.shape[0])
    end = x.shape[0] + draw.one([0, 2])
    rows = draw.indices(count, end) if draw.chance(0.5) else draw.random.integers(0, end, count)
    mode = draw.one(["drop", "clip"])
    match draw.below(3):
        case 0:
            return small(x.at[rows].add(x[:count], mode=mode))
        case 1:
            return x.at[draw.random.permutation(x.shape[0])[:count]].set(x[:count])
    return real(x).at[rows].max(real(x)[:count], mode=mode)


def segments(draw: Draw, x: Array) -> Array:
    x = arithmetic(x)
    return small(jax.ops.segment_sum(x, draw.indices(x.shape[0], 9), 8))


def joined(draw: Draw, x: Array) -> Array:
    axis = draw.axis(x)
    return jnp.concatenate([x, jnp.flip(x, axis)], axis=axis) if x.shape[axis] < 64 else x


def padded(draw: Draw, x: Array) -> Array:
    axis = draw.axis(x)
    widths = [(0, 0)] * x.ndim
    widths[axis] = draw.below(4), draw.below(5)
    return jnp.pad(x, widths, mode=draw.one(["constant", "edge", "wrap"]))


def spread(draw: Draw, x: Array) -> Array:
    """Holes between the elements."""
    axis = draw.axis(x)
    widths = [(0, 0, 0)] * x.ndim
    # No negative padding below: XLA's partitioner ends the process where the axis is sharded.
    widths[axis] = (draw.below(3), draw.below(3), 1)
    return lax.pad(x, jnp.zeros((), x.dtype), widths) if x.shape[axis] < 40 else x


def part(draw: Draw, x: Array) -> Array:
    axis = draw.axis(x)
    begin, end = sorted(draw.below(x.shape[axis] + 1) for _ in range(2))
    return lax.slice_in_dim(x, begin, end, draw.one([1, 1, 2, 3]), axis)


def part_from(draw: Draw, x: Array) -> Array:
    axis = draw.axis(x)
    return lax.dynamic_slice_in_dim(x, draw.index(7), max(1, x.shape[axis] // 2), axis)


def overwritten(draw: Draw, x: Array) -> Array:
    axis = draw.axis(x)
    half = lax.slice_in_dim(x, 0, max(1, x.shape[axis] // 2), axis=axis)
    return lax.dynamic_update_slice_in_dim(x, jnp.flip(half, axis), draw.index(7), axis)


def flat(draw: Draw, x: Array) -> Array:
    return x.reshape(-1)


def folded(draw: Draw, x: Array) -> Array:
    return x.reshape(draw.one([(8, -1), (-1, 4), (2, -1, 2)])) if x.size % 8 == 0 else x


def wider(draw: Draw, x: Array) -> Array:
    return jnp.broadcast_to(x[..., None], (*x.shape, 8)) if x.ndim < 3 else x


def chosen(draw: Draw, x: Array) -> Array:
    return jnp.where(real(x) > 0, x, jnp.flip(x, axis=draw.axis(x)))


def diagonal(draw: Draw, x: Array) -> Array:
    return jnp.diagonal(x, axis1=0, axis2=1) if x.ndim > 1 else jnp.diag(x)


def triangle(draw: Draw, x: Array) -> Array:
    return jnp.tril(x, draw.below(3) - 1) if x.ndim > 1 else x


def constrained(draw: Draw, x: Array) -> Array:
    return lax.with_sharding_constraint(x, draw.sharding(x.shape, uneven=draw.chance(0.4)))


def converted(draw: Draw, x: Array) -> Array:
    wide = WIDE_TYPES if jax.config.jax_enable_x64 else ()
    return real(x).astype(draw.one((*EXACT_TYPES, *wide)))


def recast(draw: Draw, x: Array) -> Array:
    """Bits as whole numbers, and counted."""
    if x.dtype in (jnp.bool_, jnp.int8, jnp.uint8) or x.dtype.kind == "c":
        return x
    bits = lax.bitcast_convert_type(x, f"uint{x.dtype.itemsize * 8}")
    return lax.population_count(bits).astype(jnp.int32)


def rounded(draw: Draw, x: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.reduce_precision(x, exponent_bits=5, mantissa_bits=draw.one([1, 4]))


def pooled(draw: Draw, x: Array) -> Array:
    window = [1] * x.ndim
    window[draw.axis(x)] = 3
    x = real(arithmetic(x))
    if draw.chance(0.5):
        return small(
            lax.reduce_window(x, np.zeros((), x.dtype)[()], lax.add, window, [1] * x.ndim, "SAME")
        )
    least = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return lax.reduce_window(x, np.asarray(least, x.dtype)[()], lax.max, window, window, "SAME")


def convolved(draw: Draw, x: Array) -> Array:
    if x.ndim != 3 or x.dtype != jnp.float32:
        return x
    kernel = jnp.sign(jnp.arange(4 * x.shape[1] * 3) % 3 - 1.0).reshape(4, x.shape[1], 3)
    return small(lax.conv_general_dilated(x, kernel, (draw.one([1, 2]),), "SAME"))


def random_bits(draw: Draw, x: Array) -> Array:
    key = jax.random.fold_in(jax.random.key(draw.below(100)), draw.index(5))
    return x + (jax.random.bits(key, x.shape, jnp.uint8) % 3).astype(x.dtype)


def shuffled(draw: Draw, x: Array) -> Array:
    return jax.random.permutation(jax.random.key(draw.below(100)), x, axis=draw.axis(x))


def found(draw: Draw, x: Array) -> Array:
    return jnp.searchsorted(jnp.sort(real(x).reshape(-1)), jnp.arange(8).astype(real(x).dtype))


def one_hot(draw: Draw, x: Array) -> Array:
    return jax.nn.one_hot(real(x).astype(jnp.int32), 8) if x.ndim < 3 else x


def custom_reduction(draw: Draw, x: Array) -> Array:
    """A reduction that is none of those XLA knows: the largest number, with its place."""
    axis = draw.axis(x)
    places = lax.broadcasted_iota(jnp.int32, x.shape, axis)

    def larger(a: Any, b: Any) -> Any:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    numbers = real(x).astype(jnp.int32)
    least = np.int32(-(2**31)), np.int32(2**31 - 1)
    return lax.reduce((numbers, places), least, larger, (axis,))[draw.below(2)]


# Operations that hold others.


def inner(draw: Draw, x: Array, closes: bool = True, mapped: str | None = None) -> Body:
    """A few operations on an array like ``x``, with results like it.

    ``closes``: also over outer values. ``mapped``: the axis of the mesh that a `vmap` around it has.
    """
    steps = [draw.one(within(draw)) for _ in range(1 + draw.below(3))]
    seed, outer = draw.below(1 << 30), list(draw.values)
    outer = outer if closes and draw.chance(0.5) else []

    def body(y: Array) -> Array:
        inside = Draw(seed, draw.mesh, draw.kind)
        inside.depth, inside.values = draw.depth + 1, [*outer, y]
        inside.taken = draw.taken if mapped is None else (*draw.taken, mapped)
        for step in steps:
            z = apply(inside, step, y)
            if z.shape == y.shape:
                y = (z if y.dtype.kind == "c" else real(z)).astype(y.dtype)
        return y

    return body


def within(draw: Draw) -> tuple[Operation, ...]:
    """What may stand within an operation. Most has results of the shape of its argument."""
    if draw.kind == "values":
        plain, holding = PLAIN, (loop_until, *HOLDING)
    else:
        plain, holding = (*MOVING, softmax, normalized, sums_so_far, bent), HOLDING
    return plain if draw.depth >= DEEPEST else (*plain, *holding, *SHARDED)


def apply(draw: Draw, operation: Operation, x: Array) -> Array:
    """The operation of ``x``; of scalars, and where there are no elements, one that knows them."""
    if not x.ndim:
        return x * 2 if draw.kind == "values" else jnp.sin(x)
    return (operation if x.size else draw.one(MOVING))(draw, x)


def counted_loop(draw: Draw, x: Array) -> Array:
    body = inner(draw, x)
    return lax.fori_loop(0, draw.one([1, 3]), lambda _, y: body(y), x)


def loop_until(draw: Draw, x: Array) -> Array:
    """A loop whose end hangs on values of all devices."""
    body, most = inner(draw, x), draw.one([3, 5])

    def going(carry: Any) -> Array:
        count, y = carry
        return (count < most) & (jnp.sum(real(y) > 0) >= 0) & (jnp.max(jnp.abs(real(y) > 5)) < 1)

    return lax.while_loop(going, lambda c: (c[0] + 1, body(c[1])), (draw.index(3), x))[1]


def scanned(draw: Draw, x: Array) -> Array:
    if x.dtype == jnp.bool_ or not x.shape[0]:
        return x
    body = inner(draw, x[0])

    def step(carry: Array, row: Array) -> tuple[Array, Array]:
        carry = small(body(carry) + row)
        return carry, carry + carry

    last, rows = lax.scan(step, jnp.zeros_like(x[0]), x, reverse=draw.chance(0.3))
    return last if draw.chance(0.5) else small(rows)


def branched(draw: Draw, x: Array) -> Array:
    bodies = [inner(draw, x) for _ in range(draw.one([2, 3]))]
    return lax.switch(draw.index(len(bodies)), bodies, x)


def branched_rows(draw: Draw, x: Array) -> Array:
    body = inner(draw, x[0]) if x.ndim > 1 else lambda row: row
    return jax.vmap(lambda row: lax.cond(real(row.reshape(-1)[0]) > 0, body, lambda r: r, row))(x)


def by_rows(draw: Draw, x: Array) -> Array:
    if x.ndim < 2:
        return x
    fit = [
        n
        for n in draw.mesh.axis_names
        if n not in draw.taken and x.shape[0] % draw.mesh.shape[n] == 0
    ]
    name = draw.one(fit) if fit and draw.chance(0.7) else None
    return jax.vmap(inner(draw, x[0], mapped=name), spmd_axis_name=name)(x)


def called(draw: Draw, x: Array) -> Array:
    return jax.jit(inner(draw, x))(x)


def remade(draw: Draw, x: Array) -> Array:
    return jax.checkpoint(inner(draw, x))(x)


def own_gradient(draw: Draw, x: Array) -> Array:
    body = jax.custom_vjp(inner(draw, x, closes=False))
    body.defvjp(lambda y: (body(y), y), lambda kept, g: (g * jnp.cos(kept),))
    return body(x)


def by_shard(draw: Draw, x: Array) -> Array:
    """Collectives that the program itself calls, on parts that it names."""
    spec = draw.spec(x.shape)
    axis = next((d for d, names in enumerate(spec) if names is not None), None)
    if axis is None or x.dtype == jnp.bool_:
        return x
    name = spec[axis]
    size = int(np.prod([draw.mesh.shape[n] for n in np.atleast_1d(name)]))
    shift = [(n, (n + 1) % size) for n in range(size)]
    gaps = [pair for pair in shift if pair[0] != 1]
    kept = small if draw.kind == "values" else jnp.tanh
    way = draw.one(
        ["sum", "shift", "gaps", "gather", "exchange", "scatter", "index", "loop", "branch"]
    )

    def body(y: Array) -> Array:
        even = y.shape[axis] % size == 0
        match way:
            case "shift" | "gaps":
                return lax.ppermute(y, name, shift if way == "shift" else gaps)
            case "gather":
                whole = lax.all_gather(y, name, axis=axis, tiled=True)
                return lax.slice_in_dim(jnp.flip(whole, axis), 0, y.shape[axis], axis=axis)
            case "exchange" if even:
                return lax.all_to_all(y, name, axis, axis, tiled=True)
            case "scatter" if even:
                parts = lax.psum_scatter(y, name, scatter_dimension=axis, tiled=True)
                return kept(jnp.concatenate([parts] * size, axis))
            case "index":
                return kept(y + lax.axis_index(name).astype(y.dtype))
            case "loop":
                return lax.fori_loop(0, 3, lambda _, v: kept(v + lax.ppermute(v, name, shift)), y)
            case "branch":
                first = lax.axis_index(name) % 2 == 0
                return lax.cond(first, lambda v: v, lambda v: jnp.flip(v, axis), y)
        return kept(y + lax.psum(y, name))

    return jax.shard_map(body, mesh=draw.mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


# Operations on float32 that have gradients, and those that round.


def softmax(draw: Draw, x: Array) -> Array:
    return jax.nn.softmax(x, axis=draw.axis(x))


def normalized(draw: Draw, x: Array) -> Array:
    axis = draw.axis(x)
    mean, variance = x.mean(axis=axis, keepdims=True), x.var(axis=axis, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-2)


def mean(draw: Draw, x: Array) -> Array:
    return x.mean(axis=draw.axis(x))


def highest(draw: Draw, x: Array) -> Array:
    return x.max(axis=draw.axis(x))


def sums_so_far(draw: Draw, x: Array) -> Array:
    return jnp.tanh(jnp.cumsum(x, axis=draw.axis(x)))


def added_rows(draw: Draw, x: Array) -> Array:
    count = min(8, x.shape[0])
    return x.at[draw.random.integers(0, x.shape[0], count)].add(x[:count] * 0.5)


def bent(draw: Draw, x: Array) -> Array:
    return draw.one([jnp.tanh, jnp.sin, lambda y: y * y, lambda y: jnp.where(y > 0, y, y * 0.1)])(x)


def recurrent(draw: Draw, x: Array) -> Array:
    body = inner(draw, x[0]) if x.ndim > 1 else jnp.sin

    def step(carry: Array, row: Array) -> tuple[Array, Array]:
        carry = jnp.tanh(body(carry) * 0.5 + row)
        return carry, carry * 2

    step = jax.checkpoint(step) if draw.chance(0.5) else step
    last, rows = lax.scan(step, jnp.zeros_like(x[0]), x)
    return last if draw.chance(0.5) else rows


def pooled_highest(draw: Draw, x: Array) -> Array:
    window = [1] * x.ndim
    window[draw.axis(x)] = 2
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "SAME")


def filtered(draw: Draw, x: Array) -> Array:
    if x.ndim != 3:
        return x
    kernel = jnp.sin(jnp.arange(4.0 * x.shape[1] * 3)).reshape(4, x.shape[1], 3)
    return jnp.tanh(lax.conv_general_dilated(x, kernel, (draw.one([1, 2]),), "SAME"))


def transformed(draw: Draw, x: Array) -> Array:
    axis = draw.axis(x)
    if draw.chance(0.5):
        return jnp.fft.fft(x, axis=axis).imag / x.shape[axis] ** 0.5
    return jnp.fft.irfft(jnp.fft.rfft(x, axis=axis) * 0.5, axis=axis, n=x.shape[axis])


def square(draw: Draw, x: Array) -> Array:
    """Positive definite matrices, of 8 rows."""
    rows = jnp.resize(x, (*x.shape[:-2], 8, 8)) if x.ndim > 1 else jnp.resize(x, (8, 8))
    return jnp.einsum("...ij,...kj->...ik", rows, rows) * 0.1 + jnp.eye(8)


def root(draw: Draw, x: Array) -> Array:
    return jnp.linalg.cholesky(square(draw, x))


def solved(draw: Draw, x: Array) -> Array:
    matrix = square(draw, x)
    if draw.chance(0.5):
        return jnp.linalg.solve(matrix, jnp.flip(matrix, -1))
    return lax.linalg.triangular_solve(matrix, jnp.flip(matrix, -1), left_side=True, lower=True)


def reflected(draw: Draw, x: Array) -> Array:
    return jnp.linalg.qr(square(draw, x))[1]


def spectrum(draw: Draw, x: Array) -> Array:
    matrix = square(draw, x)
    return draw.one([jnp.linalg.eigvalsh, partial(jnp.linalg.svd, compute_uv=False)])(matrix)


def normal(draw: Draw, x: Array) -> Array:
    key = jax.random.key(draw.below(100))
    return x + draw.one([jax.random.normal, jax.random.uniform])(key, x.shape)


def segment_sums(draw: Draw, x: Array) -> Array:
    return jax.ops.segment_sum(x, draw.random.integers(0, 8, x.shape[0]), 8)


MOVING: tuple[Operation, ...] = (
    flip, roll, transpose, constrained, constrained, joined, padded, part, flat,
)  # fmt: skip
HOLDING: tuple[Operation, ...] = (
    counted_loop, branched, branched_rows, by_rows, called, remade,
)  # fmt: skip
SHARDED: tuple[Operation, ...] = (by_shard,)
# Most of these keep the shape of their argument.
PLAIN: tuple[Operation, ...] = (
    flip, roll, rolled_by, transpose, chosen, constrained, constrained, cumulative, ordered, order, put,
    taken_along, triangle, overwritten, rounded, shuffled, random_bits, sorted_together,
)  # fmt: skip
VALUES: tuple[Operation, ...] = (
    *MOVING, *HOLDING, *SHARDED, *SHARDED, *PLAIN, loop_until, scanned, total, extreme, truth, associative,
    largest, where_largest, product, product, taken, taken_by_value, segments, spread, part_from, folded,
    wider, diagonal, converted, converted, recast, pooled, convolved, found, one_hot, custom_reduction,
)  # fmt: skip
GRADIENTS: tuple[Operation, ...] = (
    *MOVING, called, remade, branched, branched_rows, by_rows, *SHARDED, own_gradient, recurrent,
    recurrent, softmax, normalized, mean, highest, sums_so_far, added_rows, bent, pooled_highest, filtered,
    product, product, gram, taken, taken_by_value, segment_sums, folded, wider, ordered, part_from,
    overwritten,
)  # fmt: skip
FLOATS: tuple[Operation, ...] = (
    *GRADIENTS, *(transformed, root, solved, reflected, spectrum, normal) * 3,
)  # fmt: skip
OPERATIONS = {"values": VALUES, "gradients": GRADIENTS, "floats": FLOATS}
