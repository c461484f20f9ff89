"""Finds pipelines: loops in which microbatches go from device to device, through a loop over layers on each.

Nothing is assumed about how such loops are written. That they are pipelines is proved from what their devices
do, iteration by iteration:

1. The runs of the loop over layers that reach a result of the program form chains. The input of a run is, bit
   for bit, the result of the run before it in its chain (see `chains`), on another device.
2. Each chain, a microbatch, visits the same devices in the same order.
3. If runs depended only on the first inputs of their chains, nothing that is sent would be read, and only the
   results at the ends of chains would be. So devices depend on each other only along chains, and nothing
   reads a microbatch on its way.

A step of training has two of them: the layers of the backward pass read slices that those of the forward pass
gave for the same microbatch, and give gradients of their own slices of the weights, which are summed up over
the microbatches (see `gradients`). Point 3 then holds for both together, with these slices left out.

Then any order of the layers' runs that keeps each chain, and the microbatches' order in each sum, gives the
same results.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.collectives.ops import Kind

from ..graph import leaf_types
from ..passes.valid.trace import Forward, LoopTrace, is_transfer
from ..schema import TUPLE
from ..values import BlockGraph, Node, NodeKind, all_nodes
from .chains import Execution, Followed, Made, chains
from .connected import check_groups, check_rings, loops_of_groups, side_by_side
from .constants import Constants
from .gradients import find_operands, find_sums
from .independence import check_alone, find_live
from .inline import communicates, other_communication
from .layers import layer_loop
from .parts import Own, Part, Pipeline
from .refusal import NoLoop, Refusal, about


def is_candidate(node: Node) -> bool:
    """Whether a node of the entry is a loop with transfers in its body."""
    return node.kind is NodeKind.LOOP and any(map(is_transfer, node.blocks[1].nodes))


def find(
    entry: BlockGraph, nodes: Sequence[Node], num_replicas: int, num_partitions: int
) -> list[Pipeline]:
    """The pipelines in these loops, one for each.

    Raises `Refusal`, which names the loop, if one of them is no pipeline, and `GaveUpError` if the program is
    too large.
    """
    _, parts = analyzed(entry, nodes, num_replicas, num_partitions, heads=False)
    return [part.pipeline() for part in parts]


def analyzed(
    entry: BlockGraph, nodes: Sequence[Node], num_replicas: int, num_partitions: int, *, heads: bool
) -> tuple[Followed, list[Part]]:
    """The same as `find` gives, with the loops as they were followed. ``heads``: whether what stands beside
    their layers may communicate among groups of devices (see `connected`)."""
    if num_replicas > 1:
        with about(nodes[0].instruction.name):
            raise Refusal("pipelines over replicas are not interleaved, only those over partitions")
    followed = follow(entry, num_replicas, num_partitions)
    parts: list[Part] = []
    for node in nodes:
        with about(node.instruction.name):
            _check_body(node, heads)
            check_rings(node)
            if node not in followed.origins:
                why = followed.forward.not_followed.get(node, "it has no iterations")
                raise Refusal(f"it cannot be followed: {why}")
            parts.append(part_in(followed, node))
    find_live(entry, parts, followed.forward, followed.entry)
    for part in parts:
        with about(part.name):
            _find_chains(followed, part, parts)
    for part in parts:
        with about(part.name):
            find_operands(followed, part, parts)
            check_groups(part, heads=heads)
            find_sums(followed, part, num_partitions)
    check_alone(entry, parts, num_replicas, num_partitions)
    return followed, parts


def follow(entry: BlockGraph, num_replicas: int, num_partitions: int) -> Followed:
    """A program, followed iteration by iteration. Raises `GaveUpError` if it is too large."""
    forward = Forward(num_replicas, num_partitions, follow_zeros=True)
    trace = forward.program(entry)
    loops = {
        node: inner for node, inner in trace.inner.items()
        if isinstance(inner, LoopTrace) and inner.iterations
    }  # fmt: skip
    return Followed(forward, trace, loops)


def part_in(followed: Followed, node: Node) -> Part:
    """A loop that was followed, with its loop over layers. Raises `Refusal`."""
    stage = _stage(followed, node, followed.forward.num_devices)
    layers = layer_loop(stage.instruction, followed.reader)
    trips = len(followed.origins[node].iterations)
    return Part(node, trips, stage, layers, Constants(node.instruction))


def _check_body(node: Node, heads: bool) -> None:
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
    left = set(loops_of_groups(node))  # see `check_groups`
    left |= set(side_by_side(node)) if heads else set()
    left |= {inner for n in left for block in n.blocks for inner in all_nodes(block)}
    for inner in all_nodes(node.blocks[1]):
        if inner in left:
            continue
        described = inner.instruction.describe()
        collective = inner.collective
        if collective is not None:
            if collective.kind is not Kind.PERMUTE or inner.instruction.opcode.endswith("-start"):
                raise NoLoop(
                    f"it communicates by {described}, not only by permutes", inner.instruction.name
                )
            if collective.valid_iterations:
                raise Refusal(f"{described} has valid iterations of its own")
        elif inner.is_runtime and not any(map(communicates, inner.instruction.called)):
            raise Refusal(
                f"the device's own id is read within {described}; read it before the loop"
            )
        elif inner.is_runtime:
            others = filter(None, map(other_communication, inner.instruction.called))
            by = "".join(f" by {other.describe()}" for other in others)
            raise NoLoop(f"it communicates{by} within {described}")
        elif inner.has_side_effect:
            raise Refusal(f"{described} has an effect")
        elif any(c.needs_runtime for c in inner.instruction.called):
            raise Refusal(f"{described} reads the device's own id")


def _stage(followed: Followed, node: Node, num_devices: int) -> Node:
    """The loop over layers that made the data which permutes send, in any iteration and on any device."""
    origins = followed.origins[node]
    found: dict[Node, None] = {}
    other: Made | None = None
    for permute in [n for n in node.blocks[1].nodes if is_transfer(n)]:
        for value in permute.operands:
            for t in range(len(origins.iterations)):
                for d in range(num_devices):
                    at = Execution(t, d)
                    if origins.is_zero(value, at):
                        continue
                    made = origins.of(value, at)
                    if made.node is not None and made.node.instruction.opcode == "while":
                        found[made.node] = None
                    elif made.node is not None and made.node.instruction.opcode != "broadcast":
                        other = other or made
    if len(found) > 1:
        loops = ", ".join(f"%{n.instruction.name}" for n in found)
        raise NoLoop(
            f"it sends what more than one loop over layers gives: {loops}. Do not unroll the scan over "
            "iterations; if stages have different numbers of layers, let all scan over as many in one loop, "
            "and let layers leave themselves out by lax.cond on a weight of theirs"
        )
    if not found:
        where = "" if other is None or other.node is None else (
            f"; what is sent is made by {other.node.instruction.describe()}")  # fmt: skip
        raise NoLoop(
            "a stage is not a loop over its layers. Write it as a lax.scan over at least two layers "
            f"whose result is sent as it is{where}"
        )
    (stage,) = found
    users = [i for i in node.instruction.called[0].instructions if stage.instruction in i.operands]
    if stage.instruction.operands[0].opcode != "tuple" or any(
        u.opcode != "get-tuple-element" for u in users
    ):
        raise NoLoop(f"the carry of {stage.instruction.describe()} is not a tuple of values")
    return stage


def _find_chains(followed: Followed, part: Part, parts: Sequence[Part]) -> None:
    if not part.live:
        raise Refusal("no result depends on what it computes")
    _find_before(followed, part)
    part.chains = chains(part.live, part.before)
    if sum(map(len, part.chains)) != len(part.live):
        raise Refusal("what a stage gives goes to more than one other stage")
    part.groups, part.enters, part.leaves = _regular(followed, part, parts)


def _find_before(followed: Followed, part: Part) -> None:
    """Find, for each run that does not begin a chain, the run whose results it takes."""
    origins, stage, passed = followed.origins[part.loop], part.stage, part.layers.passed
    runs = set(part.live)
    anew = {
        i for i in passed
        if all(origins.of(stage.operands[i], run).node is not stage for run in part.live)
    }  # fmt: skip
    if len(anew) < len(passed):
        passed = tuple(i for i in passed if i not in anew)
        partly = "a stage takes only a part of what another one gave"
        part.begun = {i: Own(stage, i, f"{partly}: {_begins_anew(part, i)}") for i in anew}
    pluses: dict[int, set[bool]] = {i: set() for i in passed}
    for run in part.live:
        made = [origins.of(stage.operands[i], run) for i in passed]
        taken = {m.at for m in made if m.node is stage}
        if not taken:
            continue
        (source, *more) = taken
        if more or any(
            (m.node, m.leaf, m.slot) != (stage, i, None) for m, i in zip(made, passed, strict=True)
        ):
            raise Refusal(
                f"on device {run.device} in iteration {run.iteration} a stage takes only a part of "
                f"what another one gave{_own(part, passed, made, source)}"
            )
        assert source in runs
        part.before[run] = source
        for m, i in zip(made, passed, strict=True):
            pluses[i].add(m.plus)
    for i, found in pluses.items():
        if len(found) > 1:
            raise Refusal(
                f"zeros are added to {stage.operands[i].root.type} on its way to some stages, and not to "
                "others"
            )
    part.plus = frozenset(i for i, found in pluses.items() if found == {True})


def _own(part: Part, passed: Sequence[int], made: Sequence[Made], source: Execution) -> str:
    """Which of the values that its layers hand on a stage does not take from the stage before."""
    for i, m in zip(passed, made, strict=True):
        if (m.node, m.leaf, m.slot, m.at) != (part.stage, i, None, source):
            return f": {_begins_anew(part, i)}"
    return ""


def _begins_anew(part: Part, i: int) -> str:
    value = part.layers.loop.operands[0].operands[i]
    what = part.stage.operands[i].root.type
    return (
        f"{what}, which its layers hand on, begins anew in each stage, as {value.describe()}. "
        "Begin it on the first stage and send it to the next one by ppermute with the rest of what "
        "the layers hand on, a random key too"
    )


Shape = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]


def _made_by(followed: Followed, part: Part) -> str:
    """A description of the origin of a stage's last input."""
    value = part.stage.operands[part.layers.passed[0]]
    made = followed.origins[part.loop].of(value, part.live[-1])
    return "" if made.node is None else f", by {made.node.instruction.describe()}"


def _added(followed: Followed, part: Part) -> str:
    """A hint for a stage to whose input something is added that was computed between two loops, or beside
    the stage in the loop."""
    origins = followed.origins[part.loop]
    beside = ""
    for run in part.live:
        for i in part.layers.passed:
            made = origins.of(part.stage.operands[i], run)
            if made.node is None or made.node.instruction.opcode != "add":
                continue
            if origins.is_zero(made.node.results[0], made.at):
                continue
            if not part.layers.reverse:
                return (
                    f". What a stage adds to it for itself, by {made.node.instruction.describe()}, as "
                    "positions of its microbatch, it must add in its layers, where these are divided"
                )
            for operand in made.node.operands:
                begin = followed.of(part.loop, operand, made.at).begin
                if begin is not None and begin.node is not None:
                    return (
                        f". On device {run.device} what is computed before the loop is added to what a stage "
                        f"takes, by {made.node.instruction.describe()}. If that is the gradient of a head "
                        "that all stages compute, a mask on the loss does not make it zeros, since 0 * x is "
                        "NaN where x is: mask the outputs of all stages but the last with where before the "
                        "head, or give those of the last stage to all by psum"
                    )
            if not beside:
                beside = (
                    f". On device {run.device} what is computed in the loop is added to what a stage takes, "
                    f"by {made.node.instruction.describe()}. If that is the gradient of a head in the loop, "
                    "a mask on the loss does not make it zeros, since 0 * x is NaN where x is: put the head "
                    "under lax.cond where a microbatch leaves the last stage, or mask its input there with "
                    "where, as well as its loss"
                )
    return beside


def _padding(part: Part, ways: Sequence[tuple[int, ...]]) -> str:
    """A hint for a stage whose layers also run on padding; empty if nobody reads what they give.

    ``ways``: the devices of each chain. Microbatches go through all stages, padding through some of them.
    """
    if not part.given:
        return ""
    stages = max(map(len, ways))
    other = sorted(run for chain in part.chains if len(chain) < stages for run in chain)
    own = [
        run.iteration for chain in part.chains if len(chain) == stages
        for run in chain if other and run.device == other[0].device
    ]  # fmt: skip
    where = "" if not own else (
        f". {'Going back, device' if part.layers.reverse else 'Device'} {other[0].device} has microbatches "
        f"in iterations {min(own)} to {max(own)}, and its layers run in iteration {other[0].iteration} too"
    )  # fmt: skip
    return (
        f"{where}. What its layers give on padding counts too, be it zeros that are computed: a gradient "
        "there is 0 * x, which is NaN where x is, with a mask on outputs or on the loss as well. Run a stage "
        "under lax.cond(working, run, jnp.zeros_like, x), or mask its input and its weights with "
        "jnp.where(working, …, 0); in iteration i working is (i >= stage) & (i - stage < microbatches)"
    )


def _regular(followed: Followed, part: Part, parts: Sequence[Part]) -> Shape:
    """The groups of devices, and when microbatches enter and leave, which must be the same for all groups.

    ``parts``: of all loops that are analyzed."""
    ways: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for chain in part.chains:
        way = tuple(run.device for run in chain)
        ways.setdefault(way, []).append((chain[0].iteration, chain[-1].iteration))
    groups = sorted(ways)
    devices = [d for way in groups for d in way]
    if len(groups[0]) == 1 and len({len(way) for way in groups}) == 1:
        raise Refusal(
            "what a stage takes is not, bit for bit, what another one gave: something is done to it "
            f"between the loops over layers{_made_by(followed, part)}, or it is not a pipeline"
            f"{_added(followed, part)}"
        )
    circular = sum(len(times) for way, times in ways.items() if len(set(way)) < len(way))
    if 2 * circular > len(part.chains):  # others are of padding
        raise Refusal(
            "a microbatch goes more than once through the same devices: the pipeline is circular as written"
        )
    if len(set(devices)) != len(devices):
        hint = _added(followed, part)
        if not hint:
            others = (_added(followed, other) for other in parts if other is not part)
            hint = _padding(part, groups) + "".join(others)
        raise Refusal(
            f"not every microbatch goes once through the same devices in the same order{hint}"
        )
    times = [sorted(ways[way]) for way in groups]
    if any(len(way) != len(groups[0]) for way in groups) or any(t != times[0] for t in times):
        raise Refusal("the pipelines that run side by side differ in their stages or microbatches")
    enters = tuple(begin for begin, _ in times[0])
    leaves = tuple(end for _, end in times[0])
    if list(leaves) != sorted(set(leaves)) or len(set(enters)) != len(enters):
        raise Refusal("microbatches overtake each other")
    return tuple(groups), enters, leaves
