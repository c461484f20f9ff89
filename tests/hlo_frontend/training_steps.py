"""Steps of training over a pipeline, as users write them, drawn at random or chosen.

A `Draw` says all about a step: its sizes, its mesh, how what is on padding is masked, what is computed again
in the backward pass, how outputs are collected, which loss stands behind the loop, and where its gradient is
taken. `program` writes it, for a device or, partitioned by XLA, for an array of all stages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from frontend_support import P, mesh
from jax import lax
from jax.sharding import NamedSharding


@dataclass(frozen=True)
class Draw:
    """``axes``: of the mesh; x is that of stages, d of data and y of tensors; each but x has two devices.
    ``mask``: ``cond`` runs nothing on padding, ``where`` runs zeros with zeros for weights, ``nothing`` runs
    what is there.
    ``again``: what is under `jax.checkpoint`: a ``layer``, a ``stage``, or a whole ``iteration``
    (``barriers``: with those that JAX puts there by default); ``products``: a stage, with
    a policy that keeps what products give. ``collect``: ``put`` puts outputs away by microbatch, ``scan``
    cuts them from what the scan gives. ``inside``: whether the gradient is taken on each device.
    ``head``: where the loss is computed, ``behind`` the loop for all microbatches at once, or in it, on the
    last stage, under a ``cond``, or with its input masked by ``where``, or with a mask on the ``loss`` alone,
    or the loss ``times`` that mask.
    ``accuracy``: whether the share of rows whose class is the right one is given beside the loss.
    ``shared``: how all stages get the outputs of the last one, for a head behind the loop that all of them
    compute: by ``psum`` or by ``gather``; empty where they do not. ``alike``: whether all then give the same
    loss, and not zeros but on the last one.
    ``balance``: how losses of all layers, as those of the balance of experts, are added up to a part of the
    loss: in what layers hand on, begun anew by each stage (``carry``), or ``sent`` from stage to stage; or
    each layer gives its own (``stack``). ``dropout``: whence layers have the keys of their random numbers, of
    which each stage folds its own from its number and the microbatch's: they split what they hand on
    (``carry``), have one each (``stack``), or fold their numbers into that of the stage (``shared``).
    ``travels``: what goes from stage to stage with a microbatch: a ``mask`` of its rows, or the numbers of
    ``segments`` that they are of, which the first stage computes in the loop, both for layers, or ``labels``
    for a head, which the last stage puts away for one behind the loop.
    ``stage``: what a stage does with its layers: one ``scan`` over them, or it has them ``unrolled``, one
    after the other, or in ``two`` scans, or a norm ``behind`` or ``before`` their scan, with a weight of its
    own.
    ``shift``: how stages hand on where they are one array, under `vmap`, by ``roll``, by a concatenation
    and a ``where``, by a ``pad`` and a slice or a ``dynamic`` one, or by ``concatenate`` with what enters;
    empty where the step is written for a device, with `ppermute`.
    """

    stages: int = 2
    microbatches: int = 4
    layers: int = 2
    rows: int = 4
    width: int = 8
    classes: int = 16
    axes: str = "x"
    ring: bool = True
    mask: str = "cond"
    again: str = "nothing"
    collect: str = "put"
    loss: str = "cross"
    inside: bool = False
    embeds: bool = True
    metric: bool = False
    accuracy: bool = False
    dtype: str = "float32"
    head: str = "behind"
    shift: str = ""
    shared: str = ""
    alike: bool = False
    under: bool = False
    counted: bool = False
    balance: str = ""
    dropout: str = ""
    travels: str = ""
    stage: str = "scan"


def draw_stacked(rng: random.Random) -> Draw:
    """A step whose stages are one array."""
    axes = rng.choice(["x", "x", "dx", "xd", "xy"])
    d = Draw(
        stages=rng.choice([2, 3, 4] if axes == "x" else [2]),
        microbatches=rng.choice([2, 3, 4, 5, 6]),
        layers=rng.choice([2, 3, 4]),
        rows=rng.choice([2, 4, 8]),
        width=rng.choice([4, 6, 8, 16]),
        classes=rng.choice([8, 10, 16]),
        axes=axes,
        mask="where",
        again=rng.choice(["nothing", "nothing", "layer", "stage"]),
        collect=rng.choice(["put", "put", "scan"]),
        loss=rng.choice(["cross", "squares", "distance", "smooth"]),
        embeds=rng.random() < 0.6,
        dtype=rng.choice(["float32", "float32", "float32", "bfloat16"]),
        shift=rng.choice(["roll", "roll", "where"]),
        travels=rng.choice(["", "", "", "mask", "segments"]),
    )
    return replace(of_stages(d, rng), head=rng.choice(["behind", "behind", "cond", "where"]))


def of_stages(d: Draw, rng: random.Random) -> Draw:
    """The step, with stages of any kind."""
    stage = rng.choice(["scan", "scan", "scan", "unrolled", "unrolled", "two", "behind", "before"])
    return replace(
        d, stage=stage, layers=1 if stage == "unrolled" and rng.random() < 0.5 else d.layers
    )


def draw(rng: random.Random) -> Draw:
    axes = rng.choice(["x", "x", "x", "dx", "xd", "xy", "yx"])
    d = Draw(
        stages=rng.choice([2, 3, 4] if axes == "x" else [2]),
        microbatches=rng.choice([2, 3, 4, 5, 6, 8]),
        layers=rng.choice([2, 3, 4]),
        rows=rng.choice([2, 4, 8]),
        width=rng.choice([4, 6, 8, 16]),
        classes=rng.choice([8, 10, 16, 32]),
        axes=axes,
        ring=rng.random() < 0.5,
        mask=rng.choice(["cond", "cond", "where"]),
        again=rng.choice(["nothing", "nothing", "layer", "stage"]),
        collect=rng.choice(["put", "put", "scan"]),
        loss=rng.choice(["cross", "squares", "distance", "smooth"]),
        inside=rng.random() < 0.4,
        embeds=rng.random() < 0.6,
        metric=rng.random() < 0.3,
        dtype=rng.choice(["float32", "float32", "float32", "bfloat16"]),
        head=rng.choice(["behind", "cond", "cond", "where"]),
    )
    if d.head == "behind":
        d = replace(d, shared=rng.choice(["", "psum", "gather"]), alike=rng.random() < 0.5)
        d = replace(d, under=rng.random() < 0.3)
    else:
        d = replace(d, counted=rng.random() < 0.4)
    if d.collect == "put" and not d.shared and rng.random() < 0.3:
        d = replace(d, collect="cond")
    balance = rng.choice(["", "carry", "stack", "sent"])
    d = replace(d, balance=balance, dropout=rng.choice(["", "", "carry", "stack", "shared"]))
    d = replace(d, travels=rng.choice(["", "", "", "mask", "segments"]))
    d = replace(d, accuracy=rng.random() < 0.3)
    d = replace(d, travels="labels") if not d.shared and rng.random() < 0.2 else d
    d = replace(d, again="products") if d.again == "stage" and rng.random() < 0.4 else d
    return of_stages(d, rng)


def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def parallel_layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    return x + lax.psum(jnp.tanh(x @ w["up"]) @ w["down"], "y"), None


def of_rows(d: Draw, rows: jax.Array, y: jax.Array, x: jax.Array) -> jax.Array:
    """What a layer gives, of what it computed for its rows, and what it took."""
    if d.travels == "mask":
        return jnp.where(rows[:, None], y, x)
    if d.travels == "segments":
        return y + jnp.where(rows[:, None] == rows, 0.5, 0).astype(x.dtype) @ x
    return y


def handed_on(rows: jax.Array) -> jax.Array:
    """What a stage sends on of what travels with a microbatch."""
    return rows


def stage_of(d: Draw, microbatch: jax.Array, rows: jax.Array) -> Any:
    """A run of a stage: of what it begins with, the losses that are added up, and its layers."""
    one = parallel_layer if "y" in d.axes else layer

    def run(x, total, layers):
        key = each = None
        of_layers = {name: w for name, w in layers.items() if name != "scale"}
        if d.dropout:
            key = jax.random.fold_in(jax.random.PRNGKey(3), lax.axis_index("x"))
            key = jax.random.fold_in(key, microbatch)
            each = jax.random.split(key, d.layers) if d.dropout == "stack" else jnp.arange(d.layers)

        def own_layer(handed, given):
            x, total, key = handed
            w, own = given
            y, _ = one(x, w)
            y = of_rows(d, rows, y, x)
            if d.dropout == "carry":
                key, own = jax.random.split(key)
            elif d.dropout == "shared":
                own = jax.random.fold_in(key, own)
            if d.dropout:
                y = jnp.where(jax.random.bernoulli(own, 0.75, y.shape), y, x)
            loss = 0.0
            if d.balance:
                shares = jnp.mean(jax.nn.softmax((x @ w["up"]).astype(np.float32)), axis=0)
                loss = jnp.sum(shares**2)
            if d.balance == "stack":
                return (y, total, key), loss
            return (y, total + loss, key), None

        if d.again == "layer":
            own_layer = jax.checkpoint(own_layer)
        x = normed(x, layers["scale"][0]) if d.stage == "before" else x
        (y, total, _), losses = run_of(d, own_layer, (x, total, key), (of_layers, each))
        y = normed(y, layers["scale"][0]) if d.stage == "behind" else y
        return y, losses.sum() if d.balance == "stack" else total

    if d.again == "products":
        return jax.checkpoint(run, policy=jax.checkpoint_policies.dots_saveable)
    return jax.checkpoint(run) if d.again == "stage" else run


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(np.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * (1 + scale)


def run_of(d: Draw, own_layer: Any, handed: Any, given: Any) -> Any:
    """A stage's layers, as `lax.scan` gives what they hand on and give."""

    def unrolled(handed, count):
        every = []
        for n in range(count):
            handed, own = own_layer(handed, jax.tree.map(lambda w: w[n], given))  # noqa: B023
            every.append(own)
        return handed, None if every[0] is None else jnp.stack(every)

    if d.stage == "unrolled":
        return unrolled(handed, d.layers)
    if d.stage == "two":
        half = (d.layers + 1) // 2
        first = jax.tree.map(lambda w: w[:half], given)
        second = jax.tree.map(lambda w: w[half:], given)
        handed, one = lax.scan(own_layer, handed, first)
        handed, other = lax.scan(own_layer, handed, second)
        return handed, None if one is None else jnp.concatenate([one, other])
    return lax.scan(own_layer, handed, given)


def iteration_of(d: Draw, iteration: Any) -> Any:
    """An iteration, be it computed again in the backward pass."""
    if d.again not in ("iteration", "barriers"):
        return iteration
    return jax.checkpoint(iteration, prevent_cse=d.again == "barriers")


def outputs_of(
    d: Draw, layers: Any, xs: jax.Array, head: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """What the last stage gives, by microbatch, or the losses of a head in the loop, a metric that is
    summed up in the loop, a number of labels that is, losses of layers, and the labels of what is given."""
    stage = lax.axis_index("x")
    pairs = [(s, s + 1) for s in range(d.stages - 1)] + [(d.stages - 1, 0)] * d.ring

    mask = wanted % 4 > 0

    def iteration(carry, i):
        received, come, rows, outputs, metric, count, total, labelled = carry
        entering = jnp.clip(i, 0, d.microbatches - 1)
        x = jnp.where(stage == 0, xs[entering], received)
        if d.travels:
            begun = mask[entering] if d.travels == "mask" else wanted[entering]
            begun = begun // 4 if d.travels == "segments" else begun
            rows = jnp.where(stage == 0, begun, rows)
        begin = jnp.where(stage == 0, 0, come) if d.balance == "sent" else jnp.float32(0)
        slot = i - stage
        working = (slot >= 0) & (slot < d.microbatches)
        run = stage_of(d, slot, rows)
        if d.mask == "cond":
            y, own = lax.cond(
                working, run, lambda x, _, __: (jnp.zeros_like(x), jnp.float32(0)), x, begin, layers
            )
        elif d.mask == "nothing":
            y, own = run(x, begin, layers)
        else:
            masked = jax.tree.map(lambda w: jnp.where(working, w, 0), layers)
            y, own = run(jnp.where(working, x, 0), jnp.where(working, begin, 0), masked)
        out = i - (d.stages - 1)
        last = (stage == d.stages - 1) & (out >= 0)
        if d.balance:
            total = total + jnp.where(last if d.balance == "sent" else working, own, 0)
            come = lax.ppermute(own, "x", pairs) if d.balance == "sent" else come
        if d.travels == "labels" and d.head == "behind":
            put = labelled.at[jnp.clip(out, 0, d.microbatches - 1)].set(rows)
            labelled = jnp.where(last, put, labelled)
        labels = rows
        if d.travels:
            sent = jnp.where(working, handed_on(rows), jnp.zeros_like(rows))
            rows = lax.ppermute(sent, "x", pairs)
        given = y if d.shared else jnp.where(stage == d.stages - 1, y, 0)
        result = y
        if d.head != "behind":
            target = wanted[jnp.clip(out, 0, d.microbatches - 1)]
            target = labels if d.travels == "labels" else target

            def loss(y):
                return loss_of(d, head, y, target)

            def labels():
                return jnp.sum(target % 3 > 0).astype(jnp.float32)

            if d.head == "cond" and d.counted:
                result, more = lax.cond(
                    last, lambda y: (loss(y), labels()), lambda y: (jnp.float32(0),) * 2, y
                )
                given, count = result, count + more
            elif d.head == "cond":
                result = given = lax.cond(last, loss, lambda y: jnp.float32(0), y)
            elif d.head == "loss":
                result = given = jnp.where(last, loss(y), 0)
            elif d.head == "times":
                result = given = last * loss(y)
            else:
                result = given = jnp.where(last, loss(jnp.where(last, y, 1)), 0)
                if d.counted:
                    count = count + jnp.where(last, labels(), 0)
        if d.collect == "cond":
            slot = jnp.clip(out, 0, d.microbatches - 1)
            outputs = lax.cond(last, lambda o: o.at[slot].set(result), lambda o: o, outputs)
            given = None
        if d.collect == "put":
            put = outputs.at[jnp.clip(out, 0, d.microbatches - 1)].set(result)
            outputs, given = jnp.where(out >= 0 if d.shared else last, put, outputs), None
        if d.accuracy and d.head != "behind":
            own = lax.cond(
                last, lambda y: accuracy_of(head, y, target), lambda y: jnp.zeros((), y.dtype), y
            )
            metric = metric + own / d.microbatches
        if d.metric:
            metric = metric + lax.stop_gradient(jnp.where(last, jnp.max(jnp.abs(y)), 0))
        received = lax.ppermute(y, "x", pairs)
        return (received, come, rows, outputs, metric, count, total, labelled), given

    outputs = jnp.zeros_like(xs) if d.head == "behind" else jnp.zeros(d.microbatches)
    none = jnp.float32(0)
    rows = jnp.zeros_like((mask if d.travels == "mask" else wanted)[0])
    labelled = jnp.zeros_like(wanted)
    start = (
        jnp.zeros_like(xs[0]),
        none,
        rows,
        outputs,
        jnp.zeros((), xs.dtype),
        none,
        none,
        labelled,
    )
    trips = d.microbatches + d.stages - 1
    (*_, outputs, metric, count, total, labelled), given = lax.scan(
        iteration_of(d, iteration), start, jnp.arange(trips)
    )
    found = given[d.stages - 1 :] if d.collect == "scan" else outputs
    if d.shared == "psum":
        found = lax.psum(jnp.where(stage == d.stages - 1, found, 0), "x")
    elif d.shared == "gather":
        found = lax.all_gather(found, "x")[-1]
    sent = d.travels == "labels" and d.head == "behind"
    return found, metric, count, total, labelled if sent else wanted


def accuracy_of(head: jax.Array, h: jax.Array, wanted: jax.Array) -> jax.Array:
    """The share of rows whose largest score is that of the class which is wanted."""
    return jnp.mean((h @ head).argmax(-1) == wanted).astype(h.dtype)


def loss_of(d: Draw, head: jax.Array, h: jax.Array, wanted: jax.Array) -> jax.Array:
    if d.loss == "squares":
        return jnp.sum(h.astype(np.float32) ** 2)
    if d.loss == "distance":
        return jnp.mean(
            (h @ head - jax.nn.one_hot(wanted, d.classes, dtype=h.dtype)).astype(np.float32) ** 2
        )
    scores = jax.nn.log_softmax(h @ head)
    if d.loss == "smooth":
        soft = jax.nn.one_hot(wanted, d.classes) * 0.9 + 0.1 / d.classes
        return -jnp.sum(scores.astype(np.float32) * soft) / wanted.size
    return -jnp.mean(jnp.take_along_axis(scores, wanted[..., None], axis=-1)).astype(np.float32)


def local(d: Draw, parameters: Any, tokens: jax.Array, wanted: jax.Array) -> Any:
    """Loss and metric, on each device."""
    xs = (
        parameters["embedding"][tokens]
        if d.embeds
        else lax.stop_gradient(parameters["embedding"][tokens])
    )
    outputs, metric, count, total, wanted = outputs_of(
        d, parameters["layers"], xs, parameters["head"], wanted
    )
    last = lax.axis_index("x") == d.stages - 1
    more = total * (0.01 / d.microbatches) if d.balance else 0
    if d.head != "behind":
        loss = jnp.mean(outputs)
        if d.counted:
            axes = tuple(a for a in d.axes if a in "xd")
            loss = loss / jnp.maximum(lax.psum(count, axes), 1)
        return jnp.where(last, loss, 0) + more, metric

    if d.accuracy:
        metric = metric + jnp.where(last, accuracy_of(parameters["head"], outputs, wanted), 0)

    def head(outputs):
        return loss_of(d, parameters["head"], outputs, wanted)

    if d.shared and d.alike:
        return head(outputs) / d.stages + more, metric
    if d.under:
        return lax.cond(last, head, lambda _: jnp.float32(0), outputs) + more, metric
    return jnp.where(last, head(outputs), 0) + more, metric


def specs_of(d: Draw) -> tuple[Any, P]:
    """Those of parameters, and of tokens."""
    layers = {"up": P("x"), "down": P("x")}
    if "y" in d.axes:
        layers = {"up": P("x", None, "y"), "down": P("x", "y")}
    if d.stage in ("behind", "before"):
        layers["scale"] = P("x")
    batch = P(None, "d") if "d" in d.axes else P()
    return {"embedding": P(), "head": P(), "layers": layers}, batch


def arguments_of(d: Draw) -> tuple[Any, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(d.stages * 100 + d.microbatches)
    dtype = jnp.dtype(d.dtype)
    count, wide = d.stages * d.layers, 2 * d.width

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.4).astype(dtype)

    parameters = {
        "embedding": normal(d.classes, d.width),
        "head": normal(d.width, d.classes),
        "layers": {"down": normal(count, wide, d.width), "up": normal(count, d.width, wide)},
    }
    if d.stage in ("behind", "before"):
        parameters["layers"]["scale"] = normal(d.stages, d.width)
    shape = d.microbatches, d.rows
    tokens, wanted = (rng.integers(0, d.classes, shape).astype(np.int32) for _ in range(2))
    return parameters, tokens, wanted


def stacked_outputs(
    d: Draw, over: jax.sharding.Mesh, layers: Any, xs: jax.Array, wanted: jax.Array, head: jax.Array
) -> jax.Array:
    """What the last stage gives, or its loss if the head is in the loop, by microbatch, of a pipeline that is
    one array of all stages."""
    batch = "d" if "d" in d.axes else None
    layers = jax.tree.map(lambda w: w.reshape(d.stages, -1, *w.shape[1:]), layers)
    stages = jnp.arange(d.stages)
    begun = wanted % 4 > 0 if d.travels == "mask" else wanted // 4

    def run(x, rows, own, working):
        def one(x, w):
            return of_rows(d, rows, layer(x, w)[0], x), None

        one = jax.checkpoint(one) if d.again == "layer" else one
        own = jax.tree.map(lambda w: jnp.where(working, w, 0), own)
        scale = own.pop("scale", None)
        x = jnp.where(working, x, 0)
        x = normed(x, scale[0]) if d.stage == "before" else x
        y, _ = run_of(d, one, x, own)
        return normed(y, scale[0]) if d.stage == "behind" else y

    if d.again == "stage":
        run = jax.checkpoint(run)

    def sharded(state):
        return lax.with_sharding_constraint(state, NamedSharding(over, P("x", batch)))

    def shifted(state, x):
        if d.shift == "roll":
            return jnp.roll(state, 1, axis=0).at[0].set(x)
        if d.shift == "concatenate":
            return jnp.concatenate([x[None], state[:-1]])
        if d.shift in ("pad", "dynamic"):
            padded = jnp.pad(state, ((1, 0), *[(0, 0)] * (state.ndim - 1)))
            cut = lax.dynamic_slice if d.shift == "dynamic" else lax.slice
            rolled = cut(padded, (0,) * state.ndim, state.shape)
        else:
            rolled = jnp.concatenate([state[-1:], state[:-1]])
        first = lax.broadcasted_iota(jnp.int32, rolled.shape, 0) == 0
        return jnp.where(first, x, rolled)

    def iteration(carry, i):
        state, rows, outputs = carry
        entering = jnp.clip(i, 0, d.microbatches - 1)
        state = shifted(state, xs[entering])
        if d.travels:
            rows = sharded(shifted(rows, begun[entering]))
        working = (i >= stages) & (i - stages < d.microbatches)
        state = sharded(jax.vmap(run)(sharded(state), rows, layers, working))
        out = i - (d.stages - 1)
        given = state[-1]
        if d.head != "behind":
            target = wanted[jnp.clip(out, 0, d.microbatches - 1)]
        if d.head == "cond":
            given = lax.cond(
                out >= 0, lambda y: loss_of(d, head, y, target), lambda y: jnp.float32(0), given
            )
        elif d.head == "where":
            y, own = (jnp.where(out >= 0, x, 0) for x in (given, head))
            given = jnp.where(out >= 0, loss_of(d, own, y, target), 0)
        if d.collect == "scan":
            return (state, rows, outputs), given
        put = outputs.at[jnp.clip(out, 0, d.microbatches - 1)].set(given)
        return (state, rows, jnp.where(out >= 0, put, outputs)), None

    start = sharded(jnp.zeros((d.stages, *xs.shape[1:]), xs.dtype))
    rows = sharded(jnp.zeros((d.stages, d.rows), begun.dtype))
    start = start, rows, jnp.zeros_like(xs) if d.head == "behind" else jnp.zeros(d.microbatches)
    trips = d.microbatches + d.stages - 1
    (*_, outputs), given = lax.scan(iteration_of(d, iteration), start, jnp.arange(trips))
    return outputs if d.collect == "put" else given[d.stages - 1 :]


def stacked(d: Draw, over: jax.sharding.Mesh) -> Any:
    """The step of a pipeline that is one array of all stages."""

    def loss(parameters, tokens, wanted):
        xs = parameters["embedding"][tokens]
        xs = xs if d.embeds else lax.stop_gradient(xs)
        head = parameters["head"]
        found = stacked_outputs(d, over, parameters["layers"], xs, wanted, head)
        return loss_of(d, head, found, wanted) if d.head == "behind" else found.mean()

    return jax.value_and_grad(loss)


def program(d: Draw) -> tuple[Any, Any, Any, jax.sharding.Mesh]:
    """The jitted step, which gives loss, metric and gradients; its arguments, shardings and mesh."""
    over = mesh(*(d.stages if a == "x" else 2 for a in d.axes), names=d.axes)
    specs, batch = specs_of(d)
    others = tuple(a for a in d.axes if a in "xd")

    def whole(parameters, tokens, wanted):
        loss, metric = local(d, parameters, tokens, wanted)
        return lax.psum(loss, others), lax.psum(metric, others)

    if d.shift:
        over = jax.sharding.Mesh(over.devices, over.axis_names)  # XLA decides on what is not said
        step = stacked(d, over)
    elif d.inside:

        def on_device(parameters, tokens, wanted):
            (loss, metric), gradients = jax.value_and_grad(local, argnums=1, has_aux=True)(
                d, parameters, tokens, wanted
            )
            axes = ("x",) * ("x" in others) + ("d",) * ("d" in d.axes)
            shared = {k: lax.psum(gradients[k], axes) for k in ("embedding", "head")}
            layers = gradients["layers"]
            if "d" in d.axes:
                layers = jax.tree.map(lambda g: lax.psum(g, "d"), layers)
            return lax.psum(loss, others), lax.psum(metric, others), {**shared, "layers": layers}

        step = jax.shard_map(
            on_device, mesh=over, in_specs=(specs, batch, batch), out_specs=(P(), P(), specs),
            check_vma=False,
        )  # fmt: skip
    else:
        mapped = jax.shard_map(
            whole, mesh=over, in_specs=(specs, batch, batch), out_specs=(P(), P()), check_vma=False
        )
        step = jax.value_and_grad(mapped, has_aux=True)
    given = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))
    placed = jax.tree.map(
        lambda s: NamedSharding(over, s), (specs, batch, batch), is_leaf=lambda s: isinstance(s, P)
    )
    jitted = jax.jit(step, keep_unused=True, in_shardings=placed)
    return jitted, arguments_of(d), (*given, batch, batch), over


def trained(loss: Any) -> Any:
    """Two steps of gradient descent in a scan, on words and on the same the other way round: gives the
    losses, and the parameters after them. ``loss(parameters, words)``."""

    def steps(parameters: Any, words: jax.Array) -> tuple[jax.Array, Any]:
        def one(parameters: Any, words: jax.Array) -> tuple[Any, jax.Array]:
            value, slopes = jax.value_and_grad(loss)(parameters, words)
            return jax.tree.map(lambda w, slope: w - 0.1 * slope, parameters, slopes), value

        parameters, values = lax.scan(one, parameters, jnp.stack([words, words[::-1]]))
        return values, parameters

    return steps
