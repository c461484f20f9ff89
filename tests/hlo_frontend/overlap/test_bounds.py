"""Quick bounds, against the floor, which every order of small graphs is checked against, and by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from overlap_support import DOT, FAR, NEAR, block, graph_of, graphs, module, table

from stretto.hlo_frontend.overlap.bounds import least_merged_seconds, least_seconds
from stretto.hlo_frontend.overlap.buckets import merge
from stretto.hlo_frontend.overlap.floor import floor
from stretto.hlo_frontend.overlap.kernels import build
from stretto.hlo_frontend.overlap.model import Graph


@given(graphs(12))
@settings(max_examples=100, deadline=None)
def test_a_quick_bound_is_at_most_the_floor(graph: Graph) -> None:
    assert least_seconds(graph) <= floor(graph).seconds + 1e-9


def test_the_longest_of_compute_streams_and_ways_binds() -> None:
    compute = graph_of((-1, 3.0, 0, []), (-1, 4.0, 0, []), (0, 5.0, 0, [0]))
    assert least_seconds(compute) == 8.0  # 3 s of compute lead to the collective
    assert least_seconds(compute, launch_s=2.0) == 9.0  # all compute and one launch
    stream = graph_of((0, 3.0, 0, []), (0, 6.0, 0, []), (-1, 1.0, 0, [0]))
    assert least_seconds(stream) == 9.0


def test_what_crosses_takes_the_time_of_its_stream_alone() -> None:
    """2 s of compute lead to a collective of 5 s for the next iteration; 4 s need what arrives."""
    graph = graph_of((-1, 2.0, 0, []), (0, 5.0, 0, [0]), (0, 3.0, 0, []), (-1, 4.0, 0, [2]))
    graph.tasks[1] = replace(graph.tasks[1], crosses=True)
    graph.tasks[2] = replace(graph.tasks[2], arrives=True)
    assert least_seconds(graph) == 6.0


def test_buckets_save_latencies_of_one_kind_and_stream() -> None:
    """Four gathers of 1 s and 10 s of latency, three on one stream: together they take 13 s."""
    lines = [
        f"%w{i} = f32[32] parameter({i})\n%g{i} = f32[64] all-gather(%w{i}), {NEAR}, dimensions={{0}}"
        for i in range(3)
    ]
    lines.append(f"%v = f32[32] parameter(3)\n%f = f32[64] all-gather(%v), {FAR}, dimensions={{0}}")
    lines.append("ROOT %all = (f32[64], f32[64], f32[64], f32[64]) tuple(%g0, %g1, %g2, %f)")
    costs = table(latency_s=10.0)
    graph = build(block(module("\n".join(lines))), costs)
    assert least_seconds(graph) == 33.0
    assert least_merged_seconds(graph) == 11.0
    near = [task.index for task in graph.tasks if task.stream == graph.tasks[0].stream]
    merged, _ = merge(graph, [near], costs)
    assert least_seconds(merged) == 13.0


def test_no_way_gets_shorter_by_buckets() -> None:
    """A dot between two gathers: they cannot be one, and all three take their time."""
    body = f"""
    %w = f32[32] parameter(0)
    %g = f32[64] all-gather(%w), {NEAR}, dimensions={{0}}
    %m = f32[8,8] reshape(%g)
    %d = f32[8,8] dot(%m, %m), {DOT}
    %r = f32[64] reshape(%d)
    ROOT %h = f32[128] all-gather(%r), {NEAR}, dimensions={{0}}
    """
    graph = build(block(module(body)), table(latency_s=4.0))
    assert least_merged_seconds(graph) == least_seconds(graph) == 5.0 + 1.0 + 6.0
