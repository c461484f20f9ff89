"""Pseudo-tokens leave the program; what only looks like one stays.

Modules come in pairs: with pseudo-tokens and the same without. Results are held against numpy.
"""

from __future__ import annotations

import numpy as np
import pytest
from interpreter import Interpreter

from stretto.collectives.ops import Kind
from stretto.hlo_frontend.compile import CompiledModule, compile_hlo
from stretto.runtime.program import Run, Start, instructions

N = 4
SUM = """
sum {
  left = f32[] parameter(0)
  right = f32[] parameter(1)
  ROOT both = f32[] add(left, right)
}
"""
FLAT = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"
AG = f"dimensions={{0}}, {FLAT}"
RS = f"dimensions={{0}}, to_apply=sum, {FLAT}"
AR = f"to_apply=sum, {FLAT}"


def module(body: str, extra: str = "") -> str:
    return f"""HloModule m, num_partitions={N}
{SUM}{extra}
ENTRY e {{
  p = f32[8] parameter(0)
  q = f32[8] parameter(1)
  zero = f32[] constant(0)
{body}
}}
"""


def arithmetic(compiled: CompiledModule) -> int:
    program = compiled.program
    runs = [i for i in instructions(program.body) if isinstance(i, Run)]
    return sum(program.segments[r.segment].arithmetic for r in runs)


def names(compiled: CompiledModule) -> list[str]:
    starts = [i for i in instructions(compiled.program.body) if isinstance(i, Start)]
    return [compiled.program.collectives[s.collective].name for s in starts]


def payload(compiled: CompiledModule) -> int:
    return sum(t.nbytes for c in compiled.program.collectives for t in c.operands)


def inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.integers(-9, 9, (N, 8)).astype("f4"), rng.integers(-9, 9, (N, 8)).astype("f4")


def expected(x: np.ndarray, y: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
    """The gathered x, twice, and the scattered sum of y."""
    return 2 * x.reshape(-1), y.sum(0)[2 * d : 2 * d + 2]


# The first collective gives `g` (all-gather of p), the second `s` (reduce-scatter of q).
PLAIN = f"""
  g = f32[32] all-gather(p), {AG}
  h = f32[32] add(g, g)
  s = f32[2] reduce-scatter(q), {RS}
  ROOT out = (f32[32], f32[2]) tuple(h, s)
"""

MULTIPLIED = {
    "slice, then zero": """v = f32[1] slice(g), slice={[0:1]}
  r = f32[] reshape(v)
  t = f32[] multiply(r, zero)
  tb = f32[8] broadcast(t), dimensions={}
  q1 = f32[8] add(q, tb)""",
    "zero on the left, token first in the sum": """v = f32[1] slice(g), slice={[3:4]}
  r = f32[] reshape(v)
  t = f32[] multiply(zero, r)
  tb = f32[8] broadcast(t), dimensions={}
  q1 = f32[8] add(tb, q)""",
    "zero times the broadcast token": """v = f32[1] slice(g), slice={[0:1]}
  r = f32[] reshape(v)
  rb = f32[8] broadcast(r), dimensions={}
  zb = f32[8] broadcast(zero), dimensions={}
  tb = f32[8] multiply(rb, zb)
  q1 = f32[8] add(q, tb)""",
    "zero times the whole, then one element": """zb = f32[32] broadcast(zero), dimensions={}
  gz = f32[32] multiply(g, zb)
  v = f32[1] slice(gz), slice={[0:1]}
  t = f32[] reshape(v)
  tb = f32[8] broadcast(t), dimensions={}
  q1 = f32[8] add(q, tb)""",
    "of what was computed from the result": """v = f32[1] slice(h), slice={[0:1]}
  r = f32[] reshape(v)
  t = f32[] multiply(r, zero)
  tb = f32[8] broadcast(t), dimensions={}
  q1 = f32[8] add(q, tb)""",
    "through bf16": """v = f32[1] slice(g), slice={[0:1]}
  r = f32[] reshape(v)
  c = bf16[] convert(r)
  z = bf16[] constant(0)
  t = bf16[] multiply(c, z)
  f = f32[] convert(t)
  tb = f32[8] broadcast(f), dimensions={}
  q1 = f32[8] add(q, tb)""",
    "twice zero": """v = f32[1] slice(g), slice={[0:1]}
  r = f32[] reshape(v)
  t = f32[] multiply(r, zero)
  u = f32[] multiply(t, zero)
  tb = f32[8] broadcast(u), dimensions={}
  q1 = f32[8] add(q, tb)""",
    "a running token": """t0 = f32[] constant(0)
  v = f32[1] slice(g), slice={[0:1]}
  r = f32[] reshape(v)
  t = f32[] multiply(t0, r)
  w = f32[1] slice(h), slice={[0:1]}
  x = f32[] reshape(w)
  u = f32[] multiply(t, x)
  tb = f32[8] broadcast(u), dimensions={}
  q1 = f32[8] add(q, tb)""",
}


def check(text: str, first: str = "g", second: str = "s") -> None:
    plain, compiled = compile_hlo(module(PLAIN), 1, N), compile_hlo(text, 1, N)
    assert arithmetic(compiled) == arithmetic(plain)
    assert payload(compiled) == payload(plain)
    assert names(compiled) == [first, second]
    assert compiled.schedule.entries[1].after == (0,), "the token still orders"
    x, y = inputs()
    h, s = Interpreter(compiled.program).run(list(x), list(y))
    for d in range(N):
        np.testing.assert_array_equal(h[d], expected(x, y, d)[0])
        np.testing.assert_array_equal(s[d], expected(x, y, d)[1])
    kept = compile_hlo(text, 1, N, pseudo_tokens=False)
    assert arithmetic(kept) + payload(kept) > arithmetic(plain) + payload(plain)
    assert names(kept) == [first, second]
    h, s = Interpreter(kept.program).run(list(x), list(y))
    for d in range(N):
        np.testing.assert_array_equal(s[d], expected(x, y, d)[1])


@pytest.mark.parametrize("form", MULTIPLIED)
def test_a_zero_added_to_the_operand(form: str) -> None:
    check(
        module(f"""
  g = f32[32] all-gather(p), {AG}
  h = f32[32] add(g, g)
  {MULTIPLIED[form]}
  s = f32[2] reduce-scatter(q1), {RS}
  ROOT out = (f32[32], f32[2]) tuple(h, s)
""")
    )


def test_a_zero_added_inside_a_fusion() -> None:
    fused = """
fused {
  a = f32[8] parameter(0)
  b = f32[32] parameter(1)
  z = f32[] constant(0)
  v = f32[1] slice(b), slice={[0:1]}
  r = f32[] reshape(v)
  t = f32[] multiply(r, z)
  tb = f32[8] broadcast(t), dimensions={}
  ROOT moved = f32[8] add(a, tb)
}
"""
    text = f"""
  g = f32[32] all-gather(p), {AG}
  h = f32[32] add(g, g)
  q1 = f32[8] fusion(q, g), kind=kLoop, calls=fused
  s = f32[2] reduce-scatter(q1), {RS}
  ROOT out = (f32[32], f32[2]) tuple(h, s)
"""
    check(module(text, fused))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_extra_operand_of_all_reduces(dtype: str) -> None:
    plain = compile_hlo(
        module(f"""
  a = f32[8] all-reduce(p), {AR}
  b = f32[8] all-reduce(q), {AR}
  ROOT out = (f32[8], f32[8]) tuple(a, b)
"""),
        1,
        N,
    )
    compiled = compile_hlo(
        module(f"""
  z = {dtype}[] constant(0)
  ra = (f32[8], {dtype}[]) all-reduce(p, z), {AR}
  a = f32[8] get-tuple-element(ra), index=0
  ta = {dtype}[] get-tuple-element(ra), index=1
  v = f32[1] slice(a), slice={{[0:1]}}
  r = f32[] reshape(v)
  c = {dtype}[] convert(r)
  t = {dtype}[] multiply(c, ta)
  rb = ({dtype}[], f32[8]) all-reduce(t, q), {AR}
  b = f32[8] get-tuple-element(rb), index=1
  ROOT out = (f32[8], f32[8]) tuple(a, b)
"""),
        1,
        N,
    )
    assert arithmetic(compiled) == arithmetic(plain) == 0
    assert payload(compiled) == payload(plain) == 64
    assert names(compiled) == ["ra", "rb"]
    assert compiled.schedule.entries[1].after == (0,)
    assert [e.key for e in compiled.schedule.entries] == [e.key for e in plain.schedule.entries]
    x, y = inputs()
    a, b = Interpreter(compiled.program).run(list(x), list(y))
    for d in range(N):
        np.testing.assert_array_equal(a[d], x.sum(0))
        np.testing.assert_array_equal(b[d], y.sum(0))


LOOP = """
body {{
  c = (s32[], f32[8], f32[]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[8] get-tuple-element(c), index=1
  t = f32[] get-tuple-element(c), index=2
  one = s32[] constant(1)
  j = s32[] add(i, one)
  {token}
  tb = f32[8] broadcast(z), dimensions={{}}
  x1 = f32[8] add(x, tb)
  g = f32[32] all-gather(x1), {AG}
  v = f32[1] slice(g), slice={{[0:1]}}
  r = f32[] reshape(v)
  zero = f32[] constant(0)
  u = f32[] multiply(r, zero)
  ub = f32[32] broadcast(u), dimensions={{}}
  g1 = f32[32] add(g, ub)
  s = f32[8] reduce-scatter(g1), dimensions={{0}}, to_apply=sum, {FLAT}
  w = f32[1] slice(s), slice={{[0:1]}}
  k = f32[] reshape(w)
  t1 = f32[] multiply(k, zero)
  ROOT n = (s32[], f32[8], f32[]) tuple(j, s, t1)
}}
condition {{
  c = (s32[], f32[8], f32[]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  n = s32[] constant(2)
  ROOT p = pred[] compare(i, n), direction=LT
}}
"""
LOOP_ENTRY = f"""
  i0 = s32[] constant(0)
  t0 = f32[] constant(FIRST)
  init = (s32[], f32[8], f32[]) tuple(i0, p, t0)
  l = (s32[], f32[8], f32[]) while(init), condition=condition, body=body
  m = f32[8] get-tuple-element(l), index=1
  t1 = f32[] get-tuple-element(l), index=2
  last = f32[] multiply(zero, t1)
  lb = f32[8] broadcast(last), dimensions={{}}
  q1 = f32[8] add(q, lb)
  end = f32[8] all-reduce(q1), {AR}
"""
PAIR = "ROOT out = (f32[8], f32[8]) tuple(m, end)"
WITH_TOKEN = "ROOT out = (f32[], f32[8], f32[8]) tuple(last, m, end)"
CARRIED = "z = f32[] copy(t)"
MULTIPLIED_INSIDE = """nil = f32[] constant(0)
  z = f32[] multiply(nil, t)"""


@pytest.mark.parametrize(
    ("token", "first"), [(CARRIED, 0), (MULTIPLIED_INSIDE, 0), (MULTIPLIED_INSIDE, 1)]
)
def test_carried_by_a_loop(token: str, first: int) -> None:
    """Also where the first token is no zero, as long as it is multiplied by one."""
    loop = LOOP.format(token=token, AG=AG, FLAT=FLAT)
    text = module(LOOP_ENTRY.replace("FIRST", str(first)) + PAIR, loop)
    compiled = compile_hlo(text, 1, N)
    assert len(compiled.program.inputs) == 2
    (step,) = [e for e in compiled.schedule.entries if e.kind == "loop"]
    last = compiled.schedule.entries[-1]
    assert [e.name for e in step.children[1].entries] == ["g", "s"]
    assert (last.name, last.after) == ("end", (0,))
    assert arithmetic(compiled) == 1  # the loop's counter; its condition is known
    assert payload(compiled) == 4 * (8 + 32 + 8)
    x, y = inputs()
    moved, b = Interpreter(compiled.program).run(list(x), list(y))
    for d in range(N):
        # Every device sums N equal gathered arrays and keeps its own part.
        np.testing.assert_array_equal(moved[d], x[d] * N**2)
        np.testing.assert_array_equal(b[d], y.sum(0))


def test_a_loop_token_that_is_a_result_stays() -> None:
    loop = LOOP.format(token=CARRIED, AG=AG, FLAT=FLAT)
    text = module(LOOP_ENTRY.replace("FIRST", "0") + WITH_TOKEN, loop)
    compiled = compile_hlo(text, 1, N)
    kept = compile_hlo(text, 1, N, pseudo_tokens=False)
    # The token inside the body, between its two collectives, feeds nothing else and may go.
    assert arithmetic(compiled) == arithmetic(kept) - 2
    x, y = inputs()
    t, moved, b = Interpreter(compiled.program).run(list(x), list(y))
    for d in range(N):
        assert t[d] == 0
        np.testing.assert_array_equal(moved[d], x[d] * N**2)
        np.testing.assert_array_equal(b[d], y.sum(0))


def test_carried_through_a_branch() -> None:
    branches = f"""
yes {{
  a = (f32[8], f32[]) parameter(0)
  x = f32[8] get-tuple-element(a), index=0
  t = f32[] get-tuple-element(a), index=1
  tb = f32[8] broadcast(t), dimensions={{}}
  x1 = f32[8] add(x, tb)
  r = f32[8] all-reduce(x1), {AR}
  v = f32[1] slice(r), slice={{[0:1]}}
  k = f32[] reshape(v)
  u = f32[] multiply(t, k)
  ROOT out = (f32[8], f32[]) tuple(r, u)
}}
no {{
  a = (f32[8], f32[]) parameter(0)
  ROOT out = (f32[8], f32[]) copy(a)
}}
"""
    text = module(
        f"""
  g = f32[8] all-reduce(p), {AR}
  v = f32[1] slice(g), slice={{[0:1]}}
  r = f32[] reshape(v)
  t = f32[] multiply(r, zero)
  on = pred[] constant(true)
  arg = (f32[8], f32[]) tuple(q, t)
  c = (f32[8], f32[]) conditional(on, arg, arg), true_computation=yes, false_computation=no
  x = f32[8] get-tuple-element(c), index=0
  u = f32[] get-tuple-element(c), index=1
  ub = f32[8] broadcast(u), dimensions={{}}
  p1 = f32[8] add(p, ub)
  z = f32[8] all-reduce(p1), {AR}
  ROOT out = (f32[8], f32[8], f32[8]) tuple(g, x, z)
""",
        branches,
    )
    compiled = compile_hlo(text, 1, N)
    assert arithmetic(compiled) == 0
    g, c, z = compiled.schedule.entries
    assert (g.after, c.after, z.after) == ((), (0,), (1,))
    x, y = inputs()
    for got, want in zip(
        Interpreter(compiled.program).run(list(x), list(y)), (x, y, x), strict=True
    ):
        for d in range(N):
            np.testing.assert_array_equal(got[d], want.sum(0))


def kept_as_it_is(text: str) -> CompiledModule:
    compiled = compile_hlo(text, 1, N)
    kept = compile_hlo(text, 1, N, pseudo_tokens=False)
    assert arithmetic(compiled) == arithmetic(kept) > 0
    assert payload(compiled) == payload(kept)
    return compiled


def test_a_token_that_is_a_result_stays() -> None:
    compiled = kept_as_it_is(
        module(f"""
  g = f32[32] all-gather(p), {AG}
  v = f32[1] slice(g), slice={{[0:1]}}
  r = f32[] reshape(v)
  t = f32[] multiply(r, zero)
  tb = f32[8] broadcast(t), dimensions={{}}
  q1 = f32[8] add(q, tb)
  s = f32[2] reduce-scatter(q1), {RS}
  ROOT out = (f32[], f32[2]) tuple(t, s)
""")
    )
    x, y = inputs()
    x[0, 0] = np.inf
    t, s = Interpreter(compiled.program).run(list(x), list(y))
    assert np.isnan(t[0]) and np.isnan(s[0]).all()


def test_an_extra_operand_whose_result_is_needed_stays() -> None:
    compiled = kept_as_it_is(
        module(f"""
  ra = (f32[8], f32[]) all-reduce(p, zero), {AR}
  a = f32[8] get-tuple-element(ra), index=0
  n = f32[] get-tuple-element(ra), index=1
  m = f32[] exponential(n)
  ROOT out = (f32[8], f32[]) tuple(a, m)
""")
    )
    assert len(compiled.program.collectives[0].operands) == 2


def test_a_scalar_that_is_no_zero_stays() -> None:
    kept_as_it_is(
        module(f"""
  half = f32[] constant(0.5)
  g = f32[32] all-gather(p), {AG}
  v = f32[1] slice(g), slice={{[0:1]}}
  r = f32[] reshape(v)
  t = f32[] multiply(r, half)
  tb = f32[8] broadcast(t), dimensions={{}}
  q1 = f32[8] add(q, tb)
  s = f32[2] reduce-scatter(q1), {RS}
  ROOT out = (f32[32], f32[2]) tuple(g, s)
""")
    )


def test_a_sum_that_feeds_no_collective_stays() -> None:
    """Multiplying by zero to spread NaNs is arithmetic like any other."""
    compiled = kept_as_it_is(
        module(f"""
  g = f32[32] all-gather(p), {AG}
  v = f32[1] slice(g), slice={{[0:1]}}
  r = f32[] reshape(v)
  t = f32[] multiply(r, zero)
  tb = f32[8] broadcast(t), dimensions={{}}
  q1 = f32[8] add(q, tb)
  ROOT out = (f32[8]) tuple(q1)
""")
    )
    x, y = inputs()
    x[0, 0] = np.nan
    (out,) = Interpreter(compiled.program).run(list(x), list(y))
    assert np.isnan(out[0]).all()


def test_zeros_of_whole_arrays_stay() -> None:
    """``0 * x`` added element by element is no scalar."""
    kept_as_it_is(
        module(f"""
  g = f32[8] all-reduce(p), {AR}
  zb = f32[8] broadcast(zero), dimensions={{}}
  t = f32[8] multiply(g, zb)
  q1 = f32[8] add(q, t)
  s = f32[2] reduce-scatter(q1), {RS}
  ROOT out = (f32[8], f32[2]) tuple(g, s)
""")
    )


def test_a_carry_that_is_zero_only_at_first_stays() -> None:
    loop = f"""
body {{
  c = (s32[], f32[8], f32[]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[8] get-tuple-element(c), index=1
  t = f32[] get-tuple-element(c), index=2
  one = s32[] constant(1)
  j = s32[] add(i, one)
  tb = f32[8] broadcast(t), dimensions={{}}
  x1 = f32[8] add(x, tb)
  g = f32[8] all-reduce(x1), {AR}
  v = f32[1] slice(g), slice={{[0:1]}}
  r = f32[] reshape(v)
  ROOT n = (s32[], f32[8], f32[]) tuple(j, g, r)
}}
condition {{
  c = (s32[], f32[8], f32[]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  n = s32[] constant(2)
  ROOT p = pred[] compare(i, n), direction=LT
}}
"""
    compiled = kept_as_it_is(
        module(
            """
  i0 = s32[] constant(0)
  init = (s32[], f32[8], f32[]) tuple(i0, p, zero)
  l = (s32[], f32[8], f32[]) while(init), condition=condition, body=body
  ROOT x = f32[8] get-tuple-element(l), index=1
""",
            loop,
        )
    )
    x, y = inputs()
    (out,) = Interpreter(compiled.program).run(list(x), list(y))
    once = x.sum(0)
    np.testing.assert_array_equal(out[0], (once + once[0]) * N)


def test_a_reducer_over_several_operands_keeps_its_zero() -> None:
    """With a reducer of its own, the zero may decide what becomes of the other operand."""
    pick = """
pick {
  a0 = f32[] parameter(0)
  a1 = f32[] parameter(1)
  b0 = f32[] parameter(2)
  b1 = f32[] parameter(3)
  le = pred[] compare(a1, b1), direction=LE
  r0 = f32[] select(le, a0, b0)
  r1 = f32[] minimum(a1, b1)
  ROOT r = (f32[], f32[]) tuple(r0, r1)
}
"""
    text = module(
        f"""
  v = f32[1] slice(p), slice={{[0:1]}}
  x = f32[] reshape(v)
  t = f32[] multiply(x, zero)
  c = (f32[], f32[]) all-reduce(x, t), to_apply=pick, {FLAT}
  a = f32[] get-tuple-element(c), index=0
  ROOT out = (f32[]) tuple(a)
""",
        pick,
    )
    compiled = compile_hlo(text, 1, N)
    (collective,) = compiled.program.collectives
    assert collective.kind is Kind.ALL_REDUCE
    assert len(collective.operands) == 2
