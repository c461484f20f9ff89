"""Slack: starts as early and waits as late as cuts, streams and memory let them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlap_support import check, graph_of, graphs, steps_of, text_of

from stretto.hlo_frontend.overlap.loosen import loosen
from stretto.hlo_frontend.overlap.model import Graph
from stretto.hlo_frontend.overlap.replay import Phase, Step, replay, unscheduled
from stretto.hlo_frontend.overlap.search import IssueOrder, search

COMPUTE, NEAR_STREAM, FAR_STREAM = -1, 0, 1


def loosened(graph: Graph, text: str, spare: int = 0) -> str:
    """Steps as text (`steps_of`), before and after. The peak may rise by ``spare`` bytes."""
    steps = steps_of(text)
    check(graph, steps)
    timeline = replay(graph, steps)
    timeline.peak_bytes += spare
    found = loosen(graph, IssueOrder(steps, timeline), 0.0)
    check(graph, found.steps)
    return text_of(found.steps)


def layers() -> Graph:
    """Kernels 0 to 3, of which 2 reads gather 4, and 3 gather 5."""
    return graph_of(
        (COMPUTE, 4.0, 1, []),
        (COMPUTE, 4.0, 1, [0]),
        (COMPUTE, 4.0, 1, [1, 4]),
        (COMPUTE, 4.0, 1, [2, 5]),
        (NEAR_STREAM, 1.0, 8, []),
        (NEAR_STREAM, 1.0, 8, []),
    )


@pytest.mark.parametrize(
    ("spare", "expected"),
    [
        (8, "s4 s5 0 1 w4 2 w5 3"),
        # Room for one of them: the second is started when the first was read.
        (0, "s4 0 1 w4 2 s5 w5 3"),
    ],
)
def test_starts_move_to_the_first_cut_where_they_fit(spare: int, expected: str) -> None:
    assert loosened(layers(), "0 s4 1 w4 2 s5 w5 3", spare) == expected


def test_a_start_stays_behind_what_it_reads_and_the_one_before_it_on_its_stream() -> None:
    graph = graph_of(
        (COMPUTE, 1.0, 1, []),
        (COMPUTE, 1.0, 1, [0]),
        (COMPUTE, 1.0, 1, [1]),
        (NEAR_STREAM, 1.0, 1, [0]),
        (NEAR_STREAM, 1.0, 1, []),
        (FAR_STREAM, 1.0, 1, []),
    )
    found = loosened(graph, "0 1 s3 2 s4 s5 w3 w4 w5", spare=9)
    # Where it could have stood, behind 0, compute would have been cut. The other stream has no such order.
    assert found == "s5 0 1 s3 s4 2 w3 w4 w5"


def test_waits_move_to_the_last_cut_before_their_readers() -> None:
    graph = graph_of(
        (NEAR_STREAM, 1.0, 1, []),
        (FAR_STREAM, 1.0, 1, []),
        (COMPUTE, 1.0, 1, []),
        (COMPUTE, 1.0, 1, [2]),
        (COMPUTE, 1.0, 1, [3]),
        (COMPUTE, 1.0, 1, [0, 1, 4]),
    )
    assert loosened(graph, "s0 s1 2 w0 3 w1 4 5") == "s0 s1 2 3 w0 w1 4 5"


def test_a_wait_that_makes_room_stays() -> None:
    """The operand of the collective, 8 bytes, is free after the wait; 3 needs as many."""
    graph = graph_of(
        (COMPUTE, 1.0, 8, []),
        (NEAR_STREAM, 1.0, 0, [0]),
        (COMPUTE, 4.0, 0, []),
        (COMPUTE, 1.0, 8, [2]),
    )
    assert loosened(graph, "0 s1 2 w1 3") == "0 s1 2 w1 3"
    assert loosened(graph, "0 s1 2 w1 3", spare=8) == "0 s1 2 3 w1"


def runs_of_compute(steps: list[Step]) -> int:
    computes = [phase is Phase.COMPUTE for _, phase in steps]
    return sum(b and not a for a, b in zip([False, *computes], computes, strict=False))


@given(graphs(14), st.sampled_from([1.0, 1.3, 100.0]), st.sampled_from([0.0, 0.5]))
@settings(max_examples=150, deadline=None)
def test_random_schedules_lose_nothing(graph: Graph, factor: float, launch: float) -> None:
    limit = factor * replay(graph, unscheduled(graph)).peak_bytes
    found = search(graph, launch_s=launch, memory_limit=limit, budget=10 * len(graph.tasks))
    loose = loosen(graph, found, launch)
    check(graph, loose.steps)
    again = replay(graph, loose.steps, launch)
    assert again.seconds <= found.timeline.seconds
    assert again.peak_bytes <= found.timeline.peak_bytes
    assert runs_of_compute(loose.steps) <= runs_of_compute(found.steps)
    for stream in range(len(graph.streams)):
        before, after = (
            [i for i, phase in s if phase is Phase.START and graph.tasks[i].stream == stream]
            for s in (found.steps, loose.steps)
        )
        assert before == after
