"""Callers begin compiled code that calls collectives or Python on several devices, where it ends in a moment.

A moment is as long as a test wants it to be: who begins a run follows from that alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stretto.plugin.client import clients
from stretto.runtime.engines.xla_cpu import XlaCpuTogether
from stretto.runtime.execution import loaded
from stretto.runtime.execution.backoff import MOST, Backoff
from stretto.runtime.execution.regions import Region
from stretto.runtime.execution.value import Promise

pytestmark = pytest.mark.usefixtures("on_stretto")

N = 4
LONG = 60.0  # seconds: a moment that no run exceeds
SPEC = PartitionSpec("x")


@pytest.fixture
def mesh(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), ("x",))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who begins each run of compiled code, in order."""
    return callers_of(Region, "_enqueue", monkeypatch)


def callers_of(owner: type, method: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who calls a method, as it is called: the thread that asks here, or another."""
    jax.devices()
    for client in clients:
        monkeypatch.setattr(client.executor.dispatcher, "patience", LONG)
    monkeypatch.setattr(loaded, "MOMENT", LONG)
    monkeypatch.setattr(loaded, "AWAITED", LONG)
    calls: list[str] = []
    here, called = threading.get_ident(), getattr(owner, method)

    def noted(self: Any, *arguments: Any) -> Any:
        calls.append("caller" if threading.get_ident() == here else "other")
        return called(self, *arguments)

    monkeypatch.setattr(owner, method, noted)
    return calls


def mapped(mesh: Mesh, f: Callable[..., Any], **more: Any) -> Any:
    """``f`` of each device's two numbers."""
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False), **more
    )


def placed(mesh: Mesh) -> jax.Array:
    return jax.device_put(np.arange(2 * N, dtype=np.float32), NamedSharding(mesh, SPEC))


def step(x: jax.Array) -> jax.Array:
    return lax.psum(x, "x") * 0.25 + lax.axis_index("x")


def by_hand(x: np.ndarray) -> np.ndarray:
    return (x.reshape(N, 2).mean(0) + np.arange(N)[:, None]).ravel()


def test_what_ends_in_a_moment_is_begun_by_the_caller(mesh: Mesh, begun: list[str]) -> None:
    """Each run takes what the one before gave, and nobody waits between."""
    run, x, want = mapped(mesh, step), placed(mesh), np.arange(2.0 * N)
    for _ in range(5):
        x, want = run(x), by_hand(want)
    np.testing.assert_allclose(x, want)
    assert begun == ["caller"] * 5


def test_what_takes_longer_is_begun_by_callers_ever_less_often(
    mesh: Mesh, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "MOMENT", 0.0)
    monkeypatch.setattr(loaded, "AWAITED", 0.0)
    run, x, want = mapped(mesh, step), placed(mesh), np.arange(2.0 * N)
    for _ in range(11):
        x, want = jax.block_until_ready(run(x)), by_hand(want)
        np.testing.assert_allclose(x, want)
    later = [["caller", *["other"] * left] for left in (1, 2, 4)]
    assert begun == [*chain(*later), "caller"]


def test_a_caller_who_waits_for_results_waits_longer(
    mesh: Mesh, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the next run: nobody has waited for the first one's when it begins."""
    monkeypatch.setattr(loaded, "MOMENT", 0.0)
    run, x, want = mapped(mesh, step), placed(mesh), np.arange(2.0 * N)
    for _ in range(7):
        x, want = jax.block_until_ready(run(x)), by_hand(want)
    np.testing.assert_allclose(x, want)
    # One is left to the other thread behind the first, which nobody could know to be waited for.
    assert begun == ["caller", "other", *["caller"] * 5]


def test_a_caller_who_does_not_wait_for_results_does_not_wait_longer(
    mesh: Mesh, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "MOMENT", 0.0)
    run, x, want = mapped(mesh, step), placed(mesh), np.arange(2.0 * N)
    for _ in range(5):
        x, want = run(x), by_hand(want)
    np.testing.assert_allclose(x, want)
    assert begun == ["caller", "other", "caller", "other", "other"]


@pytest.mark.thorough
def test_that_results_of_other_programs_were_waited_for_says_nothing(
    mesh: Mesh, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are numbers for 256 programs; those that come later share them."""
    monkeypatch.setattr(loaded, "MOMENT", 0.0)
    one = jax.device_put(np.float32(1), mesh.devices[0])
    for i in range(256):
        jax.jit(lambda x, i=i: x + i)(one).block_until_ready()
    run, x = mapped(mesh, step), placed(mesh)
    for _ in range(2):
        x = run(x)
    np.testing.assert_allclose(x, by_hand(by_hand(np.arange(2.0 * N))))
    assert begun == ["caller", "other"]


def test_loops_are_begun_by_the_caller_whether_or_not_their_length_is_known(
    mesh: Mesh, begun: list[str]
) -> None:
    run = mapped(mesh, lambda x: lax.while_loop(lambda a: lax.pmax(a, "x")[0] < 50, step, x))
    short = mapped(mesh, lambda x: lax.fori_loop(0, 3, lambda _, a: step(a), x))
    want = by_hand(by_hand(by_hand(np.arange(2.0 * N))))
    for _ in range(2):
        np.testing.assert_allclose(short(placed(mesh)), want)
        jax.block_until_ready(run(placed(mesh) + 50))
    assert begun == ["caller"] * 4


def waiting_for(opened: threading.Event, x: jax.Array) -> jax.Array:
    """Twice ``x``, by a function that is called back and waits for the event."""

    def double(a: np.ndarray) -> np.ndarray:
        assert opened.wait(LONG)
        return np.asarray(a) * 2

    return jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_a_caller_does_not_wait_for_functions_in_a_loop_of_collectives(
    mesh: Mesh, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for what it does then."""
    monkeypatch.setattr(loaded, "MOMENT", 0.2)
    opened = threading.Event()

    def f(x: jax.Array) -> jax.Array:
        def body(i: jax.Array, a: jax.Array) -> jax.Array:
            a = lax.cond(i > 3, lambda a: lax.psum(a, "x") * 0.25, lambda a: a, a)
            return lax.cond(i > 3, lambda a: waiting_for(opened, a), lambda a: a + 1, a)

        return lax.fori_loop(0, 5, body, x)

    given = mapped(mesh, f)(placed(mesh))
    opened.set()
    want = np.tile((np.arange(2.0 * N) + 4).reshape(N, 2).mean(0) * 2, N)
    np.testing.assert_allclose(given, want)
    assert begun == ["caller"]


@pytest.fixture
def called_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who has the engine run a program that calls back on several devices, in order."""
    return callers_of(XlaCpuTogether, "run_together_with_end", monkeypatch)


MANY = 4096  # numbers of a device, so that XLA leaves what computes with them to threads of its own


def numbers(mesh: Mesh, count: int = MANY) -> jax.Array:
    host = np.arange(N * count, dtype=np.float32) / count
    return jax.device_put(host, NamedSharding(mesh, SPEC))


@pytest.mark.parametrize("donated", [(), (0,)])
def test_programs_that_call_back_are_begun_by_the_caller(
    mesh: Mesh, called_in: list[str], donated: tuple[int, ...]
) -> None:
    """The functions of the devices wait for each other."""
    meeting, calls = threading.Barrier(N), []

    def function(a: np.ndarray) -> np.ndarray:
        meeting.wait(LONG)
        calls.append(len(a))
        return np.asarray(a) + 1

    def f(x: jax.Array) -> jax.Array:
        given = jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x * 2)
        return given - jnp.tanh(x) ** 2

    run, x, want = mapped(mesh, f, donate_argnums=donated), numbers(mesh), np.asarray(numbers(mesh))
    for _ in range(3):
        given, x = x, run(x)
        want = want * 2 + 1 - np.tanh(want) ** 2
        assert given.is_deleted() == bool(donated)
    np.testing.assert_allclose(x, want, rtol=1e-5)
    assert called_in == ["caller"] * 3
    assert calls == [MANY] * 3 * N


def test_a_caller_does_not_wait_for_functions(
    mesh: Mesh, called_in: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "MOMENT", 0.0)
    opened = threading.Event()
    given = mapped(mesh, lambda x: waiting_for(opened, x) + jnp.tanh(x))(numbers(mesh))
    opened.set()
    x = np.asarray(numbers(mesh))
    np.testing.assert_allclose(given, x * 2 + np.tanh(x), rtol=1e-6)
    assert called_in == ["caller"]


def test_few_numbers_are_left_to_another_thread(mesh: Mesh, called_in: list[str]) -> None:
    """XLA would compute with them in the thread that calls, which could not hear of errors."""
    given = mapped(mesh, lambda x: jax.pure_callback(np.asarray, x, x) + 1)(numbers(mesh, 2))
    np.testing.assert_allclose(given, np.asarray(numbers(mesh, 2)) + 1)
    assert called_in == ["other"]


@pytest.mark.parametrize("others_wait", [False, True])
def test_an_error_of_a_function_is_told_whatever_the_others_do(
    mesh: Mesh, called_in: list[str], others_wait: bool
) -> None:
    meeting = threading.Barrier(N)

    def function(i: np.ndarray, a: np.ndarray) -> np.ndarray:
        if i == 2:
            raise ValueError("the third device cannot")
        if others_wait:
            meeting.wait(LONG)
        return np.asarray(a)

    def f(x: jax.Array) -> jax.Array:
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(function, kind, lax.axis_index("x"), x * 2) + x

    right = mapped(mesh, lambda x: jax.pure_callback(np.asarray, x, x) + jnp.tanh(x))
    with pytest.raises(Exception, match="the third device cannot"):
        jax.block_until_ready(mapped(mesh, f)(numbers(mesh)))
    assert meeting.n_waiting == (N - 1 if others_wait else 0)
    meeting.abort()
    x = np.asarray(numbers(mesh))
    np.testing.assert_allclose(right(numbers(mesh)), x + np.tanh(x), rtol=1e-6)
    assert called_in == ["caller"] * 2


def test_a_donated_argument_is_used_up(mesh: Mesh, begun: list[str]) -> None:
    run, x = mapped(mesh, lambda x: x + step(x), donate_argnums=0), placed(mesh)
    want = np.arange(2.0 * N)
    for _ in range(3):
        given, (x, want) = x, (run(x), want + by_hand(want))
        assert given.is_deleted()
    np.testing.assert_allclose(x, want)
    assert begun == ["caller"] * 3


def test_an_error_of_its_devices_reaches_the_caller(mesh: Mesh, begun: list[str]) -> None:
    """Two devices ask for a sum, the others do not: nobody waits for ever, and what follows runs."""

    def f(x: jax.Array) -> jax.Array:
        ask = lax.axis_index("x") < 2
        return lax.cond(ask, lambda a: lax.psum(a, "x"), lambda a: a * 2, x)

    run, right = mapped(mesh, f), mapped(mesh, step)
    for _ in range(2):
        with pytest.raises(Exception, match="devices came"):
            jax.block_until_ready(run(placed(mesh)))
        np.testing.assert_allclose(right(placed(mesh)), by_hand(np.arange(2.0 * N)))
    assert begun == ["caller"] * 4


def test_what_waits_for_other_runs_is_right(mesh: Mesh, begun: list[str]) -> None:
    """Arguments that are computed yet, by devices one by one."""
    parts = [s.data for s in placed(mesh).addressable_shards]
    slow = jax.jit(
        lambda a: lax.fori_loop(0, 300, lambda _, m: jnp.tanh(m @ m), jnp.eye(64))[:2, 0] * 0 + a
    )
    x = jax.make_array_from_single_device_arrays(
        (2 * N,), NamedSharding(mesh, SPEC), [slow(p) for p in parts]
    )
    np.testing.assert_allclose(mapped(mesh, step)(x), by_hand(np.arange(2.0 * N)))
    assert begun == ["caller"]


def test_backoff() -> None:
    """Doubles with each run that was late, is one less for each that was not, and ends at `MOST`."""
    backoff = Backoff()

    def left_out() -> int:
        count = 0
        while backoff.holds:
            backoff.count()
            count += 1
        return count

    found = []
    for _ in range(9):
        backoff.ran(in_time=False)
        found.append(left_out())
    assert found == [1, 2, 4, 8, 16, 32, 64, MOST, MOST]
    backoff.ran(in_time=True)
    backoff.ran(in_time=True)
    assert left_out() == 0
    backoff.ran(in_time=False)
    assert left_out() == MOST - 2


def test_what_all_devices_have_is_looked_at_once(
    mesh: Mesh, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each: one run of the engine gave all of it."""
    run, x = mapped(mesh, lambda x: lax.psum(x, "x")), placed(mesh)
    run(x).block_until_ready()
    looks, block = [], Promise.block

    def noted(self: Promise, *arguments: Any) -> None:
        looks.append(self)
        block(self, *arguments)

    monkeypatch.setattr(Promise, "block", noted)
    got = run(x).block_until_ready()
    assert begun == ["caller"] * 2
    assert len(looks) == 1
    want = np.arange(2.0 * N).reshape(N, 2).sum(0)
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, want)
