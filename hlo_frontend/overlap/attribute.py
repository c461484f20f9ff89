"""Divides the measured times of segments among the instructions of a module.

The time of a segment is a launch, as the table of costs has it, and the time of its kernels. The latter is
divided in the proportions of the kernels' predicted times. An instruction that stands in several places (of a
call that was inlined more than once, or of a loop whose iterations were written out) gets the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from ..carve import BlockPlan, SegmentPlan
from ..graph import Instruction
from ..values import BlockGraph, Node
from .costs import CostTable
from .kernels import build
from .measured import Measured, name_of
from .pricing import shared_out


def attribute(
    entry: BlockGraph,
    carved: BlockPlan,
    homes: Mapping[SegmentPlan, int],
    seconds: Sequence[float | None],
    costs: CostTable,
) -> Measured:
    """The times of the instructions of ``entry``, which was carved as ``carved``.

    ``homes``: the number of the program's segment that each `SegmentPlan` became. ``seconds[i]``: the time of
    segment i with its launch, None if it never ran. Earlier measurements in ``costs`` are not used.
    """
    rates = replace(costs, measured=None)
    found: dict[str, list[float]] = {}
    measured = modelled = 0.0
    for block, plan in _blocks(entry, carved):
        for segment, parts in _parts(block, plan, rates).items():
            taken = seconds[homes[segment]] if segment in homes else None
            if taken is None:
                continue
            kernels = max(0.0, taken - rates.compute.launch_s)
            whole = sum(part for _, part in parts)
            measured += kernels
            modelled += whole
            for instruction, part in parts:
                share = part / whole if whole > 0.0 else 1.0 / len(parts)
                found.setdefault(name_of(instruction), []).append(kernels * share)
    ratio = measured / modelled if modelled > 0.0 else 1.0
    return Measured({name: fmean(times) for name, times in found.items()}, ratio)


def _blocks(block: BlockGraph, plan: BlockPlan) -> Iterator[tuple[BlockGraph, BlockPlan]]:
    """The block and the blocks inside it, each with its plan."""
    yield block, plan
    for node, plans in plan.blocks.items():
        for inner, inner_plan in zip(node.blocks, plans, strict=True):
            yield from _blocks(inner, inner_plan)


def _parts(
    block: BlockGraph, plan: BlockPlan, rates: CostTable
) -> dict[SegmentPlan, list[tuple[Instruction, float]]]:
    """The predicted times of the kernels of each segment, by instruction."""
    home: dict[Node, SegmentPlan] = {}
    for step in plan.steps:
        if isinstance(step, SegmentPlan):
            for node in step.nodes:
                home.setdefault(node, step)
    found: dict[SegmentPlan, list[tuple[Instruction, float]]] = {}
    for task in build(block, rates).tasks:
        if task.ops[0].node.is_runtime:
            continue
        for op, part in zip(task.ops, shared_out(task, task.seconds, rates), strict=True):
            if op.node in home:
                found.setdefault(home[op.node], []).append((op.instruction, part))
    return found
