"""Programs whose collectives can be split, and how the tests split and run them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from executed import Executed, execute

from stretto.collectives.ops import Kind
from stretto.hlo_frontend.compile import PartitionedModule
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.hlo_frontend.passes.split import Decision
from stretto.hlo_frontend.passes.split.apply import found
from stretto.hlo_frontend.passes.split.regions import Region
from stretto.hlo_frontend.pipeline import SETTLING, Compilation, run
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.runtime.program import Program

SUM = """
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
"""


def table(
    bytes_per_s: float = 1e8, busy: float = 0.0, launch_s: float = 1e-6, latency_s: float = 1e-5
) -> CostTable:
    links = [
        {
            "axis_stride": 1,
            "group_size": n,
            "latency_s": latency_s,
            "bytes_per_s": bytes_per_s,
            "busy": busy,
        }
        for n in (2, 4, 8)
    ]
    compute = {"flops_per_s": 1e10, "bytes_per_s": 1e10, "launch_s": launch_s}
    return CostTable.from_json({"compute": compute, "links": links})


def partitioned(body: str, n: int, more: str = "") -> PartitionedModule:
    """``ALL`` and ``PAIRS`` in the text stand for groups."""
    everyone = ",".join(map(str, range(n)))
    attributes = "channel_id=1, use_global_device_ids=true, replica_groups="
    body = body.replace("ALL", f"{attributes}{{{{{everyone}}}}}")
    body = body.replace("PAIRS", f"{attributes}{{{{0,1}},{{2,3}}}}")
    text = f"HloModule m, num_partitions={n}\n{SUM}{more}\nENTRY e {{{body}}}\n"
    return PartitionedModule(parse_hlo_text(text), 1, n)


def regions(module: PartitionedModule) -> list[tuple[int, int, Region]]:
    c = Compilation.of(module, Module.parse(module.hlo))
    run(c, SETTLING)
    blocks = found(c.entry, module.num_replicas * module.num_partitions)
    return [(number, i, r) for number, _, rs in blocks for i, r in enumerate(rs)]


def names(region: Region) -> tuple[set[str], set[str]]:
    """Its collectives and its other nodes."""
    own = lambda nodes: {n.instruction.name.split(".")[0] for n in nodes}  # noqa: E731
    ends = own(region.collectives)
    return ends, own(region.cuts) - ends


def split(module: PartitionedModule, tiles: int, pieces: bool = False) -> PartitionedModule:
    """With all regions split that can be."""
    chosen = [
        Decision(block, i, tiles, pieces)
        for block, i, region in regions(module)
        if region.divides(region.size * tiles)
    ]
    assert chosen
    return replace(module, splits=tuple(chosen))


def numbers(program: Program, seed: int = 0) -> list[list[np.ndarray]]:
    """Small whole numbers for each parameter and device."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(-3, 4, t.shape).astype(t.numpy) for _ in range(program.num_devices)]
        for t in program.inputs
    ]


def ran(module: PartitionedModule, arguments: list[list[np.ndarray]]) -> tuple[Program, Executed]:
    program = module.lowered().program
    return program, execute(program, arguments)


def kinds(program: Program) -> Counter[Kind]:
    return Counter(c.kind for c in program.collectives)


def looped(trips: int, rows: int = 4, width: int = 6, hidden: int = 8) -> PartitionedModule:
    """A gather, two products and a scatter in each iteration."""
    x, g = f"f32[{rows},{width}]", f"f32[{2 * rows},{width}]"
    w, v, h = f"f32[{width},{hidden}]", f"f32[{hidden},{width}]", f"f32[{2 * rows},{hidden}]"
    carry = f"(s32[], {x}, {w}, {v})"
    attributes = "channel_id=1, use_global_device_ids=true, replica_groups={{0,1}}"
    more = f"""
body {{
  p = {carry} parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = {x} get-tuple-element(p), index=1
  w = {w} get-tuple-element(p), index=2
  v = {v} get-tuple-element(p), index=3
  g = {g} all-gather(x), {attributes}, dimensions={{0}}
  h = {h} dot(g, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  e = {g} dot(h, v), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  r = {x} reduce-scatter(e), {attributes}, dimensions={{0}}, to_apply=sum
  one = s32[] constant(1)
  j = s32[] add(i, one)
  ROOT o = {carry} tuple(j, r, w, v)
}}
cond {{
  p = {carry} parameter(0)
  i = s32[] get-tuple-element(p), index=0
  last = s32[] constant({trips})
  ROOT c = pred[] compare(i, last), direction=LT
}}
"""
    body = f"""
  x = {x} parameter(0)
  w = {w} parameter(1)
  v = {v} parameter(2)
  zero = s32[] constant(0)
  t = {carry} tuple(zero, x, w, v)
  l = {carry} while(t), condition=cond, body=body
  ROOT r = {x} get-tuple-element(l), index=1
"""
    return partitioned(body, 2, more)
