"""An order of a segment's nodes that follows from what they compute, not from where the program has them.

The same compute stands in several places of a module: in each layer, in the forward pass and in what the
backward pass computes again. XLA's passes leave the places in orders of their own, and segments whose nodes
stand in another order read their inputs in another order, so that they are other modules to be compiled.

Nodes get a label for what they compute of what, down from the inputs, and by whom they are read, up from the
results, and stand in the order of their labels as far as they do not need each other. Equal labels do not
always mean equal structure; such nodes stand in the module's order, and at worst one more segment is
compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from ..likeness import Likeness
from ..topological import topological
from ..values import Node, NodeKind, Value, result_shape

# Where these begin may be told when a segment runs (see `offsets`), so it is no part of the structure.
_MOVED = ("slice", "pad")


class Structure:
    """Orders the nodes of segments of one module. Labels are numbers in the order in which they were met:
    they are the same on all ranks, whose modules and plans are equal."""

    def __init__(self) -> None:
        self._likeness = Likeness()
        self._labels: dict[Hashable, int] = {}
        self._cheap: dict[Node, int] = {}

    def ordered(self, nodes: Collection[Node]) -> list[Node]:
        """The nodes of a segment, each behind those that it needs."""
        listed = sorted(nodes, key=lambda node: node.position)
        if len(listed) < 2 or any(map(_is_tied, listed)):
            return listed
        inside = set(listed)
        plain: dict[Value, int] = {}
        sources = {node: [value.root for value in node.operands] for node in listed}
        down = self._down(listed, sources, inside, plain)
        readers: dict[Value, list[tuple[int, int]]] = {}
        up: dict[Node, int] = {}
        for node in reversed(listed):
            read = [(k, *at) for k, v in enumerate(node.results) for at in readers.get(v, ())]
            up[node] = self._label((down[node], *sorted(read)))
            for k, value in enumerate(sources[node]):
                readers.setdefault(value, []).append((up[node], k))
        # Inputs of one type differ in who reads them.
        told = {
            value: self._label((plain[value], *sorted(readers[value])))
            for value in readers
            if value in plain
        }
        final = self._down(listed, sources, inside, told, up)
        before = {node: {other for other, _ in node.before() if other in inside} for node in listed}
        return topological(before, key=lambda node: (final[node], node.position))

    def _down(
        self,
        listed: Sequence[Node],
        sources: dict[Node, list[Value]],
        inside: set[Node],
        inputs: dict[Value, int],
        own: dict[Node, int] | None = None,
    ) -> dict[Node, int]:
        """Labels of nodes by what they read. ``inputs``: labels of what comes from elsewhere, which are added
        if they are missing; ``own``: what is known of the nodes themselves."""
        labels: dict[Node, int] = {}
        for node in listed:
            read: list[Hashable] = [own[node] if own else self._instruction(node)]
            for value in sources[node]:
                source = value.node
                if source is not None and source in inside:
                    read.append((labels[source], value.index))
                    continue
                if value not in inputs:
                    cheap = source is not None and source.kind is NodeKind.CHEAP
                    inputs[value] = self._of_cheap(source) if cheap else self._label(value.type)
                read.append(inputs[value])
            labels[node] = self._label(tuple(read))
        return labels

    def _of_cheap(self, node: Node | None) -> int:
        """Of a constant or what is made of constants."""
        assert node is not None
        if node not in self._cheap:
            read = [self._of_cheap(value.node) for value in node.operands]
            self._cheap[node] = self._label(("cheap", self._instruction(node), *read))
        return self._cheap[node]

    def _instruction(self, node: Node) -> int:
        moves = node.instruction.opcode in _MOVED
        return self._likeness.instruction(
            node.instruction, (0,) * len(result_shape(node)) if moves else ()
        )

    def _label(self, what: Hashable) -> int:
        return self._labels.setdefault(what, len(self._labels))


def _is_tied(node: Node) -> bool:
    """Whether the order of a node among others may matter beside what it reads."""
    values = (*node.operands, *node.results)
    return node.has_side_effect or any(value.type is None for value in values)
