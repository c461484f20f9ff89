"""Checks that the shapes of a module's instructions fit each other, for HLO of unknown origin.

XLA verifies modules that it compiles, but a module from a file was never compiled. XLA's parser and loader
count operands, and do not check shapes. This package checks the shapes on which the front end relies: of ops
that hand on their operands, of elementwise ops, and of calls. The engine that compiles a segment checks all
others. Layouts are ignored. The rules are in tables by opcode, beside their functions: `arrays` (ops that
compute), `calls` (calls and collectives), `transfers` (sends, receives, starts and dones). `partitioned`
recognizes modules that XLA has yet to partition.

Source of the rules: XLA's ``hlo_verifier`` and ``shape_inference``.
"""

from __future__ import annotations

from ..graph import Module
from ..ops import op_of
from . import arrays, calls, transfers
from .partitioned import check_partitioned as check_partitioned
from .shapes import check_possible
from .transfers import check_alone, in_flight, may_read

_RULES = {**arrays.RULES, **calls.RULES, **transfers.RULES}


def verify(module: Module) -> None:
    """Raise `InvalidProgramError`, naming the instruction, if shapes contradict each other.

    Raises `UnsupportedError` for a group of sends and receives.
    """
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "async-start":
                check_alone(instruction)
    for computation in module.computations:
        for instruction in computation.instructions:
            check_possible(instruction.shape, instruction)
            count = op_of(instruction.opcode).operands
            if count is not None and not count[0] <= len(instruction.operands) <= count[1]:
                expected = str(count[0]) if count[0] == count[1] else f"at least {count[0]}"
                raise instruction.invalid(
                    f"has {len(instruction.operands)} operands, and needs {expected}"
                )
            for operand in instruction.operands:
                if in_flight(operand) and not may_read(instruction, operand):
                    raise instruction.invalid(
                        f"reads {operand.name}, which is still in flight; read its -done instead"
                    )
            rule = _RULES.get(instruction.opcode)
            if rule is not None:
                rule(instruction)
        if in_flight(computation.root):
            raise computation.root.invalid("it is a result, and still in flight")
