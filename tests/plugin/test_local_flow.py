"""Loops and branches without collectives that read which device they run on: one segment, which is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stretto

pytestmark = pytest.mark.usefixtures("on_stretto")

N = 4


def run(
    devices: list[jax.Device], f: Callable[[jax.Array], Any], rows: np.ndarray, **options: Any
) -> tuple[np.ndarray, list[str]]:
    """What ``f`` gives for each device's row, and the first words of the program's instructions."""
    mesh = Mesh(np.array(devices[:N]), ("x",))
    whole = jax.shard_map(
        lambda a: f(a[0])[None], mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    given = jax.device_put(rows, NamedSharding(mesh, P("x")))
    compiled = jax.jit(whole, **options).lower(given).compile()
    program = str(stretto.explain(compiled).program)
    body = program[program.index("\nbody") :].splitlines()[2:-2]
    words = [line.split()[0] for line in body if line.split()[0] != "free"]
    return np.asarray(compiled(given)), words


def nested(row: jax.Array) -> jax.Array:
    """Each device adds its number to each element 3 x 2 times, and doubles in between."""

    def inner(_: Any, a: jax.Array) -> jax.Array:
        return a + lax.axis_index("x")

    return lax.fori_loop(0, 3, lambda _, a: lax.fori_loop(0, 2, inner, a) * 2, row)


def until(row: jax.Array) -> jax.Array:
    """As often as the number of the device."""
    return lax.while_loop(
        lambda s: s[0] < lax.axis_index("x"), lambda s: (s[0] + 1, s[1] * 2), (0, row)
    )[1]


def branching(row: jax.Array) -> jax.Array:
    def chosen(k: Any, a: jax.Array) -> jax.Array:
        number = lax.axis_index("x")
        return lax.cond(k < number, lambda b: b + number, lambda b: b * 2, a)

    return lax.fori_loop(0, 3, chosen, row)


def expected(f: Callable[..., Any], rows: np.ndarray) -> np.ndarray:
    found = []
    for d, a in enumerate(rows):
        if f is nested:
            found.append(((a + 2 * d) * 2 + 2 * d) * 4 + 4 * d)
        elif f is until:
            found.append(a * 2**d)
        else:
            found.append((a + d * min(d, 3)) * 2 ** (3 - min(d, 3)))
    return np.stack(found)


@pytest.mark.parametrize("f", [nested, until, branching])
@pytest.mark.parametrize("donate", [False, True])
def test_all_of_it_is_one_run(
    devices: list[jax.Device], f: Callable[[jax.Array], Any], donate: bool
) -> None:
    rows = np.arange(3 * N, dtype=np.float32).reshape(N, 3)
    found, words = run(devices, f, rows, donate_argnums=(0,) if donate else ())
    np.testing.assert_array_equal(found, expected(f, rows))
    assert words == ["id", "run"]


def test_beside_collectives(devices: list[jax.Device]) -> None:
    """In a program whose sum, which is too large for compiled code, is walked: before it, in a loop around
    it, and behind it."""
    size = 4_200_000

    def f(row: jax.Array) -> jax.Array:
        def step(_: Any, a: jax.Array) -> jax.Array:
            a = nested(a)
            return lax.psum(jnp.full(size, 0.5) * a[0], "x")[:3] + a

        return branching(lax.fori_loop(0, 2, step, nested(row)))

    rows = np.arange(3 * N, dtype=np.float32).reshape(N, 3)
    found, words = run(devices, f, rows)
    want = expected(nested, rows)
    for _ in range(2):
        want = expected(nested, want)
        want = want + 0.5 * want[:, 0].sum()
    np.testing.assert_allclose(found, expected(branching, want), rtol=1e-6)
    assert words.count("loop") == words.count("start") == 1  # that around the sum, and the sum


def test_a_constant_that_is_sharded(devices: list[jax.Device]) -> None:
    """Of which XLA's partitioner has each device take its part, in the loop."""
    mesh = Mesh(np.array(devices[:N]), ("x",))
    rows = NamedSharding(mesh, P("x"))
    weights = jax.device_put(np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), rows)
    given = jax.device_put(np.ones((8, 3), np.float32), rows)
    f = jax.jit(lambda x: lax.fori_loop(0, 4, lambda _, a: jnp.sin(a) * weights, x))
    compiled = f.lower(given).compile()
    want = np.ones((8, 3), np.float32)
    for _ in range(4):
        want = np.sin(want) * np.asarray(weights)
    np.testing.assert_allclose(np.asarray(compiled(given)), want, rtol=1e-5)
    assert "loop" not in str(stretto.explain(compiled).program)


def words_of(compiled: Any) -> list[str]:
    program = str(stretto.explain(compiled).program)
    body = program[program.index("\nbody") :].splitlines()[2:-2]
    return [line.split()[0] for line in body if line.split()[0] != "free"]


HANDED_ON: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "alone": (lambda s, x: s, lambda s, x: s),
    "in another form": (lambda s, x: s.reshape(2, 4), lambda s, x: s.reshape(2, 4)),
    "twice": (lambda s, x: (s, s.ravel(), x + 1), lambda s, x: (s, s.ravel(), x + 1)),
    "the other way round": (lambda s, x: (x, s), lambda s, x: (x, s)),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(("f", "by_hand"), HANDED_ON.values(), ids=HANDED_ON)
@pytest.mark.parametrize("donate", [(), (0,), (0, 1)], ids=str)
@pytest.mark.parametrize("count", [1, N])
def test_arguments_that_are_handed_on_are_results_of_their_own(
    devices: list[jax.Device],
    f: Callable[..., Any],
    by_hand: Callable[..., Any],
    donate: tuple[int, ...],
    count: int,
) -> None:
    """One run; results share no memory, with arguments or among themselves."""
    sharding = NamedSharding(Mesh(np.array(devices[:count]), ("x",)), P())
    s, x = np.arange(8, dtype=np.int16), np.arange(3, dtype=np.float32)
    given = [jax.device_put(a, sharding) for a in (s, x)]
    # `keep_unused`, since JAX drops arguments that are not read, and does not run what only hands on.
    compiled = jax.jit(f, donate_argnums=donate, keep_unused=True).lower(*given).compile()
    assert words_of(compiled) == ["run"]
    results = jax.tree.leaves(compiled(*given))
    wanted = jax.tree.leaves(by_hand(s, x))
    donated = [
        i in donate and any(a.nbytes == w.nbytes for w in wanted) for i, a in enumerate(given)
    ]
    assert [a.is_deleted() for a in given] == donated  # what fits no result stays, as JAX says
    held = [a for a in given if not a.is_deleted()]
    for d in range(count):
        of_device = [a.addressable_shards[d].data for a in (*results, *held)]
        assert len({a.unsafe_buffer_pointer() for a in of_device}) == len(of_device)
    for have, want in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(have, want)
        assert have.dtype == want.dtype
    for a in held:
        a.delete()
    for have, want in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(have, want)
