"""Collectives that a JAX program starts and awaits itself (`psum_start` and others): what runs between is
between, in every kind of block, and results are those of JAX's CPU backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, judge_program, mesh
from jax import lax
from jax._src.lax import parallel  # they have no public names yet
from jax.sharding import Mesh, NamedSharding

from stretto.hlo_frontend.compile import CompiledModule
from stretto.runtime.program import Block, Branch, Loop, Run, Start, Wait, instructions

N = 4
RING = [(i, (i + 1) % N) for i in range(N)]
X = (np.arange(16 * 8) % 17 - 8).reshape(16, 8).astype("f4") / 8


def begin(kind: str, x: jax.Array) -> Any:
    start: Any = getattr(parallel, f"{kind}_start")
    if kind == "psum":
        return start(x, "x")
    if kind == "ppermute":
        return start(x, "x", RING)
    if kind == "all_to_all":
        return start(x, "x", 0, 0, tiled=True)
    return start(x, "x", tiled=True)


def end(future: Any) -> jax.Array:
    return future.done() if hasattr(future, "done") else future


def total(x: jax.Array) -> jax.Array:
    return x.sum(keepdims=True)


def module(f, like=None) -> CompiledModule:  # type: ignore[no-untyped-def]
    """The program of a function of a device's four rows, compared with what JAX's CPU backend makes of it, or
    of ``like``."""
    over = mesh(N)
    function, judge = (
        jax.jit(jax.shard_map(g, mesh=over, in_specs=P("x"), out_specs=P("x")))
        for g in (f, like or f)
    )
    made = compiled(function, X, num_devices=N)
    judge_program(made, judge, over, (P("x"),), X, exact=False)
    return made


def steps(block: Block) -> list[str]:
    """What starts, runs and is awaited, in this block alone."""
    names = {Start: "start", Wait: "wait", Run: "run", Loop: "loop", Branch: "branch"}
    return [names[type(i)] for i in block.instructions if type(i) in names]


KINDS = ["psum", "psum_scatter", "all_gather", "all_to_all", "ppermute"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_meanwhile_is_between_start_and_done(kind: str) -> None:
    def f(x):  # type: ignore[no-untyped-def]
        begun = begin(kind, x)
        beside = jnp.sin(x @ x.T)
        got = end(begun)
        return total(jnp.cos(got)) + beside

    made = module(f)
    assert steps(made.program.body) == ["start", "run", "wait", "run"]
    (collective,) = made.program.collectives
    assert collective.source.startswith(__file__)


@pytest.mark.quick("s4-all_gather", "bf16-all_to_all", "f8e4m3fn-ppermute")
@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "ppermute"])
@pytest.mark.parametrize("dtype", ["s4", "bf16", "f8e4m3fn"])
def test_small_types_are_started_as_they_are(kind: str, dtype: str) -> None:
    """XLA's CPU backend, which makes one op of start and done first, computes them as wider ones."""
    names = {"s4": "int4", "bf16": "bfloat16", "f8e4m3fn": "float8_e4m3fn"}

    def f(x):  # type: ignore[no-untyped-def]
        begun = begin(kind, (x * 4).astype(names[dtype]))
        beside = jnp.sin(x @ x.T)
        return total(end(begun).astype("float32")) + beside

    made = module(f)
    assert steps(made.program.body) == ["run", "start", "run", "wait", "run"]
    (collective,) = made.program.collectives
    assert {str(t.dtype) for t in collective.results} == {dtype}


def test_over_one_axis_of_a_mesh_while_the_other_is_left_to_xla() -> None:
    """Of jax 0.10's starts XLA partitions none there: they are compiled as one op with their dones."""
    over = Mesh(np.array(jax.devices("cpu")[:N]).reshape(2, 2), ("a", "b"))

    def f(x):  # type: ignore[no-untyped-def]
        begun = parallel.psum_start(x, "a")
        return end(begun) + jnp.sin(x).sum()

    spec = P("a")
    mapped = jax.shard_map(
        f, mesh=over, in_specs=spec, out_specs=spec, axis_names={"a"}, check_vma=False
    )
    held = NamedSharding(over, P("a", "b"))
    function = jax.jit(mapped, in_shardings=held, out_shardings=held)
    made = compiled(function, X, num_devices=N)
    judge_program(made, function, over, (P("a", "b"),), X, exact=False)
    assert {str(c.kind) for c in made.program.collectives} == {"all-reduce"}


def test_what_a_start_reads_is_all_that_is_ahead_of_it() -> None:
    def f(x):  # type: ignore[no-untyped-def]
        beside = jnp.sin(x @ x.T)
        return total(end(begin("all_gather", jnp.exp(x)))) + beside

    made = module(f)
    assert steps(made.program.body) == ["run", "start", "run", "wait", "run"]
    ahead = next(i for i in made.program.body.instructions if isinstance(i, Run))
    assert made.program.segments[ahead.segment].flops == 4 * 8  # the exponentials, not the product


def test_starts_keep_their_order_and_are_awaited_where_they_are_read() -> None:
    def f(x):  # type: ignore[no-untyped-def]
        first, second = begin("ppermute", x), begin("all_gather", 2 * x)
        beside = jnp.sin(x @ x.T)
        one = total(end(first)) + beside
        return jnp.tanh(one) + total(end(second))

    made = module(f)
    found = steps(made.program.body)
    assert [step for step in found if step != "run"] == ["start", "start", "wait", "wait"]
    assert found[-5:] == ["run", "wait", "run", "wait", "run"]
    kinds = [str(c.kind) for c in made.program.collectives]
    assert kinds == ["collective-permute", "all-gather"]


def test_a_loop_runs_between_start_and_done() -> None:
    """Its own collectives are behind the start, on the streams of their groups."""

    def f(x):  # type: ignore[no-untyped-def]
        begun = begin("all_gather", x)
        looped = lax.fori_loop(0, 3, lambda i, y: jnp.sin(lax.ppermute(y, "x", RING) + i), x)
        return total(end(begun)) + looped

    made = module(f)
    found = [step for step in steps(made.program.body) if step != "run"]
    assert found == ["start", "loop", "wait"]


@pytest.mark.quick("psum", "ppermute")
@pytest.mark.parametrize("kind", KINDS)
def test_inside_of_loops(kind: str) -> None:
    def body(y, _):  # type: ignore[no-untyped-def]
        begun = begin(kind, y)
        beside = jnp.sin(y * 2) @ jnp.eye(8)
        return beside + total(end(begun)) / 64, None

    made = module(lambda x: lax.scan(body, x, None, 3)[0])
    (loop,) = (i for i in instructions(made.program.body) if isinstance(i, Loop))
    assert steps(loop.body)[:4] == ["start", "run", "wait", "run"]


def test_inside_of_branches() -> None:
    def f(x):  # type: ignore[no-untyped-def]
        def taken(y):  # type: ignore[no-untyped-def]
            begun = begin("ppermute", y)
            beside = jnp.sin(y @ y.T)
            return total(end(begun)) + beside

        positive = lax.psum(x.sum(), "x") > 0
        return lax.cond(positive, taken, lambda y: jnp.cos(y @ y.T), x)

    made = module(f)
    (branch,) = (i for i in instructions(made.program.body) if isinstance(i, Branch))
    assert ["start", "run", "wait", "run"] in [steps(b) for b in branch.branches]


def through_barriers() -> Any:
    """What puts JAX's futures into optimization barriers."""
    overlap = pytest.importorskip("jax.experimental.overlap", reason="futures are no JAX types")
    jax.clear_caches()  # jax 0.12 takes futures of one type from different collectives for equal there
    return overlap.program_order


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_may_go_through_barriers(kind: str) -> None:
    """JAX's CPU backend ends the process there, so that results are those of the same without barriers."""
    through_barriers()

    def f(x):  # type: ignore[no-untyped-def]
        begun = begin(kind, jnp.sin(x))
        begun, y = lax.optimization_barrier((begun, x))
        beside = y @ y.T
        begun, beside = lax.optimization_barrier((begun, beside))
        return total(jnp.cos(end(begun))) + beside

    def plain(x):  # type: ignore[no-untyped-def]
        return total(jnp.cos(end(begin(kind, jnp.sin(x))))) + x @ x.T

    assert steps(module(f, plain).program.body) == ["run", "start", "run", "wait", "run"]


def test_an_enforced_order_is_the_order_that_runs() -> None:
    """JAX puts barriers between all operations, the futures among what goes through them."""
    enforced = through_barriers()(enforce=True)

    def written(x):  # type: ignore[no-untyped-def]
        begun = begin("psum", jnp.sin(x))
        ahead = x @ x.T
        got = end(begun)
        return got, jnp.cos(ahead)

    def f(x):  # type: ignore[no-untyped-def]
        got, behind = enforced(written)(x)
        return total(got) + behind

    def plain(x):  # type: ignore[no-untyped-def]
        got, behind = written(x)
        return total(got) + behind

    made = module(f, plain)
    assert steps(made.program.body) == ["run", "start", "run", "wait", "run"]
    _, between, behind = (
        made.program.segments[i.segment].module
        for i in made.program.body.instructions
        if isinstance(i, Run)
    )
    assert b"dot" in between and b"cosine" not in between and b"cosine" in behind


def test_a_barrier_keeps_a_done_ahead_of_compute() -> None:
    """What is read through a barrier with the result comes behind it."""

    def f(x):  # type: ignore[no-untyped-def]
        got = end(begin("ppermute", x))
        got, y = lax.optimization_barrier((got, x))
        return got.sum() + jnp.sin(y @ y.T)

    assert steps(module(f).program.body)[:2] == ["start", "wait"]
