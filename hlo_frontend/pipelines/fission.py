"""Splits loops within a layer backwards into one that goes on and one that only gradients of weights need.

A stage may have its layers in a loop of its own, within what the pipeline takes for one layer. Backwards it
gives the gradient of what it took, and stacks of those of its weights, made of products that nothing else in
it reads (`split`). Such a loop becomes two: the first one stacks what these products read, and the second
one makes them of that. So a schedule with runs of weights can leave the second one to them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..builder import resized
from ..collectives import CollectiveReader
from ..graph import Instruction, Module
from .chunk import LayerRun
from .emit import Builder, Editor, slice_of
from .layers import LayerLoop, layer_loop
from .refusal import Refusal
from .split import split


def fissioned(
    module: Module, layers: LayerLoop, sums: Collection[int], reader: CollectiveReader
) -> Module | None:
    """The module with the loops in a layer's body in two, where that can be; None if there are none.

    ``sums``: positions of the layers' stacks that are gradients of weights.
    """
    body = layers.loop.called[0]
    passed = [body.root.operands[p] for p in layers.passed]
    goes_on = set(slice_of(passed, set()))
    gradients = set(slice_of([layers.updates[i].operands[1] for i in sums], goes_on))
    found: list[tuple[LayerLoop, list[int]]] = []
    for loop in body.instructions:
        if loop.opcode != "while" or loop not in goes_on:
            continue
        reads = [i for i in body.instructions if loop in i.operands]
        if any(i.opcode != "get-tuple-element" for i in reads):
            continue
        try:
            inner = layer_loop(loop, reader)
        except Refusal:  # it stays whole, and gives its gradients at once
            continue
        own = {i.proto.tuple_index for i in reads if i in gradients and i not in goes_on}
        wanted = sorted(own.intersection(inner.updates))
        if wanted and loop.operands[0].opcode == "tuple":
            found.append((inner, wanted))
    if not found:
        return None
    editor = Editor(module)
    b = editor.within(body)
    for inner, wanted in found:
        _in_two(b, inner, wanted)
    editor.sweep(body)
    return Module.parse(editor.finish())


def _in_two(b: Builder, inner: LayerLoop, wanted: list[int]) -> None:
    """Put two loops beside one, the second of which gives the stacks ``wanted``, and have them read."""
    loop, body, count = inner.loop, inner.loop.computation, inner.count
    left = split(inner, wanted, ()).left
    whole = loop.shape.tuple_shapes
    left_shapes = {
        key: resized(v.shape, [1, count, *v.shape.dimensions]) for key, v in left.items()
    }
    same = [*inner.weights, *inner.shared]
    parts: dict[int, Any] = {i: loop.operands[0].operands[i].proto for i in [*same, *inner.passed]}
    others = [i for i in inner.stacked if i not in wanted]
    zero = b.constant(0)
    first = LayerRun(
        b.editor, inner, count, {i: whole[i] for i in parts},
        {i: whole[i] for i in others} | left_shapes, (), (), leaves=left,
    )  # fmt: skip
    begun = parts | {key: b.zeros(shape) for key, shape in left_shapes.items()}
    done = first.emit(b, begun, zero, zero, zero)
    held = {i: whole[i] for i in same}
    second = LayerRun(
        b.editor,
        inner,
        count,
        held | left_shapes,
        {i: whole[i] for i in wanted},
        (),
        (),
        given=left,
    )
    given = {i: parts[i] for i in same} | {key: done[key] for key in left}
    done |= second.emit(b, given, zero, zero, zero)
    stands: dict[Instruction, Any] = {}
    for read in body.instructions:
        if loop in read.operands:
            position = read.proto.tuple_index
            if position == inner.counter:
                stands[read] = b.constant(count)
            else:
                stands[read] = done[position] if position in done else parts[position]
    b.editor.redirect(body, stands, body.instructions)
