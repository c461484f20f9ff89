"""Which transfers and which compute are read, found backwards from the results of a program.

`Liveness` walks the traces of `Forward` from their ends. A value is live if it may reach a result of the
program, decide a branch or a loop, or reach an op with a side effect, on any device. So all values that are
not live can be left out together, and no result changes by a bit.

A live transfer that always moves zeros, as the trace shows, need not be made either: a device that receives
nothing has zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stretto.collectives.ops import Kind

from ...flops import flops, flops_of
from ...graph import Instruction
from ...values import BlockGraph, Node, NodeKind, Value
from . import needs as rules
from . import tensors
from .dependence import Dependence
from .trace import BranchTrace, Forward, LoopTrace, Trace, Transfer, is_transfer

Mask = np.ndarray | None
# Gives the elements of its operands that a node needs, from a trace of its block and masks of its results.
Needs = Callable[[Trace, Sequence[Mask]], rules.Needs]


@dataclass(eq=False)
class Bubble:
    """The compute of a loop that was followed: all operations, and those whose results nobody reads."""

    node: Node
    all: np.ndarray  # [device, iteration], summed over the loop's entries
    idle: np.ndarray

    @property
    def fraction(self) -> float:
        total = float(self.all.sum())
        return float(self.idle.sum()) / total if total else 0.0


@dataclass(eq=False)
class Reads:
    """The devices and iterations in which results of a block's compute nodes are read, in all walks of it.

    ``rows[node][iteration]``: for each device (or one row for all) whether any result of the node is read in
    that iteration of the innermost followed loop. The iteration is None if iterations are not distinguished,
    as outside of loops. ``flops[node]``: how many operations of the node nobody reads, in total.
    """

    rows: dict[Node, dict[int | None, np.ndarray]] = field(default_factory=dict)
    flops: dict[Node, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Place:
    """A value of one device in one trace."""

    trace: Trace
    value: Value
    device: int


@dataclass(eq=False)
class Liveness:
    """Finds the live iterations of ``forward.transfers``, the ``bubbles`` of loops, and ``reads`` of blocks.

    ``explain``: whether to keep in ``why``, for each live value, the next one on its path to a result.
    ``needs``: rules for single nodes that replace the rules of their ops. ``watched``: values of blocks, by
    which ``live`` gets, by iteration of the innermost followed loop, masks of what is read of them.
    """

    forward: Forward
    explain: bool = False
    needs: Mapping[Node, Needs] = field(default_factory=dict)
    watched: Mapping[BlockGraph, Sequence[Value]] = field(default_factory=dict)
    live: dict[Value, dict[int | None, np.ndarray]] = field(default_factory=dict)
    bubbles: dict[Node, Bubble] = field(default_factory=dict)
    why: dict[tuple[Trace, Value, int], tuple[str, Place | None]] = field(default_factory=dict)
    received: dict[tuple[Node, int | None, int], Place] = field(default_factory=dict)
    reads: dict[BlockGraph, Reads] = field(default_factory=dict)
    # For each receive: the only send of the same block that it can match.
    links: dict[Node, Node] = field(default_factory=dict)
    _dependence: Dependence = field(default_factory=Dependence)
    _orders: dict[BlockGraph, list[Node]] = field(default_factory=dict)
    _linked: set[Node] = field(default_factory=set)  # the sends in `links`
    _costs: dict[Instruction, float] = field(default_factory=dict)

    def program(self, trace: Trace) -> None:
        """Walk a whole program backwards: all of its results are live on every device."""
        masks: list[Mask] = [
            None if r.type is None else tensors.full(len(r.type.shape)) for r in trace.block.results
        ]
        walk = _Walk(self, trace, None)
        for value, mask in zip(trace.block.results, masks, strict=True):
            if mask is not None:
                walk.add(value, mask, ("a result of the program", None))
        walk.run()

    def order(self, block: BlockGraph) -> list[Node]:
        """The block's nodes backwards, each matched send behind its receive."""
        if block in self._orders:
            return self._orders[block]
        by_channel: dict[tuple[int, object], list[Node]] = {}
        for node in block.nodes:
            if is_transfer(node) and node.collective is not None:
                c = node.collective
                if c.kind in (Kind.SEND, Kind.RECV):
                    by_channel.setdefault((c.channel, c.pairs), []).append(node)
        links: dict[Node, Node] = {}
        for nodes in by_channel.values():
            kinds = {n.collective.kind: n for n in nodes if n.collective is not None}
            if len(nodes) == 2 and len(kinds) == 2:
                send, receive = kinds[Kind.SEND], kinds[Kind.RECV]
                sent = [v.type for v in send.operands if v.type is not None]
                if sent == [v.type for v in receive.results if v.type is not None]:
                    links[receive] = send
        order = _with_links(block, links)
        if order is None:
            links, order = {}, list(block.nodes)
        self.links |= links
        self._linked |= set(links.values())
        self._orders[block] = order[::-1]
        return self._orders[block]

    def cost(self, instruction: Instruction) -> float:
        if instruction not in self._costs:
            self._costs[instruction] = flops(instruction)
        return self._costs[instruction]


def _with_links(block: BlockGraph, links: dict[Node, Node]) -> list[Node] | None:
    """The block's nodes in an order with each send before its receive; None if there is no such order."""
    if all(send.position < receive.position for receive, send in links.items()):
        return list(block.nodes)
    done: list[Node] = []
    state: dict[Node, int] = {}
    inside = set(block.nodes)
    for start in block.nodes:
        stack = [(start, False)]
        while stack:
            node, leave = stack.pop()
            if leave:
                state[node] = 2
                done.append(node)
                continue
            if state.get(node) == 2:
                continue
            if state.get(node) == 1:
                return None
            state[node] = 1
            stack.append((node, True))
            before = [v.root.node for v in node.operands if v.type is not None]
            if node in links:
                before.append(links[node])
            for first in before:
                if first is None or first not in inside or state.get(first) == 2:
                    continue
                if state.get(first) == 1:
                    return None
                stack.append((first, False))
    return done


class _Walk:
    """One walk backwards over one trace. ``loop``: the innermost followed loop.

    ``devices``: for each device (or one for all) whether it runs this block.
    """

    def __init__(
        self,
        liveness: Liveness,
        trace: Trace,
        loop: Bubble | None,
        devices: np.ndarray | None = None,
    ) -> None:
        self.of = liveness
        self.forward = liveness.forward
        self.trace = trace
        self.loop = loop
        self.devices = np.ones(1, bool) if devices is None else devices
        self.reads = liveness.reads.setdefault(trace.block, Reads())
        self.live: dict[Value, np.ndarray] = {}
        # What it has noted of this trace's iteration: transfers' pairs, and what `_note` takes.
        self.recorded: list[tuple[Node, int]] = []
        self.noted: list[tuple[Node, np.ndarray, np.ndarray | None]] = []

    def add(self, value: Value, mask: np.ndarray, via: tuple[str, Place | None]) -> None:
        root = value.root
        if root.type is None or not mask.any():
            return
        if root.node is not None and root.node.kind is NodeKind.CHEAP:
            return
        mask = tensors.fit(mask)
        before = self.live.get(root)
        self.live[root] = tensors.union(before, mask)
        if self.of.explain:
            for d in self._rows(mask):
                self.of.why.setdefault((self.trace, root, d), via)

    def _rows(self, mask: np.ndarray) -> Sequence[int]:
        rows = tensors.any_along(mask.reshape(len(mask), -1), 1)
        count = self.forward.num_devices
        return [d for d in range(count) if rows[d if len(rows) > 1 else 0]]

    def add_from(
        self, node: Node, value: Value, mask: np.ndarray, result: Value | None, device: int = -1
    ) -> None:
        """Elements of ``value`` are needed for ``result`` of ``node``. ``device``: the one that needs them,
        if it is another one than the one that has them."""
        if not self.of.explain:
            self.add(value, mask, ("", None))
            return
        name = f"%{node.instruction.name}"
        for d in self._rows(mask):
            row = np.zeros((self.forward.num_devices,) + (1,) * (mask.ndim - 1), bool)
            row[d] = True
            onward = None
            if result is not None:
                onward = Place(self.trace, result.root, d if device < 0 else device)
            self.add(value, mask & row, (name, onward))

    def run(self) -> list[Mask]:
        """Walk the block. Gives the masks of live elements of its parameters."""
        order = self.of.order(self.trace.block)
        self.forward.visit(len(order))
        for node in order:
            if node.is_runtime and node in self.of.needs:
                self._as_said(node, [self.live.get(r) for r in node.results])
            else:
                _RULES[node.kind](self, node)
        for value in self.of.watched.get(self.trace.block, ()):
            mask = self.live.get(value.root)
            if mask is not None:
                of_value = self.of.live.setdefault(value.root, {})
                before = of_value.get(self.trace.iteration)
                of_value[self.trace.iteration] = tensors.union(before, mask)
        return [self.live.get(p) for p in self.trace.block.parameters]

    def repeat(self, other: _Walk) -> None:
        """Note of this iteration what another walk has noted of its own, in place of `run`."""
        for node, k in other.recorded:
            self._record(node, k)
        for noted in other.noted:
            self._note(*noted)

    def _first_live(self, node: Node) -> Value | None:
        return next((r for r in node.results if r in self.live), None)

    def compute(self, node: Node) -> None:
        masks = [self.live.get(r) for r in node.results]
        some = any(m is not None for m in masks)
        has_effect = node.has_side_effect
        self._count(node, masks, has_effect)
        if node in self.of.needs:
            self._as_said(node, masks)
            return
        for i in self.of._dependence.control(node.instruction):
            # With garbage in these operands a loop might not end. A loop that is skipped needs none of them.
            type = node.operands[i].type
            if type is not None:
                self.add_from(node, node.operands[i], tensors.full(len(type.shape)), None)
        if has_effect:
            for operand in node.operands:
                if operand.type is not None:
                    rank = len(operand.type.shape)
                    self.add_from(node, operand, tensors.full(rank), None)
            return
        if not some or (len(node.results) == 1 and node.results[0] in self.trace.known):
            return
        known = [
            None if o.type is None else self.forward.known(self.trace, o) for o in node.operands
        ]
        result = self._first_live(node)
        for i, mask in rules.needs(node, known, masks, self.of._dependence):
            self.add_from(node, node.operands[i], mask, result)

    def _as_said(self, node: Node, masks: Sequence[Mask]) -> None:
        for i, mask in self.of.needs[node](self.trace, masks):
            self.add_from(node, node.operands[i], mask, self._first_live(node))

    def _count(self, node: Node, masks: list[Mask], has_effect: bool) -> None:
        """Note on which devices the node is read, and how many operations it does where it is not.

        A node whose result is known counts as read, since the analysis has used its result.
        """
        is_known = len(node.results) == 1 and node.results[0] in self.trace.known
        needed = np.ones(1, bool) if has_effect or is_known else np.zeros(1, bool)
        for mask in masks:
            if mask is not None:
                needed = needed | rules.whole(mask, 0)
        cost = self.of.cost(node.instruction)
        costs = None
        if (
            node.instruction.opcode != "select" and cost and not is_known
        ):  # a select only moves data
            costs = np.full(self.forward.num_devices, cost)
            if node.instruction.opcode == "conditional":
                costs = self._conditional_cost(node)
            costs = costs * self.devices
        self._note(node, needed, costs)

    def _note(self, node: Node, needed: np.ndarray, costs: np.ndarray | None) -> None:
        """On which devices a node is read, and its operations on each, where they count."""
        self.noted.append((node, needed, costs))
        rows = self.reads.rows.setdefault(node, {})
        before = rows.get(self.trace.iteration)
        rows[self.trace.iteration] = needed if before is None else before | needed
        if costs is None:
            return
        unread = costs * ~needed
        self.reads.flops[node] = self.reads.flops.get(node, 0.0) + float(unread.sum())
        if self.loop is not None:
            assert self.trace.iteration is not None
            self.loop.all[:, self.trace.iteration] += costs
            self.loop.idle[:, self.trace.iteration] += unread

    def _conditional_cost(self, node: Node) -> np.ndarray:
        called = node.instruction.called
        branches = np.array([flops_of(c.instructions) for c in called])
        selector = self.forward.known(self.trace, node.operands[0])
        if selector is None:
            return np.full(self.forward.num_devices, branches.max(initial=0.0))
        chosen = rules.selected(selector, len(called))
        return np.broadcast_to(branches[chosen], (self.forward.num_devices,))

    def nothing(self, node: Node) -> None:
        """A device id has no operands."""

    def collective(self, node: Node) -> None:
        collective = node.collective
        assert collective is not None
        if collective.kind is Kind.PERMUTE:
            for operand, result in zip(node.operands, node.results, strict=True):
                self._moved(node, node, operand, result)
        elif collective.kind is Kind.RECV:
            send = self.of.links.get(node)
            results = [r for r in node.results if r.type is not None]
            sent = [] if send is None else [o for o in send.operands if o.type is not None]
            for i, result in enumerate(results):
                self._moved(node, send, sent[i] if sent else None, result)
        elif collective.kind is Kind.SEND:
            if node not in self.of._linked:
                self._unmatched_send(node)
        else:
            self._grouped(node)

    def _moved(self, node: Node, sender: Node | None, operand: Value | None, result: Value) -> None:
        mask = self.live.get(result)
        if mask is None:
            return
        assert node.collective is not None
        rows = np.broadcast_to(mask, (self.forward.num_devices, *mask.shape[1:]))
        zero = None if operand is None else self.forward.zero(self.trace, operand)
        for k, (source, target) in enumerate(node.collective.pairs):
            if not rows[target].any():
                continue
            if zero is not None and zero[source if len(zero) > 1 else 0]:
                continue
            self._record(node, k)
            if sender is not None and sender is not node:
                self._record(sender, k)
            if self.of.explain:
                place = Place(self.trace, result, target)
                self.of.received.setdefault((node, self.trace.iteration, k), place)
            if operand is not None:
                needed = np.zeros(rows.shape, bool)
                needed[source] = rows[target]
                self.add_from(node, operand, needed, result, target)

    def _record(self, node: Node, k: int) -> None:
        self.recorded.append((node, k))
        transfer: Transfer = self.forward.transfers[node]
        if self.trace.iteration is None:
            transfer.always[k] = True
        else:
            transfer.live[k].add(self.trace.iteration)

    def _unmatched_send(self, node: Node) -> None:
        """A send whose receive is not known: all its data count as read."""
        assert node.collective is not None
        for k in range(len(node.collective.pairs)):
            self._record(node, k)
        for operand in node.operands:
            if operand.type is not None:
                self.add_from(node, operand, tensors.full(len(operand.type.shape)), None)

    def _grouped(self, node: Node) -> None:
        """A collective over groups: a live result of a member needs the operands of all members, of an
        all-gather those alone whose parts of it are live."""
        collective = node.collective
        assert collective is not None
        elementwise = collective.kind is Kind.ALL_REDUCE and node.reducer is None
        gathers = collective.kind is Kind.ALL_GATHER and len(node.operands) == len(node.results)
        masks = [self.live.get(r) for r in node.results]
        arrays = [o for o in node.operands if o.type is not None]
        count = self.forward.num_devices
        ragged = collective.kind is Kind.RAGGED_ALL_TO_ALL
        for operand in arrays[2:] if ragged else arrays[-1:] if collective.dynamic_root else ():
            # All members must agree on offsets and roots, so these are live whoever reads the result.
            assert operand.type is not None
            self.add_from(node, operand, tensors.full(len(operand.type.shape)), None)
        for i, operand in enumerate(arrays):
            assert operand.type is not None
            rank = len(operand.type.shape)
            for j, mask in enumerate(masks):
                if mask is None or ((elementwise or gathers) and i != j):
                    continue
                wide = mask if elementwise or gathers else rules.whole(mask, rank)
                rows = np.broadcast_to(wide, (count, *wide.shape[1:]))
                needed = rows.copy()
                for group in collective.groups:
                    needed[list(group)] = rows[list(group)].any(0)
                if gathers:
                    needed = _parts(needed, node, operand)
                if self.of.explain:
                    self._explain_group(node, operand, needed, rows, node.results[j])
                else:
                    self.add(operand, needed, ("", None))

    def _explain_group(
        self, node: Node, operand: Value, needed: np.ndarray, rows: np.ndarray, result: Value
    ) -> None:
        assert node.collective is not None
        for group in node.collective.groups:
            reader = next((d for d in group if rows[d].any()), None)
            if reader is not None:
                own = np.zeros(needed.shape, bool)
                own[list(group)] = needed[list(group)]
                self.add_from(node, operand, own, result, reader)

    # Loops and branches.

    def loop_(self, node: Node) -> None:
        inner = self.trace.inner[node]
        assert isinstance(inner, LoopTrace)
        live = [self.live.get(r) for r in node.results]
        body = node.blocks[1]
        if inner.summary is not None:
            masks = self._summed_up(node, inner, live)
        else:
            masks = self._followed(node, inner, live)
        for operand, mask, parameter in zip(node.operands, masks, body.parameters, strict=True):
            if mask is not None:
                first = inner.iterations[0] if inner.iterations else inner.summary
                self._enter(operand, mask, first, parameter)

    def _enter(
        self, operand: Value, mask: np.ndarray, inner: Trace | None, parameter: Value
    ) -> None:
        if not self.of.explain or inner is None:
            self.add(operand, mask, ("", None))
            return
        for d in self._rows(mask):
            row = np.zeros((self.forward.num_devices,) + (1,) * (mask.ndim - 1), bool)
            row[d] = True
            self.add(operand, mask & row, ("", Place(inner, parameter, d)))

    def _followed(self, node: Node, inner: LoopTrace, live: list[Mask]) -> list[Mask]:
        shape = (self.forward.num_devices, len(inner.iterations))
        bubble = self.of.bubbles[node] = Bubble(node, np.zeros(shape), np.zeros(shape))
        following: Trace | None = None
        last: _Walk | None = None
        wanted: list[Mask] = []  # by `last`
        exact = self.of.explain or self.of.needs or self.of.watched
        alike = None if exact else _Alike(node.blocks[1])
        for trace in reversed(inner.iterations):
            walk = _Walk(self.of, trace, bubble)
            again = (
                alike is not None
                and last is not None
                and all(_same(a, b) for a, b in zip(live, wanted, strict=True))
                and alike(trace, last.trace)
            )
            if again and last is not None:
                walk.repeat(last)
            else:
                self._hand_back(walk, node, live, following)
                wanted, live = live, walk.run()
            following, last = trace, walk
        return live

    def _hand_back(
        self, walk: _Walk, node: Node, live: list[Mask], following: Trace | None
    ) -> None:
        """Mark results of an iteration that the next iteration, or the code behind the loop, needs."""
        results, parameters = walk.trace.block.results, walk.trace.block.parameters
        for i, mask in enumerate(live):
            if mask is None:
                continue
            if not self.of.explain:
                walk.add(results[i], mask, ("", None))
                continue
            for d in self._rows(mask):
                row = np.zeros((self.forward.num_devices,) + (1,) * (mask.ndim - 1), bool)
                row[d] = True
                if following is not None:
                    label = f"iteration {following.iteration}"
                    if following.iteration is None:
                        label = "another iteration"
                    onward = Place(following, parameters[i], d)
                else:
                    label = f"result {i} of loop %{node.instruction.name}"
                    onward = Place(self.trace, node.results[i].root, d)
                walk.add(results[i], mask & row, (label, onward))

    def _summed_up(self, node: Node, inner: LoopTrace, live: list[Mask]) -> list[Mask]:
        """The live elements of the carries when an iteration begins, the same for all: a fixpoint."""
        assert inner.summary is not None
        head = list(live)
        if inner.condition is not None:
            test = _Walk(self.of, inner.condition, None)
            (predicate,) = inner.condition.block.results
            test.add(predicate, tensors.full(0), (f"condition of %{node.instruction.name}", None))
            head = _unions(head, test.run())
        rounds = 0
        while True:
            walk = _Walk(self.of, inner.summary, None)
            self._hand_back(walk, node, live, None)
            self._hand_back(walk, node, head, inner.summary)
            grown = _unions(head, walk.run())
            if all(_same(a, b) for a, b in zip(grown, head, strict=True)):
                return head
            rounds += 1
            # A mask that grows by one slice a round would take as many rounds as there are slices.
            head = grown if rounds < 4 else [_widened(m) for m in grown]

    def branch(self, node: Node) -> None:
        inner = self.trace.inner[node]
        assert isinstance(inner, BranchTrace)
        live = [self.live.get(r) for r in node.results]
        assert node.selector is not None
        if inner.chosen is None:
            self.add_from(node, node.selector, tensors.full(0), None)
        position = 1
        for index, trace in enumerate(inner.blocks):
            count = len(node.blocks[index].parameters)
            operands = node.operands[position : position + count]
            position += count
            if trace is None:
                continue
            devices = None if inner.chosen is None else inner.chosen == index
            walk = _Walk(self.of, trace, self.loop, devices)
            for i, wanted in enumerate(live):
                if wanted is None:
                    continue
                mask = wanted
                if inner.chosen is not None:
                    mask = wanted & rules.spread(inner.chosen == index, wanted.ndim - 1)
                for d in self._rows(mask) if self.of.explain else ():
                    place = Place(self.trace, node.results[i].root, d)
                    key = (trace, trace.block.results[i].root, d)
                    self.of.why.setdefault(key, ("", place))
                walk.add(trace.block.results[i], mask, ("", None))
            for operand, entered, parameter in zip(
                operands, walk.run(), trace.block.parameters, strict=True
            ):
                if entered is not None:
                    self._enter(operand, entered, trace, parameter)


class _Alike:
    """Whether what a walk finds in two iterations of a loop is the same, where the same is wanted of both.

    It is if nothing but what is computed of the loop's counter differs, and that only goes into what is known
    as well: of such nodes a walk asks for no values.
    """

    def __init__(self, body: BlockGraph) -> None:
        self.readers: dict[Value, list[Node]] = {}
        for node in body.nodes:
            for operand in node.operands:
                self.readers.setdefault(operand.root, []).append(node)

    def __call__(self, one: Trace, other: Trace) -> bool:
        if one.inner or other.inner or one.known.keys() != other.known.keys():
            return False
        if one.zero.keys() != other.zero.keys():
            return False
        if any(not _same(zero, other.zero[value]) for value, zero in one.zero.items()):
            return False
        changed = [v for v, known in one.known.items() if not _same(known, other.known[v])]
        return all(
            node.kind is NodeKind.COMPUTE
            and len(node.results) == 1
            and node.results[0] in one.known
            for value in changed
            for node in self.readers.get(value.root, ())
        )


def _unions(left: list[Mask], right: list[Mask]) -> list[Mask]:
    return [
        a if b is None else (b if a is None else tensors.union(a, b))
        for a, b in zip(left, right, strict=True)
    ]


def _same(left: Mask, right: Mask) -> bool:
    if left is None or right is None:
        return left is right
    return left.shape == right.shape and bool((left == right).all())


def _widened(mask: Mask) -> Mask:
    return None if mask is None else tensors.full(mask.ndim - 1)


def _parts(mask: np.ndarray, node: Node, operand: Value) -> np.ndarray:
    """Of each device's mask of what an all-gather gives, that of its own part."""
    assert node.collective is not None and operand.type is not None
    axis = node.collective.dimension
    if mask.shape[1 + axis] == 1:
        return mask
    size = operand.type.shape[axis]
    shape = list(mask.shape)
    shape[1 + axis] = size
    found = np.zeros(shape, bool)
    for group in node.collective.groups:
        for position, device in enumerate(group):
            own = range(position * size, (position + 1) * size)
            found[device] = mask[device].take(own, axis)
    return found


_RULES = {
    NodeKind.COMPUTE: _Walk.compute,
    NodeKind.LOGICAL_ID: _Walk.nothing,
    NodeKind.COLLECTIVE: _Walk.collective,
    NodeKind.LOOP: _Walk.loop_,
    NodeKind.BRANCH: _Walk.branch,
}
