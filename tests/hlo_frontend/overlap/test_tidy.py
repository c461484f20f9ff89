"""Cuts: which are dissolved to save a launch, and which stay."""

from __future__ import annotations

from overlap_support import check, graph_of, steps_of, text_of

from stretto.hlo_frontend.overlap.replay import replay
from stretto.hlo_frontend.overlap.search import IssueOrder
from stretto.hlo_frontend.overlap.tidy import tidy

COMPUTE, STREAM = -1, 0
LAUNCH = 0.5


def tidied(gathers: list[float]) -> str:
    """Two kernels of a second, each of which reads a gather, and one that reads the third gather."""
    graph = graph_of(
        (COMPUTE, 1.0, 1, [3]),
        (COMPUTE, 1.0, 1, [0, 4]),
        (COMPUTE, 1.0, 1, [1, 5]),
        *((STREAM, seconds, 1, []) for seconds in gathers),
    )
    steps = steps_of("s3 s4 s5 w3 0 w4 1 w5 2")
    check(graph, steps)
    found = tidy(graph, IssueOrder(steps, replay(graph, steps, LAUNCH)), LAUNCH, 1e9)
    check(graph, found.steps)
    return text_of(found.steps)


def test_a_cut_is_dissolved_where_what_it_waits_for_is_there_before() -> None:
    assert tidied([1.0, 0.25, 9.0]) == "s3 s4 s5 w3 w4 0 1 w5 2"


def test_a_cut_stays_where_compute_would_have_to_wait_before_it() -> None:
    """The third gather ends so late that the first kernel could run after the second one: it need not."""
    assert tidied([1.0, 4.0, 9.0]) == "s3 s4 s5 w3 0 w4 1 w5 2"
