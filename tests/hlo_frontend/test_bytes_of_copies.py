"""Rows by number on meshes of several axes: devices along the other axes have copies, so nothing is sent.

XLA's partitioner permutes the numbers along those axes, looks up or writes on all devices, adds up or
gathers, and permutes back. Programs of JAX are compared with its CPU backend bit for bit; modules by hand
show where something must stay.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, kinds, mesh
from interpreter import Interpreter
from random_rows import compare
from test_bytes_by_place import BY_NUMBER, SPREAD, B, X, given, numbers, program, silent

from stretto.hlo_frontend.compile import CompiledModule, compile_hlo

# The axis along which rows are cut, and the sizes of the mesh.
LAYOUTS = [("x", (2, 4)), ("y", (2, 4)), ("y", (2, 2, 2)), ("x", (4, 2)), ("z", (2, 2, 2))]
# The loop over pivots has a sum of its own.
CASES = [name for name in BY_NUMBER if name != "gradient of a determinant"]


@pytest.mark.thorough
@pytest.mark.parametrize("which", CASES)
def test_rows_by_number_over_one_axis_of_several(which: str) -> None:
    f, arguments = BY_NUMBER[which]
    axis, sizes = LAYOUTS[CASES.index(which) % len(LAYOUTS)]
    silent(f, [(P(axis), a) for _, a in arguments], P(axis), mesh(*sizes))


H, S = 4, 6  # as heads and tokens
ROWS, HEADS = P("x"), P("x", None, "y")
CACHE = [(HEADS, given(B, S, H)), (ROWS, numbers(B, below=S)), (P("x", "y"), given(B, H))]
CUT_TWICE: dict[str, tuple] = {
    "a cache": (lambda c, p, u: c.at[jnp.arange(B), p].set(u), CACHE, HEADS),
    "a cache that is added to": (lambda c, p, u: c.at[jnp.arange(B), p].add(u), CACHE, HEADS),
    "the last of each": (lambda c, p: c[jnp.arange(B), p], CACHE[:2], P("x", "y")),
    "its gradient": (
        jax.grad(lambda c, p: jnp.sin(c[jnp.arange(B), p]).sum()), CACHE[:2], HEADS
    ),
    "some of each": (
        lambda c, i: c[jnp.arange(B)[:, None], i], [CACHE[0], (ROWS, numbers(B, 3, below=S))], HEADS
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", CUT_TWICE)
def test_rows_by_number_of_arrays_that_are_cut_along_two_axes(which: str) -> None:
    f, arguments, out = CUT_TWICE[which]
    silent(f, arguments, out, mesh(2, 2, 2))


def test_a_loss_of_labels_sends_the_loss_only() -> None:
    f = jax.value_and_grad(lambda x, i: -jax.nn.log_softmax(x)[jnp.arange(B), i].sum())
    _, arguments = BY_NUMBER["a loss of labels"]
    module, judged = program(f, arguments, (P(), X), mesh(2, 4))
    assert len(kinds(module.as_written())) > 3
    (loss,) = module.program.collectives
    assert loss.results[0].shape == ()
    judged()


@pytest.mark.parametrize("which", SPREAD)
def test_rows_of_other_devices_are_sent(which: str) -> None:
    module, judged = program(*SPREAD[which], X, mesh(2, 4))
    assert kinds(module)
    judged()


# A module for a mesh of 2 x 2: each device has two of four rows, and device 0 the same as 1, 2 as 3. Numbers
# are exchanged by 1 and 2: then those of 0 and 2 are the first rows, those of 1 and 3 the last.
CUT = "sharding={devices=[2,1,2]<=[4] last_tile_dim_replicate}"
BACK = "source_target_pairs={{0,0},{1,2},{2,1},{3,3}}"
LOOK_UP = f"""HloModule m, num_partitions=4

sum {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
max {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] maximum(a, b)
}}
any {{
  a = pred[] parameter(0)
  b = pred[] parameter(1)
  ROOT c = pred[] or(a, b)
}}
ENTRY e {{
  x = f32[2,3] parameter(0), {CUT}
  j = s32[2,1] parameter(1), {CUT}
  id = u32[] partition-id()
  firsts = s32[4] constant({{0,0,2,2}})
  first = s32[1] dynamic-slice(firsts, id), dynamic_slice_sizes={{1}}
  first.scalar = s32[] reshape(first)
  offset = s32[2,1] broadcast(first.scalar), dimensions={{}}
  i = s32[2,1] iota(), iota_dimension=0
  row = s32[2,1] add(i, offset)
  n = s32[2,2] concatenate(row, j), dimensions={{1}}
  m = s32[2,2] collective-permute(n), channel_id=1, {BACK}
  begins = s32[4] constant({{0,0,2,2}})
  begin = s32[1] dynamic-slice(begins, id), dynamic_slice_sizes={{1}}
  none = s32[1] constant({{0}})
  low = s32[2] concatenate(begin, none), dimensions={{0}}
  lows = s32[2,2] broadcast(low), dimensions={{1}}
  s = s32[2,2] subtract(m, lows)
  zero = s32[] constant(0)
  zeros = s32[2,2] broadcast(zero), dimensions={{}}
  last = s32[2] constant({{1,2}})
  lasts = s32[2,2] broadcast(last), dimensions={{1}}
  before = pred[2,2] compare(s, zeros), direction=LT
  behind = pred[2,2] compare(s, lasts), direction=GT
  either = pred[2,2] or(before, behind)
  no = pred[] constant(false)
  outside = pred[2] reduce(either, no), dimensions={{1}}, to_apply=any
  g = f32[2,1,1] gather(x, s), offset_dims={{1,2}}, collapsed_slice_dims={{}}, start_index_map={{0,1}},
    index_vector_dim=1, slice_sizes={{1,1}}
  found = f32[2] reshape(g)
  nothing = f32[] constant(0)
  nothings = f32[2] broadcast(nothing), dimensions={{}}
  l = f32[2] select(outside, nothings, found)
  t = f32[2] all-reduce(l), channel_id=2, replica_groups={{{{0,2}},{{1,3}}}}, use_global_device_ids=true,
    to_apply=sum
  ROOT q = f32[2] collective-permute(t), channel_id=3, {BACK}
}}
"""


def both(text: str) -> tuple[CompiledModule, CompiledModule]:
    """As it is written, and rewritten; checked to give the same bits for copies."""
    written, rewritten = (compile_hlo(text, 1, 4, rewrites=r) for r in (False, True))
    rng = np.random.default_rng(1)
    inputs = []
    for type in written.program.inputs:
        first, last = (rng.integers(0, 3, type.shape).astype(type.numpy) for _ in range(2))
        inputs.append([first, first, last, last])
    wanted = Interpreter(written.program).run(*inputs)
    got = Interpreter(rewritten.program).run(*inputs)
    for results, others in zip(got, wanted, strict=True):
        for a, b in zip(results, others, strict=True):
            assert a.tobytes() == b.tobytes()
    return written, rewritten


def test_rows_that_a_copy_has_are_not_sent() -> None:
    written, rewritten = both(LOOK_UP)
    assert len(kinds(written)) == 3 and kinds(rewritten) == []
    assert {r.name for r in rewritten.rewrites} == {"m", "t", "q"}


# One change each: what is needed, or may be.
NEEDED = {
    "nobody says who has copies": (f", {CUT}", ""),
    "each has numbers of its own": (f"j = s32[2,1] parameter(1), {CUT}", "j = s32[2,1] parameter(1)"),
    "each has rows of its own": (f"x = f32[2,3] parameter(0), {CUT}", "x = f32[2,3] parameter(0)"),
    "two devices find something": ("begins = s32[4] constant({0,0,2,2})", "begins = s32[4] copy(p)"),
    "numbers that may be anywhere": ("n = s32[2,2] concatenate(row, j)", "n = s32[2,2] concatenate(j, j)"),
    "one more row": ("behind = pred[2,2] compare(s, lasts)", "behind = pred[2,2] compare(s, m)"),
    "a device gets zeros": (BACK, "source_target_pairs={{0,0},{1,2},{2,1}}"),
    "a maximum": ("to_apply=sum", "to_apply=max"),
    "zeros with a sign": ("nothing = f32[] constant(0)", "nothing = f32[] constant(-0.0)"),
}  # fmt: skip


@pytest.mark.parametrize("which", NEEDED)
def test_what_a_device_may_need_is_sent(which: str) -> None:
    old, new = NEEDED[which]
    assert old in LOOK_UP
    text = LOOK_UP.replace(old, new)
    if "copy(p)" in new:
        text = text.replace("  id =", "  p = s32[4] parameter(2)\n  id =")
    written, rewritten = both(text)
    assert kinds(rewritten) == kinds(written)


def and_then(last: str) -> str:
    text = LOOK_UP.replace("ROOT q", "q")
    return text.replace(f"channel_id=3, {BACK}\n", f"channel_id=3, {BACK}\n  ROOT {last}\n")


def test_what_a_program_sends_to_a_copy_is_sent() -> None:
    swap = "channel_id=4, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}"
    _, rewritten = both(and_then(f"r = f32[2,3] collective-permute(x), {swap}"))
    assert "collective-permute" in kinds(rewritten)


def test_numbers_that_are_read_elsewhere_are_sent() -> None:
    _, rewritten = both(and_then("r = (f32[2], s32[2,2]) tuple(q, m)"))
    assert kinds(rewritten) == ["collective-permute"]


def test_random_programs_on_meshes_of_two_axes() -> None:
    found = [compare(seed, (2, 2), "xy"[seed % 2]) for seed in range(8)]
    assert [said for outcome, said in found if outcome == "differs"] == []
    assert len({outcome for outcome, _ in found}) > 1
