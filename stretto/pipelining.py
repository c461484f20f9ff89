"""`pipelined`: layers that are divided over a mesh axis, run as a pipeline, as stretto's passes know it.

It is the `lax.scan` that a GPipe pipeline is usually written as, in plain JAX: runs as it stands on any
platform, and on stretto interleaved or in a schedule, as 1F1B, where that is asked for, but for a head that
all devices compute in the loop (docs/pipelines.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util

from stretto import varying

source_info_util.register_exclusion(__file__)


def pipelined(
    layer: Callable[[Any, Any], Any],
    params: Any,
    microbatches: Any,
    axis_name: Any,
    *,
    head: Callable[[Any, Any, Any], Any] | None = None,
    head_params: Any = None,
    targets: Any = None,
    head_on: str = "last",
    checkpoint: bool = False,
) -> Any:
    """All microbatches through all layers, a stage on each device of the axis; to be called in ``shard_map``.

    ``params`` is a tree of arrays [layers of a stage, ...], the device's own: those of stage s are the
    ``s``-th share of all layers, in order. ``layer(weights, x) -> y`` is one layer, with its slice of
    ``params``; ``y`` is a tree of arrays like ``x``. It may communicate over other axes. ``microbatches``
    is a tree of arrays [microbatches, ...], the same on all devices, of which stage 0 takes slice after
    slice. Gives what the last layer makes of each, a tree like ``microbatches``, on all devices.

    With a ``head``, ``head(head_params, y, target) -> results`` is applied to each microbatch, ``target``
    being a slice of ``targets``, a tree of arrays [microbatches, ...], the same on all devices; ``results``
    is a tree of arrays, losses mostly. Then their stacks [microbatches, ...] are given, the same on all
    devices, and not what the last layer makes. ``head_on`` says who computes it:

    - ``"last"``: the last stage. The head must not communicate over the axis.
    - ``"all"``: all devices, together, for the microbatch that left the last stage an iteration before,
      beside their stages. For heads that are divided over the axis, as
      `stretto.nn.vocab_parallel_cross_entropy` is: results must be the same on all devices. ``y`` is given
      to all by one sum over the axis.
    - ``"behind"``: all devices, together, for all microbatches at once, behind the loop, under ``jax.vmap``.
      For the same heads: 1F1B and ZB-H1, which refuse them in the loop, accept this, and compute it a
      microbatch at a time.

    ``checkpoint`` keeps of a stage what it began with, for the backward pass, and computes the rest again.

    M microbatches take M + stages - 1 iterations, one more with ``head_on="all"``. Where a device has no
    microbatch nothing is computed. Differentiable in ``params``, ``microbatches`` and ``head_params``.

    Raises ``ValueError`` for leading sizes that differ, for another ``head_on``, and for a ``layer`` or a
    head of the last stage that closes over traced floats of all devices, where ``shard_map`` has
    ``check_vma``; ``TypeError`` where ``layer`` does not give what it takes.
    """
    count = _leading(microbatches, "microbatches")
    _leading(params, "params")
    if head_on not in ("last", "all", "behind"):
        raise ValueError(f"head_on is {head_on!r}, neither 'last' nor 'all' nor 'behind'")
    if head is None and (targets is not None or head_params is not None):
        raise ValueError("head_params and targets are for a head, and there is none")
    if targets is not None and _leading(targets, "targets") != count:
        raise ValueError(
            f"targets have {_leading(targets, 'targets')} microbatches, not {count} as microbatches have"
        )
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), microbatches)
    _check_layer(layer, params, first)
    stages = int(lax.psum(1, axis_name))
    stage = lax.axis_index(axis_name)
    last = stages - 1
    ring = [(s, (s + 1) % stages) for s in range(stages)]
    # What a device has of its own varies over the axis, and over others as the arguments do.
    own = varying.axes_of(stage)
    given = (params, microbatches, head_params, targets)
    axes = own | varying.axes_of(*jax.tree.leaves(given))
    params, microbatches = varying.over((params, microbatches), axes)

    def zeros(like: Any, over: frozenset[Any] = axes) -> Any:
        return varying.over(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like), over)

    _check_closed_over(layer, own, jax.tree.map(lambda a: a[0], params), zeros(first))

    def stage_of(x: Any) -> Any:
        def step(x: Any, weights: Any) -> tuple[Any, None]:
            return varying.over(layer(weights, x), axes), None

        return lax.scan(step, x, params)[0]

    if checkpoint:
        stage_of = jax.checkpoint(stage_of)

    def at(tree: Any, index: jax.Array) -> Any:
        """The slice of a microbatch; of some where there is none."""
        index = jnp.clip(index, 0, count - 1)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), tree)

    def put(stacks: Any, index: jax.Array, values: Any, there: jax.Array) -> Any:
        index = jnp.clip(index, 0, count - 1)

        def one(stack: jax.Array, value: jax.Array) -> jax.Array:
            updated = lax.dynamic_update_index_in_dim(stack, value, index, 0)
            return jnp.where(there, updated, stack)

        return jax.tree.map(one, stacks, values)

    def from_last(tree: Any) -> Any:
        """What the last stage has, on all."""
        return jax.tree.map(lambda a: lax.psum(jnp.where(stage == last, a, 0), axis_name), tree)

    def one_stage(received: Any, i: jax.Array) -> Any:
        x = jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), at(microbatches, i), received)
        working = (i >= stage) & (i - stage < count)
        return lax.cond(working, stage_of, zeros, x)

    def sent(y: Any) -> Any:
        return jax.tree.map(lambda a: lax.ppermute(a, axis_name, ring), y)

    if head is None or head_on == "behind":

        def passing(carry: Any, i: jax.Array) -> Any:
            received, outputs = carry
            y = one_stage(received, i)
            outputs = put(outputs, i - last, y, (stage == last) & (i >= last))
            return (sent(y), outputs), None

        begin = zeros(first), zeros(microbatches)
        (_, outputs), _ = lax.scan(passing, begin, jnp.arange(count + last))
        outputs = from_last(outputs)
        if head is None:
            return outputs
        return jax.vmap(lambda y, target: head(head_params, y, target))(outputs, targets)

    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), targets)

    def stacks_of(results: Any, over: frozenset[Any]) -> Any:
        return zeros(
            jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype), results), over
        )

    if head_on == "last":
        head_params, targets = varying.over((head_params, targets), axes)
        _check_closed_over(head, own, head_params, zeros(first), zeros(target))
        result = jax.eval_shape(head, head_params, zeros(first), zeros(target))

        def losing(carry: Any, i: jax.Array) -> Any:
            received, results = carry
            y = one_stage(received, i)
            ended = (stage == last) & (i >= last)

            def run(y: Any) -> Any:
                return varying.over(head(head_params, y, at(targets, i - last)), axes)

            found = lax.cond(ended, run, lambda _: zeros(result), y)
            return (sent(y), put(results, i - last, found, ended)), None

        begin = zeros(first), stacks_of(result, axes)
        (_, results), _ = lax.scan(losing, begin, jnp.arange(count + last))
        return from_last(results)

    shared = axes - own
    result = jax.eval_shape(head, head_params, zeros(first, shared), zeros(target, shared))

    def sharing(carry: Any, i: jax.Array) -> Any:
        received, left, results = carry
        ended = i > last  # the same on all devices, which communicate in the head

        def run(left: Any) -> Any:
            found = head(head_params, from_last(left), at(targets, i - stages))
            return varying.over(found, shared)

        found = lax.cond(ended, run, lambda _: zeros(result, shared), left)
        y = one_stage(received, i)
        return (sent(y), y, put(results, i - stages, found, ended)), None

    nothing: Any = (zeros(first), zeros(first), stacks_of(result, shared))
    return lax.scan(sharing, nothing, jnp.arange(count + stages))[0][2]


def _leading(tree: Any, what: str) -> int:
    """The size that all arrays of a tree begin with."""
    sizes = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0 for leaf in jax.tree.leaves(tree)}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(
            f"{what} are not arrays that begin with the same size, 1 or more: {sorted(sizes)}"
        )
    return sizes.pop()


def _check_layer(layer: Callable[[Any, Any], Any], params: Any, x: Any) -> None:
    weights = jax.tree.map(lambda a: a[0], params)
    y = jax.eval_shape(layer, weights, x)

    def text(tree: Any) -> str:
        return str(jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree))

    if text(x) != text(y):
        raise TypeError(f"a layer takes {text(x)} and gives {text(y)}; both must be the same")


def _check_closed_over(function: Callable[..., Any], own: frozenset[Any], *examples: Any) -> None:
    """Check that a function closes over nothing that may be differentiated and is the same on all devices.

    JAX would sum the gradient of such an array over the axis where the array is used: in a branch that not
    all devices take, where the sum waits for devices that never come.
    """
    if not own:
        return
    _, closed_over = jax.closure_convert(function, *examples)
    for value in closed_over:
        if not own <= varying.axes_of(value):
            name = getattr(function, "__name__", str(function))
            raise ValueError(
                f"{name} closes over an array {value.dtype}{list(value.shape)} that is the same on all "
                "devices: give it in params, or head_params"
            )
