"""Selection over the devices of a mesh axis: the k-th largest of values that no device has all of.

`kth_largest` is exact and moves no values. They get integer keys in the same order, and the key that is
looked for is found a byte at a time, from the highest: every device counts how many of its candidates have
each value of the next byte, one sum over the axis adds up the 256 counts, and the byte follows from them.
That is four sums of 256 integers for f32, one collective in a loop, however many values there are (radix
selection: Alabi, Blanchard, Gordon, Steinbach, "Fast k-selection algorithms for graphics processing units",
2012).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util

from stretto import varying

source_info_util.register_exclusion(__file__)

AxisName = Any
BITS = 8  # of a round
BINS = 1 << BITS


def kth_largest(
    x: jax.Array, k: int | jax.Array, axis_name: AxisName, *, where: jax.Array | None = None
) -> jax.Array:
    """The ``k``-th largest value of ``x`` over all devices of the axis: a scalar of its type, on all of them.

    To be called inside ``shard_map`` (or wherever ``axis_name``, a name or a tuple of names, is bound), on
    any platform. ``x`` is an array of any shape, of integers, floats or bool; each device has its own values,
    as many as the others. ``where``, of the same shape, says which of them count; without it all do. Equal
    values count as often as they are there: of 5, 5 and 3 the first and the second largest are 5.

    The order is that of ``jnp.sort``: NaN is larger than all numbers, all NaNs are equal, and so are both
    zeros (the result is 0 then, not -0). ``k`` is counted from 1, a Python integer or a scalar of integer
    type, the same on all devices of the axis. A Python integer below 1 or, where all values count, above
    their number raises ``ValueError``. Otherwise the values are taken to lie between infinitely many of the
    highest of the type and infinitely many of the lowest, infinities for types that have them: so ``k`` below
    1 gives the highest, and ``k`` above the number of values that count the lowest.

    Counts are int32, or int64 under ``jax_enable_x64``: 2**31 values or more raise ``ValueError`` without it.
    Complex numbers have no order: ``TypeError``.

    Differentiable in ``x``: as with ``jnp.max``, all values that equal the result share its gradient.
    """
    x = jnp.asarray(x)
    if x.dtype != bool and not (
        jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.floating)
    ):
        raise TypeError(
            f"kth_largest has no order for {x.dtype}: it takes integers, floats and bool"
        )
    if where is not None and (jnp.shape(where) != x.shape or jnp.asarray(where).dtype != bool):
        raise ValueError(
            f"where is {jnp.asarray(where).dtype}{list(jnp.shape(where))}, not bool{list(x.shape)} like x"
        )
    total = x.size * int(lax.psum(1, axis_name))
    counter = jnp.int64 if jax.config.read("jax_enable_x64") else jnp.int32
    if total > jnp.iinfo(counter).max:
        raise ValueError(
            f"kth_largest counts {total} values over {axis_name!r}, more than int32 holds: set jax_enable_x64"
        )
    if isinstance(k, int | np.integer):
        if k < 1 or (where is None and k > total):
            raise ValueError(
                f"kth_largest of {total} values over {axis_name!r}: there is no k = {k}"
            )
        k = min(int(k), int(jnp.iinfo(counter).max))
    k = jnp.asarray(k)
    if k.shape != () or not jnp.issubdtype(k.dtype, jnp.integer):
        raise TypeError(f"k is {k.dtype}{list(k.shape)}, not one integer")
    if where is None:
        where = jnp.ones(x.shape, bool)
    return _kth_largest(axis_name, x, k.astype(counter), where)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _kth_largest(axis_name: AxisName, x: jax.Array, k: jax.Array, where: jax.Array) -> jax.Array:
    keys = _keys(x).reshape(-1)
    counted = where.reshape(-1)
    width = keys.dtype.itemsize * 8
    rounds = width // BITS

    def one_round(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        found, left, enough = carry
        shift = (width - BITS * (i + 1)).astype(keys.dtype)
        # Candidates have the bytes that are found already. Two shifts: one by all bits is undefined.
        same = (keys >> shift) >> BITS == (found >> shift) >> BITS if rounds > 1 else True
        byte = (keys >> shift) & (BINS - 1)
        counts = (
            jnp.zeros(BINS, k.dtype)
            .at[byte.astype(jnp.int32)]
            .add((counted & same).astype(k.dtype))
        )
        counts = lax.psum(counts, axis_name)
        from_top = jnp.cumsum(counts[::-1])[::-1]  # how many have this byte or a higher one
        enough &= from_top[0] >= left  # false in the first round or never
        at = jnp.maximum(jnp.sum(from_top >= left) - 1, 0)
        left -= from_top[at] - counts[at]
        return found | (at.astype(keys.dtype) << shift), left, enough

    summed = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    axes = (varying.axes_of(x, where) - set(summed)) | varying.axes_of(k)
    start = varying.over((jnp.zeros((), keys.dtype), k, jnp.array(True)), axes)
    found, _, enough = lax.fori_loop(0, rounds, one_round, start)
    lowest, highest = _ends(x.dtype)
    value = _values(found, x.dtype)
    return jnp.where(k < 1, highest, jnp.where(enough, value, lowest))


@_kth_largest.defjvp
def _tangent(
    axis_name: AxisName, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, Any]:
    x, k, where = primals
    value = _kth_largest(axis_name, x, k, where)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return value, np.zeros((), jax.dtypes.float0)
    equal = where & ((x == value) | (jnp.isnan(x) & jnp.isnan(value)))
    ties = jnp.maximum(lax.psum(jnp.sum(equal, dtype=k.dtype), axis_name), 1)
    moved = lax.psum(jnp.sum(jnp.where(equal, tangents[0], 0)), axis_name)
    return value, (moved / ties.astype(x.dtype)).astype(x.dtype)


def _is_small_float(dtype: Any) -> bool:
    """Whether a type is a float of at most a byte: each has rules of its own for zeros, NaN and signs."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits <= 8


def _keys(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the values, of as many whole bytes as these have."""
    if x.dtype == bool:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x.astype(jnp.uint8) if jnp.iinfo(x.dtype).bits < 8 else x
    if jnp.issubdtype(x.dtype, jnp.integer):
        wide = x.astype(jnp.int8) if jnp.iinfo(x.dtype).bits < 8 else x
        width = jnp.iinfo(wide.dtype).bits
        key = lax.bitcast_convert_type(wide, f"uint{width}")
        return key ^ key.dtype.type(1 << (width - 1))
    if _is_small_float(x.dtype):
        return jnp.asarray(_table(x.dtype)[0])[_bits_of_small(x).astype(jnp.int32)]
    info = jnp.finfo(x.dtype)
    bits = lax.bitcast_convert_type(x, f"uint{info.bits}")
    sign = bits.dtype.type(1 << (info.bits - 1))
    infinity = np.array(np.inf, x.dtype).view(bits.dtype)[()]
    size = bits & ~sign
    # Compared as integers: processors that take denormal floats for zeros would find them equal.
    ordered = jnp.where(bits >= sign, ~bits, bits | sign)
    ordered = jnp.where(size == 0, sign, ordered)
    return jnp.where(size > infinity, ~bits.dtype.type(0), ordered)


def _values(key: jax.Array, dtype: Any) -> jax.Array:
    """The values that have these keys: the inverse of `_keys`, but for NaNs and zeros."""
    if dtype == np.dtype(bool):
        return key.astype(bool)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return key.astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        width = key.dtype.itemsize * 8
        wide = lax.bitcast_convert_type(key ^ key.dtype.type(1 << (width - 1)), f"int{width}")
        return wide.astype(dtype)
    if _is_small_float(dtype):
        values = jnp.asarray(_table(dtype)[1])
        return values[key.astype(jnp.int32)].astype(dtype)
    sign = key.dtype.type(1 << (jnp.finfo(dtype).bits - 1))
    bits = jnp.where(key >= sign, key ^ sign, ~key)
    value = lax.bitcast_convert_type(bits, dtype)
    return jnp.where(key == ~key.dtype.type(0), jnp.array(np.nan, dtype), value)


def _bits_of_small(x: jax.Array) -> jax.Array:
    bits = jnp.finfo(x.dtype).bits
    return lax.bitcast_convert_type(x, "uint8" if bits == 8 else f"uint{bits}")


def _table(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of a float of at most a byte: the key of each pattern of bits, and the value of each key, as f32."""
    bits = jnp.finfo(dtype).bits
    values = np.arange(1 << bits, dtype=np.uint8).view(dtype).astype(np.float32)
    values[values == 0] = 0.0  # -0
    keys = np.zeros(1 << bits, np.uint8)
    distinct = np.unique(values)  # ascending, NaN last, once
    keys[:] = np.searchsorted(distinct, values)
    return keys, np.concatenate([distinct, np.repeat(distinct[-1:], BINS - len(distinct))])


def _ends(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest value of a type that is not NaN."""
    if dtype == np.dtype(bool):
        return np.array(False), np.array(True)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return np.array(info.min, dtype), np.array(info.max, dtype)
    with np.errstate(all="ignore"):
        highest = np.array(np.inf).astype(dtype)
        lowest = np.array(-np.inf).astype(dtype)
    if not np.isinf(highest.astype(np.float64)):
        highest = np.array(jnp.finfo(dtype).max, dtype)
    if not np.isinf(lowest.astype(np.float64)):
        lowest = np.array(jnp.finfo(dtype).min, dtype)
    return lowest, highest
