"""Order written in HLO, by tokens and otherwise, becomes order of the program, and nothing else.

Results are computed by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from interpreter import Interpreter

from stretto.collectives.order import certificate
from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.runtime.errors import InvalidProgramError
from stretto.runtime.program import Start, instructions

N = 4
SUM = """
sum {
  left = f32[] parameter(0)
  right = f32[] parameter(1)
  ROOT both = f32[] add(left, right)
}
"""
FLAT = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"
ALL_GATHER = f"dimensions={{0}}, {FLAT}"
REDUCE_SCATTER = f"dimensions={{0}}, to_apply=sum, {FLAT}"
ALL_REDUCE = f"to_apply=sum, {FLAT}"
ALL_TO_ALL = "dimensions={0}, channel_id=1, replica_groups={{0,1,2,3}}"
PERMUTE = "channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"

# opcode -> (attributes, result type, what device d gets from x of all devices, of shape [N, 8])
SYNC = {
    "all-gather": (ALL_GATHER, "f32[32]", lambda x, d: x.reshape(-1)),
    "reduce-scatter": (REDUCE_SCATTER, "f32[2]", lambda x, d: x.sum(0)[2 * d : 2 * d + 2]),
    "all-reduce": (ALL_REDUCE, "f32[8]", lambda x, d: x.sum(0)),
    "all-to-all": (ALL_TO_ALL, "f32[8]", lambda x, d: x[:, 2 * d : 2 * d + 2].reshape(-1)),
    "collective-permute": (PERMUTE, "f32[8]", lambda x, d: x[d - 1]),
}


def module(body: str, extra: str = "") -> str:
    """An entry with parameters p and q and ``body``."""
    return f"""HloModule m, num_partitions={N}
{SUM}{extra}
ENTRY e {{
  p = f32[8] parameter(0)
  q = f32[8] parameter(1)
{body}
}}
"""


def names(compiled) -> list[str]:
    collectives = compiled.program.collectives
    starts = (i for i in instructions(compiled.program.body) if isinstance(i, Start))
    return [collectives[i.collective].name for i in starts]


def inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    return rng.integers(-9, 9, (N, 8)).astype(np.float32), rng.integers(-9, 9, (N, 8)).astype("f4")


def check(text: str, opcode: str) -> None:
    """``late`` (an all-reduce of q) runs after ``c``, and both give what they should."""
    compiled = compile_hlo(text, 1, N)
    assert names(compiled) == ["c", "late"]
    assert compiled.schedule.entries[1].after == (0,)
    assert compiled.tokens() == {"c": (), "late": ("c",)}
    for collective in compiled.program.collectives:
        assert len(collective.operands) == len(collective.results) == 1, "a token has no bytes"
    x, y = inputs()
    late, c = Interpreter(compiled.program).run(list(x), list(y))
    for d in range(N):
        np.testing.assert_array_equal(late[d], y.sum(0))
        np.testing.assert_array_equal(c[d], SYNC[opcode][2](x, d))


def late_after(token: str, result: str) -> str:
    """``late`` with ``token`` in its operands and result."""
    return f"""
  late = (f32[8], token[]) all-reduce(q, {token}), {ALL_REDUCE}
  y = f32[8] get-tuple-element(late), index=0
  ROOT out = (f32[8], {result}) tuple(y, cr)
"""


@pytest.mark.parametrize("opcode", SYNC)
def test_token_in_operands_and_result(opcode: str) -> None:
    attributes, result, _ = SYNC[opcode]
    text = module(f"""
  t0 = token[] after-all()
  c = ({result}, token[]) {opcode}(p, t0), {attributes}
  cr = {result} get-tuple-element(c), index=0
  t1 = token[] get-tuple-element(c), index=1
{late_after("t1", result)}""")
    check(text, opcode)


@pytest.mark.parametrize("opcode", SYNC)
def test_token_comes_first_through_serialized_modules(opcode: str) -> None:
    """The token may stand anywhere in the tuple; protos are read as text is."""
    attributes, result, _ = SYNC[opcode]
    text = module(f"""
  t0 = token[] after-all()
  c = (token[], {result}) {opcode}(t0, p), {attributes}
  cr = {result} get-tuple-element(c), index=1
  t1 = token[] get-tuple-element(c), index=0
{late_after("t1", result)}""")
    compiled = compile_hlo(parse_hlo_text(text), 1, N)
    assert names(compiled) == ["c", "late"]
    check(text, opcode)


STARTS = {
    "all-reduce": "(f32[8], token[])",
    "all-gather": "((f32[8], token[]), (f32[32], token[]))",
    "collective-permute": "((f32[8], token[]), (f32[8], token[]))",
}


@pytest.mark.parametrize("opcode", STARTS)
def test_token_through_start_and_done(opcode: str) -> None:
    attributes, result, _ = SYNC[opcode]
    text = module(f"""
  t0 = token[] after-all()
  c = {STARTS[opcode]} {opcode}-start(p, t0), {attributes}
  d = ({result}, token[]) {opcode}-done(c)
  cr = {result} get-tuple-element(d), index=0
  t1 = token[] get-tuple-element(d), index=1
{late_after("t1", result)}""")
    check(text, opcode)


@pytest.mark.parametrize("opcode", ["reduce-scatter", "all-to-all"])
def test_token_through_async_start_and_done(opcode: str) -> None:
    attributes, result, _ = SYNC[opcode]
    wrapped = f"""
wrapped {{
  x = f32[8] parameter(0)
  t = token[] parameter(1)
  ROOT c = ({result}, token[]) {opcode}(x, t), {attributes}
}}
"""
    text = module(
        f"""
  t0 = token[] after-all()
  s = ((f32[8], token[]), ({result}, token[]), s32[]) async-start(p, t0), calls=wrapped
  d = ({result}, token[]) async-done(s)
  cr = {result} get-tuple-element(d), index=0
  t1 = token[] get-tuple-element(d), index=1
{late_after("t1", result)}""",
        wrapped,
    )
    check(text, opcode)


ORDERED = {
    "control predecessor": (
        f"late = f32[8] all-reduce(q), {ALL_REDUCE}, control-predecessors={{cr}}",
        "late",
    ),
    "add-dependency": (
        f"""t1 = token[] after-all(cr)
  q1 = f32[8] add-dependency(q, t1)
  late = f32[8] all-reduce(q1), {ALL_REDUCE}""",
        "late",
    ),
    "after-all of a token": (
        f"""t1 = token[] after-all(cr)
  t2 = token[] after-all()
  t3 = token[] after-all(t2, t1)
  late = (f32[8], token[]) all-reduce(q, t3), {ALL_REDUCE}
  y = f32[8] get-tuple-element(late), index=0""",
        "y",
    ),
    "barrier": (
        f"""b = (f32[8], f32[8]) tuple(q, cr)
  b1 = (f32[8], f32[8]) opt-barrier(b)
  q1 = f32[8] get-tuple-element(b1), index=0
  late = f32[8] all-reduce(q1), {ALL_REDUCE}""",
        "late",
    ),
    "barrier of a recomputation, which only plans may pass": (
        f"""b = (f32[8], f32[8]) tuple(q, cr)
  b1 = (f32[8], f32[8]) opt-barrier(b), metadata={{op_name="jit(f)/remat2"}}
  q1 = f32[8] get-tuple-element(b1), index=0
  late = f32[8] all-reduce(q1), {ALL_REDUCE}""",
        "late",
    ),
    "barrier around a flag": (
        f"""f = pred[] constant(false)
  b = (f32[8], pred[]) tuple(cr, f)
  b1 = (f32[8], pred[]) opt-barrier(b)
  f1 = pred[] get-tuple-element(b1), index=1
  b2 = (f32[8], pred[]) tuple(q, f1)
  b3 = (f32[8], pred[]) opt-barrier(b2)
  q1 = f32[8] get-tuple-element(b3), index=0
  late = f32[8] all-reduce(q1), {ALL_REDUCE}""",
        "late",
    ),
}


@pytest.mark.parametrize("kind", ORDERED)
def test_order_by_other_means(kind: str) -> None:
    lines, y = ORDERED[kind]
    text = module(f"""
  c = f32[8] all-reduce(p), {ALL_REDUCE}
  cr = f32[8] copy(c)
  {lines}
  ROOT out = (f32[8], f32[8]) tuple({y}, cr)
""")
    check(text, "all-reduce")


def test_without_order_depth_decides() -> None:
    """The modules above would fail their test if their tokens were not read."""
    text = module(f"""
  c0 = f32[8] collective-permute(p), {PERMUTE}
  c = f32[8] all-reduce(c0), {ALL_REDUCE}
  late = f32[8] all-reduce(q), {ALL_REDUCE}
  ROOT out = (f32[8], f32[8]) tuple(late, c)
""")
    assert names(compile_hlo(text, 1, N)) == ["late", "c0", "c"]
    ordered = text.replace("all-reduce(q), ", "all-reduce(q), control-predecessors={c}, ")
    assert names(compile_hlo(ordered, 1, N)) == ["c0", "c", "late"]


def test_token_carried_by_a_loop() -> None:
    loop = f"""
body {{
  c = (s32[], f32[8], token[]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[8] get-tuple-element(c), index=1
  t = token[] get-tuple-element(c), index=2
  one = s32[] constant(1)
  j = s32[] add(i, one)
  step = (f32[8], token[]) collective-permute(x, t), {PERMUTE}
  y = f32[8] get-tuple-element(step), index=0
  u = token[] get-tuple-element(step), index=1
  ROOT n = (s32[], f32[8], token[]) tuple(j, y, u)
}}
condition {{
  c = (s32[], f32[8], token[]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  n = s32[] constant(3)
  ROOT p = pred[] compare(i, n), direction=LT
}}
"""
    text = module(
        f"""
  zero = s32[] constant(0)
  t0 = token[] after-all()
  init = (s32[], f32[8], token[]) tuple(zero, p, t0)
  w = (s32[], f32[8], token[]) while(init), condition=condition, body=body
  cr = f32[8] get-tuple-element(w), index=1
  t1 = token[] get-tuple-element(w), index=2
{late_after("t1", "f32[8]")}""",
        loop,
    )
    compiled = compile_hlo(text, 1, N)
    entry, late = compiled.schedule.entries
    assert (entry.kind, late.name, late.after) == ("loop", "late", (0,))
    assert [e.name for e in entry.children[1].entries] == ["step"]
    x, y = inputs()
    got, moved = Interpreter(compiled.program).run(list(x), list(y))
    for d in range(N):
        np.testing.assert_array_equal(got[d], y.sum(0))
        np.testing.assert_array_equal(moved[d], x[d - 3])


INDEPENDENT = module(f"""
  a = f32[32] all-gather(p), {ALL_GATHER}
  b = f32[2] reduce-scatter(q), {REDUCE_SCATTER}
  s = f32[2] add(b, b)
  c = f32[8] all-gather(s), {ALL_GATHER}
  ROOT out = (f32[32], f32[8]) tuple(a, c)
""")


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_another_order(order: tuple[int, ...]) -> None:
    compiled = compile_hlo(INDEPENDENT, 1, N)
    before = names(compiled)
    assert [e.after for e in compiled.schedule.entries] == [(), (), (1,)]
    program = compiled.with_order({(): order})
    starts = [i for i in instructions(program.body) if isinstance(i, Start)]
    assert [program.collectives[s.collective].name for s in starts] == [before[i] for i in order]
    x, y = inputs()
    a, c = Interpreter(program).run(list(x), list(y))
    for d in range(N):
        np.testing.assert_array_equal(a[d], x.reshape(-1))
        np.testing.assert_array_equal(c[d], 2 * y.sum(0))


def test_an_order_against_the_data_is_refused() -> None:
    compiled = compile_hlo(INDEPENDENT, 1, N)
    with pytest.raises(InvalidProgramError, match="contradicts"):
        compiled.with_order({(): (2, 1, 0)})
    with pytest.raises(InvalidProgramError, match="no order of the 3"):
        compiled.with_order({(): (0, 1)})


def test_certificates_do_not_depend_on_the_hash_seed() -> None:
    code = f"""
import sys
from stretto.collectives.order import certificate
from stretto.hlo_frontend.compile import compile_hlo
from stretto.runtime.program.codec import to_bytes
import hashlib
for _ in range(10):
    c = compile_hlo({INDEPENDENT!r}, 1, {N})
    print(certificate(c.schedule).hex(), c.schedule.to_bytes().hex(),
          hashlib.sha256(to_bytes(c.program)).hexdigest())
"""
    printed: set[str] = set()
    for seed in ("1", "22", "333"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        lines = done.stdout.splitlines()
        assert len(lines) == 10
        printed.update(lines)
    assert len(printed) == 1
    expected = certificate(compile_hlo(INDEPENDENT, 1, N).schedule).hex()
    assert printed.pop().startswith(expected)


def test_a_fixture_parses_as_it_is_meant() -> None:
    """XLA's parser keeps the tokens that its verifier would refuse."""
    text = module(f"""
  t0 = token[] after-all()
  c = (f32[32], token[]) all-gather(p, t0), {ALL_GATHER}
  ROOT cr = f32[32] get-tuple-element(c), index=0
""")
    (gather,) = [
        i for i in Module.parse(parse_hlo_text(text)).entry.instructions if i.opcode == "all-gather"
    ]
    assert [o.opcode for o in gather.operands] == ["parameter", "after-all"]
