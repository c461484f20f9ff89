"""Whether collectives are split, by tables of costs made up here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from split_support import kinds, looped, partitioned, table

from stretto.collectives.ops import Kind
from stretto.hlo_frontend.compile import PartitionedModule
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.hlo_frontend.passes.split import Decision
from stretto.hlo_frontend.passes.split.apply import found
from stretto.hlo_frontend.passes.split.overhead import overhead
from stretto.hlo_frontend.pipeline import SETTLING, Compilation, run


def large(rows: int, width: int, n: int = 2) -> PartitionedModule:
    return partitioned(
        f"""
  x = f32[{rows},{width}] parameter(0)
  w = f32[{width},{width}] parameter(1)
  g = f32[{n * rows},{width}] all-gather(x), ALL, dimensions={{0}}
  ROOT q = f32[{n * rows},{width}] dot(g, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
""",
        n,
    )


def decided(module: PartitionedModule, costs: CostTable) -> tuple[tuple[Decision, ...], str]:
    made = replace(module, splits=None).compiled(OverlapPolicy(costs))
    assert made.source is not None and made.source.splits is not None
    return made.source.splits, made.splits[0].describe() if made.splits else ""


def test_a_split_is_made_where_it_pays() -> None:
    # 13 ms of compute, 2.6 ms of messages.
    ((_, _, tiles),) = [(d.block, d.region, d.tiles) for d in decided(large(256, 512), table())[0]]
    assert tiles in (1, 2, 4)
    decisions, said = decided(large(256, 512), table(1e12))
    assert decisions == () and said.startswith("is not split: ")
    # Launches would eat it.
    decisions, said = decided(large(256, 512), table(launch_s=3e-3))
    assert decisions == () and said.startswith("is not split: ")


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ("", "no product is computed before or behind it in parts that it has too"),
        (", control-predecessors={y}", "its place among others is given by more than data"),
    ],
)
def test_why_not_is_told_of_what_is_in_no_region(after: str, why: str) -> None:
    module = partitioned(
        f"""
  x = f32[64,128] parameter(0)
  s = f32[8] parameter(1)
  y = f32[8] all-reduce(s), ALL, to_apply=sum
  g = f32[128,128] all-gather(x), ALL, dimensions={{0}}{after}
  t = f32[128,128] tanh(g)
  ROOT o = (f32[128,128], f32[8]) tuple(t, y)
""",
        2,
    )
    made = replace(module, splits=None).compiled(OverlapPolicy(table()))
    assert [(told.name, told.describe()) for told in made.splits] == [("g", f"is not split: {why}")]


@pytest.mark.parametrize(
    ("room", "hidden", "told"),
    [
        (1280, 1024, "is split into 4 parts: with what depends on it "),
        (1024, 256, "is split into 2 parts: with what depends on it "),
        (1280, 1, "is not split: its parts would take longer"),
        # A part of the buffer has room for all rows that a device sends.
        (4096, 256, "is not split: its parts would take longer"),
    ],
)
def test_ragged_exchanges_are_split_where_they_send_less_in_parts(
    room: int, hidden: int, told: str
) -> None:
    """1,024 rows of 256 numbers take 7.9 ms each way; products of 1,280 with 256 x 1024 take 67 ms each."""
    module = partitioned(
        f"""
  x = f32[1024,256] parameter(0)
  up = f32[256,{hidden}] parameter(1)
  down = f32[{hidden},256] parameter(2)
  filled = f32[{room},256] parameter(3)
  y = f32[1024,256] parameter(4)
  starts = s32[4] parameter(5)
  sizes = s32[4] parameter(6)
  places = s32[4] parameter(7)
  arriving = s32[4] parameter(8)
  there = f32[{room},256] ragged-all-to-all(x, filled, starts, sizes, places, arriving), EVERYONE
  h = f32[{room},{hidden}] dot(there, up), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  d = f32[{room},256] dot(h, down), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT back = f32[1024,256] ragged-all-to-all(d, y, places, arriving, starts, sizes), EVERYONE
""".replace("EVERYONE", "channel_id=1, replica_groups={{0,1,2,3}}"),
        4,
    )
    made = replace(module, splits=None).compiled(OverlapPolicy(table()))
    assert {one.name for one in made.splits} == {"there", "back"}
    assert all(one.describe().startswith(told) for one in made.splits), made.splits


@pytest.mark.parametrize(
    ("product", "numbers", "why"),
    [
        # Rows are picked out of all that arrive: no part of them is known before.
        ("picked", "s32", "no product is computed before or behind it in parts that it has too"),
        ("there", "u32", "its offsets and sizes are neither all s32 nor all s64"),
    ],
)
def test_why_a_ragged_exchange_is_not_split(product: str, numbers: str, why: str) -> None:
    module = partitioned(
        """
  x = f32[1024,256] parameter(0)
  w = f32[256,64] parameter(1)
  filled = f32[2048,256] parameter(2)
  order = s32[2048] parameter(3)
  n = NUMBERS[4] parameter(4)
  there = f32[2048,256] ragged-all-to-all(x, filled, n, n, n, n), channel_id=1,
    replica_groups={{0,1,2,3}}
  picked = f32[2048,256] gather(there, order), offset_dims={1}, collapsed_slice_dims={0},
    start_index_map={0}, index_vector_dim=1, slice_sizes={1,256}
  ROOT d = f32[2048,64] dot(PRODUCT, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
""".replace("NUMBERS", numbers).replace("PRODUCT", product),
        4,
    )
    made = replace(module, splits=None).compiled(OverlapPolicy(table()))
    told = [(one.name, one.describe()) for one in made.splits]
    assert told == [("there", f"is not split: {why}")]


def test_what_parts_cost_counts_in_each_iteration() -> None:
    """What launches cost that the table does not have is charged for as many iterations as there are."""
    seconds = []
    for trips in (8, 16):
        module = looped(trips, 256, 512, 512)
        policy = OverlapPolicy(table(launch_s=1e-5))
        c = Compilation.of(replace(module, splits=None), Module.parse(module.hlo), overlap=policy)
        run(c, SETTLING)
        assert c.splits.decisions
        seconds.append(c.splits.after)
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=1e-4)


@pytest.mark.parametrize(("rows", "again"), [(256, 3.0), (2048, 17.0)])
def test_what_is_read_and_written_once_more_is_charged(rows: int, again: float) -> None:
    """``again``: MiB, of a weight once, 1 MiB, and of a result twice, 1 or 8 MiB."""
    module = large(rows, 512)
    c = Compilation.of(module, Module.parse(module.hlo))
    run(c, SETTLING)
    ((_, block, (region,)),) = found(c.entry, 2)
    costs = table(launch_s=0.0)
    took = overhead(region, block, 1, False, costs)
    assert took == pytest.approx(again * 2**20 / costs.compute.bytes_per_s)


def test_the_kernels_of_a_loop_are_charged_in_each_iteration() -> None:
    """In a loop of eight iterations, one product: a quarter of a launch and 1 MiB of weights, each time."""
    carry = "(s32[], f32[512,512], f32[512,512])"
    more = f"""
body {{
  p = {carry} parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[512,512] get-tuple-element(p), index=1
  w = f32[512,512] get-tuple-element(p), index=2
  q = f32[512,512] dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  one = s32[] constant(1)
  j = s32[] add(i, one)
  ROOT o = {carry} tuple(j, q, w)
}}
cond {{
  p = {carry} parameter(0)
  i = s32[] get-tuple-element(p), index=0
  last = s32[] constant(8)
  ROOT c = pred[] compare(i, last), direction=LT
}}
"""
    body = f"""
  x = f32[256,512] parameter(0)
  w = f32[512,512] parameter(1)
  g = f32[512,512] all-gather(x), ALL, dimensions={{0}}
  zero = s32[] constant(0)
  t = {carry} tuple(zero, g, w)
  l = {carry} while(t), condition=cond, body=body
  ROOT r = f32[512,512] get-tuple-element(l), index=1
"""
    body = body.replace("body=body", 'body=body, backend_config={"known_trip_count":{"n":"8"}}')
    module = partitioned(body, 2, more)
    c = Compilation.of(module, Module.parse(module.hlo))
    run(c, SETTLING)
    ((_, block, (region,)),) = found(c.entry, 2)
    costs = table(launch_s=1e-3)
    # One more part: a kernel for the loop, those in it, its weights; a transfer; the result put together.
    took = overhead(region, block, 1, False, costs)
    rate = costs.compute.bytes_per_s
    assert took == pytest.approx(
        (1 + 8 * 0.25 + 20) * 1e-3 + 8 * 2**20 / rate + 2 * 2**20 / rate, rel=1e-6
    )


def test_what_parts_of_ragged_exchanges_are_charged() -> None:
    module = partitioned(
        """
  x = f32[1024,256] parameter(0)
  w = f32[256,256] parameter(1)
  filled = f32[2048,256] parameter(2)
  n = s32[2] parameter(3)
  there = f32[2048,256] ragged-all-to-all(x, filled, n, n, n, n), EVERYONE
  d = f32[2048,256] dot(there, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT back = f32[1024,256] ragged-all-to-all(d, x, n, n, n, n), EVERYONE
""".replace("EVERYONE", "channel_id=1, replica_groups={{0,1}}"),
        2,
    )
    c = Compilation.of(module, Module.parse(module.hlo))
    run(c, SETTLING)
    ((_, block, (region,)),) = found(c.entry, 2)
    # The weights, 256 KiB, once more; what each part but one writes into, 1 MiB, four times.
    nbytes = 2**18 + 4 * 2**20
    # One kernel once more; two transfers of each, and one by which devices tell each other where rows
    # lie; beside compute, two exchanges of each part but one wait for the core.
    for busy, launches in ((0.0, 1 + 20 * 6), (0.5, 1 + 20 * 6 + 2 * 2 * 60)):
        costs = table(launch_s=1e-3, busy=busy)
        took = overhead(region, block, 2, False, costs)
        assert took == pytest.approx(launches * 1e-3 + nbytes / costs.compute.bytes_per_s)


def test_more_tiles_where_messages_take_longest() -> None:
    few = decided(large(256, 512), table(2e8))[0]
    many = decided(large(256, 512), table(2e7))[0]
    assert few[0].tiles < many[0].tiles


def test_many_devices_have_pieces_where_latency_counts() -> None:
    """Eight devices: seven transfers of an eighth would take longer than two gathers of a half."""
    for latency_s, pieces in ((1e-6, False), (1e-4, True)):
        chosen, said = decided(large(32, 128, 8), table(latency_s=latency_s))
        assert [d.pieces for d in chosen] == [pieces], said


def test_a_split_program_is_made_again_as_it_was_decided() -> None:
    made = replace(large(256, 512), splits=None).compiled(OverlapPolicy(table()))
    assert made.source is not None and made.rewritten
    again = made.source.compiled(OverlapPolicy(table(1e12)))
    assert kinds(again.program) == kinds(made.program) == {Kind.PERMUTE: made.splits[0].parts // 2}
    whole = made.as_written()
    assert kinds(whole.program) == {Kind.ALL_GATHER: 1} and not whole.rewritten
