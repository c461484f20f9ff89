"""Programs of JAX whose collectives send less: bytes counted by hand, results as on JAX's CPU backend."""

from __future__ import annotations

from functools import cache

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


@cache
def rows_are_alike() -> bool:
    """Whether XLA transforms a row to the same bits however many there are: not from jaxlib 0.12 on."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((12, 20)) + 1j * rng.standard_normal((12, 20))).astype("c8")
    transform = jax.jit(jnp.fft.fft)
    rows = [transform(x[i : i + 1]) for i in range(len(x))]
    return np.array_equal(transform(x), np.concatenate(rows))


WAVES = {
    "the last of three": (lambda x: jnp.fft.fft(x, axis=2), P("x"), P("x"), "c8"),
    "the middle one": (lambda x: jnp.fft.fft(x, axis=1), P("x"), P("x"), "c8"),
    "the first two": (lambda x: jnp.fft.fftn(x, axes=(0, 1)), P(None, None, "x"), None, "c8"),
    "of real numbers": (jnp.fft.rfft, P("x"), P("x"), "f4"),
    "to real numbers": (lambda x: jnp.fft.irfft(x, n=22), P("x"), P("x"), "c8"),
    "there and back": (
        lambda x: jnp.fft.ifft2(jnp.fft.fft2(x) * jnp.arange(12.0)),
        P("x"),
        P("x"),
        "c16",
    ),
    "of an array that is cut twice": (jnp.fft.fft, P("x", "y"), P("x", "y"), "c8"),
    "over one axis of two": (jnp.fft.fft, P("y"), P("y"), "c8"),
}


@pytest.mark.parametrize("which", WAVES)
def test_a_transform_of_other_dimensions_sends_nothing(which: str) -> None:
    """XLA gathers the array, transforms all of it and cuts out what the device had (jax #13081, #15680). From
    jaxlib 0.12 on it sends nothing either."""
    f, spec, out, dtype = WAVES[which]
    over = mesh(2, 2) if "y" in spec else mesh(4)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 16, 12))
    x = (x + 1j * rng.standard_normal(x.shape) if dtype[0] == "c" else x).astype(dtype)
    given, wanted = (jax.sharding.NamedSharding(over, s) for s in (spec, out or spec))
    function = jax.jit(f, in_shardings=given, out_shardings=wanted)
    with jax.enable_x64(dtype == "c16"):
        module = compiled(function, x, num_devices=4)
        written = kinds(module.as_written())
        assert set(written) <= {"all-gather"} and kinds(module) == []
        assert ["goes" in r.said for r in module.rewrites] == [True] * len(written)
        # Nor is there room for more than the device's own part.
        types = (*module.program.inputs, *module.program.outputs)
        assert max(t.size for t in module.program.slot_types) <= max(t.size for t in types)
        judge_program(module, function, over, (spec,), x, exact=rows_are_alike())


# Shapes are those of the arrays that are transformed, over four devices.
CUT = {
    "one, the first of two": (lambda x: jnp.fft.fft(x, axis=0), P("x"), (20, 12), "c8"),
    "one, the last of two": (jnp.fft.fft, P(None, "x"), (12, 20), "c8"),
    "one, the middle of three": (lambda x: jnp.fft.ifft(x, axis=1), P(None, "x"), (4, 8, 3), "c8"),
    "of two the first": (jnp.fft.fft2, P("x"), (20, 28), "c8"),
    "of two the first, wide": (jnp.fft.fft2, P("x"), (20, 28), "c16"),
    "of two the first, back": (jnp.fft.ifft2, P("x"), (16, 32), "c8"),
    "of two the first, real": (jnp.fft.rfft2, P("x"), (20, 14), "f4"),
    "of two the first, to real": (lambda x: jnp.fft.irfft2(x, s=(16, 30)), P("x"), (16, 16), "c8"),
    "of three the first": (jnp.fft.fftn, P("x"), (12, 5, 8), "c8"),
    "of three the first, real": (jnp.fft.rfftn, P("x"), (12, 5, 14), "f4"),
    "of three the first, to real": (
        lambda x: jnp.fft.irfftn(x, s=(8, 4, 14)),
        P("x"),
        (8, 4, 8),
        "c8",
    ),
    "of two the first, filled up": (jnp.fft.rfft2, P("x"), (20, 20), "f4"),
    "of two the first, filled up, back": (
        lambda x: jnp.fft.irfft2(x, s=(16, 20)),
        P("x"),
        (16, 11),
        "c8",
    ),
    "one, filled up": (lambda x: jnp.fft.fft(x, axis=0), P("x"), (20, 7), "c16"),
    "one of two that are cut": (jnp.fft.fft, P("x", "y"), (8, 20), "c8"),
    "the other of two that are cut": (
        lambda x: jnp.fft.ifft(x, axis=0),
        P("x", "y"),
        (20, 8),
        "c8",
    ),
    "of many": (lambda x: jnp.fft.fft2(x, axes=(1, 2)), P(None, "x"), (3, 12, 8), "c8"),
}


@pytest.mark.parametrize("which", CUT)
def test_a_transform_of_the_dimension_that_is_cut_exchanges_parts(which: str) -> None:
    f, spec, shape, dtype = CUT[which]
    over = mesh(2, 2) if "y" in spec else mesh(4)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)
    x = (x + 1j * rng.standard_normal(shape) if dtype[0] == "c" else x).astype(dtype)
    sharding = jax.sharding.NamedSharding(over, spec)
    function = jax.jit(f, in_shardings=sharding, out_shardings=sharding)
    with jax.enable_x64(dtype == "c16"):
        module = compiled(function, x, num_devices=4)
        assert set(kinds(module.as_written())) == {"all-gather"}
        assert kinds(module) == ["all-to-all"] * 2
        # Three quarters of a device's part each time, as it is between the transforms.
        (first, second) = module.program.collectives
        largest = max(t.nbytes for t in (*module.program.inputs, *module.program.outputs))
        largest += largest // 7 * ("filled" in which)
        assert all(c.operands[0].nbytes <= largest for c in (first, second))
        assert max(t.nbytes for t in module.program.slot_types) <= largest
        judge_program(module, function, over, (spec,), x, exact=rows_are_alike())


def test_an_inverse_is_scaled_by_one_length_after_the_other() -> None:
    over = mesh(4)
    sharding = jax.sharding.NamedSharding(over, P("x"))
    function = jax.jit(jnp.fft.ifft2, in_shardings=sharding, out_shardings=sharding)
    x = np.random.default_rng(0).standard_normal((12, 20)).astype("c8")
    module = compiled(function, x, num_devices=4)
    assert kinds(module) == ["all-to-all"] * 2
    judge_program(module, function, over, (P("x"),), x, exact=False)


@pytest.mark.parametrize(
    ("f", "spec", "shape"),
    [
        (lambda x: jnp.fft.fft(x, axis=0), P("x"), (8, 1)),  # nothing to exchange for
        (jnp.fft.fft2, P(None, "x"), (8, 8)),  # the last is transformed first
        (lambda x: jnp.fft.fft(x, axis=0) + x.sum(), P("x"), (8, 8)),  # sums over what is cut
    ],
)
def test_where_nothing_can_be_exchanged_the_gather_stays(f, spec, shape) -> None:  # type: ignore[no-untyped-def]
    over = mesh(4)
    sharding = jax.sharding.NamedSharding(over, spec)
    function = jax.jit(f, in_shardings=sharding, out_shardings=sharding)
    x = np.random.default_rng(0).standard_normal(shape).astype("c8")
    module = compiled(function, x, num_devices=4)
    judge_program(module, function, over, (spec,), x, exact=False)
    if shape == (8, 1) or spec == P(None, "x"):
        assert kinds(module) == ["all-gather"]
