"""Schedules of small modules, judged by the independent replay and by the module's own dependencies."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlap_support import (
    DOT,
    FAR,
    NEAR,
    block,
    chain_of_gathers,
    check,
    entry_of,
    graph_of,
    graphs,
    module,
    order,
    planned,
    table,
)

from stretto.hlo_frontend.overlap.floor import floor, independent_compute
from stretto.hlo_frontend.overlap.kernels import build
from stretto.hlo_frontend.overlap.model import Graph
from stretto.hlo_frontend.overlap.play import Player
from stretto.hlo_frontend.overlap.replay import Phase, Step, replay, unscheduled
from stretto.hlo_frontend.overlap.search import longest_tails, search


def test_a_gather_runs_while_independent_compute_does() -> None:
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %w = f32[32] parameter(1)
        %a = f32[8,8] dot(%x, %x), {DOT}
        %b = f32[8,8] dot(%a, %x), {DOT}
        %g = f32[64] all-gather(%w), {NEAR}, dimensions={{0}}
        %m = f32[8,8] reshape(%g)
        ROOT %c = f32[8,8] dot(%b, %m), {DOT}
        """
    )
    plan, data, replayed = planned(found, table())
    assert order(data) == ["start g", "a", "b", "wait g", "c"]
    assert (replayed.seconds, replayed.exposed_seconds) == (3.0, 0.0)
    assert data["summary"]["unscheduled_ms"] == 4000.0
    assert plan.floor.seconds == 3.0
    assert {h["name"] for h in entry_of(data, "g")["hidden_by"]} == {"a"}


def test_weight_gradients_move_behind_collectives_that_compute_would_wait_for() -> None:
    """The text has both weight gradients first; the chain through r1 and r2 needs them nowhere."""
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %w1 = f32[8,8] dot(%x, %x), {DOT}
        %w2 = f32[8,8] dot(%w1, %x), {DOT}
        %w3 = f32[8,8] dot(%w2, %x), {DOT}
        %w4 = f32[8,8] dot(%w3, %x), {DOT}
        %d1 = f32[8,8] dot(%x, %x), {DOT}
        %r1 = f32[8,8] all-reduce(%d1), {NEAR}, to_apply=%sum
        %d2 = f32[8,8] dot(%r1, %x), {DOT}
        %r2 = f32[8,8] all-reduce(%d2), {NEAR}, to_apply=%sum
        %d3 = f32[8,8] dot(%r2, %x), {DOT}
        ROOT %out = (f32[8,8], f32[8,8]) tuple(%w4, %d3)
        """
    )
    _, data, replayed = planned(found, table(), memory_factor=2.0)
    assert data["summary"]["unscheduled_exposed_ms"] == 4000.0
    assert (replayed.seconds, replayed.exposed_seconds) == (7.0, 0.0)
    assert data["summary"]["fully_hidden"] == 2


def test_nested_intervals() -> None:
    """A long gather on one stream spans a short reduction on another and all compute."""
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %w = f32[96] parameter(1)
        %g = f32[192] all-gather(%w), {FAR}, dimensions={{0}}
        %a = f32[8,8] dot(%x, %x), {DOT}
        %s = f32[8,4] slice(%a), slice={{[0:8], [0:4]}}
        %r = f32[8,4] all-reduce(%s), {NEAR}, to_apply=%sum
        %b = f32[8,8] dot(%a, %x), {DOT}
        %c = f32[8,8] dot(%b, %x), {DOT}
        ROOT %out = (f32[192], f32[8,4], f32[8,8]) tuple(%g, %r, %c)
        """
    )
    _, data, replayed = planned(found, table(), memory_factor=2.0)
    long, short = entry_of(data, "g"), entry_of(data, "r")
    assert long["begin"] <= short["begin"] and short["end"] <= long["end"]
    assert (replayed.seconds, replayed.exposed_seconds) == (3.0, 0.0)


def test_a_reduce_scatter_between_gathers_of_its_stream() -> None:
    """The reduce-scatter is ready early and needed by nobody: the gathers that are go first."""
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %w1 = f32[32] parameter(1)
        %w2 = f32[32] parameter(2)
        %p = f32[8,8] dot(%x, %x), {DOT}
        %f = f32[64] reshape(%p)
        %s = f32[32] reduce-scatter(%f), {NEAR}, dimensions={{0}}, to_apply=%sum
        %g1 = f32[64] all-gather(%w1), {NEAR}, dimensions={{0}}
        %m1 = f32[8,8] reshape(%g1)
        %a = f32[8,8] dot(%p, %m1), {DOT}
        %g2 = f32[64] all-gather(%w2), {NEAR}, dimensions={{0}}
        %m2 = f32[8,8] reshape(%g2)
        %b = f32[8,8] dot(%a, %m2), {DOT}
        %c = f32[8,8] dot(%b, %x), {DOT}
        ROOT %out = (f32[32], f32[8,8]) tuple(%s, %c)
        """
    )
    _, data, replayed = planned(found, table(), memory_factor=2.0)
    starts = [name for name in order(data) if name.startswith("start")]
    assert starts == ["start g1", "start g2", "start s"]
    assert (replayed.seconds, replayed.exposed_seconds) == (4.0, 0.0)


@pytest.mark.parametrize("factor", [1.0, 1.2, 1.5, 3.0])
def test_memory_is_never_above_the_limit(factor: float) -> None:
    found = module(chain_of_gathers(6))
    plan, data, replayed = planned(found, table(), memory_factor=factor)
    peak = replayed.peak_bytes
    assert peak <= factor * data["summary"]["unscheduled_peak_bytes"]
    assert replayed.seconds >= plan.floor.seconds - 1e-9


def test_memory_that_is_there_is_used() -> None:
    """b is the peak, with a (1024 bytes) and b (256) alive: the gather (256) fits beside them or not."""
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %v = f32[8,32] parameter(1)
        %u = f32[32,8] parameter(2)
        %w = f32[32] parameter(3)
        %a = f32[8,32] dot(%x, %v), {DOT}
        %b = f32[8,8] dot(%a, %u), {DOT}
        %g = f32[64] all-gather(%w), {NEAR}, dimensions={{0}}
        %m = f32[8,8] reshape(%g)
        ROOT %d = f32[8,8] dot(%b, %m), {DOT}
        """
    )
    _, roomy, free = planned(found, table(), memory_factor=1.2)
    base = roomy["summary"]["base_bytes"]
    assert roomy["summary"]["unscheduled_peak_bytes"] == base + 1280
    assert (free.seconds, free.exposed_seconds, free.peak_bytes) == (9.0, 0.0, base + 1536)
    _, capped, held = planned(found, table(), memory_factor=1.0)
    assert (held.seconds, held.exposed_seconds, held.peak_bytes) == (10.0, 1.0, base + 1280)
    assert "memory is at its limit" in entry_of(capped, "g")["why"]


def test_nothing_crosses_an_unknown_side_effect() -> None:
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %w = f32[32] parameter(1)
        %a = f32[8,8] dot(%x, %x), {DOT}
        %f = f32[8] custom-call(%x), custom_call_target="log", custom_call_has_side_effect=true
        %g = f32[64] all-gather(%w), {NEAR}, dimensions={{0}}
        %b = f32[8,8] dot(%a, %x), {DOT}
        ROOT %out = (f32[8,8], f32[8], f32[64], f32[8,8]) tuple(%a, %f, %g, %b)
        """
    )
    _, data, _ = planned(found, table())
    steps = order(data)
    assert steps.index("a") < steps.index("f") < steps.index("start g")
    assert steps.index("f") < steps.index("b")


def test_control_dependencies_are_kept() -> None:
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %w = f32[32] parameter(1)
        %a = f32[8,8] dot(%x, %x), {DOT}
        %g = f32[64] all-gather(%w), {NEAR}, dimensions={{0}}, control-predecessors={{%a}}
        %m = f32[8,8] reshape(%g)
        ROOT %c = f32[8,8] dot(%a, %m), {DOT}
        """
    )
    _, data, replayed = planned(found, table())
    assert order(data) == ["a", "start g", "wait g", "c"]
    assert replayed.exposed_seconds == 1.0
    assert "needs a" in entry_of(data, "g")["why"]


def test_compute_is_not_split_where_launches_cost_more_than_is_gained() -> None:
    body = f"""
        %x = f32[8,8] parameter(0)
        %w = f32[8,8] parameter(1)
        %a = f32[8,8] dot(%x, %x), {DOT}
        %r = f32[8,8] all-reduce(%a), {NEAR}, to_apply=%sum
        %b = f32[8,8] dot(%w, %w), {DOT}
        %c = f32[8,8] dot(%b, %w), {DOT}
        ROOT %d = f32[8,8] dot(%c, %r), {DOT}
        """
    _, data, replayed = planned(module(body), table(launch_s=0.01), memory_factor=2.0)
    assert order(data) == ["a", "start r", "b", "c", "wait r", "d"]
    assert replayed.seconds == pytest.approx(4.0 + 3 * 0.01)
    _, _, dear = planned(module(body), table(launch_s=100.0), memory_factor=2.0)
    assert dear.seconds <= 2 * 100.0 + 6.0


def test_the_same_module_has_the_same_schedule() -> None:
    orders = {tuple(order(planned(module(chain_of_gathers(5)), table())[1])) for _ in range(2)}
    assert len(orders) == 1


@given(graphs(14), st.sampled_from([1.0, 1.1, 2.0, 100.0]))
@settings(max_examples=120, deadline=None)
def test_random_graphs(graph: Graph, factor: float) -> None:
    own = replay(graph, unscheduled(graph))
    limit = factor * own.peak_bytes
    found = search(graph, memory_limit=limit, budget=40 * len(graph.tasks))
    check(graph, found.steps)
    assert found.timeline.peak_bytes <= limit
    assert found.timeline.seconds <= own.seconds
    assert found.timeline.seconds >= floor(graph).seconds - 1e-9


def test_the_floor_counts_compute_and_a_stream_together() -> None:
    """Ten seconds of compute lead to a gather of three, two to one of two. Whichever goes first, the other's
    kernel or the other's gather comes beside it: 15 s, where compute alone (12 s) ends with 2 s of gather."""
    graph = graph_of((-1, 10.0, 0, []), (-1, 2.0, 0, []), (0, 3.0, 0, [0]), (0, 2.0, 0, [1]))
    turned = graph_of((0, 3.0, 0, []), (0, 2.0, 0, []), (-1, 10.0, 0, [0]), (-1, 2.0, 0, [1]))
    assert [floor(g).seconds for g in (graph, turned)] == [15.0, 15.0]
    assert floor(graph).resource == "compute and near"


def test_a_collective_that_goes_first_waits_for_no_kernel_of_others() -> None:
    """The gather of three seconds has no kernel: it begins at once, whatever leads to the other."""
    graph = graph_of(
        (0, 0.0, 0, []), (0, 3.0, 0, []), (-1, 0.0, 0, [0]), (-1, 6.0, 0, [2]), (-1, 0.0, 0, [2])
    )
    assert floor(graph).seconds == 6.0


@given(graphs(6))
@settings(max_examples=60, deadline=None)
def test_no_order_of_a_small_graph_is_below_the_floor(graph: Graph) -> None:
    """All orders of starts and kernels, each collective waited for where it is first needed."""
    least = float("inf")
    for candidate in permutations(range(len(graph.tasks))):
        position = {index: p for p, index in enumerate(candidate)}
        if any(position[b] > position[t.index] for t in graph.tasks for b in t.before):
            continue
        steps: list[Step] = []
        waited: set[int] = set()
        for index in candidate:
            task = graph.tasks[index]
            for needed in task.before:
                if graph.tasks[needed].is_collective and needed not in waited:
                    waited.add(needed)
                    steps.append((needed, Phase.WAIT))
            steps.append((index, Phase.START if task.is_collective else Phase.COMPUTE))
        late = [t.index for t in graph.tasks if t.is_collective and t.index not in waited]
        steps += [(index, Phase.WAIT) for index in late]
        least = min(least, replay(graph, steps).seconds)
    assert floor(graph).seconds <= least + 1e-9


@given(graphs(12))
@settings(max_examples=40, deadline=None)
def test_independent_compute_is_neither_above_nor_below(graph: Graph) -> None:
    above: list[set[int]] = []
    for task in graph.tasks:
        above.append(set(task.before).union(*(above[b] for b in task.before)))
    expected = [
        sum(
            t.seconds
            for t in graph.tasks
            if not t.is_collective
            and t.index != task.index
            and t.index not in above[task.index]
            and task.index not in above[t.index]
        )
        if task.is_collective
        else 0.0
        for task in graph.tasks
    ]
    found = independent_compute(graph)
    assert found == pytest.approx(expected)
    assert [f == 0.0 for f in found] == [e == 0.0 for e in expected]


def test_weight_gradients_feed_a_stream_that_would_run_dry() -> None:
    """The text has the gradients of all weights behind the chain, as XLA's order of unscheduled modules has:
    their reductions take as long as all compute, and begin with the first of them only if that runs first.
    """
    layers = 6
    lines = ["%d0 = f32[8,8] parameter(0)"]
    lines += [f"%d{i + 1} = f32[8,8] dot(%d{i}, %d{i}), {DOT}" for i in range(layers)]
    for i in range(layers):
        lines += [
            f"%g{i} = f32[8,8] dot(%d{i}, %d{i + 1}), {DOT}",
            f"%flat{i} = f32[64] reshape(%g{i})",
            f"%r{i} = f32[128] all-gather(%flat{i}), {NEAR}, dimensions={{0}}",
        ]
    results = ", ".join(f"%r{i}" for i in range(layers))
    shapes = ", ".join(["f32[128]"] * layers)
    lines.append(f"ROOT %all = ({shapes}) tuple({results})")
    graph = build(block(module("\n".join(lines))), table())
    assert replay(graph, unscheduled(graph)).seconds == 2 * layers + 2 * layers
    urgency = longest_tails(graph)
    urgent, fed = (Player(graph).play(urgency, feeds=feeds)[0] for feeds in (False, True))
    assert replay(graph, urgent).seconds == layers + 1 + 2 * layers
    # A gradient takes two products, and each reduction as long as two.
    assert replay(graph, fed).seconds == 2 + 2 * layers
    assert search(graph).timeline.seconds == 2 + 2 * layers


def test_gradients_that_take_longer_than_their_reductions_are_left_for_the_end() -> None:
    """A chain of three products of 2 s leads to a long reduction. One gradient takes 1 s and its reduction
    2 s; another one, of two kernels, 3 s and 1 s: behind the long reduction it costs 1 s, before it 3 s.
    """
    graph = graph_of(
        (-1, 2.0, 0, []),
        (-1, 2.0, 0, [0]),
        (-1, 2.0, 0, [1]),
        (0, 4.0, 0, [2]),
        (-1, 1.0, 0, []),
        (0, 2.0, 0, [4]),
        (-1, 2.5, 0, []),
        (-1, 0.5, 0, [6]),
        (0, 1.0, 0, [7]),
    )
    urgency = longest_tails(graph)
    seconds = [
        replay(graph, Player(graph).play(urgency, feeds=feeds)[0]).seconds
        for feeds in (False, True)
    ]
    assert seconds == [13.0, 12.0]
    assert search(graph).timeline.seconds == 12.0
