"""Loops that work on all batches of a gathered array: each device runs them on its own part.

Modules by hand, each a loop that is independent along the rows or, by one change, is not; results are
compared with the module as it is written. Programs of JAX (pivots of matrices of which each device has some
rows) are compared with its CPU backend.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from frontend_support import P, kinds
from test_bytes import ALL, both
from test_bytes_by_batch import Y, matrices, program

HEAD = """HloModule m, num_partitions=4

less {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = pred[] compare(a, b), direction=LT
}
sum {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = s32[] add(a, b)
}
last {
  a = s32[] parameter(0)
  ROOT b = s32[] parameter(1)
}
any {
  a = pred[] parameter(0)
  b = pred[] parameter(1)
  ROOT c = pred[] or(a, b)
}
"""
CARRIES = "(s32[], s32[8,6], s32[8,6])"
THREE = """  three = s32[] constant(3)
  ROOT goes = pred[] compare(i, three), direction=LT"""


def loop(body: str, condition: str = THREE, more: str = "") -> str:
    """Rows x of every device are gathered, changed by a loop that also carries y, which all devices have, and
    cut. ``body``: gives the next x and y, ``a`` and ``b``."""
    return f"""{HEAD}{more}
condition {{
  c = {CARRIES} parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = s32[8,6] get-tuple-element(c), index=1
{condition}
}}
body {{
  c = {CARRIES} parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = s32[8,6] get-tuple-element(c), index=1
  y = s32[8,6] get-tuple-element(c), index=2
  one = s32[] constant(1)
  next = s32[] add(i, one)
  zero = s32[] constant(0)
{body}
  ROOT t = {CARRIES} tuple(next, a, b)
}}
ENTRY e {{
  p = s32[2,6] parameter(0)
  y = s32[8,6] parameter(1)
  id = u32[] partition-id()
  place = s32[] convert(id)
  zero = s32[] constant(0)
  two = s32[] constant(2)
  at = s32[] multiply(place, two)
  x = s32[8,6] all-gather(p), dimensions={{0}}, {ALL}
  t = {CARRIES} tuple(zero, x, y)
  w = {CARRIES} while(t), condition=condition, body=body
  r = s32[8,6] get-tuple-element(w), index=1
  ROOT s = s32[2,6] dynamic-slice(r, at, zero), dynamic_slice_sizes={{2,6}}
}}
"""


KEPT = "\n  b = s32[8,6] copy(y)"
# A number of each row: a column of x, made one of its six columns.
PICK = """  k0 = s32[8,1] slice(x), slice={[0:8],[0:1]}
  k1 = s32[8,1] broadcast(zero), dimensions={}
  five = s32[] constant(5)
  k2 = s32[8,1] broadcast(five), dimensions={}
  k = s32[8,1] clamp(k1, k0, k2)
  row = s32[8,1] iota(), iota_dimension=0
  n = s32[8,2] concatenate(row, k), dimensions={1}
"""
GATHER = """  g = s32[8,1] gather(x, n), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0,1},
    index_vector_dim=1, slice_sizes={1,1}
"""
FLAT = """  m = s32[8,1,2] reshape(n)
  o = s32[8,2] reshape(m)
"""
SCATTER = """  u = s32[8] reshape(k)
  a = s32[8,6] scatter(x, n, u), update_window_dims={}, inserted_window_dims={0,1},
    scatter_dims_to_operand_dims={0,1}, index_vector_dim=1, to_apply=last
"""
NESTED = f"""inner {{
  c = {CARRIES} parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = s32[8,6] get-tuple-element(c), index=1
  y = s32[8,6] get-tuple-element(c), index=2
  one = s32[] constant(1)
  next = s32[] add(i, one)
  a = s32[8,6] add(x, y)
  ROOT t = {CARRIES} tuple(next, a, y)
}}
until {{
  c = {CARRIES} parameter(0)
  i = s32[] get-tuple-element(c), index=0
{THREE}
}}
"""
WITHIN = f"""  t1 = {CARRIES} tuple(zero, x, y)
  w = {CARRIES} while(t1), condition=until, body=inner
  a = s32[8,6] get-tuple-element(w), index=1
"""
ALONE = {
    "rows sorted": "  a = s32[8,6] sort(x), dimensions={1}, to_apply=less" + KEPT,
    "with another carry": "  a = s32[8,6] add(x, y)" + KEPT,
    "into another carry": "  a = s32[8,6] add(x, y)\n  b = s32[8,6] add(y, x)",
    "with a constant": "  k = s32[8,6] broadcast(one), dimensions={}\n  a = s32[8,6] add(x, k)" + KEPT,
    "with the numbers of columns": "  k = s32[8,6] iota(), iota_dimension=1\n  a = s32[8,6] add(x, k)"
    + KEPT,
    "a column by its number": "  k = s32[8,1] dynamic-slice(x, zero, i), dynamic_slice_sizes={8,1}\n"
    "  l = s32[8,1] add(k, k)\n  a = s32[8,6] dynamic-update-slice(x, l, zero, next)" + KEPT,
    "a choice by the counter": "  g = pred[] compare(i, one), direction=LT\n"
    "  h = pred[8,6] broadcast(g), dimensions={}\n  a = s32[8,6] select(h, x, y)" + KEPT,
    "numbers in each row": PICK + GATHER + "  h = s32[8] reshape(g)\n"
    "  l = s32[8,6] broadcast(h), dimensions={0}\n  a = s32[8,6] add(x, l)" + KEPT,
    "numbers in another shape": PICK + FLAT + GATHER.replace("(x, n)", "(x, o)")
    + "  h = s32[8] reshape(g)\n  l = s32[8,6] broadcast(h), dimensions={0}\n  a = s32[8,6] add(x, l)" + KEPT,
    "written in each row": PICK + SCATTER + KEPT,
    "a loop within": WITHIN + KEPT,
    "made anew": "  a = s32[8,6] broadcast(one), dimensions={}" + KEPT,
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("which", ALONE)
def test_a_loop_over_batches_runs_on_a_part(which: str) -> None:
    written, rewritten = both(loop(ALONE[which], more=NESTED if which == "a loop within" else ""))
    assert kinds(written) == ["all-gather"] and kinds(rewritten) == []
    largest = max(t.size for t in rewritten.program.inputs)
    assert max(t.size for t in rewritten.program.slot_types) <= largest
    (said,) = rewritten.rewrites
    assert "own part" in said.said


ANY = """  k = s32[8,6] broadcast(i), dimensions={}
  p = pred[8,6] compare(k, x), direction=LT
  no = pred[] constant(false)
  some = pred[] reduce(p, no), dimensions={0,1}, to_apply=any
  three = s32[] constant(3)
  q = pred[] compare(i, three), direction=LT
  ROOT goes = pred[] and(some, q)"""
# Here something in a row depends on the others, or on the row's number in the whole.
TOGETHER = {
    "numbers of rows": "  k = s32[8,6] iota(), iota_dimension=0\n  a = s32[8,6] add(x, k)" + KEPT,
    "numbers of rows, compared": "  k = s32[8,6] iota(), iota_dimension=0\n"
    "  h = pred[8,6] compare(k, x), direction=LT\n  a = s32[8,6] select(h, x, k)" + KEPT,
    "the row with that number": PICK.replace("concatenate(row, k)", "concatenate(k, row)")
    + GATHER + "  h = s32[8] reshape(g)\n  l = s32[8,6] broadcast(h), dimensions={0}\n"
    "  a = s32[8,6] add(x, l)" + KEPT,
    "the number twice": PICK.replace("concatenate(row, k)", "concatenate(row, row)") + GATHER
    + "  h = s32[8] reshape(g)\n  l = s32[8,6] broadcast(h), dimensions={0}\n"
    "  a = s32[8,6] add(x, l)" + KEPT,
    "numbers of rows that are read": PICK + "  l0 = s32[8,1] slice(n), slice={[0:8],[0:1]}\n"
    "  l1 = s32[8] reshape(l0)\n  l = s32[8,6] broadcast(l1), dimensions={0}\n"
    "  a = s32[8,6] add(x, l)" + KEPT,
    "a sum of rows": "  h = s32[6] reduce(x, zero), dimensions={0}, to_apply=sum\n"
    "  l = s32[8,6] broadcast(h), dimensions={1}\n  a = s32[8,6] add(x, l)" + KEPT,
}  # fmt: skip


@pytest.mark.parametrize("which", TOGETHER)
def test_a_loop_in_which_rows_depend_on_others_needs_them(which: str) -> None:
    _, rewritten = both(loop(TOGETHER[which]))
    assert kinds(rewritten)


def test_a_loop_whose_end_depends_on_all_rows_needs_them() -> None:
    _, rewritten = both(loop(ALONE["with another carry"], ANY))
    assert kinds(rewritten) == ["all-gather"] and rewritten.rewrites == ()


PIVOTED: dict[str, tuple] = {
    "inv": (jnp.linalg.inv, [(Y, matrices(8, 8))], Y),
    "inv of more": (jnp.linalg.inv, [(Y, matrices(12, 4))], Y),
    "solve": (
        lambda a: jnp.linalg.solve(a, jnp.ones((8, 8, 2), "f4")),
        [(Y, matrices(8, 8))],
        P("x"),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("which", PIVOTED)
def test_pivots_of_matrices_whose_rows_are_cut(which: str) -> None:
    f, arguments, out = PIVOTED[which]
    module, judged = program(f, arguments, out)
    written = module.as_written()
    assert "all-gather" in kinds(written) and set(kinds(module)) == {"all-to-all"}
    gathered = max(t.nbytes for t in written.program.slot_types)
    assert max(t.nbytes for t in module.program.slot_types) <= gathered / 4
    judged()
