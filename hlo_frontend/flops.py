"""Floating point operations and arithmetic of instructions: the only model of them.

The counts are those of XLA's `HloCostAnalysis` (``lowered.cost_analysis()["flops"]``), with these
differences:

- Functions like exp and tanh count one for each element. XLA lists them apart, as transcendentals.
- A loop counts as often as it runs, if its annotation says so (`trips`). A branch of a conditional
  counts as often as it is taken, if that is said; else the one that takes most counts.
- A `bitcast-convert` is a view of its operand's memory and counts nothing.
- Other ops that compute (`ops.Op.arithmetic`) and have no rule here count one for each element of their
  result. XLA has formulas for FFTs, Cholesky factors and triangular solves, and none for custom calls.

How many bytes are moved depends on what is fused: see `overlap.pricing.kernel_cost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, gcd, prod
from operator import mul
from typing import Any

from .graph import Computation, Instruction
from .ops import op_of
from .trips import annotated_trips, expected_shares, expected_trips


def arithmetic(instructions: Iterable[Instruction]) -> int:
    """The number of arithmetic instructions in one run.

    Loops count as often as they run, once if that is not known, branches of a conditional all;
    computations applied to each element of an op count as part of that op.
    """
    count = 0
    for instruction in instructions:
        if instruction.opcode in _CALLS:
            times = expected_trips(instruction)
            count += times * sum(arithmetic(called.instructions) for called in instruction.called)
        count += op_of(instruction.opcode).arithmetic
    return count


def iterations(instructions: Iterable[Instruction]) -> int:
    """How many iterations all loops make in one run, inner ones each time; -1 if that is not known."""
    count = 0
    for instruction in instructions:
        inner = [iterations(called.instructions) for called in instruction.called]
        times: int | None = 1
        if instruction.opcode == "while":
            times = annotated_trips(instruction)
            inner.append(1)
        if times is None or -1 in inner:
            return -1
        count += times * sum(inner)
    return count


def flops(instruction: Instruction) -> float:
    """Floating point operations of one run.

    Two for each multiplication of a dot or a convolution; those of its computation wherever an op applies
    one; for other ops that compute, one for each element of the result.
    """
    rule = _RULES.get(instruction.opcode)
    if rule is not None:
        return rule(instruction)
    return float(_elements(instruction.shape)) if op_of(instruction.opcode).arithmetic else 0.0


def flops_of(instructions: Iterable[Instruction]) -> float:
    """Floating point operations of one run of all of them."""
    return sum(map(flops, instructions))


def _elements(shape: Any) -> int:
    if shape.tuple_shapes:
        return sum(map(_elements, shape.tuple_shapes))
    return prod(shape.dimensions)


def _applied(computation: Computation) -> float:
    return flops_of(computation.instructions)


def _called(call: Instruction) -> float:
    return expected_trips(call) * sum(map(_applied, call.called))


def _conditional(conditional: Instruction) -> float:
    applied = [_applied(called) for called in conditional.called]
    return sum(map(mul, expected_shares(conditional, applied), applied))


def _dot(dot: Instruction) -> float:
    left = dot.operands[0].shape.dimensions
    contracted = dot.proto.dot_dimension_numbers.lhs_contracting_dimensions
    return 2.0 * _elements(dot.shape) * prod(left[d] for d in contracted)


def _convolution(convolution: Instruction) -> float:
    """Multiplications with padding, and with the holes that dilation makes, are not counted."""
    left, kernel = (operand.shape.dimensions for operand in convolution.operands)
    result, proto = convolution.shape.dimensions, convolution.proto
    numbers = proto.convolution_dimension_numbers
    # A result element reads the input features of its group; a group of batches has its own kernels.
    per_position = (
        result[numbers.output_batch_dimension]
        * result[numbers.output_feature_dimension]
        * kernel[numbers.kernel_input_feature_dimension]
    )
    positions = 1
    for i, window in enumerate(proto.window.dimensions):
        positions *= _positions(
            window,
            left[numbers.input_spatial_dimensions[i]],
            result[numbers.output_spatial_dimensions[i]],
        )
    return 2.0 * per_position * positions


def _positions(window: Any, size: int, results: int) -> int:
    """Pairs of a result and a kernel element, along one dimension, that meet an element of the operand."""
    stride, holes = max(1, window.stride), max(1, window.base_dilation)
    apart = holes // gcd(stride, holes)  # results that meet an element are so far apart
    last = (size - 1) * holes
    found = 0
    for k in range(window.size):
        at = k * max(1, window.window_dilation) - window.padding_low  # where result 0 reads
        first = max(0, ceil(-at / stride))
        end = min(results, (last - at) // stride + 1)
        meets = (r for r in range(first, min(end, first + apart)) if not (at + r * stride) % holes)
        start = next(meets, end)
        found += max(0, -(-(end - start) // apart))
    return found


def _reduce(reduce: Instruction) -> float:
    count = len(reduce.operands) // 2
    read = sum(_elements(operand.shape) for operand in reduce.operands[:count])
    combined = (read - _elements(reduce.shape)) // max(1, count)
    return max(0, combined) * _applied(reduce.called[0])


def _reduce_window(reduce: Instruction) -> float:
    count = max(1, len(reduce.operands) // 2)
    combined = prod(d.size for d in reduce.proto.window.dimensions) - 1
    return _elements(reduce.shape) // count * combined * _applied(reduce.called[0])


def _select_and_scatter(op: Instruction) -> float:
    select, scatter = map(_applied, op.called)
    compared = prod(d.size for d in op.proto.window.dimensions) - 1
    return _elements(op.operands[1].shape) * (compared * select + scatter)


def _map(op: Instruction) -> float:
    return _elements(op.shape) * _applied(op.called[0])


def _scatter(scatter: Instruction) -> float:
    return _elements(scatter.operands[-1].shape) * _applied(scatter.called[0])


def _sort(sort: Instruction) -> float:
    size = _elements(sort.operands[0].shape)
    return float(size * max(0, size - 1).bit_length())


_CALLS = frozenset({"call", "fusion", "async-start", "while", "conditional"})

_RULES: dict[str, Callable[[Instruction], float]] = {
    **dict.fromkeys(_CALLS, _called),
    "conditional": _conditional,
    "convolution": _convolution,
    "dot": _dot,
    "map": _map,
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "scatter": _scatter,
    "select-and-scatter": _select_and_scatter,
    "sort": _sort,
}
