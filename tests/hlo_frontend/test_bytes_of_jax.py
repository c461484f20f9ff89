"""Programs of JAX whose collectives send less: bytes counted by hand, results as on JAX's CPU backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, judge, judge_program, kinds, manual, mesh, payload

from stretto.collectives.ops import Kind
from stretto.runtime.program import Start, instructions


def trained(over, weights, inputs):  # type: ignore[no-untyped-def]
    """A step of two layers with weights sharded over ``weights``, inputs over ``inputs``."""

    def step(first, second, x):
        def loss(first, second):
            out = jnp.tanh(x @ first) @ second
            return (out * out).sum()

        grads = jax.grad(loss, argnums=(0, 1))(first, second)
        return first - grads[0], second - grads[1]

    spec = jax.sharding.NamedSharding
    placed = (spec(over, weights), spec(over, weights), spec(over, inputs))
    return jax.jit(step, in_shardings=placed, out_shardings=placed[:2])


def test_sharded_weights_under_plain_jit_send_half() -> None:
    over = mesh(4)
    step = trained(over, P("x", None), P("x", None))
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(s).astype("f4") for s in ((64, 64), (64, 64), (256, 64))]
    module = compiled(step, *arguments, num_devices=4)
    written = module.as_written()
    # Two gradients of 16 KiB: three quarters of each, once to reduce and once more to spread it.
    assert payload(written, Kind.ALL_REDUCE) == 2 * 2 * 12288
    assert payload(module, Kind.ALL_REDUCE) == 0
    assert payload(module, Kind.REDUCE_SCATTER) == 2 * 12288
    assert payload(module, Kind.ALL_GATHER) == payload(written, Kind.ALL_GATHER)
    specs = (P("x", None), P("x", None), P("x", None))
    judge_program(module, step, over, specs, *arguments, exact=False)


def test_sharded_weights_in_a_scan() -> None:
    over = mesh(4)

    def step(weights, x):
        def loss(weights):
            out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
            return (out * out).sum()

        return weights - jax.grad(loss)(weights)

    spec = jax.sharding.NamedSharding
    specs = (P(None, "x", None), P("x", None))
    placed = tuple(spec(over, s) for s in specs)
    jitted = jax.jit(step, in_shardings=placed, out_shardings=placed[0])
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(s).astype("f4") / 8 for s in ((3, 64, 64), (256, 64))]
    module = compiled(jitted, *arguments, num_devices=4)
    assert "all-reduce" not in kinds(module) and "reduce-scatter" in kinds(module)
    judge_program(module, jitted, over, specs, *arguments, exact=False)


def test_a_sum_and_a_slice_by_hand() -> None:
    """`psum`, then what `axis_index` cuts out, over one axis of two."""
    over = mesh(2, 4)

    def f(x):
        summed = jax.lax.psum(x, "y")
        at = jax.lax.axis_index("y") * 2
        return jax.lax.dynamic_slice_in_dim(summed, at, 2)

    x = np.arange(64 * 3, dtype="f4").reshape(64, 3)
    function = manual(f, over, P(("x", "y")), P(("x", "y")))
    interpreter = judge(function, over, P(("x", "y")), x, exact=True)
    starts = [i for i in instructions(interpreter.program.body) if isinstance(i, Start)]
    assert [interpreter.program.collectives[s.collective].kind for s in starts] == [
        Kind.REDUCE_SCATTER
    ]


WAVES = {
    "the last of three": (lambda x: jnp.fft.fft(x, axis=2), P("x"), P("x"), "c8"),
    "the middle one": (lambda x: jnp.fft.fft(x, axis=1), P("x"), P("x"), "c8"),
    "the first two": (lambda x: jnp.fft.fftn(x, axes=(0, 1)), P(None, None, "x"), None, "c8"),
    "of real numbers": (lambda x: jnp.fft.rfft(x), P("x"), P("x"), "f4"),
    "to real numbers": (lambda x: jnp.fft.irfft(x, n=22), P("x"), P("x"), "c8"),
    "there and back": (
        lambda x: jnp.fft.ifft2(jnp.fft.fft2(x) * jnp.arange(12.0)),
        P("x"),
        P("x"),
        "c16",
    ),
    "over one axis of two": (lambda x: jnp.fft.fft(x), P("y"), P("y"), "c8"),
}


@pytest.mark.parametrize("which", WAVES)
def test_a_transform_of_other_dimensions_sends_nothing(which: str) -> None:
    """XLA gathers the array, transforms all of it and cuts out what the device had (jax #13081, #15680)."""
    f, spec, out, dtype = WAVES[which]
    over = mesh(2, 2) if "y" in spec else mesh(4)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 16, 12))
    x = (x + 1j * rng.standard_normal(x.shape) if dtype[0] == "c" else x).astype(dtype)
    given, wanted = (jax.sharding.NamedSharding(over, s) for s in (spec, out or spec))
    function = jax.jit(f, in_shardings=given, out_shardings=wanted)
    with jax.enable_x64(dtype == "c16"):
        module = compiled(function, x, num_devices=4)
        assert "all-gather" in kinds(module.as_written())
        assert kinds(module) == []
        assert all("goes" in r.said for r in module.rewrites)
        # Nor is there room for more than the device's own part.
        types = (*module.program.inputs, *module.program.outputs)
        assert max(t.size for t in module.program.slot_types) <= max(t.size for t in types)
        judge_program(module, function, over, (spec,), x, exact=True)


def test_a_transform_of_the_dimension_that_is_cut_needs_all_of_it() -> None:
    over = mesh(4)
    sharding = jax.sharding.NamedSharding(over, P("x"))
    function = jax.jit(
        lambda x: jnp.fft.fft(x, axis=0), in_shardings=sharding, out_shardings=sharding
    )
    x = np.arange(8 * 3, dtype="c8").reshape(8, 3)
    module = compiled(function, x, num_devices=4)
    assert kinds(module) == kinds(module.as_written()) != []
    judge_program(module, function, over, (P("x"),), x, exact=False)
