"""Conditions of loops in their bodies: how often segments run, and that results stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
from executed import execute

from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.passes import conditions
from stretto.runtime.program import Loop, Program, Run, instructions

CARRIES = "(f32[4], f32[], s32[])"
GROUPS = "replica_groups={{0,1}}, channel_id=1, use_global_device_ids=true, to_apply=sum"
# The sum over all devices and the counter, both below a bound.
BELOW = """  most = f32[] constant(100)
  small = pred[] compare(s, most), direction=LT
  few = s32[] constant(9)
  left = pred[] compare(i, few), direction=LT
  ROOT on = pred[] and(small, left)"""
# A body that computes behind its sum, which the condition reads.
BEHIND = """  e = f32[4] broadcast(t), dimensions={}
  a = f32[4] add(y, e)"""


def loop(condition: str = BELOW, body: str = BEHIND, first: str = "zero") -> str:
    """A loop that doubles an array ``x``, sums it over both devices and adds the sum, ``s``, to it: a body is
    a segment, a sum and a segment."""
    return f"""HloModule loop, num_partitions=2
sum {{
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT v = f32[] add(l, r)
}}
condition {{
  c = {CARRIES} parameter(0)
  x = f32[4] get-tuple-element(c), index=0
  s = f32[] get-tuple-element(c), index=1
  i = s32[] get-tuple-element(c), index=2
{condition}
}}
body {{
  c = {CARRIES} parameter(0)
  x = f32[4] get-tuple-element(c), index=0
  i = s32[] get-tuple-element(c), index=2
  y = f32[4] add(x, x)
  none = f32[] constant(0)
  part = f32[] reduce(y, none), dimensions={{0}}, to_apply=sum
  t = f32[] all-reduce(part), {GROUPS}
{body}
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT o = {CARRIES} tuple(a, t, next)
}}
ENTRY e {{
  p = f32[4] parameter(0)
  n = s32[] parameter(1)
  zero = f32[] constant(0)
  given = {CARRIES} tuple(p, {first}, n)
  w = {CARRIES} while(given), condition=condition, body=body
  r = f32[4] get-tuple-element(w), index=0
  k = s32[] get-tuple-element(w), index=2
  ROOT q = (f32[4], s32[]) tuple(r, k)
}}
"""


def as_written(text: str, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program with its conditions where they are."""
    with monkeypatch.context() as patched:
        patched.setattr(conditions, "_moves", lambda loop: False)
        return compile_hlo(text, 1, 2).program


def given(first: int = 0, second: int | None = None) -> list[list[np.ndarray]]:
    """Arguments with which both counters begin."""
    x = np.arange(4, dtype=np.float32) / 8
    counters = [np.int32(first), np.int32(first if second is None else second)]
    return [[x, x + 1], counters]


def in_condition(program: Program) -> int:
    """How many segments conditions run."""
    loops = [i for i in instructions(program.body) if isinstance(i, Loop)]
    return sum(isinstance(i, Run) for one in loops for i in instructions(one.condition))


@pytest.mark.parametrize("first", [0, 8, 9])
def test_an_iteration_runs_no_segment_for_its_condition(first, monkeypatch):
    """Also where it ends at once, or after one iteration: the condition is asked once more than the body
    is run."""
    before, after = as_written(loop(), monkeypatch), compile_hlo(loop(), 1, 2).program
    found, expected = execute(after, given(first)), execute(before, given(first))
    assert found.bits == expected.bits
    iterations = int(found.results[1][0]) - first
    assert iterations == {0: 2, 8: 1, 9: 0}[first]
    # Events of two devices. Ahead of the loop constants are made, by the segment that asks.
    assert expected.count("segment") == 2 * (1 + 3 * iterations + 1)
    assert found.count("segment") == 2 * (1 + 2 * iterations)
    assert (in_condition(before), in_condition(after)) == (1, 0)


def test_the_answer_is_of_the_new_carry(monkeypatch):
    """The body overwrites the carry that the condition reads, and the condition reads all of it."""
    reading = """  none = f32[] constant(0)
  all = f32[] reduce(x, none), dimensions={0}, to_apply=sum
  most = f32[] constant(1e9)
  ROOT on = pred[] compare(all, most), direction=LT"""
    text = loop(reading).replace("f32[4]", "f32[512]")
    program = compile_hlo(text, 1, 2).program
    assert in_condition(program) == 0
    assert any(i.donated for i in instructions(program.body) if isinstance(i, Run))
    ones = [[np.ones(512, np.float32)] * 2, [np.int32(0)] * 2]
    found = execute(program, ones)
    assert found.bits == execute(as_written(text, monkeypatch), ones).bits
    # 512 elements of 1, 2050 and 2050 squared.
    assert [int(n) for n in found.results[1]] == [2, 2]


def test_an_answer_behind_a_collective_is_a_segment_as_before(monkeypatch):
    """What the condition reads, the body's last collective gives: nothing computes behind it."""
    text = loop(body="  a = f32[4] copy(y)")
    before, after = as_written(text, monkeypatch), compile_hlo(text, 1, 2).program
    found, expected = execute(after, given()), execute(before, given())
    assert found.bits == expected.bits
    # Constants and the first answer come of one segment.
    assert found.count("segment") == expected.count("segment") - 2


def test_each_device_leaves_by_its_own_answer(monkeypatch):
    """Devices that do not meet in a loop: each is asked for itself, and keeps its carries."""
    text = loop().replace("{{0,1}}", "{{0},{1}}").replace("small, left", "left, left")
    before, after = as_written(text, monkeypatch), compile_hlo(text, 1, 2).program
    found = execute(after, given(0, 6))
    assert found.bits == execute(before, given(0, 6)).bits
    assert [int(n) for n in found.results[1]] == [9, 9]
    assert in_condition(after) == 0
    # 9 and 3 iterations of two segments, and the first answers.
    assert found.count("segment") == 2 * 9 + 2 * 3 + 2


def test_a_loop_in_a_loop_asks_in_both_bodies():
    text = loop().replace("ENTRY e {", f"""outer {{
  c = {CARRIES} parameter(0)
  x = f32[4] get-tuple-element(c), index=0
  i = s32[] get-tuple-element(c), index=2
  zero = f32[] constant(0)
  given = {CARRIES} tuple(x, zero, i)
  w = {CARRIES} while(given), condition=condition, body=body
  y = f32[4] get-tuple-element(w), index=0
  t = f32[] get-tuple-element(w), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT o = {CARRIES} tuple(y, t, next)
}}
ENTRY e {{""")  # fmt: skip
    head, _, entry = text.rpartition("ENTRY")
    program = compile_hlo(head + "ENTRY" + entry.replace("body=body", "body=outer"), 1, 2).program
    assert in_condition(program) == 0
    loops = [i for i in instructions(program.body) if isinstance(i, Loop)]
    assert len(loops) == 2
    assert execute(program, given()).results[1][0] == 1


STAYS = {
    "it calls out": """  most = f32[] constant(100)
  small = pred[] compare(s, most), direction=LT
  ROOT on = pred[] custom-call(small), custom_call_target="xla_ffi_python_cpu_callback\"""",
    "it communicates": BELOW.replace("compare(s,", "compare(u,").replace(
        "  most", f"  u = f32[] all-reduce(s), {GROUPS.replace('id=1', 'id=2')}\n  most"
    ),
    "it is a carry": "  few = s32[] constant(9)\n  ROOT on = pred[] constant(true)",
    "its length is known": """  few = s32[] constant(9)
  ROOT left = pred[] compare(i, few), direction=LT""",
}


@pytest.mark.parametrize("why", STAYS)
def test_what_stays(why, monkeypatch):
    text = loop(STAYS[why])
    if "known" in why:
        text = text.replace("n = s32[] parameter(1)", "n = s32[] constant(0)")
    assert compile_hlo(text, 1, 2).program == as_written(text, monkeypatch)


def test_a_loop_that_does_not_communicate_stays(monkeypatch):
    text = loop().replace(f"all-reduce(part), {GROUPS}", "copy(part)")
    text = text.replace("  one = s32", "  id = u32[] partition-id()\n  one = s32")
    assert compile_hlo(text, 1, 2).program == as_written(text, monkeypatch)
