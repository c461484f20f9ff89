"""One chunk of a device's layers, which an iteration of the new loop runs.

It is the loop over layers on a range of its iterations, under a conditional. Weights are read in place, and
so are slices that another pipeline kept: these are in row ``row`` of arrays by microbatch and slice. Slices
that the layers give go into stacks of a chunk's size. If a stage is recomputed before its layers run, a chunk
is recomputed too, from its initial values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..builder import array_shape, resized, tuple_shape
from ..graph import Instruction
from ..trips import TRIPS
from .emit import Builder, Editor
from .layers import LayerLoop
from .parts import Kept, Pipeline, Recomputed, again
from .refusal import Refusal

SCALAR = "s32"
Shapes = Mapping[int, Any]  # by position in the carry of a loop over layers


# Keys of what the computations of runs are given besides operands of the layers, behind all positions.
DEVICE = 1 << 21
OTHERS = DEVICE + 1


def is_operand(key: int) -> bool:
    """Whether a key is that of an operand of the layers themselves."""
    return 0 <= key < DEVICE


class Chunk:
    """``held``: the shapes of operands of the layers in the new loop's carry, by position in the carry of the
    loop over layers, or by `again`. ``given``: positions of stacks that are needed."""

    def __init__(
        self, editor: Editor, pipeline: Pipeline, size: int, held: Shapes, given: Sequence[int]
    ) -> None:
        self.editor, self.pipeline, self.size, self.held = editor, pipeline, size, held
        self.layers: LayerLoop = pipeline.layers
        self.given = tuple(given)
        whole = self.layers.loop.shape.tuple_shapes
        self.passed = {i: whole[i] for i in self.layers.passed}
        self.stacks = stacks_of(self.layers, self.given, size)
        self.kept = [i for i, w in pipeline.weights.items() if isinstance(w, Kept)]
        self.recomputed = {
            i: w.leaf for i, w in pipeline.weights.items() if isinstance(w, Recomputed)
        }
        self.runs, self.rests = self._runs(), self._rests()

    def emit(
        self, b: Builder, working: Any, start: Any, first: Any, row: Any, xs: Sequence[Any],
        held: Mapping[int, Any],
    ) -> tuple[str, list[Any], list[Any]]:  # fmt: skip
        """Run the chunk from iteration ``start`` of the loop over layers on, whose first slice is ``first``.

        ``held``: the operands of the layers. Gives the conditional's name, the values for the next chunk, and
        the stacks. If not ``working``, all of them are zeros.
        """
        own = b.tuple([start, first, row, *xs, *(held[i] for i in self.held)])
        shape = tuple_shape([*self.passed.values(), *self.stacks.values()])
        chosen = b.conditional(working, [self.runs, self.rests], [own, b.tuple([])], shape)
        parts = b.elements(chosen)
        return chosen.name, parts[: len(self.passed)], parts[len(self.passed) :]

    def _rests(self) -> Builder:
        b = self.editor.computation("interleaved.rests")
        b.parameter(tuple_shape([]))
        b.finish(b.tuple([b.zeros(s) for s in [*self.passed.values(), *self.stacks.values()]]))
        return b

    def _runs(self) -> Builder:
        # Computations are made before the one that calls them: callers come last in a module.
        scalar = array_shape(SCALAR)
        before = self.pipeline.again
        first_run = None
        stacks: dict[int, Any] = {}
        if before is not None:
            whole = before.layers.loop.shape.tuple_shapes
            own = {i: self.held[again(i)] for i in [*before.weights, *before.shared]}
            begins = {i: whole[i] for i in before.inputs}
            leaves = sorted(set(self.recomputed.values()))
            first_run = LayerRun(
                self.editor, before.layers, self.size, begins | own,
                stacks_of(before.layers, leaves, self.size), list(before.kept), (),
            )  # fmt: skip
            stacks = {i: first_run.stacks[leaf] for i, leaf in self.recomputed.items()}
        own = {i: s for i, s in self.held.items() if i >= 0}
        run = LayerRun(
            self.editor, self.layers, self.size, self.passed | own | stacks, self.stacks, self.kept,
            list(stacks),
        )  # fmt: skip
        b = self.editor.computation("interleaved.chunk")
        arguments = [scalar, scalar, scalar, *self.passed.values(), *self.held.values()]
        start, first, row, *rest = b.elements(b.parameter(tuple_shape(arguments)))
        parts: dict[int, Any] = dict(zip([*self.passed, *self.held], rest, strict=True))
        if before is not None and first_run is not None:
            slot = b.add("divide", scalar, [first, b.constant(self.size)])
            begin = {i: entry_of(b, parts[again(i)], [row, slot]) for i in before.inputs}
            own = {i: parts[again(i)] for i in [*before.weights, *before.shared]}
            at = start_of(b, before.layers, first, self.size)
            made = first_run.emit(b, begin | own, at, first, row)
            parts |= {i: made[leaf] for i, leaf in self.recomputed.items()}
        done = run.emit(b, {i: p for i, p in parts.items() if i >= 0}, start, first, row)
        b.finish(b.tuple([done[i] for i in [*self.passed, *self.stacks]]))
        return b


def start_of(b: Builder, layers: LayerLoop, first: Any, size: int) -> Any:
    """The iteration of a loop over layers with which the chunk begins whose first slice is ``first``."""
    if not layers.reverse:
        return first
    return b.add("subtract", first.shape, [b.constant(layers.count - size), first])


def stacks_of(layers: LayerLoop, positions: Sequence[int], size: int) -> dict[int, Any]:
    whole = layers.loop.shape.tuple_shapes
    return {i: resized(whole[i], [size, *whole[i].dimensions[1:]]) for i in positions}


def entry_of(b: Builder, array: Any, at: Sequence[Any]) -> Any:
    """The part of an array at these indices of its first dimensions."""
    dimensions = list(array.shape.dimensions)[len(at) :]
    starts = [*at, *(b.constant(0) for _ in dimensions)]
    return b.reshape(b.dynamic_slice(array, starts, [1] * len(at) + dimensions), dimensions)


class LayerRun:
    """A loop over layers, for a part of its iterations.

    ``shapes``: those of its operands, by position in its carry. ``stacks``: the shapes of stacks that are
    needed, of a chunk's size. Operands in ``kept`` are read in row ``row``, which has all slices or those of
    a chunk; those in ``cut`` have a chunk's size. ``banks``: stacks that are written in place, in row ``row``
    of an array of such stacks by row.

    ``leaves`` and ``given``: by key, values of the layers' body that are put into a stack, or taken out of
    one instead of being computed; these stacks are in rows too, and their shapes in ``shapes`` and
    ``stacks``.
    """

    def __init__(
        self,
        editor: Editor,
        layers: LayerLoop,
        size: int,
        shapes: Shapes,
        stacks: dict[int, Any],
        kept: Sequence[int],
        cut: Sequence[int],
        banks: Collection[int] = (),
        leaves: Mapping[int, Instruction] = MappingProxyType({}),
        given: Mapping[int, Instruction] = MappingProxyType({}),
    ) -> None:
        self.editor, self.layers, self.size, self.stacks = editor, layers, size, stacks
        self.kept, self.cut, self.banks = kept, cut, banks
        self.leaves, self.given = leaves, given
        scalar = array_shape(SCALAR)
        whole = {layers.counter: scalar} | dict(shapes) | stacks
        self.order = sorted(whole)
        self.passed = [i for i in layers.passed if i in whole]
        # Behind the carry: where to stop, the first slice, the row, and the row of what is left.
        self.carried = tuple_shape([*(whole[i] for i in self.order), *[scalar] * 4])
        self.layer = self._layer()
        self.more = self._more_layers()

    def emit(
        self, b: Builder, parts: dict[int, Any], start: Any, first: Any, row: Any, left: Any = None
    ) -> dict[int, Any]:
        """Run it from iteration ``start`` on; gives its final values. ``left``: the row of what is left."""
        limit = b.add("add", array_shape(SCALAR), [start, b.constant(self.size)])
        begin = parts | {self.layers.counter: start}
        # All of it is overwritten.
        begin |= {
            i: b.zeros(s) for i, s in self.stacks.items() if i not in (*self.banks, *self.leaves)
        }
        left = row if left is None else left
        init = b.tuple([*(begin[i] for i in self.order), limit, first, row, left])
        called = [self.layer.id, self.more.id]
        done = b.add("while", self.carried, [init], called_computation_ids=called)
        done.metadata.CopyFrom(self.layers.loop.proto.metadata)
        done.frontend_attributes.map[TRIPS] = str(self.size)  # compilers might open it
        wanted = [*self.passed, *self.stacks]
        return {i: b.element(done, self.order.index(i)) for i in wanted}

    def _more_layers(self) -> Builder:
        b = self.editor.computation("interleaved.more_layers")
        c = b.parameter(self.carried)
        counter = b.element(c, self.order.index(self.layers.counter))
        end = b.element(c, len(self.order))
        less = b.add("compare", array_shape("pred"), [counter, end], comparison_direction="LT")
        b.finish(less)
        return b

    def _layer(self) -> Builder:
        layers = self.layers
        body = layers.loop.called[0]
        b = self.editor.computation("interleaved.layer")
        c = b.parameter(self.carried)
        parts = {i: b.element(c, n) for n, i in enumerate(self.order)}
        limit, first, row, left = (b.element(c, len(self.order) + n) for n in range(4))
        env: dict[Instruction, Any] = {
            i: parts[i.proto.tuple_index]
            for i in body.instructions
            if body.parameters[0] in i.operands and i.proto.tuple_index in parts
        }
        count = parts[layers.counter]
        behind = b.add("subtract", limit.shape, [limit, b.constant(self.size)])
        place = [left, b.add("subtract", limit.shape, [count, behind])]
        for key, value in self.given.items():
            env[value] = entry_of(b, parts[key], place)
        for position in [*self.kept, *self.cut]:
            for taken in layers.slices[position]:
                self._check_direct(taken)
                b.clone(taken.operands[1:], env)
                at, *others = (env[o] for o in taken.operands[1:])
                sizes = list(taken.shape.dimensions)
                # A row of what is kept may have the slices of all layers, or those of this run.
                whole = parts[position].shape.dimensions[1 if position in self.kept else 0]
                own = at if whole == layers.count else b.add("subtract", at.shape, [at, first])
                if position in self.kept:
                    part = b.dynamic_slice(parts[position], [row, own, *others], [1, *sizes])
                    env[taken] = b.reshape(part, sizes)
                else:
                    env[taken] = b.dynamic_slice(parts[position], [own, *others], sizes)
        results = dict(parts)
        for key, value in self.leaves.items():
            made = b.clone([value], env)[value]
            part = b.reshape(made, [1, 1, *made.shape.dimensions])
            zeros = [b.constant(0)] * len(made.shape.dimensions)
            results[key] = b.update(parts[key], part, [*place, *zeros])
        for position in (i for i in self.stacks if i not in self.leaves):
            put = layers.updates[position]
            self._check_direct(put)
            b.clone(put.operands[1:], env)
            at, *others = (env[o] for o in put.operands[2:])
            own = b.add("subtract", at.shape, [at, first])
            part, starts = env[put.operands[1]], [own, *others]
            if position in self.banks:
                part, starts = b.reshape(part, [1, *part.shape.dimensions]), [row, *starts]
            results[position] = b.update(parts[position], part, starts)
        for position in [layers.counter, *self.passed]:
            root = body.root.operands[position]
            results[position] = b.clone([root], env)[root]
        b.finish(b.tuple([*(results[i] for i in self.order), limit, first, row, left]))
        return b

    def _check_direct(self, instruction: Instruction) -> None:
        """Refuse slices that the body does not read or write directly: they are rewritten here."""
        array = instruction.operands[0]
        body = self.layers.loop.called[0]
        first = instruction.operands[1 if instruction.opcode == "dynamic-slice" else 2]
        if (
            instruction.computation is not body
            or array.opcode != "get-tuple-element"
            or array.operands[0] is not body.parameters[0]
            or first.shape.element_type != array_shape(SCALAR).element_type
        ):
            raise Refusal(
                f"{instruction.describe()} does not read or write its slice as a scan does"
            )
