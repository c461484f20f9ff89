"""The order of a segment's nodes: the same for equal compute, wherever the module has it."""

from __future__ import annotations

import pytest
from overlap_support import NEAR, block, module

from stretto.hlo_frontend.carve import SegmentPlan, carve
from stretto.hlo_frontend.likeness import Likeness
from stretto.hlo_frontend.overlap.structure import Structure
from stretto.hlo_frontend.values import BlockGraph, Node, number

# Each line with what it reads; `{p}` and `{q}` are parameters, `{n}` is the number of the copy and `{k}`
# where it slices.
COMPUTE = {
    "half": "%half{n} = f32[4] slice({p}), slice={{[{k}:{end}]}}",
    "tail": "%tail{n} = f32[4] slice({q}), slice={{[{k}:{end}]}}",
    "grown": "%grown{n} = f32[4] exponential(%tail{n})",
    "less": "%less{n} = f32[4] subtract(%half{n}, %tail{n})",
    "small": "%small{n} = f32[4] multiply(%half{n}, %less{n})",
    "all": "%all{n} = f32[4] divide(%small{n}, %grown{n})",
}
ORDERS = [
    ["half", "tail", "less", "small", "grown", "all"],
    ["tail", "grown", "half", "less", "small", "all"],
    ["tail", "half", "less", "grown", "small", "all"],
]


def copy(n: int, p: str, q: str, k: int = 0) -> str:
    return "\n".join(line.format(n=n, p=p, q=q, k=k, end=k + 4) for line in COMPUTE.values())


def twice(names: list[str], k: int = 0) -> BlockGraph:
    """The same compute of other inputs before and behind a collective, the second time in this order."""
    parameters = "\n".join(f"%p{i} = f32[8] parameter({i})" for i in range(4))
    made = block(
        module(
            f"""{parameters}
{copy(0, "%p0", "%p1")}
%sum0 = f32[4] all-reduce(%all0), {NEAR}, to_apply=%sum
{copy(1, "%p2", "%p3", k)}
ROOT %both = (f32[4], f32[4]) tuple(%sum0, %all1)"""
        )
    )
    wanted = [f"{name}0" for name in ORDERS[0]] + ["sum0"] + [f"{name}1" for name in names]
    made.nodes.sort(key=lambda node: wanted.index(node.instruction.name))
    number(made.nodes)
    return made


def segments(of: BlockGraph, structure: Structure | None = None) -> list[SegmentPlan]:
    """The two segments, their nodes in the order of their structure or in the module's."""
    where = next(i for i, node in enumerate(of.nodes) if node.is_runtime)
    halves = [of.nodes[:where], of.nodes[where + 1 :]]
    if structure is not None:
        halves = [structure.ordered(set(half)) for half in halves]
    plan = carve(of, [*halves[0], of.nodes[where], *halves[1]])
    return [step for step in plan.steps if isinstance(step, SegmentPlan)]


@pytest.mark.parametrize("names", ORDERS, ids=range(len(ORDERS)))
def test_equal_compute_is_one_segment_in_whatever_order_the_module_has_it(names):
    likeness = Likeness()
    first, second = segments(twice(names), Structure())
    assert likeness.key(first) == likeness.key(second)


def test_in_the_orders_of_the_module_they_are_two():
    likeness = Likeness()
    first, second = segments(twice(ORDERS[1]))
    assert likeness.key(first) != likeness.key(second)


def test_where_it_slices_is_no_part_of_the_structure():
    """So that offsets can be an input."""
    likeness = Likeness()
    first, second = segments(twice(ORDERS[1], k=4), Structure())
    assert likeness.key(first) != likeness.key(second)
    moved = [
        {node: (0,) for node in plan.nodes if node.instruction.opcode == "slice"}
        for plan in (first, second)
    ]
    assert likeness.key(first, moved[0]) == likeness.key(second, moved[1])


def test_constants_tell_nodes_apart():
    """Products with two constants, which are copied into segments, in either order, that nobody reads."""
    body = """%p0 = f32[4] parameter(0)
%c2 = f32[4] constant({2,2,2,2})
%c3 = f32[4] constant({3,3,3,3})
%by2 = f32[4] multiply(%p0, %c2)
%by3 = f32[4] multiply(%p0, %c3)
ROOT %both = (f32[4], f32[4]) tuple(%by3, %by2)"""
    of, structure, found = block(module(body)), Structure(), []
    for names in (["by2", "by3"], ["by3", "by2"]):
        of.nodes.sort(key=lambda node: names.index(node.instruction.name))
        number(of.nodes)
        found.append([node.instruction.name for node in structure.ordered(of.nodes)])
    assert found[0] == found[1]


def test_what_has_effects_stays_in_the_order_of_the_module():
    told = 'custom_call_target="tell", custom_call_has_side_effect=true'
    of = block(
        module(
            f"""%p0 = f32[8] parameter(0)
%told = f32[8] custom-call(%p0), {told}
%grown = f32[8] exponential(%p0)
%again = f32[8] custom-call(%grown), {told}
ROOT %all = f32[8] add(%told, %again)"""
        )
    )
    structure = Structure()
    for names in (["told", "grown", "again", "all"], ["grown", "again", "told", "all"]):
        of.nodes.sort(key=lambda node: names.index(node.instruction.name))
        number(of.nodes)
        ordered = structure.ordered(set(of.nodes))
        assert [node.instruction.name for node in ordered] == names


def test_nodes_stand_behind_what_they_need():
    """Be it for what they read or for what must run before them."""
    of, structure = twice(ORDERS[0]), Structure()
    named = {node.instruction.name: node for node in of.nodes}
    segments(of, structure)  # so that labels are known
    for first, then in (("tail0", "half0"), ("half0", "tail0")):
        named[then].order = (named[first],)
        of.nodes.remove(named[then])
        of.nodes.insert(of.nodes.index(named[first]) + 1, named[then])
        number(of.nodes)
        ordered = structure.ordered([named[f"{name}0"] for name in ORDERS[0]])
        seen: set[Node] = set()
        for node in ordered:
            assert all(other in seen for other, _ in node.before())
            seen.add(node)
        named[then].order = ()
        of.nodes.sort(key=lambda node: list(named).index(node.instruction.name))
        number(of.nodes)
