"""What XLA moves between devices in several steps becomes one permute, with the bits of the program as it is
written; what it does not move whole stays.

Programs are loops whose carry is one array of all stages, of which each device has one. Those that stay are
written so that one permute would give other numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, mesh, shards
from interpreter import Interpreter
from jax import lax
from jax.sharding import NamedSharding
from random_steps import compiled

from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.graph import COLLECTIVES, Instruction, Module
from stretto.hlo_frontend.pipelines.moved import moved

TRIPS = 3
Shift = Callable[[jax.Array, jax.Array], jax.Array]


def padded(by: int, value: float = 0, *, dynamic: bool = False) -> Shift:
    """By a pad and a slice."""
    cut = lax.dynamic_slice if dynamic else lax.slice

    def shift(state: jax.Array, _: jax.Array) -> jax.Array:
        widths = (max(by, 0), max(-by, 0)), *[(0, 0)] * (state.ndim - 1)
        wide = jnp.pad(state, widths, constant_values=value)
        begin = [max(-by, 0), *[0] * (state.ndim - 1)]
        end = state.shape if dynamic else [n + b for n, b in zip(state.shape, begin, strict=True)]
        return cut(wide, begin, end)

    return shift


def back(shift: Shift) -> Shift:
    """What goes back through a shift."""

    def transposed(state: jax.Array, enters: jax.Array) -> jax.Array:
        return jax.vjp(lambda s: shift(s, enters), state)[1](state)[0]

    return transposed


def joined(by: int) -> Shift:
    """What enters, in the place of the first stages or of the last ones."""

    def shift(state: jax.Array, enters: jax.Array) -> jax.Array:
        own = jnp.broadcast_to(enters, (abs(by), *enters.shape))
        return jnp.concatenate([own, state[:-by]] if by > 0 else [state[-by:], own])

    return shift


class Looped:
    """A loop that shifts an array ``[stages, *shape]``, sharded over ``on`` devices by stages and, if
    ``data``, over 2 by rows; with minus zeros in it."""

    def __init__(
        self, shift: Shift, shape: tuple[int, ...] = (4, 6), *, dtype: str = "float32",
        data: bool = False, stages: int = 4, on: int = 4,
    ) -> None:  # fmt: skip
        self.over = mesh(on, 2, names="xd") if data else mesh(on)
        self.count = self.over.devices.size
        spec = P("x", "d") if data else P("x")

        def iteration(state: jax.Array, enters: jax.Array) -> tuple[jax.Array, None]:
            return self._placed(jnp.asarray(shift(state, enters) * 3, dtype), spec), None

        function = jax.jit(
            lambda state, enter: lax.scan(iteration, state, enter)[0],
            in_shardings=(NamedSharding(self.over, spec), NamedSharding(self.over, P())),
            keep_unused=True,
        )
        rng = np.random.default_rng(0)
        state, enter = (
            (rng.standard_normal((n, *shape)) * 9).astype(dtype) for n in (stages, TRIPS)
        )
        state[1] = np.array(-0.0).astype(dtype)
        self.given = [shards(state, self.over, spec), shards(enter, self.over, P())]
        self.wanted = np.asarray(function(state, enter))
        written = compiled(function, (state, enter), self.count, "gpipe").source
        assert written is not None
        self.hlo, self.spec = written.hlo, spec
        self.made = moved(self.hlo, 1, self.count)

    def _placed(self, state: jax.Array, spec: jax.sharding.PartitionSpec) -> jax.Array:
        return lax.with_sharding_constraint(state, NamedSharding(self.over, spec))

    def communicates(self, hlo: bytes) -> list[Instruction]:
        (loop,) = [i for i in Module.parse(hlo).entry.instructions if i.opcode == "while"]
        return [i for i in loop.called[0].instructions if i.opcode in COLLECTIVES]

    def run(self, hlo: bytes) -> list[bytes]:
        program = compile_hlo(hlo, 1, self.count).program
        (parts,) = Interpreter(program).run(*self.given)
        for part, wanted in zip(parts, shards(self.wanted, self.over, self.spec), strict=True):
            np.testing.assert_array_equal(part, wanted)
        return [np.asarray(part).tobytes() for part in parts]


ONE = {
    "pad back": lambda: Looped(back(padded(1))),
    "pad back, three rows": lambda: Looped(back(padded(-1)), (3, 5)),
    "pad back, dynamic": lambda: Looped(back(padded(1, dynamic=True))),
    "pad back, rows divided": lambda: Looped(back(padded(1)), data=True),
    "pad by two back": lambda: Looped(back(padded(2))),
    "pad of rows that a pad moves": lambda: Looped(
        lambda state, x: back(padded(1))(lax.pad(state, 0.0, [(0, 0, 0), (1, -1, 0), (0, 0, 0)]), x)
    ),
    "join": lambda: Looped(joined(1)),
    "join, rows divided": lambda: Looped(joined(1), (8, 8), data=True),
    "join by two": lambda: Looped(joined(2)),
    "join numbers": lambda: Looped(joined(1), ()),
    "rows by number": lambda: Looped(lambda state, _: state[np.array([1, 0, 3, 2])]),
    "few whole numbers": lambda: Looped(joined(1), (2,), dtype="int32", stages=2, on=2, data=True),
    "few truths": lambda: Looped(
        lambda state, x: joined(1)(state, x) > 0, (2,), dtype="bool", stages=2, on=2, data=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("looped", ONE.values(), ids=ONE)
def test_one_permute_is_left(looped: Callable[[], Looped]) -> None:
    found = looped()
    before = found.communicates(found.hlo)
    assert len(before) > 1 or before[0].opcode != "collective-permute"
    assert found.made is not None
    assert [i.opcode for i in found.communicates(found.made)] == ["collective-permute"]
    assert found.run(found.made) == found.run(found.hlo)


def test_each_value_has_a_permute() -> None:
    """What enters at the end is on the first device."""
    found = Looped(joined(-1))
    assert found.made is not None
    pairs = {
        tuple((p.source, p.target) for p in i.proto.source_target_pairs)
        for i in found.communicates(found.made)
    }
    assert pairs == {((1, 0), (2, 1), (3, 2)), ((0, 3),)}
    assert found.run(found.made) == found.run(found.hlo)


STAYS = {
    "a permute": lambda: Looped(padded(1)),
    "two stages a device": lambda: Looped(back(padded(1)), stages=8),
    "two stages a device, join": lambda: Looped(joined(1), stages=8),
    "rows by a number that is not known": lambda: Looped(
        lambda state, x: state[(jnp.arange(4) + (x[0, 0] > 0)) % 4]
    ),
    "minus zeros that enter": lambda: Looped(
        lambda state, _: jnp.concatenate([jnp.full_like(state[:1], -0.0), state[:-1]])
    ),
    "minus zeros that are summed up": lambda: Looped(joined(1), (2,), stages=2, on=2, data=True),
    "computed with in another order": lambda: Looped(joined(1), (3, 8)),
}


@pytest.mark.parametrize("looped", STAYS.values(), ids=STAYS)
def test_what_is_not_moved_whole_stays(looped: Callable[[], Looped]) -> None:
    found = looped()
    assert found.communicates(found.hlo)
    assert found.made is None
