"""Known integers on every device, which follow from constants, tables and the device's id.

A value is known only if it is the same in every iteration and every run. A parameter of a loop's body is
known if the body does not change it and the loop's operand is known; a parameter of a branch, if the operand
is. Values are evaluated on request.
"""

from __future__ import annotations

import numpy as np

from ...values import BlockGraph, Node, NodeKind, Value, all_nodes
from ..valid.known import Known, evaluate

# The most nodes between a value and the constants from which it follows.
_DEPTH = 64


class DeviceValues:
    """Known values of a program for ``num_replicas`` times ``num_partitions`` devices.

    `of` gives an array in the reduced form of `passes.valid.tensors`: devices along the first axis (one row
    if all have the same), by flattened logical id.
    """

    def __init__(self, entry: BlockGraph, num_replicas: int, num_partitions: int) -> None:
        ids = np.arange(num_replicas * num_partitions, dtype=np.uint32)
        self._ids = {"partition-id": ids % num_partitions, "replica-id": ids // num_partitions}
        # The id that tells all devices apart; none where both are needed.
        self.id_opcode = "partition-id" if num_replicas == 1 else "replica-id"
        self.has_id = num_replicas == 1 or num_partitions == 1
        self._found: dict[Value, Known] = {}
        self._outer: dict[Value, Value] = {}  # parameter of an inner block -> what it always is
        self._connect(entry)

    def _connect(self, block: BlockGraph) -> None:
        for node in all_nodes(block):
            if node.kind is NodeKind.LOOP:
                condition, body = node.blocks
                for i, operand in enumerate(node.operands):
                    if body.results[i].root is body.parameters[i]:
                        self._outer[body.parameters[i]] = operand
                        self._outer[condition.parameters[i]] = operand
            elif node.kind is NodeKind.BRANCH:
                operands = iter(node.operands[1:])
                for inner in node.blocks:
                    for parameter in inner.parameters:
                        self._outer[parameter] = next(operands)

    def of(self, value: Value) -> Known:
        """The value on every device, or None if it is not known."""
        return self._of(value.root, _DEPTH)

    def _of(self, root: Value, depth: int) -> Known:
        if root in self._found:
            return self._found[root]
        if not depth:
            return None
        self._found[root] = found = self._evaluated(root, depth - 1)
        return found

    def _evaluated(self, root: Value, depth: int) -> Known:
        node = root.node
        if node is None:
            outer = self._outer.get(root)
            return None if outer is None else self._of(outer.root, depth)
        if node.kind is NodeKind.LOGICAL_ID:
            return self._ids[node.instruction.opcode]
        if not _is_plain(node):
            return None
        return evaluate(node, [self._of(v.root, depth) for v in node.operands])


def _is_plain(node: Node) -> bool:
    return (
        node.kind in (NodeKind.COMPUTE, NodeKind.CHEAP)
        and len(node.results) == 1
        and all(v.type is not None for v in node.operands)
    )
