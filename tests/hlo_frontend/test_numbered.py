"""Rows of arrays that are divided over the stages, which stages take by number within the loop of a pipeline.

Judged by the program as it is written, bit for bit, and that by JAX's CPU backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, judge_program, manual, mesh, shards
from interpreter import Interpreter
from jax import lax
from random_steps import compiled

from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.graph import Module, all_instructions
from stretto.hlo_frontend.pipelines.numbered import numbered

STAGES, EACH, WIDTH = 3, 2, 4
COUNT = STAGES * EACH
TRIPS = COUNT + STAGES - 1

Row = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def number(stage: jax.Array, i: jax.Array) -> jax.Array:
    """The microbatch that a stage works on in iteration i."""
    return jnp.clip(i - stage, 0, COUNT - 1)


def summed(own: jax.Array, seed: jax.Array, stage: jax.Array, i: jax.Array) -> jax.Array:
    """As XLA writes it: each stage gives the rows that it has of those that stages want."""
    wanted = lax.all_gather(number(stage, i), "x")
    held = jnp.take(own, jnp.clip(wanted - EACH * stage, 0, EACH - 1), axis=0, mode="clip")
    has = (wanted // EACH == stage)[:, None]
    return lax.psum(jnp.where(has, held, jnp.zeros_like(held)), "x")[stage]


def gathered(own: jax.Array, seed: jax.Array, stage: jax.Array, i: jax.Array) -> jax.Array:
    """Where all stages read the same slot, each of another one."""
    return lax.all_gather(own[i % EACH], "x")[(stage + i) % STAGES]


def numbers_alone(own: jax.Array, seed: jax.Array, stage: jax.Array, i: jax.Array) -> jax.Array:
    """Of what a stage has itself."""
    wanted = lax.all_gather(number(stage, i), "x")
    return jnp.take(own, wanted % EACH, axis=0, mode="clip")[stage]


def two_rows(own: jax.Array, seed: jax.Array, stage: jax.Array, i: jax.Array) -> jax.Array:
    """Where two stages give something."""
    wanted = lax.all_gather(number(stage, i), "x")
    held = jnp.take(own, wanted % EACH, axis=0, mode="clip")
    has = (wanted // EACH != stage)[:, None]
    return lax.psum(jnp.where(has, held, jnp.zeros_like(held)), "x")[stage]


def of_data(own: jax.Array, seed: jax.Array, stage: jax.Array, i: jax.Array) -> jax.Array:
    wanted = lax.all_gather((number(stage, i) + seed[0]) % COUNT, "x")
    held = jnp.take(own, jnp.clip(wanted - EACH * stage, 0, EACH - 1), axis=0, mode="clip")
    has = (wanted // EACH == stage)[:, None]
    return lax.psum(jnp.where(has, held, jnp.zeros_like(held)), "x")[stage]


def pipeline(row: Row, *, changes: bool = False) -> tuple[Any, jax.sharding.Mesh]:
    """What stages take and give in each iteration, [stages, iterations, width] each."""
    over = mesh(STAGES)

    def local(array: jax.Array, seed: jax.Array) -> Any:
        stage = lax.axis_index("x")

        def iteration(carry: Any, i: jax.Array) -> tuple[Any, Any]:
            state, own = carry
            taken = row(own, seed, stage, i)
            given = state + taken.astype(jnp.float32)
            ring = [(s, (s + 1) % STAGES) for s in range(STAGES)]
            own = jnp.roll(own, 1, 0) if changes else own
            return (lax.ppermute(given, "x", ring), own), (taken, given)

        begin = jnp.zeros(WIDTH), array
        _, (taken, given) = lax.scan(iteration, begin, jnp.arange(TRIPS))
        return taken[None], given[None]

    return manual(local, over, (P("x"), P()), P("x"), keep_unused=True), over


def arguments(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    array = np.random.default_rng(0).integers(-3, 4, (COUNT, WIDTH)).astype(dtype)
    if np.dtype(dtype).kind == "f":
        array[0] = [-0.0, np.inf, np.nan, 0.5]
    return array, np.array([1], np.int32)


def rewritten(
    row: Row, dtype: Any = np.int32, *, changes: bool = False
) -> tuple[dict[str, int], list[str]]:
    """What `numbered` says of a pipeline, and the collectives that are left in its loop."""
    function, over = pipeline(row, changes=changes)
    given = arguments(dtype)
    module = compiled(function, given, STAGES, "gpipe")
    judge_program(module, function, over, (P("x"), P()), *given, exact=True)
    assert module.source is not None
    made = numbered(module.source.hlo, 1, STAGES)
    assert (made.module == module.source.hlo) == (not made.held)
    parts = [shards(a, over, s) for a, s in zip(given, (P("x"), P()), strict=True)]
    other = compile_hlo(made.module, 1, STAGES)
    results = [Interpreter(m.program).run(*parts) for m in (module, other)]
    own, expected = ([a.tobytes() for row in found for a in row] for found in results)
    assert own == expected
    loops = [i for i in Module.parse(made.module).entry.instructions if i.opcode == "while"]
    inside = [i.opcode for loop in loops for i in all_instructions(loop.called[0])]
    return dict(made.held), sorted(
        {o for o in inside if o.startswith(("all-", "collective-permute"))}
    )


@pytest.mark.parametrize(
    ("row", "dtype"),
    [(summed, np.int32), (summed, np.uint8), (summed, np.float32), (gathered, np.float32)],
)
def test_rows_are_gathered_before_the_loop(row: Row, dtype: Any) -> None:
    """Bits are kept, of -0 as the sum has it, of NaN and infinities."""
    held, left = rewritten(row, dtype)
    assert left == ["collective-permute"]
    assert list(held.values()) == [(STAGES - 1) * EACH * WIDTH * np.dtype(dtype).itemsize]


def test_rows_of_its_own_are_not_gathered() -> None:
    held, left = rewritten(numbers_alone)
    assert left == ["collective-permute"]
    assert list(held.values()) == [0]


@pytest.mark.parametrize(("row", "changes"), [(two_rows, False), (of_data, False), (summed, True)])
def test_what_stays(row: Row, changes: bool) -> None:
    held, left = rewritten(row, changes=changes)
    assert not any(held.values()) and "all-reduce" in left
