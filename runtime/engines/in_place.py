"""Conditionals that hand arrays on in one branch, as loops that run the other branch once or not at all.

XLA's CPU backend copies an array that a branch gives as it was given, though the other branch updates it in
place: in a pipeline's loop, all that layers keep and all sums of gradients, in each iteration in which a
device does not run them. What a loop hands on is not copied. So

    y, kept = if p { run(x, kept) } else { (0, kept) }

becomes, with the results of the second branch to begin with,

    y, kept = while p { y, kept = run(x, kept); p = false }  from  (0, kept)
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

from jax._src.interpreters import mlir
from jaxlib.mlir import ir

_IF, _WHILE, _RETURN = "stablehlo.if", "stablehlo.while", "stablehlo.return"
_CONSTANT = "stablehlo.constant"
# What the second branch may compute, which is then computed in any case.
_FREE = frozenset({_CONSTANT, "stablehlo.convert", "stablehlo.broadcast_in_dim"})


def in_place(module: bytes) -> bytes:
    """A module of StableHLO as bytecode, rewritten; the same bytes where there is nothing to rewrite."""
    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        found: list[Any] = []

        def visit(operation: Any) -> Any:
            if operation.name == _IF:
                found.append(operation)
            return ir.WalkResult.ADVANCE

        parsed.operation.walk(visit)  # inner ones come before those around them
        if not any([_as_loop(conditional) for conditional in found]):
            return module
        written = BytesIO()
        parsed.operation.write_bytecode(written)
        return written.getvalue()


def _as_loop(conditional: Any) -> bool:
    """Rewrite a conditional, if its second branch only hands on what the first one gives anew."""
    runs, rests = (region.blocks[0] for region in conditional.regions)
    *free, ends = list(rests.operations)
    if any(operation.operation.name not in _FREE for operation in free):
        return False
    fresh = {result for operation in free for result in operation.operation.results}
    begin, made = list(ends.operation.operands), list(_last(runs).operands)
    updated = [b != m and b not in fresh for b, m in zip(begin, made, strict=True)]
    # One result alone is what a branch chooses, such as the input of a stage.
    if not any(updated) or len(begin) == 1:
        return False
    for operation in free:
        operation.operation.move_before(conditional)
    predicate = conditional.operands[0]
    types = [predicate.type, *(value.type for value in begin)]
    loop = ir.Operation.create(
        _WHILE, types, [predicate, *begin], regions=2, ip=ir.InsertionPoint(conditional),
        loc=conditional.location,
    )  # fmt: skip
    places = [conditional.location] * len(types)
    condition, body = (ir.Block.create_at_start(region, types, places) for region in loop.regions)
    with ir.InsertionPoint(condition):
        ir.Operation.create(_RETURN, operands=[condition.arguments[0]])
    for operation in list(runs.operations):
        body.append(operation.operation)
    last = _last(body)
    with ir.InsertionPoint(last):
        false = ir.DenseElementsAttr.get_splat(predicate.type, ir.BoolAttr.get(False))
        over = ir.Operation.create(_CONSTANT, [predicate.type], attributes={"value": false})
        ir.Operation.create(_RETURN, operands=[over.result, *last.operands])
    last.erase()
    carried = list(body.arguments)[1:]
    for value, own, is_updated in zip(begin, carried, updated, strict=True):
        if is_updated:
            _replace_in(body, value, own)
    for result, value in zip(conditional.results, list(loop.results)[1:], strict=True):
        result.replace_all_uses_with(value)
    conditional.erase()
    return True


def _last(block: Any) -> Any:
    return list(block.operations)[-1].operation


def _replace_in(block: Any, value: Any, other: Any) -> None:
    def visit(operation: Any) -> Any:
        operation.replace_uses_of_with(value, other)
        return ir.WalkResult.ADVANCE

    for operation in block.operations:
        operation.operation.walk(visit)
