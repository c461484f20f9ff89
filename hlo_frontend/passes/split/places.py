"""Numbers that tell where parts lie, made once at the head of a block for all of its regions.

Segments get them as inputs, so that parts are the same segments on other numbers. Each number is a value of
its own which engines hand over in every run: numbers that are equal are one value.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.collectives.types import TensorType

from ...edit import Editor
from ...graph import Instruction
from ...values import BlockGraph, Node, Value
from .instructions import Maker

Table = Sequence[Sequence[int]]


class Places:
    """The numbers of one block. Regions are split one after the other, each between `begin` and `end`."""

    def __init__(self, block: BlockGraph, num_replicas: int, num_partitions: int) -> None:
        self._block, self._counts = block, (num_replicas, num_partitions)
        self._known: dict[tuple[object, ...], Value] = {}
        self._last: Node | None = None
        self._maker: Maker | None = None

    def begin(self, like: Instruction) -> None:
        """``like``: gives new numbers their source line."""
        self._maker = Maker(like, f"{like.name}.parts")

    def at(self, table: Table, index: int, by: int = 1) -> Value:
        """Element ``index`` of the device's row of a table, times ``by``: a scalar of s32."""
        assert self._maker is not None
        column = [row[index] * by for row in table]
        if len(set(column)) == 1:
            key: tuple[object, ...] = (column[0],)
            if key not in self._known:
                # A constant would be copied into each segment, which then would differ.
                number, zero = (self._maker.constant([n], ()) for n in (column[0], 0))
                self._known[key] = self._maker.add("add", TensorType("s32", ()), [number, zero])
            return self._known[key]
        rows = tuple(map(tuple, table))
        if (rows,) not in self._known:
            self._known[rows,] = self._maker.row(table, *self._counts)
        key = (rows, index, by)
        if key not in self._known:
            number = self._maker.element(self._known[rows,], index)
            self._known[key] = self._maker.scaled(number, by)
        return self._known[key]

    def end(self, editor: Editor) -> None:
        """Commit the edits of a region, with the numbers that it reads."""
        assert self._maker is not None
        if self._last is None:
            editor.put_ahead(self._block.nodes[0], self._maker.nodes)
        else:
            editor.put_behind(self._last, self._maker.nodes)
        editor.commit()
        # What nobody reads is no longer there.
        left = set(self._block.nodes)
        self._known = {key: value for key, value in self._known.items() if value.node in left}
        made = {value.node for value in self._known.values()}
        self._last = next((node for node in reversed(self._block.nodes) if node in made), None)
