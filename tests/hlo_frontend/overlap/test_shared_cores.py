"""Orders replayed where collectives keep the cores busy that compute: times by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from overlap_support import DOT, FAR, NEAR, block, entry_of, module, planned, table

from stretto.hlo_frontend.overlap.kernels import build
from stretto.hlo_frontend.overlap.model import Graph
from stretto.hlo_frontend.overlap.replay import Phase, Step, Timeline, replay
from stretto.hlo_frontend.overlap.shared_cores import replay_shared

# One near and one far gather of two seconds each; a and b are a second each, c and d two.
BODY = f"""
    %x = f32[8,8] parameter(0)
    %w = f32[64] parameter(1)
    %v = f32[64] parameter(2)
    %a = f32[8,8] dot(%x, %x), {DOT}
    %b = f32[8,8] dot(%a, %a), {DOT}
    %g = f32[128] all-gather(%w), {NEAR}, dimensions={{0}}
    %h = f32[128] all-gather(%v), {FAR}, dimensions={{0}}
    %m = f32[8,16] reshape(%g)
    %n = f32[8,16] reshape(%h)
    %c = f32[8,16] dot(%b, %m), {DOT}
    %d = f32[8,16] dot(%b, %n), {DOT}
    ROOT %t = (f32[8,16], f32[8,16]) tuple(%c, %d)
"""


def graph_of(body: str, busy: float) -> Graph:
    return build(block(module(body)), table(busy=busy), ())


def run(
    busy: float, order: Sequence[str], launch_s: float = 0.0, body: str = BODY
) -> tuple[Timeline, Timeline]:
    """The order's replay, and that on shared cores; ``+g`` starts g, ``-g`` awaits it."""
    graph = graph_of(body, busy)
    at = {task.name: task.index for task in graph.tasks}
    phases = {"+": Phase.START, "-": Phase.WAIT}
    steps: list[Step] = [
        (at[name.lstrip("+-")], phases.get(name[0], Phase.COMPUTE)) for name in order
    ]
    return replay(graph, steps, launch_s), replay_shared(graph, steps, launch_s)


ALL = ("+g", "+h", "a", "b", "-g", "c", "-h", "d")


def times(found: Timeline) -> tuple[float, float, float]:
    return found.seconds, found.exposed_seconds, found.held


def test_links_that_leave_cores_alone_change_nothing() -> None:
    plain, shared = run(0.0, ALL)
    assert shared == plain
    assert times(plain) == (6.0, 0.0, 0.0)


def test_compute_goes_on_slower_beside_what_is_under_way() -> None:
    # Two shares of a quarter: a and b go at half their speed and take the two seconds together, in which
    # only one of them is done; what is left of them, and the others, runs alone.
    _, shared = run(0.25, ALL)
    assert times(shared) == (7.0, 0.0, 1.0)


def test_more_is_hidden_by_what_takes_longer() -> None:
    # b alone hides a second of the two; at three quarters of its speed it takes a third of one more.
    order = ("a", "+g", "b", "-g", "c", "+h", "-h", "d")
    plain, shared = run(0.25, order)
    assert times(plain) == (9.0, 3.0, 0.0)
    assert times(shared) == pytest.approx((9.0, 2 + 2 / 3, 1 / 3))


def test_what_takes_all_cores_hides_nothing() -> None:
    _, shared = run(1.0, ALL)
    assert times(shared) == (8.0, 0.0, 2.0)
    assert times(run(0.75, ALL)[1]) == (8.0, 0.0, 2.0)  # together more than all


def test_one_behind_the_other_on_a_stream_takes_its_share_in_its_turn() -> None:
    _, shared = run(0.5, ALL, body=BODY.replace(FAR, NEAR))
    # g until 2, when a is done; h until 4, when b is; then c and d alone.
    assert times(shared) == (8.0, 0.0, 2.0)


def test_launches_are_held_back_too() -> None:
    _, shared = run(0.5, ("+g", "a", "b", "-g", "+h", "-h", "c", "d"), launch_s=0.25)
    # 2.25 s of launch and compute: one done by 2, the rest alone; h exposed; then 4.25 s.
    assert times(shared) == pytest.approx((2 + 1.25 + 2 + 4.25, 2.0, 1.0))


def test_the_ledger_counts_it_and_can_be_replayed() -> None:
    _, data, replayed = planned(module(BODY), table(busy=0.25), memory_factor=2.0)
    summary = data["summary"]
    assert summary["held_ms"] > 0.0
    parts = sum(summary[key] for key in ("compute_ms", "held_ms", "exposed_ms"))
    assert summary["predicted_ms"] == pytest.approx(parts)
    assert replayed.compute_seconds == pytest.approx(6.0)
    starts = [step for step in data["steps"] if step["kind"] == "start"]
    assert [step["busy"] for step in starts] == [0.25, 0.25]
    assert entry_of(data, "g")["exposed"] == 0.0
