"""Valid iterations: the attribute, the proof, and what the proof must never do.

The oracle is `pipelines.Evaluator`, which runs the HLO in numpy with every transfer made.
"""

from __future__ import annotations

import itertools
import os
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, manual, mesh
from jax.experimental.xla_metadata import set_xla_metadata
from pipelines import Evaluator, circular, expected, hops, mutated, valid_iterations

import stretto.lax
from stretto.hlo_frontend.collectives import CollectiveReader
from stretto.hlo_frontend.compile import CompileSpec, compile_hlo, compile_stablehlo
from stretto.hlo_frontend.flatten import flatten
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.iterations import LAST
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.hlo_frontend.passes.valid.liveness import _Walk
from stretto.hlo_frontend.passes.valid.trace import Forward
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.runtime.errors import InvalidProgramError

TRUSTING = ValidPolicy(trust=True)
AS_WRITTEN = ValidPolicy(derive=False)
DEAD_ONLY = ValidPolicy(dead_only=True)

EVERY = list(itertools.product(range(2, 9), range(1, 9), range(1, 4)))
# All 168 with STRETTO_TEST_FULL=1.
SHAPES = EVERY if os.environ.get("STRETTO_TEST_FULL") else random.Random(0).sample(EVERY, 36)


@pytest.mark.parametrize(("stages", "microbatches", "repeats"), [(4, 4, 1), (2, 1, 3), *SHAPES])
def test_a_circular_pipeline_sends_what_is_read_and_no_more(stages, microbatches, repeats):
    text = circular(stages, microbatches, repeats)
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((microbatches, 2)).astype(np.float32)
    ws = rng.standard_normal((stages, 2)).astype(np.float32)
    arguments = np.broadcast_to(xs, (stages, *xs.shape)), ws
    valid = valid_iterations(text, stages)
    whole, skipping = Evaluator(text, stages), Evaluator(text, stages, valid, np.nan)
    want, got = whole.run(*arguments), skipping.run(*arguments)
    np.testing.assert_allclose(want[-1], expected(xs, ws, repeats), rtol=1e-4)
    assert got.tobytes() == want.tobytes()
    assert sum(skipping.messages.values()) == hops(stages, microbatches, repeats)
    (report,) = valid[""].loops
    assert (report.transfers, report.sent) == (
        sum(whole.messages.values()),
        sum(skipping.messages.values()),
    )


def test_four_stages_four_microbatches_by_hand():
    valid = valid_iterations(circular(4, 4), 4)
    pairs, bounds = valid["sent"]
    assert pairs == ((0, 1), (1, 2), (2, 3), (3, 0))
    assert bounds == ((0, 3), (1, 4), (2, 5), (1, 0))
    (report,) = valid[""].loops
    assert (report.transfers, report.sent, report.trips) == (28, 12, 7)
    diagonal = [[s <= i < s + 4 for i in range(7)] for s in range(4)]
    assert [list(row) for row in report.busy] == diagonal


def test_a_pair_may_be_valid_in_several_runs_of_iterations():
    # Two microbatches and three stages, twice round: the ring is idle in between.
    _, bounds = valid_iterations(circular(3, 2, 2), 3)["sent"]
    assert bounds == ((0, 1, 3, 4), (1, 2, 4, 5), (2, 3))


def mutants(seed: int, count: int):
    rng = random.Random(seed)
    for number in range(count):
        shape = rng.randint(2, 4), rng.randint(1, 5), rng.randint(1, 2)
        text, changes = circular(*shape), []
        for _ in range(rng.choice([1, 1, 2])):
            text, what = mutated(text, rng)
            changes.append(what)
        yield number, shape[0], text, changes


@pytest.mark.thorough
def test_no_wrong_skip_in_500_broken_pipelines():
    """And the rule that trusts the pattern (pair i in iterations i to i + trips - stages) fails."""
    wrong_by_rule = skipped = 0
    for number, stages, text, changes in mutants(1, 500):
        valid = valid_iterations(text, stages)
        rng = np.random.default_rng(number)
        xs = rng.standard_normal((stages, int(_inputs(text)), 2)).astype(np.float32)
        ws = rng.standard_normal((stages, 2)).astype(np.float32)
        whole = Evaluator(text, stages)
        want = whole.run(xs, ws).tobytes()
        skipping = Evaluator(text, stages, valid)
        assert skipping.run(xs, ws).tobytes() == want, changes
        dead = valid_iterations(text, stages, DEAD_ONLY)
        assert Evaluator(text, stages, dead, np.nan).run(xs, ws).tobytes() == want, changes
        skipped += sum(whole.messages.values()) - sum(skipping.messages.values())
        pairs = valid["sent"][0]
        trips = whole.messages[pairs[0]]
        rule = [(i, i + trips - stages) if trips >= stages else (1, 0) for i in range(stages)]
        by_rule = Evaluator(text, stages, {"sent": (pairs, tuple(rule))})
        wrong_by_rule += by_rule.run(xs, ws).tobytes() != want
    assert skipped > 5000
    assert wrong_by_rule > 20


def _inputs(text: str) -> str:
    found = re.search(r"xs = f32\[(\d+),", text)
    assert found is not None
    return found[1]


# The attribute.

LOOP = """HloModule m
body {{
  c = (s32[], f32[2], f32[2]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[2] get-tuple-element(c), index=1
  kept = f32[2] get-tuple-element(c), index=2
  one = s32[] constant(1)
  next = s32[] add(i, one)
  {permute}
  {rest}
}}
condition {{
  cc = (s32[], f32[2], f32[2]) parameter(0)
  ci = s32[] get-tuple-element(cc), index=0
  three = s32[] constant({trips})
  ROOT less = pred[] compare(ci, three), direction=LT
}}
ENTRY e {{
  p = f32[2] parameter(0)
  n = s32[] parameter(1)
  zero = s32[] constant(0)
  init = (s32[], f32[2], f32[2]) tuple({start}, p, p)
  loop = (s32[], f32[2], f32[2]) while(init), condition=condition, body=body
  ROOT r = f32[2] get-tuple-element(loop), index=2
}}
"""
PLAIN = """moved = f32[2] collective-permute(x), channel_id=1, source_target_pairs={{0,1},{1,0}}%s
  sum = f32[2] add(kept, moved)"""
READ = "ROOT t = (s32[], f32[2], f32[2]) tuple(next, moved, sum)"
UNREAD = "ROOT t = (s32[], f32[2], f32[2]) tuple(next, moved, kept)"
TAG = ", frontend_attributes={_xla_send_recv_validation=%s}"


def loop(permute: str, rest: str = READ, trips: int = 3, start: str = "zero") -> str:
    return LOOP.format(permute=permute, rest=rest, trips=trips, start=start)


def attributed(value: str) -> str:
    return PLAIN % (TAG % value)


FORMS = {
    "start": """begun = (f32[2], f32[2]) collective-permute-start(x), channel_id=1,
      source_target_pairs={{0,1},{1,0}}%s
    moved = f32[2] collective-permute-done(begun)
    sum = f32[2] add(kept, moved)""",
    "done": """begun = (f32[2], f32[2]) collective-permute-start(x), channel_id=1,
      source_target_pairs={{0,1},{1,0}}
    moved = f32[2] collective-permute-done(begun)%s
    sum = f32[2] add(kept, moved)""",
    "send": """tok = token[] after-all()
    rb = (f32[2], u32[], token[]) recv(tok), channel_id=1,
      frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,0}},_xla_send_recv_validation=%s}
    sb = (f32[2], u32[], token[]) send(x, tok), channel_id=1,
      frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,0}},_xla_send_recv_validation=%s}
    re = (f32[2], token[]) recv-done(rb), channel_id=1
    se = token[] send-done(sb), channel_id=1
    moved = f32[2] get-tuple-element(re), index=0
    sum = f32[2] add(kept, moved)""",
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        ("{{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("{{0,2},{1,1}}", ((0, 2), (1, 1))),
        ('"invalid"', ((1, 0), (1, 0))),
    ],
)
def test_the_attribute_is_read(value, bounds):
    made = compile_hlo(loop(attributed(value)), 1, 2, valid=TRUSTING).program
    assert made.collectives[0].valid_iterations == bounds


@pytest.mark.parametrize("form", list(FORMS))
def test_the_attribute_is_read_on_every_form(form):
    tag = "{{0,1},{1,0}}"
    given = (tag, tag) if form == "send" else (TAG % tag,)
    made = compile_hlo(loop(FORMS[form] % given), 1, 2, valid=TRUSTING).program
    assert {c.valid_iterations for c in made.collectives} == {((0, 1), (1, 0))}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{{0,1}}", "1 bounds for 2 pairs"),
        ("{{0,1},{-1,2}}", r"\{-1,2\}"),
        ("{{0,1},{2,1}}", r"\{2,1\}"),
        ("{{0,1},{0}}", "not a list of pairs"),
        ('"nonsense"', "not a list of pairs"),
    ],
)
def test_bounds_that_make_no_sense(value, words):
    with pytest.raises(InvalidProgramError, match=words) as caught:
        compile_hlo(loop(attributed(value)), 1, 2)
    assert "moved" in str(caught.value)


def test_the_attribute_counts_iterations_of_a_loop():
    text = f"""HloModule m
    ENTRY e {{
      p = f32[8] parameter(0)
      ROOT r = f32[8] collective-permute(p), channel_id=1, source_target_pairs={{{{0,1}}}}
        {TAG % "{{0,1}}"}
    }}"""
    with pytest.raises(InvalidProgramError, match="is in no loop"):
        compile_hlo(text, 1, 2)


def test_ends_of_a_transfer_must_agree():
    text = loop(FORMS["send"] % ("{{0,1},{1,0}}", "{{0,1},{0,1}}"))
    with pytest.raises(InvalidProgramError, match="valid iterations"):
        compile_hlo(text, 1, 2, valid=TRUSTING)


def test_what_is_read_must_not_be_left_out():
    with pytest.raises(InvalidProgramError) as caught:
        compile_hlo(loop(attributed("{{0,2},{0,1}}")), 1, 2)
    message = str(caught.value)
    assert "device 1 sends to device 0 in iteration 2" in message
    assert "%moved -> %sum -> result 2 of loop %loop -> a result of the program" in message
    assert "STRETTO_TRUST_VALID_ITERATIONS=1" in message


def test_the_path_goes_through_iterations_and_devices():
    # What is received in iteration 0 is passed on, and added by the other device in iteration 1.
    text = loop(attributed("{{1,2},{0,2}}"), READ.replace("moved, sum", "moved, sum"))
    with pytest.raises(InvalidProgramError, match="device 0 sends to device 1 in iteration 0"):
        compile_hlo(text, 1, 2)
    unread = """moved = f32[2] collective-permute(x), channel_id=1,
      source_target_pairs={{0,1},{1,0}}, frontend_attributes={_xla_send_recv_validation={{1,2},{0,2}}}"""
    late = """two = s32[] constant(2)
      last = pred[] compare(i, two), direction=EQ
      sum = f32[2] select(last, x, kept)
      ROOT t = (s32[], f32[2], f32[2]) tuple(next, moved, sum)"""
    with pytest.raises(InvalidProgramError) as caught:
        compile_hlo(loop(unread, late), 1, 2)
    assert "iteration 1 -> %moved on device 0 -> iteration 2 -> %sum" in str(caught.value)


def test_an_attribute_that_is_proved_is_kept_as_it_is():
    # What the trusting rule gives: sound, though not the least.
    attribute = "{{0,3},{1,4},{2,5},{3,6}}"
    valid = valid_iterations(circular(4, 4, 1, attribute), 4)
    assert valid["sent"][1] == ((0, 3), (1, 4), (2, 5), (3, 6))
    assert valid[""].loops[0].sent == 16


@pytest.mark.parametrize("policy", [TRUSTING, AS_WRITTEN])
def test_without_derivation_or_with_trust(policy):
    wrong = attributed("{{0,0},{0,0}}")
    if policy.trust:
        made = compile_hlo(loop(wrong), 1, 2, valid=policy).program
        assert made.collectives[0].valid_iterations == ((0, 0), (0, 0))
    else:
        with pytest.raises(InvalidProgramError, match="is read"):
            compile_hlo(loop(wrong), 1, 2, valid=policy)
    if not policy.derive:
        made = compile_hlo(loop(PLAIN % "", UNREAD), 1, 2, valid=policy).program
        assert made.collectives[0].valid_iterations == ()


# What is known of integers.


@pytest.mark.parametrize("dtype", ["s8", "u8", "s32", "u32", "s64"])
@pytest.mark.parametrize("opcode", ["shift-left", "shift-right-logical", "shift-right-arithmetic"])
def test_shifts_are_known_as_jax_computes_them(opcode, dtype):
    signed = dtype.startswith("s")
    name = dtype.replace("s", "int").replace("u", "uint")
    least, most = np.iinfo(name).min, np.iinfo(name).max
    values = np.array([0, 1, 5, least, most, -1 if signed else most - 1, 100, 3], name)
    amounts = np.array([1, 0, 2, 3, 7, 9, 64, -1 if signed else most], name)
    text = f"""HloModule shifts
    ENTRY e {{
      x = {dtype}[8] constant({{{",".join(map(str, values))}}})
      y = {dtype}[8] constant({{{",".join(map(str, amounts))}}})
      ROOT z = {dtype}[8] {opcode}(x, y)
    }}"""
    entry = flatten(Module.parse(parse_hlo_text(text)).entry, CollectiveReader(1, 1))
    forward = Forward(1, 1, follow_zeros=False)
    found = forward.known(forward.program(entry), entry.results[0])
    rule = getattr(jax.lax, opcode.replace("-", "_"))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_array_equal(found[0], rule(values, amounts))


# Loops that are not simply counted.


def test_a_loop_whose_trip_count_follows_from_its_condition():
    made = compile_hlo(loop(PLAIN % "", UNREAD), 1, 2).program
    assert made.collectives[0].valid_iterations == ((1, 0), (1, 0))
    made = compile_hlo(loop(PLAIN % ""), 1, 2).program
    assert made.collectives[0].valid_iterations == ()


def test_a_loop_of_unknown_length_is_judged_as_a_whole():
    """Its counter is an argument: dead pairs are dead in every iteration, others always live."""
    select = """uid = u32[] partition-id()
      nobody = u32[] constant(1)
      is_one = pred[] compare(uid, nobody), direction=EQ
      moved = f32[2] collective-permute(x), channel_id=1, source_target_pairs={{0,1},{1,0}}%s
      sum = f32[2] select(is_one, moved, kept)"""
    rest = "ROOT t = (s32[], f32[2], f32[2]) tuple(next, x, sum)"
    made = compile_hlo(loop(select % "", rest, start="n"), 1, 2).program
    assert made.collectives[0].valid_iterations == ((0, LAST), (1, 0))
    with pytest.raises(InvalidProgramError, match="iteration outside of them"):
        compile_hlo(loop(select % (TAG % "{{0,5},{1,0}}"), rest, start="n"), 1, 2)


NESTED = """HloModule m
inner {{
  c = (s32[], s32[], f32[2], f32[2]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  o = s32[] get-tuple-element(c), index=1
  x = f32[2] get-tuple-element(c), index=2
  kept = f32[2] get-tuple-element(c), index=3
  one = s32[] constant(1)
  next = s32[] add(i, one)
  moved = f32[2] collective-permute(x), channel_id=1, source_target_pairs={{{{0,1}}}}
  total = s32[] add(i, o)
  reads = pred[] compare(total, one), direction=EQ
  sum = f32[2] select(reads, moved, kept)
  ROOT t = (s32[], s32[], f32[2], f32[2]) tuple(next, o, x, sum)
}}
inner_condition {{
  c = (s32[], s32[], f32[2], f32[2]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  n = s32[] constant(4)
  ROOT less = pred[] compare(i, n), direction=LT
}}
outer {{
  c = (s32[], f32[2], f32[2]) parameter(0)
  o = s32[] get-tuple-element(c), index=0
  x = f32[2] get-tuple-element(c), index=1
  kept = f32[2] get-tuple-element(c), index=2
  zero = s32[] constant(0)
  one = s32[] constant(1)
  init = (s32[], s32[], f32[2], f32[2]) tuple(zero, o, x, kept)
  loop = (s32[], s32[], f32[2], f32[2]) while(init), condition=inner_condition, body=inner
  got = f32[2] get-tuple-element(loop), index=3
  next = s32[] add(o, one)
  ROOT t = (s32[], f32[2], f32[2]) tuple(next, x, got)
}}
outer_condition {{
  c = (s32[], f32[2], f32[2]) parameter(0)
  o = s32[] get-tuple-element(c), index=0
  n = s32[] constant(2)
  ROOT less = pred[] compare(o, n), direction=LT
}}
ENTRY e {{
  p = f32[2] parameter(0)
  n = s32[] parameter(1)
  zero = s32[] constant(0)
  init = (s32[], f32[2], f32[2]) tuple({start}, p, p)
  loop = (s32[], f32[2], f32[2]) while(init), condition=outer_condition, body=outer
  ROOT r = f32[2] get-tuple-element(loop), index=2
}}
"""


def test_bounds_of_an_inner_loop_hold_for_all_of_its_entries():
    # i + o == 1: iteration 1 of the first entry is overwritten by iteration 0 of the second.
    assert valid_iterations(NESTED.format(start="zero"), 2)["moved"][1] == ((0, 0),)
    # The outer loop is of unknown length: any of its iterations may be the last.
    assert valid_iterations(NESTED.format(start="n"), 2)["moved"][1] == ()


BRANCHED = """HloModule m
taken {
  x = f32[2] parameter(0)
  ROOT moved = f32[2] collective-permute(x), channel_id=1, source_target_pairs={{0,1},{1,0}}%s
}
other {
  x = f32[2] parameter(0)
  ROOT y = f32[2] negate(x)
}
body {
  c = (s32[], f32[2], f32[2]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[2] get-tuple-element(c), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one)
  odd = pred[] compare(i, one), direction=EQ
  y = f32[2] conditional(odd, x, x), true_computation=taken, false_computation=other
  ROOT t = (s32[], f32[2], f32[2]) tuple(next, y, y)
}
condition {
  c = (s32[], f32[2], f32[2]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  n = s32[] constant(3)
  ROOT less = pred[] compare(i, n), direction=LT
}
ENTRY e {
  p = f32[2] parameter(0)
  zero = s32[] constant(0)
  init = (s32[], f32[2], f32[2]) tuple(zero, p, p)
  loop = (s32[], f32[2], f32[2]) while(init), condition=condition, body=body
  ROOT r = f32[2] get-tuple-element(loop), index=2
}
"""


def test_transfers_in_branches_count_the_iterations_of_the_loop():
    # The branch is taken in iteration 1 alone, so bounds that say so leave nothing out.
    made = compile_hlo(BRANCHED % (TAG % "{{1,1},{1,1}}"), 1, 2).program
    assert made.collectives[0].valid_iterations == ((1, 1), (1, 1))
    with pytest.raises(InvalidProgramError, match="iteration 1, which is read"):
        compile_hlo(BRANCHED % (TAG % "{{1,1},{0,0}}"), 1, 2)


def test_iterations_of_which_the_same_is_wanted_are_walked_once(monkeypatch):
    """The last two of a hundred, and none before; what is read in one iteration alone is still found."""
    walks, runs = _Walk.run, []
    monkeypatch.setattr(
        _Walk, "run", lambda self: (runs.append(self.trace.iteration), walks(self))[1]
    )

    def step(k, carry):
        total, a, b = carry
        total = total + a + jnp.where(k == 7, b, 0)
        ring = [(i, (i + 1) % 4) for i in range(4)]
        return total, jax.lax.ppermute(a, "x", ring), jax.lax.ppermute(a * 2, "x", ring)

    def bounds(which):
        def f(x):
            return jax.lax.fori_loop(0, 100, step, (x, x, x))[which]

        module = compiled(manual(f, mesh(4), P("x"), P("x")), np.ones(4, np.float32), num_devices=4)
        return [set(c.valid_iterations) for c in module.program.collectives]

    assert bounds(0) == [{(0, 98)}, {(6, 6)}]
    found = [i for i in runs if i is not None]
    assert found[:2] == [99, 98] and {8, 7, 6} & set(found) and len(found) < 10


def test_zeros_need_not_be_sent():
    """What is read, but is zero whenever it is sent: who receives nothing has zeros too."""
    masked = """two = s32[] constant(1)
      sends = pred[] compare(i, two), direction=EQ
      nought = f32[] constant(0)
      zeros = f32[2] broadcast(nought), dimensions={}
      payload = f32[2] select(sends, x, zeros)
      moved = f32[2] collective-permute(payload), channel_id=1, source_target_pairs={{0,1},{1,0}}
      sum = f32[2] add(kept, moved)"""
    rest = "ROOT t = (s32[], f32[2], f32[2]) tuple(next, x, sum)"
    text = loop(masked, rest)
    assert valid_iterations(text, 2)["moved"][1] == ((1, 1), (1, 1))
    assert valid_iterations(text, 2, DEAD_ONLY)["moved"][1] == ()
    minus = text.replace("constant(0)\n      zeros", "constant(-0.0)\n      zeros")
    assert minus != text
    assert valid_iterations(minus, 2)["moved"][1] == ()


def test_zeros_that_are_there_from_the_start():
    """The first iteration sends the initial carry, and zeros are sent where they must not be poisoned."""
    text = loop(PLAIN % "").replace("tuple(zero, p, p)", "tuple(zero, blank, p)")
    text = text.replace(
        "init =",
        "nil = f32[] constant(0)\n  blank = f32[2] broadcast(nil), dimensions={}\n  init =",
    )
    text = text.replace("tuple(next, moved, sum)", "tuple(next, sum, sum)")
    assert valid_iterations(text, 2)["moved"][1] == ((1, 2), (1, 2))
    assert valid_iterations(text, 2, DEAD_ONLY)["moved"][1] == ()


@pytest.mark.parametrize(
    ("untaken", "bounds"), [("blank", ((1, 1), (1, 1))), ("x", ((0, 2), (0, 2)))]
)
def test_a_conditional_that_is_known_to_give_zeros(untaken, bounds):
    whole = """two = s32[] constant(1)
      sends = pred[] compare(i, two), direction=EQ
      payload = f32[2] conditional(sends, x, x), true_computation=taken, false_computation=other
      moved = f32[2] collective-permute(payload), channel_id=1, source_target_pairs={{0,1},{1,0}}
      sum = f32[2] add(kept, moved)"""
    branches = f"""taken {{
      x = f32[2] parameter(0)
      ROOT y = f32[2] negate(x)
    }}
    other {{
      x = f32[2] parameter(0)
      nil = f32[] constant(0)
      blank = f32[2] broadcast(nil), dimensions={{}}
      ROOT y = f32[2] copy({untaken})
    }}
    body {{"""
    rest = "ROOT t = (s32[], f32[2], f32[2]) tuple(next, x, sum)"
    text = loop(whole, rest).replace("body {", branches, 1)
    assert (valid_iterations(text, 2)["moved"][1] or ((0, 2), (0, 2))) == bounds


def test_arithmetic_keeps_what_is_received():
    """Zero times a received NaN is NaN, whatever the program's author had in mind."""
    product = """moved = f32[2] collective-permute(x), channel_id=1, source_target_pairs={{0,1},{1,0}}
      nought = f32[] constant(0)
      zeros = f32[2] broadcast(nought), dimensions={}
      product = f32[2] multiply(zeros, moved)
      sum = f32[2] add(kept, product)"""
    assert valid_iterations(loop(product), 2)["moved"][1] == ()


def test_too_large_a_loop_is_left_as_it_is():
    text = loop(PLAIN % "", trips=10_000_000)
    valid = valid_iterations(text, 2)
    assert valid["moved"][1] == ()
    assert "too many" in valid[""].loops[0].why
    with pytest.raises(InvalidProgramError, match="iteration outside of them"):
        valid_iterations(loop(attributed("{{0,5},{0,5}}"), trips=10_000_000), 2)


# From JAX.

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
SOUND = ((0, 3), (1, 4), (2, 5), (1, 0))


def pipeline(permute, axes=("p",)):
    """GPipe: four stages, four microbatches; also what is written before it is valid is masked."""

    def run(w, xs):
        stage = jax.lax.axis_index("p")

        def step(carry, i):
            state, outputs = carry
            x = jnp.where(stage == 0, xs[jnp.minimum(i, 3)], state)
            x = jnp.where((i >= stage) & (i < stage + 4), x, 0)
            y = jnp.tanh(x @ w)
            out = jnp.where((stage == 3) & (i >= 3), outputs.at[i - 3].set(y), outputs)
            return (permute(y), out), None

        start = jnp.zeros_like(xs[0]), jnp.zeros_like(xs)
        return jax.lax.scan(step, start, jnp.arange(7))[0][1]

    sizes = (2, 4) if len(axes) == 2 else (4,)
    spec = P(axes)
    return manual(run, mesh(*sizes, names="dp" if len(axes) == 2 else "p"), (spec, P()), spec)


W = np.float32(np.random.default_rng(0).standard_normal((32, 8))) * 0.3
XS = np.float32(np.random.default_rng(1).standard_normal((4, 2, 8)))


def bounds_of(function, *arguments, devices=4, **policy):
    text = function.lower(*arguments).as_text()
    made = compile_stablehlo(text, CompileSpec(1, devices), valid=ValidPolicy(**policy))
    rings = [c for c in made.program.collectives if c.pairs and len(c.pairs) % 4 == 0]
    return [c.valid_iterations for c in rings]


def by_metadata(y):
    with set_xla_metadata(_xla_send_recv_validation="{{0,3},{1,4},{2,5},{1,0}}"):
        return jax.lax.ppermute(y, "p", RING)


def by_argument(y):
    return stretto.lax.ppermute(y, "p", RING, valid_iterations=SOUND)


@pytest.mark.parametrize("permute", [by_metadata, by_argument])
def test_bounds_set_from_jax_survive_to_the_program(permute):
    assert bounds_of(pipeline(permute), W, XS, derive=False) == [SOUND]


def test_bounds_set_from_jax_on_one_axis_of_two():
    got = bounds_of(pipeline(by_argument, ("d", "p")), np.tile(W, (2, 1)), XS, devices=8)
    assert got == [SOUND * 2]


def test_bounds_in_a_chain_of_tokens():
    def chained(y):
        y, _ = stretto.lax.ppermute(
            y, "p", RING, token=stretto.lax.create_token(), valid_iterations=SOUND
        )
        return y

    assert bounds_of(pipeline(chained), W, XS, derive=False) == [SOUND]


def test_bounds_for_each_pair():
    def short(y):
        return stretto.lax.ppermute(y, "p", RING, valid_iterations=SOUND[:3])

    with pytest.raises(ValueError, match="3 bounds for 4 pairs"):
        pipeline(short).lower(W, XS)


@pytest.mark.parametrize("permute", [by_argument, lambda y: jax.lax.ppermute(y, "p", RING)])
def test_the_backward_pass_sends_what_it_needs(permute):
    """Twelve messages each way: gradients of masked inputs are zeros, which are not sent."""
    run = pipeline(permute)
    grad = jax.jit(jax.grad(lambda w, xs: (run(w, xs)[-4:] ** 2).sum()))
    forward, backward = sorted(bounds_of(grad, W, XS))
    assert forward == SOUND
    assert backward == ((3, 6), (2, 5), (1, 4), (1, 0))
