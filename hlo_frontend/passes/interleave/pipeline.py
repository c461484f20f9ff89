"""Finds pipelines: loops in which microbatches go from device to device, through a loop over layers on each.

Nothing of how such a loop is written is taken for granted; that it *is* a pipeline follows from what its
devices do, iteration by iteration:

1. Runs of the loop over layers of which something reaches a result of the program form chains. A run's
   input is, bit for bit, what the run before it in its chain gave (see `chains`), on another device.
2. Each chain, a microbatch, visits the same devices in the same order.
3. If runs needed nothing but the first inputs of chains, nothing that is sent would be read at all, and of
what
   runs give only the ends of chains would be. So besides handing on, devices do not depend on each other, and
   nobody looks at a microbatch on its way.

Then any order of the layers' runs that keeps each chain gives the same results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.collectives.ops import Kind

from ...graph import Instruction, leaf_types
from ...schema import TUPLE
from ...values import BlockGraph, Node, NodeKind
from ..valid import live as rules
from ..valid.liveness import Liveness, Mask
from ..valid.trace import Forward, LoopTrace, Trace, all_nodes, is_transfer
from .chains import Execution, Made, Origins, chains
from .inline import communicates
from .layers import LayerLoop, layer_loop
from .refusal import Refusal


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipeline in ``loop`` of the entry computation.

    ``groups[g][stage]``: devices of each of the pipelines that run side by side. ``enters`` and ``leaves``:
    by microbatch the iterations of the loop in which it is taken in and given out. ``trips``: of the loop.
    """

    loop: Instruction
    layers: LayerLoop
    groups: tuple[tuple[int, ...], ...]
    enters: tuple[int, ...]
    leaves: tuple[int, ...]
    trips: int

    @property
    def stages(self) -> int:
        return len(self.groups[0])

    @property
    def microbatches(self) -> int:
        return len(self.enters)


def is_candidate(node: Node) -> bool:
    """Whether a node of the entry is a loop that moves something in each of its iterations."""
    return node.kind is NodeKind.LOOP and any(map(is_transfer, node.blocks[1].nodes))


def find(entry: BlockGraph, node: Node, num_replicas: int, num_partitions: int) -> Pipeline:
    """The pipeline in a loop. Raises `Refusal`, and `GaveUpError` where the program is too large."""
    if num_replicas > 1:
        raise Refusal("pipelines over replicas are not interleaved, only those over partitions")
    _check_body(node)
    forward = Forward(num_replicas, num_partitions, follow_zeros=False)
    trace = forward.program(entry)
    followed = trace.inner[node]
    assert isinstance(followed, LoopTrace)
    if followed.summary is not None:
        raise Refusal(f"it cannot be followed: {forward.not_followed.get(node, 'no reason')}")
    origins = Origins(forward, node, followed)
    stage = _stage(origins, node, num_partitions)
    layers = layer_loop(stage.instruction)
    live = _live(entry, stage, layers, forward, trace)
    before = _before(origins, stage, layers, live)
    found = chains(live, before)
    if sum(map(len, found)) != len(live):
        raise Refusal("what a stage gives goes to more than one other stage")
    groups, enters, leaves = _regular(found)
    _check_alone(entry, node, stage, layers, Forward(num_replicas, num_partitions,
                 follow_zeros=False), found)  # fmt: skip
    return Pipeline(node.instruction, layers, groups, enters, leaves, len(followed.iterations))


def _check_body(node: Node) -> None:
    loop = node.instruction
    body = loop.called[0]
    parts = loop.shape.tuple_shapes
    if body.root.opcode != "tuple" or loop.operands[0].opcode != "tuple":
        raise Refusal("its carry is not a tuple of values")
    if any(p.element_type == TUPLE or leaf_types(p, loop) == (None,) for p in parts):
        raise Refusal("it carries tuples or tokens")
    for instruction in body.instructions:
        if body.parameters[0] in instruction.operands and instruction.opcode != "get-tuple-element":
            raise Refusal(f"its whole carry is an operand of {instruction.describe()}")
        if instruction.control_predecessors:
            raise Refusal(f"{instruction.describe()} has control dependencies")
    for inner in all_nodes(node.blocks[1]):
        described = inner.instruction.describe()
        collective = inner.collective
        if collective is not None:
            if collective.kind is not Kind.PERMUTE or inner.instruction.opcode.endswith("-start"):
                raise Refusal(f"it communicates by {described}, not only by permutes")
            if collective.valid_iterations:
                raise Refusal(f"{described} has valid iterations of its own")
        elif inner.is_runtime and not any(map(communicates, inner.instruction.called)):
            raise Refusal(
                f"the device's own id is read within {described}; read it before the loop"
            )
        elif inner.is_runtime:
            raise Refusal(f"it communicates within {described}")
        elif inner.has_side_effect:
            raise Refusal(f"{described} has an effect")
        elif any(c.needs_runtime for c in inner.instruction.called):
            raise Refusal(f"{described} reads the device's own id")


def _stage(origins: Origins, node: Node, num_devices: int) -> Node:
    """The loop over layers that gives what is sent, in any iteration and on any device."""
    found: dict[Node, None] = {}
    other: Made | None = None
    for permute in [n for n in node.blocks[1].nodes if is_transfer(n)]:
        for value in permute.operands:
            for t in range(len(origins.iterations)):
                for d in range(num_devices):
                    made = origins.of(value, Execution(t, d))
                    if made.node is not None and made.node.instruction.opcode == "while":
                        found[made.node] = None
                    elif made.node is not None and made.node.instruction.opcode != "broadcast":
                        other = other or made
    if len(found) > 1:
        raise Refusal("it sends what more than one loop over layers gives")
    if not found:
        where = "" if other is None or other.node is None else (
            f"; what is sent is made by {other.node.instruction.describe()}")  # fmt: skip
        raise Refusal(
            "a stage is not a loop over its layers. Write it as a lax.scan over at least two layers "
            f"whose result is sent as it is{where}"
        )
    (stage,) = found
    users = [i for i in node.instruction.called[0].instructions if stage.instruction in i.operands]
    if stage.instruction.operands[0].opcode != "tuple" or any(
        u.opcode != "get-tuple-element" for u in users
    ):
        raise Refusal(f"the carry of {stage.instruction.describe()} is not a tuple of values")
    return stage


def _rows(masks: Sequence[Mask], positions: Sequence[int], count: int) -> np.ndarray:
    """Devices on which anything is live of these results."""
    found = np.zeros(count, bool)
    for i in positions:
        mask = masks[i]
        if mask is not None:
            found |= rules.whole(mask, 0).reshape(-1)
    return found


def _whole(node: Node, positions: Iterable[int], rows: np.ndarray) -> rules.Needs:
    """All of these operands, on these devices."""
    for i in positions:
        type = node.operands[i].type
        if type is not None:
            yield i, rows.reshape((-1,) + (1,) * len(type.shape))


def _live(
    entry: BlockGraph, stage: Node, layers: LayerLoop, forward: Forward, trace: Trace
) -> list[Execution]:
    """Runs of the stage of which something reaches a result of the program."""
    live: list[Execution] = []
    others = [i for i in range(len(stage.results)) if i not in layers.passed]

    def record(at: Trace, masks: Sequence[Mask]) -> rules.Needs:
        assert at.iteration is not None
        rows = _rows(masks, layers.passed, forward.num_devices)
        live.extend(Execution(at.iteration, int(d)) for d in np.flatnonzero(rows))
        if _rows(masks, others, forward.num_devices).any():
            raise Refusal(
                f"weights or the counter of {stage.instruction.describe()} are read after it"
            )
        if rows.any():
            yield from _whole(stage, range(len(stage.operands)), rows)

    Liveness(forward, needs={stage: record}).program(trace)
    if not live:
        raise Refusal("no result depends on what it computes")
    return sorted(live)


def _before(
    origins: Origins, stage: Node, layers: LayerLoop, live: Sequence[Execution]
) -> dict[Execution, Execution]:
    """By run: the run whose results it takes, for all that do not begin a chain."""
    before: dict[Execution, Execution] = {}
    runs = set(live)
    for run in live:
        made = [origins.of(stage.operands[i], run) for i in layers.passed]
        taken = {m.at for m in made if m.node is stage}
        if not taken:
            continue
        (source, *more) = taken
        if more or any(
            m.node is not stage or m.leaf != i for m, i in zip(made, layers.passed, strict=True)
        ):
            raise Refusal(
                f"on device {run.device} in iteration {run.iteration} a stage takes only a part of "
                "what another one gave"
            )
        assert source in runs
        before[run] = source
    return before


Shape = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]


def _regular(found: Sequence[tuple[Execution, ...]]) -> Shape:
    """Groups of devices, and when microbatches enter and leave: the same for all groups."""
    ways: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for chain in found:
        way = tuple(run.device for run in chain)
        ways.setdefault(way, []).append((chain[0].iteration, chain[-1].iteration))
    groups = sorted(ways)
    devices = [d for way in groups for d in way]
    if len(groups[0]) == 1 and len({len(way) for way in groups}) == 1:
        raise Refusal(
            "what a stage takes is not, bit for bit, what another one gave: something is done to it "
            "between the loops over layers, or it is not a pipeline"
        )
    if len(set(devices)) != len(devices):
        raise Refusal("not every microbatch goes once through the same devices in the same order")
    times = [sorted(ways[way]) for way in groups]
    if any(len(way) != len(groups[0]) for way in groups) or any(t != times[0] for t in times):
        raise Refusal("the pipelines that run side by side differ in their stages or microbatches")
    enters = tuple(begin for begin, _ in times[0])
    leaves = tuple(end for _, end in times[0])
    if list(leaves) != sorted(set(leaves)) or len(set(enters)) != len(enters):
        raise Refusal("microbatches overtake each other")
    return tuple(groups), enters, leaves


def _check_alone(
    entry: BlockGraph,
    node: Node,
    stage: Node,
    layers: LayerLoop,
    forward: Forward,
    found: Sequence[tuple[Execution, ...]],
) -> None:
    """Point 3 of the head of this file."""
    begins = {chain[0] for chain in found}
    ends = {chain[-1] for chain in found}
    runs = {run for chain in found for run in chain}
    count = forward.num_devices

    def restricted(at: Trace, masks: Sequence[Mask]) -> rules.Needs:
        assert at.iteration is not None
        for d in np.flatnonzero(_rows(masks, layers.passed, count)):
            if Execution(at.iteration, int(d)) not in ends:
                raise Refusal(
                    f"what device {d} computes in iteration {at.iteration} is read by others than "
                    "the next stage: only what the last stage gives may be"
                )
        begin = np.array([Execution(at.iteration, d) in begins for d in range(count)])
        run = np.array([Execution(at.iteration, d) in runs for d in range(count)])
        others = [i for i in range(len(stage.operands)) if i not in layers.passed]
        yield from _whole(stage, layers.passed, begin)
        yield from _whole(stage, others, run)

    Liveness(forward, needs={stage: restricted}).program(forward.program(entry))
    for inner in all_nodes(node.blocks[1]):
        transfer = forward.transfers.get(inner)
        if transfer is not None and (any(transfer.always) or any(transfer.live)):
            pairs = inner.collective.pairs if inner.collective is not None else ()
            read = [(min(its), pair) for its, pair in
                    zip(transfer.live, pairs, strict=True) if its]  # fmt: skip
            where = ""
            if read:
                iteration, (source, target) = min(read)
                where = f" (from device {source} to {target} in iteration {iteration})"
            raise Refusal(
                f"what {inner.instruction.describe()} moves{where} is read by more than the next "
                "stage's layers; a pipeline that is circular already reads it so"
            )
