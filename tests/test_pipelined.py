"""`stretto.pipelined` against the layers one after the other, and what stretto's passes say of its loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.scripts import reports_of

import stretto
from stretto import nn

STAGES, LAYERS, COUNT, ROWS, WIDTH, WORDS = 4, 8, 5, 3, 8, 14
CHECKED = pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("stretto")), ("stage",))


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


PARAMS = {"a": drawn(LAYERS, WIDTH, WIDTH) * 0.4, "b": drawn(LAYERS, WIDTH, seed=1) * 0.1}
XS = drawn(COUNT, ROWS, WIDTH, seed=2)
HEAD = drawn(16, WIDTH, seed=3)  # two rows of padding
LABELS = jnp.asarray(np.random.default_rng(4).integers(0, WORDS, (COUNT, ROWS)))


def layer(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w["a"] + w["b"])


def all_layers(params: Any, xs: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        xs = layer(jax.tree.map(lambda a, i=i: a[i], params), xs)
    return xs


def dense_losses(params: Any, xs: jax.Array, head: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(all_layers(params, xs) @ head[:WORDS].T)
    return -jnp.mean(jnp.take_along_axis(scores, LABELS[..., None], axis=-1)[..., 0], axis=-1)


def over(mesh: Mesh, local: Callable, specs: Any, checked: bool) -> Callable:
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=checked)


def close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)


@pytest.mark.thorough
@pytest.mark.parametrize(("checked", "checkpoint"), [(True, False), (False, True)])
def test_outputs_and_gradients(mesh: Mesh, checked: bool, checkpoint: bool) -> None:
    def local(params, xs):
        return stretto.pipelined(layer, params, xs, "stage", checkpoint=checkpoint)

    f = over(mesh, local, (P("stage"), P()), checked)
    weights = drawn(COUNT, ROWS, WIDTH, seed=5)

    def loss(f):
        return lambda params, xs: jnp.sum(f(params, xs) * weights)

    found = jax.jit(jax.value_and_grad(loss(f), (0, 1)))(PARAMS, XS)
    close(found, jax.value_and_grad(loss(all_layers), (0, 1))(PARAMS, XS))


@pytest.mark.thorough
@CHECKED
@pytest.mark.parametrize("where", ["last", "all", "behind"])
def test_a_head(mesh: Mesh, checked: bool, where: str) -> None:
    def local(params, xs, head, labels):
        def on_last(head, y, label):
            scores = jax.nn.log_softmax(y @ head[:WORDS].T)
            return -jnp.mean(jnp.take_along_axis(scores, label[:, None], axis=-1))

        def on_all(head, y, label):
            return jnp.mean(
                nn.vocab_parallel_cross_entropy(y, head, label, "stage", vocab_size=WORDS)
            )

        chosen = on_last if where == "last" else on_all
        given = {"head": chosen, "head_params": head, "targets": labels, "head_on": where}
        return stretto.pipelined(layer, params, xs, "stage", **given)

    specs = (P("stage"), P(), P() if where == "last" else P("stage"), P())
    f = over(mesh, local, specs, checked)
    weights = drawn(COUNT, seed=6)

    def loss(*given):
        losses = f(*given, LABELS)
        return jnp.sum(losses * weights), losses

    def dense(*given):
        losses = dense_losses(*given)
        return jnp.sum(losses * weights), losses

    found = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(PARAMS, XS, HEAD)
    close(found, jax.value_and_grad(dense, (0, 1, 2), has_aux=True)(PARAMS, XS, HEAD))


@pytest.mark.thorough
def test_beside_a_data_parallel_axis() -> None:
    """Two pipelines of two stages, each with its half of the rows; trees of arrays all through."""
    mesh = Mesh(np.array(jax.devices("stretto")).reshape(2, 2), ("data", "stage"))

    def local(params, xs):
        def both(w, state):
            return {"x": layer(w, state["x"]), "n": state["n"] + 1}

        counts = jnp.zeros(COUNT, jnp.int32)
        given = {"x": xs, "n": jax.lax.pcast(counts, ("data",), to="varying")}
        done = stretto.pipelined(both, params, given, "stage")
        return jax.lax.pmean(jnp.sum(done["x"] ** 2), "data"), done["n"][None]

    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("stage"), P(None, "data")),
        out_specs=(P(), P("data")),
    )
    xs = drawn(COUNT, 4, WIDTH, seed=2)
    (value, counts), gradients = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(PARAMS, xs)
    wanted = jax.value_and_grad(lambda p, x: jnp.sum(all_layers(p, x) ** 2) / 2, (0, 1))(PARAMS, xs)
    close((value, gradients), wanted)
    np.testing.assert_array_equal(counts, np.full((2, COUNT), LAYERS))


def test_one_stage_is_the_layers() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("stage",))
    f = over(mesh, lambda p, x: stretto.pipelined(layer, p, x, "stage"), (P(), P()), True)
    close(jax.jit(f)(PARAMS, XS), all_layers(PARAMS, XS))


SCRIPT = """
import json, sys
sys.path.insert(0, {here!r})
import jax, numpy as np, jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import stretto
from test_pipelined import HEAD, LABELS, PARAMS, XS, layer

mesh = Mesh(np.array(jax.devices()), ("stage",))
found = {{}}
for kind, steps in (("outputs", (False, True)), ("head", (True,))):
    def local(params, xs):
        def head(_, y, label):
            scores = jax.nn.log_softmax(y @ HEAD.T)
            return -jnp.mean(jnp.take_along_axis(scores, label[:, None], axis=-1))
        more = dict(head=head, targets=LABELS) if kind == "head" else {{}}
        return stretto.pipelined(layer, params, xs, "stage", checkpoint=kind == "head", **more)
    f = jax.shard_map(local, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P(),
                      check_vma=kind != "outputs")
    step = jax.value_and_grad(lambda p, x: jnp.sum(f(p, x) ** 2), (0, 1))
    for is_step in steps:
        function = step if is_step else f
        bits = []
        for chunks in (1, 2):
            jitted = jax.jit(function, compiler_options={{"stretto_interleave": chunks}})
            compiled = jitted.lower(PARAMS, XS).compile()
            leaves = jax.tree.leaves(compiled(PARAMS, XS))
            bits.append([np.asarray(a).tobytes().hex() for a in leaves])
        count = str(stretto.explain(compiled)).count(" is interleaved: 4 stages x 2 chunks")
        found[f"{{kind}} {{is_step}}"] = [bits[0] == bits[1], count, 1 + is_step]
with open(f"{{sys.argv[1]}}/{{jax.process_index()}}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.thorough
def test_it_is_interleaved_bit_for_bit(tmp_path: Path) -> None:
    (found,), _ = reports_of(tmp_path, SCRIPT.format(here=str(Path(__file__).parent)), 4)
    assert len(found) == 3
    for name, (equal, loops, wanted) in found.items():
        assert equal and loops == wanted, name


def test_what_is_the_same_on_all_devices_is_not_closed_over(mesh: Mesh) -> None:
    """Its gradient would be summed over the devices in a branch that only one of them takes."""

    def local(params, head):
        return stretto.pipelined(
            layer, params, XS, "stage", head=lambda w, y, t: y @ head.T, targets=LABELS
        )

    with pytest.raises(ValueError, match=r"<lambda> closes over an array float32\[16, 8\]"):
        jax.eval_shape(over(mesh, local, (P("stage"), P()), True), PARAMS, HEAD)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"params": {"a": jnp.zeros((2, 3)), "b": jnp.zeros((3, 3))}}, ValueError, r"same size.*\[2, 3\]"),
        ({"layer": lambda w, x: x[0]}, TypeError, r"takes float32\[3, 8\] and gives float32\[8\]"),
        ({"targets": LABELS}, ValueError, "there is none"),
        ({"head": lambda w, y, t: t, "targets": LABELS[:3]}, ValueError, "3 microbatches, not 5"),
        ({"head": lambda w, y, t: t, "head_on": "first"}, ValueError, "'first'"),
    ],
)  # fmt: skip
def test_what_does_not_fit(mesh: Mesh, given: dict, error: type, text: str) -> None:
    arguments = {
        "layer": layer,
        "params": PARAMS,
        "microbatches": XS,
        "axis_name": "stage",
        **given,
    }
    with pytest.raises(error, match=text):
        over(mesh, lambda: stretto.pipelined(**arguments), (), False)()
