"""How much arithmetic instructions are: counts for reports and tests, not a cost model of a machine."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from .graph import Instruction, trip_count

# Ops that compute nothing: they move, make or view data.
_NO_ARITHMETIC = frozenset(
    {
        "parameter", "constant", "iota", "tuple", "get-tuple-element", "copy", "bitcast", "broadcast",
        "reshape", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate",
        "pad", "reverse", "gather", "after-all", "opt-barrier", "call", "while", "conditional",
        "fusion", "add-dependency", "partition-id", "replica-id", "copy-start", "copy-done",
        "async-start", "async-update", "async-done",
    }
)  # fmt: skip


def arithmetic_and_flops(instructions: Iterable[Instruction]) -> tuple[int, float]:
    """Number of arithmetic instructions and floating point operations of one run.

    Loops count as often as they run, once if that is not known, branches of a conditional all;
    computations applied to each element of an op count as part of that op. A dot counts two operations
    for each multiplication, other ops one for each element of their largest operand or result.
    """
    count, flops = 0, 0.0
    for instruction in instructions:
        if instruction.opcode in ("call", "while", "conditional", "fusion", "async-start"):
            times = 1
            if instruction.opcode == "while":
                known = trip_count(instruction)
                times = 1 if known is None else known
            for called in instruction.called:
                inner_count, inner_flops = arithmetic_and_flops(called.instructions)
                count += times * inner_count
                flops += times * inner_flops
        if instruction.opcode in _NO_ARITHMETIC:
            continue
        count += 1
        sizes = [prod(instruction.shape.dimensions)]
        sizes += [prod(operand.shape.dimensions) for operand in instruction.operands]
        if instruction.opcode == "dot":
            left = instruction.operands[0].shape.dimensions
            contracted = instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions
            flops += 2.0 * sizes[0] * prod(left[d] for d in contracted)
        else:
            flops += float(max(sizes))
    return count, flops
