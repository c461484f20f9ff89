"""Decides the valid iterations of transfers: checks attributes, and derives valid iterations without one.

An attribute is used exactly as it is written if the proof shows that the transfers which it leaves out can be
skipped. If not, an error shows a path from a received value to a result of the program. `ValidPolicy.trust`
uses attributes without a proof.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from stretto.collectives.ops import Kind
from stretto.runtime.errors import InvalidProgramError

from ...collectives import VALIDATION_ATTRIBUTE
from ...iterations import LAST, Bounds, intervals
from ...trips import trip_count
from ...values import BlockGraph, Node, NodeKind, all_blocks, all_nodes
from .liveness import Liveness, Place
from .trace import Forward, GaveUpError, Trace, Transfer, is_transfer

MOST_STEPS = 12  # of a path in an error
# How many floating point operations a segment must save on average each time that it could be skipped;
# compute that saves less gets no segment of its own. It is about what a core does while a segment is
# dispatched.
LEAST_FLOPS = 2e5


class ValidOptions(Protocol):
    """The options of the runtime that are about valid iterations."""

    @property
    def derive_valid_iterations(self) -> bool: ...

    @property
    def trust_valid_iterations(self) -> bool: ...

    @property
    def poison_skipped(self) -> bool: ...

    @property
    def skip_compute(self) -> bool: ...

    @property
    def pipeline_loops(self) -> bool: ...

    @property
    def finite_padding(self) -> bool: ...


@dataclass(frozen=True)
class ValidPolicy:
    """How loops with transfers are treated.

    ``derive``: find valid iterations of loops without the attribute (STRETTO_DERIVE_VALID_ITERATIONS).
    ``trust``: use attributes without a proof (STRETTO_TRUST_VALID_ITERATIONS). ``dead_only``: skip only
    transfers that nobody reads, not transfers of zeros; for runs that fill skipped results with NaN.
    ``compute``: also skip compute that nobody reads (STRETTO_SKIP_COMPUTE); it is found only with ``derive``.
    ``least_flops``: see `LEAST_FLOPS`. ``as_written``: skip nothing and ignore attributes; other runs are
    compared with such a run. ``pipeline``: await permutes that only the next iteration reads in that
    iteration (STRETTO_PIPELINE_LOOPS). ``finite_padding``: take what schedules of pipelines leave out on
    padding to be neither NaN nor infinite (STRETTO_FINITE_PADDING).
    """

    derive: bool = True
    trust: bool = False
    dead_only: bool = False
    compute: bool = True
    least_flops: float = LEAST_FLOPS
    as_written: bool = False
    pipeline: bool = True
    finite_padding: bool = False

    @classmethod
    def of(cls, options: ValidOptions) -> ValidPolicy:
        """The policy by the options of the runtime."""
        return cls(
            derive=options.derive_valid_iterations,
            trust=options.trust_valid_iterations,
            dead_only=options.poison_skipped,
            compute=options.skip_compute,
            pipeline=options.pipeline_loops,
            finite_padding=options.finite_padding,
        )


@dataclass(frozen=True)
class LoopReport:
    """A loop with transfers. ``transfers``: how many messages all pairs send in one run of the loop as it is
    written; ``sent``: how many are left.

    ``idle``: the share of the loop's floating point operations whose results nobody reads. ``busy``: for each
    device and iteration, whether the device computes results that are read, and at least half as many as in
    its busiest iteration; empty if not known. ``why``: why the loop was not followed, or an empty string.
    """

    name: str
    source: str
    trips: int
    transfers: int
    sent: int
    idle: float = 0.0
    busy: tuple[tuple[bool, ...], ...] = ()
    why: str = ""


@dataclass(frozen=True)
class ValidReport:
    """The result of `apply`. ``gave_up``: why there is no proof, or an empty string. ``visits``: how many
    nodes the proof has visited.

    ``liveness``: the proof itself, if compute may be skipped by it (`passes.unread`).
    """

    loops: tuple[LoopReport, ...] = ()
    gave_up: str = ""
    visits: int = 0
    liveness: Liveness | None = field(default=None, compare=False, repr=False)


@dataclass
class _Proof:
    entry: BlockGraph
    forward: Forward
    trace: Trace | None = None
    liveness: Liveness | None = None
    gave_up: str = ""
    attributed: frozenset[Node] = frozenset()

    def find(self) -> None:
        try:
            self.trace = self.forward.program(self.entry)
            self.liveness = Liveness(self.forward)
            self.liveness.program(self.trace)
        except GaveUpError as error:
            self.trace = self.liveness = None
            self.gave_up = f"the program is too large to be followed: {error}"


def apply(
    entry: BlockGraph, num_replicas: int, num_partitions: int, policy: ValidPolicy
) -> ValidReport:
    """Set the valid iterations of a program's transfers, in place.

    Raises `InvalidProgramError` if an attribute leaves out data that are read, with the path to the result
    that would change.
    """
    looped = list(_looped(entry, False))
    attributed = [node for node in looped if _given(node)]
    _check_ends(entry)
    if policy.as_written:
        for node in attributed:
            assert node.collective is not None
            node.collective = replace(node.collective, valid_iterations=())
        return ValidReport()
    if not looped or not (policy.derive or (attributed and not policy.trust)):
        return ValidReport()
    proof = _Proof(
        entry,
        Forward(num_replicas, num_partitions, follow_zeros=not policy.dead_only),
        attributed=frozenset(attributed),
    )
    proof.find()
    if not policy.trust or policy.dead_only:
        for node in attributed:
            _check(proof, node, policy)
    if policy.derive and proof.liveness is not None:
        for node in looped:
            if node not in proof.attributed:
                _derive(proof, node)
        _make_ends_agree(proof)
    liveness = proof.liveness if policy.derive and policy.compute else None
    return ValidReport(tuple(_reports(proof, entry)), proof.gave_up, proof.forward.visits, liveness)


def _looped(block: BlockGraph, in_loop: bool) -> Iterable[Node]:
    for node in block.nodes:
        if in_loop and is_transfer(node):
            yield node
        for inner in node.blocks:
            yield from _looped(inner, in_loop or node.kind is NodeKind.LOOP)


def _given(node: Node) -> tuple[Bounds, ...]:
    assert node.collective is not None
    return node.collective.valid_iterations


def _within(bounds: Bounds, iteration: int) -> bool:
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return any(low <= iteration <= high for low, high in pairs)


def _check(proof: _Proof, node: Node, policy: ValidPolicy) -> None:
    """Refuse an attribute that leaves out what is needed; with ``dead_only`` ignore it there."""
    assert node.collective is not None
    given = _given(node)
    transfer = proof.forward.transfers.get(node)
    if proof.gave_up:
        if policy.trust:
            return
        raise _refused(node, f"cannot be proved, since {proof.gave_up}")
    if transfer is None:
        return  # never runs
    lost = _lost(transfer, given)
    if not lost:
        return
    if policy.dead_only:
        bounds = _bounds(transfer)
        kept = [
            intervals(sorted(_iterations(g, transfer.trips) | transfer.live[k]))
            if transfer.followed
            else bounds[k]
            for k, g in enumerate(given)
        ]
        node.collective = replace(node.collective, valid_iterations=tuple(kept))
        return
    k, iteration = lost
    source, target = node.collective.pairs[k]
    when = "an iteration outside of them" if iteration is None else f"iteration {iteration}"
    raise _refused(
        node,
        f"leave out what device {source} sends to device {target} in {when}, which is read: "
        f"{_path(proof, node, k, iteration)}",
    )


def _refused(node: Node, why: str) -> InvalidProgramError:
    return node.instruction.invalid(
        f"the valid iterations of {VALIDATION_ATTRIBUTE} {why}. Correct them, or set "
        "STRETTO_TRUST_VALID_ITERATIONS=1 to have them honoured without proof"
    )


def _iterations(bounds: Bounds, trips: int) -> set[int]:
    return {i for i in range(trips) if _within(bounds, i)}


def _lost(transfer: Transfer, given: tuple[Bounds, ...]) -> tuple[int, int | None] | None:
    """A pair and an iteration that are needed although the bounds leave them out, if there is one."""
    for k, bounds in enumerate(given):
        for iteration in sorted(transfer.live[k]):
            if not _within(bounds, iteration):
                return k, iteration
        if transfer.always[k] and not (bounds[0] == 0 and bounds[1] >= _last(transfer)):
            return k, None
    return None


def _last(transfer: Transfer) -> int:
    """The last iteration in which a transfer may run whose loop was not followed."""
    return LAST if transfer.last is None else transfer.last


def _derive(proof: _Proof, node: Node) -> None:
    transfer = proof.forward.transfers.get(node)
    if transfer is None or node.collective is None:
        return
    node.collective = replace(node.collective, valid_iterations=_bounds(transfer))


def _bounds(transfer: Transfer) -> tuple[Bounds, ...]:
    """Valid iterations of each pair; empty if all pairs are needed in all iterations."""
    found: list[Bounds] = []
    everything = True
    for live, always in zip(transfer.live, transfer.always, strict=True):
        if always or (live and not transfer.followed):
            found.append((0, LAST))
        else:
            found.append(intervals(sorted(live)))
            everything = everything and len(live) == transfer.trips and transfer.followed
    return () if everything else tuple(found)


def _ends(block: BlockGraph) -> Iterable[tuple[Node, Node]]:
    """Pairs of a send and a receive in a block that match each other and nothing else."""
    by_channel: dict[object, list[Node]] = {}
    for node in block.nodes:
        c = node.collective
        if c is not None and c.kind in (Kind.SEND, Kind.RECV):
            by_channel.setdefault((c.channel, c.pairs), []).append(node)
    for nodes in by_channel.values():
        kinds = [n.collective.kind for n in nodes if n.collective is not None]
        if sorted(kinds) == [Kind.RECV, Kind.SEND]:
            yield nodes[kinds.index(Kind.SEND)], nodes[kinds.index(Kind.RECV)]


def _check_ends(entry: BlockGraph) -> None:
    for send, receive in (ends for block in all_blocks(entry) for ends in _ends(block)):
        if _given(send) != _given(receive):
            raise receive.instruction.invalid(
                f"its valid iterations are {_given(receive) or 'all'}, but those of "
                f"{send.instruction.name}, which it receives from, are {_given(send) or 'all'}"
            )


def _make_ends_agree(proof: _Proof) -> None:
    """Make sends and receives agree: those that were not matched are made in all iterations."""
    assert proof.liveness is not None
    agreed = {node for pair in proof.liveness.links.items() for node in pair}
    for node in all_nodes(proof.entry):
        c = node.collective
        if c is None or c.kind not in (Kind.SEND, Kind.RECV):
            continue
        if node not in agreed and node not in proof.attributed:
            node.collective = replace(c, valid_iterations=())


def _path(proof: _Proof, node: Node, k: int, iteration: int | None) -> str:
    """The path of a received value to a result, instruction by instruction."""
    assert proof.trace is not None
    explained = Liveness(Forward(*proof.forward.shape, follow_zeros=proof.forward.follow_zeros),
                         explain=True)  # fmt: skip
    try:
        explained.program(explained.forward.program(proof.entry))
    except GaveUpError:
        return f"%{node.instruction.name} to a result of the program"
    place: Place | None = explained.received.get((node, iteration, k))
    steps = [f"%{node.instruction.name}"]
    seen: set[tuple[Trace, object, int]] = set()
    while place is not None:
        key = (place.trace, place.value, place.device)
        if key in seen or key not in explained.why:
            break
        seen.add(key)
        label, onward = explained.why[key]
        if label:
            moved = onward is not None and onward.device != place.device
            steps.append(f"{label} on device {onward.device}" if moved and onward else label)
        place = onward
    if len(steps) > MOST_STEPS:
        half = MOST_STEPS // 2
        steps = [*steps[:half], f"… {len(steps) - 2 * half} more …", *steps[-half:]]
    return " -> ".join(steps)


def _reports(proof: _Proof, block: BlockGraph) -> Iterable[LoopReport]:
    for node in block.nodes:
        inner = list(node.blocks)
        if node.kind is NodeKind.LOOP:
            own = [n for b in inner for n in _own_transfers(b)]
            if own:
                yield _report(proof, node, own)
        for b in inner:
            yield from _reports(proof, b)


def _own_transfers(block: BlockGraph) -> Iterable[Node]:
    """Permutes and sends in a loop's block and in branches inside it, but not in inner loops."""
    for node in block.nodes:
        c = node.collective
        if c is not None and c.kind in (Kind.PERMUTE, Kind.SEND):
            yield node
        if node.kind is NodeKind.BRANCH:
            for inner in node.blocks:
                yield from _own_transfers(inner)


def _report(proof: _Proof, loop: Node, own: list[Node]) -> LoopReport:
    bubble = None if proof.liveness is None else proof.liveness.bubbles.get(loop)
    trips = trip_count(loop) or 0
    if bubble is not None:
        trips = bubble.all.shape[1]
    transfers = sent = 0
    for node in own:
        assert node.collective is not None
        moving = [k for k, (source, target) in enumerate(node.collective.pairs) if source != target]
        transfers += trips * len(moving)
        valid = node.collective.valid_iterations
        sent += sum(len(_iterations(valid[k], trips)) if valid else trips for k in moving)
    busy: tuple[tuple[bool, ...], ...] = ()
    if bubble is not None and bubble.all.any():
        amount = bubble.all - bubble.idle
        read = np.asarray((amount > 0) & (2 * amount >= amount.max(1, keepdims=True)))
        busy = tuple(tuple(bool(x) for x in row) for row in read)
    return LoopReport(
        loop.instruction.name,
        loop.instruction.source,
        trips,
        transfers,
        sent,
        0.0 if bubble is None else bubble.fraction,
        busy,
        proof.forward.not_followed.get(loop, ""),
    )
