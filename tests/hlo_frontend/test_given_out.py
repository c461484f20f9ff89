"""Outputs that stages give side by side, of which the program takes the last stage's: what XLA sends for
that, to the first stage and from it to all, and back, each stage gives and takes itself, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, mesh
from jax import lax
from random_steps import WrittenStep

from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.pipelines.moved import moved

MICROBATCHES, ROWS, WIDTH = 5, 4, 8
Take = Callable[[jax.Array], jax.Array]

# By how the last stage's outputs are taken: where stages stand, and what takes them.
FORMS: dict[str, tuple[int, Take]] = {
    "the last one": (0, lambda ys: ys[-1]),
    "a slice": (0, lambda ys: ys[-1:].reshape(ys.shape[1:])),
    "behind microbatches": (1, lambda ys: ys[:, -1]),
}


def step_of(stages: int, form: str, *, data: bool = False) -> WrittenStep:
    """A step of training whose head and loss are behind the loop, of outputs that are taken so."""
    axis, take = FORMS[form]
    over = mesh(stages, 2, names="xd") if data else mesh(stages)
    rows = "d" if data else None

    def pipeline(weights: jax.Array, xs: jax.Array) -> jax.Array:
        stage = lax.axis_index("x")

        def iteration(x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jnp.where(stage == 0, xs[jnp.clip(i, 0, MICROBATCHES - 1)], x)
            working = (i >= stage) & (i - stage < MICROBATCHES)
            run = lambda x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]  # noqa: E731
            y = lax.cond(working, run, jnp.zeros_like, x)
            return lax.ppermute(y, "x", [(n, n + 1) for n in range(stages - 1)]), y

        trips = jnp.arange(MICROBATCHES + stages - 1)
        ys = lax.scan(iteration, jnp.zeros_like(xs[0]), trips)[1][stages - 1 :]
        return jnp.expand_dims(ys, axis)

    specs = [P("x"), P(), P(None, rows), P(None, rows)]
    given = P(*(["x", None] if axis == 0 else [None, "x"]), rows)
    mapped = jax.shard_map(
        pipeline, mesh=over, in_specs=(specs[0], specs[2]), out_specs=given, check_vma=False
    )

    def loss(weights: jax.Array, head: jax.Array, xs: jax.Array, wanted: jax.Array) -> jax.Array:
        return ((take(mapped(weights, xs)) @ head - wanted) ** 2).mean()

    rng = np.random.default_rng(3)
    shapes = [
        (2 * stages, WIDTH, WIDTH),
        (WIDTH, 3),
        *((MICROBATCHES, ROWS, n) for n in (WIDTH, 3)),
    ]
    arguments = tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return WrittenStep(
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), arguments, specs, over
    )  # fmt: skip


def permutes_beside_loops(hlo: bytes) -> int:
    entry = Module.parse(hlo).entry
    return sum(i.opcode == "collective-permute" for i in entry.instructions)


@pytest.mark.quick("3-False-the last one")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_last_stages_outputs_of_all_side_by_side(stages: int, data: bool, form: str) -> None:
    step = step_of(stages, form, data=data)
    step.check_written()
    assert step.module.source is not None
    hlo = step.module.source.hlo
    assert permutes_beside_loops(hlo) == 2  # there and back
    alone = moved(hlo, 1, step.devices)
    assert alone is not None
    assert not permutes_beside_loops(alone)
    step.check_bits(alone)
    for schedule in ("1f1b", "zb_h1"):
        found = step.judged(schedule)
        assert [report.why for report in found.module.interleaved] == [""]
    interleaved = step.in_schedule("gpipe", interleave=2)
    assert [report.why for report in interleaved.interleaved] == ["", ""]


def moved_of(
    function: Callable[[jax.Array, jax.Array], jax.Array], specs: tuple[P, P], out: P
) -> tuple[WrittenStep, bytes | None]:
    """Of a program for each of four devices, in two groups, of ``x`` [4, 6] and ``every`` [6]."""
    over = mesh(2, 2, names="xd")
    mapped = jax.shard_map(function, mesh=over, in_specs=specs, out_specs=out, check_vma=False)
    x = np.arange(24, dtype=np.float32).reshape(4, 6) - 12
    x[0, 0] = -0.0
    written = WrittenStep(jax.jit(mapped), (x, x[1] * 3), list(specs), over)
    assert written.module.source is not None
    return written, moved(written.module.source.hlo, 1, 4)


ALL = P()
FROM_LAST = [(2, 0), (3, 1)]  # within "x"; over both axes at once


def sent(x: jax.Array, pairs: list[tuple[int, int]] = FROM_LAST) -> jax.Array:
    return lax.ppermute(x, ("x", "d"), pairs)


def at_first(x: jax.Array) -> jax.Array:
    return jnp.where(lax.axis_index("x") == 0, x, 0)


LEFT_OUT = {
    "a copy": lambda x, every: x + sent(every * 2),
    "a copy, to some": lambda x, every: x + sent(every * 2, [(3, 1)]),
    "a part of a copy": lambda x, every: x[:, :3] + sent(every[2:5]),
    "the first one's, by a sum": lambda x, every: lax.psum(at_first(sent(x)), "x") - every,
}
STAYS = {
    "its own": lambda x, every: sent(x * 2) + every,
    "two give something": lambda x, every: lax.psum(at_first(sent(x)) + every, "x"),
    "from another group": lambda x, every: lax.psum(
        at_first(sent(x, [(2, 1), (3, 0)])), "x"
    ) - every,
    "both give to the sum": lambda x, every: lax.psum(sent(x, [(2, 0), (0, 2)]), "x") - every,
    "the largest one": lambda x, every: lax.pmax(at_first(sent(x)), "x") - every,
    "read besides": lambda x, every: (
        (y := at_first(sent(x))) * every + lax.psum(y, "x")
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_permute_is_left_out(function: Callable[..., jax.Array]) -> None:
    written, alone = moved_of(function, (P(("x", "d")), ALL), P(("x", "d")))
    assert written.module.source is not None
    assert permutes_beside_loops(written.module.source.hlo) == 1
    assert alone is not None
    assert not permutes_beside_loops(alone)
    written.check_written()
    written.check_bits(alone)


@pytest.mark.parametrize("function", STAYS.values(), ids=STAYS)
def test_a_permute_stays(function: Callable[..., jax.Array]) -> None:
    written, alone = moved_of(function, (P(("x", "d")), ALL), P(("x", "d")))
    assert written.module.source is not None
    assert permutes_beside_loops(written.module.source.hlo) == 1
    assert alone is None
