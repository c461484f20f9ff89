"""Collectives that send less: what they become, what they must not become, and that results stay.

Modules are run as they are written and rewritten, on the same integers (so that sums are exact), and
compared bit for bit; bytes and kinds are counted by hand. Programs of JAX are in `test_bytes_of_jax.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from frontend_support import kinds, payload
from interpreter import Interpreter

from stretto.collectives.ops import Kind
from stretto.collectives.types import TensorType
from stretto.hlo_frontend.compile import CompiledModule, compile_hlo

N = 4
REDUCERS = """
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
isum {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = s32[] add(a, b)
}
imax {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = s32[] maximum(a, b)
}
ior {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = s32[] or(a, b)
}
fmax {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] maximum(a, b)
}
"""
ALL = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"
PAIRS = "channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true"
OWN = """
  id = u32[] partition-id()
  place = s32[] convert(id)
  zero = s32[] constant(0)
  two = s32[] constant(2)
  own = s32[] multiply(place, two)"""


def module(body: str, parameters: str = "p = f32[8,3] parameter(0)", *, more: str = "") -> str:
    return f"""HloModule m, num_partitions={N}
{REDUCERS}{more}
ENTRY e {{
  {parameters}
{OWN}
{body}
}}
"""


def both(
    text: str, replicas: int = 1, partitions: int = N
) -> tuple[CompiledModule, CompiledModule]:
    """As it is written, and rewritten; checked to give the same bits."""
    written = compile_hlo(text, replicas, partitions)
    rewritten = compile_hlo(text, replicas, partitions, rewrites=True)
    rng = np.random.default_rng(1)
    count = replicas * partitions
    inputs = [
        [rng.integers(-9, 9, t.shape).astype(t.numpy) for _ in range(count)]
        for t in written.program.inputs
    ]
    assert rewritten.program.inputs == written.program.inputs
    expected = Interpreter(written.program).run(*inputs)
    got = Interpreter(rewritten.program).run(*inputs)
    for one, other in zip(got, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return written, rewritten


def stays(text: str, replicas: int = 1, partitions: int = N) -> None:
    written, rewritten = both(text, replicas, partitions)
    assert rewritten.rewrites == () and rewritten.rewritten == b""
    assert kinds(rewritten) == kinds(written) != []


AR = f"r = f32[8,3] all-reduce(p), to_apply=sum, {ALL}\n"
SLICE = "ROOT s = f32[2,3] dynamic-slice({0}, own, zero), dynamic_slice_sizes={{2,3}}"
READ = SLICE.format("r")


def test_own_parts_of_an_all_reduce_are_a_reduce_scatter() -> None:
    _, rewritten = both(module(AR + READ))
    assert kinds(rewritten) == ["reduce-scatter"]
    (collective,) = rewritten.program.collectives
    assert (collective.name, collective.dimension) == ("r", 0)
    assert str(collective.operands[0]) == "f32[8,3]" and str(collective.results[0]) == "f32[2,3]"
    (said,) = rewritten.rewrites
    assert said.name == "r" and "reduce-scatter" in said.said and "(s)" in said.said


WAYS = {
    "by a table of places": """
  table = s32[4] constant({0, 2, 4, 6})
  entry = s32[1] dynamic-slice(table, id), dynamic_slice_sizes={1}
  at = s32[] reshape(entry)
  ROOT s = f32[2,3] dynamic-slice(r, at, zero), dynamic_slice_sizes={2,3}""",
    "two slices": """
  a = f32[2,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={2,3}
  b = f32[2,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={2,3}
  ROOT s = f32[2,3] multiply(a, b)""",
    "converted": """
  h = f64[8,3] convert(r)
  ROOT s = f64[2,3] dynamic-slice(h, own, zero), dynamic_slice_sizes={2,3}""",
    "transposed": """
  t = f32[3,8] transpose(r), dimensions={1,0}
  ROOT s = f32[3,2] dynamic-slice(t, zero, own), dynamic_slice_sizes={3,2}""",
    "reshaped": """
  t = f32[4,6] reshape(r)
  ROOT s = f32[1,6] dynamic-slice(t, place, zero), dynamic_slice_sizes={1,6}""",
    "flat": """
  six = s32[] constant(6)
  flat = s32[] multiply(place, six)
  t = f32[24] reshape(r)
  ROOT s = f32[6] dynamic-slice(t, flat), dynamic_slice_sizes={6}""",
    "by a bitcast of layouts": """
  t = f32[3,8]{0,1} bitcast(r)
  ROOT s = f32[3,2] dynamic-slice(t, zero, own), dynamic_slice_sizes={3,2}""",
    "clamped": """
  far = s32[] constant(100)
  last = s32[] constant(3)
  is_last = pred[] compare(place, last), direction=EQ
  at = s32[] select(is_last, far, own)
  ROOT s = f32[2,3] dynamic-slice(r, at, zero), dynamic_slice_sizes={2,3}""",
}


@pytest.mark.parametrize("way", WAYS)
def test_own_parts_are_found_however_they_are_read(way: str) -> None:
    _, rewritten = both(module(AR + WAYS[way]))
    assert kinds(rewritten) == ["reduce-scatter"]


NOT_OWN = {
    "the next member's": """
  one = s32[] constant(1)
  next = s32[] add(place, one)
  three = s32[] constant(3)
  around = s32[] and(next, three)
  at = s32[] multiply(around, two)
  ROOT s = f32[2,3] dynamic-slice(r, at, zero), dynamic_slice_sizes={2,3}""",
    "the same for all": (
        "ROOT s = f32[2,3] dynamic-slice(r, zero, zero), dynamic_slice_sizes={2,3}"
    ),
    "half a part": ("ROOT s = f32[1,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={1,3}"),
    "of both dimensions": (
        "ROOT s = f32[2,1] dynamic-slice(r, own, zero), dynamic_slice_sizes={2,1}"
    ),
    "and the whole": """
  a = f32[2,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={2,3}
  ROOT s = (f32[2,3], f32[8,3]) tuple(a, r)""",
    "and the whole, summed": """
  a = f32[2,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={2,3}
  z = f32[] constant(0)
  whole = f32[] reduce(r, z), dimensions={0,1}, to_apply=sum
  ROOT s = (f32[2,3], f32[]) tuple(a, whole)""",
    "across the rows of a reshape": """
  t = f32[3,8] reshape(r)
  ROOT s = f32[3,2] dynamic-slice(t, zero, own), dynamic_slice_sizes={3,2}""",
    "behind a barrier": """
  held = f32[8,3] opt-barrier(r)
  ROOT s = f32[2,3] dynamic-slice(held, own, zero), dynamic_slice_sizes={2,3}""",
}


@pytest.mark.parametrize("what", NOT_OWN)
def test_an_all_reduce_stays_where_more_or_other_parts_are_read(what: str) -> None:
    stays(module(AR + NOT_OWN[what]))


def test_where_a_place_depends_on_an_argument_nothing_is_known() -> None:
    text = module(
        AR + "ROOT s = f32[2,3] dynamic-slice(r, q, zero), dynamic_slice_sizes={2,3}",
        "p = f32[8,3] parameter(0)\n  q = s32[] parameter(1)",
    )
    stays(text)


@pytest.mark.parametrize(
    "groups", ["{{1,0,2,3}}", "{{0,1},{2,3}}", "{{0,1,2},{3}}", "{{3,2,1,0}}", "{{0,1,2}}"]
)
def test_groups_must_be_as_the_parts_are(groups: str) -> None:
    ar = AR.replace("{{0,1,2,3}}", groups)
    stays(module(ar + READ))


def test_parts_of_partial_groups_and_devices_without_one() -> None:
    """Two groups of two; then one of two, where the others have zeros."""
    for groups in ("{{0,1},{2,3}}", "{{1,2}}"):
        first = "1" if groups == "{{1,2}}" else "0"
        ar = AR.replace("{{0,1,2,3}}", groups)
        body = f"""{ar}
  first = s32[] constant({first})
  from = s32[] subtract(place, first)
  one = s32[] constant(1)
  at2 = s32[] and(from, one)
  four = s32[] constant(4)
  at = s32[] multiply(at2, four)
  ROOT s = f32[4,3] dynamic-slice(r, at, zero), dynamic_slice_sizes={{4,3}}"""
        _, rewritten = both(module(body))
        assert kinds(rewritten) == ["reduce-scatter"]


@pytest.mark.parametrize(
    ("spelled", "own", "sizes"),
    [
        ("replica_groups={{0,1}}", "replica-id", (2, 2)),
        ("channel_id=1, replica_groups={{0},{1}}", "partition-id", (2, 2)),
        ("channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true", "replica-id", (2, 2)),
    ],
)  # fmt: skip
def test_modes_of_groups(spelled: str, own: str, sizes: tuple[int, int]) -> None:
    """Across replicas, across partitions of a replica, flattened ids (2 * replica + partition)."""
    text = f"""HloModule m
{REDUCERS}
ENTRY e {{
  p = f32[8,3] parameter(0)
  r = f32[8,3] all-reduce(p), to_apply=sum, {spelled}
  id = u32[] {own}()
  zero = u32[] constant(0)
  four = u32[] constant(4)
  at = u32[] multiply(id, four)
  ROOT s = f32[4,3] dynamic-slice(r, at, zero), dynamic_slice_sizes={{4,3}}
}}
"""
    _, rewritten = both(text, *sizes)
    assert kinds(rewritten) == ["reduce-scatter"]
    other = "partition-id" if own == "replica-id" else "replica-id"
    stays(text.replace(own, other), *sizes)


def test_several_operands_are_scattered_together_or_not_at_all() -> None:
    head = f"""
  q = f32[4,8] negate(p2)
  both = (f32[8,3], f32[8,4]) all-reduce(p, p2), to_apply=sum, {ALL}
  r = f32[8,3] get-tuple-element(both), index=0
  u = f32[8,4] get-tuple-element(both), index=1
  a = f32[2,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={{2,3}}
  """.replace("  q = f32[4,8] negate(p2)\n", "")
    parameters = "p = f32[8,3] parameter(0)\n  p2 = f32[8,4] parameter(1)"
    same = """b = f32[2,4] dynamic-slice(u, own, zero), dynamic_slice_sizes={2,4}
  ROOT s = (f32[2,3], f32[2,4]) tuple(a, b)"""
    _, rewritten = both(module(head + same, parameters))
    assert kinds(rewritten) == ["reduce-scatter"]
    other = """b = f32[8,1] dynamic-slice(u, zero, place), dynamic_slice_sizes={8,1}
  ROOT s = (f32[2,3], f32[8,1]) tuple(a, b)"""
    stays(module(head + other, parameters))  # too small to be taken apart


def test_a_combined_all_reduce_is_taken_apart_where_that_is_worth_it() -> None:
    parameters = """p = f32[4096,3] parameter(0)
  q = f32[8,4096] parameter(1)
  o = f32[3] parameter(2)"""

    def combined(token: str = "", after: str = "") -> str:
        return module(
            f"""
  thousand = s32[] constant(1024)
  at = s32[] multiply(place, thousand)
  all = (f32[4096,3], f32[3], f32[8,4096]) all-reduce(p, o, q), to_apply=sum, {ALL}
  r = f32[4096,3] get-tuple-element(all), index=0
  u = f32[3] get-tuple-element(all), index=1
  v = f32[8,4096] get-tuple-element(all), index=2
  a = f32[1024,3] dynamic-slice(r, at, zero), dynamic_slice_sizes={{1024,3}}
  b = f32[8,1024] dynamic-slice(v, zero, at), dynamic_slice_sizes={{8,1024}}
  {token}
  ROOT s = (f32[1024,3], f32[3], f32[8,1024]{", f32[32,3]" if after else ""}) tuple(a, u, b{after})""",
            parameters,
        )

    _, rewritten = both(combined())
    assert sorted(kinds(rewritten)) == ["all-reduce", "reduce-scatter", "reduce-scatter"]
    assert {c.name for c in rewritten.program.collectives} == {"all"}
    small = min(rewritten.program.collectives, key=lambda c: c.operands[0].nbytes)
    assert [str(t) for t in small.operands] == ["f32[3]"]
    assert payload(rewritten, Kind.REDUCE_SCATTER) == (4096 * 3 + 8 * 4096) * 4 * 3 // 4
    # Whoever comes after it by order would come after a part of it only.
    token = f"""w = f32[8,3] slice(p), slice={{[0:8],[0:3]}}
  g = f32[32,3] all-gather(w), dimensions={{0}}, {ALL}, control-predecessors={{all}}"""
    stays(combined(token, ", g"))


def test_inside_loops_and_branches_the_place_comes_from_outside() -> None:
    more = f"""
body {{
  c = (s32[], f32[8,3], f32[2,3], s32[], s32[]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[8,3] get-tuple-element(c), index=1
  acc = f32[2,3] get-tuple-element(c), index=2
  own = s32[] get-tuple-element(c), index=3
  zero = s32[] get-tuple-element(c), index=4
  one = s32[] constant(1)
  i1 = s32[] add(i, one)
  r = f32[8,3] all-reduce(x), to_apply=sum, {ALL}
  s = f32[2,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={{2,3}}
  sum = f32[2,3] add(acc, s)
  x1 = f32[8,3] add(x, x)
  ROOT t = (s32[], f32[8,3], f32[2,3], s32[], s32[]) tuple(i1, x1, sum, own, zero)
}}
condition {{
  c = (s32[], f32[8,3], f32[2,3], s32[], s32[]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  n = s32[] constant(3)
  ROOT lt = pred[] compare(i, n), direction=LT
}}
yes {{
  b = (f32[8,3], s32[], s32[]) parameter(0)
  x = f32[8,3] get-tuple-element(b), index=0
  own = s32[] get-tuple-element(b), index=1
  zero = s32[] get-tuple-element(b), index=2
  r2 = f32[8,3] all-reduce(x), to_apply=sum, {ALL}
  ROOT s = f32[2,3] dynamic-slice(r2, own, zero), dynamic_slice_sizes={{2,3}}
}}
no {{
  b = (f32[8,3], s32[], s32[]) parameter(0)
  x = f32[8,3] get-tuple-element(b), index=0
  ROOT s = f32[2,3] slice(x), slice={{[0:2],[0:3]}}
}}
"""
    body = """
  z = f32[] constant(0)
  zeros = f32[2,3] broadcast(z), dimensions={}
  init = (s32[], f32[8,3], f32[2,3], s32[], s32[]) tuple(zero, p, zeros, own, zero)
  w = (s32[], f32[8,3], f32[2,3], s32[], s32[]) while(init), condition=condition, body=body
  summed = f32[2,3] get-tuple-element(w), index=2
  t = pred[] constant(true)
  b = (f32[8,3], s32[], s32[]) tuple(p, own, zero)
  chosen = f32[2,3] conditional(t, b, b), true_computation=yes, false_computation=no
  ROOT s = f32[2,3] subtract(summed, chosen)
"""
    text = module(body, more=more)
    _, rewritten = both(text)
    assert kinds(rewritten) == ["reduce-scatter"] * 2
    changing = text.replace("tuple(i1, x1, sum, own, zero)", "tuple(i1, x1, sum, i1, zero)")
    _, rewritten = both(changing)
    assert sorted(kinds(rewritten)) == ["all-reduce", "reduce-scatter"]


def test_tokens_and_order_stay() -> None:
    """The all-reduce stands in a chain: after the first gather, before the second."""
    body = f"""
  g = f32[32,3] all-gather(p), dimensions={{0}}, {ALL}
  r = f32[8,3] all-reduce(p), to_apply=sum, {ALL}, control-predecessors={{g}}
  s = f32[2,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={{2,3}}
  h = f32[8,12] all-gather(p), dimensions={{1}}, {ALL}, control-predecessors={{r}}
  ROOT t = (f32[32,3], f32[2,3], f32[8,12]) tuple(g, s, h)"""
    written, rewritten = both(module(body))
    assert kinds(rewritten) == ["all-gather", "reduce-scatter", "all-gather"]
    assert [e.name for e in rewritten.schedule.walk()] == ["g", "r", "h"]
    assert rewritten.tokens() == written.tokens() == {"g": (), "r": ("g",), "h": ("r",)}


def test_a_gather_that_only_serves_to_cut_out_what_was_given_goes() -> None:
    ag = f"g = f32[32,3] all-gather(p), dimensions={{0}}, {ALL}\n"
    at = "  eight = s32[] constant(8)\n  at = s32[] multiply(place, eight)\n"
    own = "  s = f32[8,3] dynamic-slice(g, at, zero), dynamic_slice_sizes={8,3}\n"
    _, rewritten = both(module(ag + at + own + "  ROOT t = f32[8,3] add(s, p)"))
    assert kinds(rewritten) == []
    assert "goes" in rewritten.rewrites[0].said
    # Someone else reads it: it stays, though the slice does not wait for it.
    _, rewritten = both(module(ag + at + own + "  ROOT t = (f32[8,3], f32[32,3]) tuple(s, g)"))
    assert kinds(rewritten) == ["all-gather"]
    # Devices without a group have zeros.
    few = ag.replace("f32[32,3]", "f32[16,3]").replace("{{0,1,2,3}}", "{{0,1}}")
    own = "  s = f32[8,3] dynamic-slice(g, at, zero), dynamic_slice_sizes={8,3}\n"
    stays(module(few + at + own + "  ROOT t = f32[8,3] add(s, p)"))


def test_a_gather_of_which_parts_of_another_dimension_are_read_is_an_all_to_all() -> None:
    gather = f"  g = f32[8,12] all-gather(p), dimensions={{1}}, {ALL}\n"
    read = "  s = f32[2,12] dynamic-slice(g, own, zero), dynamic_slice_sizes={2,12}\n"
    _, rewritten = both(module(gather + read + "  ROOT t = f32[2,12] negate(s)"))
    assert kinds(rewritten) == ["all-to-all"]
    (collective,) = rewritten.program.collectives
    assert collective.name == "g" and collective.operands[0].nbytes == 8 * 3 * 4
    assert "all-to-all" in rewritten.rewrites[0].said
    # Someone else reads it whole.
    stays(module(gather + read + "  ROOT t = (f32[2,12], f32[8,12]) tuple(s, g)"))


ALONE = "channel_id=1, replica_groups={{0},{1},{2},{3}}, use_global_device_ids=true"


@pytest.mark.parametrize(
    "op",
    [
        f"f32[8,3] all-reduce(p), to_apply=sum, {ALONE}",
        f"f32[8,3] all-gather(p), dimensions={{0}}, {ALONE}",
        f"f32[8,3] reduce-scatter(p), dimensions={{0}}, to_apply=sum, {ALONE}",
        "f32[8,3] all-to-all(p), dimensions={0}, channel_id=1, replica_groups={{0},{1},{2},{3}}",
        "f32[8,3] collective-permute(p), channel_id=1, source_target_pairs={{0,0},{1,1},{2,2},{3,3}}",
    ],
)
def test_collectives_over_groups_of_one_are_copies(op: str) -> None:
    written, rewritten = both(module(f"ROOT r = {op}"))
    assert len(kinds(written)) == 1 and kinds(rewritten) == []
    stays(module(f"ROOT r = {op}".replace(",{3}", "").replace(",{3,3}", "")))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "pred", "c64", "s8", "f8e4m3fn"])
def test_permutes_to_nobody_are_zeros(dtype: str) -> None:
    body = f"""
  q = {dtype}[8,3] collective-permute(p), channel_id=1, source_target_pairs={{}}
  g = {dtype}[8,12] all-gather(p), dimensions={{1}}, {ALL}, control-predecessors={{q}}
  ROOT t = ({dtype}[8,3], {dtype}[8,12]) tuple(q, g)"""
    written, rewritten = both(module(body, f"p = {dtype}[8,3] parameter(0)"))
    assert kinds(written) == ["collective-permute", "all-gather"]
    assert kinds(rewritten) == ["all-gather"]
    received = Interpreter(rewritten.program).run(
        [np.ones((8, 3), TensorType(dtype, ()).numpy)] * N
    )
    assert not np.asarray(received[0][0]).astype(bool).any()


def test_what_came_after_a_copy_comes_after_what_it_came_after() -> None:
    body = f"""
  g = f32[32,3] all-gather(p), dimensions={{0}}, {ALL}
  r = f32[8,3] all-reduce(p), to_apply=sum, {ALONE}, control-predecessors={{g}}
  h = f32[8,12] all-gather(p), dimensions={{1}}, {ALL}, control-predecessors={{r}}
  ROOT t = (f32[32,3], f32[8,3], f32[8,12]) tuple(g, r, h)"""
    _, rewritten = both(module(body))
    assert rewritten.tokens() == {"g": (), "h": ("g",)}


def test_equal_collectives_are_one_unless_they_are_ordered() -> None:
    one = f"a = f32[32,3] all-gather(p), dimensions={{0}}, {ALL}\n"
    iota = "  b = f32[32,3] all-gather({0}), dimensions={{0}}, channel_id=2, replica_groups=[1,4]<=[4], "
    iota += "use_global_device_ids=true\n"
    end = "  ROOT t = f32[32,3] multiply(a, b)"
    written, rewritten = both(module(one + iota.format("p") + end))
    assert kinds(written) == ["all-gather"] * 2 and kinds(rewritten) == ["all-gather"]
    stays(module(one + "  q = f32[8,3] negate(p)\n" + iota.format("q") + end))
    ordered = iota.format("p").replace("\n", ", control-predecessors={a}\n")
    stays(module(one + ordered + end))
    # Gathered again on purpose, as rematerialization does.
    stays(module(one + "  q = f32[8,3] opt-barrier(p)\n" + iota.format("q") + end))
    other = iota.format("p").replace("dimensions={0}", "dimensions={1}")
    other = other.replace("f32[32,3]", "f32[8,12]")
    stays(module(one + other + "  ROOT t = (f32[32,3], f32[8,12]) tuple(a, b)"))


NARROW_IN = "p = bf16[8,3] parameter(0)"
PERMUTE = "channel_id=1, source_target_pairs={{0,1},{1,2}}"
WIDENED = {
    "all-gather": f"f32[32,3] all-gather(w), dimensions={{0}}, {ALL}",
    "all-to-all": "f32[8,3] all-to-all(w), dimensions={0}, channel_id=1, replica_groups={{0,1,2,3}}",
    "collective-permute": f"f32[8,3] collective-permute(w), {PERMUTE}",
    "collective-broadcast": "f32[8,3] collective-broadcast(w), channel_id=1, replica_groups={{1,0},{2,3}}",
}


@pytest.mark.parametrize("kind", WIDENED)
def test_what_was_widened_travels_as_it_was(kind: str) -> None:
    _, rewritten = both(module(f"w = f32[8,3] convert(p)\n  ROOT r = {WIDENED[kind]}", NARROW_IN))
    (collective,) = rewritten.program.collectives
    assert str(collective.operands[0]) == "bf16[8,3]" and str(collective.kind) == kind
    assert rewritten.rewrites[0].said == "travels as bf16 instead of f32"
    moved = f"v = f32[24] convert(p1)\n  w = f32[8,3] reshape(v)\n  ROOT r = {WIDENED[kind]}"
    _, rewritten = both(module(moved, "p1 = bf16[24] parameter(0)"))
    assert str(rewritten.program.collectives[0].operands[0]) == "bf16[8,3]"


def test_what_all_readers_narrow_travels_narrow() -> None:
    gather = f"g = f32[32,3] all-gather(p), dimensions={{0}}, {ALL}\n"
    a, b = "  a = bf16[32,3] convert(g)\n", "  b = bf16[32,3] convert(g)\n"
    end = "  ROOT t = bf16[32,3] add(a, b)"
    _, rewritten = both(module(gather + a + b + end))
    assert str(rewritten.program.collectives[0].results[0]) == "bf16[32,3]"
    other = b.replace("bf16", "f16") + "  ROOT t = (bf16[32,3], f16[32,3]) tuple(a, b)"
    stays(module(gather + a + other))
    stays(module(gather + a + "  ROOT t = (bf16[32,3], f32[32,3]) tuple(a, g)"))
    # What is out of range may become anything.
    stays(module(gather + "  ROOT a = s8[32,3] convert(g)"))


def test_only_exact_reductions_are_made_in_the_narrow_type() -> None:
    def reduced(narrow: str, wide: str, reducer: str) -> str:
        return module(
            f"w = {wide}[8,3] convert(p)\n"
            f"  ROOT r = {wide}[8,3] all-reduce(w), to_apply={reducer}, {ALL}",
            f"p = {narrow}[8,3] parameter(0)",
        )

    for narrow, reducer in (("s8", "imax"), ("u8", "imax"), ("pred", "imax"), ("s16", "ior")):
        _, rewritten = both(reduced(narrow, "s32", reducer))
        assert str(rewritten.program.collectives[0].operands[0]) == f"{narrow}[8,3]"
    stays(reduced("s8", "s32", "isum"))
    stays(reduced("pred", "s32", "isum"))
    stays(reduced("bf16", "f32", "sum"))
    stays(reduced("bf16", "f32", "fmax"))
    stays(reduced("s8", "f32", "fmax"))


def test_asynchronous_forms() -> None:
    body = f"""
  st = f32[8,3] all-reduce-start(p), to_apply=sum, {ALL}
  r = f32[8,3] all-reduce-done(st)
  w = f32[8,3] convert(q)
  gs = (f32[8,3], f32[32,3]) all-gather-start(w), dimensions={{0}}, {ALL}
  g = f32[32,3] all-gather-done(gs)
  s = f32[2,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={{2,3}}
  ROOT t = (f32[2,3], f32[32,3]) tuple(s, g)"""
    parameters = "p = f32[8,3] parameter(0)\n  q = bf16[8,3] parameter(1)"
    _, rewritten = both(module(body, parameters))
    assert sorted(kinds(rewritten)) == ["all-gather", "reduce-scatter"]
    assert {c.name for c in rewritten.program.collectives} == {"st", "gs"}


def test_hlo_that_is_given_runs_as_it_is_written() -> None:
    assert kinds(compile_hlo(module(AR + READ), 1, N)) == ["all-reduce"]


def test_the_digest_tells_what_was_done_to_which() -> None:
    """Two of three equal gathers are merged: which two, the collectives that are left do not tell."""
    q = "  q = f32[8,3] negate(p)\n"
    end = "  ROOT t = (f32[32,3], f32[32,3], f32[32,3]) tuple(a, b, c)"

    def digest(*operands: str) -> tuple[bytes, list[str]]:
        gathers = "".join(
            f"  {name} = f32[32,3] all-gather({operand}), dimensions={{0}}, {ALL}\n"
            for name, operand in zip("abc", operands, strict=True)
        )
        _, rewritten = both(module(q + gathers + end))
        return rewritten.rewritten, kinds(rewritten)

    # All are of one level, in the order in which they are written.
    (first, left), (second, also) = digest("p", "p", "q"), digest("q", "p", "p")
    assert left == also == ["all-gather"] * 2
    assert first != second and first == digest("p", "p", "q")[0]


def test_thousands_of_copies_and_barriers_in_a_row() -> None:
    lines, last = [], "p"
    for i in range(600):
        lines.append(f"  r{i} = f32[8,3] all-reduce({last}), to_apply=sum, {ALONE}")
        lines.append(f"  b{i} = (f32[8,3], f32[8,3]) tuple(r{i}, p)")
        lines.append(f"  h{i} = (f32[8,3], f32[8,3]) opt-barrier(b{i})")
        lines.append(f"  g{i} = f32[8,3] get-tuple-element(h{i}), index=0")
        last = f"g{i}" if i % 2 else f"r{i}"
    text = module("\n".join([*lines, f"  ROOT out = f32[8,3] negate({last})"]))
    assert kinds(compile_hlo(text, 1, N, rewrites=True)) == []
