"""Cuts an ordered block into steps: consecutive compute of one part becomes a segment plan.

Carving works on any topological order of a block's nodes. A node that occurs several times in the order is
computed in each segment that needs it. An `Await` in the order says where a collective is awaited; without
one it is awaited at the first use of its results. If a runtime node or the block's result needs a constant or
another cheap value, the last segment before it that runs on all devices makes an array of it: a fresh one for
each use, so that each may be donated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .passes.unread import Ordered
from .values import BlockGraph, Node, NodeKind, Value, carried_results


@dataclass(eq=False)
class SegmentPlan:
    """Compute nodes that run as one segment.

    ``inputs`` and ``outputs`` are arrays (root values). ``made``: outputs that are copies of cheap values, as
    pairs of the new value and the cheap one. ``part``: the phase, stage and class of the nodes; ``valid``:
    the iterations in which each device runs them (see `passes.unread`). ``offsets``: for slices and pads that
    get their offsets from the last input, the position there by dimension, or None if the offset is that of
    the instruction (see `offsets`).
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
    """A node that the executor runs. ``inputs``: its arrays (root values)."""

    node: Node
    inputs: list[Value]


@dataclass(frozen=True, eq=False)
class Await:
    """The place in an order of nodes at which a collective is awaited."""

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
    """Cut ``ordered``, the nodes of ``block`` in a topological order. If it is `Ordered`, each of its parts
    becomes a segment."""
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
        # A logical id has no place in the order: it may stand before the pending segments.
        steps.append(RuntimeStep(node, inputs))
    results = [materialized(value) for value in block.results]
    steps += pending
    plan = BlockPlan(block.parameters, steps, results, pipelined=bool(block.phases))
    for step in steps:
        # The results of a bucket are those of its members, which are the nodes of the block.
        if isinstance(step, RuntimeStep) and block.crossing.intersection(
            result.node for result in step.node.results if result.node is not None
        ):
            plan.crossing[step.node] = carried_results(step.node, results)
    _connect(plan)
    return plan


def is_cheap(value: Value) -> bool:
    return value.root.node is not None and value.root.node.kind is NodeKind.CHEAP


def used_values(node: Node) -> list[Value]:
    """The arrays that a node of a segment reads, without constants, which the builder copies."""
    return [v for v in node.operands if v.type is not None and not is_cheap(v)]


def _connect(plan: BlockPlan) -> None:
    """Set the inputs and outputs of each segment, and drop segments that nobody needs."""
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
            needed.difference_update(step.outputs)  # of a repeated node, one segment gives them
            needed.update(step.inputs)
            kept.append(step)
    plan.steps = kept[::-1]
