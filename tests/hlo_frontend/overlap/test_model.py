"""Kernels, buffers and loops of the task graph, against what they should be by hand."""

from __future__ import annotations

import pytest
from overlap_support import DOT, NEAR, SUM, block, loop_module, module, table

from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap.kernels import build
from stretto.hlo_frontend.overlap.loops import carries_of
from stretto.hlo_frontend.overlap.model import Graph
from stretto.hlo_frontend.overlap.replay import replay, unscheduled
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.hlo_frontend.trips import trip_count
from stretto.hlo_frontend.values import NodeKind


def kernels(graph: Graph) -> list[list[str]]:
    return [[op.instruction.name for op in task.ops] for task in graph.tasks]


def test_connected_elementwise_ops_are_one_kernel_that_moves_its_ends_once() -> None:
    found = module(
        """
        %x = f32[16] parameter(0)
        %y = f32[16] parameter(1)
        %a = f32[16] add(%x, %y)
        %b = f32[16] multiply(%a, %x)
        ROOT %c = f32[16] exponential(%b)
        """
    )
    graph = build(block(found), table(bytes_per_s=64.0))
    assert kernels(graph) == [["a", "b", "c"]]
    assert graph.tasks[0].moved_bytes == 3 * 64
    assert graph.compute_seconds == 3.0


def test_renamed_and_broadcast_values_are_read_at_their_source() -> None:
    found = module(
        """
        %x = f32[4,16] parameter(0)
        %s = f32[16] parameter(1)
        %row = f32[1,16] slice(%x), slice={[2:3], [0:16]}
        %flat = f32[16] reshape(%row)
        %m = f32[16] multiply(%flat, %s)
        %wide = f32[64,16] broadcast(%m), dimensions={1}
        ROOT %e = f32[64,16] exponential(%wide)
        """
    )
    graph = build(block(found), table(bytes_per_s=1.0))
    assert kernels(graph) == [["m", "e"]]
    assert graph.tasks[0].moved_bytes == 64 + 64 + 64 * 64


def test_a_dot_is_a_kernel_of_its_own_between_those_around_it() -> None:
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %a = f32[8,8] negate(%x)
        %d = f32[8,8] dot(%a, %a), {DOT}
        %b = f32[8,8] add(%d, %a)
        ROOT %c = f32[8,8] negate(%b)
        """
    )
    assert kernels(build(block(found), table())) == [["a"], ["d"], ["b", "c"]]


def test_what_a_collective_needs_is_not_tied_to_what_it_does_not() -> None:
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %a = f32[8,8] negate(%x)
        %r = f32[8,8] all-reduce(%a), {NEAR}, to_apply=%sum
        %b = f32[8,8] exponential(%a)
        %c = f32[8,8] negate(%b)
        ROOT %d = f32[8,8] add(%c, %r)
        """
    )
    graph = build(block(found), table())
    assert kernels(graph) == [["a"], ["r"], ["b", "c", "d"]]
    assert [task.before for task in graph.tasks] == [(), (0,), (0, 1)]


RECOMPUTED = f"""
%x = f32[32] parameter(0)
%w = f32[32] parameter(1)
%seen = f32[64] all-gather(%x), {NEAR}, dimensions={{0}}
%h = f32[8,8] reshape(%seen)
%late = f32[8,8] dot(%h, %h), {DOT}
%in = (f32[32], f32[32], f32[8,8]) tuple(%x, %w, %late)
%out = (f32[32], f32[32], f32[8,8]) opt-barrier(%in){{metadata}}
%x1 = f32[32] get-tuple-element(%out), index=0
%w1 = f32[32] get-tuple-element(%out), index=1
%late1 = f32[8,8] get-tuple-element(%out), index=2
%half = f32[32] negate(%w1)
%full = f32[64] all-gather(%half), {NEAR}, dimensions={{0}}
%m = f32[8,8] reshape(%full)
%b = f32[8,32] broadcast(%x1), dimensions={{1}}
%again = f32[32,32] dot(%b, %b), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
%y = f32[8,8] dot(%m, %late1), {DOT}
ROOT %both = (f32[8,8], f32[32,32]) tuple(%y, %again)
"""


def needs(metadata: str, text: str = RECOMPUTED) -> dict[str, set[str]]:
    """By task: those it comes after, directly or through others."""
    found_block = block(module(text.replace("{metadata}", metadata)))
    graph = build(found_block, table())
    found: dict[str, set[str]] = {}
    for task in graph.tasks:
        before = [graph.tasks[i].name for i in task.before]
        found[task.name] = set(before).union(*(found[name] for name in before))
    return found


def test_gathers_pass_the_barrier_of_a_recomputation_and_compute_does_not() -> None:
    found = needs(', metadata={op_name="jit(f)/transpose(jvp())/while/body/remat2"}')
    assert found["full"] == {"half"} and not found["half"]
    assert found["again"] >= {"seen", "late"}


def test_what_tokens_order_stays_behind_the_barrier_of_a_recomputation() -> None:
    after = """%t = token[] after-all()
%done = (f32[8,8], token[]) custom-call(%late, %t), custom_call_target="f"
%t1 = token[] get-tuple-element(%done), index=1
%w2 = f32[32] add-dependency(%w1, %t1)
%half = f32[32] negate(%w2)"""
    changed = RECOMPUTED.replace("%half = f32[32] negate(%w1)", after)
    assert changed != RECOMPUTED
    assert needs(', metadata={op_name="remat2"}', changed)["full"] >= {"half", "done", "late"}


@pytest.mark.parametrize("name", ["jit(remat2)/optimization_barrier", "remat2/x", ""])
def test_other_barriers_are_fences(name: str) -> None:
    found = needs(f', metadata={{op_name="{name}"}}' if name else "")
    assert all(found[task] >= {"seen", "late"} for task in ("half", "full", "again", "y"))


def test_a_recomputation_is_no_part_of_the_kernel_that_computes_first() -> None:
    """Both negate ``x`` before anything communicates, but in the module a dot lies between them."""
    found = module(
        f"""
        %p = f32[8,8] parameter(0)
        %x = f32[8,8] exponential(%p)
        %a = f32[8,8] negate(%x)
        %d = f32[8,8] dot(%a, %a), {DOT}
        %in = (f32[8,8], f32[8,8]) tuple(%x, %d)
        %out = (f32[8,8], f32[8,8]) opt-barrier(%in), metadata={{op_name="remat2"}}
        %x1 = f32[8,8] get-tuple-element(%out), index=0
        %again = f32[8,8] negate(%x1)
        %t = f32[8,8] add(%again, %d)
        ROOT %r = f32[8,8] all-reduce(%t), {NEAR}, to_apply=%sum
        """
    )
    graph = build(block(found), table())
    assert kernels(graph) == [["x", "a"], ["d"], ["again", "t"], ["r"]]


def test_unknown_side_effects_are_fences() -> None:
    found = module(
        f"""
        %x = f32[32] parameter(0)
        %a = f32[32] negate(%x)
        %f = f32[32] custom-call(%x), custom_call_target="log", custom_call_has_side_effect=true
        %g = f32[64] all-gather(%x), {NEAR}, dimensions={{0}}
        ROOT %out = (f32[32], f32[32], f32[64]) tuple(%a, %f, %g)
        """
    )
    graph = build(block(found), table())
    assert kernels(graph) == [["a"], ["f"], ["g"]]
    assert [task.before for task in graph.tasks] == [(), (0,), (1,)]


@pytest.mark.parametrize(
    ("start", "bound", "step", "direction"),
    [
        (0, 5, 1, "LT"),
        (2, 9, 3, "LT"),
        (2, 8, 3, "LE"),
        (7, 0, -2, "GT"),
        (7, 1, -2, "GE"),
        (5, 5, 1, "LT"),
        (9, 5, 1, "LT"),
    ],
)
def test_trip_counts_are_those_of_running_the_loop(
    start: int, bound: int, step: int, direction: str
) -> None:
    test = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__}[direction]
    counter, trips = start, 0
    while test(counter, bound):
        counter, trips = counter + step, trips + 1
    (node,) = [
        n
        for n in block(loop_module(f"constant({start})", bound, step, direction)).nodes
        if n.kind is NodeKind.LOOP
    ]
    assert trip_count(node) == trips
    swapped = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}[direction]
    flipped = loop_module(f"constant({start})", bound, step, swapped, "%n, %j")
    (node,) = [n for n in block(flipped).nodes if n.kind is NodeKind.LOOP]
    assert trip_count(node) == trips


def test_a_counter_that_wraps_around_tells_no_trip_count() -> None:
    def trips(bound: int, direction: str) -> int | None:
        found = block(loop_module("constant(0)", bound, 1, direction))
        (node,) = [n for n in found.nodes if n.kind is NodeKind.LOOP]
        return trip_count(node)

    assert trips(2**31 - 1, "LT") == 2**31 - 1
    assert trips(2**31 - 1, "LE") is None


@pytest.mark.parametrize("start", ["constant(0)", "parameter(1)"])
def test_a_loop_is_one_task_and_a_fence(start) -> None:
    found = loop_module(start, 3, 1, "LT")
    (node,) = [n for n in block(found).nodes if n.kind is NodeKind.LOOP]
    assert trip_count(node) == (3 if start == "constant(0)" else None)
    graph = build(block(found), table(), opaque=lambda node: 7.0)
    assert kernels(graph) == [["loop"]]
    assert graph.compute_seconds == 7.0


def test_memory_counts_what_lies_between_kernels_until_its_last_reader_is_done() -> None:
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %a = f32[8,8] dot(%x, %x), {DOT}
        %b = f32[8,8] dot(%a, %a), {DOT}
        %c = f32[8,8] dot(%b, %x), {DOT}
        ROOT %d = f32[8,8] dot(%c, %c), {DOT}
        """
    )
    one = 8 * 8 * 4
    kept = build(block(found), table())
    assert replay(kept, unscheduled(kept)).live == [2 * one, 3 * one, 3 * one, 3 * one]
    given_up = build(block(found), table(), donated=[0])
    assert replay(given_up, unscheduled(given_up)).live == [2 * one, 3 * one, 3 * one, 2 * one]


def stacking_module(stacked: str, carried: str = "%d") -> str:
    """Three iterations; each stacks ``stacked``, f32[1,8,8], made of the dot %d or of what is carried, %y."""
    return f"""HloModule m
{SUM}
%body (c: (s32[], f32[8,8], f32[3,8,8])) -> (s32[], f32[8,8], f32[3,8,8]) {{
  %c = (s32[], f32[8,8], f32[3,8,8]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %y = f32[8,8] get-tuple-element(%c), index=1
  %stack = f32[3,8,8] get-tuple-element(%c), index=2
  %one = s32[] constant(1)
  %zero = s32[] constant(0)
  %next = s32[] add(%i, %one)
  %r = f32[8,8] all-reduce(%y), {NEAR}, to_apply=%sum
  %d = f32[8,8] dot(%r, %y), {DOT}
  %row = f32[1,8,8] reshape({stacked})
  %update = f32[3,8,8] dynamic-update-slice(%stack, %row, %i, %zero, %zero)
  ROOT %out = (s32[], f32[8,8], f32[3,8,8]) tuple(%next, {carried}, %update)
}}

%go (c: (s32[], f32[8,8], f32[3,8,8])) -> pred[] {{
  %c = (s32[], f32[8,8], f32[3,8,8]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %three), direction=LT
}}

ENTRY %main {{
  %x = f32[8,8] parameter(0)
  %none = f32[] constant(0)
  %start = s32[] constant(0)
  %empty = f32[3,8,8] broadcast(%none), dimensions={{}}
  %first = (s32[], f32[8,8], f32[3,8,8]) tuple(%start, %x, %empty)
  %loop = (s32[], f32[8,8], f32[3,8,8]) while(%first), condition=%go, body=%body
  ROOT %stacked = f32[3,8,8] get-tuple-element(%loop), index=2
}}
"""


def body_of(text: str) -> Graph:
    """The body of the module's loop, whose carries are its own."""
    (loop,) = [
        n for n in block(Module.parse(parse_hlo_text(text))).nodes if n.kind is NodeKind.LOOP
    ]
    return build(loop.blocks[1], table(), donated=carries_of(loop.blocks[1]))


def test_what_is_stacked_is_written_into_its_place_by_the_kernel_that_makes_it() -> None:
    one = 8 * 8 * 4
    graph = body_of(stacking_module("%d", carried="%r"))
    tasks = [t for t in graph.tasks if t.name not in ("next", "r")]
    assert [t.name for t in tasks] == ["update"]
    assert [op.instruction.name for op in tasks[0].ops] == ["d", "update"]
    counters = 4  # its index
    assert abs(tasks[0].moved_bytes - 3 * one) <= 2 * counters, "read once, written once"
    peak = replay(graph, unscheduled(graph)).peak_bytes
    assert abs(peak - (one + 3 * one + one)) <= 8 * counters, "what is carried, the stack, the sum"


def test_what_is_stacked_of_the_iteration_before_is_written_by_that() -> None:
    graph = body_of(stacking_module("%y"))
    made = [[op.instruction.name for op in t.ops] for t in graph.tasks]
    assert ["update"] in made, "a carry is copied into its place"


def test_an_update_that_needs_what_is_made_of_it_is_a_kernel_of_its_own() -> None:
    # The row's place is known only after a dot that reads the row.
    text = stacking_module("%d").replace(
        "%row = ",
        f"%e = f32[8,8] dot(%d, %d), {DOT}\n"
        "  %corner = f32[1,1] slice(%e), slice={[0:1], [0:1]}\n"
        "  %flat = f32[] reshape(%corner)\n  %at = s32[] convert(%flat)\n  %row = ",
    )
    text = text.replace("(%stack, %row, %i,", "(%stack, %row, %at,")
    graph = body_of(text)
    names = [t.name for t in graph.tasks if t.name not in ("next", "r", "at")]
    assert names == ["d", "e", "update"]
    for task in graph.tasks:
        assert all(earlier < task.index for earlier in task.before)
