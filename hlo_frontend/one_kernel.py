"""Segments of regions that XLA compiles to one kernel: those that take less to compute than to start.

XLA's CPU backend makes a kernel of each fusion and starts them one after the other. Where there are more than
a few it also hands half of what is ready to a pool of threads, which are woken for it and spin when they are
done. For operations on a few kilobytes all of that takes longer than computing them: of the gradient in
`benchmarks/users/ode.py` a seventh of the processor time was spent in kernels. A function that is not inlined
and whose calls are marked becomes one kernel. XLA itself marks loops that touch less than 1 KiB.

Such a kernel has neither libraries nor threads. So `prepare` admits only operations that XLA's own loops may
have, on arrays of `MOST_BYTES`, and writes dots, which may be calls of a library, as products and sums.

XLA ends the process when it makes a kernel of a function with a parameter that nothing reads, as its own
simplification leaves behind: of an index that can only be 0, of a constant that it folds into what is
called, or of what a loop hands on for nobody. So a function with parameters that may come to that gives one
more result, for which it reads an element of each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from math import prod
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from stretto.runtime.errors import UnsupportedError

from . import stablehlo

# Bytes of the largest array up to which starting a kernel takes longer than what its threads would save.
MOST_BYTES = 1 << 16
# Operations that a segment must have, or XLA starts no more kernels than this makes.
FEWEST = 4
# A dot's products, and those of one element, up to which plain loops are as fast as a library: they add one
# after the other. Of 4,096 products and more XLA calls a library for the sums (jaxlib 0.10).
_MOST_PRODUCTS, _LONGEST_SUM = (1 << 12) - 1, 64
# Elements of all that is reduced up to which it does not, with a margin.
_MOST_REDUCED = 1 << 10

# Floats of 16 bits are not among them: each operation on them converts.
_ELEMENTS = frozenset(
    {"pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f32", "f64", "c64", "c128"}
)
_DOT = "stablehlo.dot_general"


def _named(names: str) -> frozenset[str]:
    return frozenset(f"stablehlo.{name}" for name in names.split())


_COMPUTE = _named(
    "abs add and atan2 cbrt ceil clamp compare complex cosine count_leading_zeros divide dot_general "
    "exponential exponential_minus_one floor imag is_finite log log_plus_one logistic maximum minimum "
    "multiply negate not or popcnt power real reduce remainder round_nearest_afz round_nearest_even rsqrt "
    "select shift_left shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan tanh xor"
)
_MOVE = _named(
    "broadcast_in_dim concatenate constant convert bitcast_convert dynamic_slice dynamic_update_slice gather "
    "iota optimization_barrier pad reshape reverse slice transpose"
)
_FLOW = _named("case if return while") | {"func.func", "func.return", "func.call", "builtin.module"}
_EMITTED = _COMPUTE | _MOVE | _FLOW


def prepare(module: ir.Module) -> bool:
    """Whether a segment can be one kernel, and is better as one. Then its dots are written as sums, and its
    function may have one more result, of s32, that nobody needs."""
    dots, count = [], 0
    for operation in stablehlo.operations(module):
        name = operation.name
        if name not in _EMITTED or not all(map(_is_small, operation.results)):
            return False
        count += name in _COMPUTE
        if name == _DOT:
            if not _is_small_dot(operation):
                return False
            dots.append(operation)
        elif name == "stablehlo.reduce" and _size(operation.operands[0]) > _MOST_REDUCED:
            return False
    function = stablehlo.main(module)
    if count < FEWEST or not all(_is_small(a) and _size(a) for a in function.arguments):
        return False
    for operation in dots:
        _write_as_sum(operation)
    _read_all(function)
    return True


def mark(call: Any, function: Any) -> None:
    """Have a call of a prepared segment, which is ``function``, be one kernel.

    Its operands are behind barriers, so that XLA folds no constants into what is called.
    """
    said = {"inlineable": "false", "xla_cpu_small_call": "true"}
    attributes = {key: ir.StringAttr.get(value) for key, value in said.items()}
    with ir.InsertionPoint(call), call.location:
        made = ir.Operation.create(
            "func.call",
            results=ir.FunctionType(function.type).results,
            operands=[hlo.OptimizationBarrierOp([operand]).results[0] for operand in call.operands],
            attributes={
                "callee": call.attributes["callee"],
                "mhlo.frontend_attributes": ir.DictAttr.get(attributes),
            },
        )
    for old, new in zip(call.results, made.results, strict=False):
        old.replace_all_uses_with(new)
    call.erase()


def _keep(block: Any, kept: set[ir.Value], live: Collection[int] | None = None) -> None:
    """Add to ``kept`` the values on which, for all that XLA finds, something depends that the block gives.
    ``live``: the positions of what it gives that somebody reads, all if None.

    What is simple it has found already, in the whole program: what it may still find to be without use are
    numbers and arrays that only say where to look, what is overwritten as a whole, and what a loop or a
    branch hands on for nobody.
    """
    *operations, ends = block.operations
    kept.update(v for i, v in enumerate(ends.operands) if live is None or i in live)
    for operation in reversed(operations):
        if operation.operation.name in _FLOW:
            read = {i for i, result in enumerate(operation.results) if result in kept}
            if read:
                kept.update(operation.operands[i] for i in _kept_by_flow(operation, kept, read))
            continue
        for region in operation.operation.regions:
            for inner in region:
                _keep(inner, kept)
        kept.update(o for i, o in enumerate(operation.operands) if _keeps(operation, i, kept))


def _kept_by_flow(operation: Any, kept: set[ir.Value], live: set[int]) -> set[int]:
    """The positions of what a loop, a branch or a call is given that is kept, where its results at ``live``
    are. What its regions take from outside is added to ``kept``."""
    name, blocks = operation.operation.name, [region.blocks[0] for region in operation.regions]
    if name == "func.call":
        block = _callee(operation).entry_block
        inner: set[ir.Value] = set()
        _keep(block, inner, live)
        return {i for i, argument in enumerate(block.arguments) if argument in inner}
    if name != "stablehlo.while":
        for block in blocks:
            _keep(block, kept, live)
        return {0}
    condition, body = blocks
    _keep(condition, kept)
    while True:
        _keep(body, kept, live)
        both = zip(condition.arguments, body.arguments, strict=True)
        more = {i for i, own in enumerate(both) if kept.intersection(own)}
        if more <= live:
            return live
        live = live | more


def _callee(call: Any) -> Any:
    module = call.operation.parent
    while module.name != "builtin.module":
        module = module.operation.parent
    name = ir.FlatSymbolRefAttr(call.operation.attributes["callee"]).value
    return ir.SymbolTable(module.operation)[name]


def _keeps(operation: Any, position: int, kept: set[ir.Value]) -> bool:
    """Whether an operand is kept, where these are of what follows."""
    name, results = operation.operation.name, list(operation.results)
    if name == "stablehlo.optimization_barrier":
        return results[position] in kept
    if name in ("stablehlo.dynamic_slice", "stablehlo.gather") and position > 0:
        return False
    if name == "stablehlo.dynamic_update_slice":
        whole = _size(operation.operands[1]) == _size(operation.operands[0])
        if position > 1 or (position == 0 and whole):
            return False
    return any(result in kept for result in results)


def _read_all(function: Any) -> None:
    """Add a result, a scalar of s32 to which an element of each argument contributes that may be left."""
    block = function.entry_block
    kept: set[ir.Value] = set()
    _keep(block, kept)
    left = [argument for argument in block.arguments if argument not in kept]
    if not left:
        return
    (returned,) = [o for o in block.operations if o.operation.name == "func.return"]
    with function.context, function.location, ir.InsertionPoint(returned):
        scalar = _scalar()
        words = [_word(argument, scalar) for argument in left]
        total = reduce(lambda one, other: _made("xor", scalar, [one, other]), words)
        ir.Operation.create("func.return", operands=[*returned.operands, total])
        old = ir.FunctionType(function.type)
        new = ir.FunctionType.get(old.inputs, [*old.results, scalar])
        function.attributes["function_type"] = ir.TypeAttr.get(new)
    returned.operation.erase()


def _scalar() -> ir.Type:
    """The type of a scalar of s32."""
    return ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))


def _word(argument: ir.Value, scalar: ir.Type) -> ir.Value:
    """A scalar of s32 that follows from the bits of an array's first element."""
    type_ = ir.RankedTensorType(argument.type)
    rank = type_.rank
    first = argument
    if rank:
        one = ir.RankedTensorType.get([1] * rank, type_.element_type)
        bounds = {"start_indices": [0] * rank, "limit_indices": [1] * rank, "strides": [1] * rank}
        cut = {key: _integers(value) for key, value in bounds.items()}
        first = _made("slice", one, [argument], **cut)
        first = _made("reshape", ir.RankedTensorType.get([], type_.element_type), [first])
    element = type_.element_type
    if isinstance(element, ir.ComplexType):
        element = element.element_type
        first = _made("real", ir.RankedTensorType.get([], element), [first])
    if isinstance(element, ir.FloatType):  # conversions of what is too large are not all alike
        bits = ir.RankedTensorType.get([], ir.IntegerType.get_signless(element.width))
        first = _made("bitcast_convert", bits, [first])
    return first if first.type == scalar else _made("convert", scalar, [first])


def _is_small(value: ir.Value) -> bool:
    try:
        type_ = stablehlo.tensor_type(value.type)
    except UnsupportedError:
        return False
    return type_.dtype in _ELEMENTS and type_.nbytes <= MOST_BYTES


def _size(value: ir.Value) -> int:
    return stablehlo.tensor_type(value.type).size


def _is_small_dot(dot: Any) -> bool:
    left, right, result = (stablehlo.tensor_type(v.type) for v in (*dot.operands, dot.results[0]))
    if not left.dtype == right.dtype == result.dtype or result.dtype not in ("f32", "f64"):
        return False
    numbers = hlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    summed = prod(left.shape[d] for d in numbers.lhs_contracting_dimensions)
    return summed <= _LONGEST_SUM and result.size * summed <= _MOST_PRODUCTS


def _write_as_sum(dot: Any) -> None:
    """Put a sum of products in the place of a dot. Both operands are broadcast to the dimensions of the
    batch, those of the left alone, those of the right alone, and those that are summed over."""
    left, right = dot.operands
    numbers = hlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    batch = list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions)
    summed = list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)
    shapes = [stablehlo.tensor_type(v.type).shape for v in (left, right)]
    own = [
        [d for d in range(len(shape)) if d not in batch[k] and d not in summed[k]]
        for k, shape in enumerate(shapes)
    ]
    wide = [
        *(shapes[0][d] for d in (*batch[0], *own[0])),
        *(shapes[1][d] for d in own[1]),
        *(shapes[0][d] for d in summed[0]),
    ]
    batches, free = len(batch[0]), len(batch[0]) + len(own[0])
    outer = free + len(own[1])
    places = [
        [*range(free), *range(outer, len(wide))],
        [*range(batches), *range(free, len(wide))],
    ]
    element = ir.RankedTensorType(dot.results[0].type).element_type
    with dot.context, dot.location, ir.InsertionPoint(dot):
        spread = []
        for k, value in enumerate((left, right)):
            order = [*batch[k], *own[k], *summed[k]]
            moved = ir.RankedTensorType.get([shapes[k][d] for d in order], element)
            if order != sorted(order):
                ordered = _made("transpose", moved, [value], permutation=_integers(order))
            else:
                ordered = value
            wider = ir.RankedTensorType.get(wide, element)
            spread.append(
                _made(
                    "broadcast_in_dim", wider, [ordered], broadcast_dimensions=_integers(places[k])
                )
            )
        products = _made("multiply", wider, spread)
        scalar = ir.RankedTensorType.get([], element)
        zero = _made(
            "constant",
            scalar,
            [],
            value=ir.DenseElementsAttr.get_splat(scalar, ir.FloatAttr.get(element, 0.0)),
        )
        reduce = ir.Operation.create(
            "stablehlo.reduce",
            results=[dot.results[0].type],
            operands=[products, zero],
            attributes={"dimensions": _integers(range(outer, len(wide)))},
            regions=1,
        )
        block = reduce.regions[0].blocks.append(scalar, scalar)
        with ir.InsertionPoint(block):
            total = _made("add", scalar, list(block.arguments))
            ir.Operation.create("stablehlo.return", operands=[total])
    dot.results[0].replace_all_uses_with(reduce.results[0])
    dot.erase()


def _integers(values: Sequence[int]) -> ir.Attribute:
    return ir.DenseI64ArrayAttr.get(list(values))


def _made(name: str, result: ir.Type, operands: Sequence[ir.Value], **attributes: Any) -> ir.Value:
    """The result of a new operation at the place where others are put."""
    made = ir.Operation.create(
        f"stablehlo.{name}", results=[result], operands=list(operands), attributes=attributes
    )
    return made.results[0]
