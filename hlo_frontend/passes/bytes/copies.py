"""Which devices have copies of a value: `Copies`.

On a mesh of several axes, an array that is cut along some of them is the same on all devices along the
others: the shardings of the program's parameters say so (`shardings`). What is computed from copies by the
same ops is the same, and so is what collectives give to all members of a group.

A value whose copies cannot be relied on has none: what nobody reads on some devices or in some iterations
(`passes.unread`) may not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from stretto.collectives.ops import Collective, Kind

from ...graph import Instruction, all_instructions
from ...shardings import parts
from ...values import BlockGraph, Node, NodeKind, Value, all_blocks
from ..valid.known import FOLLOWED
from .device_values import DeviceValues

# Of each device, the first device that has the same.
Labels = tuple[int, ...]
Get = Callable[[Value], Labels]

_IDS = frozenset({"partition-id", "replica-id"})


class Copies:
    """Copies of the values of a program. ``parameters``: the serialized sharding of each parameter of its
    entry, None where there is none."""

    def __init__(
        self,
        entry: BlockGraph,
        known: DeviceValues,
        num_devices: int,
        parameters: Sequence[bytes | None],
    ) -> None:
        self._known, self._devices = known, num_devices
        self._alone: Labels = tuple(range(num_devices))
        self._found: dict[Value, Labels] = {}
        self._outer: dict[Value, Node] = {}  # parameter of an inner block -> the loop or branch
        self._unread: set[Node] = set()
        for block in all_blocks(entry):
            self._unread.update(block.unread)
            for node in block.nodes:
                for inner in node.blocks:
                    self._outer.update(dict.fromkeys(inner.parameters, node))
        if len(parameters) == len(entry.parameters):
            for value, sharding in zip(entry.parameters, parameters, strict=True):
                part = None if sharding is None else parts(sharding)
                if part is not None:
                    self._found[value] = _labels([part(d) for d in range(num_devices)])

    @property
    def has_some(self) -> bool:
        """Whether some parameter is the same on several devices."""
        return any(labels != self._alone for labels in self._found.values())

    def same(self, value: Value, source: Sequence[int]) -> bool:
        """Whether each device has what the device ``source[d]`` has."""
        labels = self.of(value)
        return all(labels[d] == labels[other] for d, other in enumerate(source))

    def alike(self, value: Value, groups: Sequence[Sequence[int]]) -> bool:
        """Whether all devices of each group have the same."""
        labels = self.of(value)
        return all(len({labels[d] for d in group}) == 1 for group in groups)

    def of(self, value: Value) -> Labels:
        todo = [value.root]
        while todo:
            root = todo[-1]
            missing = [v for v in self._needed(root) if v not in self._found]
            if root in self._found or not missing:
                todo.pop()
                if root not in self._found:
                    self._evaluate(root)
            else:
                todo += missing
        return self._found[value.root]

    def _needed(self, root: Value) -> list[Value]:
        node = root.node or self._outer.get(root)
        if node is None or node.kind is NodeKind.CHEAP:
            return []
        return [v.root for v in node.operands if v.type is not None]

    def _evaluate(self, root: Value) -> None:
        node = root.node
        if node is not None:
            self._step(node, self._found)
        elif root in self._outer:
            self._step(self._outer[root], self._found)
        self._found.setdefault(root, self._alone)

    def _step(self, node: Node, found: dict[Value, Labels]) -> None:
        """Find the labels of a node's results, and of all values in its blocks."""
        if node.kind is NodeKind.LOOP:
            self._loop(node, found)
        elif node.kind is NodeKind.BRANCH:
            self._branch(node, found)
        else:
            for result in node.results:
                if result.type is not None:
                    found[result] = self._labels_of(node, result, found)

    def _get(self, value: Value, found: dict[Value, Labels]) -> Labels:
        root = value.root
        if root not in found:
            node = root.node
            # Constants are in no block's list.
            cheap = node is not None and node.kind is NodeKind.CHEAP
            found[root] = (0,) * self._devices if cheap else self._alone
        return found[root]

    def _labels_of(self, node: Node, result: Value, found: dict[Value, Labels]) -> Labels:
        known = self._known.of(result)
        if known is not None:
            rows = [row.tobytes() for row in known]
            return _labels(rows * self._devices if len(rows) == 1 else rows)
        if node.kind is NodeKind.CHEAP:
            return (0,) * self._devices
        if node in self._unread:
            return self._alone
        operands = [self._get(v, found) for v in node.operands if v.type is not None]
        if node.collective is not None:
            return self._received(node, node.collective, result.index, operands)
        if node.kind is not NodeKind.COMPUTE or not repeats(node):
            return self._alone
        return self._together(operands)

    def _together(self, operands: Sequence[Labels]) -> Labels:
        if not operands:
            return (0,) * self._devices
        return _labels(list(zip(*operands, strict=True)))

    def _received(
        self, node: Node, collective: Collective, index: int, operands: Sequence[Labels]
    ) -> Labels:
        devices = range(self._devices)
        if collective.valid_iterations:
            return self._alone
        if collective.kind is Kind.PERMUTE:
            source = {target: source for source, target in collective.pairs}
            if len(source) != self._devices:
                return self._alone
            return _labels([operands[index][source[d]] for d in devices])
        groups = collective.group_of
        if len(groups) != self._devices:
            return self._alone
        if collective.kind is Kind.ALL_GATHER:
            return _labels([tuple([operands[index][m] for m in groups[d]]) for d in devices])
        if collective.kind is not Kind.ALL_REDUCE:
            return self._alone
        if node.reducer is None and collective.operands[index].dtype in FOLLOWED:
            return _labels([tuple([operands[index][m] for m in groups[d]]) for d in devices])
        # Sums of floats may be made in other orders in other groups.
        return _labels([groups[d] for d in devices])

    def _block(self, block: BlockGraph, found: dict[Value, Labels]) -> None:
        for node in block.nodes:
            self._step(node, found)

    def _loop(self, node: Node, found: dict[Value, Labels]) -> None:
        condition, body = node.blocks
        carried = [self._get(v, found) for v in node.operands]
        while True:
            inside = dict(zip(body.parameters, carried, strict=True))
            self._block(body, inside)
            given = [self._get(v, inside) for v in body.results]
            after = [self._together(pair) for pair in zip(carried, given, strict=True)]
            if after == carried:
                break
            carried = after
        tested = dict(zip(condition.parameters, carried, strict=True))
        self._block(condition, tested)
        (goes_on,) = condition.results
        ended = self._get(goes_on, tested)
        found |= inside | tested
        for result, labels in zip(node.results, carried, strict=True):
            found[result] = self._together([labels, ended])

    def _branch(self, node: Node, found: dict[Value, Labels]) -> None:
        operands = iter(node.operands[1:])
        chosen = [self._get(node.operands[0], found)]
        results: list[list[Labels]] = [[] for _ in node.results]
        for block in node.blocks:
            inside = {p: self._get(next(operands), found) for p in block.parameters}
            self._block(block, inside)
            for labels, value in zip(results, block.results, strict=True):
                labels.append(self._get(value, inside))
            found |= inside
        for result, labels in zip(node.results, results, strict=True):
            found[result] = self._together(chosen + labels)


def _labels(keys: Sequence[Hashable]) -> Labels:
    first: dict[Hashable, int] = {}
    return tuple([first.setdefault(key, d) for d, key in enumerate(keys)])


def repeats(node: Node) -> bool:
    """Whether compute gives the same wherever its operands are the same. Custom calls may ask for the
    time."""
    instruction = node.instruction
    if node.has_side_effect:
        return False
    inside = [i for called in instruction.called for i in all_instructions(called)]
    for one in (instruction, *inside):
        if one.opcode in _IDS or (one.opcode == "custom-call" and not _is_function(one)):
            return False
    return True


def _is_function(custom_call: Instruction) -> bool:
    """Whether it is XLA's or of linear algebra."""
    target = custom_call.proto.custom_call_target
    return target == "TopK" or "num_batch_dims" in custom_call.attributes
