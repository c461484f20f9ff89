"""Makes all-reduces reduce-scatters, has each device compute its own rows of what follows, and gathers what
others read whole (`shares`).

The rows of a device are one stretch of a dimension, or a stretch of each of several sequences (`rules.Cut`):
then scatters and gathers see these as a dimension of their own.

Bits: what a device computes of its rows is what all would, from the same numbers. A reduce-scatter adds in
the order of the devices, as an all-reduce does within a process and between two; among three or more
processes MPI adds arrays below 256 KiB a process in an order of its own.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.collectives.ops import Kind
from stretto.collectives.types import TensorType

from ...values import BlockGraph, Node, Value
from ..bytes.steps import part_of
from .emit import Part, Splitting
from .instructions import Maker, collective_like, name_of
from .places import Places
from .regions import Region
from .rules import Cut


def compute_own(block: BlockGraph, region: Region, places: Places) -> None:
    """Change the block in place as a region of `shares.shares_of` says. ``places``: those of the block."""
    _Own(block, region, 1, places, pieces=False).apply()


class _Own(Splitting):
    """One part of everything, of which each device has its own."""

    def __init__(
        self, block: BlockGraph, region: Region, tiles: int, places: Places, pieces: bool
    ) -> None:
        super().__init__(block, region, tiles, places, pieces)
        self._sum_of: dict[Node, Node] = {}
        self._gathers: dict[Node, int] = {}

    def _parts(self) -> list[Part]:
        return [Part("own", 0, 0, 0)]

    def _gather(self, node: Node) -> None:
        """The share of an all-reduce."""
        result = node.results[0]
        assert result.type is not None
        cut = self.region.dimensions[result]
        made: list[Node] = []
        maker = Maker(node.instruction, f"{node.instruction.name}.rows")
        whole, dimension = self._seen(node.operands[0], cut, maker)
        made += maker.nodes
        assert whole.type is not None
        scattered = self._moved(node, Kind.REDUCE_SCATTER, "scattered", whole, dimension, made)
        maker = Maker(node.instruction, f"{node.instruction.name}.own")
        own = part_of(result.type, cut.dimension, self.size)
        (part,) = self.parts
        part.values[result] = maker.add("reshape", own, [scattered]) if cut.outer > 1 else scattered
        made += maker.nodes
        self._sum_of[node] = node
        self._put_together(node, result, cut, made)
        self._replace(node, made)

    def _each(self, node: Node) -> None:
        above = [self._sum_of[n] for v in node.operands if (n := v.root.node) in self._sum_of]
        last = max(above, key=lambda n: n.position, default=self.region.sources[0])
        self._sum_of[node] = last
        super()._each(node)

    def _put_together(self, node: Node, result: Value, cut: Cut, made: list[Node]) -> None:
        """Gather a value from all devices, where something reads it whole."""
        if result not in self.used:
            return
        assert result.type is not None
        (part,) = self.parts
        maker = Maker(node.instruction, f"{node.instruction.name}.own")
        own, dimension = self._seen(part.values[result], cut, maker)
        made += maker.nodes
        source = self._sum_of[node]
        count = self._gathers[source] = self._gathers.get(source, 0) + 1
        word = "gathered" if count == 1 else f"gathered.{count}"
        whole = self._moved(source, Kind.ALL_GATHER, word, own, dimension, made)
        if cut.outer > 1:
            maker = Maker(node.instruction, f"{node.instruction.name}.whole")
            whole = maker.add("reshape", result.type, [whole])
            made += maker.nodes
        self.editor.replace(result, whole)

    def _seen(self, value: Value, cut: Cut, maker: Maker) -> tuple[Value, int]:
        """An array with its stretches as a dimension ahead of their rows, and the dimension of the rows."""
        if cut.outer == 1:
            return value, cut.dimension
        assert value.type is not None
        shape = value.type.shape
        rows = shape[cut.dimension] // cut.outer
        split = (*shape[: cut.dimension], cut.outer, rows, *shape[cut.dimension + 1 :])
        return maker.add("reshape", TensorType(value.type.dtype, split), [value]), cut.dimension + 1

    def _moved(
        self,
        node: Node,
        kind: Kind,
        word: str,
        operand: Value,
        dimension: int,
        made: list[Node],
    ) -> Value:
        """What a collective of another kind over the groups of an all-reduce gives."""
        old, given = node.collective, operand.type
        assert old is not None and given is not None
        shape = list(given.shape)
        gathers = kind is Kind.ALL_GATHER
        rows = shape[dimension]
        shape[dimension] = rows * self.size if gathers else rows // self.size
        new = replace(
            old,
            kind=kind,
            operands=(given,),
            results=(TensorType(given.dtype, tuple(shape)),),
            reduction=None if gathers else old.reduction,
            dimension=dimension,
            name=f"{name_of(node)}.{word}",
        )
        made.append(collective_like(node, new, [operand]))
        return made[-1].results[0]
