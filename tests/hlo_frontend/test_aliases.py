"""What a conditional gives may overwrite what it was given: what each branch updates or hands on."""

from __future__ import annotations

import pytest
from overlap.overlap_support import block

from stretto.hlo_frontend.aliases import find_aliases
from stretto.hlo_frontend.carve import SegmentPlan, carve
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.passes.order import order
from stretto.hlo_frontend.text import parse_hlo_text

# What a branch gives for a and b.
BRANCHES = {
    "itself": "ROOT r = (f32[512], f32[512]) tuple(a, b)",
    "swapped": "ROOT r = (f32[512], f32[512]) tuple(b, a)",
    "a row put": """
          n = f32[8] slice(b), slice={[0:8]}
          u = f32[512] dynamic-update-slice(a, n, i)
          ROOT r = (f32[512], f32[512]) tuple(u, b)""",
    "a sum": """
          s = f32[512] add(b, a)
          ROOT r = (f32[512], f32[512]) tuple(a, s)""",
    "zeros": """
          z = f32[] constant(0)
          o = f32[512] broadcast(z), dimensions={}
          ROOT r = (f32[512], f32[512]) tuple(o, b)""",
    "a branch": """
          t = (f32[512], f32[512], s32[]) tuple(a, b, i)
          zero = s32[] constant(0)
          q = pred[] compare(i, zero), direction=EQ
          ROOT r = (f32[512], f32[512]) conditional(q, t, t), true_computation=put,
            false_computation=same""",
}


def aliases(first: str, second: str) -> dict[int, int]:
    """Input -> output of a segment: a conditional of arrays a (input 1) and b (2), outputs 0 and 1."""

    def computation(name: str, what: str) -> str:
        return f"""
        {name} {{
          p = (f32[512], f32[512], s32[]) parameter(0)
          a = f32[512] get-tuple-element(p), index=0
          b = f32[512] get-tuple-element(p), index=1
          i = s32[] get-tuple-element(p), index=2
          {BRANCHES[what]}
        }}"""

    text = f"""HloModule m
        {computation("put", "a row put")}
        {computation("same", "itself")}
        {computation("first", first)}
        {computation("second", second)}
        ENTRY e {{
          q = pred[] parameter(0)
          x = f32[512] parameter(1)
          y = f32[512] parameter(2)
          k = s32[] parameter(3)
          t = (f32[512], f32[512], s32[]) tuple(x, y, k)
          ROOT c = (f32[512], f32[512]) conditional(q, t, t), true_computation=first,
            false_computation=second
        }}"""
    graph = block(Module.parse(parse_hlo_text(text)))
    (plan,) = [step for step in carve(graph, order(graph)).steps if isinstance(step, SegmentPlan)]
    names = [graph.parameters.index(v) for v in plan.inputs]
    found = find_aliases(plan, graph.parameters)
    return {names[i]: output for i, output in found.items()}


@pytest.mark.parametrize("other", ["itself", "a row put", "a sum", "a branch"])
def test_what_each_branch_updates_or_hands_on_is_overwritten(other: str) -> None:
    assert aliases("itself", other) == aliases(other, "itself") == {1: 0, 2: 1}


@pytest.mark.parametrize(("other", "left"), [("zeros", {2: 1}), ("swapped", {})])
def test_what_a_branch_takes_from_elsewhere_is_not_overwritten(
    other: str, left: dict[int, int]
) -> None:
    assert aliases("itself", other) == aliases(other, "itself") == left
