"""Programs of JAX with collectives in parts, compared with JAX's CPU backend. ``python -m random_splits``
runs more of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from executed import execute
from frontend_support import P, compiled, judge_program, manual, mesh, shards
from jax import lax
from random_splits import Routings, judge_random, split

from stretto.collectives.ops import Kind
from stretto.hlo_frontend.compile import CompileSpec, compile_stablehlo
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.hlo_frontend.schema import CompileOptionsProto


@pytest.mark.thorough
@pytest.mark.parametrize("seeds", [range(0, 5), range(5, 10)])
def test_random_programs(seeds: range) -> None:
    assert sum(judge_random(seed) for seed in seeds) >= 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        pytest.param((2, 2), 4, id="an expert at a time"),
        pytest.param((1, 8), 5, id="a place of one expert at a time"),
    ],
)
def test_random_routings(shape: tuple[int, int], tiles: int) -> None:
    routings = Routings(*shape, tiles)
    assert routings.regions == 1
    for seed in range(8 if tiles == 4 else 4):
        routings.judge(seed)


def chosen_experts(g):  # type: ignore[no-untyped-def]
    """The two largest of a row, at their places: as where all experts run and the router picks two."""
    best, places = lax.top_k(g, 2)
    return (jax.nn.one_hot(places, g.shape[-1], dtype=g.dtype) * best[..., None]).sum(1)


def solved(g):  # type: ignore[no-untyped-def]
    """Each row is half of a positive matrix with which a system is solved."""
    half = g.reshape(-1, 2, 4)
    matrix = jnp.einsum("rai,rbi->rab", half, half) + 9 * jnp.eye(2, dtype=g.dtype)
    triangle = jnp.linalg.cholesky(matrix)
    return lax.linalg.triangular_solve(triangle, half, left_side=True, lower=True).reshape(g.shape)


STEPS = np.random.default_rng(1).standard_normal((3, 8, 8)).astype("f4") / 3


def iterated(g):  # type: ignore[no-untyped-def]
    """Square roots by Newton's method: the loop begins with ones, and reads the rows in each iteration."""
    return lax.fori_loop(0, 5, lambda i, s: 0.5 * (s + jnp.abs(g) / (1 + s)), jnp.ones_like(g))


def recurrent(g):  # type: ignore[no-untyped-def]
    """A product in each iteration; all carries are kept."""
    last, kept = lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.cos(c)), g, STEPS)
    return last + kept.sum(0) + kept[1]


def counted(g):  # type: ignore[no-untyped-def]
    """What the loop has beside the rows is read behind it, and a loop is in it."""

    def inner(s):  # type: ignore[no-untyped-def]
        return lax.fori_loop(0, 2, lambda j, q: jnp.cos(q + j) + s, s)

    count, rows = lax.while_loop(
        lambda s: s[0] < 7, lambda s: (s[0] + 2, inner(s[1]) - jnp.sin(g)), (0, g)
    )
    return rows * count


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(iterated, id="loop"),
        pytest.param(recurrent, id="scan"),
        pytest.param(counted, id="loop in a loop"),
        pytest.param(jax.grad(lambda g: (recurrent(g) ** 2).sum()), id="scan, gradient"),
        pytest.param(chosen_experts, id="top-k"),
        pytest.param(solved, id="LAPACK"),
        pytest.param(lambda g: jnp.abs(jnp.fft.fft(g)), id="FFT"),
        pytest.param(lambda g: jnp.sort(g)[:, jnp.array([3, 0, 0, 7, 1, 2, 5, 5])], id="sort"),
    ],
)
def test_each_row_by_itself_between_a_gather_and_a_scatter(between: Any) -> None:
    """No part waits for all rows: what arrives is put together nowhere."""
    over = mesh(2)
    rng = np.random.default_rng(0)
    x, w, v = (rng.standard_normal(s).astype("f4") for s in ((12, 8), (8, 8), (8, 4)))

    def f(x, w, v):  # type: ignore[no-untyped-def]
        rows = lax.all_gather(x, "x", axis=0, tiled=True)
        return lax.psum_scatter(between(rows @ w) @ v, "x", scatter_dimension=0, tiled=True)

    specs = (P("x"), P(), P())
    function = manual(f, over, specs, P("x"))
    made, regions = split(compiled(function, x, w, v, num_devices=2), 2, pieces=False)
    assert regions == 1
    assert {c.kind for c in made.program.collectives} == {Kind.PERMUTE}
    judge_program(made, function, over, specs, x, w, v, exact=False)


def halves(i, s):  # type: ignore[no-untyped-def]
    """Rows of each half are coupled."""
    return jnp.sin(s.reshape(2, 6, 8)).sum(1).repeat(6, 0)


@pytest.mark.parametrize(
    ("body", "tiles", "split_regions"),
    [
        pytest.param(lambda i, s: s + s.sum(0), 2, 2, id="sum over rows"),
        pytest.param(lambda i, s: jnp.roll(s, 1, 0), 2, 2, id="rows move on"),
        pytest.param(lambda i, s: s.at[i].multiply(2), 2, 2, id="a row in each iteration"),
        pytest.param(halves, 1, 1, id="halves in halves"),
        pytest.param(halves, 2, 0, id="halves in quarters"),
    ],
)
def test_rows_that_a_loop_couples(body: Any, tiles: int, split_regions: int) -> None:
    """They are put together before it, and it stays whole."""
    over = mesh(2)
    rng = np.random.default_rng(0)
    x, w, v = (rng.standard_normal(s).astype("f4") for s in ((12, 8), (8, 8), (8, 4)))

    def f(x, w, v):  # type: ignore[no-untyped-def]
        rows = lax.all_gather(x, "x", axis=0, tiled=True)
        made = lax.fori_loop(0, 3, body, rows @ w)
        return lax.psum_scatter(made @ v, "x", scatter_dimension=0, tiled=True)

    specs = (P("x"), P(), P())
    function = manual(f, over, specs, P("x"))
    made, regions = split(compiled(function, x, w, v, num_devices=2), tiles, pieces=False)
    assert regions == split_regions
    judge_program(made, function, over, specs, x, w, v, exact=False)


EXPERTS, ROOM = 2, 128  # of a device; rows that a device can receive


def ragged_experts(x, chosen, up, down):  # type: ignore[no-untyped-def]
    """Rows ``x`` of a device go through their ``chosen`` experts, of which each device has two; those of none
    come back as zeros. They are sent ragged, so that at the receiver those of one expert lie together."""
    n, me = lax.axis_size("x"), lax.axis_index("x")
    order = jnp.argsort(chosen)
    sizes = (chosen[:, None] == jnp.arange(n * EXPERTS)).sum(0, dtype=jnp.int32)
    every = lax.all_gather(sizes, "x").reshape(n, n, EXPERTS)  # by source, target and expert
    landing = every.transpose(1, 2, 0).reshape(n, -1)
    landing = (jnp.cumsum(landing, 1) - landing).reshape(n, EXPERTS, n)  # by target, expert, source
    starts = jnp.cumsum(sizes) - sizes
    home = (jnp.cumsum(every.reshape(n, -1), 1) - every.reshape(n, -1)).reshape(n, n, EXPERTS)
    mine = every[:, me]
    there = lax.ragged_all_to_all(
        x[order],
        jnp.ones((ROOM, x.shape[1]), x.dtype),
        starts,
        sizes,
        landing[:, :, me].reshape(-1),
        mine.reshape(-1),
        axis_name="x",
    )
    groups = mine.sum(0)
    made = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(there, up, groups)), down, groups)
    back = lax.ragged_all_to_all(
        made,
        jnp.zeros_like(x),
        landing[me].T.reshape(-1),
        mine.reshape(-1),
        home[:, me].reshape(-1),
        sizes,
        axis_name="x",
    )
    return back[jnp.argsort(order)]


def dense_experts(x, chosen, up, down):  # type: ignore[no-untyped-def]
    """The same of all rows on one device."""
    of_each = jnp.einsum("reh,ehw->rew", jax.nn.relu(jnp.einsum("rw,ewh->reh", x, up)), down)
    return jnp.einsum("rew,re->rw", of_each, jax.nn.one_hot(chosen, len(up), dtype=x.dtype))


NONE = 8
ROUTINGS = {
    "any": lambda rng: rng.integers(0, NONE + 1, (4, 32)),
    "all to one device": lambda rng: rng.integers(4, 6, (4, 32)),
    "all to one expert": lambda rng: np.full((4, 32), 7),
    "a device without rows, and experts": lambda rng: np.where(
        np.arange(4)[:, None] == 1, NONE, rng.choice([0, 1, 5, 6], (4, 32))
    ),
    "no rows at all": lambda rng: np.full((4, 32), NONE),
}


@pytest.mark.parametrize("tiles", [2, 8])
@pytest.mark.parametrize("gradient", [False, True])
def test_ragged_exchanges_around_experts(gradient: bool, tiles: int) -> None:
    """Whole numbers, so that results are equal bit for bit, with every routing."""
    over = mesh(4)

    def wanted(x, chosen, up, down):  # type: ignore[no-untyped-def]
        if not gradient:
            return (dense_experts(x, chosen, up, down),)
        loss = lambda x, up, down: (dense_experts(x, chosen, up, down) * x).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(x, up, down)

    def f(x, chosen, up, down):  # type: ignore[no-untyped-def]
        if not gradient:
            return (ragged_experts(x, chosen, up, down),)
        loss = lambda x, up, down: (ragged_experts(x, chosen, up, down) * x).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(x, up, down)

    rng = np.random.default_rng(0)
    number = lambda *shape: rng.integers(-2, 3, shape).astype("f4")  # noqa: E731
    x, up, down = number(128, 6), number(8, 6, 10), number(8, 10, 6)
    chosen = np.zeros(128, "i4")
    outs = (P("x"),) * (3 if gradient else 1)
    function = manual(f, over, (P("x"),) * 4, outs)
    module = compiled(function, x, chosen, up, down, num_devices=4)
    made, regions = split(module, tiles, pieces=False)
    assert regions == 1
    names = [c.name for c in made.program.collectives if c.kind is Kind.RAGGED_ALL_TO_ALL]
    assert len(names) == (4 if gradient else 2) * tiles
    assert all(f"of{tiles}" in name for name in names)
    for routing in ROUTINGS.values():
        chosen = routing(rng).astype("i4").reshape(-1)
        given = [shards(a, over, P("x")) for a in (x, chosen, up, down)]
        got = execute(made.program, given).results
        for result, want in zip(got, wanted(x, chosen, up, down), strict=True):
            np.testing.assert_array_equal(np.concatenate(result), want)


def layers(x, weights):  # type: ignore[no-untyped-def]
    """Two hidden layers, tensor parallel, with rows of each device between them (sequence parallel)."""

    def loss(weights):  # type: ignore[no-untyped-def]
        y = x
        for up, down in weights:
            rows = lax.all_gather(y, "x", axis=0, tiled=True)
            made = jnp.tanh(rows @ up) @ down
            y = y + lax.psum_scatter(made, "x", scatter_dimension=0, tiled=True)
        return (y * y).sum()

    return jax.value_and_grad(loss)(weights)


@pytest.mark.thorough
def test_a_training_step_forward_and_backward() -> None:
    over = mesh(2)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 32)).astype("f4")
    weights = [
        tuple(rng.standard_normal(s).astype("f4") / 8 for s in ((32, 64), (64, 32)))
        for _ in range(2)
    ]
    specs = (P("x"), [(P(None, "x"), P("x"))] * 2)
    function = manual(layers, over, specs, (P(), [(P(None, "x"), P("x"))] * 2))
    module = compiled(function, x, weights, num_devices=2)
    made, regions = split(module, 2, pieces=False)
    assert regions >= 2
    kinds = [c.kind for c in made.program.collectives]
    assert Kind.ALL_GATHER not in kinds and Kind.REDUCE_SCATTER not in kinds
    flat = manual(
        lambda x, a, b, c, d: layers(x, [(a, b), (c, d)]),
        over,
        (P("x"), *specs[1][0] * 2),
        (P(), [(P(None, "x"), P("x"))] * 2),
    )
    arguments = [x, *weights[0], *weights[1]]
    judge_program(made, flat, over, (P("x"), *specs[1][0] * 2), *arguments, exact=False)


def test_the_option_of_one_program() -> None:
    """``compiler_options={"stretto_split": …}`` goes before what the job has."""
    links = [{"axis_stride": 1, "group_size": 2, "latency_s": 1e-5, "bytes_per_s": 1e7}]
    compute = {"flops_per_s": 1e9, "bytes_per_s": 1e10, "launch_s": 1e-6}
    policy = OverlapPolicy(CostTable.from_json({"compute": compute, "links": links}))
    over = mesh(2)
    function = manual(
        lambda x, w: lax.all_gather(x, "x", axis=0, tiled=True) @ w, over, (P("x"), P()), P("x")
    )
    x, w = np.ones((128, 64), "f4"), np.ones((64, 64), "f4")
    text = function.trace(x, w).lower().as_text()

    def kinds(job: bool, own: int | None) -> set[Kind]:
        proto = CompileOptionsProto()
        if own is not None:
            proto.env_option_overrides.add(key="stretto_split").value.int_field = own
        spec = CompileSpec(1, 2, proto.SerializeToString())
        made = compile_stablehlo(text, spec, overlap=policy, splits=job)
        return {c.kind for c in made.program.collectives}

    assert kinds(False, None) == kinds(True, 0) == {Kind.ALL_GATHER}
    assert kinds(True, None) == kinds(False, 1) == {Kind.PERMUTE}
    module = compile_stablehlo(text, CompileSpec(1, 2), splits=True)
    assert module.splits == ()  # without a table of costs nothing is split
