"""One chunk of a device's layers: what an iteration of the new loop runs.

The loop over layers, on a range of its iterations, under a conditional. Its weights, and slices that another
pipeline kept, are read where they are: the latter in rows ``row`` of arrays by microbatch and slice. What
its layers give slice by slice goes into stacks of a chunk's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...graph import Instruction
from .emit import Builder, Editor, array_shape, resized, tuple_shape
from .layers import LayerLoop
from .parts import Kept, Pipeline
from .refusal import Refusal

SCALAR = "s32"


class Chunk:
    """``passed`` are the shapes of what goes from layer to layer, ``weights`` and ``shared`` those of what
    the new loop holds for its layers, by position in the carry of the loop over layers."""

    def __init__(
        self,
        editor: Editor,
        pipeline: Pipeline,
        size: int,
        weights: dict[int, Any],
        shared: dict[int, Any],
        given: Sequence[int],
    ) -> None:
        self.editor = editor
        self.pipeline = pipeline
        self.layers: LayerLoop = pipeline.layers
        self.size = size
        self.weights, self.shared = weights, shared
        self.given = tuple(given)  # positions of stacks that are wanted
        whole = list(self.layers.loop.shape.tuple_shapes)
        self.passed = [whole[i] for i in self.layers.passed]
        self.stacks = [resized(whole[i], [size, *whole[i].dimensions[1:]]) for i in self.given]
        self.kept = [i for i, w in pipeline.weights.items() if isinstance(w, Kept)]
        self.runs, self.rests = self._runs(), self._rests()

    def emit(
        self, b: Builder, working: Any, start: Any, first: Any, row: Any, xs: Sequence[Any],
        held: dict[int, Any],
    ) -> tuple[str, list[Any], list[Any]]:  # fmt: skip
        """Run the chunk from iteration ``start`` of the loop over layers on, whose first slice is ``first``.

        ``held`` are weights and what is shared. Gives the conditional's name, what goes on to the next chunk
        and the stacks; where it is not ``working`` all of them are zeros.
        """
        own = b.tuple([start, first, row, *xs, *(held[i] for i in self._held())])
        shape = tuple_shape([*self.passed, *self.stacks])
        chosen = b.conditional(working, [self.runs, self.rests], [own, b.tuple([])], shape)
        parts = b.elements(chosen)
        return chosen.name, parts[: len(self.passed)], parts[len(self.passed) :]

    def _held(self) -> list[int]:
        return [*self.weights, *self.shared]

    def _rests(self) -> Builder:
        b = self.editor.computation("interleaved.rests")
        b.parameter(tuple_shape([]))
        b.finish(b.tuple([b.zeros(s) for s in [*self.passed, *self.stacks]]))
        return b

    def _runs(self) -> Builder:
        layers = self.layers
        scalar = array_shape(SCALAR)
        shapes = dict(zip(layers.passed, self.passed, strict=True)) | self.weights | self.shared
        given = dict(zip(self.given, self.stacks, strict=True))
        order = sorted([layers.counter, *shapes, *given])
        whole = {layers.counter: scalar} | shapes | given
        carried = tuple_shape([*(whole[i] for i in order), scalar, scalar, scalar])
        # Computations are made before the one that calls them: callers come last in a module.
        layer = self._layer(carried, order)
        condition = self._more_layers(carried, order)
        b = self.editor.computation("interleaved.chunk")
        arguments = [scalar, scalar, scalar, *shapes.values()]
        start, first, row, *rest = b.elements(b.parameter(tuple_shape(arguments)))
        parts: dict[int, Any] = dict(zip(shapes, rest, strict=True)) | {layers.counter: start}
        parts |= {i: b.zeros(s) for i, s in given.items()}  # all of it is overwritten
        limit = b.add("add", scalar, [start, b.constant(self.size)])
        init = b.tuple([*(parts[i] for i in order), limit, first, row])
        done = b.add("while", carried, [init], called_computation_ids=[layer.id, condition.id])
        done.metadata.CopyFrom(layers.loop.proto.metadata)
        wanted = [*layers.passed, *self.given]
        b.finish(b.tuple([b.element(done, order.index(i)) for i in wanted]))
        return b

    def _more_layers(self, carried: Any, order: Sequence[int]) -> Builder:
        b = self.editor.computation("interleaved.more_layers")
        c = b.parameter(carried)
        counter = b.element(c, order.index(self.layers.counter))
        end = b.element(c, len(order))
        less = b.add("compare", array_shape("pred"), [counter, end], comparison_direction="LT")
        b.finish(less)
        return b

    def _layer(self, carried: Any, order: Sequence[int]) -> Builder:
        """The body of the loop over layers, for a carry of these positions and limit, first slice, row."""
        layers = self.layers
        body = layers.loop.called[0]
        b = self.editor.computation("interleaved.layer")
        c = b.parameter(carried)
        parts = {i: b.element(c, n) for n, i in enumerate(order)}
        limit, first, row = (b.element(c, len(order) + n) for n in range(3))
        env: dict[Instruction, Any] = {
            i: parts[i.proto.tuple_index]
            for i in body.instructions
            if body.parameters[0] in i.operands and i.proto.tuple_index in parts
        }
        for position in self.kept:
            for taken in layers.slices[position]:
                self._check_direct(taken)
                b.clone(taken.operands[1:], env)
                starts = [row, *(env[o] for o in taken.operands[1:])]
                sizes = list(taken.shape.dimensions)
                part = b.slice(parts[position], starts, [1, *sizes])
                env[taken] = b.reshape(part, sizes)
        results = dict(parts)
        for position in self.given:
            put = layers.updates[position]
            self._check_direct(put)
            b.clone(put.operands[1:], env)
            at, *others = (env[o] for o in put.operands[2:])
            own = b.add("subtract", at.shape, [at, first])
            results[position] = b.update(parts[position], env[put.operands[1]], [own, *others])
        for position in [layers.counter, *layers.passed]:
            root = body.root.operands[position]
            results[position] = b.clone([root], env)[root]
        b.finish(b.tuple([*(results[i] for i in order), limit, first, row]))
        return b

    def _check_direct(self, instruction: Instruction) -> None:
        """Slices are read and written otherwise here: they must be what the body itself reads and writes."""
        array = instruction.operands[0]
        body = self.layers.loop.called[0]
        scalar = array_shape(SCALAR).element_type
        first = instruction.operands[1 if instruction.opcode == "dynamic-slice" else 2]
        if (
            instruction.computation is not body
            or array.opcode != "get-tuple-element"
            or array.operands[0] is not body.parameters[0]
            or first.shape.element_type != scalar
        ):
            raise Refusal(
                f"{instruction.describe()} does not read or write its slice as a scan does"
            )
