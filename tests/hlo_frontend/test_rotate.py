"""Pipelined loops: what is carried under way, on which streams, and that nothing changes by it."""

from __future__ import annotations

import json
import random

import numpy as np
import pipelines
import pytest
from executed import execute
from pipelines import circular, expected, hops
from test_unread import ALL, NONE, POISONED, arguments_of
from test_valid import EVERY

from stretto.cli import main
from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.hlo_frontend.passes import rotate
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.runtime.program import Loop, Program, Run, Start, Wait, instructions

PLAIN = ValidPolicy(derive=False, pipeline=False)


@pytest.fixture(autouse=True)
def _whatever_little_it_hides(monkeypatch):
    monkeypatch.setattr(rotate, "LEAST_HIDDEN_FLOPS", 0.0)


def compiled(text: str, devices: int = 2, policy: ValidPolicy = ALL) -> Program:
    return compile_hlo(text, 1, devices, valid=policy).program


def the_loop(program: Program) -> Loop:
    (loop,) = [i for i in instructions(program.body) if isinstance(i, Loop)]
    return loop


def order(loop: Loop) -> list[str]:
    """Runs, starts and waits of a body."""
    kinds = {Run: "run", Start: "start", Wait: "wait"}
    return [kinds[type(i)] for i in loop.body.instructions if type(i) in kinds]


@pytest.mark.parametrize(
    ("stages", "microbatches", "repeats"),
    [(4, 4, 1), (2, 1, 3), *random.Random(2).sample(EVERY, 2)],
)
def test_a_circular_pipeline(stages, microbatches, repeats):
    text = circular(stages, microbatches, repeats)
    xs, ws = arguments_of(stages, microbatches)
    arguments = [xs] * stages, list(ws)
    program = compiled(text, stages)
    assert len(the_loop(program).carried) == 1
    found = execute(program, arguments)
    assert found.bits == execute(compiled(text, stages, PLAIN), arguments).bits
    poisoned = execute(compiled(text, stages, POISONED), arguments, poison=True)
    assert poisoned.bits == found.bits
    np.testing.assert_allclose(found.results[0][stages - 1], expected(xs, ws, repeats), rtol=1e-4)
    bounds = program.collectives[0].valid_iterations
    pairs = [zip(b[::2], b[1::2], strict=True) for b in bounds]
    assert sum(hi - lo + 1 for p in pairs for lo, hi in p) == hops(stages, microbatches, repeats)


def test_what_does_not_depend_on_it_stands_around_it():
    """The indices and the inputs before the wait, what takes the result behind the start."""
    body = order(the_loop(compiled(circular(4, 4), 4)))
    assert body[:1] == ["run"]
    assert body[-1:] == ["run"]
    assert [k for k in body if k != "run"] == ["wait", "start"]


def test_it_is_left_as_it_is_where_there_is_nothing_to_hide_it_behind(monkeypatch):
    monkeypatch.setattr(rotate, "LEAST_HIDDEN_FLOPS", 5e5)
    program = compiled(circular(4, 4), 4)
    assert the_loop(program).carried == ()
    assert program.num_streams == 1
    assert the_loop(compiled(circular(4, 4), 4, ValidPolicy(pipeline=False))).carried == ()


def test_a_phase_that_hides_little_is_no_segment_of_its_own(monkeypatch):
    """The indices hide nothing, taking the result does."""
    monkeypatch.setattr(pipelines, "WIDTH", 100_000)
    monkeypatch.setattr(rotate, "LEAST_HIDDEN_FLOPS", 1e5)
    body = order(the_loop(compiled(circular(4, 4), 4, NONE)))
    assert body == ["wait", "run", "start", "run"]


SIZE = 512  # large enough to be donated
SHAPE = f"f32[{SIZE}]"
TWO = "(s32[], SHAPE, SHAPE, SHAPE)"
LOOP = """HloModule m
body {
  c = TWO parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = SHAPE get-tuple-element(c), index=1
  y = SHAPE get-tuple-element(c), index=2
  z = SHAPE get-tuple-element(c), index=3
  one = s32[] constant(1)
  next = s32[] add(i, one)
  BODY
}
condition {
  c = TWO parameter(0)
  i = s32[] get-tuple-element(c), index=0
  n = s32[] constant(TRIPS)
  less = pred[] compare(i, n), direction=LT
  TEST
}
ENTRY e {
  p = SHAPE parameter(0)
  q = SHAPE parameter(1)
  r = SHAPE parameter(2)
  zero = s32[] constant(0)
  init = TWO tuple(zero, p, q, r)
  loop = TWO while(init), condition=condition, body=body
  a = SHAPE get-tuple-element(loop), index=1
  b = SHAPE get-tuple-element(loop), index=2
  d = SHAPE get-tuple-element(loop), index=3
  ROOT t = (SHAPE, SHAPE, SHAPE) tuple(a, b, d)
}
"""
LESS = "ROOT also = pred[] and(less, less)"
FORWARD = "source_target_pairs={{0,1},{1,2},{2,0}}"
BACKWARD = "source_target_pairs={{1,0},{2,1},{0,2}}"


def looped(body: str, trips: int = 4, test: str = LESS) -> str:
    text = LOOP.replace("BODY", body).replace("TRIPS", str(trips)).replace("TEST", test)
    return text.replace("TWO", TWO).replace("SHAPE", SHAPE)


# Two rings at once, as in a pipeline with its gradient.
RINGS = f"""f = SHAPE cosine(x)
  forth = SHAPE collective-permute(f), channel_id=1, {FORWARD}
  g = SHAPE sine(y)
  back = SHAPE collective-permute(g), channel_id=2, {BACKWARD}
  both = SHAPE add(x, y)
  sum = SHAPE add(z, both)
  ROOT t = TWO tuple(next, forth, back, sum)"""
# A block goes round a ring while it is worked on, as in ring attention.
AROUND = f"""moved = SHAPE collective-permute(x), channel_id=1, {FORWARD}
  product = SHAPE multiply(x, y)
  sum = SHAPE add(z, product)
  ROOT t = TWO tuple(next, moved, y, sum)"""
# What is sent stays behind as a carry, which the next iteration overwrites.
KEPT = f"""f = SHAPE cosine(z)
  moved = SHAPE collective-permute(f), channel_id=1, {FORWARD}
  more = SHAPE add(x, y)
  ROOT t = TWO tuple(next, moved, more, f)"""
# Carries change places: the permute's result comes out twice.
TWICE = f"""f = SHAPE add(x, y)
  moved = SHAPE collective-permute(f), channel_id=1, {FORWARD}
  w = SHAPE cosine(z)
  ROOT t = TWO tuple(next, moved, moved, w)"""
# Nobody reads what comes in.
UNREAD = f"""f = SHAPE cosine(y)
  moved = SHAPE collective-permute(f), channel_id=1, {FORWARD}
  w = SHAPE sine(z)
  ROOT t = TWO tuple(next, moved, y, w)"""


@pytest.mark.parametrize("trips", [0, 1, 5])
@pytest.mark.parametrize(
    ("body", "carried"), [(RINGS, 2), (AROUND, 1), (KEPT, 1), (TWICE, 1), (UNREAD, 1)]
)
def test_results_do_not_change(body: str, carried: int, trips: int):
    text = looped(body, trips)
    rng = np.random.default_rng(0)
    arguments = [list(rng.standard_normal((3, SIZE)).astype(np.float32)) for _ in range(3)]
    program = compiled(text, 3)
    assert len(the_loop(program).carried) == carried
    found = execute(program, arguments)
    plain = compiled(text, 3, PLAIN)
    assert the_loop(plain).carried == ()
    assert found.bits == execute(plain, arguments).bits


def test_rings_do_not_wait_for_each_other():
    program = compiled(looped(RINGS), 3)
    starts = [i for i in the_loop(program).body.instructions if isinstance(i, Start)]
    assert sorted(i.stream for i in starts) == [1, 2]
    assert program.num_streams == 3
    assert order(the_loop(program)).count("wait") == 2


def test_a_block_is_passed_on_before_it_is_worked_on():
    body = order(the_loop(compiled(looped(AROUND), 3)))
    assert body.index("wait") < body.index("start") < len(body) - 1 - body[::-1].index("run")


READ_AT_ONCE = f"""f = SHAPE cosine(x)
  moved = SHAPE collective-permute(f), channel_id=1, {FORWARD}
  sum = SHAPE add(z, moved)
  ROOT t = TWO tuple(next, moved, y, sum)"""
TESTED = """x = SHAPE get-tuple-element(c), index=1
  part = f32[1] slice(x), slice={[0:1]}
  scalar = f32[] reshape(part)
  limit = f32[] constant(1e30)
  small = pred[] compare(scalar, limit), direction=LT
  ROOT also = pred[] and(less, small)"""


def test_what_is_read_before_the_next_iteration_is_not_carried():
    assert the_loop(compiled(looped(READ_AT_ONCE), 3)).carried == ()
    assert the_loop(compiled(looped(AROUND, test=TESTED), 3)).carried == ()


def test_ranks_that_differ_come_back_to_one_stream():
    module = compile_hlo(looped(RINGS), 1, 3, valid=ALL)
    program = module.with_order({})
    assert program.num_streams == 1
    assert the_loop(program).carried == ()
    assert NONE.pipeline


def test_what_is_explained_is_awaited_in_the_next_iteration(tmp_path, capsys):
    """The permute takes a fiftieth of the iteration's second, which is too little for a plan. It runs beside
    the arithmetic: two operations for each element, and one to count."""
    file, costs = tmp_path / "m.hlo", tmp_path / "costs.json"
    file.write_text(looped(AROUND, test="").replace("  less =", "  ROOT less ="))
    link = {"axis_stride": 1, "group_size": 3, "latency_s": 0.0, "bytes_per_s": 50 * SIZE * 4.0}
    compute = {"flops_per_s": 2 * SIZE + 1.0, "bytes_per_s": 1e30, "launch_s": 0.0}
    costs.write_text(json.dumps({"compute": compute, "links": [link]}))
    command = ["explain", str(file), "--costs", str(costs)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["unscheduled_ms"] == pytest.approx(4 * 1020.0)
    assert found["summary"]["predicted_ms"] == pytest.approx(4 * 1000.0)
    assert found["summary"]["exposed_ms"] == pytest.approx(0.0)
    (loop,) = found["summary"]["loops"]
    assert (loop["name"], loop["trips"], loop["late"], loop["why"]) == ("loop", 4, ["moved"], "")
    (body,) = [b for s in found["steps"] for b in s.get("blocks", ()) if b["block"] == "body"]
    transfers = [s for s in body["steps"] if s["collective"]]
    assert [(s["kind"], s["crosses"], s["after"]) for s in transfers] == [
        ("wait", True, []),
        ("start", True, [body["steps"].index(transfers[0])]),
    ]
    assert body["steps"][-1]["kind"] == "compute"
    assert not body["summary"]["planned"]
    assert main(command) == 0
    assert (
        "loop %loop, 4 iterations: 1020.0000 ms an iteration, 1000.0000 ms as 1 end late (%moved)"
        in (capsys.readouterr().out)
    )
    # The program that a job runs by this table does so too, and is predicted to take as long.
    program = compile_hlo(
        file.read_text(), 1, 3, overlap=OverlapPolicy(CostTable.read(str(costs)))
    ).program
    assert len(the_loop(program).carried) == 1
    assert program.predicted is not None
    assert program.predicted.seconds == pytest.approx(4.0)
