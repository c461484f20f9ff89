"""Cutting an ordered block: maximal runs of compute of one part, between runtime nodes, become segment plans.

Carving knows nothing of how the order came about: any topological order of a block's nodes will do.
A node that occurs several times is computed anew in each segment that needs it; an `Await` is where what a
collective gives is waited for, if that is not left to its first use.
Constants and other cheap values that a runtime node or the block's result needs are made by the
segment before it that runs on all devices, one fresh array for each use, so that each may be donated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .passes.unread import Ordered
from .values import BlockGraph, Node, NodeKind, Value, carried_results


@dataclass(eq=False)
class SegmentPlan:
    """Compute nodes that run as one segment.

    ``inputs`` and ``outputs`` are arrays (root values); ``made`` are outputs that are copies of cheap
    values: pairs of the new value and the cheap one. ``part`` (with the phase before it) and ``valid``: those
    of the nodes. ``offsets``: of slices and pads that are told where, for each dimension the position in the
    last input, or None where the instruction says it (see `offsets`).
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    made: list[tuple[Value, Value]] = field(default_factory=list)
    valid: tuple[tuple[int, ...], ...] = ()
    part: tuple[int, ...] = (0, 0, 0)
    offsets: dict[Node, tuple[int | None, ...]] = field(default_factory=dict)


@dataclass(eq=False)
class RuntimeStep:
    """A node that the executor runs, on these arrays (root values)."""

    node: Node
    inputs: list[Value]


@dataclass(frozen=True, eq=False)
class Await:
    """In an order of nodes: where the results of a collective are waited for."""

    node: Node


@dataclass(eq=False)
class AwaitStep:
    """Wait for a collective that was started before."""

    node: Node
    inputs: tuple[Value, ...] = ()


Step = SegmentPlan | RuntimeStep | AwaitStep


@dataclass(eq=False)
class BlockPlan:
    """A block cut into steps. Values in ``results`` are roots.

    ``crossing``: of a loop's body, the collectives that its next iteration awaits, with the (result, carry)
    pairs of each. ``pipelined``: whether its nodes are in phases (`passes.rotate`).
    """

    parameters: list[Value]
    steps: list[Step]
    results: list[Value]
    blocks: dict[Node, tuple[BlockPlan, ...]] = field(default_factory=dict)
    crossing: dict[Node, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    pipelined: bool = False


def carve(block: BlockGraph, ordered: Sequence[Node | Await]) -> BlockPlan:
    """Cut ``ordered``, the nodes of ``block`` in a topological order. Where it is `Ordered`, its parts are
    segments of their own."""
    parts, valid = (ordered.parts, ordered.valid) if isinstance(ordered, Ordered) else ({}, {})
    steps: list[Step] = []
    pending: list[SegmentPlan] = []  # since the last runtime node

    def materialized(value: Value) -> Value:
        if not is_cheap(value):
            return value.root
        plain = next((plan for plan in reversed(pending) if not plan.valid), None)
        if plain is None:
            pending.append(plain := SegmentPlan())
        made = Value(value.type)
        plain.made.append((made, value.root))
        return made

    for node in ordered:
        if isinstance(node, Await):
            steps += pending
            pending.clear()
            steps.append(AwaitStep(node.node))
            continue
        if not node.is_runtime and node.kind is not NodeKind.LOGICAL_ID:
            part = (block.phases.get(node, 0), *parts.get(node, (0, 0)))
            if not pending or pending[-1].part != part:
                pending.append(SegmentPlan(valid=valid.get(node, ()), part=part))
            pending[-1].nodes.append(node)
            continue
        inputs = [materialized(value) for value in node.operands]
        if node.is_runtime:
            steps += pending
            pending.clear()
        # A logical id takes part in no order: it may stand before the segments being built.
        steps.append(RuntimeStep(node, inputs))
    results = [materialized(value) for value in block.results]
    steps += pending
    plan = BlockPlan(block.parameters, steps, results, pipelined=bool(block.phases))
    for step in steps:
        # A node that a plan has merged of several gives their results.
        if isinstance(step, RuntimeStep) and block.crossing.intersection(
            result.node for result in step.node.results if result.node is not None
        ):
            plan.crossing[step.node] = carried_results(step.node, results)
    _connect(plan)
    return plan


def is_cheap(value: Value) -> bool:
    return value.root.node is not None and value.root.node.kind is NodeKind.CHEAP


def used_values(node: Node) -> list[Value]:
    """Arrays a node of a segment reads, with the constants' own operands left to the builder."""
    return [v for v in node.operands if v.type is not None and not is_cheap(v)]


def _connect(plan: BlockPlan) -> None:
    """Fill in what each segment takes from outside and gives to outside; drop what nobody needs."""
    needed: set[Value] = set(plan.results)
    kept: list[Step] = []
    for step in reversed(plan.steps):
        if not isinstance(step, SegmentPlan):
            needed.update(step.inputs)
            kept.append(step)
            continue
        inside: set[Value] = set()
        for node in step.nodes:
            inside.update(node.results)
        read: dict[Value, None] = {}
        for node in step.nodes:
            for value in used_values(node):
                if value.root not in inside:
                    read[value.root] = None
        step.inputs = list(read)
        step.outputs = [
            value
            for node in step.nodes
            for value in node.results
            if value in needed and value.type is not None
        ] + [made for made, _ in step.made]
        if step.outputs or any(node.has_side_effect for node in step.nodes):
            needed.difference_update(step.outputs)  # of a node that occurs again, once is enough
            needed.update(step.inputs)
            kept.append(step)
    plan.steps = kept[::-1]
