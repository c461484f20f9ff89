"""Embedding and cross-entropy with the vocabulary divided over a mesh axis: a model's largest layers.

Device i of the axis holds rows ``i * n … i * n + n - 1`` of the embedding and of the head, n the
vocabulary's size by the number of devices. In a pipeline that axis is the stages': the head's parameters,
their optimizer's state and its compute are then divided equally, where they were all the last stage's
(Vocabulary Parallelism, arXiv 2411.05288; here its form with one barrier, in which the input's gradient is
made in the forward pass).

Both functions are to be called inside ``shard_map``, are plain JAX and run on any platform, with and without
``check_vma``. What is said to be the same on all devices must be; their results are.
"""

from __future__ import annotations

import dataclasses
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


def vocab_parallel_embedding(
    ids: jax.Array, table_shard: jax.Array, axis_name: AxisName
) -> jax.Array:
    """The rows ``ids`` of a table that is divided by rows over the axis, on all of its devices.

    ``ids`` is an array of integers, the same on all devices, ``table_shard`` [n, width] their own rows.
    Gives an array [*ids.shape, width] of the table's type. An id without a row, below 0 or beyond the last,
    gives zeros and has no gradient. Raises ``TypeError`` or ``ValueError`` for other types and shapes.

    One sum over the axis. Its gradient sums up in f32 what rows get; going back, what devices have of the
    result's gradient is summed over the axis, unless they have the same of it.
    """
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids are {ids.dtype}, not integers")
    if table_shard.ndim != 2 or not jnp.issubdtype(table_shard.dtype, jnp.floating):
        raise ValueError(
            f"table_shard is {table_shard.dtype}{list(table_shard.shape)}, not rows of floats"
        )
    checked = _is_checked(axis_name)
    axes = varying.axes_of(ids, table_shard)
    table_shard = varying.over(table_shard, axes | (_names(axis_name) if checked else frozenset()))
    return _embedding(axis_name, checked, ids, table_shard)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _embedding(axis_name: AxisName, checked: bool, ids: jax.Array, table: jax.Array) -> jax.Array:
    rows, own = _own_rows(ids, table.shape[0], axis_name)
    return lax.psum(jnp.where(own[..., None], table[rows], 0), axis_name)


def _embedding_forward(
    axis_name: AxisName, checked: bool, ids: jax.Array, table: jax.Array
) -> tuple[jax.Array, Any]:
    return _embedding(axis_name, checked, ids, table), (ids, table)


def _embedding_backward(
    axis_name: AxisName, checked: bool, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[Any, jax.Array]:
    ids, table = kept
    if not checked:
        gradient = lax.psum(gradient, axis_name)
    rows, own = _own_rows(ids, table.shape[0], axis_name)
    rows = jnp.where(own, rows, table.shape[0])
    wide = jnp.promote_types(jnp.float32, table.dtype)
    sums = jnp.zeros(table.shape, wide).at[rows].add(gradient.astype(wide), mode="drop")
    return np.zeros(ids.shape, jax.dtypes.float0), sums.astype(table.dtype)


_embedding.defvjp(_embedding_forward, _embedding_backward)


@dataclasses.dataclass(frozen=True)
class _Form:
    """What a cross-entropy is made of, beside its arrays."""

    axis_name: AxisName
    checked: bool
    vocab_size: int
    z_loss: float
    smoothing: float
    ignored: int | None
    recompute: bool


def vocab_parallel_cross_entropy(
    x: jax.Array,
    head_shard: jax.Array,
    labels: jax.Array,
    axis_name: AxisName,
    *,
    vocab_size: int | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_label: int | None = -100,
    recompute: bool = False,
) -> jax.Array:
    """The cross-entropy of each token, of logits that no device has all of.

    ``x`` [..., width] is what the head is applied to, ``labels`` [...] integers, both the same on all
    devices of the axis. ``head_shard`` [n, width] are the device's own rows of the head: logits are ``x @
    head.T``. Gives f32[...], the same on all devices:

        lse - (1 - label_smoothing) * logits[label] - label_smoothing * mean(logits) + z_loss * lse**2

    with ``lse = logsumexp(logits)``. A token with ``ignore_label`` has loss and gradient 0; one with any
    other label that is not of the vocabulary has NaN. The vocabulary has ``vocab_size`` words; rows of the
    head beyond are padding, which has no logit and gets no gradient. Products are of ``x``'s type and
    summed in f32 (in f64 if a type is f64), and so is the rest.

    Two collectives: a maximum (of every device's own maximum and sum of exponentials, [devices, 2,
    tokens]), and one sum, of the labels' logits and the gradient of ``x``, [tokens, width + 1]. The
    backward pass has none under ``check_vma``; without it, where devices may have different gradients of a
    result that is the same on all, these are summed, a number a token. It has one product, for the gradient
    of the head, from that of the own logits, [tokens, n] of ``x``'s type, which is kept; with ``recompute``
    it is not kept but computed again.

    Raises ``ValueError`` or ``TypeError`` for shapes and types that do not fit together.
    """
    if head_shard.ndim != 2 or x.ndim < 1 or x.shape[-1] != head_shard.shape[1]:
        raise ValueError(
            f"x {list(x.shape)} and head_shard {list(head_shard.shape)} have no width in common"
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(f"labels {list(labels.shape)} are not those of x {list(x.shape)}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels are {labels.dtype}, not integers")
    if not jnp.issubdtype(x.dtype, jnp.floating) or not jnp.issubdtype(
        head_shard.dtype, jnp.floating
    ):
        raise TypeError(f"x is {x.dtype} and head_shard {head_shard.dtype}, not floats")
    rows = head_shard.shape[0] * int(lax.psum(1, axis_name))
    size = rows if vocab_size is None else vocab_size
    if not 1 <= size <= rows:
        raise ValueError(f"vocab_size is {size}, and the head has {rows} rows")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}, not within 0 and 1")
    checked = _is_checked(axis_name)
    own = _names(axis_name) if checked else frozenset()
    axes = varying.axes_of(x, head_shard, labels)
    form = _Form(axis_name, checked, size, z_loss, label_smoothing, ignore_label, recompute)
    tokens = int(np.prod(labels.shape))
    losses = _cross_entropy(
        form,
        varying.over(x, axes - own).reshape(tokens, x.shape[-1]),
        varying.over(head_shard, axes | own),
        varying.over(labels, axes - own).reshape(tokens),
    )
    return losses.reshape(labels.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(form: _Form, x: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    return _passed(form, x, head, labels)[0]


def _cross_entropy_forward(
    form: _Form, x: jax.Array, head: jax.Array, labels: jax.Array
) -> tuple[jax.Array, Any]:
    losses, lse, dlogits, dx = _passed(form, x, head, labels)
    kept = lse if form.recompute else dlogits
    return losses, (x, head, labels, kept, dx.astype(x.dtype))


def _cross_entropy_backward(
    form: _Form, kept: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
    x, head, labels, dlogits, dx = kept
    if form.recompute:
        dlogits = _dlogits(form, _logits(form, x, head), dlogits, labels).astype(x.dtype)
    if not form.checked:
        gradient = lax.psum(gradient, form.axis_name)
    dx = (gradient[:, None] * dx.astype(gradient.dtype)).astype(x.dtype)
    if not form.checked or _names(form.axis_name) & varying.axes_of(x):
        # What devices have of the gradient is summed where x became the same on all of them.
        dx = dx / int(lax.psum(1, form.axis_name))
    dhead = lax.dot_general(
        dlogits,
        (gradient[:, None] * x.astype(gradient.dtype)).astype(x.dtype),
        (((0,), (0,)), ((), ())),
        preferred_element_type=gradient.dtype,
    )
    none = np.zeros(labels.shape, jax.dtypes.float0)
    return varying.over(dx, varying.axes_of(x)), dhead.astype(head.dtype), none


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _passed(
    form: _Form, x: jax.Array, head: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Losses, logsumexps, the gradient of the own logits and that of x, of losses with gradient 1."""
    logits = _logits(form, x, head)
    index, devices = lax.axis_index(form.axis_name), int(lax.psum(1, form.axis_name))
    most = jnp.max(logits, axis=1)
    shift = jnp.where(jnp.isfinite(most), most, 0)  # a device may have nothing but padding
    scale = jnp.sum(jnp.exp(logits - shift[:, None]), axis=1)
    # The maximum of what each device writes to a place of its own is all that they have written: with it
    # everybody knows the whole sum of exponentials, and what is summed next is the gradient of x as it will
    # be.
    mine = (jnp.arange(devices) == index)[:, None, None]
    both = lax.pmax(jnp.where(mine, jnp.stack([shift, scale]), -jnp.inf), form.axis_name)
    shifts = jnp.where(both[:, 1] > 0, both[:, 0], -jnp.inf)
    most = jnp.max(shifts, axis=0)
    lse = most + jnp.log(jnp.sum(both[:, 1] * jnp.exp(shifts - most), axis=0))
    dlogits = _dlogits(form, logits, lse, labels)
    dx = lax.dot_general(
        dlogits.astype(x.dtype), head, (((1,), (0,)), ((), ())), preferred_element_type=lse.dtype
    )
    row, own = _own_rows(labels, head.shape[0], form.axis_name)
    wanted = jnp.take_along_axis(logits, row[:, None], axis=1)[:, 0]
    wanted = (1 - form.smoothing) * jnp.where(own, wanted, 0)
    if form.smoothing:
        real = jnp.where(_is_real(form, head.shape[0]), logits, 0)
        wanted += form.smoothing / form.vocab_size * jnp.sum(real, axis=1)
    summed = lax.psum(jnp.concatenate([wanted[:, None], dx], axis=1), form.axis_name)
    losses = lse - summed[:, 0] + form.z_loss * lse**2
    skipped, wrong = _judged(form, labels)
    losses = jnp.where(wrong, jnp.nan, jnp.where(skipped, 0, losses))
    return losses, lse, dlogits.astype(x.dtype), summed[:, 1:]


def _logits(form: _Form, x: jax.Array, head: jax.Array) -> jax.Array:
    """The own logits, -inf for padding: f32[tokens, n], or f64."""
    wide = jnp.promote_types(jnp.float32, jnp.promote_types(x.dtype, head.dtype))
    logits = lax.dot_general(
        x, head.astype(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=wide
    )
    return jnp.where(_is_real(form, head.shape[0]), logits, -jnp.inf)


def _dlogits(form: _Form, logits: jax.Array, lse: jax.Array, labels: jax.Array) -> jax.Array:
    """The gradient of the own logits, of losses with gradient 1."""
    count = logits.shape[1]
    gradient = jnp.exp(logits - lse[:, None]) * (1 + 2 * form.z_loss * lse[:, None])
    if form.smoothing:
        gradient -= jnp.where(_is_real(form, count), form.smoothing / form.vocab_size, 0)
    row, own = _own_rows(labels, count, form.axis_name)
    gradient -= jnp.where((jnp.arange(count) == row[:, None]) & own[:, None], 1 - form.smoothing, 0)
    skipped, wrong = _judged(form, labels)
    return jnp.where(wrong[:, None], jnp.nan, jnp.where(skipped[:, None], 0, gradient))


def _judged(form: _Form, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which labels are to be ignored, and which are none of the vocabulary."""
    outside = (labels < 0) | (labels >= form.vocab_size)
    skipped = jnp.zeros(labels.shape, bool) if form.ignored is None else labels == form.ignored
    return skipped, outside & ~skipped


def _is_real(form: _Form, count: int) -> jax.Array:
    """Which of the own rows are words: bool[n]."""
    return lax.axis_index(form.axis_name) * count + jnp.arange(count) < form.vocab_size


def _own_rows(ids: jax.Array, count: int, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """Which own row an id has, some row if none, and whether it has one."""
    row = ids.astype(jnp.int32) - lax.axis_index(axis_name) * count
    own = (row >= 0) & (row < count)
    return jnp.where(own, row, 0), own


def _names(axis_name: AxisName) -> frozenset[Any]:
    return frozenset(axis_name if isinstance(axis_name, tuple | list) else (axis_name,))


def _is_checked(axis_name: AxisName) -> bool:
    """Whether ``shard_map`` keeps account of what varies over which axes (``check_vma``)."""
    return bool(varying.axes_of(lax.axis_index(axis_name)))
