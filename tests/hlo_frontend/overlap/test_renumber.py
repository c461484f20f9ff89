"""Schedules that stay near another order than the module's own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from overlap_support import NEAR, SUM, check, graphs, planned

from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap.costs import Compute, CostTable, Link
from stretto.hlo_frontend.overlap.model import Graph
from stretto.hlo_frontend.overlap.renumber import from_last_results, scheduled_anew
from stretto.hlo_frontend.overlap.replay import replay
from stretto.hlo_frontend.overlap.schedule import schedule
from stretto.hlo_frontend.text import parse_hlo_text

WEIGHTS = 12


def backward() -> str:
    """A backward pass of small activations, then of each donated weight its gradient, reduced and added: as
    text the first weight comes first, whose gradient is there last."""
    chain, updates, results = [], [], []
    for i in reversed(range(WEIGHTS)):
        chain += [
            f"%w{i} = f32[8,8] parameter({i})",
            f"%b{i} = f32[1,8] dot(%b{i + 1}, %w{i}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
        ]
    for i in range(WEIGHTS):
        contract = "lhs_contracting_dims={0}, rhs_contracting_dims={0}"
        updates += [
            f"%g{i} = f32[8,8] dot(%b{i + 1}, %b{i + 1}), {contract}",
            f"%r{i} = f32[8,8] all-reduce(%g{i}), {NEAR}, to_apply=%sum",
            f"%new{i} = f32[8,8] add(%w{i}, %r{i})",
        ]
        results.append(f"%new{i}")
    types = ", ".join(["f32[8,8]"] * WEIGHTS)
    aliases = ", ".join(f"{{{i}}}: ({i}, {{}}, may-alias)" for i in range(WEIGHTS))
    lines = [
        f"HloModule m, input_output_alias={{ {aliases} }}",
        SUM,
        "ENTRY %main {",
        f"%b{WEIGHTS} = f32[1,8] parameter({WEIGHTS})",
        *chain,
        *updates,
        f"ROOT %t = ({types}) tuple({', '.join(results)})",
        "}",
    ]
    return "\n".join(lines)


def test_gradients_that_come_late_in_the_module_begin_early_where_memory_is_short() -> None:
    """A dot takes a second, a reduction two; two gradients fit into memory at once."""
    costs = CostTable(Compute(128.0, 1e30, 0.0), (Link(1, 2, 0.0, 128.0),))
    _, data, _ = planned(Module.parse(parse_hlo_text(backward())), costs)
    summary = data["summary"]
    assert summary["stream_ms"] == {"stride1x2": 2000.0 * WEIGHTS}
    assert summary["predicted_ms"] <= 1.1 * summary["floor_ms"]
    assert summary["peak_bytes"] <= summary["memory_limit_bytes"]


@settings(max_examples=50, deadline=None)
@given(graph=graphs(most=12), launch=st.sampled_from([0.0, 0.5]))
def test_schedules_of_the_renumbered_graph_are_of_the_graph(graph: Graph, launch: float) -> None:
    order = from_last_results(graph)
    place = {task: position for position, task in enumerate(order)}
    assert sorted(order) == list(range(len(graph.tasks)))
    assert all(place[b] < place[t.index] for t in graph.tasks for b in t.before)
    found = scheduled_anew(graph, lambda g: schedule(g, launch_s=launch), launch)
    check(graph, found.steps)
    assert found.timeline.seconds == replay(graph, found.steps, launch).seconds
