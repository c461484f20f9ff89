"""Graphs print, are checked, and are left alone by whoever only asks for an order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from pipelines import circular

from stretto.collectives.types import TensorType
from stretto.hlo_frontend import pipeline
from stretto.hlo_frontend.collectives import CollectiveReader
from stretto.hlo_frontend.compile import PartitionedModule, compile_hlo
from stretto.hlo_frontend.edit import Editor
from stretto.hlo_frontend.flatten import flatten
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.graph_check import GraphError
from stretto.hlo_frontend.overlap.costs import Compute, CostTable, Link
from stretto.hlo_frontend.overlap.uncombine import uncombine
from stretto.hlo_frontend.passes import rotate
from stretto.hlo_frontend.passes.order import order
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.hlo_frontend.pipeline import Compilation, run
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.hlo_frontend.values import BlockGraph, Node, NodeKind, Value

GROUPS = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"
TEXT = f"""HloModule m, num_partitions=2

sum {{
  left = f32[] parameter(0)
  right = f32[] parameter(1)
  ROOT both = f32[] add(left, right)
}}

body {{
  c = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[8] get-tuple-element(c), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  moved = f32[8] collective-permute(x), channel_id=2, source_target_pairs={{{{0,1}}}}
  ROOT n = (s32[], f32[8]) tuple(j, moved)
}}

condition {{
  cc = (s32[], f32[8]) parameter(0)
  ci = s32[] get-tuple-element(cc), index=0
  three = s32[] constant(3)
  ROOT less = pred[] compare(ci, three), direction=LT
}}

here {{
  h = f32[8] parameter(0)
  ROOT there = f32[8] all-reduce(h), to_apply=sum, {GROUPS}
}}

idle {{
  ROOT k = f32[8] parameter(0)
}}

ENTRY e {{
  p = f32[8] parameter(0)
  flag = pred[] parameter(1)
  total = f32[8] all-reduce(p), to_apply=sum, {GROUPS}, metadata={{source_file="step.py" source_line=12}}
  barred = (f32[8]) opt-barrier((f32[8]) tuple(total))
  behind = f32[8] get-tuple-element(barred), index=0
  half = f32[] constant(0.5)
  halves = f32[8] broadcast(half), dimensions={{}}
  scaled = f32[8] multiply(behind, halves), control-predecessors={{total}}
  first = f32[8] call(scaled), to_apply=here
  second = f32[8] call(first), to_apply=here
  zero = s32[] constant(0)
  init = (s32[], f32[8]) tuple(zero, second)
  loop = (s32[], f32[8]) while(init), condition=condition, body=body
  shifted = f32[8] get-tuple-element(loop), index=1
  ROOT chosen = f32[8] conditional(flag, shifted, p), true_computation=here, false_computation=idle
}}
"""
TEXT = TEXT.replace(
    "  barred = (f32[8]) opt-barrier((f32[8]) tuple(total))",
    "  packed = (f32[8]) tuple(total)\n  barred = (f32[8]) opt-barrier(packed)",
)

PRINTED = """\
(%0: f32[8], %1: pred[]) {
  0 %total = all-reduce f32[8] (%0) groups {{0,1}} reduction add at step.py:12
  1 %scaled = multiply f32[8] (fence(%total), f32[8](f32[](half))) after (%total)
  2 %there = all-reduce f32[8] (%scaled) groups {{0,1}} reduction add
  3 %there@2 = all-reduce f32[8] (%there) groups {{0,1}} reduction add
  4 %loop = while (s32[], f32[8]) (0, %there@2) trips 3
    condition (%0: s32[], %1: f32[8]) {
      0 %less = compare pred[] (%0, 3)
      yield (%less)
    }
    body (%0: s32[], %1: f32[8]) {
      0 %j = add s32[] (%0, 1)
      1 %moved = collective-permute f32[8] (%1) pairs {{0,1}}
      yield (%j, %moved)
    }
  5 %chosen = conditional f32[8] (%1, %loop#1, %0)
    branch 0 (%0: f32[8]) {
      0 %there = all-reduce f32[8] (%0) groups {{0,1}} reduction add
      yield (%there)
    }
    branch 1 (%0: f32[8]) {
      yield (%0)
    }
  yield (%chosen)
}
"""


def graph(text: str = TEXT, devices: int = 2) -> BlockGraph:
    return flatten(Module.parse(parse_hlo_text(text)).entry, CollectiveReader(1, devices))


def compilation(text: str, devices: int, policy: ValidPolicy) -> Compilation:
    source = PartitionedModule(parse_hlo_text(text), 1, devices, valid=policy)
    return Compilation.of(source, Module.parse(source.hlo))


def test_a_graph_prints():
    assert str(graph()) == PRINTED


def test_the_same_module_has_the_same_text_in_every_process():
    code = "from test_graph import graph; print(graph(), end='')"
    for seed in "12":
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.path.dirname(__file__)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == PRINTED


def test_what_passes_find_is_printed(monkeypatch):
    monkeypatch.setattr(rotate, "LEAST_HIDDEN_FLOPS", 0.0)
    c = compilation(circular(2, 2), 2, ValidPolicy(least_flops=0.0))
    before = str(c.entry)
    run(c)
    lines = str(c.entry).split("\n")
    (permute,) = [line for line in lines if " collective-permute " in line]
    assert " valid {{" in permute and " carried {{0," in permute
    assert " phase 1 " in permute
    assert any(" read {{" in line for line in lines)
    assert not any(word in before for word in (" valid ", " carried ", " phase ", " read "))


def slots(block: BlockGraph) -> list[object]:
    """All that nodes are made of, by identity."""
    own = [
        [getattr(node, name) for name in Node.__slots__ if name != "operands"]
        + [(v, v.order, v.root, v.node) for v in node.operands]
        for node in block.nodes
    ]
    return [*own, *(slots(b) for node in block.nodes for b in node.blocks)]


def test_asking_for_an_order_changes_nothing():
    c = compilation(circular(2, 2), 2, ValidPolicy(least_flops=0.0))
    run(c, pipeline.COMMON)
    (loop,) = [n for n in c.entry.nodes if n.kind is NodeKind.LOOP]
    body = loop.blocks[1]
    before, text = slots(c.entry), str(c.entry)
    with_parts, whole = order(body, 0.0), order(body, 1e30)
    assert with_parts.valid and with_parts.parts and not (whole.valid or whole.parts)
    assert set(with_parts) == set(whole) == set(body.nodes)
    assert slots(c.entry) == before and str(c.entry) == text


# Ways to break the graph of TEXT, and what is said then.
BREAKS: dict[str, tuple[Callable[[BlockGraph, dict[str, Node]], object], str]] = {
    "order": (
        lambda g, n: g.nodes.insert(0, g.nodes.pop(1)),
        r"^scaled \(multiply\): has position 1 behind -1",
    ),
    "order of data": (
        lambda g, n: swap(g, n["total"], n["scaled"]),
        r"^scaled \(multiply\): operand 0 is of total \(all-reduce, step.py:12\), which is behind it",
    ),
    "order of control": (
        lambda g, n: setattr(n["total"], "order", (n["loop"],)),
        r"^total \(all-reduce, step.py:12\): it comes after loop \(while\), which is behind it",
    ),
    "a node left out": (
        lambda g, n: drop(g, n["scaled"]),
        r"^there \(all-reduce\): operand 0 is of scaled \(multiply\), which is not in its block",
    ),
    "twice": (lambda g, n: g.nodes.append(n["total"]), r"^total .*: stands twice in its block"),
    "a gap": (
        lambda g, n: setattr(n["chosen"], "position", 7),
        r"^chosen \(conditional\): has position 7 behind 4",
    ),
    "another block's parameter": (
        lambda g, n: n["total"].operands.__setitem__(0, n["loop"].blocks[1].parameters[1]),
        r"^total .*: operand 0, f32\[8\], is no parameter of the block, and no node gives it",
    ),
    "no result": (
        lambda g, n: n["loop"].results.pop(),
        r"^loop \(while\): results: 1, where 2 are expected",
    ),
    "another's result": (
        lambda g, n: setattr(n["scaled"], "results", n["total"].results),
        r"^scaled .*: result 0 is not the node's own",
    ),
    "a replaced result": (
        lambda g, n: setattr(n["loop"], "results", fresh(n["loop"])),
        r"^chosen .*: operand 1 is no result of loop",
    ),
    "type of an operand": (
        lambda g, n: n["scaled"].operands.__setitem__(1, g.parameters[1]),
        r"^scaled .*: operands 1: pred\[\], where f32\[8\] is expected",
    ),
    "type of a collective": (
        lambda g, n: n["there"].operands.__setitem__(0, g.parameters[1]),
        r"^there .*: operands of the collective 0: f32\[8\], where pred\[\] is expected",
    ),
    "carries": (
        lambda g, n: n["loop"].blocks[1].results.reverse(),
        r"^loop .*: results of the body 0: f32\[8\], where s32\[\] is expected",
    ),
    "condition": (
        lambda g, n: n["loop"].blocks[0].results.clear(),
        r"^loop .*: results of the condition: 0, where 1 are expected",
    ),
    "results of a branch": (
        lambda g, n: n["chosen"].blocks[1].results.clear(),
        r"^chosen .*: results of branch 1: 0, where 1 are expected",
    ),
    "parameters of a branch": (
        lambda g, n: n["chosen"].operands.pop(),
        r"^chosen .*: operands: 1, where 2 are expected",
    ),
    "selector": (
        lambda g, n: setattr(n["chosen"], "selector", g.parameters[0]),
        r"^chosen .*: its selector is not its first operand",
    ),
    "phases": (
        lambda g, n: g.phases.update({n["total"]: 1}),
        r"^scaled .*: operand 0 is of total .*, which is of phase 1; it is of phase 0",
    ),
    "a carry": (
        lambda g, n: g.crossing.add(n["total"]),
        r"^total .*: is awaited in the next iteration, but no result of the block is its own",
    ),
    "a result": (
        lambda g, n: g.results.append(Value(TensorType("f32", ()))),
        r"^result 1 of the block, f32\[\], is no parameter",
    ),
    "a result inside": (
        lambda g, n: n["loop"].blocks[1].results.__setitem__(1, g.parameters[0]),
        r"^loop .*: result 1 of the block, f32\[8\], is no parameter",
    ),
    "a parameter": (
        lambda g, n: g.parameters.append(n["total"].results[0]),
        r"^parameter 2 of a block is what a node gives",
    ),
}


def swap(block: BlockGraph, first: Node, second: Node) -> None:
    i, k = block.nodes.index(first), block.nodes.index(second)
    block.nodes[i], block.nodes[k] = second, first
    first.position, second.position = k, i


def drop(block: BlockGraph, node: Node) -> None:
    block.nodes.remove(node)
    for position, other in enumerate(block.nodes):
        other.position = position


def fresh(node: Node) -> list[Value]:
    return [Value(v.type, node, i) for i, v in enumerate(node.results)]


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_graph_is_refused(what):
    broken = graph()
    broken.check()
    damage, message = BREAKS[what]
    damage(broken, {node.instruction.name: node for node in reversed(broken.nodes)})
    with pytest.raises(GraphError, match=message):
        broken.check()


def test_the_pass_that_breaks_a_graph_is_named(monkeypatch):
    def _careless(c: Compilation) -> None:
        drop(c.entry, c.entry.nodes[1])

    passes = (*pipeline.COMMON[:1], _careless)
    monkeypatch.setenv(pipeline.CHECKED, "1")
    with pytest.raises(
        GraphError, match=r"^m, after pass careless: there \(all-reduce\): operand 0"
    ):
        run(compilation(TEXT, 2, ValidPolicy()), passes)
    monkeypatch.delenv(pipeline.CHECKED)  # users do not pay for it
    run(compilation(TEXT, 2, ValidPolicy()), passes)


def test_these_tests_run_with_checks():
    assert os.environ[pipeline.CHECKED] == "1"


def test_every_stage_is_dumped_with_the_graph_as_it_was():
    stages: list[tuple[str, str, str]] = []

    def dump(program: str, stage: str, text: str) -> None:
        stages.append((program, stage, text))

    made = compile_hlo(TEXT, 1, 2, dump=dump)
    assert {program for program, _, _ in stages} == {"m"}
    texts = {stage: text for _, stage, text in stages}
    passes = [one.__name__.strip("_") for one in pipeline.PASSES]
    assert list(texts) == ["hlo", "flatten", *passes, "program", "segments"]
    assert texts["hlo"].startswith("HloModule m")
    assert texts["flatten"] == PRINTED
    assert texts["program"] == str(made.program)
    assert texts["segments"].count("// segment ") == len(made.program.segments)
    assert "stablehlo.multiply" in texts["segments"]
    assert compile_hlo(TEXT, 1, 2).program == made.program


def test_views_follow_a_value_to_another_node():
    """Combined all-reduces are taken apart while views of their results are about."""
    total = "total = f32[8] all-reduce(p), to_apply=sum"
    text = TEXT.replace(total, "pair = (f32[8], f32[8]) all-reduce(p, p), to_apply=sum").replace(
        "  packed =", "  total = f32[8] get-tuple-element(pair), index=0\n  packed ="
    )
    entry = graph(text)
    (pair,) = [n for n in entry.nodes if n.instruction.name == "pair"]
    (scaled,) = [n for n in entry.nodes if n.instruction.name == "scaled"]
    view = scaled.operands[0]
    assert view is not pair.results[0] and view.root is pair.results[0]
    costs = CostTable(Compute(1.0, 1.0, 0.0), (Link(1, 2, 0.0, 1.0, 0.0),))
    undo = uncombine(entry, costs)
    assert undo is not None
    entry.check()
    first, second = entry.nodes[:2]
    assert (view.node, view.index) == (first, 0) and second.results[0].index == 0
    undo()
    entry.check()
    assert view.node is pair


def test_what_enters_a_barrier_and_is_not_read_any_more_can_be_dropped():
    """Of a barrier before a recomputation, which is no fence: who is behind it comes after what came before
    the dropped node."""
    block = graph(
        """HloModule m, num_partitions=2
ENTRY e {
  x = f32[4] parameter(0)
  w = f32[4] parameter(1)
  first = f32[4] add(x, x)
  unread = f32[4] multiply(first, w)
  both = (f32[4], f32[4]) tuple(x, unread)
  held = (f32[4], f32[4]) opt-barrier(both), metadata={op_name="jit(f)/remat2"}
  again = f32[4] get-tuple-element(held), index=0
  late = f32[4] negate(again)
  ROOT r = f32[4] add(first, late)
}
"""
    )
    (late,) = [n for n in block.nodes if n.instruction.name == "late"]
    (first,) = [n for n in block.nodes if n.instruction.name == "first"]
    Editor(block).commit()
    block.check()
    assert [n.instruction.name for n in block.nodes] == ["first", "late", "r"]
    assert list(late.operands[0].comes_after()) == [first]
