"""Cuts the body of a written loop at its loop over layers, into the part before it and the rest.

Some instructions are replaced in these pieces: permutes give zeros (their operands are only handed on, see
`recognize`), and the loop over layers gives values that are parameters of the piece. Sums of gradients are
left out, since the new loop makes them itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..builder import tuple_shape
from ..graph import Instruction
from ..values import Value
from .constants import Constants, behind
from .emit import Builder, Editor, needed_by, slice_of
from .parts import Pipeline
from .rounding import contracts


class Pieces:
    """The pieces of one loop's body. ``wanted``: positions of its carry that are read behind the loop.

    ``enters``: whether the new loop goes on with the carry where a microbatch enters. ``sums``: positions of
    sums that it makes besides those of the layers. ``given``: values of the body that it has besides what
    the layers give, for the pieces behind them.
    """

    def __init__(
        self, editor: Editor, pipeline: Pipeline, wanted: Collection[int], *, enters: bool = True,
        sums: Collection[int] = (), given: Sequence[Value] = (),
    ) -> None:  # fmt: skip
        self.editor = editor
        self.layers = pipeline.layers
        self.stage = self.layers.loop
        self.body = pipeline.loop.called[0]
        self.shapes = pipeline.loop.shape.tuple_shapes
        self.given = self.stage.operands[0].operands  # what the loop over layers begins with
        self.reads = Constants(pipeline.loop).reads
        self.permutes = [i for i in self.body.instructions if i.opcode == "collective-permute"]
        self.ids = [i for i in self.body.instructions if i.opcode == "partition-id"]
        self.first = [self.given[i] for i in pipeline.sent]  # what a microbatch begins with
        self.gives = pipeline.results
        results = [behind(o) for o in self.body.root.operands]
        self.unchanged = {
            n for n, r in enumerate(results)
            if self.reads.get(r) == n or r.opcode == "collective-permute"
        }  # fmt: skip
        self.sums = {*pipeline.sums.values(), *sums}
        self.enters = enters
        self.others = [instructions_of(v) for v in given]
        self.needed = self._closed(wanted)

    def _closed(self, wanted: Collection[int]) -> list[int]:
        """The positions of the carry that are needed in any iteration."""
        stack = [*(set(wanted) - self.sums)]
        if self.enters:
            stack += [self.reads[r] for r in self._read(self.first)[0]]
        found: set[int] = set()
        while stack:
            n = stack.pop()
            if n not in found:
                found.add(n)
                if n not in self.unchanged:
                    read, _ = self._read([self.body.root.operands[n]])
                    stack += [self.reads[r] for r in read]
        return sorted(found)

    @property
    def rounds(self) -> bool:
        """Whether an engine may round what goes into the carry otherwise in a loop of its own."""
        changing = [n for n in self.needed if n not in self.unchanged]
        return contracts(self._inner([self.body.root.operands[n] for n in changing]))

    def _inner(self, wanted: Sequence[Instruction]) -> list[Instruction]:
        """The instructions on which values depend, not through the loop over layers or permutes."""
        cuts = {*self.permutes, *(i for i in self.body.instructions if self.stage in i.operands)}
        cuts |= {i for own in self.others for i in own}
        return slice_of(wanted, {*cuts, *self.reads, *self.ids})

    def _read(self, wanted: Sequence[Instruction]) -> tuple[list[Instruction], bool]:
        """The reads of the carry on which values depend, not through the loop over layers or permutes, and
        whether they depend on the device's id."""
        inner = self._inner(wanted)
        used = {o for i in inner for o in needed_by(i)} | set(wanted)
        reads = [r for r in self.reads if r in used]
        return reads, any(i in used for i in self.ids)

    def _piece(
        self, name: str, wanted: Sequence[Instruction], ys: Sequence[Any]
    ) -> tuple[Builder, list[int]]:
        """A computation of the body's ``wanted``. Its parameter has results of the loop over layers and other
        given values, of shapes ``ys``, carries, whose positions are given, and the device's id, as position
        -1, if it is read."""
        reads, has_id = self._read(wanted)
        positions = sorted({self.reads[r] for r in reads})
        b = self.editor.computation(name)
        whole = [*ys, *(self.shapes[n] for n in positions)]
        if has_id:
            whole.append(self.ids[0].shape)
        parts = b.elements(b.parameter(tuple_shape(whole)))
        at = dict(zip(positions, parts[len(ys) :], strict=False))
        env: dict[Instruction, Any] = {r: at[self.reads[r]] for r in reads}
        if has_id:
            env |= dict.fromkeys(self.ids, parts[-1])
        self._cut(b, env, parts[: len(ys)])
        b.clone(wanted, env)
        b.finish(b.tuple([env[w] for w in wanted]))
        return b, [*positions, *([-1] if has_id else [])]

    def _cut(self, b: Builder, env: dict[Instruction, Any], ys: Sequence[Any]) -> None:
        for instruction in self.permutes:
            env[instruction] = b.zeros(instruction.shape)
        for own, value in zip(self.others, ys[len(self.gives) :], strict=False):
            env |= dict.fromkeys(own, value)
        results = dict(zip(self.gives, ys, strict=False))
        for user in self.body.instructions:
            if self.stage in user.operands:
                n = user.proto.tuple_index
                env[user] = results[n] if n in results else b.zeros(user.shape)

    def _identity(self, name: str, shapes: Sequence[Any]) -> Builder:
        b = self.editor.computation(name)
        b.finish(b.tuple(b.elements(b.parameter(tuple_shape(shapes)))))
        return b

    @property
    def taken_in(self) -> list[int]:
        """The positions of the carry on which the input of a new microbatch depends."""
        return sorted({self.reads[r] for r in self._read(self.first)[0]})

    def takes_in(self) -> Any:
        """A function that emits the input of a stage: that of a new microbatch, or the received values."""
        passed = [v.shape for v in self.first]
        takes_in, reads = self._piece("interleaved.takes_in", self.first, ())
        other = self._identity("interleaved.goes_on", passed)

        def emit(
            b: Builder, enters: Any, carry: dict[int, Any], device: Any, received: Sequence[Any]
        ) -> tuple[str, list[Any]]:
            own = b.tuple([device if n < 0 else carry[n] for n in reads])
            branches = [takes_in, other]
            chosen = b.conditional(enters, branches, [own, b.tuple(received)], tuple_shape(passed))
            return chosen.name, b.elements(chosen)

        return emit

    def always_forward(self) -> Any:
        """A function that emits the carry after one more iteration of the written loop."""
        changing, goes, reads = self._forward()
        shape = tuple_shape([self.shapes[n] for n in changing])

        def emit(
            b: Builder, carry: dict[int, Any], device: Any, ys: Sequence[Any]
        ) -> dict[int, Any]:
            own = b.tuple([*ys, *(device if n < 0 else carry[n] for n in reads)])
            called = b.add("call", shape, [own], called_computation_ids=[goes.id])
            return carry | dict(zip(changing, b.elements(called), strict=True))

        return emit

    def _forward(self) -> tuple[list[int], Builder, list[int]]:
        """The positions of the carry that change, what computes them, and the positions that it reads."""
        changing = [n for n in self.needed if n not in self.unchanged]
        wanted = [self.body.root.operands[n] for n in changing]
        whole = self.stage.shape.tuple_shapes
        passed = [*(whole[i] for i in self.gives), *(own[0].shape for own in self.others)]
        return changing, *self._piece("interleaved.goes_forward", wanted, passed)

    def goes_forward(self) -> Any:
        """A function that emits the carry after one more iteration of the written loop, or unchanged."""
        changing, goes, reads = self._forward()
        shapes = [self.shapes[n] for n in changing]
        stays = self._identity("interleaved.stays", shapes)

        def emit(
            b: Builder, commit: Any, carry: dict[int, Any], device: Any, ys: Sequence[Any]
        ) -> tuple[str, dict[int, Any]]:
            own = b.tuple([*ys, *(device if n < 0 else carry[n] for n in reads)])
            same = b.tuple([carry[n] for n in changing])
            chosen = b.conditional(commit, [goes, stays], [own, same], tuple_shape(shapes))
            new = {n: b.element(chosen, i) for i, n in enumerate(changing)}
            return chosen.name, carry | new

        return emit


def instructions_of(value: Value) -> list[Instruction]:
    """The instructions of a body that are this value, which one of them computes."""
    assert value.node is not None
    made = value.node.instruction
    if not made.shape.tuple_shapes:
        return [made]
    return [
        i for i in made.computation.instructions
        if i.opcode == "get-tuple-element" and i.operands[0] is made
        and i.proto.tuple_index == value.index
    ]  # fmt: skip
